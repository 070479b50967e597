"""Reads optimizer files of nanochat (github.com/karpathy/nanochat).

They are one per rank, with parameters by number and Muon's state in stacks. Muon's state of a group
is that of its first parameter: in the file of rank r the matrices r k to r k + k - 1 of the group,
zeros where there are no more. AdamW's is whole if the parameter is small or there is one rank, and
else a slice of dim 0. The files have no names, so these must be given.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.checkpoint.foreign import safe
from samestep.checkpoint.foreign.naming import HOW, by_groups
from samestep.checkpoint.logical import state_key
from samestep.checkpoint.sources import Collected, Names, Source, model_name
from samestep.checkpoint.storage import CheckpointError
from samestep.layout.boxes import Box, HeldBox
from samestep.presets import preset_options

SAME_THERE = ("lr", "initial_lr", "betas", "eps", "weight_decay", "momentum", "ns_steps")

Content = Mapping[str, Any]
Values = dict[str, Tensor]


def is_nanochat(opt: Content) -> bool:
    return any("kind" in group for group in opt["param_groups"])


def read_nanochat(path: Path, model: Values, names: Names | None) -> Source:
    """Read the optimizer files of all ranks; `path` is that of rank 0."""
    if names is None:
        raise CheckpointError(
            f"{path} is a checkpoint of nanochat, whose optimizer state has no names of "
            f"parameters: {HOW}"
        )
    ranks = [safe.load_dict(of_rank) for of_rank in files_of_all_ranks(path)]
    groups = ranks[0]["param_groups"]
    named = by_groups("the optimizer", groups, names)
    unknown = [name for name in named.values() if name not in model]
    if unknown:
        raise CheckpointError(f"--names has {unknown[0]!r}, which the model does not have")
    collected = Collected()
    for place, group in enumerate(groups):
        of_group = [named[number] for number in group["params"]]
        states = [[rank["state"].get(number, {}) for rank in ranks] for number in group["params"]]
        if group["kind"] == "muon":
            _add_stack(path, collected, of_group, states[0], model)
        else:
            for name, of_ranks in zip(of_group, states, strict=True):
                _add_slices(path, collected, name, of_ranks, model[name].shape)
        own = {key: group[key] for key in SAME_THERE if key in group}
        if group["kind"] == "muon":
            own["variance_beta2"] = group["beta2"]
        options = {"rule": group["kind"], **preset_options("nanochat", group["kind"]), **own}
        for name in of_group:
            collected.add_options(place, name, options)
    for name, value in model.items():
        collected.add(model_name(name), value, f"model: {name}")
    return collected.source(world_size=len(ranks), by={"nanochat"})


def files_of_all_ranks(path: Path) -> list[Path]:
    """The file of rank 0 and those of the other ranks beside it."""
    found = re.fullmatch(r"(.*_rank)0(\.\w+)", path.name)
    if found is None:
        raise CheckpointError(f"{path} is not named *_rank0.pt: give the file of the first rank")
    count = len(list(path.parent.glob(f"{found[1]}*{found[2]}")))
    return [path.with_name(f"{found[1]}{rank}{found[2]}") for rank in range(count)]


def _add_stack(
    path: Path, collected: Collected, names: list[str], of_ranks: list[Content], model: Values
) -> None:
    if not any(of_ranks):  # before the first step
        return
    share = -(-len(names) // len(of_ranks))
    for place, name in enumerate(names):
        state, origin = of_ranks[place // share], f"{path.name}: stack of {names[0]}"
        momentum = state.get("momentum_buffer")
        if momentum is None or momentum.shape != (share, *model[name].shape):
            raise _incomplete(path, name, momentum, (share, *model[name].shape), len(of_ranks))
        variance = state["second_momentum_buffer"][place % share].flatten()
        collected.add(state_key(name, "momentum_buffer"), momentum[place % share], origin)
        collected.add(state_key(name, "variance"), variance, origin)


def _add_slices(
    path: Path, collected: Collected, name: str, of_ranks: list[Content], shape: torch.Size
) -> None:
    if not any(of_ranks):
        return
    step = torch.tensor(float(of_ranks[0]["step"]))
    collected.add(state_key(name, "step"), step, f"{path.name}: {name} step")
    for key in ("exp_avg", "exp_avg_sq"):
        parts = [state[key] for state in of_ranks if key in state]
        if parts[0].shape == shape:
            parts = parts[:1]  # all ranks have the same
        rows = sum(part.shape[0] for part in parts) if shape else 0
        if shape and rows != shape[0]:
            raise _incomplete(path, name, parts[0], tuple(shape), len(of_ranks))
        start = 0
        for part in parts:
            at = (start, *[0] * (len(shape) - 1))[: len(shape)]
            held, own = HeldBox(Box(at, tuple(part.shape)), part), state_key(name, key)
            collected.add_boxes(own, shape, part.dtype, [held], f"{path.name}: {name} {key}")
            start += part.shape[0] if shape else 0


def _incomplete(
    path: Path, name: str, found: Tensor | None, expected: tuple[int, ...], ranks: int
) -> CheckpointError:
    shape = None if found is None else tuple(found.shape)
    return CheckpointError(
        f"{path}: the state of {name!r} has shape {shape} in files of {ranks} ranks, "
        f"and {expected} was expected: copy the files of all ranks, and give the names "
        "in their order"
    )
