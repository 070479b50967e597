"""Ranks that die, hang or never arrive: the others end in time and name them."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import samestep
from samestep.comm.agreement import RanksDisagreeError
from samestep.comm.collectives import CollectiveError, total
from samestep.comm.groups import registry
from tests.ranks import RanksFailed, run_forked

TIMEOUT = 3.0  # of the process group
ANSWER = 3.0  # seconds that ranks have for their answer, from the launch
LAST_CALL = 1.0  # and from the failure
FOREVER = 60.0
OPERATIONS = r"presence|reduction of bucket|gather of bucket|comparison of|gradient norm"


@pytest.fixture(autouse=True, scope="module")
def imported():
    """What torch imports at first use, so that not every rank has to."""
    step(*build(), rank=0)


@pytest.fixture(autouse=True)
def short_answers(monkeypatch):
    monkeypatch.setattr("samestep.comm.roll_call.ANSWER_S", ANSWER)


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


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def timed(act, *args):
    """Run it; an error says how long it took."""
    start = time.monotonic()
    try:
        act(*args)
    except CollectiveError as error:
        error.add_note(f"after {time.monotonic() - start:.2f} s")
        raise


def messages_of(job, *, victim=2, within, patience=8.0):
    """What the other two ranks of three end with, by themselves and in time.

    `patience` is how long the parent waits for them, and for a victim that is not dead.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[run_forked.__module__], "GRACE", patience)
        with pytest.raises(RanksFailed) as caught:
            run_forked(3, job, collective_timeout=TIMEOUT)
    reports = caught.value.reports
    messages = []
    for rank in sorted({0, 1, 2} - {victim}):
        assert reports[rank].startswith("raised:"), reports[rank]
        text = reports[rank].split("CollectiveError: ")[-1].strip()
        message, seconds = text.rsplit("\nafter ", 1)
        assert float(seconds.removesuffix(" s")) < within, text
        messages.append(message)
    assert not multiprocessing.active_children()
    return messages


def blames(message, victim):
    """Whether it names an operation and, of all ranks, the victim only."""
    named = {int(number) for number in re.findall(r"\branks? (\d+)", message)}
    return bool(re.match(rf"({OPERATIONS}).* failed: rank \d", message)) and named == {victim}


@pytest.mark.parametrize(
    ("place", "victim", "sharding"),
    [
        ("first", 0, "zero2"),
        ("second", 0, "none"),
        ("last", 0, "zero2"),
        ("first", 2, "none"),
        ("second", 2, "zero2"),
        ("last", 2, "zero2"),
    ],
)
def test_a_rank_that_dies_during_a_step_is_named(place, victim, sharding):
    def job(rank):
        model, opt = build(sharding=sharding, max_grad_norm=1.0)
        kill_at = None
        count = before_each_collective(lambda n: die() if n == kill_at else None)
        step(model, opt, rank)
        if rank == victim:
            kill_at = count() + {"first": 1, "second": 2, "last": count()}[place]
        timed(step, model, opt, rank)
        timed(step, model, opt, rank)

    for message in messages_of(job, victim=victim, within=1):
        assert blames(message, victim), message
        assert "its process has ended" in message


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_hangs_inside_a_step_is_named(victim):
    def job(rank):
        model, opt = build()
        hang_at = None
        count = before_each_collective(lambda n: time.sleep(FOREVER) if n == hang_at else None)
        step(model, opt, rank)
        if rank == victim:
            hang_at = count() + 2
        timed(step, model, opt, rank)

    for message in messages_of(job, victim=victim, within=TIMEOUT + LAST_CALL + 0.8, patience=1.0):
        assert blames(message, victim), message
        assert "did not answer within 4 s" in message


def test_a_rank_that_never_arrives_at_a_step_is_named():
    def job(rank):
        model, opt = build()
        if rank == 2:
            time.sleep(FOREVER)
        timed(step, model, opt, rank)

    for message in messages_of(job, within=TIMEOUT + LAST_CALL + 0.8, patience=1.0):
        assert blames(message, 2), message


