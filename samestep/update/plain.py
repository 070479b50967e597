"""Runs rules in plain torch: read, update, write back.

Rules are pure functions; this module prepares their inputs. Same-shape blocks become one
stack, so that each shape costs one batched orthogonalization. Math is in 32 bits or more,
whatever the dtype of the parameter.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, cast

import torch
from torch import Tensor

from samestep.rules.converted import is_rounded
from samestep.rules.noise import Origin
from samestep.rules.rule import (
    BoundedRule,
    InPlaceRule,
    Rule,
    StagedRule,
    TogetherRule,
    follows,
    math_dtype,
)
from samestep.rules.state import MASTER, MASTERS, State
from samestep.rules.stored import (
    REMAINDER_KEY,
    SCALE_SUFFIX,
    STEP,
    decode,
    encode,
    is_signed,
    join_remainder,
    round_bf16,
    split_remainder,
)

if TYPE_CHECKING:
    from samestep.update.metrics import Outliers, UpdateSizes

STACK_ELEMENTS = 1 << 28  # a larger stack of blocks is cut in several, to bound memory
# The same of what kernels orthogonalize at once: 4 bytes each, and less for Gram matrices.
BATCH_ELEMENTS = 1 << 30

Scalars = Mapping[str, Tensor]


class Operand(NamedTuple):
    """A parameter, or a view of a block, with its gradient and state."""

    param: Tensor
    grad: Tensor
    state: State
    present: Tensor | None = None  # a flag on the device: False leaves all as it is
    counted: bool = True  # whether this rank answers for it in sums over ranks
    share: float = 1.0  # there, where others that the plan does not know hold copies
    rows: int | None = None  # of the matrix; None: as many as the first dim has
    origin: Origin | None = None  # where random bits of its state come from

    @property
    def matrix(self) -> tuple[int, int]:
        """Return the rows and columns of a block as a matrix."""
        rows = self.param.shape[0] if self.rows is None else self.rows
        return rows, self.param.numel() // rows


class GroupMath(NamedTuple):
    """Rule, options and numbers of one group in this step."""

    rule: Rule
    scalars: Scalars
    options: Mapping[str, Any]
    factor: Tensor | None  # gradients are multiplied with it
    maximize: bool
    only_if: Tensor | None  # a flag on the device: False leaves all as it is
    sizes: "UpdateSizes | None"  # told of every direction, if these are measured
    bounds: "Outliers | None" = None

    def gradient(self, grad: Tensor) -> Tensor:
        """Return a gradient times `factor` (then in 32 bits or more), negated under `maximize`."""
        if self.factor is not None:
            wide = torch.promote_types(grad.dtype, torch.float32)
            grad = grad.to(wide) * self.factor.to(wide)
        return -grad if self.maximize else grad


GroupMaths = Callable[[int, torch.device], GroupMath]  # by index of the group


class Result(NamedTuple):
    """New parameter and state, and the direction's sum of squares if it was measured."""

    param: Tensor
    state: State
    square: Tensor | None = None  # (), or (B,) for a stack


UpdateFunction = Callable[[Rule, Tensor, Tensor, State, Scalars, Mapping[str, Any], bool], Result]


def run_rule(
    rule: Rule,
    param: Tensor,
    grad: Tensor,
    state: State,
    scalars: Scalars,
    options: Mapping[str, Any],
    measure: bool = False,
) -> Result:
    """Run `rule.update` without compiling."""
    new = rule.update(param, grad, state, scalars, options)
    if not measure:
        return Result(new.param, new.state)
    if new.direction is None:
        raise NotImplementedError(
            f"rule {rule.name!r} does not define direction(), so update_rms cannot be "
            "measured: leave update_rms out"
        )
    return Result(new.param, new.state, direction_squares(new.direction(), rule.kind))


