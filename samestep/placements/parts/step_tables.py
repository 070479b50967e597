"""What all chunks of spread blocks share in one step."""

import operator
from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from samestep.kernels.call import Step
from samestep.kernels.parts import GradientTable
from samestep.kernels.tables import Table
from samestep.update.plain import GroupMath, GroupMaths
from samestep.update.triton import can_run

if TYPE_CHECKING:
    from samestep.placements.parts.sharded import ShardedParameters


class StepTables:
    """Gradients, presence and options of one step."""

    def __init__(self, held: "ShardedParameters", params: Sequence[int]) -> None:
        # Contiguous: as tables of parts take them to be. Kept until all launches have read them.
        self._grads = [held.gradient_of(index).contiguous() for index in params]
        self.dtypes = [grad.dtype for grad in self._grads]
        self._device = held.device
        self._maths: dict[int, tuple[GroupMath, Step]] = {}
        self._can: dict[int, bool] = {}
        aligned = not reduce(operator.or_, [grad.data_ptr() for grad in self._grads], 0) % 16
        flags = [held.presence_of(index) for index in params]
        table = Table([self._grads]).addresses[0]
        self.grads = GradientTable(table, aligned, self._writes(flags))

    def _writes(self, present: Sequence[bool | Tensor]) -> Tensor | None:
        """(params,) float64 flags of presence; None: all are present."""
        if all(flag is True for flag in present):
            return None
        known = torch.arange(2, device=self._device).bool().unbind()
        flags = [flag if isinstance(flag, Tensor) else known[flag] for flag in present]
        return torch.stack(flags).double()

    def of_group(self, group: int, math: GroupMaths) -> tuple[GroupMath, Step]:
        """How the rule of a group is run."""
        if group not in self._maths:
            found = math(group)
            only_if = None if found.only_if is None else found.only_if.double()
            step = Step(found.scalars, found.options, found.factor, found.maximize, only_if)
            self._maths[group] = found, step
        return self._maths[group]

    def can_run(self, group: int, math: GroupMaths) -> bool:
        """Whether there are kernels for the rule and options of a group."""
        if group not in self._can:
            self._can[group] = can_run(self.of_group(group, math)[0], self._device)
        return self._can[group]
