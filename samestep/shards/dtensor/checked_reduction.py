"""Finds gradients that are not finite before FSDP2 reduces them (`check_gradients=True`).

FSDP2 packs the gradients of a unit and reduces them inside backward. `CheckedReduceScatter` stands
before the reduce-scatter that the unit has, whichever that is, and looks at what is packed: if it
is not finite, this rank sends zeros in its place, so that no rank leaves the common order, and the
sum is void. Which parameters are packed is known once torch has given them their gradients. Until
these are dropped, `GradientCheck` has a problem to tell in the step, where all ranks hear of it.

A parameter that is cut over another axis too (tensor parallel) may have summands of a gradient on
the ranks of that axis, which FSDP2 adds up before it packs. Its gradient is looked at before that,
by a hook on the gathered parameter.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from samestep.comm.presence import RankFailure
from samestep.layout.boxes import local_of
from samestep.shards.dtensor.fsdp_units import ReducedUnit, units_beside, units_of
from samestep.shards.dtensor.gradients import placed
from samestep.shards.not_finite import is_finite, not_finite
from samestep.tooling.warn import some

_WHEN = "before FSDP2 averaged it with those of other ranks"


class GradientCheck:
    """Reports void reductions among the FSDP2 units of some parameters."""

    def __init__(self, params: Sequence[DTensor], names: Sequence[str], rank: int) -> None:
        self._params, self._names, self._rank = params, names, rank
        mine = set(map(id, params))
        beside = units_beside(params)
        self._units = [unit for unit in beside if mine.intersection(map(id, unit.params))]
        self._comms = [_checked(unit) for unit in self._units]
        for comm in self._comms:
            comm.checks.add(self)

    def problem(self) -> RankFailure | None:
        """An error if gradients of this rank's units are unusable, or None."""
        for unit, comm in zip(self._units, self._comms, strict=True):
            if unit.reduce_scatter is not comm:
                return RankFailure(
                    RuntimeError(
                        f"the reduce-scatter of the FSDP2 unit with {unit.name(0)!r} was replaced "
                        f"on rank {self._rank}, and check_gradients=True can no longer look at "
                        "what is sent: call set_custom_reduce_scatter before the optimizer is "
                        "built, which then looks before it"
                    )
                )
            for void in comm.void_sums:
                if void.lasts():
                    return void.problem(self._places(), self._rank)
        return None

    def drop(self) -> None:
        """Note that gradients are about to be zeroed in place."""
        for comm in self._comms:
            for void in comm.void_sums:
                void.remove_hooks()
            comm.void_sums.clear()

    def _places(self) -> Mapping[int, tuple[int, str]]:
        """The index and name of every parameter, by its id."""
        pairs = enumerate(zip(self._params, self._names, strict=True))
        return {id(param): (index, name) for index, (param, name) in pairs}


def _checked(unit: ReducedUnit) -> "CheckedReduceScatter":
    """Install the check before the reduce-scatter of a unit, if it is not there."""
    found = unit.reduce_scatter
    if isinstance(found, CheckedReduceScatter):
        return found
    comm = unit.reduce_scatter = CheckedReduceScatter(unit, found)
    return comm


def set_reduce_scatter(module: FSDPModule, comm: Any) -> None:
    """Set a unit's reduce-scatter, keeping an installed check before it."""
    units = units_of(module)
    before = [unit.reduce_scatter for unit in units]
    module.set_custom_reduce_scatter(comm)
    for unit, checked in zip(units, before, strict=True):
        if isinstance(checked, CheckedReduceScatter):
            checked.inner, unit.reduce_scatter = comm, checked


