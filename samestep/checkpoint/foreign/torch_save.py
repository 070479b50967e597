"""Reads files of torch.save: state dicts of models and of torch's and dion's optimizers.

An optimizer's state dict knows parameters by number, and by name if it was built of
`named_parameters()`. Several optimizers side by side are a list of state dicts, or several files.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.checkpoint.foreign import nanochat, safe
from samestep.checkpoint.foreign.dialects import in_our_words
from samestep.checkpoint.foreign.naming import HOW, by_groups, check_shapes
from samestep.checkpoint.logical import state_key
from samestep.checkpoint.sources import (
    Collected,
    Names,
    Source,
    SourceOptions,
    model_name,
    step_tensor,
)
from samestep.checkpoint.storage import CheckpointError
from samestep.layout.fused_rows import without_wrappers
from samestep.optimizer.loading import PART

MODELS = ("model", "model_state_dict", "state_dict", "module")
OPTIMIZERS = ("optimizer", "optimizer_state_dict", "optim", "optimizer_state")
SHAPED = ("exp_avg", "momentum_buffer", "momentum", "moment1")  # as large as the parameter

Content = Mapping[str, Any]
Values = dict[str, Tensor]


def read(path: Path, given: SourceOptions) -> Source:
    """Map a file, and optimizer files beside it, into memory and read them.

    A model that is given has the parameters, in order, where no file has them.
    """
    content = safe.load(path)
    opts = _optimizers_in(content)
    values = {} if opts is content or isinstance(content, list) else model_in(content)
    where = path
    if given.optimizers:
        opts = [own for file in given.optimizers for own in _as_optimizers(file, safe.load(file))]
        where = given.optimizers[0]
    elif opts is None and not values:
        keys = sorted(map(str, content))[:8] if isinstance(content, Mapping) else content
        raise CheckpointError(
            f"{path} has the keys {keys}, and none is the state dict of a model "
            f"({', '.join(MODELS)}) or of an optimizer ({', '.join(OPTIMIZERS)})"
        )
    found = [opts] if isinstance(opts, Mapping) else list(opts or ())
    if given.only == "model":
        found = []
    if any(map(nanochat.is_nanochat, found)):
        return nanochat.read_nanochat(where, values, given.names)
    collected = Collected()
    model: Values | None = None
    if given.model is not None:
        model = {n: p for n, p in given.model.named_parameters() if p.requires_grad}
    facts = add_optimizers(collected, where, found, given.names, values, model)
    for name, tensor in values.items():
        collected.add(model_name(name), tensor, f"{path.name}: {name}")
    whole = collected.source(**facts)
    if isinstance(content, Mapping) and not is_optimizer(content) and not _all_tensors(content):
        whole.left_out += [str(key) for key in content if key not in (*MODELS, *OPTIMIZERS)]
    return whole


def add_optimizers(
    collected: Collected,
    where: Path,
    opts: Sequence[Content],
    names: Names | None,
    values: Values,
    model: Values | None,
) -> dict[str, Any]:
    """Add state dicts of optimizers; returns the arguments for `Collected.source`."""
    opt = _together(opts)
    if opt is None:
        return {}
    named = _named(where, opt, names, values, model)
    groups = [
        {**g, "params": [named[number] for number in g["params"]]} for g in opt["param_groups"]
    ]
    of_name = {named[number]: state for number, state in opt["state"].items()}
    keys_of = {name: list(state) for name, state in of_name.items()}
    found = in_our_words(collected, groups, keys_of)
    for name, own, count in found:
        for theirs, ours in own.keys.items():
            value = torch.as_tensor(of_name[name][theirs])
            tensor = step_tensor(value) if ours == "step" else value
            if ours == "variance":
                tensor = tensor.flatten()
            collected.add(state_key(name, ours), tensor, f"{where.name}: {name} {theirs}")
        collected.add_step(name, count, f"{where.name}: step of its group")
    left_out = dict.fromkeys(
        f"state {key}" for name, own, _ in found for key in keys_of[name] if key not in own.keys
    )
    return {"left_out": list(left_out), "by": {own.by for _, own, _ in found}}


def model_in(content: Any) -> Values:
    """Tensors of a model, with prefixes of wrappers removed from their names."""
    found = content if _all_tensors(content) else _first(content, MODELS) or {}
    tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    if tensors and all(name.startswith("module.") for name in tensors):  # of DDP
        tensors = {name.removeprefix("module."): value for name, value in tensors.items()}
    return {without_wrappers(name): value for name, value in tensors.items()}


def is_optimizer(content: Any) -> bool:
    return isinstance(content, Mapping) and "state" in content and "param_groups" in content


def _optimizers_in(content: Any) -> Any:
    """The state dicts of optimizers in a file, as a list; None if there are none."""
    if is_optimizer(content):
        return content
    if isinstance(content, list) and content and all(map(is_optimizer, content)):
        return content
    if not isinstance(content, Mapping):
        return None
    for key in OPTIMIZERS:
        if is_optimizer(content.get(key)) or isinstance(content.get(key), list):
            return _optimizers_in(content[key])
    return None


def _as_optimizers(path: Path, content: Any) -> list[Content]:
    found = _optimizers_in(content)
    if found is None:
        raise CheckpointError(f"{path} has no state dict of an optimizer")
    return [found] if isinstance(found, Mapping) else list(found)


def _first(content: Any, keys: tuple[str, ...]) -> Any:
    if not isinstance(content, Mapping):
        return None
    return next((content[k] for k in keys if isinstance(content.get(k), Mapping)), None)


def _all_tensors(content: Any) -> bool:
    return (
        isinstance(content, Mapping)
        and bool(content)
        and all(isinstance(value, Tensor) for value in content.values())
    )


def _together(opts: Sequence[Content]) -> Content | None:
    """Merge several optimizers into one, renumbering their parameters."""
    if len(opts) < 2:
        return opts[0] if opts else None
    state: dict[Any, Any] = {}
    groups: list[dict[str, Any]] = []
    for place, opt in enumerate(opts):
        own = [number for group in opt["param_groups"] for number in group["params"]]
        new = {number: (place, number) for number in own}
        state |= {new[number]: entry for number, entry in opt["state"].items()}
        groups += [
            {**group, "params": [new[number] for number in group["params"]]}
            for group in opt["param_groups"]
        ]
    return {"state": state, "param_groups": groups}


def _named(
    path: Path, opt: Content, names: Names | None, values: Values, model: Values | None
) -> dict[Any, str]:
    """Names by number of the parameters: as saved, as given, or from a model that fits."""
    if PART in opt:
        raise CheckpointError(
            f"{path} is the state of one rank of several: save with samestep.save, "
            "which writes the state of all ranks"
        )
    groups = opt["param_groups"]
    numbers = [number for group in groups for number in group["params"]]
    saved = [without_wrappers(name) for group in groups for name in group.get("param_names", ())]
    shapes = {number: _shape_of(state) for number, state in opt["state"].items()}
    known = {name: value.shape for name, value in (model or values).items()}
    if names is not None:
        given = by_groups(path, groups, names)
        check_shapes(path, given, shapes, known)
        return given
    if len(saved) == len(numbers):
        return dict(zip(numbers, saved, strict=True))
    if all(isinstance(number, str) for number in numbers):
        return {number: without_wrappers(number) for number in numbers}
    why = f"{path} has no names of parameters (its optimizer was built without named_parameters)"
    if len(known) != len(numbers):
        raise CheckpointError(
            f"{why}, and the model has {len(known)} tensors for {len(numbers)} parameters: {HOW}"
        )
    if len(groups) > 1 and len(set(known.values())) < len(known):
        raise CheckpointError(
            f"{why}, and several parameters have the same shape, so that nothing says "
            f"which are in which of its {len(groups)} groups: {HOW}"
        )
    if len(groups) == 1:
        by_order = dict(zip(sorted(numbers), known, strict=True))
        check_shapes(why, by_order, shapes, known)
        return by_order
    of_shape: dict[torch.Size | None, str] = {shape: name for name, shape in known.items()}
    by_shape = {number: of_shape.get(shapes.get(number), "") for number in numbers}
    if set(by_shape.values()) != set(known):
        raise CheckpointError(
            f"{why}, and the shapes of its state are not those of the model: {HOW}"
        )
    return by_shape


def _shape_of(state: Mapping[str, Any]) -> torch.Size | None:
    return next((state[key].shape for key in SHAPED if key in state), None)
