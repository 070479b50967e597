"""Ranks that use different parts of an FSDP2 model, and take part in all of its collectives.

FSDP2 reduces the gradients that a rank has: where ranks have others, it mixes them up or hangs. So
parameters without a gradient get zeros right before their unit is reduced, and marks remember who
has really been used. When FSDP2 reduces, and what therefore has to come first:

    the input requires a gradient:  in backward, when that of the input is known; hooks on the input
                                    run just before
    it does not:                    at the end of backward, in a callback that FSDP2 queues from a
                                    hook on the output; ours is registered, and queued, earlier

All private parts of torch that are in use here:

    Variable._execution_engine.queue_callback   there is no other way to be called at the end
    torch._C._current_graph_task_id             which backward pass is running, -1 for none
    FSDPModule._get_fsdp_state                  which modules are one unit: fully_shard([a, b])
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from samestep.fsdp_units import fsdp_modules, nested_modules, own_places
from samestep.module_calls import CallComparison
from samestep.use_marks import Mark


def take_part(model: nn.Module, check: bool = False) -> None:
    """Let ranks use different parameters of an FSDP2 model, inside and outside of its modules.

    From then on a parameter without a gradient contributes zeros to the mean over ranks, and one
    that no rank has used is left untouched by the optimizer, bit for bit. Several backward passes
    before a step count together. Every rank must still call the same FSDP2 modules in the same
    order: where one is not wanted, `skip` takes its place.

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
    known = {id(p): p for p in map(_participations.get, modules.values()) if p is not None}
    for participation in known.values():
        participation.remove()
    Participation(modules, check)


def skip(module: nn.Module, x: Tensor) -> Tensor:
    """What a rank calls in place of `module(x)` where it does not use an FSDP2 module.

    The rank takes part in gathering the module's parameters, and in backward in reducing their
    gradients, with zeros. FSDP2 modules inside it are skipped too, in order of registration.

    A rank without a loss: `skip(model, torch.zeros(())).backward()`.

    Args:
        module: Of a model that was given to `take_part`.
        x: Its input, floating. Must require a gradient where other ranks' inputs do.

    Returns:
        x, in the same memory. Backward has to come through it, as through other ranks' outputs.
    """
    if module not in _participations:
        raise RuntimeError("skip() is for FSDP2 modules of a model that was given to take_part()")
    if not isinstance(x, Tensor) or not x.is_floating_point():
        found = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(
            f"skip() needs a floating tensor, got {found}: backward has to come through it; where "
            "the input has none (tokens), give any floating tensor, such as the output's zeros"
        )
    token = cast(Tensor, _Leave.apply(x))  # type: ignore[no-untyped-call]
    return _joined(x, _pass_through(module, token, _participations[module]))


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
        self._sends_gradients: dict[nn.Module, bool] = {}  # to its input, when last called
        self._skipping = False
        self._handles: list[RemovableHandle] = []
        for unit in self._units:
            for module in unit.modules:
                self._watch(module, unit)
                _participations[module] = self

    def sends_gradients(self, module: nn.Module) -> bool:
        """Whether a module's input requires a gradient. Before the first call: not if tokens."""
        known = self._sends_gradients.get(module)
        return not isinstance(module, nn.Embedding | nn.EmbeddingBag) if known is None else known

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """While the block runs, modules are not called for what they compute."""
        before, self._skipping = self._skipping, True
        try:
            yield
        finally:
            self._skipping = before

    def remove(self) -> None:
        """Take all hooks away."""
        for handle in self._handles:
            handle.remove()
        for unit in self._units:
            unit.remove()

    def _watch(self, module: nn.Module, unit: "Unit") -> None:
        def before_gather(_: nn.Module, args: Any, kwargs: Any) -> None:
            sends = any(True for _ in _with_gradient((args, kwargs)))
            if self._calls is not None and _backward_pass() < 0:
                self._calls.compare(module, input_requires_grad=sends)
            if torch.is_grad_enabled() and not self._skipping:
                self._sends_gradients[module] = sends
            unit.see_shards()

        def after_gather(_: nn.Module, args: Any, kwargs: Any) -> None:
            unit.see_whole()
            # Its backward has begun: this only computes activations again, with hooks in place.
            again = unit.waits and _backward_pass() == self._pass
            if torch.is_grad_enabled() and not again:
                inputs = list(_with_gradient((args, kwargs)))
                if inputs:
                    register_multi_grad_hook(inputs, lambda _: unit.fill())

        def after_forward(_: nn.Module, args: Any, output: Any) -> None:
            recomputed = _backward_pass() >= 0

            def begin(_: Tensor) -> None:
                self._begin_backward(unit, recomputed)

            for tensor in _with_gradient(output) if torch.is_grad_enabled() else ():
                tensor.register_hook(begin)  # type: ignore[no-untyped-call]

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
                other.waits = False  # of a pass that has failed
            if self._calls is not None and not recomputed:
                self._calls.compare(None)
            _at_end_of_backward(self._before_last_reductions)
        unit.waits = True

    def _before_last_reductions(self) -> None:
        for unit in self._units:
            if unit.waits:
                unit.fill()
        _at_end_of_backward(self._end_backward)  # behind FSDP2's, which is queued already

    def _end_backward(self) -> None:
        for unit in self._units:
            for mark in unit.marks:
                mark.reduced()


