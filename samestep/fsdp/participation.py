"""Ranks that use different parts of an FSDP2 model, and take part in all of its collectives.

FSDP2 reduces the gradients that a rank has: where ranks have others, it mixes them up or hangs. So
parameters without a gradient get zeros right before their unit is reduced, and marks remember who
has really been used. When FSDP2 reduces, and what therefore has to come first:

    the input requires a gradient:  in the backward of a function that it has put the input through;
                                    a hook on that runs just before
    it does not:                    at the end of backward, in a callback that FSDP2 queues from a
                                    hook on the output; ours is registered, and queued, earlier

All private parts of torch that are in use here:

    Variable._execution_engine.queue_callback   there is no other way to be called at the end
    torch._C._current_graph_task_id             which backward pass is running, -1 for none
    FSDPModule._get_fsdp_state                  which modules are one unit: fully_shard([a, b])
"""

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from copy import copy
from dataclasses import fields, is_dataclass, replace
from itertools import chain
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from samestep.comm.groups import RankGroup, ranks_text, registry
from samestep.comm.integrity.agreement import RanksDisagreeError, gather_rows
from samestep.shards.dtensor.fsdp_units import called, fsdp_modules, grid, own_places
from samestep.shards.dtensor.gradients import Mark

BACKWARD = -1  # what a rank is about to do, in place of the number of a call


def take_part(model: nn.Module, check: bool = False) -> None:
    """Let ranks use different parameters of an FSDP2 model, inside and outside of its modules.

    From then on a parameter without a gradient contributes zeros to the mean over ranks, and one
    that no rank has used is left untouched by the optimizer, bit for bit. Several backward passes
    before a step count together. Every rank must still call the same FSDP2 modules in the same
    order: where one is not wanted, `samestep.fsdp.skip` takes its place.

    Call it after `fully_shard`, on the outermost module, on all ranks; before or after the
    optimizer is built. Calling it again replaces what was asked for before.

    Args:
        model: The outermost FSDP2 module.
        check: Compare which module ranks are about to call, before every call and every backward
            pass, and raise on all of them if they differ, instead of a hang or mixed-up values.
            Each comparison is a collective that the host waits for: for finding a mistake.

    Raises:
        ValueError: The model has no FSDP2 module.
    """
    modules = fsdp_modules(model)
    for participation in {participation_of(module) for module in modules.values()} - {None}:
        assert participation is not None
        participation.remove()
    Participation(modules, check)


def participation_of(module: nn.Module) -> "Participation | None":
    """The participation of the model that a module belongs to."""
    known = _participations.get(module)
    return None if known is None else known()


