"""What is taken out of files of others, before anything is written: torch.save's, and nanochat's.

Of torch.save there are state dicts of models and of torch's optimizers.

Optimizer files of nanochat are one per rank, with parameters by number and Muon's state in stacks.
Muon's state of a group is that of its first parameter: in the file of rank r the matrices r k to
r k + k - 1 of the group, zeros where there are no more. AdamW's is whole if the parameter is small
or there is one rank, and else a slice of dim 0. The files have no names, so these must be given.
"""

import json
import pickle
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from samestep.checkpoint.logical import MODEL, GroupFacts, Pieces, Tensors, plain_options, state_key
from samestep.checkpoint.storage import CheckpointError
from samestep.groups.param_groups import own_spelling
from samestep.groups.routing import without_wrappers
from samestep.layout.boxes import Box, HeldBox, whole_box
from samestep.optimizer.loading import PART
from samestep.presets import preset_options
from samestep.rules import RULES

# How a rule is known by the state that it leaves, in torch's words, which are ours.
LEAVES = {"momentum_buffer": "muon", "exp_avg": "adamw"}
META = torch.device("meta")
MODELS = ("model", "model_state_dict", "state_dict", "module")
OPTIMIZERS = ("optimizer", "optimizer_state_dict", "optim", "optimizer_state")
HOW = "give the names of each group's parameters with --names (docs/checkpoints.md says how)"
SAME_THERE = ("lr", "initial_lr", "betas", "eps", "weight_decay", "momentum", "ns_steps")

Content = Mapping[str, Any]
Values = dict[str, Tensor]
Boxes = dict[tuple[str, tuple[int, ...]], Tensor]  # by name and offsets


@dataclass
class Source:
    """Tensors under our names, of which `read` gets the values; and what is left out."""

    read: Callable[[MetadataIndex], Tensor]
    tensors: Tensors = field(default_factory=dict)
    groups: list[GroupFacts] = field(default_factory=list)
    extra: Any = None
    world_size: int = 1
    left_out: list[str] = field(default_factory=list)

    def add_whole(self, name: str, tensor: Tensor) -> None:
        self.add(name, tensor.shape, tensor.dtype, [whole_box(tensor.to(META))])

    def add(self, name: str, shape: torch.Size, dtype: torch.dtype, boxes: list[HeldBox]) -> None:
        """A tensor in boxes that are without values."""
        self.tensors[name] = Pieces(shape, dtype, META, boxes)


def groups_of_torch(groups: Iterable[Content], tensors: Mapping[str, Any]) -> list[GroupFacts]:
    """Groups of torch's optimizers, "params" are names; rules are known by what is in `tensors`."""
    found = []
    for group in groups:
        by_rule: dict[str, list[str]] = defaultdict(list)
        for name in group["params"]:
            left = next((key for key in LEAVES if state_key(name, key) in tensors), None)
            if left is not None:
                by_rule[LEAVES[left]].append(name)
        for rule, names in by_rule.items():
            options = {"rule": rule, **own_spelling(dict(group))}
            if rule == "muon" and "rule" not in group:  # from torch.optim.Muon
                options.setdefault("orthogonalize", "newton-schulz")
            known = ("rule", "maximize", "initial_lr", *RULES[rule].defaults)
            kept = {key: options[key] for key in known if key in options}
            found.append({"params": names, "options": plain_options(kept)})
    return found


def model_name(name: str) -> str:
    return f"{MODEL}.{name}"


def boxes_of(chunks: list[Any]) -> list[HeldBox]:
    """Chunks of torch.distributed.checkpoint, without values."""
    return [
        HeldBox(
            Box(tuple(chunk.offsets), tuple(chunk.sizes)), torch.empty(chunk.sizes, device=META)
        )
        for chunk in chunks
    ]


# --- files of torch.save -----------------------------------------------------------------


def read_file(path: Path, optimizer: Path | None = None, names: Path | None = None) -> Source:
    """What a file has, and perhaps another one with the optimizer; mapped, not read."""
    content = _content(path)
    values: Values = {}
    source = Source(lambda box: values[box.fqn])
    model, opt = _model_in(content), _first(content, OPTIMIZERS)
    if _is_optimizer(content):
        model, opt = {}, content
    if optimizer is not None:
        other = _content(optimizer)
        opt = other if _is_optimizer(other) else _first(other, OPTIMIZERS)
        path = optimizer
    if opt is not None and is_nanochat(opt):
        return _read_nanochat(path, model, names)
    known: dict[Any, str] = {}
    if opt is not None:
        known = _names(path, opt, model)
        values |= _state(opt, known, source)
    elif not model:
        raise CheckpointError(
            f"{path} has the keys {sorted(map(str, content))[:8]}, and none is the state dict "
            f"of a model ({', '.join(MODELS)}) or of an optimizer ({', '.join(OPTIMIZERS)})"
        )
    values |= {model_name(name): tensor for name, tensor in model.items()}
    for name, tensor in values.items():
        source.add_whole(name, tensor)
    groups = [] if opt is None else opt["param_groups"]
    named = [{**group, "params": [known[each] for each in group["params"]]} for group in groups]
    source.groups = groups_of_torch(named, values)
    if not _is_optimizer(content) and not _all_tensors(content):
        source.left_out = [str(key) for key in content if key not in (*MODELS, *OPTIMIZERS)]
    return source


