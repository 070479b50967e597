"""Windows: runs of bounded size in which state on the host is copied to the device.

A window is a run of units (the state of a parameter, of a piece, or of a block). State of
elementwise rules may be cut anywhere, so a unit that is larger than a window spans several.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from samestep.layout.flat_ranges import in_runs

WINDOW_BYTES = 1 << 28  # of state: 5 ms over PCIe at 55 GB/s, and 64M elements of momentum
GRAIN = 4096  # elements: units are cut at multiples of it
ALIGNMENT = 512  # bytes: where tensors begin in a staging buffer, as torch's allocator has it


class TensorSize(NamedTuple):
    """A state tensor of a unit."""

    numel: int
    width: int  # bytes of an element

    def of_range(self, elements: int, unit: int) -> int:
        """Return the elements that belong to a range of the unit; all, if not cut with it."""
        return self.numel * elements // unit if self.is_cut_with(unit) else self.numel

    def is_cut_with(self, unit: int) -> bool:
        """Whether the tensor has an element for each of the unit, or for a few neighbours.

        Otherwise it belongs to the unit as a whole, such as its number of steps.
        """
        if not 1 < self.numel <= unit or unit % self.numel:
            return False
        return GRAIN % (unit // self.numel) == 0


class UnitSize(NamedTuple):
    """The size of a unit of copied state: of a parameter, a piece or a block."""

    elements: int
    tensors: tuple[TensorSize, ...]
    may_be_cut: bool

    def nbytes(self, elements: int) -> int:
        """Return the bytes of the state of `elements` elements in a staging buffer."""
        return sum(
            aligned(tensor.of_range(elements, self.elements) * tensor.width)
            for tensor in self.tensors
        )


class UnitRange(NamedTuple):
    """Elements [start, stop) of a unit; `is_last`: whether the unit ends with this range."""

    unit: int
    start: int
    stop: int
    is_last: bool


Window = tuple[UnitRange, ...]


def aligned(nbytes: int) -> int:
    """Return the bytes that a tensor of `nbytes` takes up in a staging buffer."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def windows(units: Sequence[UnitSize], most: int | None = None) -> list[Window]:
    """Group units in windows of at most `most` bytes, or of one unit that cannot be cut."""
    most = most or WINDOW_BYTES
    runs = in_runs(_cuts(units, most), lambda cut: window_bytes([cut], units), most)
    return [tuple(window) for window in runs]


def window_bytes(window: Iterable[UnitRange], units: Sequence[UnitSize]) -> int:
    """Return the bytes that a window takes up in a staging buffer."""
    return sum(units[cut.unit].nbytes(cut.stop - cut.start) for cut in window)


def _cuts(units: Sequence[UnitSize], most: int) -> Iterable[UnitRange]:
    for number, unit in enumerate(units):
        step = unit.elements
        if unit.may_be_cut and unit.nbytes(unit.elements) > most:
            count = -(-unit.nbytes(unit.elements) // most)
            step = max(GRAIN, unit.elements // count // GRAIN * GRAIN)
        for start in range(0, max(unit.elements, 1), max(step, 1)):
            stop = min(start + step, unit.elements)
            yield UnitRange(number, start, stop, stop == unit.elements)
