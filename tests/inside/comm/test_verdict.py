"""What a failed roll call says."""

from __future__ import annotations

from samestep.comm.diagnosis.roll_call import Answer, Attendance, verdict

MEMBERS = (3, 5, 8, 0)  # global ranks by place
LATE = Answer("presence", "Timed out")
JOINED = Answer("presence", None)


def test_those_who_ended_and_those_who_are_silent_are_told_apart():
    found = Attendance(range(4), {1: LATE}, {0}, complete=True, seconds=5.0)
    assert verdict(found, 1, MEMBERS) == (
        "rank 3 did not answer: its process has ended; ranks 0, 8 did not answer within 5 s. "
        "Timed out"
    )


def test_several_processes_ended():
    found = Attendance(range(4), {1: JOINED, 0: LATE}, {2, 3}, complete=True, seconds=5.0)
    assert verdict(found, 1, MEMBERS) == (
        "ranks 0, 8 did not answer: their processes have ended. Another rank reported: Timed out"
    )


def test_only_those_who_were_expected_can_be_missing():
    found = Attendance([1, 2], {1: LATE}, complete=True, seconds=7.2)
    assert verdict(found, 1, MEMBERS) == "rank 8 did not answer within 7 s. Timed out"


def test_all_have_answered():
    found = Attendance([0, 1], {1: LATE, 0: JOINED}, complete=True)
    text = "all ranks answered, so none is missing"
    assert verdict(found, 1, MEMBERS) == f"{text}: one may have been too slow. Timed out"
    found.answers[0] = Answer("gather", None)
    assert verdict(found, 0, MEMBERS) == (
        f"{text}, but they were in different operations: rank 3 in gather; rank 5 in presence. "
        "Another rank reported: Timed out"
    )


def test_the_store_is_gone_before_or_after_its_host_has_answered():
    found = Attendance(range(4), {1: LATE})
    assert "does not answer, nor does the rank that hosts it: rank 0, unl" in verdict(
        found, 1, MEMBERS
    )
    found.answers[3] = LATE
    assert "does not answer any more; ranks 3, 8 did not answer before" in verdict(
        found, 1, MEMBERS
    )
