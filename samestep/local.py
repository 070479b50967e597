"""Parameters of one process: all of each, updated where it lies."""

from collections.abc import Callable, Iterator, Mapping, Sequence

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
        self, groups: Sequence[Group], blocks: Mapping[Tensor, list[Block] | None]
    ) -> None:
        self._groups = groups
        self._blocks = blocks

    def operands(self, number: int) -> Iterator[tuple[int, Operand]]:
        """Every parameter with a gradient, cut into its blocks, with the index of its group."""
        for index, group in enumerate(self._groups):
            for param in plain(group):
                for operand in self._operands(param, group):
                    yield index, operand

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
        grad, state, blocks = param.grad, self._state[param], self._blocks[param]
        if grad is None:
            return []
        if blocks is None:
            if param.ndim == 0:  # as a vector of one: 0-D tensors are scalars to torch
                shapes = rule_of(group).state_shapes((1,), group)
                state = {key: tensor.view(shapes.get(key, (1,))) for key, tensor in state.items()}
                param, grad = param.view(1), grad.view(1)
            return [Operand(param, grad, state)]
        states = block_states(rule_of(group), state, blocks, group)
        pairs = zip(blocks, states, strict=True)
        return [Operand(block.view(param), block.view(grad), view) for block, view in pairs]


def plain(group: Group) -> list[Tensor]:
    """The parameters of a group that are no DTensors."""
    return [param for param in group["params"] if mesh_of(param) is None]
