"""Optimizer state: one entry per parameter from construction on, and its views per block."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samestep.layout.blocks import Block, Shape
from samestep.rules.rule import Rule

MASTER = "master_weight"  # the copy of a 16-bit parameter, in 32 bits if not asked otherwise

State = dict[str, Tensor]


def math_dtype(param: Tensor) -> torch.dtype:
    """The dtype of state and arithmetic: float32, or float64 for float64 parameters."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def state_dtype(param: Tensor, key: str, options: Mapping[str, Any]) -> torch.dtype:
    """The dtype in which one state tensor of a parameter is kept."""
    chosen: Mapping[str, torch.dtype] = options.get("state_dtypes") or {}
    return chosen.get(key, math_dtype(param))


def needs_master(param: Tensor, master_weights: bool) -> bool:
    """Whether a master copy is kept beside the parameter."""
    return master_weights and param.dtype.itemsize < math_dtype(param).itemsize


def is_elementwise(rule: Rule, key: str, options: Mapping[str, Any]) -> bool:
    """Whether a state tensor has an element for each of the parameter's, whatever its shape."""
    shape = (64, 48)
    return rule.state_shapes(shape, options)[key] == shape


def block_state_shapes(rule: Rule, block: Block, options: Mapping[str, Any]) -> dict[str, Shape]:
    """Of one block: as stored what has an element for each of its, other state of all matrices.

    The latter is 1-D where a block has a form, matrix after matrix.
    """
    if block.form is None:
        return rule.state_shapes(block.shape, options)
    of_matrices = [rule.state_shapes(shape, options) for shape in block.matrices]
    return {
        key: block.shape
        if is_elementwise(rule, key, options)
        else (sum(prod(shapes[key]) for shapes in of_matrices),)
        for key in of_matrices[0]
    }


def initial_state(
    rule: Rule,
    param: Tensor,
    blocks: Sequence[Block] | None,
    options: Mapping[str, Any],
    master_weights: bool,
) -> State:
    """Zeros for each state tensor that the rule declares, and the master copy where asked.

    `blocks` is None for an elementwise rule. For a matrix rule, state of the blocks' shapes
    is one tensor of the parameter's shape; any other is 1-D, block after block, so that
    blocks may differ in shape.
    """
    shapes = {}
    if blocks is None:
        shapes = rule.state_shapes(tuple(param.shape), options)
    else:
        of_blocks = [block_state_shapes(rule, block, options) for block in blocks]
        for key in rule.state_shapes((0, 0), options):
            pairs = zip(of_blocks, blocks, strict=True)
            if all(shape[key] == block.shape for shape, block in pairs):
                shapes[key] = tuple(param.shape)
            else:
                shapes[key] = (sum(prod(shape[key]) for shape in of_blocks),)
    state = {
        key: torch.zeros(shape, dtype=state_dtype(param, key, options), device=param.device)
        for key, shape in shapes.items()
    }
    if needs_master(param, master_weights):
        dtype = state_dtype(param, MASTER, options)
        state[MASTER] = param.detach().to(dtype).contiguous()
    return state


def block_states(
    rule: Rule, state: State, blocks: Sequence[Block], options: Mapping[str, Any]
) -> list[State]:
    """The views of each block into the state that `initial_state` made for its parameter."""
    views: list[State] = []
    offsets = dict.fromkeys(state, 0)
    for block in blocks:
        shapes = block_state_shapes(rule, block, options)
        view = {}
        for key, tensor in state.items():
            if tensor.ndim == 1:  # a parameter of a matrix rule is never 1-D: block after block
                size = prod(shapes[key])
                view[key] = tensor.narrow(0, offsets[key], size).view(shapes[key])
                offsets[key] += size
            else:
                view[key] = block.view(tensor).view(block.shape)
        views.append(view)
    return views


class MatrixView(NamedTuple):
    """One matrix of a block where it lies, and its state; `rows` where it has several row dims."""

    value: Tensor
    state: State
    rows: int | None


def matrix_views(
    rule: Rule, block: Block, value: Tensor, state: State, options: Mapping[str, Any]
) -> list[MatrixView]:
    """The matrices of a block, of which value and state are given as they are stored."""
    if block.form is None:
        return [MatrixView(value, state, None)]
    states = matrix_states(rule, block, state, options)
    of_blocks = zip(block.form.views(value), states, block.matrices, strict=True)
    return [MatrixView(view, own, rows) for view, own, (rows, _) in of_blocks]


def matrix_states(
    rule: Rule, block: Block, state: State, options: Mapping[str, Any]
) -> list[State]:
    """The views of each matrix of a block into the block's state."""
    if block.form is None:
        return [state]
    found: list[State] = [{} for _ in block.matrices]
    for key, tensor in state.items():
        if key == MASTER or is_elementwise(rule, key, options):
            parts = block.form.views(tensor)
        else:
            shapes = [rule.state_shapes(shape, options)[key] for shape in block.matrices]
            flat = torch.split(tensor, [prod(shape) for shape in shapes])
            parts = [part.view(shape) for part, shape in zip(flat, shapes, strict=True)]
        for own, part in zip(found, parts, strict=True):
            own[key] = part
    return found