_participations: WeakKeyDictionary[nn.Module, Participation] = WeakKeyDictionary()


class Unit:
    """The parameters of one `fully_shard` call, each with its mark."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = modules
        self.waits = False  # for its reduction, in the present backward pass
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

        def used(param: Tensor) -> None:
            if param.grad is not None:  # some backward functions give None
                self.marks[index].used = True

        handle = whole.register_post_accumulate_grad_hook(used)  # type: ignore[no-untyped-call]
        self._handles[index] = handle
        self._whole[index] = whole

    def fill(self) -> None:
        """Give zeros to parameters that have no gradient; FSDP2 reduces next."""
        self.waits = False
        for whole, mark in zip(self._whole, self.marks, strict=True):
            if whole is not None and whole.requires_grad and whole.grad is None:
                whole.grad = torch.zeros_like(whole)
                mark.filled = True

    def remove(self) -> None:
        """Take the hooks on parameters away."""
        for handle in self._handles.values():
            handle.remove()


def _is_shard(found: Tensor, known: Tensor) -> bool:
    """Whether it is sharded as the known one is. Tensor parallel parameters are whole DTensors."""
    if not isinstance(found, DTensor) or not isinstance(known, DTensor):
        return False
    return found.device_mesh == known.device_mesh and found.placements == known.placements


def _with_gradient(values: Any) -> Iterator[Tensor]:
    """The tensors in nested containers that require a gradient."""
    if isinstance(values, Tensor):
        if values.requires_grad:
            yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from _with_gradient(value)
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _with_gradient(value)
    elif is_dataclass(values) and not isinstance(values, type):
        for field in fields(values):
            yield from _with_gradient(getattr(values, field.name))


def _backward_pass() -> int:
    """The number of the backward pass that is running, -1 for none."""
    number: int = torch._C._current_graph_task_id()
    return number


def _at_end_of_backward(callback: Any) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# --- skipping: a number without meaning goes through the module, and the input around it ----------


def _pass_through(module: nn.Module, token: Tensor, participation: "Participation") -> Tensor:
    """Call a module with a forward that only lets FSDP2 do its part; () -> ()."""

    def forward(token: Tensor) -> Tensor:
        trained = any(place.now.requires_grad for place in own_places(module))
        token = _differentiable(token) if trained else token
        for child in nested_modules(module):
            given = token if participation.sends_gradients(child) else token.detach()
            token = _joined(token, _pass_through(child, given, participation))
        return _differentiable(token) if trained else token.clone()

    attributes = vars(module)
    before = attributes.get("forward")  # of those who patch modules
    attributes["forward"] = forward
    try:
        with participation.skipping():
            return cast(Tensor, module(token))
    finally:
        del attributes["forward"]
        if before is not None:
            attributes["forward"] = before


def _differentiable(token: Tensor) -> Tensor:
    """As if parameters had been used."""
    return token + torch.zeros_like(token, requires_grad=True)


def _joined(x: Tensor, token: Tensor) -> Tensor:
    return cast(Tensor, _Return.apply(x, token))  # type: ignore[no-untyped-call]


class _Leave(torch.autograd.Function):
    """x -> a number that requires a gradient if x does; none comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        return None


class _Return(torch.autograd.Function):
    """x as it was; the token has a gradient of zero, so that backward passes there too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor) -> Tensor:
        ctx.token = token.dtype
        return x.detach()  # no view, of which FSDP2 would warn

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0].new_zeros((), dtype=ctx.token)
