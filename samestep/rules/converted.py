"""Converts state from one storage format to another: when it is loaded, looked at and set.

State in 8 bits is decoded to the values of its codes, and state that goes into 8 or 16 bits is
rounded to the nearest. State that keeps its format passes unchanged, to the bit.
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
    """Whether a state tensor holds the scales of another one, which is in 8 bits."""
    return key.endswith(SCALE_SUFFIX) and key.removesuffix(SCALE_SUFFIX) in state


def value_of(key: str, state: Mapping[str, Tensor]) -> Tensor:
    """Return the values of a moment: decoded if it is in 8 bits, else as they are stored."""
    scale = state.get(key + SCALE_SUFFIX)
    return state[key] if scale is None else decode(state[key], scale)


def encoded(key: str, value: Tensor, per: int) -> State:
    """Encode a moment in 8 bits, rounded to the nearest; return its codes and scales by key."""
    codes, scale = encode(value, per, signed=is_signed(key))
    return {key: codes, key + SCALE_SUFFIX: scale}


def as_stored(
    entry: Mapping[str, Tensor], stored: StoredTensors, shapes: Mapping[str, Shape]
) -> State:
    """Return the saved state of a parameter in the formats that `stored` asks for.

    Master copies pass unchanged. A count of steps that only rounding needs starts at 0 where there
    was none. Keys without a format pass: the caller checks keys and shapes.
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
    """Whether state of whole blocks was saved in the parameter's shape, as earlier versions did.

    Earlier versions did so where state and parameter have equally many numbers, such as the
    variance of n x 1 matrices. The numbers and their order are the same.
    """
    return len(shape) > 1 and wanted == (prod(shape),)


def _has_blocks(entry: Mapping[str, Tensor], key: str, per: int) -> bool:
    """Whether a saved moment is in 8 bits with blocks of this size."""
    scale = entry.get(key + SCALE_SUFFIX)
    return scale is not None and entry[key].shape[-1] == scale.shape[-1] * per


def is_rounded(param: Tensor, master: Tensor) -> Tensor:
    """Return a mask, true where a parameter still is its rounded main parameter.

    The mask has the parameter's shape. Where it is false, the parameter was edited or loaded since,
    and its value counts instead of the main parameter's.
    """
    return master.to(param.dtype) == param


def present_master(param: Tensor, master: Tensor) -> Tensor:
    """Return the main parameter, with the parameter's own values where elements were edited."""
    return torch.where(is_rounded(param, master), master, param.to(master.dtype))


def saved_value(weight: Tensor, master: Tensor) -> Tensor:
    """Return the values to save for a parameter: its main parameter, but for edited elements.

    A bfloat16 weight that is kept with a remainder is rounded away from zero at halfway; a main
    parameter that rounds to the weight in that way counts as unedited, too.
    """
    value = present_master(weight, master)
    if weight.dtype != torch.bfloat16:
        return value
    return torch.where(split_remainder(master.float())[0] == weight, master, value)


def remainder_of(param: Tensor, master: Tensor) -> Tensor:
    """Return the remainder of a main parameter; 0 where the parameter is no longer its rounding.

    Remainders belong to rounding away from zero, so none can say that the parameter was rounded
    from halfway to even towards zero: there the remainder nearest to halfway is returned.
    """
    master = master.float()
    rounded, rest = split_remainder(master)
    below_half = torch.where(is_rounded(param, master), 0x7FFF, 0).to(torch.int16)
    return torch.where(rounded == param, rest, below_half)


def other_master(key: str) -> str | None:
    """Return the key of the other form of a master copy; None for keys of other state."""
    return {MASTER: REMAINDER_KEY, REMAINDER_KEY: MASTER}.get(key)


def from_other_master(key: str, param: Tensor, other: Tensor) -> Tensor:
    """Return the master copy in the form of `key`, from the parameter and the other form."""
    if key == REMAINDER_KEY:
        return remainder_of(param, other.reshape(param.shape))
    return join_remainder(param, other)
