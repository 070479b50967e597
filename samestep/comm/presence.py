"""Presence: which parameters have a gradient on any rank, and whether all ranks can take the step.

One integer all-reduce of the largest value carries both: a problem of any rank, whether all ranks
are about to do the same with the same hyperparameters, and whether ranks with copies of a part of
a DTensor have the same gradients of it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from samestep.comm.collectives import maximum
from samestep.comm.diagnosis import watch
from samestep.comm.diagnosis.flight import has_passed, recorded_event
from samestep.comm.groups import RankGroup
from samestep.comm.integrity.agreement import (
    RanksDisagreeError,
    differences_between_ranks,
    differences_text,
)
from samestep.comm.integrity.checksum import sum_of_words, text_checksum
from samestep.plan.replicated_gradients import ReplicatedAlong
from samestep.tooling.warn import some

if TYPE_CHECKING:
    from samestep.comm.replicated_votes import ReplicatedHere

PROBLEM_CODES = 2  # numbers in which a rank tells of its problem
_CODES = PROBLEM_CODES + 4  # and whether it dropped gradients, and what it is about to do
_WAY_OUT = (
    "Ranks that share parameters need the same hyperparameters in every step: a scheduler that "
    "looks at a loss, such as ReduceLROnPlateau, has to be given the same on every rank (the mean "
    "over ranks)"
)
_NOTHING = -(1 << 63)  # below all that anybody says
CALL = "call"  # in lines of what ranks are about to do
_SWAPPED = 1 << 60  # above all ranks and parameters, so that it wins
_REASON = 600  # bytes of an error that other ranks are told


def presence_elements(params: int, replicated: Sequence[ReplicatedAlong] = ()) -> int:
    """Return the length of the presence all-reduce: votes of parameters and copies, codes."""
    return params + sum(each.elements for each in replicated) + _CODES


class RankFailure(NamedTuple):
    """The reason why a rank cannot take the step: an error, and the parameter it is about.

    swapped: the names of parameters that were replaced here. Where they were on every rank there
        is no error, and `AllSwapped` is raised.
    """

    error: Exception
    param: int | None = None
    swapped: tuple[str, ...] = ()


class RankProblemError(RuntimeError):
    """Another rank could not take the step, so no rank takes it.

    rank: the failed rank, if only one. reason: its error, if all ranks heard of it together.
    """

    rank: int | None = None
    reason: str = ""


class Intent(Protocol):
    """The hyperparameters and calls of a rank's step, which must agree between ranks."""

    @property
    def digest(self) -> int:
        """Return a 64-bit checksum of the values that are on the host."""
        ...

    @property
    def on_device(self) -> Sequence[Tensor]:
        """Return the hyperparameters that are on the device, 0-D."""
        ...

    def lines(self, on_device: Sequence[float] | None = None) -> list[str]:
        """Return lines "what = value"; `on_device`: values of those on the device, if read."""
        ...


class Call(NamedTuple):
    """A collective call, as a rank announces it."""

    name: str

    @property
    def digest(self) -> int:
        return text_checksum(f"call {self.name}")

    @property
    def on_device(self) -> tuple[Tensor, ...]:
        return ()

    def lines(self, on_device: Sequence[float] | None = None) -> list[str]:
        return [f"{CALL} = {self.name}"]


class _Said(NamedTuple):
    """Votes of all ranks on their way to the host."""

    votes: Tensor
    passed: torch.cuda.Event
    intent: Intent | None
    on_device: Tensor | None  # numbers of the intent, as they were


class AllSwapped(Exception):  # noqa: N818 - it is no error
    """Raised if every rank has replaced parameters."""


def _problem_of(
    rank: int, about: str = "", call: "Call | None" = None, reason: str = ""
) -> RankProblemError:
    if call is None:
        what = f"could not take the step{about}, so no rank took it"
    else:
        what = f"failed in {call.name}{about}, so no rank goes on with it"
    why = f": {reason}" if reason else "; its own error says why"
    error = RankProblemError(f"rank {rank} {what}{why}")
    error.rank, error.reason = rank, reason
    return error


