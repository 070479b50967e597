"""Plans of others, and ours of before, that `benchmarks.scaling` compares with: arithmetic."""

from math import inf

import pytest
import torch

from benchmarks.peer_plans import Design, Param, layer_wise, nanochat
from benchmarks.scaling import in_copies
from samestep.lab.estimate.cluster import Job, Settings
from samestep.lab.estimate.grid import Peers, one_axis
from samestep.lab.estimate.hardware import PRESETS, Hardware
from samestep.lab.estimate.model import load_model
from samestep.mesh.degrees import Degrees
from samestep.plan.links import Link
from samestep.plan.transfers import Traffic

ALL = Peers(("data",), 4)
TABLE = Param((6, 10), False, ALL)
SQUARE, WIDE = Param((8, 8), True, ALL), Param((8, 16), True, ALL)
PARAMS = [TABLE, *[SQUARE] * 5, WIDE]


def owned_by(shares, rank):
    return [
        param.shape
        for share in shares
        for param, peer, _ in share.owned
        if peer == rank and param.matrix
    ]


def test_nanochat_pads_stacks_to_a_multiple_of_ranks():
    table, squares, wide = nanochat(PARAMS)
    assert table.padded == 8 * 10  # six rows on four ranks: two each
    assert squares.padded == 8 * 64  # five blocks: two each
    assert wide.padded == 4 * 128  # one block: one each
    assert [len(owned_by([squares], rank)) for rank in range(4)] == [2, 2, 1, 0]
    for share in (table, squares, wide):
        reduce, gather = share.transfers()
        assert reduce.traffic is Traffic.REDUCE_SCATTER
        assert gather.traffic is Traffic.ALL_GATHER
        assert float(gather.sent_by_all().sum()) == 3 * share.padded * 2


def test_layer_wise_plans_give_every_matrix_one_owner():
    for padded in (True, False):
        shares = layer_wise(PARAMS, padded=padded)
        found = [shape for rank in range(4) for shape in owned_by(shares, rank)]
        assert sorted(found) == sorted([(8, 8)] * 5 + [(8, 16)])
        assert sum(len(share.params) for share in shares) == len(PARAMS)
    equal = next(share for share in layer_wise(PARAMS, padded=True) if share.params[0].matrix)
    # The wide one first, then squares to the least full: 128, 128, 128, 64 at most.
    assert equal.padded == 4 * 128
    summed = next(share for share in layer_wise(PARAMS, padded=False) if share.params[0].matrix)
    assert summed.padded == 5 * 64 + 128
    # The smallest first, there and back: 0 1 2 3 3 2.
    assert summed.sizes == (64, 64, 64 + 128, 64 + 64)
    reduce, gather = summed.transfers()
    assert (reduce.traffic, gather.traffic) == (Traffic.ALL_REDUCE, Traffic.UNEVEN_GATHER)


def test_a_step_of_others_waits_for_links_and_for_owners():
    grid, link = one_axis(4), Link(1.0, inf)
    machine = Hardware("", "", 1, 8, {8: inf}, inf, 2.0, 1.0, link, link)
    shares = nanochat(PARAMS)
    # Three reductions, 1 s each. The table is updated after the first (a piece of 2 s), two squares
    # after that (4 s), the wide one (2 s); the last gather takes 1 s more.
    seconds, exposed = Design(shares, grid, machine, overlaps=False).seconds(None)
    assert seconds == pytest.approx(1 + 2 + 4 + 2 + 1)
    # All wait for the first reduction; the first rank for the last gather, the next two for two of
    # them, and the last one, which has no matrix, for all three.
    assert exposed == pytest.approx((2 + 3 + 3 + 4) / 4)


def test_before_is_the_same_plan_with_copies():
    model = load_model("nanochat-d20", torch.bfloat16)
    settings = Settings(bucket_size=6_553_600)
    plan = Job(model, Degrees(16), settings, PRESETS["h200x8"]).grid_plan(0)
    now, then = (each.placements[0].buckets.shape.exchanges for each in (plan, in_copies(plan)))
    kinds = {
        (a.gather.transfer.traffic, b.gather.transfer.traffic)
        for a, b in zip(now, then, strict=True)
        if a.gather
    }
    assert (Traffic.UNEVEN_GATHER, Traffic.COPIES) in kinds
    assert all(
        a.gather.transfer.sizes == b.gather.transfer.sizes
        for a, b in zip(now, then, strict=True)
        if a.gather
    )
    assert Traffic.COPIES not in {new for new, _ in kinds}
