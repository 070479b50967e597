"""What any layout saves, any other loads to the bit, and goes on from there."""

from __future__ import annotations

import pytest
import torch

import samestep
from tests.checkpoint.training import (
    Case,
    build,
    different,
    far,
    layouts_on,
    snapshot,
    spoil,
    train,
)
from tests.ranks import run_forked
from tests.soak import SOAK
from tests.test_sharded import loss_of

pytestmark = pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:UserWarning")

BEFORE, AFTER = 3, 20 if SOAK else 4  # steps
RESUMED = 100 if SOAK else 12
OTHER = {"lr": 0.3, "betas": (0.5, 0.6), "momentum": 0.2, "weight_decay": 0.0}  # of who loads
WORLDS = (1, 2, 3, 4, 6, 8) if SOAK else (1, 2, 3, 4)
SAMPLE = [
    *[("one", 1), ("none", 2), ("zero1", 3), ("zero2", 4), ("flat zero1", 2), ("flat zero2", 3)],
    *[("fsdp2", 2), ("fsdp2", 3), ("hsdp", 4), ("tp", 4)],
]


def cases(variant="variance"):
    if SOAK:
        return [Case(layout, world, variant) for world in WORLDS for layout in layouts_on(world)]
    return [Case(layout, world, variant) for layout, world in SAMPLE]


def sample_of(number, among):
    """The checkpoints after which a case goes on: its own and another."""
    return [among[(number + shift) % len(among)] for shift in (0, 1 + number % 5)]


def save_all(folder, mine):
    """Train and save in some layouts on as many ranks; then go on without a break."""

    def job(rank):
        for case in mine:
            model, opt = build(case)
            train(model, opt, range(BEFORE))
            for group in opt.param_groups:  # a schedule has moved on
                group["lr"] *= 0.5
            at_save = snapshot(model, opt)
            samestep.save(folder / case.name, model, opt, extra={"step": BEFORE, "case": case.name})
            train(model, opt, range(BEFORE, BEFORE + AFTER))
            at_end = snapshot(model, opt)
            if rank == 0:
                torch.save((at_save, at_end), folder / f"{case.name}.pt")

    return job


def load_all(folder, pairs, goes_on):
    """Load into other weights, other state and other options; tell everything that is wrong."""

    def job(rank):
        wrong = []
        for case, sources in pairs:
            model, opt = build(case, seed=2, **OTHER)
            train(model, opt, range(50, 52))
            for source in sources:
                spoil(model, opt)
                loaded = samestep.load(folder / source.name, model, opt)
                at_save, at_end = torch.load(folder / f"{source.name}.pt", mmap=True)
                pair = f"{source.name} -> {case.name}:"
                wrong += [f"{pair} {name}" for name in different(snapshot(model, opt), at_save)]
                if (loaded.extra, loaded.world_size) != (
                    {"step": BEFORE, "case": source.name},
                    source.world,
                ):
                    wrong.append(f"{pair} {loaded}")
                if source in goes_on[case]:
                    train(model, opt, range(BEFORE, BEFORE + AFTER))
                    found = snapshot(model, opt)
                    judge = different if source == case else far
                    wrong += [f"{pair} after {AFTER} steps {w}" for w in judge(found, at_end)]
        return wrong

    return job


def on_each_world(todo, make_job):
    for world in sorted({entry[0].world for entry in todo}):
        mine = [entry for entry in todo if entry[0].world == world]
        job = make_job(mine)
        patience = 1500 if SOAK else 100
        found = [job(0)] if world == 1 else run_forked(world, job, timeout=patience)
        assert [wrong for wrong in found if wrong] == []


@pytest.mark.timeout(1800 if SOAK else 300)
def test_every_layout_loads_every_other(tmp_path):
    """Uneven shapes, several buckets, fused blocks, expert stacks, variance state."""
    among = cases()
    on_each_world([(case,) for case in among], lambda m: save_all(tmp_path, [c for (c,) in m]))
    sample = {case: sample_of(number, among) for number, case in enumerate(among)}
    todo = [(case, among if SOAK else sample[case]) for case in among]
    on_each_world(todo, lambda mine: load_all(tmp_path, mine, sample))


def test_other_state(tmp_path):
    """A third moment; 16-bit parameters with 32-bit state and master copies."""
    layouts = [("one", 1), ("flat zero2", 2), ("fsdp2", 2)]
    among = [Case(*on, variant) for variant in ("amsgrad", "bf16") for on in layouts]
    on_each_world([(case,) for case in among], lambda m: save_all(tmp_path, [c for (c,) in m]))

    def exact(mine):
        def job(rank):
            wrong = []
            for case, source in mine:
                model, opt = build(case, seed=2, **OTHER)
                samestep.load(tmp_path / source.name, model, opt)
                at_save, at_end = torch.load(tmp_path / f"{source.name}.pt", mmap=True)
                wrong += [
                    f"{source.name} -> {case.name}: {name}"
                    for name in different(snapshot(model, opt), at_save)
                ]
                if case.variant == "bf16":
                    assert at_save["head.weight.master_weight"].dtype == torch.float32
                    assert model.head.weight.dtype == torch.bfloat16
                if case == source:
                    train(model, opt, range(BEFORE, BEFORE + AFTER))
                    wrong += different(snapshot(model, opt), at_end)
            return wrong

        return job

    pairs = [(case, source) for case in among for source in among if case[2] == source[2]]
    on_each_world(pairs, exact)


@pytest.mark.parametrize("layout", ["zero2", "flat zero2", "fsdp2"])
def test_a_run_with_a_break_is_the_run_without(tmp_path, layout):
    """To the bit, with sums in rank order and data that differs from rank to rank."""
    case = Case(layout, 2)
    order = {"reduction": "ordered"} if layout != "fsdp2" else {}

    def job(rank):
        def go(model, opt, steps):
            for step in steps:
                loss = loss_of(model, rank, step)
                loss.backward()
                opt.step()
                opt.zero_grad()

        model, opt = build(case, **order)
        go(model, opt, range(RESUMED // 2))
        samestep.save(tmp_path / "middle", model, opt)
        go(model, opt, range(RESUMED // 2, RESUMED))
        again, loaded = build(case, seed=2, **OTHER, **order)
        samestep.load(tmp_path / "middle", again, loaded)
        go(again, loaded, range(RESUMED // 2, RESUMED))
        return different(snapshot(again, loaded), snapshot(model, opt))

    for wrong in run_forked(2, job, timeout=100):
        assert wrong == []
