"""Gradients of DTensors: whether a rank has one, and which are partial sums over ranks.

A mark tells whether this rank has used a parameter, where FSDP2 is given zeros for those it has
not. It is about one gradient: with that it comes and goes, whoever drops it. Sequence parallel and
LoRA leave every rank a summand.
"""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple, TypeGuard
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement

from samestep.comm.collectives import Pending, maximum, total
from samestep.comm.groups import RankGroup
from samestep.comm.meshes import axes_group, box_without
from samestep.layout.boxes import cut_as
from samestep.plan.sharding import Piece
from samestep.shards.replicated.buckets import gradient_dtype
from samestep.shards.replicated.local_tensors import MEAN, REPLICATED, SUMMAND

if TYPE_CHECKING:
    from samestep.shards.dtensor.mesh_layout import MeshLayout

Kinds = tuple[int, ...]  # of a gradient, along each axis of its mesh
_SUMS = ("sum", "avg")  # of summands, by the digit that stands for them, less 1


class Mark:
    """Records whether backward has used a sharded parameter since its gradient was dropped.

    used: a backward pass of this rank has reached it.
    """

    def __init__(self, param: Tensor) -> None:
        self.param = param  # keeps it alive, so that its id stays its own
        self.used = False
        self._grad: weakref.ref[Tensor] | None = None  # the one that FSDP2 has made
        _marks[id(param)] = self

    def reduced(self) -> None:
        """Note that FSDP2 has reduced the unit of this parameter."""
        grad = self.param.grad
        self._grad = None if grad is None else weakref.ref(grad)

    def renew(self) -> None:
        """Forget a dropped gradient."""
        if self._grad is not None and not self._is_ours():
            self.used = False
            self._grad = None

    def only_zeros(self) -> bool:
        """Whether this rank contributed only placeholder zeros to the gradient."""
        return not self.used and self._is_ours()

    def _is_ours(self) -> bool:
        grad = self.param.grad
        return grad is not None and self._grad is not None and self._grad() is grad


_marks: WeakValueDictionary[int, Mark] = WeakValueDictionary()  # by id of the parameter


def has_gradient(param: Tensor) -> bool:
    """Whether this rank has a real gradient, not placeholder zeros."""
    if param.grad is None:
        return False
    mark = _marks.get(id(param))
    return mark is None or not mark.only_zeros()


class _Kind(NamedTuple):
    """Gradients that can be summed together: same mesh, axes, divisor and dtype."""

    mesh: DeviceMesh
    axes: tuple[int, ...]
    divisor: int
    dtype: torch.dtype


def summands(param: DTensor) -> int:
    """Mesh axes along which a gradient is Partial, as bits; 0: it is absent.

    Two bits for each axis: none, sums, means.
    """
    if not has_gradient(param):
        return 0
    code = 1
    for axis, place in enumerate(getattr(param.grad, "placements", ())):
        if place.is_partial() and place.reduce_op in _SUMS:
            code |= _SUMS.index(place.reduce_op) + 1 << 2 * axis + 1
    return code


def no_summand(param: DTensor, code: int) -> DTensor | None:
    """Zeros for a rank without a gradient where others have summands; else None.

    code: their `summands`.
    """
    axes = {axis: code >> 2 * axis + 1 & 3 for axis in range(param.device_mesh.ndim)}
    summed = [axis for axis, kind in axes.items() if kind]
    if not summed:
        return None
    shape, held = box_without(param, summed).sizes, param.to_local()
    places: list[Placement] = list(param.placements)
    for axis in summed:
        places[axis] = Partial(_SUMS[axes[axis] - 1])
    zeros = torch.zeros(shape, dtype=gradient_dtype(param), device=held.device)
    return placed(zeros, param, places)


def combine_gradients(
    params: Iterable[Tensor], nothing: Mapping[Tensor, DTensor | None] | None = None
) -> dict[Tensor, DTensor]:
    """Sum or slice gradients so that each is placed like its parameter.

    Once more changes nothing. Collective on the meshes: all of their ranks are here, and whoever
    lacks a gradient of which others have summands gives `nothing`; these sums are returned.
    """
    found: list[DTensor] = []
    partial: list[tuple[DTensor, Sequence[Placement]]] = []
    for param in params:
        if not isinstance(param, DTensor):
            continue
        grad = param.grad if param.grad is not None else (nothing or {}).get(param)
        if getattr(grad, "placements", None) == param.placements:
            continue  # as FSDP2 gives it
        if is_partial(grad):
            found.append(param)
            # An equal mesh has other groups, and who lacks a gradient knows those of the parameter.
            if grad.device_mesh == param.device_mesh:
                grad = placed(grad.to_local(), param, grad.placements)
            partial.append((grad, param.placements))
        elif (
            isinstance(grad, DTensor)
            and grad.placements != param.placements
            and grad.device_mesh == param.device_mesh
        ):
            param.grad = grad.redistribute(placements=cut_as(param.placements, grad.placements))
    sums: dict[Tensor, DTensor] = {}
    if not partial:
        return sums
    for param, combined in zip(found, combine(partial), strict=True):
        if param.grad is None:
            sums[param] = combined
        else:
            param.grad = combined
    return sums


def is_partial(grad: Tensor | None) -> TypeGuard[DTensor]:
    """Whether the gradient is Partial along an axis."""
    return isinstance(grad, DTensor) and any(place.is_partial() for place in grad.placements)