def test_a_rank_that_never_arrives_at_construction_is_named():
    def job(rank):
        if rank == 2:
            time.sleep(FOREVER)
        timed(build)

    for message in messages_of(job, within=TIMEOUT + LAST_CALL + 0.8, patience=1.0):
        assert message.startswith("comparison of the plan failed: rank 2 did not answer within")
        assert blames(message, 2), message


def test_a_rank_that_dies_before_construction_is_named():
    def job(rank):
        if rank == 2:
            die()
        timed(build)

    for message in messages_of(job, within=ANSWER + 0.8):
        assert message.startswith("comparison of the plan failed: rank 2 did not answer within")
        assert blames(message, 2), message


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_comes_late_is_not_taken_for_the_dead_one(late):
    """One rank may fail at once; another is busy for some more time."""

    def job(rank):
        model, opt = build()
        if rank == 2:
            die()
        if rank == late:
            time.sleep(1.5)
        timed(step, model, opt, rank)

    for message in messages_of(job, within=2.5):
        assert blames(message, 2), message


def test_a_plan_that_differs_is_the_error_of_every_rank():
    def job(rank):
        try:
            build(bucket_size=300 + (rank == 2))
        except RanksDisagreeError as error:
            return str(error)
        return None

    messages = run_forked(3, job, collective_timeout=TIMEOUT)
    assert len(set(messages)) == 1
    assert "rank 0 has 'bucket_size = 300', rank 2 has 'bucket_size = 301'" in messages[0]


# --- a store that lives in rank 0, as without torchrun -----------------------------------------


def join_store_of_rank_0(rank):
    """Replace the default group by one whose store rank 0 hosts."""
    shared = dist.group.WORLD.get_group_store()
    timeout = timedelta(seconds=TIMEOUT)
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
def test_a_death_where_rank_0_hosts_the_store(victim):
    def job(rank):
        join_store_of_rank_0(rank)
        model, opt = build()
        step(model, opt, rank)
        if rank == victim:
            die()
        timed(step, model, opt, rank)

    for message in messages_of(job, victim=victim, within=1):
        if victim == 2:
            assert blames(message, 2), message
        else:
            assert re.match(rf"({OPERATIONS}).* failed: the store .* does not answer", message)
            assert "the rank that hosts it: rank 0, unless torchrun hosts it" in message
            assert "rank 1" not in message
            assert "rank 2" not in message


def test_a_store_that_hangs_does_not_hang_the_others():
    def job(rank):
        join_store_of_rank_0(rank)
        model, opt = build()
        step(model, opt, rank)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)  # the store's thread, too
        timed(step, model, opt, rank)

    for message in messages_of(job, victim=0, within=TIMEOUT + 2 * LAST_CALL + 0.8, patience=1.0):
        assert "failed: the store through which ranks find each other does not answer" in message
        assert "rank 0" in message


# --- groups of some ranks ----------------------------------------------------------------------


def test_members_are_named_by_their_global_rank():
    def job(rank):
        group = registry.of_ranks([1, 2], timedelta(seconds=TIMEOUT)) or registry.of()
        if rank == 0:
            timed(lambda: total("the sum of all", torch.ones(3), group).wait())
        total("a sum", torch.ones(3), group).wait()
        if rank == 2:
            die()
        timed(lambda: total("another sum", torch.ones(3), group).wait())

    outside, inside = messages_of(job, within=6)
    assert inside.startswith("another sum failed: rank 2 did not answer: its process has ended")
    assert "rank 1" not in inside
    assert outside.startswith("the sum of all failed: ranks 1, 2 did not answer")


def test_a_member_that_does_not_make_the_group_is_named():
    """Rank 0 is not among its members and not asked."""

    def job(rank):
        total("a sum", torch.ones(3), registry.of()).wait()
        if rank == 2:
            time.sleep(FOREVER)
        timed(registry.of_ranks, [1, 2], timedelta(seconds=TIMEOUT))
        timed(lambda: total("the sum of all", torch.ones(3), registry.of()).wait())

    outside, inside = messages_of(job, within=TIMEOUT + LAST_CALL + 1.8, patience=3.0)
    assert inside.startswith("creation of the group of ranks 1, 2 failed: rank 2 did not answer")
    assert outside.startswith("the sum of all failed: rank 2 did not answer")
