"""Parameters of one process: all of each, updated where it lies."""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from samestep.apply import Operand
from samestep.layout.blocks import Block
from samestep.param_groups import Group, rule_of
from samestep.placement import Placement, mesh_of
from samestep.plan.schedule import PlacementShape
from samestep.state import State, block_states


class LocalParameters(Placement):
    """The placement without other ranks: one bucket, nothing to send."""

    shape = PlacementShape(bucket_sizes=(1,), agrees=False, reduces=False)

    def __init__(
        self,
        groups: Sequence[Group],
        blocks: Mapping[Tensor, list[Block] | None],
        known: dict[Tensor, "KnownViews"],
    ) -> None:
        self._groups = groups
        self._blocks = blocks
        self._known = known

    def operands(self, number: int) -> Iterator[tuple[int, Operand]]:
        """Every parameter with a gradient, cut into its blocks, with the index of its group."""
        for index, group in enumerate(self._groups):
            for param in plain(group):
                for operand in self._operands(param, group):
                    yield index, operand

    def gradients(self) -> Iterator[Tensor]:
        """Whole ones: no sum over them needs their blocks."""
        for group in self._groups:
            for param in plain(group):
                if param.grad is not None:
                    yield param.grad

    def present(self) -> list[tuple[int, bool | Tensor]]:
        """The group of each parameter, and whether it has a gradient."""
        return [
            (index, param.grad is not None)
            for index, group in enumerate(self._groups)
            for param in plain(group)
        ]

    def holds(self, param: Tensor) -> bool:
        """Every one that is no DTensor."""
        return mesh_of(param) is None

    def gather_state(
        self,
        state: Mapping[Tensor, State],
        groups: Sequence[Group],
        only: Tensor | None = None,
    ) -> Callable[[], dict[Tensor, State]]:
        """A copy."""
        return lambda: {
            param: {key: tensor.clone() for key, tensor in state[param].items()}
            for group in groups
            for param in plain(group)
            if only is None or param is only
        }

    def _operands(self, param: Tensor, group: Group) -> list[Operand]:
        """The parameter's blocks, or the whole of it, with views of gradient and state."""
        grad = param.grad
        if grad is None:
            return []
        views = self._views(param, group)
        if views.whole:
            value, state = views.of_blocks[0]
            return [Operand(value, grad.view(1) if grad.ndim == 0 else grad, state)]
        blocks = self._blocks[param] or ()
        pairs = zip(blocks, views.of_blocks, strict=True)
        return [Operand(value, block.view(grad), state) for block, (value, state) in pairs]

    def _views(self, param: Tensor, group: Group) -> "KnownViews":
        """The blocks of a parameter and its state; made once, unless either was replaced."""
        state, known = self._state[param], self._known.get(param)
        if (
            known is None
            or known.address != param.data_ptr()
            or not all(map(operator.is_, known.of, state.values()))
        ):
            blocks = self._blocks[param]
            whole = blocks is None or (len(blocks) == 1 and blocks[0].matrix is None)
            made = _made_views(param, state, blocks, group)
            known = KnownViews(param.data_ptr(), tuple(state.values()), whole, made)
            self._known[param] = known
        return known


class KnownViews(NamedTuple):
    """Views of a parameter's blocks and their state, and what they are views of."""

    address: int
    of: tuple[Tensor, ...]
    whole: bool  # one block is all of it
    of_blocks: list[tuple[Tensor, State]]


def _made_views(
    param: Tensor, state: State, blocks: list[Block] | None, group: Group
) -> list[tuple[Tensor, State]]:
    rule, param = rule_of(group), param.detach()
    if blocks is None:
        if param.ndim == 0:  # as a vector of one: 0-D tensors are scalars to torch
            shapes = rule.state_shapes((1,), group)
            state = {key: tensor.view(shapes.get(key, (1,))) for key, tensor in state.items()}
            param = param.view(1)
        return [(param, state)]
    states = block_states(rule, state, blocks, group)
    return [(block.view(param), view) for block, view in zip(blocks, states, strict=True)]


def plain(group: Group) -> list[Tensor]:
    """The parameters of a group that are no DTensors."""
    return [param for param in group["params"] if mesh_of(param) is None]
