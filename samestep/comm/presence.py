"""Presence: which parameters have a gradient on any rank, and whether any rank has a problem.

One integer all-reduce of the largest value carries both, and whether ranks with copies of a part
of a DTensor have the same gradients of it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from samestep.comm.collectives import maximum
from samestep.comm.events import has_passed, recorded_event
from samestep.comm.groups import RankGroup
from samestep.plan.copied import CopiedAlong

CODES = 2  # numbers in which a rank tells of its problem
_SWAPPED = 1 << 60  # above all ranks and parameters, so that it wins


class Problem(NamedTuple):
    """Why a rank cannot take the step: its error, and the parameter it is about, if it is one.

    swapped: the names of parameters that were replaced here. Where they were on every rank there
        is no error, and `AllSwapped` is raised.
    """

    error: Exception
    param: int | None = None
    swapped: tuple[str, ...] = ()


class RankProblemError(RuntimeError):
    """Another rank could not take the step, so no rank takes it."""


class AllSwapped(Exception):  # noqa: N818 - it is no error
    """Every rank has other parameters in its groups than it had."""


def _problem_of(rank: int, about: str = "") -> RankProblemError:
    return RankProblemError(
        f"rank {rank} could not take the step{about}, so no rank took it; its own error says why"
    )


def changed_parameter(name: str, index: int, now: str, group: RankGroup) -> Problem:
    """That a parameter is not what it was when plans were made; `now`: what it is."""
    error = RuntimeError(
        f"parameter {name!r} {now}, on rank {group.members[group.rank]}: move and convert a model "
        "before its optimizer is built, or build that with deferred=True, which plans in the first "
        "step"
    )
    return Problem(error, index)


def _codes_of(problem: Problem | None, rank: int, names: Sequence[str] = ()) -> tuple[int, int]:
    """A problem as two numbers; of those of several ranks the largest are told.

    The first is 0 on a rank whose parameters were swapped, the second on one without a problem.
    """
    if problem is None:
        return rank + 1, 0
    param = 0 if problem.param is None else problem.param + 1
    if not problem.swapped:
        # A problem of another kind tells more than that this rank has swapped nothing.
        return 1 << 32 | rank + 1, (rank + 1) << 32 | param
    param = next((names.index(name) + 1 for name in problem.swapped if name in names), 0)
    return 0, _SWAPPED | (rank + 1) << 32 | param


def _refuse_swap(other: int, code: int, problem: Problem | None, names: Sequence[str] = ()) -> None:
    """If any rank has swapped parameters: raise `AllSwapped`, or what tells on which it is not so.

    other, code: the largest of all ranks.
    """
    if not code & _SWAPPED:
        return
    if not other:
        raise AllSwapped
    if other >> 32:
        if problem is not None and not problem.swapped:
            raise problem.error
        raise _problem_of((other & 0xFFFFFFFF) - 1)
    swapped, param = (code >> 32 & 0xFFFFFFF) - 1, code & 0xFFFFFFFF
    name = names[param - 1] if param else next(iter(problem.swapped if problem else ()), None)
    what = "parameters were" if name is None else f"parameter {name!r} was"
    raise RankProblemError(
        f"{what} replaced by another tensor on rank {swapped} and not on rank {other - 1}, so "
        "no rank took the step: wrap, shard or replace a model in the same way on every rank, then "
        "call opt.adopt(model) on every rank if nobody has put the new ones into param_groups"
    )


def any_problem(
    problem: Problem | None, group: RankGroup, device: torch.device | None = None
) -> Problem | None:
    """This rank's problem, or that another rank of the group has one; waits for them."""
    codes = _codes_of(problem, group.members[group.rank])
    told = torch.tensor(codes, dtype=torch.int64, device=device)
    other, code = maximum("problems", told, group).wait().tolist()
    _refuse_swap(other, code, problem)
    if problem is None and code:
        return Problem(_problem_of((code >> 32) - 1))
    return problem


def tell_problem(problem: Problem | None, group: RankGroup) -> None:
    """Raise on every rank of a group if any has a problem; waits for them."""
    found = any_problem(problem, group)
    if found is not None:
        raise found.error


