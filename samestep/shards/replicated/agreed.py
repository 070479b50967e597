"""Compares plans, and values of copies, between ranks.

Collective, and raised by all ranks or by none.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from samestep.comm.collectives import from_first
from samestep.comm.groups import RankGroup
from samestep.comm.integrity.agreement import differing, require_same_lines
from samestep.comm.integrity.checksum import checksums
from samestep.groups.pipelines import WAY_OF_STAGES
from samestep.tooling.warn import some, warn_user


def agree_on_plan(
    names: Sequence[str],
    values: Sequence[Tensor],
    lines: Sequence[str],
    groups: Sequence[RankGroup],
    problem: str | None,
) -> None:
    """Raise unless all ranks of all groups have the same lines, and tensors that can be shared.

    problem: why they cannot be, if all ranks have it.
    """
    device = values[0].device
    repeated = [n for n, value in zip(names, values, strict=True) if _repeats(value)]
    elsewhere = [
        f"{name} on {value.device.type}"
        for name, value in zip(names, values, strict=True)
        if value.device != device
    ]
    facts = [f"elements in one place: {repeated}", f"on another device: {elsewhere}"]
    for ranks in groups:
        require_same_lines("plan", [*lines, *facts], ranks, device, f". {WAY_OF_STAGES}")
    if problem is not None:
        raise ValueError(problem)
    if repeated:
        raise ValueError(
            f"parameter {repeated[0]!r} is expanded, so that several of its elements "
            "share memory and cannot be updated: replace its data by .contiguous()"
        )
    if elsewhere:
        raise ValueError(
            f"parameter {elsewhere[0]}, others are on {device.type}: parameters that "
            "are sharded over ranks must be on one kind of device"
        )


def mend_replicas(
    names: Sequence[str], values: Sequence[Tensor], group: RankGroup, *, strict: bool
) -> None:
    """Compare copies; copy rank 0's where they differ, or raise if strict."""
    different = differing(checksums(values), group)
    if not different:
        return
    which = some([names[index] for index in different], 6)
    if strict:
        raise ValueError(
            f"parameters differ between ranks: {which}. Use the same seed on every "
            "rank, or load the same checkpoint, before building the optimizer"
        )
    warn_user(
        "parameters differ between ranks and were set to the values of rank "
        f"{group.members[0]}: {which}"
    )
    with torch.no_grad():
        for index in different:
            dense = values[index].contiguous()
            from_first("broadcast of replicas", dense, group).wait()
            if dense.data_ptr() != values[index].data_ptr():
                values[index].copy_(dense)


def _repeats(value: Tensor) -> bool:
    """Whether a tensor is expanded along a dim."""
    dims = zip(value.shape, value.stride(), strict=True)
    return value.numel() > 0 and any(size > 1 and stride == 0 for size, stride in dims)