def combine(grads: Sequence[tuple[DTensor, Sequence[Placement]]]) -> list[DTensor]:
    """Sum gradients in as few collectives as possible, and place them.

    Over several axes in one sum: one after the other, ranks could get different last bits.
    """
    together: dict[_Kind, list[int]] = {}
    results: list[DTensor | None] = [None] * len(grads)
    for number, (grad, wanted) in enumerate(grads):
        kind = _kind(grad, wanted)
        if kind is None:
            results[number] = grad.redistribute(placements=_combined_placements(grad, wanted))
        else:
            together.setdefault(kind, []).append(number)
    on_their_way: list[tuple[list[int], Pending[Tensor], int]] = []
    for kind, numbers in together.items():
        flat = torch.cat([grads[number][0].to_local().reshape(-1) for number in numbers])
        ranks = axes_group(kind.mesh, kind.axes)
        on_their_way.append((numbers, total("sum of gradients", flat, ranks), kind.divisor))
    for numbers, pending, divisor in on_their_way:
        flat = pending.wait()
        if divisor > 1:
            flat = flat.div_(divisor)
        sizes = [grads[number][0].to_local().numel() for number in numbers]
        for number, part in zip(numbers, torch.split(flat, sizes), strict=True):
            grad, wanted = grads[number]
            part = part.view(grad.to_local().shape)
            results[number] = placed(part, grad, _combined_placements(grad, wanted))
    return [result for result in results if result is not None]


def placed(local: Tensor, like: DTensor, placements: Sequence[Placement]) -> DTensor:
    """A DTensor from the local tensors of ranks, without communication."""
    return DTensor.from_local(
        local,
        like.device_mesh,
        placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def fits(param: DTensor, grad: Tensor) -> bool:
    """Whether `combine_gradients` can give a gradient the placement of its parameter."""
    if not isinstance(grad, DTensor):
        return False
    partial = [place for place in grad.placements if place.is_partial()]
    combined = cut_as(param.placements, _combined_placements(grad, param.placements))
    known = all(getattr(place, "reduce_op", None) in _SUMS for place in partial)
    return known and tuple(combined) == tuple(param.placements)


def _combined_placements(grad: DTensor, wanted: Sequence[Placement]) -> list[Placement]:
    pairs = zip(grad.placements, wanted, strict=True)
    return [own if found.is_partial() else found for found, own in pairs]


def _kind(grad: DTensor, wanted: Sequence[Placement]) -> _Kind | None:
    """Kind of the sum of a gradient; None if torch must redistribute it."""
    axes, divisor = [], 1
    for axis, (found, own) in enumerate(zip(grad.placements, wanted, strict=True)):
        if found.is_partial():
            operation = getattr(found, "reduce_op", None)
            if operation not in _SUMS or not own.is_replicate():
                return None
            axes.append(axis)
            divisor *= grad.device_mesh.size(axis) if operation == "avg" else 1
    return _Kind(grad.device_mesh, tuple(axes), divisor, grad.dtype)


# --- of DTensors whose copies on other meshes the optimizer averages ------------------------------


class MeshSums:
    """Sums mean gradients over a mesh whose ranks have partial ones.

    A gradient is along each axis of its mesh cut (0), REPLICATED, a SUMMAND or a MEAN: its *kinds*.
    Ranks without a gradient do not know them, and hear of them from the others.
    """

    def __init__(self, layout: "MeshLayout") -> None:
        self._layout, self._mesh = layout, layout.mesh

    def are_open(self, kinds: Sequence[Kinds]) -> bool:
        """Whether the kind of some gradient is still unknown."""
        return any(
            not own and any(place.is_replicate() for place in param.placements)
            for own, param in zip(kinds, self._layout.params, strict=True)
        )

    def agreed_kinds(self, kinds: Sequence[Kinds], groups: Sequence[RankGroup]) -> list[Kinds]:
        """The kind of each gradient, agreed between ranks; waits for all of them."""
        axes = self._mesh.ndim
        codes = [sum(kind << 2 * axis for axis, kind in enumerate(own)) for own in kinds]
        known = torch.tensor(codes, dtype=torch.int64, device=self._layout.device)
        for group in groups:
            known = maximum("kinds of gradients", known, group).wait()
        return [
            tuple(code >> 2 * axis & 3 for axis in range(axes)) if code else ()
            for code in known.tolist()
        ]

    def added_up(
        self, means: list[tuple[Piece, Tensor]], kinds: Sequence[Kinds]
    ) -> list[tuple[Piece, Tensor]]:
        """Mean gradients, with partial ones summed over the mesh."""
        together: dict[Kinds, list[int]] = {}
        for place, (piece, _) in enumerate(means):
            own = kinds[piece.param]
            if SUMMAND in own or MEAN in own:
                together.setdefault(own, []).append(place)
        results = dict(enumerate(means))
        for own, places in together.items():
            axes = [axis for axis, kind in enumerate(own) if kind > REPLICATED]
            divisor = prod(self._mesh.size(axis) for axis in axes if own[axis] == MEAN)
            flat = torch.cat([means[place][1].reshape(-1) for place in places])
            summed = total("sum of gradients", flat, axes_group(self._mesh, axes)).wait()
            if divisor > 1:
                summed = summed.div_(divisor)
            sizes = [means[place][1].numel() for place in places]
            for place, part in zip(places, torch.split(summed, sizes), strict=True):
                results[place] = means[place][0], part
        return [results[place] for place in range(len(means))]

    def as_summand(self, local: Tensor, kinds: Kinds) -> Tensor:
        """This rank's summand of a sum that is to equal `local`."""
        here = self._mesh.get_coordinate()
        assert here is not None
        others = any(kind == SUMMAND and here[axis] for axis, kind in enumerate(kinds))
        return torch.zeros_like(local) if others else local
