"""Boxes of tensors: the part that a rank holds under any sharding over a mesh.

Every rank holds one box: a range of each dim. A mesh axis either replicates, or cuts one dim into
pieces of equal length, rounded up, so that the last ones may be short or empty (as `torch.chunk`
does). Axes that cut the same dim do so one after the other: plain shards from left to right, then
strided shards from right to left. A strided shard is how an axis that was added later (FSDP) cuts
what an axis to its right (tensor parallel) had cut before it.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

Shape = tuple[int, ...]
_PLAIN = (torch.nn.Parameter, Tensor)


class Cut(NamedTuple):
    """The effect of one mesh axis on a tensor: shard `dim`, or replicate if it is None.

    `strided`: the axis cuts parts that axes to its right have cut before; there are
    `split_factor` of these parts.
    """

    dim: int | None = None
    split_factor: int = 1
    strided: bool = False


class Box(NamedTuple):
    """A range of each dim of a tensor."""

    offsets: Shape
    sizes: Shape

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def overlap(self, other: "Box") -> "Box":
        """Return the intersection of two boxes, which is empty if they do not overlap."""
        pairs = list(zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True))
        starts = tuple(max(a, b) for a, _, b, _ in pairs)
        stops = [min(a + n, b + m) for a, n, b, m in pairs]
        sizes = tuple(max(0, stop - start) for start, stop in zip(starts, stops, strict=True))
        return Box(starts, sizes)

    def within(self, outer: "Box") -> "Box":
        """Return this box relative to the start of `outer`."""
        offsets = tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True))
        return Box(offsets, self.sizes)

    def shifted(self, outer: "Box") -> "Box":
        """Return this box relative to the start of the tensor: the inverse of `within`."""
        offsets = tuple(a + b for a, b in zip(self.offsets, outer.offsets, strict=True))
        return Box(offsets, self.sizes)

    def divided(self, per: int) -> "Box":
        """Return the box in a tensor with one element for `per` neighbours in the last dim."""
        if per == 1:
            return self
        offsets, sizes = self.offsets, self.sizes
        return Box((*offsets[:-1], offsets[-1] // per), (*sizes[:-1], sizes[-1] // per))

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))


def local_box(
    shape: Shape, mesh_shape: Sequence[int], cuts: Sequence[Cut], coordinate: Sequence[int]
) -> Box:
    """Return the box that the rank at `coordinate` of a mesh holds of a tensor of `shape`."""
    offsets, sizes = [0] * len(shape), list(shape)
    for axis in _order(mesh_shape, cuts):
        dim = cuts[axis].dim
        assert dim is not None
        length = -(-sizes[dim] // mesh_shape[axis])
        start = min(coordinate[axis] * length, sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(length, sizes[dim] - start)
    return Box(tuple(offsets), tuple(sizes))


def all_boxes(shape: Shape, mesh_shape: Sequence[int], cuts: Sequence[Cut]) -> list[Box]:
    """Return the boxes of all ranks, with the last mesh axis running fastest."""
    return [
        local_box(shape, mesh_shape, cuts, coordinate)
        for coordinate in product(*(range(size) for size in mesh_shape))
    ]


def replicas(mesh_shape: Sequence[int], cuts: Sequence[Cut]) -> list[int]:
    """Return for each rank the number of the copy that it holds of its box, from 0."""
    axes = [axis for axis, cut in enumerate(cuts) if cut.dim is None]
    numbers = []
    for coordinate in product(*(range(size) for size in mesh_shape)):
        number = 0
        for axis in axes:
            number = number * mesh_shape[axis] + coordinate[axis]
        numbers.append(number)
    return numbers


def _order(mesh_shape: Sequence[int], cuts: Sequence[Cut]) -> Iterator[int]:
    """Yield sharding mesh axes in the order in which they cut; raise if the order is unknown."""
    axes = [axis for axis, cut in enumerate(cuts) if cut.dim is not None]
    yield from (axis for axis in axes if not cuts[axis].strided)
    for axis in reversed(axes):
        if not cuts[axis].strided:
            continue
        before = 1
        for other in axes:
            if other > axis and cuts[other].dim == cuts[axis].dim:
                before *= mesh_shape[other]
        if cuts[axis].split_factor != before:
            raise ValueError(
                f"mesh axis {axis} shards dim {cuts[axis].dim} as _StridedShard with "
                f"split_factor {cuts[axis].split_factor}, and the mesh axes to its "
                f"right cut it into {before}: build the DTensor with fully_shard over "
                "tensor parallel, which sets it"
            )
        yield axis


# --- stretches of contiguous tensors, and state ---------------------------------------------------


def range_boxes(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """Yield boxes that together are elements start to stop - 1 of a contiguous tensor.

    There are at most two boxes per dim after the first, and one more: in (4, 10), 7..32 is 7..9
    of row 0, rows 1 and 2, and 0..2 of row 3.
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    inner = prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # whole rows
    if first > last:  # inside one row
        yield from _in_row(shape, last, start - last * inner, stop - last * inner)
        return
    if start < first * inner:
        yield from _in_row(shape, first - 1, start - (first - 1) * inner, inner)
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if last * inner < stop:
        yield from _in_row(shape, last, 0, stop - last * inner)


