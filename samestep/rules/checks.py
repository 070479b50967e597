"""Checks of option values. Each raises with the option's name and the bad value."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from samestep.rules.basin import Coefficients, as_table, unsafe_step
from samestep.rules.stored import BLOCKS, EIGHT_BITS, REMAINDER, STOCHASTIC

# State of the parameter's shape. Counts and per-row variances are small and stay in 32 bits.
# What `state_dtypes` may name: moments, and the master copies of narrower parameters.
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "master_weight")
OF_MOMENTS = (EIGHT_BITS, *(f"{EIGHT_BITS}/{size}" for size in BLOCKS), STOCHASTIC)


Check = Callable[[str, Any], None]  # raises unless a value of that name can be taken


def every(taken: Mapping[str, Check], options: Mapping[str, Any]) -> None:
    """Check every option of a table that is given."""
    for name, check in taken.items():
        if name in options:
            check(name, options[name])


def shown(value: Any) -> str:
    """Return a value as short text for a message; a tensor on a device is described, not read."""
    if isinstance(value, Tensor) and (value.numel() != 1 or value.device.type != "cpu"):
        return f"a tensor of shape {tuple(value.shape)} on {value.device}"
    if isinstance(value, list | tuple) and len(value) > 9:
        return f"{shown(value[:6])[:-1]}, ...{repr(value)[-1:] if len(value) < 99 else ''}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 99 else f"{text[:96]}..."


def optional(check: Check) -> Check:
    """Return a check that takes None, and else whatever another check takes."""

    def checked(name: str, value: Any) -> None:
        if value is not None:
            check(name, value)

    return checked


def _number(name: str, value: Any) -> float:
    """Return `value` as a float; a tensor is read only when that needs no wait for a device."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"Tensor {name} must be 1-element, got shape {tuple(value.shape)}: {name} must be "
                f"a number, got {shown(value)}"
            )
        if value.is_meta or value.is_complex() or value.dtype == torch.bool:
            raise TypeError(
                f"{name} must be a real number or a tensor that has one, got {shown(value)} of "
                f"dtype {value.dtype}"
            )
        return float(value) if value.device.type == "cpu" else 0.0
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {shown(value)} of type {_type(value)}")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _type(value: Any) -> str:
    return type(value).__name__


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def learning_rate(name: str, value: Any) -> None:
    """Check for a finite number that is not negative, or a one-element tensor."""
    not_negative(name, value, called="learning rate")


def not_negative(name: str, value: Any, called: str | None = None) -> None:
    """Check for a finite number that is not negative."""
    number = _number(name, value)
    if not (math.isfinite(number) and number >= 0):
        what = called or f"{name} value"
        own = f" for {name}" if called else ""
        raise ValueError(f"Invalid {what}: {shown(value)}{own}; give a finite number >= 0")


def positive(name: str, value: Any) -> None:
    """Check for a finite number above 0."""
    number = _number(name, value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"Invalid {name} value: {shown(value)}; give a finite number > 0")


def at_least_one(name: str, value: Any) -> None:
    """Check for a finite number from 1 on."""
    number = _number(name, value)
    if not (math.isfinite(number) and number >= 1):
        raise ValueError(f"Invalid {name} value: {shown(value)}; give a finite number >= 1")


def limit(name: str, value: Any) -> None:
    """Check for a number that is not negative, or infinity."""
    if not _number(name, value) >= 0:
        raise ValueError(f"Invalid {name} value: {shown(value)}; give a number >= 0, or math.inf")


def fraction(name: str, value: Any) -> None:
    """Check for a number in [0, 1)."""
    if not 0 <= _number(name, value) < 1:
        raise ValueError(f"Invalid {name} value: {shown(value)}; give a number in [0, 1)")


def betas(name: str, value: Any) -> None:
    """Check for two numbers in [0, 1), both floats or both tensors."""
    if not _is_sequence(value) or len(value) != 2:
        raise TypeError(f"{name} must be two numbers, got {shown(value)}")
    if isinstance(value[0], Tensor) != isinstance(value[1], Tensor):
        raise ValueError(f"{name} must be either both floats or both Tensors, got {value}")
    for index, beta in enumerate(value):
        if not 0 <= _number(f"{name}[{index}]", beta) < 1:
            raise ValueError(
                f"Invalid beta parameter at index {index}: {beta} in {name} {shown(value)}; give a "
                "number in [0, 1)"
            )


def boolean(name: str, value: Any, others: str = "") -> None:
    """Check for True or False; nothing that merely equals them passes."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False{others}, got {shown(value)}")


def boolean_or_none(name: str, value: Any) -> None:
    """Check for True, False or None."""
    if value is not None:
        boolean(name, value, " or None")


def is_one_of(value: Any, allowed: Collection[Any]) -> bool:
    """Whether a value is one of the allowed ones, whatever type a comparison of it returns."""
    return any(isinstance(value, type(each)) and bool(value == each) for each in allowed)


def one_of(name: str, value: Any, allowed: Collection[Any], others: str = "") -> None:
    """Check for one of the allowed values; messages add `others`, which the caller checks."""
    if not is_one_of(value, allowed):
        raise ValueError(
            f"{name} {shown(value)} is not supported; choose one of {list(allowed)}{others}"
        )


def word(name: str, value: Any) -> None:
    """Check for a str."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, got {shown(value)} of type {_type(value)}")


def words(name: str, value: Any) -> None:
    """Check for a list of str."""
    if not _is_sequence(value) or not all(isinstance(item, str) for item in value):
        raise TypeError(f"{name} must be a list of str, got {shown(value)} of type {_type(value)}")


