"""A whole step as one CUDA graph: the host launches once, however many parameters there are.

A graph has the addresses of all it works on. Those of gradients change from step to step: kernels
read them from a table, which is filled anew before every replay, as learning rates are. Gradients
that come and go are another step: that one runs without a graph, until it comes twice in a row.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samestep.kernels.call import addresses_from, recorded
from samestep.kernels.choice import missing
from samestep.shards.local import KnownGroup
from samestep.update.metrics import StepNumbers
from samestep.update.plain import GroupMath
from samestep.update.triton import KernelPlan, reason_against

ROOM = 1 << 16  # addresses, of all tables of a graph
MOST = 4  # recordings: where steps differ that often, a graph is not worth its while
SHARE = 1 / 25  # of the device's memory, which a graph that nobody asked for may keep


class StepShape(NamedTuple):
    """Everything a recorded CUDA graph depends on."""

    groups: tuple[KnownGroup, ...]  # parameters and state: the same objects until one is replaced
    options: tuple[tuple[Mapping[str, Any], bool], ...]  # of each group, and `maximize`
    gradients: list[tuple[torch.dtype, bool] | None]  # and contiguity; None: absent
    unaligned: list[int]  # places of those that do not begin at a multiple of 16 bytes
    scaled: bool  # whether a GradScaler is in use
    has_norm: bool  # whether gradients are summed before it (`NormAhead`), not in it


class RecordedStep:
    """Runs the first step of a shape eagerly, records the second, and replays it."""

    def __init__(self, *, asked_for: bool) -> None:
        self._asked_for = asked_for
        self._last: StepShape | None = None
        self._refused: StepShape | None = None
        self._shape: StepShape | None = None  # of the graph
        self._graph: torch.cuda.CUDAGraph | None = None
        self._slots: Slots | None = None
        self._numbers = StepNumbers(None, None)
        self._scale: Tensor | None = None
        self._recordings = 0

    def own_scale(self, scale: Tensor) -> Tensor:
        """A GradScaler's scale at a fixed address."""
        if self._scale is None:
            self._scale = scale.clone()
        return self._scale.copy_(scale, non_blocking=True)

    def run(
        self,
        groups: Sequence[KnownGroup],
        maths: Sequence[GroupMath],
        scaled: bool,
        has_norm: bool,
        plans: Mapping[object, KernelPlan],
        execute: Callable[[], StepNumbers],
    ) -> StepNumbers:
        """Run one step."""
        all_grads = [param.grad for group in groups for param in group.params]
        options = tuple((math.options, math.maximize) for math in maths)
        shapes = [None if g is None else (g.dtype, g.is_contiguous()) for g in all_grads]
        grads = [grad for grad in all_grads if grad is not None]
        begins = [grad.data_ptr() for grad in grads]
        unaligned = [place for place, begin in enumerate(begins) if begin % 16]
        shape = StepShape(tuple(groups), options, shapes, unaligned, scaled, has_norm)
        last, self._last = self._last, shape
        if self._asked_for and shape != last:
            _refuse(shape, maths)
        twice = bool(grads) and shape == last != self._refused
        if shape != self._shape and twice and not self._may_record(shape, maths, plans.values()):
            self._refused, twice = shape, False
        if shape != self._shape and not twice:
            return execute()
        if shape != self._shape or self._graph is None or self._slots is None:
            self._record(grads, execute)
            self._shape = shape
        assert self._graph is not None
        assert self._slots is not None
        self._slots.fill(begins)
        self._graph.replay()
        return self._numbers

    def _record(self, grads: Sequence[Tensor], execute: Callable[[], StepNumbers]) -> None:
        self._shape = self._graph = self._slots = None  # what they keep is free again
        slots = Slots(grads)
        with addresses_from(slots):
            graph, self._numbers = recorded(execute, grads[0].device)
        self._graph, self._slots = graph, slots
        self._recordings += 1

    def _may_record(
        self, shape: StepShape, maths: Sequence[GroupMath], plans: Iterable[KernelPlan]
    ) -> bool:
        """Whether a graph would do the same, and be worth what it keeps."""
        if self._recordings >= MOST or torch.cuda.is_current_stream_capturing():
            return False
        if self._asked_for:
            return True
        (device, *others) = _devices(shape)
        if others or any(map(_reason_against, shape.groups, maths)):
            return False
        memory = torch.cuda.get_device_properties(device).total_memory
        return max((plan.temporary_bytes() for plan in plans), default=0) <= SHARE * memory


def _refuse(shape: StepShape, maths: Sequence[GroupMath]) -> None:
    """Raise where a graph would differ from a step."""
    devices = sorted(map(str, _devices(shape)))
    if len(devices) > 1:
        raise RuntimeError(
            "cuda_graph=True needs all parameters on one device, and they are on "
            f"{' and '.join(devices)}: leave cuda_graph out"
        )
    for number, reason in enumerate(map(_reason_against, shape.groups, maths)):
        if reason is not None:
            raise RuntimeError(
                f"cuda_graph=True cannot record param_groups[{number}]: {reason}; leave "
                "cuda_graph out"
            )


def _devices(shape: StepShape) -> set[torch.device]:
    return {param.device for group in shape.groups for param in group.params}


def _reason_against(group: KnownGroup, math: GroupMath) -> str | None:
    """The reason why a graph would do something else than a step; None if it would not."""
    operands = list(group.operands())
    reason = missing(operands[0].param.device) if operands else None
    return reason or reason_against(math, operands)


class Slots:
    """Fixed device memory for addresses that a graph reads."""

    def __init__(self, grads: Sequence[Tensor]) -> None:
        begins = [grad.data_ptr() for grad in grads]
        self._order = sorted(range(len(grads)), key=begins.__getitem__)
        self._begins = [begins[place] for place in self._order]
        self._sizes = [grads[place].nbytes for place in self._order]
        self._gradients: list[int] = []  # which one an address lies in; one past the last: none
        self._offsets: list[int] = []
        self._taken: tuple[Tensor, Tensor] | None = None  # both, once a graph has taken its slots
        self._filled: list[int] = []  # where gradients were when slots were filled
        self._room = torch.zeros(ROOM, dtype=torch.int64, device=grads[0].device)

    def take(self, addresses: Sequence[Sequence[int]]) -> Tensor:
        """Slots for rows of addresses, (rows, columns)."""
        begin, self._taken, self._filled = len(self._gradients), None, []
        for address in chain.from_iterable(addresses):
            found = bisect_right(self._begins, address) - 1
            inside = found >= 0 and address < self._begins[found] + self._sizes[found]
            self._gradients.append(self._order[found] if inside else len(self._begins))
            self._offsets.append(address - self._begins[found] if inside else address)
        end = len(self._gradients)
        if end > ROOM:
            raise RuntimeError(
                f"cuda_graph=True supports at most {ROOM} blocks of Muon, and there are "
                f"{end}: leave cuda_graph out"
            )
        return self._room[begin:end].view(len(addresses), -1)

    def fill(self, begins: list[int]) -> None:
        """Write the gradients' present addresses."""
        if begins == self._filled:
            return
        self._filled = begins
        if self._taken is None:
            self._taken = torch.tensor(self._gradients), torch.tensor(self._offsets)
        bases = torch.tensor([*begins, 0], dtype=torch.int64)
        table = bases[self._taken[0]] + self._taken[1]
        pinned = table.pin_memory() if self._room.is_cuda else table
        self._room[: len(table)].copy_(pinned, non_blocking=True)
