"""Bytes of tensors on each rank: what stays, and the peak of what comes and goes.

Activations are not in it: `activations` has them. For what comes and goes,
the operations of a schedule are walked through: what the optimizer allocates in each of them is
written into a ledger, and taken out where the optimizer lets go of it.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch

from samestep.groups.param_groups import rule_of
from samestep.lab.estimate.blueprint import Blueprint
from samestep.lab.estimate.placed import Sharing, Spreading, Updated, windows_of
from samestep.lab.estimate.temporaries import RulePeaks, kernel_is_enough
from samestep.lab.estimate.walks import (
    GRADIENTS,
    Ledger,
    SharingWalk,
    SpreadingWalk,
    Then,
    Walk,
)
from samestep.plan.schedule import OfBucket, OfChunk, Update, staging_bytes
from samestep.rules.rule import math_dtype
from samestep.rules.state import MASTERS, block_state_shapes, needs_master, whole_shapes
from samestep.shards.replicated.buckets import gradient_dtype
from samestep.shards.replicated.state_packing import StatePacking
from samestep.update.lanes import Batch, dealt, temporary_bytes
from samestep.update.plain import BATCH_ELEMENTS, STACK_ELEMENTS


class RankMemory(NamedTuple):
    """Of one rank, in bytes.

    gradients: when backward is over.
    buffers, temporaries: beside gradients when most is alive; `gradients_then` are those.
    staging: buffers for state that stays on the host, which has `on_host` of it.
    """

    parameters: int
    gradients: int
    main_parameters: int
    state: int
    gradients_then: int = 0
    buffers: int = 0
    temporaries: int = 0
    staging: int = 0
    on_host: int = 0

    @property
    def stays(self) -> int:
        """What is alive between steps, without gradients."""
        return self.parameters + self.main_parameters + self.state + self.staging

    @property
    def in_flight(self) -> int:
        return self.buffers + self.temporaries

    @property
    def peak(self) -> int:
        """All of it when most is alive."""
        return self.stays + self.gradients_then + self.in_flight

    def at(self, then: Then) -> "RankMemory":
        """The same rank at another moment of the step."""
        return self._replace(
            gradients_then=then.gradients, buffers=then.buffers, temporaries=then.temporaries
        )

    def or_then(self, inside: Then) -> "RankMemory":
        """With another moment, of forward and backward, if more is alive then."""
        return self if inside.total <= self.gradients_then + self.in_flight else self.at(inside)


def rank_memory(blueprint: Blueprint, rank: int) -> RankMemory:
    kept = kept_memory(blueprint, rank)
    gradients, then = passing_memory(blueprint, rank)
    found = kept._replace(gradients=gradients).at(then)
    if blueprint.distribution.offload is None:
        return found
    staging = sum(staging_bytes(blueprint.schedule(rank)))
    on_host = kept.main_parameters + kept.state
    return found._replace(main_parameters=0, state=0, staging=staging, on_host=on_host)


def kept_memory(blueprint: Blueprint, rank: int) -> RankMemory:
    """What stays on a rank wherever its state is: parameters, main parameters and state."""
    params, entries = 0, list[tuple[str, int]]()  # of state: key and bytes
    for own in blueprint.on_rank(rank):
        sharing, place, spreading, mesh_place = own
        if sharing is not None:
            params += _whole_parameters(sharing)
            entries += _shared_state(sharing, place, blueprint.groups)
            if spreading is not None:
                entries += _owned_state(spreading, mesh_place, blueprint.groups)
        elif spreading is not None:
            params += sum(elements * param.dtype.itemsize for param, elements in own.stored())
            for index, held in enumerate(spreading.held):
                elements = held.boxes[mesh_place].numel
                entries += _spread_state(spreading, index, elements, blueprint.groups)
            entries += _owned_state(spreading, mesh_place, blueprint.groups)
    for param, _ in () if blueprint.placements else blueprint.stored(rank):
        params += param.nbytes
        state = blueprint.optimizer.state[param]
        entries += ((key, tensor.nbytes) for key, tensor in state.items())
    main = sum(size for key, size in entries if key in MASTERS)
    return RankMemory(params, 0, main, sum(size for _, size in entries) - main)


def _whole_parameters(sharing: Sharing) -> int:
    """With the gaps of flat buffers."""
    if sharing.distribution.buffers == "per_parameter":
        return sum(param.nbytes for param in sharing.params)
    width = {str(param.dtype): param.dtype.itemsize for param in sharing.params}
    return sum(bucket.size * width[bucket.dtype] for bucket in sharing.plan.buckets)


def _shared_state(
    sharing: Sharing, place: int, groups: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, int]]:
    packing = StatePacking(sharing.plan, place, list(map(dict, groups)))
    for spec, sizes in zip(sharing.specs, packing.sizes, strict=True):
        for key, size in sizes.items():
            if spec.whole is None or not spec.stored[key].owned:
                yield key, size * spec.stored[key].dtype.itemsize


def _owned_state(
    spreading: Spreading, mesh_place: int, groups: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, int]]:
    """Bytes per key of what the owners of blocks have, of the blocks that a rank of a mesh owns."""
    for planned in (planned for chunk in spreading.chunks for planned in chunk.blocks):
        spec = spreading.specs[planned.param]
        if mesh_place in planned.owners and any(how.owned for how in spec.stored.values()):
            group = groups[spec.group]
            shapes = block_state_shapes(rule_of(group), planned.block, group, spec.stored)
            for key, how in spec.stored.items():
                if how.owned:
                    yield key, prod(shapes[key]) * how.dtype.itemsize


def _spread_state(
    spreading: Spreading, index: int, elements: int, groups: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, int]]:
    """Bytes per key: of the parameter's shape as that is spread, all other on every rank."""
    spec = spreading.specs[index]
    group = groups[spec.group]
    shapes = whole_shapes(rule_of(group), spec.shape, spec.blocks, group, spec.stored)
    for key, how in spec.stored.items():
        if how.owned:
            continue
        count = prod(shapes[key]) if how.per is None else elements // how.per
        yield key, count * how.dtype.itemsize


