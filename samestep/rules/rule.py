"""The Rule protocol: the math that turns (parameter, gradient, state, scalars) into new ones.

A rule knows nothing of ranks, placements or batching. It says what state it keeps
and computes new values from old ones without changing its arguments, so whoever
runs it may hand it slices, stacks of blocks, or copies on another device, and may
select between old and new values afterwards.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor

from samestep.rules.exact_sums import sums_of_blocks

Shape = tuple[int, ...]
Tensors = Mapping[str, Tensor]  # state or scalars, by name
Options = Mapping[str, Any]  # the keys of a parameter group


class Update(NamedTuple):
    """New values, in the shapes and dtypes that `Rule.update` was given."""

    param: Tensor
    state: dict[str, Tensor]
    direction: Callable[[], Tensor] | None = None
    """What is multiplied with the learning rate, before any factor; computed if asked for."""


@runtime_checkable
class InPlaceRule(Protocol):
    """A rule that can also write its result into its arguments, which saves memory traffic."""

    def update_(
        self, param: Tensor, grad: Tensor, state: Tensors, scalars: Tensors, options: Options
    ) -> None:
        """Write the result of `Rule.update` into `param` and `state`, to the same bits."""
        ...


@runtime_checkable
class TogetherRule(Protocol):
    """An elementwise rule that can update many tensors in one call: faster on small ones."""

    def runs_together(self, options: Options) -> bool:
        """Whether the rule can update many tensors in one call with these options."""
        ...

    def update_all_(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[Tensors],
        scalars: Tensors,
        options: Options,
    ) -> None:
        """Do `update_` for each of the tensors, to the same bits."""
        ...


class Direction(NamedTuple):
    """The result of a stage: the direction of the update, and new state."""

    direction: Tensor
    state: dict[str, Tensor]


@runtime_checkable
class StagedRule(Protocol):
    """A matrix rule whose `update` is three steps, of which only the second needs whole blocks.

    So a rank that holds a part of a block can do the first and the last by itself, and only what
    goes into and comes out of the second has to travel. `staged_update` is its `update`.
    """

    def prepare(
        self, grad: Tensor, state: Tensors, scalars: Tensors, options: Options
    ) -> Direction:
        """Turn any part of a block into the input of `transform`, and state of its shape."""
        ...

    def transform(
        self, prepared: Tensor, state: Tensors, scalars: Tensors, options: Options
    ) -> Direction:
        """Return the direction of blocks (B, rows, cols), and new state of any other shape."""
        ...

    def finish(
        self,
        param: Tensor,
        direction: Tensor,
        block_shape: Shape,
        scalars: Tensors,
        options: Options,
    ) -> Tensor:
        """Return the new parameter from any part of a block of `block_shape`."""
        ...


@runtime_checkable
class SummingRule(StagedRule, Protocol):
    """A staged rule that finishes by sums over whole blocks, such as the norm of the new weight.

    Ranks that hold parts of a block add up what each has; the sums have the same bits in every
    layout (`rules.exact_sums`). They reach `finish` among the scalars, by name, in float64 and of a
    shape that a part can be multiplied with; cast what is made of them to the parameter's dtype.
    """

    def sums(self, options: Options) -> Sequence[str]:
        """Return the names of the sums, always the same ones with these options."""
        ...

    def summands(
        self,
        param: Tensor,
        direction: Tensor,
        block_shape: Shape,
        scalars: Tensors,
        options: Options,
    ) -> Tensors:
        """Return, by name, a term for each element of any part of a block of `block_shape`."""
        ...


@runtime_checkable
class OwnedStateRule(Protocol):
    """A matrix rule with state that the owner of a block alone has, such as preconditioners.

    Other state that belongs to a whole block, such as a step count, is small: where blocks are
    divided, everyone who holds a part of a block has it.
    """

    def owned_state(self, options: Options) -> Collection[str]:
        """Return the names of these state tensors; only `transform` is given them."""
        ...


class Rule(Protocol):
    """One update rule. Subclassing is not needed: any object with these members is a rule.

    An *elementwise* rule may run on any slice of a parameter: `param` and `grad` have
    any shape, and each state tensor either that shape or `()`.
    A *matrix* rule needs each block whole: `param` and `grad` are stacks (B, rows, cols)
    of blocks of one shape, and each state tensor is (B, *state_shapes[...]).
    """

    @property
    def name(self) -> str:
        """The name that groups write as `"rule": name`."""
        ...

    @property
    def kind(self) -> Literal["elementwise", "matrix"]:
        """Whether the rule may run on any slice, or needs whole blocks."""
        ...

    @property
    def defaults(self) -> Options:
        """Every group key the rule reads, with its default."""
        ...

    @property
    def schedulable(self) -> frozenset[str]:
        """The keys whose values may change from step to step: they reach `update` as scalars."""
        ...

    def check(self, options: Options) -> None:
        """Raise ValueError or TypeError, quoting the bad value, if `options` cannot run."""
        ...

    def scalars(self, options: Options) -> dict[str, float | Tensor]:
        """Return the numbers behind the schedulable keys (learning rate, decay, ...).

        They reach `update` as 0-D float64 tensors, so that a schedule never recompiles it.
        """
        ...

    def state_shapes(self, shape: Shape, options: Options) -> dict[str, Shape]:
        """Return, by name, the shapes of the state tensors of one slice or block of `shape`."""
        ...

    def update(
        self, param: Tensor, grad: Tensor, state: Tensors, scalars: Tensors, options: Options
    ) -> Update:
        """Compute new values and leave the arguments as they are.

        All tensors but the scalars share one floating dtype of 32 bits or more. `options`
        holds the keys of `defaults` that are not schedulable.
        """
        ...


@runtime_checkable
class BoundedRule(Protocol):
    """A matrix rule that bounds the size of its directions, so that broken ones are noticed."""

    def largest_norm(self, shape: Shape, options: Options) -> float:
        """Return a number above the norm of any direction of a block of this shape."""
        ...


# --- the stages of a rule, one after the other, where blocks are whole -------------------------


def staged_update(
    rule: StagedRule,
    param: Tensor,
    grad: Tensor,
    state: Tensors,
    scalars: Tensors,
    options: Options,
) -> Update:
    """Take one step of a rule with stages on a stack of blocks, (B, rows, cols)."""
    prepared, kept = rule.prepare(grad, state, scalars, options)
    direction, of_blocks = rule.transform(prepared, state, scalars, options)
    shape = param.shape[-2], param.shape[-1]
    if hasattr(rule, "summands"):  # as `is_summing`
        new_param = finished(rule, param, direction, shape, scalars, options)
    else:
        new_param = rule.finish(param, direction, shape, scalars, options)
    return Update(new_param, {**kept, **of_blocks}, lambda: direction)


def finished(
    rule: StagedRule,
    param: Tensor,
    direction: Tensor,
    block_shape: Shape,
    scalars: Tensors,
    options: Options,
) -> Tensor:
    """Run the last stage on a stack of whole blocks, with the sums that it needs."""
    if is_summing(rule):
        terms = rule.summands(param, direction, block_shape, scalars, options)
        scalars = {**scalars, **sums_of_blocks(terms)}
    return rule.finish(param, direction, block_shape, scalars, options)


@cache
def follows(kind: type, protocol: type) -> bool:
    """Whether a class has the members of a protocol; cached, since asking takes long."""
    return issubclass(kind, protocol)


def is_staged(rule: Rule | StagedRule) -> TypeGuard[StagedRule]:
    """Whether a rule has stages, of which all but `transform` can run on parts of a block."""
    return follows(type(rule), StagedRule)


def is_summing(rule: Rule | StagedRule) -> TypeGuard[SummingRule]:
    """Whether the last stage of a rule needs sums over whole blocks."""
    return hasattr(rule, "summands")  # as torch.compile can trace it, where a cache is warned of


def owned_state(rule: Rule, options: Options) -> frozenset[str]:
    """Return the names of the state that the owner of a block alone has."""
    if follows(type(rule), OwnedStateRule):
        assert isinstance(rule, OwnedStateRule)
        return frozenset(rule.owned_state(options))
    return frozenset()


# --- numbers -----------------------------------------------------------------------------------


def math_dtype(param: Tensor) -> torch.dtype:
    """Return the dtype of state and arithmetic: float32, or float64 for float64 parameters."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32


