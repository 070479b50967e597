"""State from one way of keeping it to another: when it is loaded, looked at and set.

What was in 8 bits becomes what its codes stand for, and what goes into 8 or 16 bits is rounded to
the nearest. In the format that it has, state passes as it is, to the bit.
"""

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from samestep.layout.blocks import Shape
from samestep.rules.state import MASTER, State, StoredTensors
from samestep.rules.stored import (
    REMAINDER_KEY,
    SCALE_SUFFIX,
    STEP,
    decode,
    encode,
    is_signed,
    join_remainder,
    split_remainder,
)


def is_scale(key: str, state: Mapping[str, object]) -> bool:
    """Whether a tensor has the scales of another."""
    return key.endswith(SCALE_SUFFIX) and key.removesuffix(SCALE_SUFFIX) in state


def value_of(key: str, state: Mapping[str, Tensor]) -> Tensor:
    """A moment's values: decoded if it is in 8 bits, else as it is kept."""
    scale = state.get(key + SCALE_SUFFIX)
    return state[key] if scale is None else decode(state[key], scale)


def encoded(key: str, value: Tensor, per: int) -> State:
    """A moment in 8 bits, to the nearest: codes and scales."""
    codes, scale = encode(value, per, signed=is_signed(key))
    return {key: codes, key + SCALE_SUFFIX: scale}


def as_stored(
    entry: Mapping[str, Tensor], stored: StoredTensors, shapes: Mapping[str, Shape]
) -> State:
    """The saved state of a parameter in the formats that are wanted; master copies as they are.

    A count of steps that only rounding needs starts at 0 where there was none. What belongs to no
    format passes, for whoever checks keys and shapes.
    """
    found: State = {}
    for key, tensor in entry.items():
        if is_scale(key, entry) or (key == STEP and STEP not in stored):
            continue
        scales = stored.get(key + SCALE_SUFFIX)
        if scales is None or scales.per is None:
            value = value_of(key, entry)
            of_blocks = key in stored and stored[key].per is None
            flat = of_blocks and was_of_parameter(tuple(value.shape), shapes[key])
            found[key] = value.reshape(-1) if flat else value
        elif _has_blocks(entry, key, scales.per):
            found |= {own: entry[own] for own in (key, key + SCALE_SUFFIX)}
        elif tensor.ndim and tensor.shape[-1] % scales.per == 0:
            found |= encoded(key, value_of(key, entry), scales.per)
        else:
            found[key] = tensor
    if STEP in stored and STEP not in found and found:
        found[STEP] = torch.zeros(shapes[STEP], dtype=torch.float32)
    return found


def was_of_parameter(shape: Shape, wanted: Shape) -> bool:
    """Whether state of whole blocks was kept in the parameter's shape, as by earlier versions.

    They did where it has as many numbers, such as the variance of n x 1 matrices: the same ones, in
    the same order.
    """
    return len(shape) > 1 and wanted == (prod(shape),)


def _has_blocks(entry: Mapping[str, Tensor], key: str, per: int) -> bool:
    """Whether a saved moment is in 8 bits with blocks of this size."""
    scale = entry.get(key + SCALE_SUFFIX)
    return scale is not None and entry[key].shape[-1] == scale.shape[-1] * per


def is_rounded(param: Tensor, master: Tensor) -> Tensor:
    """A mask of where a parameter still is its rounded main parameter, of the same shape.

    Elsewhere somebody has edited or loaded it since, and it counts instead of the copy.
    """
    return master.to(param.dtype) == param


def present_master(param: Tensor, master: Tensor) -> Tensor:
    """A master copy as it is, but for elements that were edited: these have the parameter's."""
    return torch.where(is_rounded(param, master), master, param.to(master.dtype))


def saved_value(weight: Tensor, master: Tensor) -> Tensor:
    """That mask for a checkpoint, whose main parameter may have been saved without looking.

    Beside remainders weights are rounded away from halfway, and such a copy is theirs as well.
    """
    value = present_master(weight, master)
    if weight.dtype != torch.bfloat16:
        return value
    return torch.where(split_remainder(master.float())[0] == weight, master, value)


def remainder_of(param: Tensor, master: Tensor) -> Tensor:
    """The remainder of a main parameter; zero where the parameter is no longer its rounding.

    A parameter that was rounded to even from halfway gets what is nearest to that: the remainder
    of one rounded away from zero cannot say halfway.
    """
    master = master.float()
    rounded, rest = split_remainder(master)
    below_half = torch.where(is_rounded(param, master), 0x7FFF, 0).to(torch.int16)
    return torch.where(rounded == param, rest, below_half)


def other_master(key: str) -> str | None:
    """The key of the other form of a master copy; None: it is none."""
    return {MASTER: REMAINDER_KEY, REMAINDER_KEY: MASTER}.get(key)


def from_other_master(key: str, param: Tensor, other: Tensor) -> Tensor:
    """A master copy as `key` has it, from the parameter and the other form."""
    if key == REMAINDER_KEY:
        return remainder_of(param, other.reshape(param.shape))
    return join_remainder(param, other)