def whole_gradients(blueprint: Blueprint, rank: int) -> int:
    """Gradients that backward passes leave before any is reduced."""
    held = blueprint.stored(rank)
    return sum(elements * gradient_dtype(param).itemsize for param, elements in held)


def passing_memory(blueprint: Blueprint, rank: int) -> tuple[int, Then]:
    """Gradients when backward is over, and the moment when most is alive."""
    ledger, every = Ledger(), blueprint.on_rank(rank)
    walks: list[Walk] = []  # of buckets
    chunks: dict[int, SpreadingWalk] = {}
    for number, own in enumerate(every):
        if own.spreading is not None:
            chunks[number] = SpreadingWalk(number, own, ledger, blueprint)
        if own.sharing is not None:
            walks.append(SharingWalk(number, own.sharing, own.place, ledger))
        else:
            walks.append(chunks[number])
    walks = walks or [Walk(0, 0, ledger, blueprint.stored(rank))]
    for walk in walks:
        walk.backward(again=blueprint.stages is not None)  # a pipeline has several micro-batches
    gradients = ledger.now[GRADIENTS]
    windows = cache(lambda number: windows_of(every[number], blueprint.groups))
    for walk in walks:
        walk.begin()
    for operation in blueprint.schedule(rank):
        if isinstance(operation, Update):
            wave = [bucket for bucket in operation.buckets if bucket.placement < len(walks)]
            if operation.window is not None:
                placement = operation.window.bucket.placement
                of_placement = windows(placement) if every else blueprint.local_windows
                parts = of_placement.parts(operation.window)
                updates = [(part.unit.about, part.stop - part.start) for part in parts]
            elif every:
                found = (each for p, number in wave for each in every[p].updates(number))
                updates = [(each, each.elements) for each in found]
            else:
                updates = [(unit.about, unit.elements) for unit in blueprint.local_units]
            _run_rules(blueprint, updates, ledger)
            for placement, number in wave if operation.is_last else ():
                walks[placement].updated(number)
        elif isinstance(operation, OfBucket) and operation.bucket.placement < len(walks):
            placement, number = operation.bucket
            walk = chunks[placement] if isinstance(operation, OfChunk) else walks[placement]
            getattr(walk, f"on_{type(operation).__name__.lower()}")(number)
    return gradients, ledger.most


def _run_rules(
    blueprint: Blueprint, updates: Iterable[tuple[Updated, int]], ledger: Ledger
) -> None:
    """On so many elements of each, group by group: blocks of one shape as stacks, slices alone."""
    by_group: dict[int, list[tuple[torch.Tensor, tuple[int, ...]]]] = defaultdict(list)
    for each, elements in updates:
        by_group[each.group] += [(each.param, shape) for shape in each.shapes(elements)]
    for index, members in by_group.items():
        group = blueprint.groups[index]
        on_cpu = blueprint.device.type == "cpu"
        sizes = (prod(shape) * math_dtype(param).itemsize for param, shape in members)
        clipped = sum(sizes) if blueprint.clips and on_cpu else 0  # all of a group; kernels do not
        most, peaks = 0, RulePeaks(group, on_cpu=on_cpu)
        stacked: dict[tuple[tuple[int, ...], torch.dtype, bool], int] = defaultdict(int)
        for param, shape in members:
            master = needs_master(param, blueprint.optimizer.plan.masters)
            if not on_cpu and len(shape) == 2:
                shape = (min(shape), max(shape))  # the kernels take transposes together
            stacked[shape, param.dtype, master] += 1
        asked = blueprint.optimizer._steps.batch_elements
        at_once = asked or (STACK_ELEMENTS if on_cpu else BATCH_ELEMENTS)
        batches: list[Batch] = []
        for (shape, dtype, master), count in stacked.items():
            count = min(count, max(1, at_once // max(1, prod(shape))))  # a part may be empty
            if rule_of(group).kind == "elementwise":
                by_kernel = not on_cpu and kernel_is_enough(group)
                size = 0 if by_kernel else peaks.slice(prod(shape), dtype, master=master)
            elif on_cpu:
                rows, cols = shape
                size = peaks.stack(count, (rows, cols), dtype, master=master)
            else:
                batches.append(Batch(count, *shape))
                continue
            most = max(most, size)
        lanes = dealt(batches, sparing=asked is not None)
        most = max(most, temporary_bytes(batches, lanes))
        ledger.passing(clipped + most)
