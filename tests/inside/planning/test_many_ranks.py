"""A step that does not get slower with more ranks, but for what latency explains; simulated."""

import pytest
import torch

from samestep.lab.estimate.cluster import Job, Settings
from samestep.lab.estimate.collectives import Launches, seconds_of
from samestep.lab.estimate.hardware import PRESETS
from samestep.lab.estimate.model import load_model
from samestep.lab.estimate.timeline import simulate
from samestep.lab.estimate.training import Training
from samestep.mesh.degrees import Degrees
from samestep.plan.transfers import Traffic
from tests.soak import some, twin

H200 = PRESETS["h200x8"]


def plan_of(model, ranks, **settings):
    return Job(model, Degrees(ranks), Settings(**settings), H200).grid_plan(0)


def beginnings(plan):
    """Seconds that all collectives of a step take before the first byte."""
    found = 0.0
    for each in Launches(plan).of_step():
        fabric = H200.fabric(each.peers, plan.grid)
        if each.levels == 2:
            found += fabric.seconds_in_two(0.0)
        else:
            found += H200.seconds(each.traffic.kind, 0.0, fabric)
    return found


@pytest.mark.parametrize("buffers", some(["per_parameter", "flat"]))
def test_twice_the_ranks_cost_what_latency_explains(buffers):
    model = load_model("nanochat-d20", torch.bfloat16)
    seconds, before = {}, None
    for ranks in (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096):
        plan = plan_of(model, ranks, buffers=buffers)
        seconds[ranks] = simulate(plan, H200).seconds
        if before is not None:
            assert seconds[ranks] <= before + beginnings(plan), ranks
        before = seconds[ranks]
    assert seconds[64] <= 0.035
    assert seconds[512] <= 0.060


@twin
@pytest.mark.parametrize(("name", "ranks"), some([("llama-7b", 512), ("llama-70b", 1024)]))
def test_little_communication_is_exposed(name, ranks):
    """Of an iteration of 4096 tokens per rank."""
    plan = plan_of(load_model(name, torch.bfloat16), ranks)
    timeline = simulate(plan, H200, training=Training(4096))
    assert timeline.exposed_seconds < 0.15 * timeline.seconds


def test_the_busiest_rank_carries_what_the_others_do():
    """At 64 ranks of a bucket as a whole: no owner sends for everybody."""
    plan = plan_of(load_model("nanochat-d20", torch.bfloat16), 64)
    gathers = [each for each in Launches(plan).of_step() if each.name.startswith("gather")]
    assert {each.traffic for each in gathers} <= {Traffic.ALL_GATHER, Traffic.UNEVEN_GATHER}
    for each in gathers:
        sent = each.sent_by_all()
        assert float(sent.max()) <= 1.05 * float(sent.mean())
        assert float(seconds_of(each, plan.grid, H200).max()) < 0.01
