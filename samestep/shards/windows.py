"""Offloaded state: its device between steps, and windows that bring it.

From there it comes to the device in windows, and goes back.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from samestep.plan.schedule import Fetch, Stage, WindowId
from samestep.plan.windows import TensorSize, UnitRange, UnitSize, window_bytes, windows
from samestep.rules.state import State
from samestep.update.offload import Staging

OFFLOADED_FROM = ("cuda", "cpu", "meta")  # devices whose state may stay on the host


class StateDevice(NamedTuple):
    """A device for state, with pinned memory or not."""

    device: torch.device
    pinned: bool

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(tuple(shape), dtype=dtype, device=self.device, pin_memory=self.pinned)

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor is on it."""
        return tensor.device == self.device and (not self.pinned or tensor.is_pinned())

    def copy_of(self, tensor: Tensor) -> Tensor:
        """A contiguous copy on it."""
        return self.zeros(tensor.shape, tensor.dtype).copy_(tensor)


def state_device(device: torch.device, offload: str | None) -> StateDevice:
    """Device on which state stays between steps.

    Raises:
        ValueError: It shall be offloaded from a device that has no streams to copy beside it.
    """
    if offload is None:
        return StateDevice(device, pinned=False)
    if device.type not in OFFLOADED_FROM:
        raise ValueError(
            f"offload={offload!r} is for parameters on a CUDA GPU, and there is one on "
            f"{device.type}: leave offload out"
        )
    if device.type == "meta":
        return StateDevice(device, pinned=False)
    return StateDevice(torch.device("cpu"), pinned=device.type == "cuda")


T = TypeVar("T")
NO_LIMIT = 1 << 62


class OffloadUnit(NamedTuple):
    """State that an update needs together.

    about: what the placement knows it by.
    state: on the host, contiguous, with the keys and shapes that the rule declares.
    """

    about: Any
    state: State
    elements: int
    may_be_cut: bool = False

    @property
    def size(self) -> UnitSize:
        """Size of the unit."""
        tensors = tuple(TensorSize(t.numel(), t.element_size()) for t in self.state.values())
        return UnitSize(self.elements, tensors, self.may_be_cut)


class OffloadSlice(NamedTuple):
    """A unit, or a range of it, in a window."""

    unit: OffloadUnit
    start: int
    stop: int
    comes: State
    goes_back: State

    @property
    def is_whole(self) -> bool:
        return self.stop - self.start == self.unit.elements


class Windows:
    """Windows of a placement, by bucket or chunk."""

    def __init__(self, units: Mapping[tuple[Stage, int], Sequence[OffloadUnit]]) -> None:
        self._parts: dict[tuple[Stage, int, int], list[OffloadSlice]] = {}
        self._sizes: dict[tuple[Stage, int], tuple[int, ...]] = {}
        self._made: dict[tuple[WindowId, int], tuple[tuple[object, ...], Any]] = {}
        for (stage, bucket), own in units.items():
            sizes = [unit.size for unit in own]
            cut = windows(sizes, None if stage == "update" else NO_LIMIT)
            self._sizes[stage, bucket] = tuple(window_bytes(window, sizes) for window in cut)
            for number, window in enumerate(cut):
                self._parts[stage, bucket, number] = [_part(own[c.unit], c) for c in window]

    def sizes(self, buckets: int) -> tuple[tuple[int, ...], ...]:
        """Bytes of the windows of each bucket."""
        return tuple(self._sizes.get(("update", bucket), ()) for bucket in range(buckets))

    def chunk_sizes(self, chunks: int) -> tuple[int, ...]:
        """Bytes that each chunk needs, in one window."""
        return tuple(sum(self._sizes.get(("chunk", chunk), ())) for chunk in range(chunks))

    def fetch(self, operation: Fetch, staging: Staging, is_present: Callable[[Any], bool]) -> None:
        """Start copying a window to the device, without absent parameters."""
        parts = self.parts(operation.window)
        wanted = [is_present(part.unit.about) for part in parts]
        home, back = [part.comes for part in parts], [part.goes_back for part in parts]
        staging.fetch(operation.window, operation.slot, home, back, wanted)

    def arrived(self, window: WindowId, staging: Staging) -> list[tuple[OffloadSlice, State]]:
        """Wait for a window; returns its parts."""
        return list(zip(self.parts(window), staging.arrived(window), strict=True))

    def made(
        self, window: WindowId, place: int, of: tuple[object, ...], make: Callable[[], T]
    ) -> T:
        """Cache an object made of a part of a window."""
        known = self._made.get((window, place))
        if known is None or not all(map(operator.is_, known[0], of)):
            known = self._made[window, place] = of, make()
        found: T = known[1]
        return found

    def parts(self, window: WindowId) -> list[OffloadSlice]:
        """The parts of a window."""
        return self._parts[window.stage, window.bucket.bucket, window.number]


def _part(unit: OffloadUnit, cut: UnitRange) -> OffloadSlice:
    """A part of a unit; numbers such as step counts go with the last one.

    Those before would change it for those after: each range begins with the number of last time.
    """
    _, start, stop, is_last = cut
    if stop - start == unit.elements:
        return OffloadSlice(unit, start, stop, unit.state, unit.state)
    comes: State = {}
    goes_back: State = {}
    for key, tensor in unit.state.items():
        is_cut = TensorSize(tensor.numel(), tensor.element_size()).is_cut_with(unit.elements)
        if is_cut:
            per_element = unit.elements // tensor.numel()
            comes[key] = tensor.view(-1)[start // per_element : -(-stop // per_element)]
        else:
            comes[key] = tensor
        if is_cut or is_last:
            goes_back[key] = comes[key]
    return OffloadSlice(unit, start, stop, comes, goes_back)
