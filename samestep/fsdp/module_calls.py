"""Comparing, before FSDP2 communicates, which of its modules ranks are about to call."""

import math
from collections.abc import Mapping
from itertools import chain

import torch
from torch import nn

from samestep.comm.collectives import gather_segments
from samestep.comm.groups import RankGroup, ranks_text, registry
from samestep.comm.integrity.agreement import RanksDisagreeError
from samestep.placements.parts.fsdp_units import called, grid, own_places

BACKWARD = -1


class CallComparison:
    """One integer of every rank, before each call of an FSDP2 module and each backward pass."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._names = list(modules)
        self._numbers = {id(module): number for number, module in enumerate(modules.values())}
        self._groups: list[RankGroup | None] = []
        for module in modules.values():  # groups are made by all ranks, in this order
            ranks = sorted(chain.from_iterable(grid(module)))
            self._groups.append(registry.of_members(ranks) if len(ranks) > 1 else None)
        places = chain.from_iterable(own_places(module) for module in modules.values())
        self._device = next(place.now.device for place in places)

    def compare(self, module: nn.Module | None, *, input_requires_grad: bool = False) -> None:
        """Raise on every rank unless all are about to call this module; None: to go backward."""
        if module is None:
            for group in dict.fromkeys(self._groups):
                self._compare(BACKWARD, group)
            return
        number = self._numbers[id(module)]
        code = 4 * number + 2 * input_requires_grad + torch.is_grad_enabled()
        self._compare(code, self._groups[number])

    def _compare(self, code: int, group: RankGroup | None) -> None:
        if group is None:
            return
        mine = torch.tensor([code], dtype=torch.int64, device=self._device)
        found = gather_segments("comparison of calls", mine, [1] * group.size, group).wait()
        codes = [int(value) for value in found]
        if len(set(codes)) == 1:
            return
        sides: dict[int, list[int]] = {}
        for rank, other in zip(group.members, codes, strict=True):
            sides.setdefault(other, []).append(rank)
        told = "; ".join(
            f"{ranks_text(ranks, math.inf)}: {self._told(c)}" for c, ranks in sides.items()
        )
        raise RanksDisagreeError(
            f"ranks are about to do different things with an FSDP2 model, which would mix up their "
            f"parameters or hang. {told}. A rank that does not use a module calls "
            "samestep.fsdp.skip(module, x) in its place; one without a loss skips the model and "
            "goes backward from there"
        )

    def _told(self, code: int) -> str:
        if code == BACKWARD:
            return "go backward"
        number, how = divmod(code, 4)
        what = f"call {called(self._names[number])}"
        if not how & 1:
            return f"{what} without gradients"
        return f"{what}, whose input {'requires' if how & 2 else 'does not require'} a gradient"
