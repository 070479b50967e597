"""What a roll call has found out, in words."""

from collections.abc import Iterable, Sequence

from samestep.comm.diagnosis.roll_call import Attendance


def verdict(attendance: Attendance, mine: int, members: Sequence[int]) -> str:
    """Who is missing, then the first error that is known. `members` are global ranks by place."""
    silent = set(attendance.expected) - attendance.answers.keys() - attendance.ended
    parts = []
    if attendance.ended:
        its = "its process has" if len(attendance.ended) == 1 else "their processes have"
        parts.append(f"{_ranks(attendance.ended, members)} did not answer: {its} ended")
    if silent and attendance.complete:
        seconds = f"{attendance.seconds:.0f} s"
        parts.append(f"{_ranks(silent, members)} did not answer within {seconds}")
    elif silent:
        parts.append(_without_store(attendance, silent, members))
    if not parts:
        parts.append(_nobody_missing(attendance, members))
    return ". ".join(["; ".join(parts), *_error(attendance, mine)])


def _without_store(attendance: Attendance, silent: set[int], members: Sequence[int]) -> str:
    text = "the store through which ranks find each other does not answer"
    answered = [members[place] for place in attendance.answers]
    if 0 in answered:
        return f"{text} any more; {_ranks(silent, members)} did not answer before"
    return f"{text}, nor does the rank that hosts it: rank 0, unless torchrun hosts it"


def _nobody_missing(attendance: Attendance, members: Sequence[int]) -> str:
    text = "all ranks answered, so none is missing"
    places = sorted(attendance.answers)
    if len({attendance.answers[place].operation for place in places}) == 1:
        return f"{text}: one may have been too slow"
    where = [f"rank {members[p]} in {attendance.answers[p].operation}" for p in places]
    return f"{text}, but they were in different operations: {'; '.join(where)}"


def _error(attendance: Attendance, mine: int) -> list[str]:
    own = attendance.answers[mine].error
    if own is not None:
        return [own]
    errors = [answer.error for answer in attendance.answers.values() if answer.error is not None]
    return [f"Another rank reported: {error}" for error in errors[:1]]


def _ranks(places: Iterable[int], members: Sequence[int]) -> str:
    ranks = sorted(members[place] for place in places)
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
