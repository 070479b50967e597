"""The two ways to update a replicated parameter, with the steps that the optimizer takes."""

from itertools import pairwise

import torch
from torch import Tensor

from samestep.comm.collectives import (
    exchange_segments,
    gather_segments,
    reduce_segments,
    total,
)
from samestep.comm.groups import RankGroup
from samestep.plan.transfers import prefers_exchange
from samestep.rules import AdamWRule
from samestep.rules.state import initial_state
from samestep.update.plain import Operand, StepScalars, update_elementwise


class Way:
    """A parameter, its gradient, and AdamW's state of the part [start, stop) updated here."""

    def __init__(
        self, size: int, group: RankGroup, device: torch.device, *, ordered: bool, sharded: bool
    ) -> None:
        self.group, self.ordered, self.sharded = group, ordered, sharded
        values = torch.Generator().manual_seed(size)
        self.param = torch.randn(size, generator=values).to(device)
        self.grad = torch.randn(size, generator=values).to(device).mul_(1 + group.rank)
        bounds = [size * rank // group.size for rank in range(group.size + 1)]
        self.sizes = [stop - start for start, stop in pairwise(bounds)]
        self.own = self.param
        if sharded:
            self.own = self.param[bounds[group.rank] : bounds[group.rank + 1]]
        self.rule = AdamWRule()
        defaults = self.rule.defaults
        self.scalars = StepScalars().refill(0, device, self.rule.scalars(defaults))
        self.options = {key: defaults[key] for key in defaults.keys() - self.rule.schedulable}
        self.state = initial_state(self.rule, self.own, None, defaults, master_weights=False)

    @torch.no_grad()
    def step(self) -> None:
        """Reduce, update, and gather what the others have updated."""
        buffer = self.grad.clone()  # reductions may write into it, and the optimizer packs too
        if not self.sharded and not self.ordered:
            self._update(total("all-reduce", buffer, self.group).wait())
            return
        if prefers_exchange(on_cpu=buffer.device.type == "cpu", ordered=self.ordered):
            summed = exchange_segments("exchange", buffer, self.sizes, self.group).wait()
        else:
            summed = reduce_segments("reduce-scatter", buffer, self.sizes, self.group).wait()
        if not self.sharded:
            sums = gather_segments("sums", summed, self.sizes, self.group).wait()
            self._update(torch.cat(sums))
            return
        self._update(summed)
        gathered = gather_segments("all-gather", self.own, self.sizes, self.group).wait()
        for part, arrived in zip(torch.split(self.param, self.sizes), gathered, strict=True):
            part.copy_(arrived)

    def _update(self, summed: Tensor) -> None:
        mean = summed.div_(self.group.size)
        update_elementwise(
            self.rule, Operand(self.own, mean, self.state), self.scalars, self.options
        )
