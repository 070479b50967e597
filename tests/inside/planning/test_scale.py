"""Thousands of ranks in one process."""

import json
import subprocess
import sys

import pytest
import torch

from samestep.lab.estimate.cluster import Job, Settings
from samestep.lab.estimate.figures import judge, stage_figures
from samestep.lab.estimate.hardware import PRESETS
from samestep.lab.estimate.model import load_model
from samestep.mesh.degrees import Degrees
from tests.limits import HANG
from tests.soak import SOAK, twin_cases

CASES = [
    ("deepseek-v3", Degrees(2048, pp=16, ep=64), Settings(sharding="zero1"), 3),
    ("llama-70b", Degrees(1024, tp=8), Settings(sharding="zero1", buffers="flat"), 1),
]
if SOAK:
    CASES += [
        ("llama-70b", Degrees(1024), Settings(), 1),
        ("llama-70b", Degrees(1024, replicate=16), Settings(sharding="zero3"), 1),
        ("llama-70b", Degrees(1024, tp=8), Settings(sharding="zero3"), 1),
    ]


@twin_cases("llama-70b-degrees1-settings1-1")
@pytest.mark.parametrize(("name", "degrees", "settings", "least"), CASES)
def test_large_models_on_many_ranks(name, degrees, settings, least):
    model = load_model(name, torch.bfloat16)
    job = Job(model, degrees, settings, PRESETS["h800x8"])
    stages = list(job.stages())
    assert len(stages) >= least
    total = 0
    for stage in stages if SOAK else stages[:2]:  # without and with experts
        figures, plan, timeline = stage_figures(job, stage)
        assert plan.grid.ranks * degrees.pp == degrees.world
        assert figures.peak > figures.memory.parameters
        assert timeline.computing.numel() == plan.grid.ranks
        for owners in figures.owners:
            assert owners.ratio >= owners.bound >= 1
        total += figures.parameters


# In a process of its own: what planning and simulating costs, from the import on.
MEASURED = """
import gc, json, resource, time
import torch
from samestep.lab.estimate.cluster import Job, Settings
from samestep.lab.estimate.figures import stage_figures
from samestep.lab.estimate.hardware import PRESETS
from samestep.lab.estimate.model import load_model
from samestep.mesh.degrees import Degrees

gc.disable()  # as the command does
begun = time.process_time()
model, degrees = load_model({name!r}, torch.bfloat16), {degrees!r}
job = Job(model, degrees, Settings(), PRESETS["h200x8"])
for stage in job.stages():
    stage_figures(job, stage)
spent = time.process_time() - begun
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps([spent, memory]))
"""
LIMITS = [("llama-70b", Degrees(1024), 10), ("llama-70b", Degrees(4096), 10)]
LIMITS += [("deepseek-v3", Degrees(4096, ep=64), 20)]
LIMITS += [("deepseek-v3", Degrees(4096, pp=16, ep=64), 20)]


@pytest.mark.skipif(not SOAK, reason="looks at a clock: make soak runs it")
@pytest.mark.parametrize(("name", "degrees", "seconds"), LIMITS)
def test_planning_at_scale_is_cheap(name, degrees, seconds):
    """Seconds of one core, whatever else runs there, and bytes at the peak."""
    program = MEASURED.format(name=name, degrees=degrees)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG, check=True
    )
    spent, memory = json.loads(done.stdout)
    assert spent < seconds
    assert memory < 1e9


def test_groups_that_are_copies_of_each_other():
    model = load_model("nanochat-d20", torch.bfloat16)
    degrees, settings = Degrees(32, replicate=4), Settings()
    figures, plan, _ = stage_figures(Job(model, degrees, settings, PRESETS["h200x8"]), 0)
    by_axes = {(each.axes, each.kind): each for each in figures.traffic}
    # Inside, a reduction of all gradients; outside, an all-reduce of what a rank has of the sum.
    inside = by_axes["data", "reduce_scatter"]
    outside = by_axes["replicate", "all_reduce"]
    assert inside.mean_sent == pytest.approx(2 * model.parameters * 7 / 8, rel=0.01)
    assert outside.mean_sent == pytest.approx(2 * 4 * model.parameters / 8 * 3 / 4, rel=0.01)
    assert plan.grid.ranks == 32


def test_the_verdict_takes_the_least_sharding_that_leaves_room():
    peaks = {"none": 100, "zero1": 69, "zero2": 40, "zero3": 10}
    verdict = judge("none", peaks, 100, 0.3)
    assert (verdict.fits, verdict.choose) == (True, "zero1")
    assert judge("zero2", {**peaks, "zero1": 71}, 100, 0.3).choose == "zero2"
    verdict = judge("none", {"none": 300, "zero3": 200}, 100, 0.3)
    assert (verdict.fits, verdict.choose) == (False, None)
    assert "zero3 needs the least" in verdict.text