class CheckedReduceScatter:
    """A reduce-scatter that checks packed gradients before another one sends them.

    checks: those that want to know; without any it only hands on.
    void_sums: those to which this rank gave zeros, and of which there may be gradients still.
    """

    def __init__(self, unit: ReducedUnit, inner: Any) -> None:
        self.inner = inner
        self.checks: weakref.WeakSet[GradientCheck] = weakref.WeakSet()
        self.void_sums: list[VoidSum] = []
        self._unit = unit
        self._scatters = unit.scatters
        self._packed: Tensor | None = None  # without a sum yet
        self._found: dict[int, Tensor] = {}  # gradients that were not finite, of the next sum
        self._hooked: dict[int, Tensor] = {}  # gathered parameters
        if unit.is_cut_otherwise:
            for module in unit.modules:
                module.register_forward_pre_hook(self._watch_gathered)

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Allocate the packed gradients, then the sum."""
        room: Tensor = self.inner.allocate(size, dtype=dtype, device=device)
        if not self._scatters:  # copies of the whole unit are added up, without a call of this
            packed, self._packed = self._packed, room
            if packed is not None and packed.numel() == prod(size):
                self._packed = None
                self._look_at(packed)
        return room

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> Any:
        self._look_at(input_tensor)
        return self.inner(output_tensor, input_tensor, group, op, async_op)

    @torch.no_grad()
    def _look_at(self, packed: Tensor) -> None:
        for void in self.void_sums:
            void.close()
        self.void_sums = [void for void in self.void_sums if void.lasts()]
        found, self._found = self._found, {}
        if self.checks and (found or not is_finite(packed)):
            self.void_sums.append(VoidSum(self._unit, found, packed.clone()))
            packed.zero_()

    # --- gradients that are combined before they are packed ------------------------------------

    def _watch_gathered(self, *_: object) -> None:
        """Install hooks on the gathered parameters before forward."""
        for index in range(len(self._unit.params)):
            whole = self._unit.gathered(index)
            if whole is not None and whole.requires_grad and self._hooked.get(index) is not whole:
                self._hooked[index] = whole
                arrived = partial(self._arrived, index)
                whole.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _arrived(self, index: int, whole: Tensor) -> None:
        """Replace the gradient of a parameter by zeros if it is not finite."""
        grad = whole.grad
        if grad is None or not self.checks:
            return
        local = local_of(grad)
        if not is_finite(local):
            self._found.setdefault(index, local.clone())
            zeros = torch.zeros_like(local)
            whole.grad = (
                placed(zeros, grad, grad.placements) if isinstance(grad, DTensor) else zeros
            )


class VoidSum:
    """A reduction to which this rank contributed zeros, and the gradients it produced.

    found: gradients that were not finite before they were packed, by parameter.
    packed: what would have been sent otherwise.
    """

    def __init__(self, unit: ReducedUnit, found: Mapping[int, Tensor], packed: Tensor) -> None:
        self._unit, self._found, self._packed = unit, found, packed
        self._grads: dict[int, weakref.ref[Tensor]] = {}  # in the order in which they are packed
        self._versions: dict[int, tuple[int, int]] = {}  # as they were when this was told
        self._handles = [
            param.register_post_accumulate_grad_hook(partial(self._reduced, index))  # type: ignore[no-untyped-call]
            for index, param in enumerate(unit.params)
            if param.requires_grad
        ]

    def _reduced(self, index: int, param: Tensor) -> None:
        """Note that FSDP2 has assigned a shard of this sum to a parameter."""
        if param.grad is not None:
            self._grads.setdefault(index, weakref.ref(param.grad))

    def close(self) -> None:
        """Note that later gradients do not belong to this sum."""
        if self._grads:
            self.remove_hooks()

    def remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()

    def lasts(self) -> bool:
        """Whether a gradient contains this sum, or still will under HSDP."""
        return not self._grads or any(map(self._is_there, self._grads))

    def _is_there(self, index: int) -> bool:
        grad = self._unit.params[index].grad
        if grad is None or grad is not self._grads[index]():
            return False
        # Who has heard of it may have zeroed gradients where they are.
        version = _version(grad)
        return self._versions.get(index, version) == version or bool(local_of(grad).any())

    def problem(self, places: Mapping[int, tuple[int, str]], rank: int) -> RankFailure:
        """An error that names the gradients that were not finite."""
        self.close()
        params = self._unit.params
        for index in self._grads:
            grad = params[index].grad
            if grad is not None:
                self._versions[index] = _version(grad)
        for index, values in self._bad():
            place, name = places.get(id(params[index]), (None, self._unit.name(index)))
            when = _WHEN if values.dtype == params[index].dtype else f"in {values.dtype}, {_WHEN}"
            return RankFailure(not_finite(name, rank, values, when), place)
        names = [repr(self._unit.name(index)) for index in range(len(params))]
        return RankFailure(
            FloatingPointError(
                f"a gradient of the FSDP2 unit with {some(names)} on rank {rank} has values that "
                f"are not finite, {_WHEN}"
            )
        )

    def _bad(self) -> Iterator[tuple[int, Tensor]]:
        """Parameters whose gradients were not finite."""
        yield from self._found.items()
        trainable = [i for i, param in enumerate(self._unit.params) if param.requires_grad]
        members = list(self._grads) or trainable
        sizes = [self._unit.elements(index) for index in members]
        if self._packed.numel() % sum(sizes) == 0:
            columns = torch.split(self._packed.view(-1, sum(sizes)), sizes, dim=1)
            for index, values in zip(members, columns, strict=True):
                if not is_finite(values):
                    yield index, values


def _version(grad: Tensor) -> tuple[int, int]:
    """Version counter of a DTensor and its local tensor."""
    return grad._version, local_of(grad)._version
