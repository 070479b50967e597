"""Saves in the background."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

import samestep
from samestep.checkpoint import formats, saving
from tests.checkpoint.training import Case, build, different, snapshot, train
from tests.limits import HANG, eventually
from tests.ranks import run_forked
from tests.soak import SOAK

pytestmark = pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:UserWarning")


@pytest.mark.parametrize("layout", ["flat zero2", "fsdp2"] if SOAK else ["flat zero2"])
def test_it_saves_the_moment_of_the_call(tmp_path, layout):
    """Steps that are taken while it writes are not in there, on the training's own groups."""
    case = Case(layout, 2)

    def job(rank):
        model, opt = build(case)
        moments, pointers = [], []
        for number in range(3):
            train(model, opt, range(2 * number, 2 * number + 2))
            handle = samestep.async_save(tmp_path / str(number), model, opt, extra=number, keep=2)
            moments.append(snapshot(model, opt))
            train(model, opt, range(2 * number + 2, 2 * number + 4))  # while it writes
            buffers = saving._stagings[opt]._buffers.values()
            pointers.append([buffer.data_ptr() for buffer in buffers])
        assert handle.wait() == tmp_path / "2"
        assert handle.done()
        names = sorted(path.name for path in tmp_path.iterdir())
        again = build(case, seed=2)
        wrong = []
        for number in (1, 2):
            samestep.load(tmp_path / str(number), *again)
            wrong += different(snapshot(*again), moments[number])
        return names, wrong, pointers[0] == pointers[1] == pointers[2]

    for names, wrong, reused in run_forked(2, job):
        assert names == ["1", "2", "LATEST"]
        assert wrong == []
        assert reused


def test_only_what_a_rank_writes_is_copied(tmp_path):
    """With everything on every rank, each copies its share."""

    def job(rank):
        model, opt = build(Case("none", 2))
        samestep.async_save(tmp_path / "a", model, opt).wait()
        buffers = saving._stagings[opt]._buffers.values()
        return sum(buffer.nbytes for buffer in buffers)

    shares = run_forked(2, job)
    model, opt = build(Case("one", 1))
    tensors = [*model.state_dict().values(), *(t for s in opt.state.values() for t in s.values())]
    assert sum(shares) == sum(tensor.nbytes for tensor in tensors)
    assert max(shares) < 0.6 * sum(shares)


@pytest.fixture
def slow(monkeypatch):
    """Writing begins when it may, and can be made to fail."""
    may, problem = threading.Event(), []
    real = formats.FORMATS["fully_reshardable"]

    class Slowed(real.writer):
        def write_data(self, plan, planner):
            may.wait(HANG)
            if problem:
                raise problem.pop()
            return super().write_data(plan, planner)

    slowed = real._replace(writer=Slowed)
    monkeypatch.setitem(formats.FORMATS, "fully_reshardable", slowed)
    yield may, problem
    may.set()


def test_a_second_one_waits_for_the_first(tmp_path, slow):
    may, _ = slow
    model, opt = build(Case("one", 1))
    first = samestep.async_save(tmp_path / "a", model, opt)
    assert not first.done()
    threading.Timer(0.2, may.set).start()
    second = samestep.async_save(tmp_path / "b", model, opt)
    assert first.done()
    assert (tmp_path / "a" / "index.json").exists()
    samestep.load(second.path, model, opt)  # waits for it too


def test_what_went_wrong_is_told_once(tmp_path, slow):
    """By wait, or by the next call."""
    may, problem = slow
    may.set()
    model, opt = build(Case("one", 1))
    problem.append(OSError(28, "No space left on device"))
    handle = samestep.async_save(tmp_path / "a", model, opt)
    with pytest.raises(samestep.CheckpointError, match="No space left"):
        handle.wait()
    for call in (samestep.async_save, samestep.save):
        problem.append(OSError(28, "No space left on device"))
        samestep.async_save(tmp_path / "a", model, opt)
        with pytest.raises(samestep.CheckpointError, match="No space left"):
            call(tmp_path / "b", model, opt)
    assert list(tmp_path.iterdir()) == []
    samestep.async_save(tmp_path / "a", model, opt).wait()


def test_a_changed_model_is_planned_again(tmp_path):
    model, opt = build(Case("one", 1))
    samestep.async_save(tmp_path / "a", model, opt).wait()
    model.register_buffer("late", torch.ones(3))
    samestep.async_save(tmp_path / "b", model, opt).wait()
    again, loaded = build(Case("one", 1), seed=2)
    again.register_buffer("late", torch.zeros(3))
    samestep.load(tmp_path / "b", again, loaded)
    assert different(snapshot(again, loaded), snapshot(model, opt)) == []


def test_nobody_waits_for_another_rank(tmp_path):
    """But in the first save, which is planned together."""

    def job(rank):
        model, opt = build(Case("zero2", 2))
        samestep.async_save(tmp_path / "a", model, opt).wait()
        if rank == 1:
            eventually((tmp_path / "returned").exists)
        handle = samestep.async_save(tmp_path / "b", model, opt)
        if rank == 0:
            (tmp_path / "returned").touch()  # while the other rank has not even called it
        handle.wait()
        with pytest.raises(samestep.CheckpointError, match="b exists"):
            samestep.async_save(tmp_path / "b", model, opt).wait()

    run_forked(2, job)


def told(act):
    try:
        act()
    except samestep.CheckpointError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("what", ["changed", "no memory"])
def test_what_concerns_one_rank_is_told_to_all(tmp_path, monkeypatch, what):
    """And later saves are whole."""

    def job(rank):
        model, opt = build(Case("zero2", 2))
        samestep.async_save(tmp_path / "a", model, opt).wait()
        with monkeypatch.context() as patch:
            if rank == 1 and what == "changed":
                model.register_buffer("late", torch.ones(3))
            elif rank == 1:
                patch.setattr(saving, "value_in", no_memory)
            text = told(lambda: samestep.async_save(tmp_path / "b", model, opt).wait())
        left = sorted(path.name for path in tmp_path.iterdir())
        dist.barrier()  # the other one has looked too
        samestep.async_save(tmp_path / "c", model, opt).wait()
        again, loaded = build(Case("zero2", 2), seed=2)
        if rank == 1 and what == "changed":
            again.register_buffer("late", torch.zeros(3))
        samestep.load(tmp_path / "c", again, loaded, partial=True)
        return text, left, different(snapshot(again, loaded), snapshot(model, opt))

    expected = {
        "changed": "changed during the save on some ranks",
        "no memory": "no memory is left",
    }[what]
    for text, left, wrong in run_forked(2, job):
        assert expected in text
        assert left == ["LATEST", "a"]
        assert wrong == []


def no_memory(*_):
    raise RuntimeError("no memory is left")
