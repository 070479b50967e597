"""What a plan says it has chosen is what it does, and its figures are those of the formulas."""

from dataclasses import replace
from math import inf

import pytest
import torch

import samestep
from samestep.lab.common.floor import ADAMW_BYTES
from samestep.lab.estimate.choices import choices, shared_block_seconds
from samestep.lab.estimate.cluster import Job, Settings
from samestep.lab.estimate.grid import one_axis
from samestep.lab.estimate.grid_plan import SpreadOver, plan_on_grid
from samestep.lab.estimate.hardware import PRESETS
from samestep.lab.estimate.model import load_model
from samestep.lab.estimate.work import chunk_count, elementwise_work
from samestep.layout.boxes import Cut
from samestep.mesh.degrees import Degrees
from samestep.plan.links import Link
from samestep.rules.orthogonalize import orthogonalize_flops

H200 = PRESETS["h200x8"]


def plan_of(ranks, hardware=H200, **settings):
    model = load_model("nanochat-d20", torch.bfloat16)
    return Job(model, Degrees(ranks), Settings(**settings), hardware).grid_plan(0)


@pytest.mark.parametrize(("ranks", "levels"), [(8, 1), (64, 1), (4096, 2)])
def test_buckets_and_levels_are_those_of_the_plan(ranks, levels):
    plan = plan_of(ranks)
    (found,) = choices(plan, H200, 1.0).buckets
    ((_, placement),) = plan.reduced()
    assert not found.given
    assert found.buckets == len(placement.buckets.plan.buckets)
    several = [bucket.size for bucket in placement.buckets.plan.buckets if bucket.count > 1]
    assert max(several) <= found.elements < 3 * max(several)
    assert found.levels == placement.buckets.policy.levels == levels
    if ranks == 8:
        assert (found.two_levels, found.hosts) == (None, 1)
    else:
        assert (found.two_levels < found.one_level) == (levels == 2)


def test_a_size_that_was_given_is_told_as_such():
    (found,) = choices(plan_of(64, bucket_size=5_000_000), H200, 1.0).buckets
    assert (found.given, found.elements) == (True, 5_000_000)
    (text, _) = (text for _, text in found.lines())
    assert text.endswith("5,000,000 elements: given")


@pytest.mark.parametrize("ranks", [64, 128])
def test_who_owns_no_block_and_how_many_owners_are_enough(ranks):
    plan = plan_of(ranks)
    found = choices(plan, H200, 1.0).owners
    owners = {
        place
        for bucket in plan.placements[0].buckets.plan.buckets
        if not bucket.replicated
        for place, segment in bucket.filled
        if any(piece.block is not None for piece in segment.pieces)
    }
    assert found.blocks == 120
    assert found.without == ranks - len(owners)
    # 80 square blocks and 40 of twice their FLOPs: 80 times the largest.
    assert found.enough == 80
    assert found.largest == (5120, 1280)
    seconds = orthogonalize_flops(5120, 1280) / H200.product_rate(1280)
    assert found.largest_seconds == pytest.approx(seconds)
    assert (found.seconds > 1.01 * seconds) == (ranks < found.enough)


def test_nobody_owns_where_all_compute_all():
    assert choices(plan_of(8, sharding="none"), H200, 1.0).owners is None
    assert choices(plan_of(8, muon=False), H200, 1.0).owners is None


def test_what_sharing_a_block_costs():
    free = replace(H200, inside=Link(0.0, inf))
    alone = orthogonalize_flops(8192, 28672) / H200.product_rate(8192)
    assert shared_block_seconds((8192, 28672), 1, H200) == pytest.approx(alone)
    assert shared_block_seconds((8192, 28672), 8, free) == pytest.approx(alone / 8)
    # With links: the block, and more than ten Gram matrices of 8192 x 8192 in 16 bit.
    gathers = shared_block_seconds((8192, 28672), 8, H200) - alone / 8
    least = (8192 * 28672 + 10 * 8192**2) * 2 * 7 / 8 / H200.inside.bandwidth
    assert least < gathers < alone


def test_a_rank_is_counted_with_the_blocks_of_which_it_holds_parts():
    model = torch.nn.Module()
    with torch.device("meta"):
        model.experts = torch.nn.Parameter(torch.empty(6, 8, 8))
        model.shared = torch.nn.Parameter(torch.empty(8, 8))
    groups = [{"params": ["*"], "rule": "muon"}]
    optimizer = samestep.MuonAdamW(model, groups=groups)
    over = SpreadOver((("data",),), (Cut(0),))
    plan = plan_on_grid(optimizer, one_axis(4), spread=lambda name, param: over)
    (blocks,) = plan.placements[0].block_plans
    chunks = range(len(blocks.chunks))
    counts = sum(chunk_count(blocks, number) for number in chunks)
    assert counts.tolist() == [3, 3, 3, 1]  # two experts each, and rows of the shared matrix


def test_layers_that_are_alike_are_counted_each():
    with torch.device("meta"):
        layers = [torch.nn.Linear(8, 8, bias=False) for _ in range(3)]
        model = torch.nn.Sequential(*layers, torch.nn.Linear(8, 16, bias=False))
    optimizer = samestep.AdamW(model)
    over = SpreadOver((("data",),), (Cut(0),))
    plan = plan_on_grid(optimizer, one_axis(4), spread=lambda name, param: over)
    (blocks,) = plan.placements[0].block_plans
    work = elementwise_work(blocks, H200)
    assert work.pieces.tolist() == [4, 4, 4, 4]
    assert work.bytes.tolist() == [ADAMW_BYTES * (3 * 16 + 32)] * 4
