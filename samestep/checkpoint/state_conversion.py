"""Converts optimizer state during a load where its stored format differs.

State in another format (8 bits, 32 bits, blocks of another size) is read into tensors of its own
first. Once everything was read, it is converted and written into the optimizer's state. A
checkpoint has whole main parameters, also where an optimizer keeps only their remainders. A 32-bit
parameter serves as the main parameter of a 16-bit one, and the other way round.
"""

from collections.abc import Callable, Collection, Mapping
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from samestep.checkpoint.logical import (
    MODEL,
    STATE,
    Pieces,
    Remainder,
    Remainders,
    Tensors,
    empty_pieces,
    state_key,
)
from samestep.groups.param_groups import parameter_names, rule_of
from samestep.layout.boxes import Box, HeldBox, whole_box
from samestep.layout.fused_rows import whole_name
from samestep.optimizer.rule_optimizer import RuleOptimizer
from samestep.rules.converted import remainder_of, saved_value, was_of_parameter
from samestep.rules.state import MASTER, is_elementwise
from samestep.rules.stored import EIGHT_BITS, SCALE_SUFFIX, STEP, decode, encode, split_remainder

Entries = Mapping[str, TensorStorageMetadata]


class SecondRead(NamedTuple):
    """Tensors to be read after all others.

    write: called for every box that is here, with its tensor and the stored values.
    """

    tensors: Tensors
    write: Callable[[Tensor, Tensor], object]


class ReadPlan(NamedTuple):
    """A plan for reading a checkpoint into present tensors.

    tensors: what the checkpoint's values are read into, by name.
    optional: names that one side may have alone, since only its format needs them.
    second: reads that come after all others.
    conversions: to be called last, in order; they write into the optimizer's state.
    formats: by name of state in another format, the stored format and the one of here, in words.
    """

    tensors: Tensors
    optional: frozenset[str]
    second: list[SecondRead]
    conversions: list[Callable[[], None]]
    formats: dict[str, str]


def plan_reads(
    tensors: Tensors,
    remainders: Remainders,
    stored: Entries,
    optimizer: RuleOptimizer | None,
    *,
    whole: bool = True,
) -> ReadPlan:
    """Plan how to read a checkpoint into `tensors`, without reading.

    Args:
        tensors: Parameters and state of here, by name.
        remainders: Main parameters of here of which only a remainder is kept.
        stored: What the checkpoint has, by name.
        optimizer: Whose state is among the tensors.
        whole: The checkpoint has all of every tensor, and not only what this rank had of it.
    """
    wanted, conversions = dict(tensors), list[Callable[[], None]]()
    formats: dict[str, str] = {}
    of_blocks = set() if optimizer is None else _of_whole_blocks(optimizer) & stored.keys()
    for name in [name for name in tensors if name.startswith(f"{STATE}.")]:
        scale_name = name + SCALE_SUFFIX
        here, there = tensors.get(scale_name), stored.get(scale_name)
        if name in of_blocks and was_of_parameter(tuple(stored[name].size), tensors[name].shape):
            wanted[name], write = _read_flat(tensors[name], stored[name])
            conversions.append(write)
            continue
        if name not in stored or (here is None and there is None):
            continue
        if here is not None and there is not None and here.shape == there.size:
            continue
        own, theirs = _format(tensors[name], here), _format(stored[name], there)
        formats[name] = f"kept as {theirs} there and as {own} here"
        wanted.pop(scale_name, None)
        wanted[name], scales, write = _read_as(tensors[name], here, stored[name], there)
        wanted |= {} if scales is None else {scale_name: scales}
        conversions.append(write)
    conversions += map(_rest, chain.from_iterable(remainders.values()))
    optional = set() if optimizer is None else _counts(optimizer)
    conversions += [_zeroed(wanted.pop(name)) for name in optional & wanted.keys() - stored.keys()]
    optional |= {name for name in stored if name.endswith(SCALE_SUFFIX) and name not in wanted}
    second = list[SecondRead]()
    if optimizer is not None and whole:
        exchanged, second = _exchange_masters(wanted, stored, remainders)
        optional |= exchanged
    return ReadPlan(wanted, frozenset(optional), second, conversions, formats)


def _format(
    values: Pieces | TensorStorageMetadata, scales: Pieces | TensorStorageMetadata | None
) -> str:
    """The word of `state_dtypes` for a format of state."""
    if scales is None:
        dtype = values.dtype if isinstance(values, Tensor) else values.properties.dtype
        return str(dtype).removeprefix("torch.")
    return f"{EIGHT_BITS}/{_neighbours(_shape(values), _shape(scales))}"


def _shape(of: Pieces | TensorStorageMetadata) -> torch.Size:
    return of.shape if isinstance(of, Tensor) else of.size


