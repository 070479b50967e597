"""What comes and goes in a step on one rank: gradients, buffers of collectives, temporaries.

The operations of a schedule are walked through, and what the optimizer allocates in each of them
is written into a ledger, and taken out where the optimizer lets go of it.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch

from samestep.estimate.blueprint import Blueprint
from samestep.estimate.ledger import GRADIENTS, Ledger, Passing
from samestep.estimate.sharing_walk import SharingWalk
from samestep.estimate.spreading_walk import SpreadingWalk
from samestep.estimate.temporaries import kernel_peak, slice_peak, stack_peak
from samestep.groups.param_groups import rule_of
from samestep.placements.whole.buffers import gradient_dtype
from samestep.plan.schedule import (
    Apply,
    Average,
    Collect,
    Gather,
    GiveBack,
    Place,
    Reduce,
    Transform,
    Update,
)
from samestep.rules.state import math_dtype, needs_master
from samestep.update.plain import STACK_ELEMENTS

Operands = Iterable[tuple[int, torch.Tensor, tuple[int, ...]]]  # group, parameter, shape


def passing_memory(blueprint: Blueprint, rank: int) -> Passing:
    """Walk through backward and a step."""
    ledger = Ledger()
    walks: list[SharingWalk | SpreadingWalk] = []
    for sharing in blueprint.shared:
        place = blueprint.grid.place(rank, sharing.peers)
        walks.append(SharingWalk(len(walks), sharing, place, blueprint, ledger))
    for spreading in blueprint.spread:
        place = blueprint.grid.place(rank, spreading.peers)
        walks.append(SpreadingWalk(len(walks), spreading, place, blueprint, ledger))
    for walk in walks:
        walk.backward()
    if not walks:
        return _alone(blueprint, ledger)
    gradients = ledger.now[GRADIENTS]
    for walk in walks:
        walk.begin()
    for operation in blueprint.schedule(rank):
        match operation:
            case Update(buckets):
                known = [bucket for bucket in buckets if blueprint.has(bucket)]
                _update(blueprint, [(walks[p], b) for p, b in known], ledger)
            case (
                Reduce(bucket)
                | Average(bucket)
                | Gather(bucket)
                | Place(bucket)
                | Collect(bucket)
                | Transform(bucket)
                | GiveBack(bucket)
                | Apply(bucket)
            ) if blueprint.has(bucket):
                name = type(operation).__name__.lower()
                getattr(walks[bucket.placement], f"on_{name}")(bucket.bucket)
    return Passing(gradients, ledger.most)


def _alone(blueprint: Blueprint, ledger: Ledger) -> Passing:
    """One process: gradients, and the temporaries of one update of everything."""
    operands = []
    for index, group in enumerate(blueprint.groups):
        for param in group["params"]:
            ledger.add(param, param.numel() * gradient_dtype(param).itemsize, GRADIENTS)
            blocks = blueprint.optimizer._blocks[param]
            shapes = [(param.numel(),)] if blocks is None else [b.shape for b in blocks]
            operands += [(index, param, shape) for shape in shapes]
    _run_rules(blueprint, operands, ledger)
    return Passing(ledger.now[GRADIENTS], ledger.most)


def _update(
    blueprint: Blueprint,
    wave: Iterable[tuple[SharingWalk | SpreadingWalk, int]],
    ledger: Ledger,
) -> None:
    members = list(wave)
    operands = [operand for walk, bucket in members for operand in walk.operands(bucket)]
    _run_rules(blueprint, operands, ledger)
    for walk, bucket in members:
        walk.updated(bucket)


def _run_rules(
    blueprint: Blueprint,
    operands: Operands,
    ledger: Ledger,
) -> None:
    """Group by group: blocks of one shape as stacks, slices one by one."""
    by_group: dict[int, list[tuple[torch.Tensor, tuple[int, ...]]]] = defaultdict(list)
    for index, param, shape in operands:
        by_group[index].append((param, shape))
    for index, members in by_group.items():
        group = blueprint.groups[index]
        rule, on_cpu = rule_of(group), blueprint.device.type == "cpu"
        sizes = (_count(shape) * math_dtype(param).itemsize for param, shape in members)
        clipped = sum(sizes) if blueprint.clips and on_cpu else 0  # all of a group; kernels do not
        most = 0
        stacked: dict[tuple[tuple[int, ...], torch.dtype, bool], int] = defaultdict(int)
        for param, shape in members:
            master = needs_master(param, blueprint.optimizer._master_weights)
            if not on_cpu and len(shape) == 2:
                shape = (min(shape), max(shape))  # the kernels take transposes together
            stacked[shape, param.dtype, master] += 1
        for (shape, dtype, master), count in stacked.items():
            if rule.kind == "elementwise":
                size = slice_peak(rule, group, _count(shape), dtype, master=master, on_cpu=on_cpu)
            else:
                rows, cols = shape
                if on_cpu:
                    count = min(count, max(1, STACK_ELEMENTS // (rows * cols)))
                    size = stack_peak(
                        rule, group, count, (rows, cols), dtype, master=master, on_cpu=True
                    )
                else:
                    size = kernel_peak(count, rows, cols)
            most = max(most, size)
        ledger.passing(clipped + most)


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