class Participation:
    """The hooks on the FSDP2 modules of a model."""

    def __init__(self, modules: Mapping[str, nn.Module], check: bool) -> None:
        together: dict[object, list[nn.Module]] = {}
        for module in modules.values():
            assert isinstance(module, FSDPModule)
            module.reshard()
            together.setdefault(module._get_fsdp_state(), []).append(module)
        self._units = [Unit(members) for members in together.values()]
        self._calls = CallComparison(modules) if check else None
        self._pass = -1  # the backward pass that has been seen
        # Whether a module's input requires a gradient, as of its last call.
        self.sends_gradients: dict[nn.Module, bool] = {}
        self._skipping = False
        self._handles: list[RemovableHandle] = []
        for unit in self._units:
            for module in unit.modules:
                self._watch(module, unit)
                _participations[module] = weakref.ref(self)

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """While the block runs, modules are not called for what they compute."""
        before, self._skipping = self._skipping, True
        try:
            yield
        finally:
            self._skipping = before

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for unit in self._units:
            unit.remove()

    def _watch(self, module: nn.Module, unit: "Unit") -> None:
        def before_gather(_: nn.Module, args: Any, kwargs: Any) -> None:
            sends = any(True for _ in _requiring_gradients((args, kwargs)))
            if self._calls is not None and _backward_pass() < 0:
                self._calls.compare(module, input_requires_grad=sends)
            if torch.is_grad_enabled() and not self._skipping:
                self.sends_gradients[module] = sends
            unit.see_shards()

        def after_gather(_: nn.Module, args: Any, kwargs: Any) -> None:
            unit.see_whole()
            # Its backward has begun: this only computes activations again, with hooks in place.
            again = unit.waits and _backward_pass() == self._pass
            if torch.is_grad_enabled() and not again:
                for node in {t.grad_fn or t for t in _requiring_gradients((args, kwargs))}:
                    _before_backward_of(node, unit.fill)

        def after_forward(_: nn.Module, args: Any, output: Any) -> Any:
            recomputed = _backward_pass() >= 0

            def begin(_: Tensor) -> None:
                self._begin_backward(unit, recomputed)

            def hooked(tensor: Tensor) -> Tensor:
                own = cast(Tensor, _Alias.apply(tensor))  # type: ignore[no-untyped-call]
                own.register_hook(begin)  # type: ignore[no-untyped-call]
                return own

            return _with_others(output, hooked) if torch.is_grad_enabled() else output

        self._handles += [
            module.register_forward_pre_hook(before_gather, prepend=True, with_kwargs=True),
            module.register_forward_pre_hook(after_gather, with_kwargs=True),
            module.register_forward_hook(after_forward, prepend=True),
        ]

    def _begin_backward(self, unit: "Unit", recomputed: bool) -> None:
        """The output of a unit has got its gradient."""
        now = _backward_pass()
        if now != self._pass:
            self._pass = now
            for other in self._units:
                other.waits = other.takes_part = False  # of a pass that has failed
            if self._calls is not None and not recomputed:
                self._calls.compare(None)
            _at_end_of_backward(self._before_last_reductions)
        unit.takes_part = unit.waits = True

    def _before_last_reductions(self) -> None:
        for unit in self._units:
            if unit.waits:
                unit.fill()
        _at_end_of_backward(self._end_backward)  # behind FSDP2's, which is queued already

    def _end_backward(self) -> None:
        for unit in self._units:
            for mark in unit.marks if unit.takes_part else ():
                mark.reduced()
            unit.takes_part = False


# The hooks keep a participation alive, and end with their modules.
_participations: WeakKeyDictionary[nn.Module, weakref.ref[Participation]] = WeakKeyDictionary()


class Unit:
    """The parameters of one `fully_shard` call, each with its mark."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = modules
        self.takes_part = self.waits = False  # in the present backward pass; for its reduction
        places = {id(place.now): place for module in modules for place in own_places(module)}
        self._places = [p for p in places.values() if isinstance(p.now, DTensor)]
        self.marks = [Mark(place.now) for place in self._places]
        self._whole: list[Tensor | None] = [None] * len(self._places)
        self._handles: dict[int, RemovableHandle] = {}

    def see_shards(self) -> None:
        """Before a gather: gradients may be gone, and parameters may be others than before."""
        for index, place in enumerate(self._places):
            mark, found = self.marks[index], place.now
            if found is not mark.param and _is_shard(found, mark.param):
                self.marks[index] = mark = Mark(found)  # loaded, or moved from the meta device
            mark.renew()

    def see_whole(self) -> None:
        """After a gather: have backward tell which parameters it reaches."""
        for index, place in enumerate(self._places):
            whole = place.now
            if whole is not self._whole[index] and whole.requires_grad:
                self._hook(index, whole)

    def _hook(self, index: int, whole: Tensor) -> None:
        if index in self._handles:
            self._handles[index].remove()

        marks = self.marks  # not the unit, which has the parameter: nobody could forget either

        def used(param: Tensor) -> None:
            if param.grad is not None:  # some backward functions give None
                marks[index].used = True

        handle = whole.register_post_accumulate_grad_hook(used)  # type: ignore[no-untyped-call]
        self._handles[index] = handle
        self._whole[index] = whole

    def fill(self) -> None:
        """Give zeros to parameters that have no gradient; FSDP2 reduces next."""
        self.waits = False
        for whole in self._whole:
            if whole is not None and whole.requires_grad and whole.grad is None:
                whole.grad = torch.zeros_like(whole)

    def remove(self) -> None:
        for handle in self._handles.values():
            handle.remove()


class CallComparison:
    """Compares, before FSDP2 communicates, which of its modules ranks are about to call.

    One integer of every rank, before each call of a module and each backward pass.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._names = list(modules)
        self._numbers = {id(module): number for number, module in enumerate(modules.values())}
        self._groups: list[RankGroup | None] = []
        for module in modules.values():  # groups are made by all ranks, in this order
            ranks = sorted(chain.from_iterable(grid(module)))
            self._groups.append(registry.of_members(ranks) if len(ranks) > 1 else None)
        places = chain.from_iterable(own_places(module) for module in modules.values())
        self._device = next(place.now.device for place in places)

    def compare(self, module: nn.Module | None, *, input_requires_grad: bool = False) -> None:
        """Raise on every rank unless all are about to call this module; None: to go backward."""
        if module is None:
            for group in dict.fromkeys(self._groups):
                self._compare(BACKWARD, group)
            return
        number = self._numbers[id(module)]
        code = 4 * number + 2 * input_requires_grad + torch.is_grad_enabled()
        self._compare(code, self._groups[number])

    def _compare(self, code: int, group: RankGroup | None) -> None:
        if group is None:
            return
        mine = torch.tensor([code], dtype=torch.int64, device=self._device)
        codes = [int(code) for code in gather_rows("comparison of calls", mine, group)]
        if len(set(codes)) == 1:
            return
        sides: dict[int, list[int]] = {}
        for rank, other in zip(group.members, codes, strict=True):
            sides.setdefault(other, []).append(rank)
        told = "; ".join(
            f"{ranks_text(ranks, math.inf)}: {self._told(c)}" for c, ranks in sides.items()
        )
        raise RanksDisagreeError(
            "ranks are about to run different modules of an FSDP2 model, which would "
            f"mix up parameters or hang. {told}. On a rank that does not use a module, "
            "call samestep.fsdp.skip(module, x) in its place; on a rank without a "
            "loss, skip the whole model and call backward on the result"
        )

    def _told(self, code: int) -> str:
        if code == BACKWARD:
            return "go backward"
        number, how = divmod(code, 4)
        what = f"call {called(self._names[number])}"
        if not how & 1:
            return f"{what} without gradients"
        return f"{what}, whose input {'requires' if how & 2 else 'does not require'} a gradient"