class CopiedHere(NamedTuple):
    """What is replicated along the axes of a mesh, and in which line of each this rank is.

    ranks: those that hold any of it. way_out: for whoever has given some of them no gradient.
    """

    along: tuple[CopiedAlong, ...]
    lines: tuple[int, ...]
    ranks: RankGroup
    way_out: str

    @property
    def elements(self) -> int:
        return sum(each.elements for each in self.along)

    def votes(self, whole: Callable[[int, int], bool]) -> Tensor:
        """What this rank says, (elements,); `whole`: whether a gradient is, along an axis."""
        found = [
            each.votes([whole(param, each.axis) for param in each.params], line, self.ranks.rank)
            for each, line in zip(self.along, self.lines, strict=True)
        ]
        return torch.cat(found)

    def refuse_difference(self, votes: Tensor, names: Sequence[str], *, late: bool) -> None:
        """Raise if ranks with copies have not said the same; `late`: they have stepped since."""
        parts = torch.split(votes, [each.elements for each in self.along])
        for each, part in zip(self.along, parts, strict=True):
            found = each.difference(part)
            if found is not None:
                has, lacks = self.ranks.members[found.has], self.ranks.members[found.lacks]
                then = "no rank took the step"
                if late:
                    then = "these copies are not the same any more: go back to a checkpoint"
                raise RankProblemError(
                    f"rank {has} has the gradient of {names[found.param]!r}, and rank {lacks}, "
                    f"which holds a copy of the same values, has not: {then}. {self.way_out}"
                )


class PresenceAgreement:
    """The answers of all ranks, step after step."""

    def __init__(
        self,
        names: Sequence[str],
        groups: Sequence[RankGroup],
        device: torch.device,
        copied: CopiedHere | None = None,
    ) -> None:
        self._names = names
        self._groups = groups  # one after the other they reach every rank
        self._rank = groups[0].members[groups[0].rank]
        self._device = device
        self._copied = copied
        self._on_their_way: deque[tuple[Tensor, torch.cuda.Event]] = deque()  # codes of a GPU
        self.flagged: bool | None = None  # by any rank, in the last step of which that is known

    def agree(
        self,
        here: Sequence[int],
        problem: Problem | None,
        flag: bool = False,
        whole: Callable[[int, int], bool] | None = None,
    ) -> list[bool | Tensor]:
        """Per parameter: is it present anywhere? A 0-D flag on the device if only that knows.

        here: 0 for what is absent on this rank; `votes()` has the largest of all ranks.
        whole: whether this rank has a gradient, and more than a summand along an axis of the mesh.

        Raises on every rank if any rank has a problem, or ranks with copies do not have the same.
        The host never waits for a GPU: what is present here is present anywhere, the rest stays on
        the device, and what is to be raised is read at a later step, when it has arrived. So is a
        `flag` of any rank.
        """
        while self._on_their_way and has_passed(self._on_their_way[0][1]):
            self._read(self._on_their_way.popleft()[0], late=True)
        other, code = _codes_of(problem, self._rank, self._names)
        on_gpu = self._device.type == "cuda"
        codes = [other, code << 1 | int(flag)]
        votes = torch.tensor([*here, *codes], dtype=torch.int64)
        if self._copied is not None:
            # Who has a problem says nothing: its gradients may be anything.
            copied = torch.zeros(self._copied.elements, dtype=torch.int64)
            if problem is None:
                assert whole is not None
                copied = self._copied.votes(whole)
            votes = torch.cat([votes[:-CODES], copied, votes[-CODES:]])
        votes = (votes.pin_memory() if on_gpu else votes).to(self._device, non_blocking=True)
        anywhere = votes
        for group in self._groups:
            anywhere = maximum("presence", anywhere, group).wait()
        self._votes, said = anywhere[: len(here)], anywhere[len(here) :]
        if problem is not None and problem.swapped:  # the only one that a GPU is waited for
            other, code = said[-CODES:].tolist()
            _refuse_swap(other, code >> 1, problem, self._names)
        if problem is not None:
            raise problem.error
        if self._device.type == "cpu":
            self._read(said, late=False)
            return [bool(value) for value in self._votes.tolist()]
        if on_gpu:
            pinned = torch.empty(len(said), dtype=torch.int64, pin_memory=True)
            pinned.copy_(said, non_blocking=True)
            event = recorded_event(self._device)
            assert event is not None
            self._on_their_way.append((pinned, event))
        if all(here):
            return [True] * len(here)
        flags = self._votes.bool().unbind()
        return [bool(known) or flag for known, flag in zip(here, flags, strict=True)]

    def votes(self) -> list[int]:
        """The largest vote for each parameter in the last step; waits for a GPU."""
        votes: list[int] = self._votes.tolist()
        return votes

    def _read(self, said: Tensor, *, late: bool) -> None:
        """The votes about copies, and the codes of a problem."""
        other, code = said[-CODES:].tolist()
        self.flagged, code = bool(code & 1), code >> 1
        _refuse_swap(other, code, None, self._names)
        if code:
            rank, param = (code >> 32) - 1, code & 0xFFFFFFFF
            raise _problem_of(
                rank, f" because of parameter {self._names[param - 1]!r}" if param else ""
            )
        if self._copied is not None:
            self._copied.refuse_difference(said[:-CODES], self._names, late=late)
