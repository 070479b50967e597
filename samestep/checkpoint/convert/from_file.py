"""Files of torch.save: state dicts of models and of torch's optimizers."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.checkpoint.convert.from_nanochat import (
    HOW,
    add_nanochat,
    files_of_all_ranks,
    is_nanochat,
)
from samestep.checkpoint.convert.source import LEAVES, Source, model_name
from samestep.checkpoint.errors import CheckpointError
from samestep.checkpoint.logical import state_key
from samestep.groups.routing import without_wrappers
from samestep.optimizer.loading import PART

MODELS = ("model", "model_state_dict", "state_dict", "module")
OPTIMIZERS = ("optimizer", "optimizer_state_dict", "optim", "optimizer_state")

Tensors = dict[str, Tensor]


def read_file(path: Path, optimizer: Path | None = None, names: Path | None = None) -> Source:
    """What a file has, and perhaps another one with the optimizer; mapped, not read."""
    content = _content(path)
    values: Tensors = {}
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
    if opt is not None:
        values |= _state(path, opt, model, source)
    elif not model:
        raise CheckpointError(
            f"{path} has the keys {sorted(map(str, content))[:8]}, and none is the state dict "
            f"of a model ({', '.join(MODELS)}) or of an optimizer ({', '.join(OPTIMIZERS)})"
        )
    values |= {model_name(name): tensor for name, tensor in model.items()}
    for name, tensor in values.items():
        source.add_whole(name, tensor)
    if opt is not None:
        source.add_groups(_named_groups(opt, _names(path, opt, model)))
    known = {*MODELS, *OPTIMIZERS}
    if not _is_optimizer(content) and not _all_tensors(content):
        source.left_out = [str(key) for key in content if key not in known]
    return source


def _read_nanochat(path: Path, model: Tensors, names: Path | None) -> Source:
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


def _content(path: Path) -> Mapping[str, Any]:
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


def _first(content: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    return next((content[k] for k in keys if isinstance(content.get(k), Mapping)), None)


def _is_optimizer(content: Mapping[str, Any]) -> bool:
    return "state" in content and "param_groups" in content


def _all_tensors(content: Mapping[str, Any]) -> bool:
    return bool(content) and all(isinstance(value, Tensor) for value in content.values())


def _model_in(content: Mapping[str, Any]) -> Tensors:
    found = content if _all_tensors(content) else _first(content, MODELS) or {}
    tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    if tensors and all(name.startswith("module.") for name in tensors):  # of DDP
        tensors = {name.removeprefix("module."): value for name, value in tensors.items()}
    return {without_wrappers(name): value for name, value in tensors.items()}


def _state(path: Path, opt: Mapping[str, Any], model: Tensors, source: Source) -> Tensors:
    names = _names(path, opt, model)
    values: Tensors = {}
    for number, state in opt["state"].items():
        for key, value in state.items():
            tensor = torch.as_tensor(value)
            if key in ("step", *LEAVES, "exp_avg_sq", "max_exp_avg_sq"):
                values[state_key(names[number], key)] = tensor
            elif f"state {key}" not in source.left_out:
                source.left_out.append(f"state {key}")
    return values


def _named_groups(opt: Mapping[str, Any], names: Mapping[Any, str]) -> list[Mapping[str, Any]]:
    return [
        {**group, "params": [names[number] for number in group["params"]]}
        for group in opt["param_groups"]
    ]


def _names(path: Path, opt: Mapping[str, Any], model: Tensors) -> dict[Any, str]:
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
