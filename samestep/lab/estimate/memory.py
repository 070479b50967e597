"""Bytes of tensors on each rank: memory that stays between steps, and the peak within a step.

Activations are not included: `activations` estimates them. Operations of a schedule declare the
buffers that they allocate and free (`plan.memory`), and a ledger replays these; temporaries of
rules are found by running the rules (`temporaries`).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import torch

from samestep.groups.param_groups import rule_of
from samestep.lab.estimate.grid_plan import GridPlan
from samestep.lab.estimate.ledger import Ledger, Then
from samestep.lab.estimate.temporaries import RulePeaks, kernel_is_enough
from samestep.plan.memory import (
    GRADIENTS,
    BlockMemory,
    BucketMemory,
    Change,
    Passing,
    PlacementMemory,
)
from samestep.plan.placement_plan import BlockPlan, BucketPlan, Updated
from samestep.plan.schedule import Update, staging_bytes
from samestep.plan.sharding import ParamSpec
from samestep.rules.state import MASTERS, block_state_shapes, whole_shapes
from samestep.shards.replicated.state_packing import StatePacking
from samestep.update.lanes import Batch, dealt, temporary_bytes
from samestep.update.plain import BATCH_ELEMENTS, STACK_ELEMENTS


class RankMemory(NamedTuple):
    """Memory of one rank, in bytes.

    gradients: gradients when backward is over.
    gradients_then, buffers, temporaries: memory at the moment when most bytes are alive.
    staging: buffers on the device for offloaded state; on_host: the state on the host.
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
        """Return the bytes that are alive between steps, without gradients."""
        return self.parameters + self.main_parameters + self.state + self.staging

    @property
    def in_flight(self) -> int:
        return self.buffers + self.temporaries

    @property
    def peak(self) -> int:
        """Return all bytes at the moment when most are alive."""
        return self.stays + self.gradients_then + self.in_flight

    def at(self, then: Then) -> "RankMemory":
        """Return the memory of this rank at another moment of the step."""
        return self._replace(
            gradients_then=then.gradients, buffers=then.buffers, temporaries=then.temporaries
        )

    def or_then(self, inside: Then) -> "RankMemory":
        """Return this rank's memory at a moment of forward and backward, if more is alive then."""
        return self if inside.total <= self.gradients_then + self.in_flight else self.at(inside)


def rank_memory(grid_plan: GridPlan, rank: int) -> RankMemory:
    kept = kept_memory(grid_plan, rank)
    gradients, then = passing_memory(grid_plan, rank)
    found = kept._replace(gradients=gradients).at(then)
    if grid_plan.distribution.offload is None:
        return found
    staging = sum(staging_bytes(grid_plan.schedule(rank)))
    on_host = kept.main_parameters + kept.state
    return found._replace(main_parameters=0, state=0, staging=staging, on_host=on_host)


def kept_memory(grid_plan: GridPlan, rank: int) -> RankMemory:
    """Return the bytes that a rank keeps, on device or host: parameters, main parameters, state."""
    params, entries = 0, list[tuple[str, int]]()  # of state: key and bytes
    for placement, own in zip(grid_plan.placements, grid_plan.on_rank(rank), strict=True):
        if own.buckets is not None:
            params += _whole_parameters(own.buckets)
            entries += _shared_state(own.buckets, own.place, grid_plan.groups)
            if own.blocks is not None:
                entries += _owned_state(own.blocks, own.mesh_place, grid_plan.groups)
        elif own.blocks is not None:
            params += sum(n * spec.torch_dtype.itemsize for spec, n in placement.stored(own))
            for spec, held in zip(own.blocks.specs, own.blocks.held, strict=True):
                elements = held.boxes[own.mesh_place].numel
                entries += _spread_state(spec, elements, grid_plan.groups)
            entries += _owned_state(own.blocks, own.mesh_place, grid_plan.groups)
    for param, spec in () if grid_plan.placements else grid_plan.local_specs.items():
        params += spec.nbytes
        state = grid_plan.optimizer.state[param]
        entries += ((key, tensor.nbytes) for key, tensor in state.items())
    main = sum(size for key, size in entries if key in MASTERS)
    return RankMemory(params, 0, main, sum(size for _, size in entries) - main)


def _whole_parameters(buckets: BucketPlan) -> int:
    """Return the bytes of whole parameters, gaps of flat buffers included."""
    flat = buckets.options.buffers == "flat"
    return sum(each.nbytes for each in (buckets.plan.buckets if flat else buckets.plan.params))


def _shared_state(
    buckets: BucketPlan, place: int, groups: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, int]]:
    packing = StatePacking(buckets.plan, place, list(map(dict, groups)))
    for spec, sizes in zip(buckets.plan.params, packing.sizes, strict=True):
        for key, size in sizes.items():
            if spec.whole is None or not spec.stored[key].owned:
                yield key, size * spec.stored[key].dtype.itemsize


def _owned_state(
    blocks: BlockPlan, mesh_place: int, groups: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, int]]:
    """Yield keys and bytes of the state that is kept by owners, of the blocks that a rank owns."""
    for planned in (planned for chunk in blocks.chunks for planned in chunk.blocks):
        spec = blocks.specs[planned.param]
        if mesh_place in planned.owners and any(how.owned for how in spec.stored.values()):
            group = groups[spec.group]
            shapes = block_state_shapes(rule_of(group), planned.block, group, spec.stored)
            for key, how in spec.stored.items():
                if how.owned:
                    yield key, prod(shapes[key]) * how.dtype.itemsize