def direction_squares(direction: Tensor, kind: str = "matrix") -> Tensor:
    """Return a direction's sum of squares, (), or each block's of a stack, (B,), in float64."""
    dims = (-2, -1) if kind == "matrix" else None
    norms: Tensor = torch.linalg.vector_norm(direction, dim=dims, dtype=torch.float64)
    return norms.square()


def update_together(
    rule: Rule, operands: Sequence[Operand], math: "GroupMath", run: UpdateFunction
) -> bool:
    """Update all operands in one call; return False if that is unsupported.

    One call is supported if nothing is selected, converted or measured.
    """
    if math.only_if is not None or math.sizes is not None or run is not run_rule:
        return False
    if not follows(type(rule), TogetherRule):
        return False
    together = cast("TogetherRule", rule)
    if not together.runs_together(math.options) or not all(map(_is_plain, operands)):
        return False
    together.update_all_(
        [operand.param for operand in operands],
        [operand.grad for operand in operands],
        [operand.state for operand in operands],
        math.scalars,
        math.options,
    )
    return True


def is_bounded(rule: Rule | StagedRule) -> TypeGuard[BoundedRule]:
    """Whether a rule states the largest norm of its directions."""
    return follows(type(rule), BoundedRule)


def _is_plain(operand: Operand) -> bool:
    """Whether an operand needs no dtype conversion and no presence flag."""
    dtype = operand.param.dtype
    tensors = (operand.grad, *operand.state.values())
    return (
        operand.present is None
        and dtype == math_dtype(operand.param)
        and all(tensor.dtype == dtype for tensor in tensors)
    )


def update_elementwise(
    rule: Rule,
    operand: Operand,
    scalars: Scalars,
    options: Mapping[str, Any],
    run: UpdateFunction = run_rule,
    only_if: Tensor | None = None,
    measure: bool = False,
) -> Tensor | None:
    """Apply an elementwise rule to a parameter in place; if the flag is False, change nothing.

    Return the sum of squares of the direction, (1,), if `measure` is on.
    """
    param, grad, state = _read(operand)
    # Nothing to select or convert afterwards: the rule may write into place by itself.
    plain = only_if is None and operand.present is None and not measure and run is run_rule
    in_place = param is operand.param and all(state[key] is operand.state[key] for key in state)
    if plain and in_place and follows(type(rule), InPlaceRule):
        cast("InPlaceRule", rule).update_(param, grad, state, scalars, options)
        return None
    new = run(rule, param, grad, state, scalars, options, measure)
    _write(operand, new, only_if)
    return None if new.square is None else new.square.reshape(1)


def update_blocks(
    rule: Rule,
    operands: Sequence[Operand],
    scalars: Scalars,
    options: Mapping[str, Any],
    run: UpdateFunction = run_rule,
    only_if: Tensor | None = None,
    measure: bool = False,
) -> Tensor | None:
    """Apply a matrix rule to blocks of one shape, dtype and device, in place, as one stack.

    Return the sums of squares of the directions, (B,), if `measure` is on.
    """
    matrix = operands[0].matrix
    params, grads, states = zip(*map(_read, operands), strict=True)
    # A count that only rounding needs is no business of the rule, and not all may have it.
    keys = [key for key in states[0] if all(key in state for state in states)]

    # The rule sees (B, rows, cols); (rows, ...) may be a flattened convolution weight, and a
    # matrix that lies in the gaps of others may have its rows in two dims.
    def stacked(tensors: Iterable[Tensor]) -> Tensor:
        pairs = zip(tensors, operands, strict=True)
        return torch.stack(
            [t.reshape(matrix) if t.shape == of.param.shape else t for t, of in pairs]
        )

    new = run(
        rule,
        stacked(params),
        stacked(grads),
        {key: stacked(state[key] for state in states) for key in keys},
        scalars,
        options,
        measure,
    )
    for index, operand in enumerate(operands):
        state = {key: tensor[index] for key, tensor in new.state.items()}
        _write(operand, Result(new.param[index].reshape(operand.param.shape), state), only_if)
    return new.square