def _reason_of(
    code: int, rank: int, problem: RankFailure | None, groups: Sequence[RankGroup], where: Tensor
) -> str:
    """Return the text of the error of the rank whose problem all ranks have heard of.

    Collective over the groups. code: code of the problem. where: a tensor on the device to use.
    """
    text = ""
    if problem is not None and _codes_of(problem, rank)[1] == code:
        error = problem.error
        heard_of = getattr(error, "rank", None) is not None
        text = getattr(error, "reason", "") if heard_of else f"{type(error).__name__}: {error}"
    encoded = text.encode()[:_REASON]
    told = torch.zeros(_REASON, dtype=torch.int64)
    told[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.int64)
    told = told.to(where.device)
    for group in groups:
        told = maximum("reason", told, group).wait()
    return bytes(told.tolist()).rstrip(b"\0").decode(errors="ignore")


def changed_parameter(name: str, index: int, now: str, group: RankGroup) -> RankFailure:
    """Return the failure of a parameter that differs from the plan; `now`: a text on it."""
    error = RuntimeError(
        f"parameter {name!r} {now}, on rank {group.members[group.rank]}: move and convert a model "
        "before its optimizer is built, or build that with deferred=True, which plans in the first "
        "step"
    )
    return RankFailure(error, index)


def _codes_of(problem: RankFailure | None, rank: int, names: Sequence[str] = ()) -> tuple[int, int]:
    """Return an error as two codes for the all-reduce.

    The first is 0 on a rank whose parameters were swapped, the second on one without a problem.
    A problem that was heard of another rank is sent with the number of that rank.
    """
    if problem is None:
        return rank + 1, 0
    heard_of = getattr(problem.error, "rank", None)
    rank = rank if heard_of is None else heard_of
    param = 0 if problem.param is None else problem.param + 1
    if not problem.swapped:
        # A problem of another kind tells more than that this rank has swapped nothing.
        return 1 << 32 | rank + 1, (rank + 1) << 32 | param
    param = next((names.index(name) + 1 for name in problem.swapped if name in names), 0)
    return 0, _SWAPPED | (rank + 1) << 32 | param