def _read_nanochat(path: Path, model: Values, names: Path | None) -> Source:
    if names is None:
        raise CheckpointError(f"{path} is of nanochat, and has no names of parameters: {HOW}")
    whole = {(model_name(name), (0,) * value.ndim): value for name, value in model.items()}
    source = Source(lambda box: whole[box.fqn, tuple(box.offset or ())])
    ranks = [_content(of_rank) for of_rank in files_of_all_ranks(path)]
    whole |= add_nanochat(source, path, ranks, model, names)
    for name, value in model.items():
        source.add_whole(model_name(name), value)
    source.world_size = len(ranks)
    return source


def _content(path: Path) -> Content:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        reason = str(error).split("\n")[0]
        raise CheckpointError(
            f"{path} cannot be loaded without running what is in it ({reason}): load it yourself "
            "if you trust it, and save its state dicts alone"
        ) from None
    except (OSError, RuntimeError, ValueError, EOFError) as error:
        raise CheckpointError(f"{path} is no file of torch.save: {str(error)[:200]}") from None
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} has a {type(content).__name__}, and a dict is needed")
    return content


def _first(content: Content, keys: tuple[str, ...]) -> Any:
    return next((content[k] for k in keys if isinstance(content.get(k), Mapping)), None)


def _is_optimizer(content: Content) -> bool:
    return "state" in content and "param_groups" in content


def _all_tensors(content: Content) -> bool:
    return bool(content) and all(isinstance(value, Tensor) for value in content.values())


def _model_in(content: Content) -> Values:
    found = content if _all_tensors(content) else _first(content, MODELS) or {}
    tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    if tensors and all(name.startswith("module.") for name in tensors):  # of DDP
        tensors = {name.removeprefix("module."): value for name, value in tensors.items()}
    return {without_wrappers(name): value for name, value in tensors.items()}


def _state(opt: Content, names: Mapping[Any, str], source: Source) -> Values:
    values: Values = {}
    for number, state in opt["state"].items():
        for key, value in state.items():
            tensor = torch.as_tensor(value)
            if key in ("step", *LEAVES, "exp_avg_sq", "max_exp_avg_sq"):
                values[state_key(names[number], key)] = tensor
            elif f"state {key}" not in source.left_out:
                source.left_out.append(f"state {key}")
    return values


def _names(path: Path, opt: Content, model: Values) -> dict[Any, str]:
    """By the number of a parameter its name: as saved, or those of a model that fits exactly."""
    if PART in opt:
        raise CheckpointError(
            f"{path} is the part of one rank; save with samestep.save, which writes all of it"
        )
    groups = opt["param_groups"]
    numbers = [number for group in groups for number in group["params"]]
    named = [without_wrappers(name) for group in groups for name in group.get("param_names", ())]
    if len(named) == len(numbers):
        return dict(zip(numbers, named, strict=True))
    if all(isinstance(number, str) for number in numbers):
        return {number: number for number in numbers}
    why = "has no names of parameters (its optimizer was built without named_parameters)"
    shapes = {
        number: next((state[key].shape for key in LEAVES if key in state), None)
        for number, state in opt["state"].items()
    }
    if any(shape is None for shape in shapes.values()):
        raise CheckpointError(
            f"{path} is not of AdamW or Muon of torch.optim: its state has the keys "
            f"{sorted({key for state in opt['state'].values() for key in state})}"
        )
    if len(model) != len(numbers):
        raise CheckpointError(
            f"{path} {why}, and the model has {len(model)} tensors for {len(numbers)} parameters: "
            "save optimizer.state_dict() of an optimizer of model.named_parameters()"
        )
    pairs = dict(zip(sorted(numbers), model, strict=True))
    for number, name in pairs.items():
        if number in shapes and shapes[number] != model[name].shape:
            raise CheckpointError(
                f"{path} {why}, and by order parameter {number} with state of shape "
                f"{tuple(shapes[number] or ())} would be {name!r} of shape "
                f"{tuple(model[name].shape)}: it stacks parameters or sorts them otherwise"
            )
    return pairs


# --- nanochat ------------------------------------------------------------------------------