def _exchange_masters(
    wanted: Tensors, stored: Entries, with_remainder: Collection[str]
) -> tuple[set[str], list[SecondRead]]:
    """Read parameters from stored main parameters, or the reverse, if dtypes differ.

    Changes `wanted`, and returns the names that have no counterpart then, and the second reads.
    """
    done = set()
    edited: Tensors = {}
    halved: Tensors = {}
    for name in [name for name in wanted if name.startswith(f"{MODEL}.") and name in stored]:
        of = name.removeprefix(f"{MODEL}.")
        master = state_key(of, MASTER)
        own, copy = wanted[name], wanted.get(master)
        if own.dtype == stored[name].properties.dtype or own.shape != stored[name].size:
            continue
        if master not in stored and copy is None:
            continue
        read, gone = (master, name) if master in stored else (name, master)
        if copy is not None and of in with_remainder:
            wanted[read], halved[read] = copy, own
        else:
            wanted[read] = _both(own, copy)
            if master in stored and own.dtype == stored[master].properties.dtype:
                edited[name] = own  # one with fewer bits cannot tell what was edited
        del wanted[gone]
        done.add(gone)
    return done, [SecondRead(edited, _put_edited), SecondRead(halved, _put_half)]


def _put_half(param: Tensor, value: Tensor) -> None:
    """Round weights as their remainders expect, on every rank that holds them."""
    param.copy_(split_remainder(value.float())[0])


def _put_edited(master: Tensor, weight: Tensor) -> None:
    """Let stored weights win over stored main parameters where they differ."""
    master.copy_(saved_value(weight.to(master.device), master))


def _both(one: Pieces, other: Pieces | None) -> Pieces:
    """Two tensors of one shape that are read together."""
    held = [*one.held, *(() if other is None else other.held)]
    return Pieces(one.shape, one.dtype, one.device, held)


def _counts(optimizer: RuleOptimizer) -> set[str]:
    """Step counts that only stochastic rounding needs."""
    return {
        f"{STATE}.{whole_name(name)}.{STEP}"
        for index, group in enumerate(optimizer.param_groups)
        if STEP not in rule_of(group).state_shapes((0, 0), group)
        for name in parameter_names(group, index)
    }


def _of_whole_blocks(optimizer: RuleOptimizer) -> set[str]:
    """Whether state has a few numbers per block, such as a variance."""
    return {
        state_key(whole_name(name), key)
        for index, group in enumerate(optimizer.param_groups)
        if (rule := rule_of(group)).kind == "matrix"
        for key in rule.state_shapes((0, 0), group)
        if not is_elementwise(rule, key, group)
        for name in parameter_names(group, index)
    }


def _read_as(
    own: Pieces,
    own_scale: Pieces | None,
    stored: TensorStorageMetadata,
    scale: TensorStorageMetadata | None,
) -> tuple[Pieces, Pieces | None, Callable[[], None]]:
    """Temporary tensors in the stored format: values, or codes and scales.

    Returns them with a function that converts and writes them into `own`, which is in 8 bits if
    there is an `own_scale`.
    """
    boxes = [held.box for held in own.held]
    dtype = torch.float32 if scale is None else stored.properties.dtype
    read, scales = empty_pieces(own.shape, dtype, own.device, boxes), None
    if scale is not None:
        per = _neighbours(own.shape, scale.size)
        covering = [_covering(box, per) for box in boxes]
        scales = empty_pieces(scale.size, torch.float32, own.device, covering)

    def write() -> None:
        for place, (box, tensor) in enumerate(own.held):
            value = read.held[place].tensor
            if scales is not None:
                value = _decoded(read.held[place], scales.held[place], per)
            if own_scale is None:
                tensor.copy_(value)
                continue
            own_per = _neighbours(own.shape, own_scale.shape)
            signed = tensor.dtype == torch.int8
            codes, new = encode(value.contiguous(), own_per, signed=signed)
            tensor.copy_(codes)
            next(at for at in own_scale.held if at.box == box.divided(own_per)).tensor.copy_(new)

    return read, scales, write


def _neighbours(shape: torch.Size, scales: torch.Size) -> int:
    """Elements of a row that share a scale."""
    return shape[-1] // max(1, scales[-1])


def _covering(box: Box, per: int) -> Box:
    """Scales of all blocks that overlap a box."""
    first, last = box.offsets[-1] // per, -(-(box.offsets[-1] + box.sizes[-1]) // per)
    return Box((*box.offsets[:-1], first), (*box.sizes[:-1], last - first))


def _decoded(codes: HeldBox, scales: HeldBox, per: int) -> Tensor:
    """Values of a box that may begin and end inside quantization blocks."""
    begin = codes.box.offsets[-1] - scales.box.offsets[-1] * per
    width = scales.box.sizes[-1] * per
    whole = codes.tensor.new_zeros((*codes.box.sizes[:-1], width))
    own = whole[..., begin : begin + codes.box.sizes[-1]]
    own.copy_(codes.tensor)
    return decode(whole, scales.tensor)[..., begin : begin + codes.box.sizes[-1]]


def _read_flat(own: Pieces, stored: TensorStorageMetadata) -> tuple[Pieces, Callable[[], None]]:
    """A tensor for state that was stored with more dims, and how to copy from it."""
    whole = torch.empty(stored.size, dtype=stored.properties.dtype, device=own.device)

    def write() -> None:
        for box, tensor in own.held:
            tensor.copy_(whole.view(-1)[box.slices].view(tensor.shape))

    return Pieces(stored.size, whole.dtype, own.device, [whole_box(whole)]), write


def _zeroed(counts: Pieces) -> Callable[[], None]:
    def write() -> None:
        for held in counts.held:
            held.tensor.zero_()

    return write


def _rest(remainder: Remainder) -> Callable[[], None]:
    def write() -> None:
        param = remainder.param.to(remainder.master.device)  # state may stay on the host
        remainder.rest.copy_(remainder_of(param, remainder.master))

    return write
