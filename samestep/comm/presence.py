"""Presence: which parameters have a gradient on any rank, and whether any rank has a problem.

One integer all-reduce of the largest value carries both.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from samestep.comm.collectives import maximum
from samestep.comm.events import has_passed, recorded_event
from samestep.comm.groups import RankGroup


class Problem(NamedTuple):
    """Why a rank cannot take the step: its error, and the parameter it is about, if it is one."""

    error: Exception
    param: int | None = None


class RankProblemError(RuntimeError):
    """Another rank could not take the step, so no rank takes it."""


def _problem_of(rank: int, about: str = "") -> RankProblemError:
    return RankProblemError(
        f"rank {rank} could not take the step{about}, so no rank took it; its own error says why"
    )


def any_problem(
    problem: Problem | None, group: RankGroup, device: torch.device | None = None
) -> Problem | None:
    """This rank's problem, or that another rank of the group has one; waits for them."""
    rank = group.members[group.rank]
    code = torch.tensor([0 if problem is None else rank + 1], dtype=torch.int64, device=device)
    found = int(maximum("problems", code, group).wait())
    if problem is None and found:
        return Problem(_problem_of(found - 1))
    return problem


def tell_problem(problem: Problem | None, group: RankGroup) -> None:
    """Raise on every rank of a group if any has a problem; waits for them."""
    found = any_problem(problem, group)
    if found is not None:
        raise found.error


class PresenceAgreement:
    """The answers of all ranks, step after step."""

    def __init__(
        self, names: Sequence[str], groups: Sequence[RankGroup], device: torch.device
    ) -> None:
        self._names = names
        self._groups = groups  # one after the other they reach every rank
        self._rank = groups[0].members[groups[0].rank]
        self._device = device
        self._on_their_way: deque[tuple[Tensor, torch.cuda.Event]] = deque()  # codes of a GPU
        self.flagged: bool | None = None  # by any rank, in the last step of which that is known

    def agree(
        self, here: Sequence[int], problem: Problem | None, flag: bool = False
    ) -> list[bool | Tensor]:
        """Per parameter: is it present anywhere? A 0-D flag on the device if only that knows.

        here: 0 for what is absent on this rank; `votes()` has the largest of all ranks.

        Raises on every rank if any rank has a problem. The host never waits for a GPU: what is
        present here is present anywhere, the rest stays on the device, and another rank's
        problem is read at a later step, when its code has arrived. So is a `flag` of any rank.
        """
        while self._on_their_way and has_passed(self._on_their_way[0][1]):
            self._read(int(self._on_their_way.popleft()[0]))
        code = int(flag)
        if problem is not None:
            param = 0 if problem.param is None else problem.param + 1
            code |= ((self._rank + 1) << 32 | param) << 1
        on_gpu = self._device.type == "cuda"
        votes = torch.tensor([*here, code], dtype=torch.int64, pin_memory=on_gpu)
        votes = votes.to(self._device, non_blocking=True)
        anywhere = votes
        for group in self._groups:
            anywhere = maximum("presence", anywhere, group).wait()
        self._votes = anywhere[:-1]
        if problem is not None:
            raise problem.error
        if self._device.type == "cpu":
            *present, code = anywhere.tolist()
            self._read(code)
            return [bool(value) for value in present]
        if on_gpu:
            pinned = torch.empty((), dtype=torch.int64, pin_memory=True)
            pinned.copy_(anywhere[-1], non_blocking=True)
            event = recorded_event(self._device)
            assert event is not None
            self._on_their_way.append((pinned, event))
        if all(here):
            return [True] * len(here)
        flags = anywhere.bool().unbind()
        return [bool(known) or flag for known, flag in zip(here, flags, strict=False)]

    def votes(self) -> list[int]:
        """The largest vote for each parameter in the last step; waits for a GPU."""
        votes: list[int] = self._votes.tolist()
        return votes

    def _read(self, code: int) -> None:
        self.flagged, code = bool(code & 1), code >> 1
        if not code:
            return
        rank, param = (code >> 32) - 1, code & 0xFFFFFFFF
        raise _problem_of(
            rank, f" because of parameter {self._names[param - 1]!r}" if param else ""
        )
