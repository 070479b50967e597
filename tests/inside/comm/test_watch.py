"""The watch of each rank, with collectives that never end: who is named, and who is left alone.

Two watches of one process talk through one store; what a device would do is a `Work` that says it.
"""

import sys
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from samestep.comm.collectives import CollectiveError
from samestep.comm.diagnosis import watch
from samestep.comm.diagnosis.watch import Watch, patience_of
from samestep.plan.transfers import Traffic, Transfer
from tests.limits import eventually, limit

FOREVER = 3600.0
CPU = torch.device("cpu")


class Work:
    """A collective of torch: on its way until somebody says that it has arrived."""

    def __init__(self, arrived: bool = False) -> None:
        self.arrived = arrived

    def is_completed(self) -> bool:
        return self.arrived


class Rank:
    """A rank with its watch; `errors` is what the watch has ended the process with."""

    def __init__(
        self, store: dist.Store, rank: int, torch_operations: Callable = lambda seconds: ()
    ) -> None:
        self.errors: list[CollectiveError] = []
        hook = sys.excepthook
        self.watch = Watch(
            store, rank, 2, on_device=True, patience=0.05,
            end=lambda error, thread: self.errors.append(error),
            torch_operations=torch_operations,
        )  # fmt: skip
        sys.excepthook = hook  # a process has one watch

    def launch(
        self, name: str, elements: int = 4, *, arrived: bool = False, patience: float = FOREVER
    ) -> None:
        transfer = Transfer(Traffic.ALL_REDUCE, name, torch.float32, elements)
        operation = self.watch.launching(transfer, (0, 1), patience)
        operation.work, operation.launched, operation.waited = Work(arrived), True, True

    def step(self, *names: str, elements: int = 4) -> None:
        """A step whose collectives all arrive."""
        self.watch.step_begun()
        for name in names:
            self.launch(name, elements, arrived=True)
        self.watch.step_ended(CPU)

    @property
    def message(self) -> str:
        eventually(lambda: bool(self.errors))
        return str(self.errors[0])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "POLL_S", 0.02)
    monkeypatch.setattr(watch, "SUSPICIOUS_S", 0.05)
    monkeypatch.setattr(watch, "ROLL_CALL_S", limit(2.0))


@pytest.fixture
def make() -> Iterator[Callable[..., Rank]]:
    store, made = dist.HashStore(), list[Rank]()

    def new(rank: int, **keywords: Callable) -> Rank:
        made.append(Rank(store, rank, **keywords))
        return made[-1]

    yield new
    for rank in made:
        rank.watch.stop()


def test_operation_that_never_arrives_is_named_on_both_ranks(make) -> None:
    first, second = make(0), make(1)
    first.watch.step_begun()
    first.launch("reduction of bucket 3 (layers.0.up, ...)", patience=0.1)
    assert first.message.startswith("rank 0 ends, in reduction of bucket 3 (layers.0.up, ...)")
    assert "4 elements, operation 1, step 1, among ranks 0, 1" in first.message
    assert "has been in flight for" in first.message
    # The other one is in no collective: it is running this very test.
    assert "rank 1 is in no collective, but at " in first.message
    assert "reduction of bucket 3" in second.message
    assert first.errors[0].positions.keys() == {0, 1}


def test_next_step_raises_what_was_found(make) -> None:
    first, _second = make(0), make(1)
    first.launch("presence", patience=0.05)
    assert first.message
    with pytest.raises(CollectiveError, match="rank 0 ends, in presence"):
        first.watch.step_begun()


def test_ranks_that_are_slow_but_arrive_are_left_alone(make) -> None:
    ranks = make(0), make(1)
    for step in range(20):
        for rank in ranks:
            rank.step("presence", f"reduction {step}")
        time.sleep(0.01)
    for rank in ranks:  # launched long ago, and nobody has asked since
        rank.launch("gather", arrived=True, patience=0.01)
    time.sleep(0.3)
    assert not ranks[0].errors
    assert not ranks[1].errors


