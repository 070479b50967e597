"""Calls that all ranks make together, such as a construction: an error of one reaches all."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from samestep.comm.collectives import CollectiveError
from samestep.comm.groups import RankGroup
from samestep.comm.integrity.agreement import RanksDisagreeError
from samestep.comm.presence import Call, RankFailure, RankProblemError, any_problem

_TOLD = "_told_to_other_ranks"  # of an error


class JointCall(AbstractContextManager["JointCall"]):
    """A call that all ranks make together: an error of one is raised by all, in place of a hang.

    In the `with` block, code that may fail on one rank alone comes first, then `ready()`, then code
    that changes state or waits for other ranks. `ready()` tells other ranks of an earlier error.

    Args:
        agree: Tells other ranks of a problem, or of none; raises if any rank has one. Collective.
    """

    def __init__(self, agree: Callable[[RankFailure | None], None]) -> None:
        self._agree = agree
        self._agreed = False

    def ready(self) -> None:
        """Wait until all ranks are ready; raise on all of them if any rank has failed."""
        if not self._agreed:
            self._agreed = True
            self._agree(None)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        heard_of = (CollectiveError, RankProblemError, RanksDisagreeError)  # by all ranks
        if not isinstance(error, Exception) or isinstance(error, heard_of) or self._agreed:
            return
        if getattr(error, _TOLD, False):  # in a call inside of this one
            return
        self._agreed = True
        setattr(error, _TOLD, True)
        try:
            self._agree(RankFailure(error))
        except Exception as raised:
            if raised is not error:
                raise


def agree_among(
    groups: Sequence[RankGroup], call: Call, problem: RankFailure | None, device: torch.device
) -> None:
    """Raise on every rank if any rank has a problem, before ranks have agreed on a plan.

    groups: process groups that reach every rank, one after the other.
    """
    for group in groups:
        problem = any_problem(problem, group, sent_from(group, device), call)
    if problem is not None:
        raise problem.error


def sent_from(group: RankGroup, device: torch.device) -> torch.device:
    """Return the device for small messages: the CPU, if the group has a backend for it."""
    on_host = "cpu:" in str(dist.get_backend_config(group.handle))
    return torch.device("cpu") if on_host else device