def _spread_state(
    spec: ParamSpec, elements: int, groups: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, int]]:
    """Yield keys and bytes of state: sharded like the parameter, or else whole on every rank."""
    group = groups[spec.group]
    shapes = whole_shapes(rule_of(group), spec.shape, spec.blocks, group, spec.stored)
    for key, how in spec.stored.items():
        if how.owned:
            continue
        count = prod(shapes[key]) if how.per is None else elements // how.per
        yield key, count * how.dtype.itemsize


def whole_gradients(grid_plan: GridPlan, rank: int) -> int:
    """Return the bytes of the gradients that backward leaves on a rank before any is reduced."""
    return sum(_gradient_bytes(grid_plan.stored(rank)))


def _gradient_bytes(stored: Iterable[tuple[ParamSpec, int]]) -> list[int]:
    return [elements * spec.gradient_dtype.itemsize for spec, elements in stored]


def passing_memory(grid_plan: GridPlan, rank: int) -> tuple[int, Then]:
    """Return the bytes of gradients after backward, and the moment when most bytes are alive."""
    ledger, changes = Ledger(), step_memory(grid_plan, rank)
    ledger.replay(next(changes))
    gradients = ledger.now[GRADIENTS]
    for each in changes:
        ledger.replay(each)
    return gradients, ledger.most


def step_memory(grid_plan: GridPlan, rank: int) -> Iterator[Iterable[Change]]:
    """Yield the changes of memory of backward, and then of each operation of the step."""
    rules = _Rules(grid_plan, rank)
    memories = _memories(grid_plan, rank, rules)
    again = grid_plan.stages is not None  # a pipeline has several micro-batches
    yield chain.from_iterable(each.backward(again=again) for each in memories)
    yield chain.from_iterable(each.begin() for each in memories)
    for operation in grid_plan.schedule(rank):
        if isinstance(operation, Update):
            yield map(Passing, rules.update(operation))
        yield chain.from_iterable(each.of(operation) for each in memories)


def _memories(grid_plan: GridPlan, rank: int, rules: "_Rules") -> list[PlacementMemory]:
    """Return the memory of each placement's buckets and blocks on a rank."""
    found: list[PlacementMemory] = []
    each = zip(grid_plan.placements, grid_plan.on_rank(rank), strict=True)
    for number, (placement, own) in enumerate(each):
        gradients: list[int] = []
        if own.buckets is not None:
            found.append(BucketMemory(number, own.buckets, own.place, placement.summands))
        else:
            gradients = _gradient_bytes(placement.stored(own))
        if own.blocks is not None:
            summands = () if own.buckets is not None else placement.summands
            found.append(
                BlockMemory(
                    number, own.blocks, own.mesh_place, rules.transform, gradients, summands
                )
            )
    return found or [PlacementMemory(0, _gradient_bytes(grid_plan.stored(rank)))]


class _Rules:
    """The bytes that rules allocate while they run, on one rank."""

    def __init__(self, grid_plan: GridPlan, rank: int) -> None:
        self._grid_plan, self._every = grid_plan, grid_plan.on_rank(rank)
        self._on_cpu = grid_plan.device.type == "cpu"
        self._windows = cache(lambda number: grid_plan.windows(self._every[number]))

    def transform(self, spec: ParamSpec, count: int, shape: tuple[int, int]) -> int:
        """Return the bytes allocated to transform so many whole matrices of one shape."""
        if self._on_cpu:
            peaks = RulePeaks(self._grid_plan.groups[spec.group], on_cpu=True)
            return peaks.transform(count, shape, spec.math_dtype)
        batch = Batch(count, *shape)
        return batch.temporary_bytes + count * prod(shape) * 4

    def update(self, operation: Update) -> Iterator[int]:
        """Yield the peak bytes that an update allocates for each param group."""
        by_group: dict[int, list[tuple[ParamSpec, tuple[int, ...]]]] = defaultdict(list)
        for each, elements in self._updates(operation):
            shapes = [(elements,)] if each.block is None else each.block.matrices
            by_group[each.spec.group] += [(each.spec, shape) for shape in shapes]
        return (self._of_group(index, members) for index, members in by_group.items())

    def _updates(self, operation: Update) -> list[tuple[Updated, int]]:
        """Return the pieces that an operation updates, with the number of elements of each."""
        if operation.window is not None:
            placement = operation.window.bucket.placement
            own = self._windows(placement) if self._every else self._grid_plan.local_windows
            parts = own.parts(operation.window)
            return [(part.unit.about, part.stop - part.start) for part in parts]
        if not self._every:
            return [(unit.about, unit.elements) for unit in self._grid_plan.local_units]
        found = (
            each
            for placement, number in operation.buckets
            if placement < len(self._every)
            for each in self._every[placement].updates(number)
        )
        return [(each, each.elements) for each in found]

    def _of_group(self, index: int, members: list[tuple[ParamSpec, tuple[int, ...]]]) -> int:
        """Return the peak bytes of a group: blocks of a shape run as stacks, slices alone."""
        group, on_cpu = self._grid_plan.groups[index], self._on_cpu
        sizes = (prod(shape) * spec.math_dtype.itemsize for spec, shape in members)
        clipped = sum(sizes) if self._grid_plan.clips and on_cpu else 0  # kernels do without
        most, peaks = 0, RulePeaks(group, on_cpu=on_cpu)
        masters = self._grid_plan.optimizer.plan.masters
        stacked: dict[tuple[tuple[int, ...], torch.dtype, bool], int] = defaultdict(int)
        for spec, shape in members:
            dtype = spec.torch_dtype
            master = masters and dtype.itemsize < spec.math_dtype.itemsize
            if not on_cpu and len(shape) == 2:
                shape = (min(shape), max(shape))  # the kernels take transposes together
            stacked[shape, dtype, master] += 1
        asked = self._grid_plan.optimizer._steps.batch_elements
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
        return clipped + max(most, temporary_bytes(batches, lanes))
