"""Parameters of one process: all of each, updated where it lies."""

import operator
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from samestep.groups.distribution import Distribution
from samestep.groups.param_groups import Group, parameter_names, rule_of
from samestep.layout.blocks import Block, matrices
from samestep.placements.placement import Placement
from samestep.placements.registry import mesh_of
from samestep.plan.schedule import PlacementShape
from samestep.rules.state import (
    MASTERS,
    MatrixView,
    State,
    block_states,
    initial_state,
    matrix_views,
    needs_master,
    state_shapes,
    stored_tensors,
    whereabouts,
)
from samestep.update.plain import Operand

if TYPE_CHECKING:
    from samestep.xla.state import Lying


class LocalParameters(Placement):
    """The placement without other ranks: one bucket, nothing to send."""

    shape = PlacementShape(bucket_sizes=(1,), agrees=False, reduces=False)

    def __init__(
        self, known: Sequence["KnownGroup"], lying: "Mapping[Tensor, Lying] | None" = None
    ) -> None:
        self.known = known
        self._lying = lying or {}  # on XLA: where parameters and their state have to stay

    def finish_step(self) -> None:
        """What was written lies where it did."""
        if not self._lying:
            return
        from samestep.xla.state import stay

        for param in (param for group in self.known for param in group.params):
            if param.grad is not None:
                stay(self._lying.get(param, ()))

    # Lists, not generators: these take a good part of a short step's time.

    def operands(self, number: int) -> list[tuple[int, Operand]]:
        """Every parameter with a gradient, cut into its blocks, with the index of its group."""
        return [
            (index, operand)
            for index, group in enumerate(self.known)
            for operand in group.operands()
        ]

    def gradients(self) -> list[Tensor]:
        """Whole ones: no sum over them needs their blocks."""
        grads = [param.grad for group in self.known for param in group.params]
        return [grad for grad in grads if grad is not None]

    def present(self) -> list[tuple[int, bool | Tensor]]:
        """The group of each parameter, and whether it has a gradient."""
        return [
            (index, param.grad is not None)
            for index, group in enumerate(self.known)
            for param in group.params
        ]

    def holds(self, param: Tensor) -> bool:
        """Every one that is no DTensor."""
        return mesh_of(param) is None

    def gather_state(
        self,
        state: Mapping[Tensor, State],
        groups: Sequence[Group],
        only: Sequence[Tensor] | None = None,
    ) -> Callable[[], dict[Tensor, State]]:
        return lambda: {
            param: {key: tensor.clone() for key, tensor in state[param].items()}
            for group in groups
            for param in plain(group)
            if only is None or any(param is one for one in only)
        }


class LocalGroups:
    """The groups of one process, with the state that is theirs, as the last step found them."""

    def __init__(
        self,
        blocks: Mapping[Tensor, list[Block] | None],
        master_weights: bool,
        distribution: Distribution,
    ) -> None:
        self._blocks = blocks
        self._master_weights = master_weights
        self._distribution = distribution
        self._known: list[KnownGroup] = []
        self._lying: dict[Tensor, Lying] = {}

    def look_at(self, groups: Sequence[Group], state: MutableMapping[Tensor, State]) -> None:
        """See whether anything was replaced, and whether all state is there."""
        del self._known[len(groups) :]
        for index, group in enumerate(groups):
            known = self._known[index : index + 1]
            if not known or not known[0].is_still(group, state):
                self.make_state(group, state)
                known_group = KnownGroup(group, index, state, self._blocks)
                self._known[index : index + 1] = [known_group]

    def make_state(self, group: Group, state: MutableMapping[Tensor, State]) -> None:
        """There is state for every plain parameter of a group, where it belongs."""
        self._keep_beside(plain(group), group, state)

    def make_missing_state(
        self, groups: Sequence[Group], state: MutableMapping[Tensor, State]
    ) -> None:
        """There is state for every parameter, also if it was cleared since."""
        for group in groups:
            self._keep_beside(group["params"], group, state)

    def _keep_beside(
        self, params: Iterable[Tensor], group: Group, state: MutableMapping[Tensor, State]
    ) -> None:
        """State follows a parameter to its device; cleared state starts afresh."""
        for param in params:
            own, masters = state[param], self._master_weights
            if not own or (needs_master(param, masters) and not own.keys() & set(MASTERS)):
                fresh = initial_state(rule_of(group), param, self._blocks[param], group, masters)
                own = state[param] = {**fresh, **own}
            for key, tensor in own.items():
                if tensor.device != param.device:
                    own[key] = tensor.to(param.device)
            if param.device.type == "xla":
                self._lying[param] = self._laid(param, own)

    def _laid(self, param: Tensor, state: State) -> "Lying":
        from samestep.xla.state import lay_out

        distribution = self._distribution
        shares, crossover = distribution.sharding != "none", distribution.crossover
        return lay_out(param, state, shares=shares, crossover=crossover)

    def placement(self) -> LocalParameters:
        """What a step is about."""
        return LocalParameters(list(self._known), self._lying)


