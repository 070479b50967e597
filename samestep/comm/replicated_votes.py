"""Votes of ranks that hold copies of parts of a DTensor: whether they have the same gradients."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from samestep.comm.groups import RankGroup
from samestep.comm.presence import RankProblemError
from samestep.plan.replicated_gradients import ReplicatedAlong


class ReplicatedHere(NamedTuple):
    """Parameters replicated along mesh axes, and the line along each axis that has this rank.

    ranks: ranks that hold any of the parameters. way_out: advice in the error.
    """

    along: tuple[ReplicatedAlong, ...]
    lines: tuple[int, ...]
    ranks: RankGroup
    way_out: str

    @property
    def elements(self) -> int:
        return sum(each.elements for each in self.along)

    def votes(self, whole: Callable[[int, int], bool]) -> Tensor:
        """Return the votes of this rank, (elements,); `whole(param, axis)`: see `agree`."""
        found = [
            each.votes([whole(param, each.axis) for param in each.params], line, self.ranks.rank)
            for each, line in zip(self.along, self.lines, strict=True)
        ]
        return torch.cat(found)

    def refuse_difference(self, votes: Tensor, names: Sequence[str], *, late: bool) -> None:
        """Raise if votes of ranks with copies differ; `late`: ranks have stepped since."""
        parts = torch.split(votes, [each.elements for each in self.along])
        for each, part in zip(self.along, parts, strict=True):
            found = each.difference(part)
            if found is not None:
                has, lacks = self.ranks.members[found.has], self.ranks.members[found.lacks]
                then = "no rank took the step"
                if late:
                    then = "these copies now differ: load the last checkpoint on every rank"
                raise RankProblemError(
                    f"rank {has} has the gradient of {names[found.param]!r}, and rank "
                    f"{lacks}, which holds a copy of the same values, has none: {then}. "
                    f"{self.way_out}"
                )