def _is_shard(found: Tensor, known: Tensor) -> bool:
    """Whether it is sharded as the known one is. Tensor parallel parameters are whole DTensors."""
    if not isinstance(found, DTensor) or not isinstance(known, DTensor):
        return False
    return found.device_mesh == known.device_mesh and found.placements == known.placements


def _backward_pass() -> int:
    """The number of the backward pass that is running, -1 for none."""
    number: int = torch._C._current_graph_task_id()
    return number


def _before_backward_of(node: Node | Tensor, act: Callable[[], None]) -> None:
    """Have something done before a function of the graph, or a leaf, gets its gradients."""
    if isinstance(node, Tensor):
        node.register_hook(lambda _: act())  # type: ignore[no-untyped-call]
    else:
        node.register_prehook(lambda _: act())


def _at_end_of_backward(callback: Any) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)


class _Alias(torch.autograd.Function):
    """x as a tensor of its own.

    A module may give what a module inside it gave, or its input: FSDP2 would gather in another
    order then, and not on ranks that skip the inner one.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()  # no view, of which FSDP2 would warn

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


# --- tensors in what modules are called with and give: tuples, lists, dicts, dataclasses, nested -


def _requiring_gradients(values: Any) -> Iterator[Tensor]:
    """The tensors in nested containers that require a gradient."""
    if isinstance(values, Tensor):
        if values.requires_grad:
            yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from _requiring_gradients(value)
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _requiring_gradients(value)
    elif is_dataclass(values) and not isinstance(values, type):
        for field in fields(values):
            yield from _requiring_gradients(getattr(values, field.name))


def _with_others(values: Any, new: Callable[[Tensor], Tensor]) -> Any:
    """Copy containers, with other tensors for those that require a gradient."""
    if isinstance(values, Tensor):
        return new(values) if values.requires_grad else values
    if isinstance(values, MutableMapping):
        made = copy(values)
        made.update({key: _with_others(value, new) for key, value in values.items()})
        return made
    if isinstance(values, (tuple, list)):
        parts = [_with_others(value, new) for value in values]
        return type(values)(*parts) if hasattr(values, "_fields") else type(values)(parts)
    if is_dataclass(values) and not isinstance(values, type):
        held = {field.name: getattr(values, field.name) for field in fields(values) if field.init}
        return replace(values, **{name: _with_others(value, new) for name, value in held.items()})
    return values