# --- scalars of a step as numbers of Python, where reading them waits for nothing ---------------


def on_host(tensor: Tensor) -> bool:
    """Whether the math on a tensor may read scalars: it is on CPU, and not being compiled."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def number(scalar: Tensor, like: Tensor) -> Any:
    """Return a 0-D tensor as a Python number if `like` is on the host, else unchanged.

    Arithmetic of Python numbers costs a tenth of that of 0-D tensors, and gives equal results.
    """
    return scalar.item() if on_host(like) else scalar


def bounded_gradient(grad: Tensor, most: float) -> Tensor:
    """Clamp elements to `most`, at least 2^63: a rule's results of finite gradients are finite.

    Elements that are infinite or NaN stay so: a broken gradient must not look sound. On the host a
    sum of squares, which is cheap, tells first whether any element may have to be clamped.
    """
    if on_host(grad):
        flat = grad.reshape(-1)
        if torch.dot(flat, flat).item() <= 2.0**126:
            return grad
    return torch.where(grad.isinf(), grad, grad.clamp(-most, most))


def in_dtype(value: float | Tensor, like: Tensor) -> Any:
    """Return a 0-D tensor in the dtype of another; a Python number is returned unchanged."""
    return value.to(like.dtype) if isinstance(value, Tensor) else value
