"""What any layout saves, any other loads to the bit, and goes on from there."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

import samestep
from tests.checkpoint.training import (
    ADAMW,
    MUON,
    Case,
    build,
    different,
    drift,
    far,
    layouts_on,
    snapshot,
    spoil,
    train,
)
from tests.ranks import run_forked
from tests.soak import SOAK, twin
from tests.test_sharded import loss_of

pytestmark = pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:UserWarning")

BEFORE, AFTER = (3, 20) if SOAK else (1, 1)  # steps
RESUMED = 100 if SOAK else 6
OTHER = {"lr": 0.3, "betas": (0.5, 0.6), "momentum": 0.2, "weight_decay": 0.0}  # of who loads
WORLDS = (1, 2, 3, 4, 6, 8)
EVERYTHING = [Case(layout, world) for world in WORLDS for layout in layouts_on(world)]
RECEIPT = Path("receipts/checkpoint_matrix.json")
# Every layout is saved and loaded, on fewer and on more ranks, in neighbours that differ in both.
RING = [
    *[("one", 1), ("zero2", 3), ("flat zero1", 2), ("fsdp2", 3), ("none", 2), ("tp", 4)],
    *[("flat zero2", 2), ("hsdp", 4), ("zero1", 2)],
]


def save_all(folder, mine, references):
    """Train and save in some layouts on as many ranks; some then go on without a break."""

    def job(rank):
        for case in mine:
            model, opt = build(case)
            train(model, opt, range(BEFORE))
            for group in opt.param_groups:  # a schedule has moved on
                group["lr"] *= 0.5
            at_save = snapshot(model, opt)
            samestep.save(folder / case.name, model, opt, extra={"step": BEFORE, "case": case.name})
            if rank == 0:
                torch.save(at_save, folder / f"{case.name}.pt")
            if case in references:
                train(model, opt, range(BEFORE, BEFORE + AFTER))
                at_end = snapshot(model, opt)
                if rank == 0:
                    torch.save(at_end, folder / f"{case.name} later.pt")

    return job


def same_sums(source, case):
    """Whether runs in both are the same to the bit.

    All ranks have the same data: its mean over 2 or 4 ranks is that of one, while sums of 3, 6 and
    8 equal numbers in rank order are rounded. Tensor parallelism adds up its own way.
    """
    if (source.layout == "tp") != (case.layout == "tp"):
        return False
    even = {source.world, case.world} <= {1, 2, 4} and source.layout != "tp"
    return source.world == case.world or even


def load_all(folder, targets, sources_of, references):
    """Load into other weights, other state and other options, and go on.

    Gives everything that is wrong, and per target how far its runs were from those without a break.
    """

    def job(rank):
        wrong, report = [], {}
        for case in targets:
            model, opt = build(case, seed=2, **OTHER)
            drifts = [
                load_one(folder, source, case, model, opt, references, wrong)
                for source in sources_of(case)
            ]
            report[case.name] = {
                "sources": len(drifts),
                "same to the bit after 20 steps": sum(not any(pair) for pair in drifts),
                "furthest, AdamW": max(adamw for adamw, _ in drifts),
                "furthest, Muon": max(muon for _, muon in drifts),
            }
        return wrong, report

    return job


def load_one(folder, source, case, model, opt, references, wrong):
    pair = f"{source.name} -> {case.name}:"
    spoil(model, opt)
    loaded = samestep.load(folder / source.name, model, opt)
    at_save = torch.load(folder / f"{source.name}.pt", mmap=True)
    wrong += [f"{pair} {name}" for name in different(snapshot(model, opt), at_save)]
    if loaded.extra != {"step": BEFORE, "case": source.name} or loaded.world_size != source.world:
        wrong.append(f"{pair} {loaded}")
    train(model, opt, range(BEFORE, BEFORE + AFTER))
    found = snapshot(model, opt)
    unbroken = (
        source if source in references else next(r for r in references if same_sums(r, source))
    )
    at_end = torch.load(folder / f"{unbroken.name} later.pt", mmap=True)
    judge = different if same_sums(source, case) else far
    wrong += [f"{pair} after {AFTER} steps {what}" for what in judge(found, at_end)]
    return drift(found, at_end)


def on_each_world(cases, make_job):
    """What every rank of every world gives."""
    found = []
    for world in sorted({case.world for case in cases}):
        job = make_job([case for case in cases if case.world == world])
        found += [job(0)] if world == 1 else run_forked(world, job)
    return found


def test_every_layout_loads_every_other(tmp_path):
    """A sample. Uneven shapes, several buckets, fused blocks, expert stacks, variance state."""
    ring = [Case(*on) for on in RING]
    before = dict(zip(ring, ring[-1:] + ring[:-1], strict=True))
    # Where sums are the same, one run without a break is that of all.
    references = [Case("one", 1), Case("fsdp2", 3), Case("tp", 4)]
    on_each_world(ring, lambda mine: save_all(tmp_path, mine, references))
    found = on_each_world(
        ring, lambda mine: load_all(tmp_path, mine, lambda case: [before[case]], references)
    )
    assert [wrong for wrong, _ in found if wrong] == []


@pytest.fixture(scope="module")
def saved_by_all(tmp_path_factory):
    folder = tmp_path_factory.mktemp("matrix")
    on_each_world(EVERYTHING, lambda mine: save_all(folder, mine, EVERYTHING))
    return folder


def whole_matrix(saved_by_all, world):
    """Everything into every layout on so many ranks; leaves its part of the receipt."""
    targets = [case for case in EVERYTHING if case.world == world]
    found = on_each_world(
        targets, lambda mine: load_all(saved_by_all, mine, lambda _: EVERYTHING, EVERYTHING)
    )
    wrong = [line for of_rank, _ in found for line in of_rank]
    write_receipt(world, found[0][1], wrong)
    assert wrong == []


if SOAK:  # an hour on two cores
    every_world = pytest.mark.parametrize("world", WORLDS)
    test_the_whole_matrix = every_world(whole_matrix)


def write_receipt(world, report, wrong):
    """Into that of the other worlds."""
    known = json.loads(RECEIPT.read_text()) if RECEIPT.exists() else {"worlds": {}}
    known["worlds"][str(world)] = {
        "verdict": "pass" if not wrong else "fail",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "samestep": samestep.__version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "wrong": wrong[:20],
        "loaded by": report,
    }
    worlds = dict(sorted(known["worlds"].items(), key=lambda entry: int(entry[0])))
    missing = [n for n in WORLDS if str(n) not in worlds]
    passed = all(part["verdict"] == "pass" for part in worlds.values())
    content = {
        "what": "save, load, compare every tensor to the bit, go on for 20 steps, compare again",
        "command": "SAMESTEP_SOAK=1 pytest tests/checkpoint/test_layouts.py -k whole_matrix",
        "thresholds": {"AdamW": ADAMW, "Muon": MUON},
        "pairs": sum(e["sources"] for w in worlds.values() for e in w["loaded by"].values()),
        "verdict": "fail" if not passed else "incomplete" if missing else "pass",
        "worlds not run": missing,
        "worlds": worlds,
    }
    RECEIPT.write_text(json.dumps(content, indent=1) + "\n")


@twin
def test_other_state(tmp_path):
    """A third moment; 16-bit parameters with 32-bit state and master copies."""
    of_amsgrad = [Case("one", 1, "amsgrad"), Case("flat zero2", 2, "amsgrad")]
    among = [*of_amsgrad, Case("one", 1, "bf16"), Case("fsdp2", 2, "bf16")]

    def save(mine):
        def job(rank):
            for case in mine:
                model, opt = build(case)
                train(model, opt, range(2))
                samestep.save(tmp_path / case.name, model, opt)
                values = snapshot(model, opt)
                if rank == 0:
                    torch.save(values, tmp_path / f"{case.name}.pt")

        return job

    def load(mine):
        def job(rank):
            wrong = []
            for case in mine:
                model, opt = build(case, seed=2, **OTHER)
                for source in among:
                    if source.variant != case.variant:
                        continue
                    spoil(model, opt)
                    samestep.load(tmp_path / source.name, model, opt)
                    expected = torch.load(tmp_path / f"{source.name}.pt", mmap=True)
                    found = snapshot(model, opt)
                    pair = f"{source.name} -> {case.name}"
                    wrong += [f"{pair}: {name}" for name in different(found, expected)]
                    if case.variant == "bf16":
                        assert found["head.weight.master_weight"].dtype == torch.float32
                        assert model.head.weight.dtype == torch.bfloat16
            return wrong

        return job

    on_each_world(among, save)
    assert on_each_world(among, load) == [[], [], []]


@twin
@pytest.mark.parametrize("layout", ["zero2", "flat zero2", "fsdp2"] if SOAK else ["fsdp2"])
def test_a_run_with_a_break_is_the_run_without(tmp_path, layout):
    """To the bit, with sums in rank order and data that differs from rank to rank."""
    case = Case(layout, 2)

    def job(rank):
        def go(model, opt, steps):
            for step in steps:
                loss = loss_of(model, rank, step)
                loss.backward()
                opt.step()
                opt.zero_grad()

        model, opt = build(case)
        go(model, opt, range(RESUMED // 2))
        samestep.save(tmp_path / "middle", model, opt)
        go(model, opt, range(RESUMED // 2, RESUMED))
        again, loaded = build(case, seed=2, **OTHER)
        samestep.load(tmp_path / "middle", again, loaded)
        go(again, loaded, range(RESUMED // 2, RESUMED))
        return different(snapshot(again, loaded), snapshot(model, opt))

    for wrong in run_forked(2, job):
        assert wrong == []