def stacks(blocks: Sequence[Operand], most: int | None = None) -> Iterator[list[Operand]]:
    """Group blocks into stacks by shape, dtype and device.

    `most`: the most elements of a stack, unless one block has more; None: `STACK_ELEMENTS`.
    """
    by_kind = defaultdict(list)
    for block in blocks:
        kind = (*block.matrix, block.param.dtype, block.param.device)
        by_kind[kind].append(block)
    for (rows, cols, _, _), members in by_kind.items():
        count = max(1, (most or STACK_ELEMENTS) // (rows * cols))
        for start in range(0, len(members), count):
            yield members[start : start + count]


def _read(operand: Operand) -> tuple[Tensor, Tensor, State]:
    """Return parameter, gradient and state in the dtype of the math.

    An element of the parameter that is not its rounded main parameter was edited or loaded since:
    the parameter's value is used there.
    """
    param, grad, state = operand.param, operand.grad, operand.state
    dtype = math_dtype(param)
    grad = grad if grad.dtype == dtype else grad.to(dtype)
    return exact_value(param, state), grad, wide_state(param, state)


def wide_state(param: Tensor, state: State) -> State:
    """Return the moments of a state in the dtype of the math."""
    dtype = math_dtype(param)
    found = {}
    for key in moment_keys(tuple(state)):
        tensor, scale = state[key], state.get(key + SCALE_SUFFIX)
        if scale is not None:
            tensor = _decoded(tensor, scale)
        found[key] = tensor if tensor.dtype == dtype else tensor.to(dtype)
    return found


@lru_cache(maxsize=256)
def moment_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return the keys of a state without main parameters, remainders and scales."""
    skipped = {*MASTERS, *(key + SCALE_SUFFIX for key in keys)}
    return tuple(key for key in keys if key not in skipped)


def _blocked_dim(codes: Tensor, scale: Tensor) -> int:
    """Return the dim along which neighbouring codes share a scale."""
    pairs = zip(codes.shape, scale.shape, strict=True)
    return next((dim for dim, (many, few) in enumerate(pairs) if many != few), codes.ndim - 1)


def _decoded(codes: Tensor, scale: Tensor) -> Tensor:
    dim = _blocked_dim(codes, scale)
    return decode(codes.movedim(dim, -1).contiguous(), scale.movedim(dim, -1)).movedim(-1, dim)


def exact_value(param: Tensor, state: State) -> Tensor:
    """Return a parameter in the dtype of the math, from its main parameter where valid."""
    if REMAINDER_KEY in state:
        return join_remainder(param, state[REMAINDER_KEY])
    dtype = math_dtype(param)
    value = param if param.dtype == dtype else param.to(dtype)
    if MASTER in state:
        master = state[MASTER].reshape(param.shape)
        value = torch.where(is_rounded(param, master), master.to(dtype), value)
    return value


def parameter_pairs(param: Tensor, state: State, value: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of target and new value, for the parameter and its main parameter."""
    if REMAINDER_KEY in state:
        rounded, rest = split_remainder(value)
        yield param, rounded
        yield state[REMAINDER_KEY], rest.reshape(state[REMAINDER_KEY].shape)
        return
    # `to` is not called where nothing is converted: it takes several microseconds.
    yield param, value if value.dtype == param.dtype else value.to(param.dtype)
    if MASTER in state:
        yield state[MASTER], value.reshape(state[MASTER].shape)


def state_pairs(
    state: State, new: State, step: Tensor | None, origin: Origin | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of target and new value for moments, in their formats.

    Random rounding draws bits for each element from `origin`.
    """
    for key in moment_keys(tuple(state)):
        tensor, value = state[key], new.get(key, step)
        assert value is not None
        value = value.reshape(tensor.shape)
        if origin is None or key not in origin.seeds or step is None:
            yield tensor, value
        elif key + SCALE_SUFFIX in state:
            scale = state[key + SCALE_SUFFIX]
            dim = _blocked_dim(tensor, scale)
            noise = origin.noise(key, step)
            if not noise.frame:
                strides = [*noise.strides]
                strides.append(strides.pop(dim))
                noise = noise._replace(strides=tuple(strides))
            length = tensor.shape[dim] // max(1, scale.shape[dim])
            codes, scales = encode(
                value.movedim(dim, -1), length, signed=is_signed(key), noise=noise
            )
            yield tensor, codes.movedim(-1, dim)
            yield scale, scales.movedim(-1, dim)
        else:
            yield tensor, round_bf16(value, origin.noise(key, step))


def scale(param: Tensor, state: State, factor: Tensor) -> None:
    """Multiply a parameter and its main parameter, rounding once."""
    if not any(key in state for key in MASTERS):
        param.mul_(factor)
        return
    # A master copy may stay on the host.
    own = {key: state[key].to(param.device) for key in MASTERS if key in state}
    value = exact_value(param, own).mul_(factor)
    for old, new in parameter_pairs(param, state, value):
        old.copy_(new)


def put(old: Tensor, value: Tensor, only_if: Tensor | None) -> None:
    """Write a new value, unless the flag is False."""
    old.copy_(value if only_if is None else torch.where(only_if, value, old))


def _write(operand: Operand, new: Result, only_if: Tensor | None) -> None:
    """Copy new values into an operand, unless a flag is False."""
    param, state, present = operand.param, operand.state, operand.present
    if present is not None:
        only_if = present if only_if is None else only_if & present
    step = new_count(state, new.state)
    for old, value in parameter_pairs(param, state, new.param):
        put(old, value, only_if)
    for old, value in state_pairs(state, new.state, step, operand.origin):
        put(old, value, only_if)


def new_count(state: State, new: State) -> Tensor | None:
    """Return the step count after this step; None if the state has none."""
    if STEP in new:
        return new[STEP]
    return state[STEP] + 1 if STEP in state else None


class StepScalars:
    """Scalars of each group on its devices, refilled every step.

    Their identity and dtype never change, so a compiled update is never recompiled for a
    new learning rate, and nothing waits for the device.
    """

    def __init__(self) -> None:
        self._tensors: dict[tuple[int, torch.device], dict[str, Tensor]] = {}
        self._values: dict[int, float | None] = {}  # what a tensor was filled with last

    def refill(
        self, group: int, device: torch.device, values: Mapping[str, float | Tensor]
    ) -> Scalars:
        """Fill and return a group's scalars on `device`."""
        dtype = torch.float32 if device.type == "mps" else torch.float64
        tensors = self._tensors.setdefault((group, device), {})
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return tensors  # filled before: a graph would fill in the same values for good
        if device.type == "xla":
            return _as_one_vector(values, device)
        for key, value in values.items():
            if key not in tensors:
                tensors[key] = torch.zeros((), dtype=dtype, device=device)
            tensor = tensors[key]
            if isinstance(value, Tensor):
                tensor.copy_(value.detach().reshape(()), non_blocking=True)
                self._values.pop(id(tensor), None)
            elif self._values.get(id(tensor)) != value:
                tensor.fill_(value)
                self._values[id(tensor)] = value
        return tensors


def _as_one_vector(values: Mapping[str, float | Tensor], device: torch.device) -> Scalars:
    """Return scalars as elements of one vector, for XLA.

    A single 0 or 1 would be a constant of the program, so that a schedule that ends in 0 compiles
    again; a vector never is one. Scalars that are tensors on the device stay there.
    """
    there = {k: v for k, v in values.items() if isinstance(v, Tensor) and v.device == device}
    here = {key: float(value) for key, value in values.items() if key not in there}
    vector = torch.tensor(list(here.values()), dtype=torch.float64).to(device)
    scalars = {key: value.detach().reshape(()).double() for key, value in there.items()}
    return {**scalars, **dict(zip(here, vector.unbind(), strict=True))}