class KnownGroup:
    """A group as a step found it, with views of its blocks and their state.

    Made once, unless a parameter or a state tensor is replaced: that takes longer than a small
    step itself.
    """

    def __init__(
        self,
        group: Group,
        index: int,
        state: Mapping[Tensor, State],
        blocks: Mapping[Tensor, list[Block] | None],
    ) -> None:
        self._all = list(group["params"])
        self.params = plain(group)
        self._states = [state[param] for param in self.params]
        self._all_states = list(state.values())
        self._tensors = [tensor for entry in self._states for tensor in entry.values()]
        self._addresses = [param.data_ptr() for param in self.params]
        self._has_no_addresses = any(param.device.type == "xla" for param in self.params)
        self.blocks = [blocks[param] for param in self.params]
        names = dict(zip(map(id, self._all), parameter_names(group, index), strict=True))
        of_params = zip(
            [names[id(param)] for param in self.params],
            self.params,
            self._states,
            self.blocks,
            strict=True,
        )
        self._cut = [
            (param, blocks is None or _is_whole(blocks), blocks or [], known)
            for (_, param, _, blocks), known in ((of, _made_views(*of, group)) for of in of_params)
        ]

    def is_still(self, group: Group, state: Mapping[Tensor, State]) -> bool:
        """Whether nothing was replaced since; tensors of XLA have no address to know it by."""
        return (
            not self._has_no_addresses
            and _are_the_same(group["params"], self._all)
            and _are_the_same(list(state.values()), self._all_states)  # looking them up is slow
            and _are_the_same([t for entry in self._states for t in entry.values()], self._tensors)
            and [param.data_ptr() for param in self.params] == self._addresses
        )

    def operands(self) -> list[Operand]:
        """The blocks of every parameter with a gradient, or the whole of it."""
        found = []
        for param, whole, blocks, known in self._cut:
            grad = param.grad
            if grad is None:
                continue
            if whole:
                value, state, _, origin = known[0]
                own = grad if grad.ndim else grad.view(1)
                found.append(Operand(value, own, state, origin=origin))
            else:
                found += [
                    Operand(value, of_matrix, state, rows=rows, origin=origin)
                    for of_matrix, (value, state, rows, origin) in zip(
                        matrices(blocks, grad), known, strict=True
                    )
                ]
        return found


def _are_the_same(found: Sequence[object], known: Sequence[object]) -> bool:
    return len(found) == len(known) and all(map(operator.is_, found, known))


def _is_whole(blocks: list[Block]) -> bool:
    """Whether one block is all of a parameter."""
    return len(blocks) == 1 and blocks[0].matrix is None and blocks[0].form is None


def _made_views(
    name: str, param: Tensor, state: State, blocks: list[Block] | None, group: Group
) -> list[MatrixView]:
    rule, param = rule_of(group), param.detach()
    stored = stored_tensors(
        rule, param, blocks, group, master_weights=bool(state.keys() & set(MASTERS))
    )
    where = whereabouts(name, tuple(param.shape), stored)
    if blocks is None:
        if param.ndim == 0:  # as a vector of one: 0-D tensors are scalars to torch
            shapes = state_shapes(rule, (1,), group, stored)
            state = {key: tensor.view(shapes[key]) for key, tensor in state.items()}
            param = param.view(1)
            where = None if where is None else where.at(where.elements.view(1))
        return [MatrixView(param, state, None, None if where is None else where.origin())]
    states = block_states(rule, state, blocks, group, stored)
    return [
        view
        for block, own in zip(blocks, states, strict=True)
        for view in matrix_views(
            rule,
            block,
            block.view(param),
            own,
            group,
            stored,
            None if where is None else where.at(block.view(where.elements).view(block.shape)),
        )
    ]


def plain(group: Group) -> list[Tensor]:
    """The parameters of a group that are no DTensors."""
    return [param for param in group["params"] if mesh_of(param) is None]
