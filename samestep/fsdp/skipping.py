"""Skipping FSDP2 modules: a number without meaning goes through, and the input around them."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from samestep.fsdp.participation import Participation, participation_of
from samestep.shards.dtensor.fsdp_units import nested_modules, own_places


def skip(module: nn.Module, x: Tensor) -> Tensor:
    """A stand-in for `module(x)` on a rank that does not use an FSDP2 module.

    The rank takes part in gathering the module's parameters, and in backward in reducing their
    gradients, with zeros. FSDP2 modules inside it are skipped too, in order of registration.

    A rank without a loss: `skip(model, torch.zeros(())).backward()`.

    Args:
        module: Of a model that was given to `take_part`.
        x: Its input, floating. Must require a gradient where other ranks' inputs do.

    Returns:
        x, in the same memory. Backward has to come through it, as through other ranks' outputs.
    """
    participation = participation_of(module)
    if participation is None:
        raise RuntimeError(
            "skip() was called with a module that is not an FSDP2 module of a model given "
            "to take_part(): call samestep.fsdp.take_part(model) first"
        )
    if not isinstance(x, Tensor) or not x.is_floating_point():
        found = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(
            f"skip() needs a floating tensor, got {found}: backward passes through it; "
            "where the module's input is no floating tensor (token ids), give any "
            "floating tensor, such as zeros of the output's shape"
        )
    token = cast(Tensor, _Leave.apply(x))  # type: ignore[no-untyped-call]
    return _joined(x, _pass_through(module, token, participation))


def _pass_through(module: nn.Module, token: Tensor, participation: Participation) -> Tensor:
    """Call a module with a forward that only lets FSDP2 do its part; () -> ()."""

    def forward(token: Tensor) -> Tensor:
        trained = any(place.now.requires_grad for place in own_places(module))
        token = _differentiable(token) if trained else token
        for child in nested_modules(module):
            given = _as_its_input(child, token, participation.sends_gradients.get(child))
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


def _as_its_input(module: nn.Module, token: Tensor, sends_gradients: bool | None) -> Tensor:
    """The token, which requires a gradient where the module's input does."""
    if sends_gradients is None:  # a first guess: tokens of a text do not
        sends_gradients = token.requires_grad and not isinstance(module, nn.Embedding)
    if not sends_gradients:
        return token.detach()
    return token if token.requires_grad else _differentiable(token)


def _differentiable(token: Tensor) -> Tensor:
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
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0].new_zeros((), dtype=ctx.token)
