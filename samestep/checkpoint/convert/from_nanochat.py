"""Optimizer files of nanochat: one per rank, parameters by number, Muon's state in stacks.

Muon's state of a group is that of its first parameter: in the file of rank r the matrices r k to
r k + k - 1 of the group, zeros where there are no more. AdamW's is whole if the parameter is small
or there is one rank, and else a slice of dim 0. The files have no names, so these must be given.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.checkpoint.convert.source import Source
from samestep.checkpoint.errors import CheckpointError
from samestep.checkpoint.logical import state_key
from samestep.checkpoint.options import plain_options
from samestep.layout.dtensor_shards import Box
from samestep.layout.held_state import HeldBox
from samestep.presets import preset_options

Content = Mapping[str, Any]
Boxes = dict[tuple[str, tuple[int, ...]], Tensor]  # by name and offsets
HOW = "give the names of each group's parameters with --names (docs/checkpoints.md says how)"
SAME_THERE = ("lr", "initial_lr", "betas", "eps", "weight_decay", "momentum", "ns_steps")


def is_nanochat(opt: Content) -> bool:
    """Whether this is a state dict of its optimizer."""
    return any("kind" in group for group in opt["param_groups"])


def files_of_all_ranks(path: Path) -> list[Path]:
    """The file of the first rank, and those of the others beside it."""
    found = re.fullmatch(r"(.*_rank)0(\.\w+)", path.name)
    if found is None:
        raise CheckpointError(f"{path} is not named *_rank0.pt: give the file of the first rank")
    count = len(list(path.parent.glob(f"{found[1]}*{found[2]}")))
    return [path.with_name(f"{found[1]}{rank}{found[2]}") for rank in range(count)]


def add_nanochat(
    source: Source, path: Path, ranks: Sequence[Content], model: Mapping[str, Tensor], names: Path
) -> Boxes:
    """Add state and options to a source; gives the values, as views of the files."""
    groups = ranks[0]["param_groups"]
    named = _names(names, groups, model)
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
    for name in dict.fromkeys(name for name, _ in boxes):
        _add(source, name, {at: value for (own, at), value in boxes.items() if own == name})
    return boxes


def _names(
    path: Path, groups: Sequence[Mapping[str, Any]], model: Mapping[str, Tensor]
) -> list[list[str]]:
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
    path: Path,
    boxes: Boxes,
    names: list[str],
    of_ranks: list[Mapping[str, Any]],
    model: Mapping[str, Tensor],
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
    path: Path, boxes: Boxes, name: str, of_ranks: list[Mapping[str, Any]], shape: torch.Size
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


def _add(source: Source, name: str, boxes: Mapping[tuple[int, ...], Tensor]) -> None:
    first = next(iter(boxes.values()))
    shape = list(first.shape)
    if shape:
        shape[0] = sum(value.shape[0] for value in boxes.values())
    held = [HeldBox(Box(at, tuple(value.shape)), value.to("meta")) for at, value in boxes.items()]
    source.add(name, torch.Size(shape), first.dtype, held)