def _refuse_swap(
    other: int, code: int, problem: RankFailure | None, names: Sequence[str] = ()
) -> None:
    """Raise `AllSwapped`, or an error if only some ranks have swapped parameters.

    other, code: the largest codes of all ranks, see `_codes_of`.
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
        f"{what} replaced by another tensor on rank {swapped} and not on rank "
        f"{other - 1}, so no rank took the step: wrap, shard or replace a model in the "
        "same way on every rank, then call opt.adopt(model) on every rank unless the "
        "new parameters are already in param_groups"
    )


def any_problem(
    problem: RankFailure | None,
    group: RankGroup,
    device: torch.device | None = None,
    call: "Call | None" = None,
) -> RankFailure | None:
    """Return the failure of a rank of the group, or None; waits.

    call: the call that ranks are about to make; None: a step.
    """
    codes = _codes_of(problem, group.members[group.rank])
    told = torch.tensor(codes, dtype=torch.int64, device=device)
    name = "problems" if call is None else f"agreement on {call.name}"
    other, code = maximum(name, told, group).wait().tolist()
    _refuse_swap(other, code, problem)
    if code:
        rank = group.members[group.rank]
        reason = _reason_of(code, rank, problem, [group], told)
        return problem or RankFailure(_problem_of((code >> 32) - 1, call=call, reason=reason))
    return None


class Drops(NamedTuple):
    """Per parameter, whether reduced gradients were dropped.

    again: whether gradients came since, after their bucket was reduced.
    """

    dropped: Sequence[bool]
    counted: Sequence[bool]
    again: bool


class PresenceAgreement:
    """Agreement of all ranks on which gradients exist."""

    def __init__(
        self,
        names: Sequence[str],
        groups: Sequence[RankGroup],
        device: torch.device,
        replicated: "ReplicatedHere | None" = None,
        *,
        waits: bool = False,
    ) -> None:
        """waits: the host waits for a GPU, so that all ranks hear of a problem in one step."""
        self._names = names
        self._groups = groups  # one after the other they reach every rank
        self._waits = waits or device.type == "cpu"
        self._rank = groups[0].members[groups[0].rank]
        self._device = device
        self._replicated = replicated
        self._codes_of_drops = {True: (self._rank + 1, 0), False: (0, self._rank + 1)}
        copies = () if replicated is None else replicated.along
        self._elements = presence_elements(len(names), copies)  # as the estimate counts them
        self._on_their_way: deque[_Said] = deque()
        self.flagged: bool | None = None  # by any rank, in the last step of which that is known
        self.dropped = False  # whether all ranks are to agree on what they dropped

    def agree(
        self,
        here: Sequence[int],
        problem: RankFailure | None,
        intent: Intent | None,
        flag: bool = False,
        whole: Callable[[int, int], bool] | None = None,
        *,
        dropped: bool = False,
    ) -> list[bool | Tensor]:
        """Return, per parameter, if any rank has a gradient: a bool, or a 0-D device flag.

        here: 0 for gradients absent on this rank; `votes()` has the largest of all ranks.
        intent: the step of this rank; None: it is not compared.
        whole: whether this rank has a gradient, and more than a summand along an axis of the mesh.
        dropped: whether sums have a gradient that was dropped on this rank since. If so on any
            rank, `self.dropped` is set, and `agree_on_drops` comes next.

        Raises on every rank if any has a problem, intents of ranks differ, or ranks with copies do
        not have the same gradients.
        The host waits for a GPU only if `waits`: else a gradient of this rank counts as present,
        other flags stay on the device, and errors and `flag` are read at a later step.
        """
        if self._on_their_way:
            self._read_arrived()
        other, code = self._rank + 1, 0
        if problem is not None:
            other, code = _codes_of(problem, self._rank, self._names)
            intent = None  # who cannot take the step says nothing of it
        codes = [other, code << 1 | int(flag), *self._codes_of_drops[dropped], _NOTHING, _NOTHING]
        if intent is not None:
            # ~ turns the order around, so the largest ~digest is the smallest digest's.
            codes[-2:] = intent.digest, ~intent.digest
        votes = torch.tensor([*here, *codes], dtype=torch.int64)
        if self._replicated is not None:
            # Who has a problem says nothing: its gradients may be anything.
            of_copies = torch.zeros(self._replicated.elements, dtype=torch.int64)
            if problem is None and whole is not None:
                of_copies = self._replicated.votes(whole)
            votes = torch.cat([votes[:-_CODES], of_copies, votes[-_CODES:]])
        assert len(votes) == self._elements
        if self._device.type != "cpu":
            votes = self._on_device(votes)
        on_device = None
        if intent is not None and intent.on_device:
            on_device = self._add_numbers(votes, intent)
        anywhere = self._largest("presence", votes)
        self._votes, said = anywhere[: len(here)], anywhere[len(here) :]
        if problem is not None:
            raise self._own_error(problem, said)
        if self._waits:
            self._read(said, intent, on_device, late=False)
        else:
            self._hear_later(said, intent, on_device, dropped=dropped)
        if self._device.type == "cpu":
            return [bool(value) for value in self._votes.tolist()]
        if all(here):
            return [True] * len(here)
        flags = self._votes.bool().unbind()
        return [bool(known) or flag for known, flag in zip(here, flags, strict=True)]

    def _own_error(self, problem: RankFailure, said: Tensor) -> Exception:
        """Return this rank's error, once all other ranks have heard of it.

        Where parameters were swapped, the host waits for a GPU: all ranks may have swapped them.
        """
        if problem.swapped:
            other, code = said[-_CODES:].tolist()[:2]
            _refuse_swap(other, code >> 1, problem, self._names)
        self._reason(said, problem)
        return problem.error

    def _reason(self, said: Tensor, problem: RankFailure | None) -> str:
        """Return the error of the failed rank; "" where ranks hear of it in different steps."""
        code = int(said[-_CODES + 1]) >> 1 if self._waits else 0
        if not code or code & _SWAPPED:
            return ""
        return _reason_of(code, self._rank, problem, self._groups, said)

    def meet(self, call: Call, problem: RankFailure | None) -> None:
        """Raise on every rank if any has a problem or is in another call; waits for a GPU.

        Ranks that take a step meanwhile take part: the all-reduce has the same length.
        """
        self.agree([0] * len(self._names), problem, call, whole=lambda param, axis: False)
        if self._on_their_way:
            mine = self._on_their_way.pop()
            mine.passed.synchronize()
            self._read(mine.votes, mine.intent, mine.on_device, late=False)

    def _add_numbers(self, votes: Tensor, intent: Intent) -> Tensor:
        """Add hyperparameters on the device to the digest there; return them, float64."""
        numbers = torch.stack([n.to(self._device, torch.float64) for n in intent.on_device])
        of_bits = sum_of_words(numbers.view(torch.int64))
        votes[-2] += of_bits
        votes[-1] -= of_bits
        return numbers

    def votes(self) -> list[int]:
        """Return the largest vote for each parameter in the last step; waits for a GPU."""
        votes: list[int] = self._votes.tolist()
        return votes

    def _on_device(self, votes: Tensor) -> Tensor:
        on_gpu = self._device.type == "cuda"
        return (votes.pin_memory() if on_gpu else votes).to(self._device, non_blocking=True)

    def _largest(self, name: str, votes: Tensor) -> Tensor:
        """Return the largest votes over all ranks."""
        for group in self._groups:
            votes = maximum(name, votes, group).wait()
        return votes

    # --- gradients that were dropped after they were reduced -----------------------------------

    def look_for_drops(self, dropped: bool) -> bool:
        """Whether any rank has dropped gradients; then `agree_on_drops` is next. Collective."""
        self._read_arrived()
        elements = 0 if self._replicated is None else self._replicated.elements
        codes = [0] * PROBLEM_CODES + [*self._codes_of_drops[dropped], _NOTHING, _NOTHING]
        votes = torch.tensor([0] * elements + codes, dtype=torch.int64)
        said = self._largest("gradients dropped", self._on_device(votes))
        if self._waits:
            self._read(said, None, None, late=False)
        else:
            self._hear_later(said, None, None, dropped=dropped)
        return self.dropped

    def agree_on_drops(self, here: Drops) -> tuple[list[int], bool]:
        """Return the parameters with void sums, and if any rank has gradients since. Collective.

        Raises on every rank if one rank has dropped a gradient that another rank counts.
        """
        votes = torch.tensor([*here.dropped, *here.counted], dtype=torch.int64)
        votes = torch.cat([votes * (self._rank + 1), torch.tensor([int(here.again)])])
        *said, again = self._largest("gradients dropped", self._on_device(votes)).tolist()
        count = len(here.dropped)
        for index, (dropped, counted) in enumerate(zip(said[:count], said[count:], strict=True)):
            if dropped and counted:
                raise self._dropped_here_alone(dropped - 1, self._names[index], counted - 1)
        return [index for index, dropped in enumerate(said[:count]) if dropped], bool(again)

    def _dropped_here_alone(self, rank: int, name: str | None, other: int) -> RankProblemError:
        what = "gradients were" if name is None else f"the gradient of {name!r} was"
        return RankProblemError(
            f"{what} dropped on rank {rank} (zero_grad() or .grad = None) after it was "
            f"reduced, and not on rank {other}, so that the sum still contains it; no "
            "rank took the step. Drop it on every rank or on none; to leave a batch "
            "out on one rank, skip its backward. With overlap_grad_reduce=False, and "
            "before synchronize() and clip_grad_norm_(), a rank may drop its own"
        )

    # --- what all ranks have said --------------------------------------------------------------

    def _read_arrived(self) -> None:
        while self._on_their_way and has_passed(self._on_their_way[0].passed):
            before = self._on_their_way.popleft()
            try:
                self._read(before.votes, before.intent, before.on_device, late=True)
            except RuntimeError:
                watching = watch.current()
                if watching is not None:  # ranks may have sent different operations
                    watching.wait_for_comparison()
                raise

    def _hear_later(
        self, said: Tensor, intent: Intent | None, on_device: Tensor | None, *, dropped: bool
    ) -> None:
        """Copy the votes of all ranks to the host, which reads them at a later step.

        A rank that dropped gradients waits, and raises if another did not: that rank would not know
        that an agreement comes next.
        """
        self.dropped = False
        if dropped:
            intact = said[-_CODES:].tolist()[PROBLEM_CODES + 1]
            if intact:
                raise self._dropped_here_alone(self._rank, None, intact - 1)
            self._read(said, intent, on_device, late=False)
        elif self._device.type == "cuda":
            pinned = torch.empty(len(said), dtype=torch.int64, pin_memory=True)
            pinned.copy_(said, non_blocking=True)
            event = recorded_event(self._device)
            assert event is not None
            self._on_their_way.append(_Said(pinned, event, intent, on_device))

    def _read(
        self, said: Tensor, intent: Intent | None, on_device: Tensor | None, *, late: bool
    ) -> None:
        """Decode votes and codes."""
        other, code, dropped, intact, digest, inverse = said[-_CODES:].tolist()
        self.dropped = False
        self.flagged, code = bool(code & 1), code >> 1
        if code & _SWAPPED:
            _refuse_swap(other, code, None, self._names)
        if code:
            rank, param = (code >> 32) - 1, code & 0xFFFFFFFF
            about = f" because of parameter {self._names[param - 1]!r}" if param else ""
            call = intent if isinstance(intent, Call) else None
            raise _problem_of(rank, about, call, self._reason(said, None))
        if intent is not None and digest != ~inverse:
            raise self._difference(intent, on_device, late=late)
        if late and dropped:
            raise self._dropped_here_alone(dropped - 1, None, intact - 1)
        self.dropped = bool(dropped)
        if self._replicated is not None:
            self._replicated.refuse_difference(said[:-_CODES], self._names, late=late)

    def _difference(
        self, intent: Intent, on_device: Tensor | None, *, late: bool
    ) -> RanksDisagreeError:
        """Return the error on differing intents; `late`: with the values of this rank alone."""
        lines = intent.lines(None if on_device is None else on_device.tolist())
        if late:  # others may come to it in another step: nothing more can be asked together
            return RanksDisagreeError(
                "a step before was taken with other hyperparameters on rank "
                f"{self._rank} than on another rank with copies or shards of "
                f"{self._names[0]!r}, so these now differ: load the last checkpoint on "
                f"every rank. {_WAY_OUT}. Values on this rank: "
                + some([line for line in lines if not line.startswith(CALL)], 40)
            )
        found = differences_between_ranks(lines, self._groups, self._device)
        if any(line.startswith(CALL) for line in found.first[0].values()):
            return RanksDisagreeError(
                f"ranks wait for each other in different calls, so none can go on: "
                f"{differences_text(found._replace(first=found.first[:1], more=0))}. All ranks "
                "that share parameters make such calls together, in the same order"
            )
        return RanksDisagreeError(
            f"{differences_text(found)}, so no rank took the step, and nothing has changed. "
            f"{_WAY_OUT}"
        )