def is_nanochat(opt: Content) -> bool:
    return any("kind" in group for group in opt["param_groups"])


def files_of_all_ranks(path: Path) -> list[Path]:
    """The file of the first rank, and those of the others beside it."""
    found = re.fullmatch(r"(.*_rank)0(\.\w+)", path.name)
    if found is None:
        raise CheckpointError(f"{path} is not named *_rank0.pt: give the file of the first rank")
    count = len(list(path.parent.glob(f"{found[1]}*{found[2]}")))
    return [path.with_name(f"{found[1]}{rank}{found[2]}") for rank in range(count)]


def add_nanochat(
    source: Source, path: Path, ranks: Sequence[Content], model: Values, names: Path
) -> Boxes:
    """Add state and options to a source; gives the values, as views of the files."""
    groups = ranks[0]["param_groups"]
    named = _nanochat_names(names, groups, model)
    boxes: Boxes = {}
    for group, of_group in zip(groups, named, strict=True):
        states = [[rank["state"].get(number, {}) for rank in ranks] for number in group["params"]]
        if group["kind"] == "muon":
            _add_stack(path, boxes, of_group, states[0], model)
        else:
            for name, of_ranks in zip(of_group, states, strict=True):
                _add_slices(path, boxes, name, of_ranks, model[name].shape)
        own = {key: group[key] for key in SAME_THERE if key in group}
        if group["kind"] == "muon":
            own["variance_beta2"] = group["beta2"]
        options = {"rule": group["kind"], **preset_options("nanochat", group["kind"]), **own}
        source.groups.append({"params": of_group, "options": plain_options(options)})
    together: dict[str, dict[tuple[int, ...], Tensor]] = defaultdict(dict)
    for (name, at), value in boxes.items():
        together[name][at] = value
    for name, parts in together.items():
        shape = list(next(iter(parts.values())).shape)
        if shape:
            shape[0] = sum(part.shape[0] for part in parts.values())
        held = [HeldBox(Box(at, tuple(part.shape)), part.to(META)) for at, part in parts.items()]
        source.add(name, torch.Size(shape), held[0].tensor.dtype, held)
    return boxes


def _nanochat_names(path: Path, groups: Sequence[Content], model: Values) -> list[list[str]]:
    try:
        named = json.loads(path.read_text())
        counts = [len(of_group) for of_group in named]
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is no JSON list of lists of names: {error}") from None
    expected = [len(group["params"]) for group in groups]
    if counts != expected:
        raise CheckpointError(
            f"{path} has groups of {counts} names, and the optimizer of {expected} parameters: "
            "take both from the same model"
        )
    unknown = [name for of_group in named for name in of_group if name not in model]
    if unknown:
        raise CheckpointError(f"{path} names {unknown[0]!r}, which the model does not have")
    return [list(of_group) for of_group in named]


def _add_stack(
    path: Path, boxes: Boxes, names: list[str], of_ranks: list[Content], model: Values
) -> None:
    if not any(of_ranks):  # before the first step
        return
    share = -(-len(names) // len(of_ranks))
    for place, name in enumerate(names):
        state = of_ranks[place // share]
        momentum = state.get("momentum_buffer")
        if momentum is None or momentum.shape != (share, *model[name].shape):
            raise _incomplete(path, name, momentum, (share, *model[name].shape), len(of_ranks))
        variance = state["second_momentum_buffer"][place % share].flatten()
        boxes[state_key(name, "momentum_buffer"), (0, 0)] = momentum[place % share]
        boxes[state_key(name, "variance"), (0,)] = variance


def _add_slices(
    path: Path, boxes: Boxes, name: str, of_ranks: list[Content], shape: torch.Size
) -> None:
    if not any(of_ranks):
        return
    boxes[state_key(name, "step"), ()] = torch.tensor(float(of_ranks[0]["step"]))
    for key in ("exp_avg", "exp_avg_sq"):
        parts = [state[key] for state in of_ranks if key in state]
        if parts[0].shape == shape:
            parts = parts[:1]  # all ranks have the same
        rows = sum(part.shape[0] for part in parts) if shape else 0
        if shape and rows != shape[0]:
            raise _incomplete(path, name, parts[0], tuple(shape), len(of_ranks))
        start = 0
        for part in parts:
            boxes[state_key(name, key), (start, *[0] * (len(shape) - 1))[: len(shape)]] = part
            start += part.shape[0] if shape else 0


def _incomplete(
    path: Path, name: str, found: Tensor | None, expected: tuple[int, ...], ranks: int
) -> CheckpointError:
    shape = None if found is None else tuple(found.shape)
    return CheckpointError(
        f"{path}: the state of {name!r} has shape {shape} in files of {ranks} ranks, and "
        f"{expected} was expected: are all files of ranks there, and the names in their order?"
    )
