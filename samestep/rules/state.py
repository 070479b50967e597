"""Optimizer state: one entry per parameter from construction on, and its views per block.

`stored_tensors` alone says which tensors are kept for a parameter, and how; everybody else asks it.
"""

from collections.abc import Mapping, Sequence
from math import gcd, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samestep.layout.blocks import Block, Shape
from samestep.layout.fused_rows import rows_in, whole_name, without_wrappers
from samestep.layout.splits import Form
from samestep.rules.noise import Origin, seed_of
from samestep.rules.rule import Rule, math_dtype, owned_state
from samestep.rules.stored import (
    BLOCKS,
    EIGHT_BITS,
    REMAINDER,
    REMAINDER_KEY,
    SCALE_SUFFIX,
    STEP,
    STOCHASTIC,
    block_size,
    code_dtype,
)

MASTER = "master_weight"  # the copy of a 16-bit parameter, in 32 bits or more
MASTERS = (MASTER, REMAINDER_KEY)  # the latter: what the copy has beyond the parameter

State = dict[str, Tensor]


class Stored(NamedTuple):
    """The format of a tensor in the state of a parameter.

    per: the elements of the parameter, along its last dim, that share one number: 1 for a moment,
        more for the scales of a moment in 8 bits. None: a number, or state of whole blocks.
    random: rounded at random, by bits that belong to each element.
    owned: the tensor belongs to whole blocks, and the owner of a block alone has it.
    """

    dtype: torch.dtype
    per: int | None
    random: bool = False
    owned: bool = False

    def shape(self, of: Shape) -> Shape:
        """Return the shape of state that has a number per `per` elements of the shape `of`."""
        assert self.per is not None
        return of if self.per == 1 else (*of[:-1], of[-1] // self.per)


class StoredTensors(dict[str, Stored]):
    """The formats of a parameter's state tensors by key, in order; hashable, and never changed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


def needs_master(param: Tensor, master_weights: bool) -> bool:
    """Whether a master copy is kept beside the parameter."""
    return master_weights and param.dtype.itemsize < math_dtype(param).itemsize


def is_elementwise(rule: Rule, key: str, options: Mapping[str, Any]) -> bool:
    """Whether a state tensor of a rule has an element for each of the parameter's."""
    shape = (64, 48)
    is_alike = rule.state_shapes(shape, options)[key] == shape
    return is_alike and key not in owned_state(rule, options)


def chosen_format(key: str, options: Mapping[str, Any]) -> torch.dtype | str | None:
    """Return the format that `state_dtypes` asks for a key; a single word is about all moments."""
    chosen: Mapping[str, torch.dtype | str] | str | None = options.get("state_dtypes")
    if isinstance(chosen, str):
        return None if key == MASTER else chosen
    return (chosen or {}).get(key)


def stored_tensors(
    rule: Rule,
    param: Tensor,
    blocks: Sequence[Block] | None,
    options: Mapping[str, Any],
    master_weights: bool,
) -> StoredTensors:
    """Return the format of every tensor that is kept for a parameter, by key, in order.

    The formats follow from the whole parameter, never from the part of it that a rank holds.
    """
    found = StoredTensors()
    wide = math_dtype(param)
    for key in rule.state_shapes((0, 0), options):
        chosen = chosen_format(key, options)
        if not is_elementwise(rule, key, options):
            # One word is about moments, and a few numbers of each block stay as they are.
            plain = chosen if isinstance(chosen, torch.dtype) else wide
            found[key] = Stored(plain, None, owned=key in owned_state(rule, options))
        elif chosen == STOCHASTIC:
            found[key] = Stored(torch.bfloat16, 1, random=True)
        elif isinstance(chosen, str):
            per = scale_block(tuple(param.shape), blocks, chosen)
            if per is None:
                found[key] = Stored(wide, 1)
            else:
                found[key] = Stored(code_dtype(key), 1, random=True)
                found[key + SCALE_SUFFIX] = Stored(torch.float32, per)
        else:
            found[key] = Stored(chosen or wide, 1)
    if STEP not in found and any(how.random for how in found.values()):
        found[STEP] = Stored(wide, None)
    if needs_master(param, master_weights):
        chosen = chosen_format(MASTER, options)
        if chosen == REMAINDER:
            found[REMAINDER_KEY] = Stored(torch.int16, 1)
        else:
            assert not isinstance(chosen, str)
            found[MASTER] = Stored(chosen or wide, 1)
    return found


def is_small(stored: StoredTensors) -> bool:
    """Whether any state tensor is kept in another way than as a plain tensor of some dtype."""
    return REMAINDER_KEY in stored or any(how.random for how in stored.values())


def format_word(key: str, stored: StoredTensors) -> str:
    """Return the format of one tensor, as `state_dtypes` would say it."""
    how, scale = stored[key], stored.get(key + SCALE_SUFFIX)
    if scale is not None:
        return f"{EIGHT_BITS}/{scale.per}"
    if key == REMAINDER_KEY:
        return REMAINDER
    return STOCHASTIC if how.random else str(how.dtype).removeprefix("torch.")


def scale_block(shape: Shape, blocks: Sequence[Block] | None, chosen: str) -> int | None:
    """Return how many elements of a row share a scale in 8 bits; None: the state stays in 32 bits.

    Elements that share a scale are neighbours in the last dim, and belong to one matrix.
    """
    if len(shape) < 2 or 0 in shape:
        return None
    form = blocks[0].form if blocks else None
    runs = form.split.sizes if form is not None and form.transposed else ()
    _, _, most = chosen.partition("/")
    return block_size(gcd(shape[-1], *runs), int(most) if most else BLOCKS[0])


def state_shapes(
    rule: Rule, shape: Shape, options: Mapping[str, Any], stored: StoredTensors
) -> dict[str, Shape]:
    """Return shapes of the state of a slice, block or matrix; a count only for rounding is ()."""
    own = rule.state_shapes(shape, options)
    return {
        key: own.get(key, ()) if how.per is None else how.shape(shape)
        for key, how in stored.items()
    }


def block_state_shapes(
    rule: Rule, block: Block, options: Mapping[str, Any], stored: StoredTensors
) -> dict[str, Shape]:
    """Return the shapes of one block's state, by key.

    State with the block's elements has its stored shape; other state of a block that has a form is
    1-D, matrix after matrix.
    """
    shapes = state_shapes(rule, block.shape, options, stored)
    if block.form is None:
        return shapes
    of_matrices = [state_shapes(rule, shape, options, stored) for shape in block.matrices]
    return {
        key: shapes[key]
        if how.per is not None
        else (sum(prod(of_matrix[key]) for of_matrix in of_matrices),)
        for key, how in stored.items()
    }


def initial_state(
    rule: Rule,
    param: Tensor,
    blocks: Sequence[Block] | None,
    options: Mapping[str, Any],
    master_weights: bool,
) -> State:
    """Return zeros for each state tensor that the rule declares, and the master copy where asked.

    `blocks` is None for an elementwise rule. For a matrix rule, state of the blocks' shapes
    is one tensor of the parameter's shape; any other is 1-D, block after block, so that
    blocks may differ in shape.
    """
    stored = stored_tensors(rule, param, blocks, options, master_weights)
    state = {
        key: torch.zeros(shape, dtype=stored[key].dtype, device=param.device)
        for key, shape in whole_shapes(rule, tuple(param.shape), blocks, options, stored).items()
    }
    if MASTER in state:
        state[MASTER] = param.detach().to(stored[MASTER].dtype).contiguous()
    return state


def whole_shapes(
    rule: Rule,
    shape: Shape,
    blocks: Sequence[Block] | None,
    options: Mapping[str, Any],
    stored: StoredTensors,
) -> dict[str, Shape]:
    """Return the shapes of the state that one process keeps of a whole parameter."""
    if blocks is None:
        return state_shapes(rule, shape, options, stored)
    of_blocks = [block_state_shapes(rule, block, options, stored) for block in blocks]
    return {
        key: (sum(prod(own[key]) for own in of_blocks),) if how.per is None else how.shape(shape)
        for key, how in stored.items()
    }


def block_states(
    rule: Rule,
    state: State,
    blocks: Sequence[Block],
    options: Mapping[str, Any],
    stored: StoredTensors,
) -> list[State]:
    """Return each block's views into the state that `initial_state` made for its parameter."""
    views: list[State] = []
    offsets = dict.fromkeys(state, 0)
    for block in blocks:
        shapes = block_state_shapes(rule, block, options, stored)
        view = {}
        for key, tensor in state.items():
            if stored[key].per is None:  # block after block
                size = prod(shapes[key])
                view[key] = tensor.narrow(0, offsets[key], size).view(shapes[key])
                offsets[key] += size
            else:
                view[key] = block.view(tensor).view(shapes[key])
        views.append(view)
    return views


class MatrixView(NamedTuple):
    """One matrix of a block where it lies, and its state; `rows` if it has several row dims."""

    value: Tensor
    state: State
    rows: int | None
    origin: Origin | None = None


def matrix_views(
    rule: Rule,
    block: Block,
    value: Tensor,
    state: State,
    options: Mapping[str, Any],
    stored: StoredTensors,
    where: "GlobalElementIndex | None" = None,
) -> list[MatrixView]:
    """Return the matrices of a block, given its value and state as they are stored.

    `where`: the global element index of the block, if any of its state is rounded at random.
    """
    if block.form is None:
        return [MatrixView(value, state, None, None if where is None else where.origin())]
    views = block.form.views(value)
    states = matrix_states(rule, block, state, options, stored)
    origins: list[Origin | None] = [None] * len(views)
    if where is not None:
        origins = [where.at(view).origin() for view in block.form.views(where.elements)]
    of_matrices = zip(views, states, block.matrices, origins, strict=True)
    return [MatrixView(view, own, rows, origin) for view, own, (rows, _), origin in of_matrices]


def matrix_states(
    rule: Rule, block: Block, state: State, options: Mapping[str, Any], stored: StoredTensors
) -> list[State]:
    """Return each matrix's views into the state of its block."""
    if block.form is None:
        return [state]
    found: list[State] = [{} for _ in block.matrices]
    shapes = [state_shapes(rule, shape, options, stored) for shape in block.matrices]
    for key, tensor in state.items():
        per = stored[key].per
        if per is not None:
            parts = _form_of(block.form, per).views(tensor)
        else:
            flat = torch.split(tensor, [prod(own[key]) for own in shapes])
            parts = [part.view(own[key]) for part, own in zip(flat, shapes, strict=True)]
        for own, part in zip(found, parts, strict=True):
            own[key] = part
    return found


def _form_of(form: Form, per: int) -> Form:
    """Return the form of the scales of a block, which has fewer stored columns."""
    if per == 1 or not form.transposed:
        return form
    sizes = tuple(size // per for size in form.split.sizes)
    return form._replace(split=form.split._replace(sizes=sizes))


class GlobalElementIndex(NamedTuple):
    """The global indices of the elements in a part of a parameter: a view of a tensor without data.

    Code that cuts a parameter cuts `elements` alike; offset and strides of `elements` are then
    those of the part in the whole parameter.
    """

    elements: Tensor
    first: int  # rows of a fused parameter begin further on in that
    seeds: Mapping[str, int]
    start: int | None = None  # not all of them: those from here on, in order

    def at(self, view: Tensor) -> "GlobalElementIndex":
        """Return the index of a view, made by cutting `elements` further."""
        return self._replace(elements=view)

    def stretch(self, start: int, stop: int) -> "GlobalElementIndex":
        """Return the index of elements start..stop-1 of these, in order."""
        if self.elements.is_contiguous():
            return self.at(self.elements.view(-1)[start:stop])
        return self._replace(start=(self.start or 0) + start)

    def origin(self) -> Origin:
        offset, strides = self.first + int(self.elements.storage_offset()), self.elements.stride()
        if self.start is None:
            return Origin(offset, strides, self.seeds)
        return Origin(offset, strides, self.seeds, tuple(self.elements.shape), self.start)


def global_element_index(
    name: str, shape: Shape, stored: StoredTensors
) -> GlobalElementIndex | None:
    """Return the index of all elements of a parameter; None if no state is rounded at random.

    A part of a fused parameter is indexed in the fused one, since layouts differ in the parts that
    they make. Seeds are of names without wrappers, which are no part of the model.
    """
    rounded = [key for key, how in stored.items() if how.random]
    if not rounded:
        return None
    rows = rows_in(name)
    first = 0 if rows is None else rows.start * prod(shape[1:])
    seeds = {key: seed_of(without_wrappers(whole_name(name)), key) for key in rounded}
    return GlobalElementIndex(torch.empty(shape, device="meta"), first, seeds)