def _in_row(shape: Shape, row: int, start: int, stop: int) -> Iterator[Box]:
    for box in range_boxes(shape[1:], start, stop):
        yield Box((row, *box.offsets), (1, *box.sizes))


class HeldBox(NamedTuple):
    """A box of a larger tensor, and the view that holds it on this rank."""

    box: Box
    tensor: Tensor


class HeldState(NamedTuple):
    """This rank's boxes of one state tensor, which has `shape` in one process."""

    param: Tensor
    key: str
    shape: Shape
    boxes: list[HeldBox]


def whole_box(tensor: Tensor) -> HeldBox:
    """Return the box of a whole tensor."""
    shape = tuple(tensor.shape)
    return HeldBox(Box((0,) * len(shape), shape), tensor)


def held_range(shape: Shape, start: int, values: Tensor) -> Iterator[HeldBox]:
    """Yield boxes of a range of a contiguous tensor, as views of `values`."""
    flat, done = values.view(-1), 0
    for box in range_boxes(shape, start, start + flat.numel()):
        yield HeldBox(box, flat[done : done + box.numel].view(box.sizes))
        done += box.numel


# --- DTensors, asked without importing them, which takes long -------------------------------------


def local_of(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, or a plain tensor itself."""
    return tensor if mesh_of(tensor) is None else tensor.to_local()  # type: ignore[attr-defined]


def mesh_of(param: Tensor) -> Any:
    """Return the mesh of a DTensor; None for a plain tensor."""
    if type(param) in _PLAIN:  # asking for an attribute that is not there takes long
        return None
    return getattr(param, "device_mesh", None)


def clone_in_place(tensor: Tensor) -> Tensor:
    """Copy a tensor, and a DTensor with the placements it has, without a collective.

    In contrast, `clone()` of a DTensor with `Partial` placements sums it over its mesh.
    """
    mesh = mesh_of(tensor)
    if mesh is None:
        return tensor.clone()
    dtensor: Any = tensor
    return cast(
        "Tensor",
        dtensor.from_local(
            local_of(tensor).detach().clone(),
            mesh,
            dtensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        ),
    )


def cut_as(wanted: Sequence[Any], found: Sequence[Any]) -> list[Any]:
    """Return placements of a gradient, sharded as its parameter where it was replicated.

    The change needs no communication. `torch.zeros_like` of a sharded parameter, for example,
    gives replicated zeros.
    """
    return [
        own if of_grad.is_replicate() and own.is_shard() else of_grad
        for own, of_grad in zip(wanted, found, strict=True)
    ]