def test_operation_that_is_not_launched_yet_counts(make) -> None:
    """Making a communicator waits for others inside the launch."""
    first, _ = make(0), make(1)
    first.watch.launching(Transfer(Traffic.ALL_REDUCE, "plan", torch.int64, 2), (0, 1), 0.1)
    assert "in plan (2 elements" in first.message


def test_problem_of_another_rank_ends_who_waits_for_it(make) -> None:
    first, second = make(0), make(1)
    second.watch.step_begun()
    second.watch.problem(ValueError("weight_decay must be a number"))
    time.sleep(0.2)
    assert not first.errors  # nothing waits: every rank may have the same problem
    first.launch("presence")
    assert (
        "rank 1 could not take step 1: ValueError: weight_decay must be a number" in first.message
    )


def test_problem_is_over_when_the_next_step_begins(make) -> None:
    first, second = make(0), make(1)
    second.watch.step_begun()
    second.watch.problem(ValueError("shared by all ranks"))
    second.watch.step_begun()
    eventually(lambda: not second.watch._store.check(["samestep/watch/problem/1"]))
    first.launch("presence")
    time.sleep(0.2)
    assert not first.errors


def test_rank_that_raises_is_named_with_its_error_at_once(make, capsys) -> None:
    first, second = make(0), make(1)
    error = RuntimeError("out of data\nmore")
    second.watch._on_exception(RuntimeError, error, None)
    assert "rank 1 has ended by RuntimeError: out of data" in first.message
    assert "RuntimeError: out of data" in capsys.readouterr().err  # as without a watch


@pytest.mark.parametrize(
    ("kind", "how"), [(None, "without an error"), (KeyError, "by KeyError: 7")]
)
def test_the_last_step_of_a_rank_that_ended_is_told(make, kind, how) -> None:
    first, second = make(0), make(1)
    for _ in range(3):
        first.step()
    second.step()
    if kind is None:
        second.watch._goodbye()
    else:
        second.watch._on_exception(kind, kind(7), None)
    said = f"Rank 1 ended {how} after its step 1; this is step 3"
    assert said in first.watch.elsewhere(set(), {0})


def test_an_error_is_told_with_the_line_it_came_from(make) -> None:
    make(0)
    second = make(1)
    try:
        torch.linalg.inv(torch.zeros(2, 3))
    except RuntimeError as error:
        found = second.watch._held("late", error.__traceback__)
    assert f"rank 1 in no operation of samestep, step 0, at {__file__}:" in str(found)


def test_rank_that_ended_well_is_missed_only_by_who_waits(make) -> None:
    first, second = make(0), make(1)
    second.watch._goodbye()
    time.sleep(0.2)
    assert not first.errors
    first.launch("presence")
    assert "rank 1 has ended without an error" in first.message


def test_rank_that_ended_well_is_not_missed_by_who_has_something_else_to_do(make) -> None:
    """Such as a checkpoint to write after the last step, whose collectives have all arrived."""
    first, second = make(0), make(1)
    for rank in (first, second):
        rank.step("presence", "gather")
    second.watch._goodbye()
    second.watch.problem(ValueError("too late"))
    time.sleep(0.3)
    assert not first.errors


def test_rank_that_destroys_its_groups_misses_nobody(make) -> None:
    """Torch's record of what has arrived may stay behind then."""
    first, second = make(0, torch_operations=lambda seconds: ["nccl:all_reduce"]), make(1)
    first.watch._patience = None  # it would count as stuck, too
    first.launch("gather")
    second_left = second.watch._goodbye

    def destroy_process_group() -> None:
        second_left()
        time.sleep(0.3)

    destroy_process_group()
    assert not first.errors
    assert "rank 1 has ended without an error" in first.message  # where it is waited for again


