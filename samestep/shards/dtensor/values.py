"""State and whole values of DTensors: every rank of a mesh holds a shard."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from samestep.comm.collectives import maximum
from samestep.comm.groups import RankGroup
from samestep.layout.boxes import HeldBox, HeldState, local_of
from samestep.plan.layouts import Key
from samestep.rules.state import State
from samestep.shards.dtensor.gradients import combine_gradients, no_summand, summands
from samestep.shards.dtensor.mesh_layout import MeshLayout
from samestep.shards.state_store import StateStore
from samestep.shards.values import ShardValues
from samestep.update.plain import scale


class DTensorValues(ShardValues):
    """State and whole values of the DTensors of a mesh.

    Args:
        layout: The boxes that each rank of the mesh holds.
        group: The ranks of the mesh.
        known_summands: By parameter along which axes any rank had summands so far, as
            `gradients.summands` has it; updated here too.
    """

    keeps_all = True  # of its shards, which DTensors are; but for state of the owners of blocks
    params: Sequence[DTensor]

    def __init__(
        self,
        params: Sequence[DTensor],
        layout: MeshLayout,
        store: StateStore,
        group: RankGroup,
        known_summands: list[int],
    ) -> None:
        self.params, self._layout, self._store, self._group = params, layout, store, group
        self._device = layout.device
        self._summands = known_summands

    def gather_state(
        self, state: Mapping[Tensor, State], only: Sequence[Tensor] | None = None
    ) -> Callable[[], dict[Tensor, State]]:
        """Gather state, as `ShardValues` says; the collective starts with the wait."""
        wanted = range(len(self.params)) if only is None else [self.index(p) for p in only]
        tensors: dict[Key, Tensor] = {
            (index, key): local_of(tensor)
            for index in wanted
            for key, tensor in state[self.params[index]].items()
        }

        def gather() -> dict[Tensor, State]:
            found: dict[Tensor, State] = {self.params[index]: {} for index in wanted}
            for (index, key), tensor in self._store.gather(tensors, self._device).items():
                found[self.params[index]][key] = tensor
            return found

        return gather

    def held_state(self, state: Mapping[Tensor, State]) -> Iterator[HeldState]:
        """Local shards of sharded state, and all replicated state."""
        for index, param in enumerate(self.params):
            for key, tensor in state[param].items():
                parts = self._store.parts((index, key))
                boxes = [HeldBox(part.box, part.of(tensor)) for part in parts]
                yield HeldState(param, key, self._store.shapes[index, key], boxes)

    def put_state(
        self, state: Mapping[Tensor, State], param: Tensor, key: str, whole: Mapping[str, Tensor]
    ) -> None:
        """Copy this rank's shard out of whole state."""
        self._store.take((self.index(param), key), state[param][key], whole[key])

    def put_parameter(self, param: Tensor, key: str, into: Tensor) -> None:
        """Write a parameter into state, as `ShardValues` says."""
        local_of(into).copy_(local_of(param))

    def whole_value(self, param: Tensor) -> Tensor:
        """The whole parameter. Collective."""
        index = self.index(param)
        return self._layout.whole(index, local_of(self.params[index]))

    def put_value(self, param: Tensor, whole: Tensor) -> None:
        """Copy this rank's shard out of a whole parameter."""
        local_of(param).copy_(self._layout.part(self.index(param), whole))

    def scale(self, state: Mapping[Tensor, State], param: Tensor, factor: Tensor) -> None:
        """Scale this rank's shard, as `ShardValues` says."""
        own = {key: local_of(tensor) for key, tensor in state[param].items()}
        scale(local_of(param), own, self._layout.part(self.index(param), factor))

    def whole_gradient(self, param: Tensor) -> Tensor | None:
        """The whole gradient; None if no rank has one. Collective."""
        index = self.index(param)
        own = self.params[index]
        code = torch.tensor([summands(own)], dtype=torch.int64, device=self._device)
        anywhere = int(maximum("presence of a gradient", code, self._group).wait())
        sums = combine_gradients([own], {own: no_summand(own, anywhere)})
        self._summands[index] = max(self._summands[index], anywhere)
        if own in sums:  # the step will find the others' added up already
            own.grad = sums[own]
        local = torch.zeros_like(own.to_local()) if own.grad is None else local_of(own.grad)
        whole = self._layout.whole(index, local)
        return whole if anywhere else None

    def put_gradient(self, param: Tensor, whole: Tensor) -> None:
        """Set this rank's shard of a gradient."""
        index = self.index(param)
        part = self._layout.part(index, whole).to(param.dtype).clone()
        param.grad = self._layout.beside(index, part)
