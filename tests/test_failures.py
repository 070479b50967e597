"""Ranks that die, hang or never arrive: the others end in time and name them."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import samestep
from samestep.comm.collectives import total
from samestep.comm.diagnosis import flight
from samestep.comm.groups import registry
from samestep.comm.integrity.agreement import RanksDisagreeError
from tests.limits import HANG, TEST, limit
from tests.ranks import RanksFailed, run_forked
from tests.soak import some

# Short ones, for those who have to wait for them to pass. All others would wait for longer than
# they are given after the first failure: they are asserted to raise, so they do not wait.
TIMEOUT = limit(2.5)  # of the process group
ANSWER = limit(2.5)  # that ranks have for their answer, from the launch
LAST_CALL = 1.0  # and from the failure
SOON = limit(2.0)  # where the victim lives on, and is not waited for
PATIENCE = limit(30.0)  # with those who end by themselves
FOREVER = 2 * TEST
OPERATIONS = (
    r"presence|reduction of bucket|gather of bucket|comparison of|gradient norm|agreement on"
)


@pytest.fixture(autouse=True, scope="module")
def imported():
    """What torch imports at first use, so that not every rank has to."""
    step(*build(), rank=0)


@pytest.fixture
def short_answers(monkeypatch):
    monkeypatch.setattr("samestep.comm.diagnosis.roll_call.ANSWER_S", ANSWER)


@pytest.fixture
def endless_answers(monkeypatch):
    """Who waits for the answer of a process that has ended waits for ever."""
    monkeypatch.setattr("samestep.comm.diagnosis.roll_call.ANSWER_S", FOREVER)


def build(**options):
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 9), nn.Linear(9, 4))
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(generator=generator)
    return model, samestep.MuonAdamW(model, lr=0.1, crossover=8, **options)


def step(model, opt, rank):
    for param in model.parameters():
        param.grad = torch.full_like(param, rank + 1.0)
    opt.step()


def before_each_collective(act):
    """Call `act(n)` before the n-th collective of this process from now on, from 1."""
    count = 0

    def counting(original):
        def wrapper(*args, **kwargs):
            nonlocal count
            count += 1
            act(count)
            return original(*args, **kwargs)

        return wrapper

    names = ("all_reduce", "all_to_all_single", "reduce_scatter", "reduce_scatter_single",
             "reduce_scatter_tensor", "all_gather", "all_gather_single", "all_gather_into_tensor",
             "broadcast")  # fmt: skip
    for name in names:
        if hasattr(dist, name):
            setattr(dist, name, counting(getattr(dist, name)))
    return lambda: count


def be_known():
    """Leave this process's name with its groups, which happens in the background: see roll_call.

    Only then can others know that it has ended, where nobody may give up waiting for its answer.
    """
    for calls in list(flight._roll_calls.values()):
        assert calls._joined.ended(HANG)


def die():
    be_known()
    os.kill(os.getpid(), signal.SIGKILL)


def messages_of(job, *, victim=2, timeout=FOREVER, grace=PATIENCE):
    """What the other two ranks of three end with, by themselves.

    `grace` is how long the parent waits for them, and for a victim that is not dead.
    """
    with pytest.raises(RanksFailed) as caught:
        run_forked(3, job, collective_timeout=timeout, grace=grace)
    reports = caught.value.reports
    messages = []
    for rank in sorted({0, 1, 2} - {victim}):
        assert reports[rank].startswith("raised:"), reports[rank]
        messages.append(reports[rank].split("CollectiveError: ")[-1].strip())
    assert not multiprocessing.active_children()
    return messages


def blames(message, victim):
    """Whether it names an operation and, of all ranks, the victim only."""
    named = {int(number) for number in re.findall(r"\branks? (\d+)", message)}
    return bool(re.match(rf"({OPERATIONS}).* failed: rank \d", message)) and named == {victim}


@pytest.mark.parametrize(
    ("place", "victim", "sharding"),
    some(
        [
            ("first", 0, "zero2"),
            ("second", 0, "none"),
            ("last", 0, "zero2"),
            ("first", 2, "none"),
            ("second", 2, "zero2"),
            ("last", 2, "zero2"),
        ]
    ),
)
@pytest.mark.usefixtures("endless_answers")
def test_a_rank_that_dies_during_a_step_is_named(place, victim, sharding):
    def job(rank):
        model, opt = build(sharding=sharding, max_grad_norm=1.0)
        kill_at = None
        count = before_each_collective(lambda n: die() if n == kill_at else None)
        step(model, opt, rank)
        if rank == victim:
            kill_at = count() + {"first": 1, "second": 2, "last": count()}[place]
        step(model, opt, rank)
        step(model, opt, rank)

    for message in messages_of(job, victim=victim):
        assert blames(message, victim), message
        assert "its process has ended" in message


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.usefixtures("short_answers")
def test_a_rank_that_hangs_inside_a_step_is_named(victim):
    def job(rank):
        model, opt = build()
        hang_at = None
        count = before_each_collective(lambda n: time.sleep(FOREVER) if n == hang_at else None)
        step(model, opt, rank)
        if rank == victim:
            hang_at = count() + 2
        step(model, opt, rank)

    for message in messages_of(job, victim=victim, timeout=TIMEOUT, grace=SOON):
        assert blames(message, victim), message
        seconds = int(re.search(r"did not answer within (\d+) s", message)[1])
        assert seconds >= int(TIMEOUT + LAST_CALL)


@pytest.mark.usefixtures("short_answers")
def test_a_rank_that_never_arrives_at_a_step_is_named():
    def job(rank):
        model, opt = build()
        if rank == 2:
            time.sleep(FOREVER)
        step(model, opt, rank)

    for message in messages_of(job, timeout=TIMEOUT, grace=SOON):
        assert blames(message, 2), message


@pytest.mark.usefixtures("short_answers")
def test_a_rank_that_never_arrives_at_construction_is_named():
    def job(rank):
        if rank == 2:
            time.sleep(FOREVER)
        build()

    for message in messages_of(job, timeout=TIMEOUT, grace=SOON):
        assert message.startswith(
            "agreement on the construction of MuonAdamW failed: rank 2 did not answer within"
        )
        assert blames(message, 2), message


@pytest.mark.usefixtures("short_answers")
def test_a_rank_that_dies_before_construction_is_named():
    def job(rank):
        if rank == 2:
            die()
        build()

    for message in messages_of(job):
        assert message.startswith(
            "agreement on the construction of MuonAdamW failed: rank 2 did not answer within"
        )
        assert blames(message, 2), message


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.usefixtures("endless_answers")
def test_a_rank_that_comes_late_is_not_taken_for_the_dead_one(late):
    """One rank may fail at once; another is busy for some more time."""

    def job(rank):
        model, opt = build()
        if rank == 2:
            die()
        if rank == late:
            time.sleep(1.5)
        step(model, opt, rank)

    for message in messages_of(job):
        assert blames(message, 2), message


def test_a_plan_that_differs_is_the_error_of_every_rank():
    def job(rank):
        try:
            build(bucket_size=300 + (rank == 2))
        except RanksDisagreeError as error:
            return str(error)
        return None

    messages = run_forked(3, job)
    assert len(set(messages)) == 1
    assert "rank 0 has 'bucket_size = 300', rank 2 has 'bucket_size = 301'" in messages[0]


# --- a store that lives in rank 0, as without torchrun -----------------------------------------


def join_store_of_rank_0(rank, seconds):
    """Replace the default group by one whose store rank 0 hosts."""
    shared = dist.group.WORLD.get_group_store()
    timeout = timedelta(seconds=seconds)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, 3, True, timeout, wait_for_workers=False)
        shared.set("port", str(store.port))
    else:
        port = int(shared.get("port"))
        store = dist.TCPStore("127.0.0.1", port, 3, False, timeout)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timeout)
    dist.barrier()


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.usefixtures("endless_answers")
def test_a_death_where_rank_0_hosts_the_store(victim):
    def job(rank):
        join_store_of_rank_0(rank, HANG)
        model, opt = build()
        step(model, opt, rank)
        if rank == victim:
            die()
        step(model, opt, rank)

    for message in messages_of(job, victim=victim):
        if victim == 2:
            assert blames(message, 2), message
        else:
            assert re.match(rf"({OPERATIONS}).* failed: the store .* does not answer", message)
            assert "the rank that hosts it: rank 0, unless torchrun hosts it" in message
            assert "rank 1" not in message
            assert "rank 2" not in message


@pytest.mark.usefixtures("short_answers")
def test_a_store_that_hangs_does_not_hang_the_others():
    def job(rank):
        join_store_of_rank_0(rank, TIMEOUT)
        model, opt = build()
        step(model, opt, rank)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)  # the store's thread, too
        step(model, opt, rank)

    for message in messages_of(job, victim=0, timeout=TIMEOUT, grace=SOON):
        assert "failed: the store through which ranks find each other does not answer" in message
        assert "rank 0" in message


# --- groups of some ranks ----------------------------------------------------------------------


@pytest.mark.usefixtures("endless_answers")
def test_members_are_named_by_their_global_rank():
    def job(rank):
        group = registry.of_ranks([1, 2], timedelta(seconds=HANG)) or registry.of()
        be_known()
        if rank == 0:
            total("the sum of all", torch.ones(3), group).wait()
        total("a sum", torch.ones(3), group).wait()
        if rank == 2:
            die()
        total("another sum", torch.ones(3), group).wait()

    outside, inside = messages_of(job)
    assert inside.startswith("another sum failed: rank 2 did not answer: its process has ended")
    assert "rank 1" not in inside
    assert outside.startswith("the sum of all failed: ranks 1, 2 did not answer")


@pytest.mark.usefixtures("short_answers")
def test_a_member_that_does_not_make_the_group_is_named():
    """Rank 0 is not among its members and not asked."""

    def job(rank):
        total("a sum", torch.ones(3), registry.of()).wait()
        if rank == 2:
            time.sleep(FOREVER)
        registry.of_ranks([1, 2], timedelta(seconds=TIMEOUT))
        total("the sum of all", torch.ones(3), registry.of()).wait()

    outside, inside = messages_of(job, timeout=TIMEOUT, grace=limit(3.0))
    assert inside.startswith("creation of the group of ranks 1, 2 failed: rank 2 did not answer")
    assert outside.startswith("the sum of all failed: rank 2 did not answer")