def steps(name: str, value: Any) -> None:
    """Check for None, or a whole number from 1 to 99."""
    if value is not None:
        count(name, value, most=99)


def count(name: str, value: Any, most: int | None = None) -> None:
    """Check for a whole number from 1 on."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, got {shown(value)}")
    if value < 1 or (most is not None and value > most):
        allowed = "from 1 on" if most is None else f"from 1 to {most}"
        raise ValueError(f"Invalid {name} value: {value}; give a whole number {allowed}")


def coefficients(name: str, value: Any) -> None:
    """Check for None, three numbers, or a list of triples."""
    if value is None:
        return

    def is_triple(item: Any) -> bool:
        return (
            isinstance(item, Sequence)
            and len(item) == 3
            and all(isinstance(number, int | float) and math.isfinite(number) for number in item)
        )

    is_list = isinstance(value, Sequence) and len(value) > 0 and all(map(is_triple, value))
    if not (is_triple(value) or is_list):
        raise ValueError(
            f"{name} must be finite numbers (a, b, c) or a list of such triples, got {shown(value)}"
        )


def split_sizes(name: str, value: Any) -> None:
    """Check for None, row counts, a word, or a mapping of name patterns to these.

    Whether the rows fit a weight is checked when blocks are made.
    """
    if isinstance(value, Mapping):
        for pattern, sizes in value.items():
            word(f"a pattern of {name}", pattern)
            split_sizes(f"{name}[{pattern!r}]", sizes)
    elif _is_sequence(value):
        if not all(isinstance(size, Real) for size in value):
            raise TypeError(f"{name} must be whole numbers above 0, got {shown(value)}")
    elif not isinstance(value, str | int | None):
        raise TypeError(
            f'{name} must be a list of row counts, a word such as "halves" or "heads:16", or '
            f"these by name pattern, got {shown(value)} of type {_type(value)}"
        )


def table(
    name: str, steps: Sequence[Coefficients], norm_factor: float, dtype: torch.dtype | None
) -> None:
    """Check that a table keeps singular values where they converge, also rounded to `dtype`.

    With the dtype None the narrowest that will do is chosen later, at most 32 bits.
    """
    chosen = dtype or torch.float32
    reason = unsafe_step(as_table(steps), norm_factor, chosen)
    if reason is not None:
        wider = "" if dtype in (None, torch.float32) else "compute_dtype=torch.float32, or "
        raise ValueError(
            f"{name} cannot run in {str(chosen).removeprefix('torch.')}: {reason}; give "
            f"{wider}coefficients with more margin (docs/rules.md), such as a scale s "
            "multiplied with 1 / 1.02 in all polynomials but the last"
        )


def state_dtypes(name: str, value: Any) -> None:
    """Check for None, or a mapping of state names to dtypes: {"exp_avg": torch.bfloat16, ...}.

    A word instead of a dtype is a format of `rules.stored`; one word alone is for all moments.
    Master copies have 32 bits or more: a step takes an element of the parameter that is not its
    copy, rounded, for one that was edited, so a copy has to hold all that the parameter is rounded
    from; and it would be the weight that is saved, without what 16 bits cannot tell.
    """
    if value is None:
        return
    if isinstance(value, str) and value == REMAINDER:
        raise ValueError(
            f'{name} "{REMAINDER}" is only for main parameters, and a single word sets '
            f'all moments: give {{"master_weight": "{REMAINDER}"}}, with a word for '
            "each moment beside it"
        )
    if isinstance(value, str):
        one_of(name, value, OF_MOMENTS, ', or a dtype for each state, {"exp_avg": torch.bfloat16}')
        return
    if not isinstance(value, Mapping):
        raise TypeError(
            f"{name} must be None, one of {list(OF_MOMENTS)} for all moments, or a mapping of "
            'moments to these or to dtypes such as {"exp_avg": torch.bfloat16}, got '
            f"{shown(value)}"
        )
    for key, chosen in value.items():
        if key not in MOMENTS:
            raise ValueError(f"{name} has the key {shown(key)}; choose from {list(MOMENTS)}")
        is_master = key == "master_weight"
        words = (REMAINDER,) if is_master else OF_MOMENTS
        if isinstance(chosen, str):
            dtype = torch.float32 if is_master else torch.bfloat16
            one_of(f"{name}[{key!r}]", chosen, words, f", or a dtype such as {dtype}")
        elif not (isinstance(chosen, torch.dtype) and chosen.is_floating_point):
            raise TypeError(
                f"{name}[{key!r}] must be a floating torch.dtype or one of {list(words)}, got "
                f"{shown(chosen)}"
            )
        elif chosen.itemsize < 2 and not is_master:
            raise ValueError(
                f"{name}[{key!r}] {chosen} is too coarse for moments, whose small "
                f"changes it rounds away: choose one of {list(words)}, or a dtype of 16 "
                "bits or more"
            )
        elif is_master and chosen.itemsize < 4:
            raise ValueError(
                f"{name}[{key!r}] {chosen} is too narrow for main parameters, which "
                f'keep updates that 16 bits round away; "{REMAINDER}" keeps all 32 bits '
                "of bfloat16 weights in 2 more bytes each, and torch.float32 those of "
                "any weights"
            )


def compute_dtype(name: str, value: Any) -> None:
    """Check for None, or a dtype in which matrix products can run."""
    allowed = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    if value is not None and not is_one_of(value, allowed):
        raise TypeError(f"{name} must be None or one of {list(allowed)}, got {shown(value)}")
