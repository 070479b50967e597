"""Offloaded state: staging buffers on the device, and the copies between host and buffers.

Windows of state come in on one stream and go back on another, beside the computation. Three waits
keep this right: the computation waits for a window that it needs; a window goes back after all work
enqueued so far; and a buffer is refilled once its previous window is back.

The CPU has no streams. A stand-in there delays copies until they are waited for, so that a missing
wait gives wrong numbers also without a GPU.
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from samestep.plan.windows import aligned
from samestep.rules.state import State

Copies = Sequence[tuple[Tensor, Tensor]]  # into, from


class Streams(Protocol):
    """Copies beside the computation; an event is done once all work before the event is done."""

    def bring(self, copies: Copies, after: Any) -> Any:
        """Start copies to the device after an event (None: at once); return their event."""
        ...

    def take_back(self, copies: Copies) -> Any:
        """Start copies to the host after all work enqueued so far; return their event."""
        ...

    def wait(self, event: Any) -> None:
        """Let all computation from now on wait for an event."""
        ...

    def finish(self) -> None:
        """Wait until all copies are done."""
        ...


class CudaStreams:
    """Two CUDA streams: one for copies to the device, one for copies to the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        make: Any = torch.cuda.Stream  # without types of its own
        self._into, self._out = make(device), make(device)

    def bring(self, copies: Copies, after: Any) -> Any:
        """See `Streams`."""
        if after is not None:
            self._into.wait_event(after)
        return self._copied(self._into, copies)

    def take_back(self, copies: Copies) -> Any:
        """See `Streams`."""
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        return self._copied(self._out, copies)

    def _copied(self, stream: Any, copies: Copies) -> Any:
        with torch.cuda.stream(stream):
            for into, source in copies:
                into.copy_(source, non_blocking=True)
        return stream.record_event()

    def wait(self, event: Any) -> None:
        """See `Streams`."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def finish(self) -> None:
        """See `Streams`."""
        self._into.synchronize()
        self._out.synchronize()


class LateCopies:
    """A stand-in for streams on CPU: copies run in order, each only when it is waited for."""

    def __init__(self) -> None:
        self._into: deque[Callable[[], None]] = deque()
        self._out: deque[Callable[[], None]] = deque()

    def bring(self, copies: Copies, after: Any) -> Any:
        """See `Streams`."""
        if after is not None:
            self._into.append(after)
        return self._put_off(self._into, copies)

    def take_back(self, copies: Copies) -> Any:
        """See `Streams`; on CPU all results are there already."""
        return self._put_off(self._out, copies)

    def _put_off(self, stream: deque[Callable[[], None]], copies: Copies) -> Callable[[], None]:
        over = False

        def run() -> None:
            nonlocal over
            for into, source in copies:
                into.copy_(source)
            over = True

        def event() -> None:
            while not over:
                stream.popleft()()

        stream.append(run)
        return event

    def wait(self, event: Any) -> None:
        """See `Streams`."""
        event()

    def finish(self) -> None:
        """See `Streams`."""
        for stream in (self._into, self._out):
            while stream:
                stream.popleft()()


class _Staged(NamedTuple):
    """A window's host tensors (`home`), and the views of the buffer that copy them (`here`)."""

    home: tuple[State, ...]
    here: list[State]


@dataclass
class _There:
    """A window that is in a buffer or being copied there; `in_use`: a step has waited for it."""

    slot: int
    here: list[State]
    goes_back: Sequence[State]
    wanted: Sequence[bool]
    event: Any
    in_use: bool = False


class Staging:
    """The staging buffers of an optimizer, and the windows of state that they hold.

    A window's views are the same tensors in every step while its state tensors stay the same:
    kernels keep tables of their addresses.
    """

    def __init__(self, device: torch.device, streams: Streams | None = None) -> None:
        self._device = device
        if streams is None:
            streams = CudaStreams(device) if device.type == "cuda" else LateCopies()
        self._streams = streams
        self._buffers: list[Tensor] = []
        self._returned: dict[int, Any] = {}  # by buffer: when what it had is back
        self._known: dict[tuple[Hashable, int], _Staged] = {}
        self._there: dict[Hashable, _There] = {}

    @property
    def nbytes(self) -> int:
        """Return the bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def make_room(self, sizes: Sequence[int]) -> None:
        """Allocate buffers of these sizes, in bytes, unless they exist."""
        if [buffer.nbytes for buffer in self._buffers] == list(sizes):
            return
        self._buffers, self._known = [], {}  # first let go of those that were there
        self._buffers = [
            torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes
        ]
        if self._device.type == "cuda":  # others may still work on the memory that these are in
            torch.cuda.current_stream(self._device).synchronize()

    def fetch(
        self,
        window: Hashable,
        slot: int,
        home: Sequence[State],
        goes_back: Sequence[State],
        wanted: Sequence[bool],
    ) -> None:
        """Start copying the wanted states of a window into a buffer, once the buffer is free.

        goes_back: the part of each state that the step changes.
        """
        here = self._views(window, slot, home)
        copies = [
            (own[key], tensor)
            for own, state, travels in zip(here, home, wanted, strict=True)
            for key, tensor in state.items()
            if travels
        ]
        event = self._streams.bring(copies, self._returned.pop(slot, None))
        self._there[window] = _There(slot, here, goes_back, wanted, event)

    def _views(self, window: Hashable, slot: int, home: Sequence[State]) -> list[State]:
        known = self._known.get((window, slot))
        if known is None or not _are_the_same(known.home, home):
            known = _Staged(tuple(map(dict, home)), _carved(self._buffers[slot], home))
            self._known[window, slot] = known
        return known.here

    def arrived(self, window: Hashable) -> list[State]:
        """Wait for a window and return its states on the device; unwanted ones are undefined."""
        there = self._there[window]
        self._streams.wait(there.event)
        there.in_use = True  # not before: until then the buffer holds something else
        return there.here

    def give_back(self, window: Hashable) -> None:
        """Start copying a window back to the host."""
        there = self._there[window]
        copies = [
            (tensor, own[key])
            for own, state, travels in zip(there.here, there.goes_back, there.wanted, strict=True)
            for key, tensor in state.items()
            if travels
        ]
        self._returned[there.slot] = self._streams.take_back(copies)
        del self._there[window]  # not before: a step that is broken off gives it back as well

    def break_off(self) -> None:
        """Abort a step: copy back the windows that it may have changed, and finish.

        After a complete step this does nothing.
        """
        for window in [window for window, there in self._there.items() if there.in_use]:
            self.give_back(window)
        self.finish()

    def finish(self) -> None:
        """Wait until all state is back on the host."""
        if self._there or self._returned:
            self._streams.finish()
        self._there, self._returned = {}, {}


def _are_the_same(known: Sequence[State], found: Sequence[State]) -> bool:
    return len(known) == len(found) and all(
        own.keys() == other.keys() and all(own[key] is other[key] for key in own)
        for own, other in zip(known, found, strict=True)
    )


def _carved(buffer: Tensor, home: Sequence[State]) -> list[State]:
    """Return views of a buffer for state: contiguous tensors of the same shapes and dtypes."""
    found: list[State] = []
    start = 0
    for state in home:
        own: State = {}
        for key, tensor in state.items():
            nbytes = tensor.numel() * tensor.element_size()
            own[key] = buffer[start : start + nbytes].view(tensor.dtype).view(tensor.shape)
            start += aligned(nbytes)
        found.append(own)
    return found
