"""A model and its optimizer as named logical tensors, whatever the layout they live in.

model.<name>          parameters and buffers
state.<name>.<key>    optimizer state, in the shape that one process has it in
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from samestep.checkpoint.errors import CheckpointError
from samestep.checkpoint.pieces import Pieces
from samestep.comm.meshes import held, mesh_group
from samestep.full_values import FullValues
from samestep.held_state import HeldBox, whole_box
from samestep.param_groups import options_of, parameter_names
from samestep.state import MASTER

Tensors = dict[str, Pieces]
MODEL, STATE = "model", "state"


def model_tensors(model: nn.Module) -> Tensors:
    """Parameters and buffers, by the names of torch's `get_model_state_dict`; views of them."""
    found: Tensors = {}
    for name, value in get_model_state_dict(model).items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{name!r} in the model's state_dict is a {type(value).__name__}, and only tensors "
                "are stored with a model: give it in extra="
            )
        value = value.detach()
        box = whole_box(value)
        if isinstance(value, DTensor):
            group = mesh_group(value.device_mesh)
            box = HeldBox(held(value, group).boxes[group.rank], value.to_local())
        found[f"{MODEL}.{name}"] = Pieces(value.shape, value.dtype, box.tensor.device, [box])
    return found


def state_tensors(opt: FullValues) -> Tensors:
    """All optimizer state; views of it."""
    found: Tensors = {}
    for name, part in opt.held_state():
        tensor = opt.state[part.param][part.key]
        found[state_key(name, part.key)] = Pieces(
            part.shape, tensor.dtype, tensor.device, part.boxes
        )
    return found


def state_key(name: str, key: str) -> str:
    """The name of a state tensor."""
    return f"{STATE}.{name}.{key}"


def group_facts(opt: FullValues) -> list[dict[str, Any]]:
    """Per group its parameters' names and options, as JSON can have them."""
    return [
        {
            "params": list(parameter_names(group, index)),
            "options": {key: _plain(value) for key, value in options_of(group).items()},
        }
        for index, group in enumerate(opt.param_groups)
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value


def restore_options(opt: FullValues, groups: list[dict[str, Any]]) -> None:
    """Give every group the options that its parameters were saved with, where schedules may go."""
    saved = {name: group["options"] for group in groups for name in group["params"]}
    for index, group in enumerate(opt.param_groups):
        name = next(iter(parameter_names(group, index)), None)
        for key, value in saved.get(name, {}).items() if name is not None else ():
            own = group.get(key)
            if isinstance(own, Tensor):
                own.fill_(value)
            elif isinstance(own, tuple):
                group[key] = tuple(value)
            elif isinstance(own, int | float | str | None) and isinstance(
                value, int | float | str | None
            ):
                group[key] = value


def check_fits(wanted: Mapping[str, Tensor], stored: Mapping[str, Any], partial: bool) -> list[str]:
    """Raise if a checkpoint is that of another model; give the names that can be loaded.

    Without a stored master copy the parameter itself is taken.
    """
    parts = {name.split(".", 1)[0] for name in wanted}
    here = {name for name in stored if name.split(".", 1)[0] in parts}
    optional = {name for name in wanted if name.endswith(f".{MASTER}")}
    missing = sorted(wanted.keys() - stored.keys() - optional)
    surplus = sorted(name for name in here - wanted.keys() if not name.endswith(f".{MASTER}"))
    if missing and not partial:
        raise CheckpointError(_sentence("the checkpoint lacks", missing))
    if surplus and not partial:
        raise CheckpointError(_sentence("the checkpoint has more than is here", surplus))
    common = [name for name in wanted if name in stored]
    if not common:
        raise CheckpointError("the checkpoint has nothing that is here: is it of another model?")
    for name in common:
        if stored[name].size != wanted[name].shape:
            raise CheckpointError(
                f"{name} has shape {tuple(stored[name].size)} in the checkpoint and "
                f"{tuple(wanted[name].shape)} here: it is of another model, or its groups were cut "
                "into other blocks"
            )
    return common


def _sentence(what: str, names: list[str]) -> str:
    some = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"{what}: {some}. Pass partial=True to load only what both have"