def test_rank_that_ended_well_is_missed_in_a_collective_of_torch(make) -> None:
    flying: list[str] = []
    asked: list[float] = []

    def operations(seconds: float) -> list[str]:
        asked.append(seconds)
        return flying if seconds == watch.SUSPICIOUS_S else []

    first, second = make(0, torch_operations=operations), make(1)
    first.step("presence")
    second.watch._goodbye()
    eventually(lambda: watch.SUSPICIOUS_S in asked)
    assert not first.errors
    flying.append("nccl:_all_gather_base")
    assert "rank 1 has ended without an error" in first.message


@pytest.mark.parametrize(
    ("theirs", "number"),
    [
        ({"names": ("presence", "reduction"), "elements": 5}, 1),
        ({"names": ("reduction", "presence"), "elements": 4}, 1),
        ({"names": ("presence", "extra", "reduction"), "elements": 4}, 2),
    ],
    ids=["size", "order", "one more"],
)
def test_other_operations_are_found_though_none_hangs(make, theirs, number) -> None:
    first, second = make(0), make(1)
    first.step("presence", "reduction")
    second.step(*theirs["names"], elements=theirs["elements"])
    told = f"launched different operations: number {number} of their group is "
    assert told in first.message
    assert told in second.message


def test_rank_that_heard_nonsense_waits_for_what_the_watches_find(make) -> None:
    first, second = make(0), make(1)
    first.step("presence")
    second.step("presence", elements=8)
    with pytest.raises(CollectiveError, match="launched different operations: number 1 of their"):
        first.watch.wait_for_comparison()


def test_rank_that_heard_what_others_said_goes_on(make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "ROLL_CALL_S", 0.05)
    first, second = make(0), make(1)
    first.step("presence")
    second.step("presence")
    first.watch.wait_for_comparison()
    assert not first.errors


def test_numbers_of_steps_may_differ(make) -> None:
    """A rank may have one optimizer more, on a group that the others are not in."""
    first, second = make(0), make(1)
    for _ in range(3):
        first.step("presence", "reduction")
        second.step("presence")
        second.step("reduction")
    first.step("presence")  # ahead by one
    time.sleep(0.3)
    assert not first.errors
    assert not second.errors


def test_groups_of_the_same_ranks_are_told_apart(make) -> None:
    """Two threads of a rank launch on a group each, in any order."""
    transfer = Transfer(Traffic.ALL_REDUCE, "reduction", torch.float32, 4)
    other = transfer._replace(name="gather")
    ranks = make(0), make(1)
    for rank, order in zip(ranks, ("ab", "ba"), strict=True):
        for group in order:
            which = transfer if group == "a" else other
            operation = rank.watch.launching(which, (0, 1), FOREVER, group)
            operation.work, operation.launched = Work(arrived=True), True
    time.sleep(0.3)
    assert [each.errors for each in ranks] == [[], []]


def test_collective_of_torch_is_named(make) -> None:
    first = make(0, torch_operations=lambda seconds: ["nccl:_all_gather_base of [[4]] in group 0"])
    make(1)
    assert "torch's nccl:_all_gather_base of [[4]] in group 0" in first.message


def test_watch_takes_the_hook_of_errors_and_gives_it_back() -> None:
    hook = sys.excepthook
    alone = Watch(dist.HashStore(), 0, 1, on_device=False)
    assert sys.excepthook == alone._on_exception
    alone.stop()
    assert sys.excepthook == hook


def test_watch_ends_with_its_group() -> None:
    over = False
    store = dist.HashStore()
    alone = Watch(store, 0, 2, on_device=True, is_over=lambda: over)
    over = True
    eventually(lambda: not alone._thread.is_alive())
    assert store.check(["samestep/watch/ended/0"])  # who still waits for this rank is told
    alone.stop()


def test_patience_ends_before_the_watchdog_of_torch() -> None:
    from datetime import timedelta

    for seconds in (1.0, 5.0, 25.0, 50.0, 600.0, 1800.0):
        patience = patience_of(timedelta(seconds=seconds))
        assert 0.5 * seconds < patience < seconds
        assert seconds - patience <= 15.0
