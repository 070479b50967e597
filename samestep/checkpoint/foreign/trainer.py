"""Reads folders of Hugging Face's Trainer: model, optimizer.pt and trainer_state.json.

optimizer.pt knows parameters by number: those with weight decay first, then those without, each in
the model's order. The files of the model have names, but in another order, so that the order has to
come from the model: given, or built from config.json by transformers if that is installed.
"""

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from samestep.checkpoint.claims import by_name
from samestep.checkpoint.foreign import safe
from samestep.checkpoint.foreign.naming import HOW, groups_of_trainer
from samestep.checkpoint.foreign.torch_save import add_optimizers, is_optimizer, model_in
from samestep.checkpoint.sources import Collected, Source, SourceOptions, model_name
from samestep.checkpoint.storage import CheckpointError, claims_of

OPTIMIZER, STATE, CONFIG = "optimizer.pt", "trainer_state.json", "config.json"
SAFE, SHARDS, PICKLED = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
KEPT = ("global_step", "epoch", "max_steps")


def is_trainer(path: Path) -> bool:
    return (path / OPTIMIZER).is_file() and (path / STATE).is_file()


def read(path: Path, given: SourceOptions) -> Source:
    """Read a checkpoint, or only its model."""
    names, model = given.names, given.model
    if not (path / OPTIMIZER).is_file():
        inside = [name for name in ("optimizer_0", "optimizer") if (path / name).is_dir()]
        way = f"; convert {path / inside[0]} with --from dcp" if inside else ""
        raise CheckpointError(f"{path} is no checkpoint of Trainer: it has no {OPTIMIZER}{way}")
    opt = safe.load(path / OPTIMIZER)
    if not is_optimizer(opt):
        raise CheckpointError(f"{path / OPTIMIZER} has no state dict of an optimizer")
    values = _weights(path)
    if given.only == "model":
        opt = {"state": {}, "param_groups": []}
    elif names is None and not any("param_names" in group for group in opt["param_groups"]):
        model = _built(path) if model is None else model
        names = _order(path, opt, model)
    collected = Collected()
    facts = add_optimizers(collected, path / OPTIMIZER, [opt], names, values, None)
    for name, tensor in values.items():
        collected.add(model_name(name), tensor, name)
    for name, same in _tied(model).items():
        if model_name(same) in collected and model_name(name) not in collected:
            collected.add_same(model_name(name), model_name(same))
    state = safe.read_json(path / STATE) if (path / STATE).is_file() else {}
    extra = {key: state[key] for key in KEPT if key in state}
    others = ("scheduler.pt", "scaler.pt", "rng_state.pth")
    left = facts["left_out"] + [name for name in others if (path / name).exists()]
    return collected.source(left_out=left, extra={"trainer": extra})


def _weights(path: Path) -> dict[str, Tensor]:
    if (path / SAFE).is_file():
        return safe.safetensors(path / SAFE)
    if (path / SHARDS).is_file():
        with claims_of(path / SHARDS):
            named = set(safe.read_json(path / SHARDS)["weight_map"].values())
            files = sorted(by_name(path, file) for file in named)
        return {name: t for file in files for name, t in safe.safetensors(file).items()}
    if (path / PICKLED).is_file():
        return model_in(safe.load_dict(path / PICKLED))
    raise CheckpointError(
        f"{path} has no {SAFE}, {SHARDS} or {PICKLED}: without one of these files its "
        "parameters have no names"
    )


def _tied(model: nn.Module | None) -> dict[str, str]:
    """Further names of tied parameters, such as a head that is the embedding."""
    first: dict[int, str] = {}
    every = [] if model is None else list(model.named_parameters(remove_duplicate=False))
    for name, param in every:
        first.setdefault(id(param), name)
    return {name: first[id(param)] for name, param in every if first[id(param)] != name}


def _order(path: Path, opt: Any, model: nn.Module) -> list[list[str]]:
    groups = groups_of_trainer(model)
    sizes = [len(group["params"]) for group in opt["param_groups"]]
    if [len(own) for own in groups] == sizes:
        return groups
    if sizes == [sum(map(len, groups))]:
        return [[name for name, param in model.named_parameters() if param.requires_grad]]
    raise CheckpointError(
        f"{path / OPTIMIZER} has groups of {sizes} parameters, and the model has "
        f"{len(groups[0])} that Trainer decays and {len(groups[1])} others: {HOW}"
    )


def _built(path: Path) -> nn.Module:
    """Build the model of config.json on the meta device, if transformers is installed."""
    try:
        import torch
        import transformers
    except ImportError:
        raise CheckpointError(
            f"{path / OPTIMIZER} has numbers instead of names, and transformers, which "
            f"would build the model from {CONFIG} to find them, is not installed: "
            f"install it, or {HOW}"
        ) from None
    try:
        # No code that the folder brings or names on a hub.
        config = transformers.AutoConfig.from_pretrained(
            path, trust_remote_code=False, local_files_only=True, attn_implementation="eager"
        )
        kind = getattr(transformers, str((config.architectures or ["?"])[0]))
        if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
            raise TypeError(f"{kind} is no model of transformers")
        with torch.device("meta"):
            built: nn.Module = kind(config)
    except Exception as error:  # whatever transformers raises
        reason = str(error).split("\n")[0]
        raise CheckpointError(
            f"{path / CONFIG} describes no model that transformers can build ({reason}): {HOW}"
        ) from None
    built.tie_weights()  # type: ignore[operator]
    return built
