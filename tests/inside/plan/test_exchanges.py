"""Exchanges between layouts: who sends which box to whom, played through with numbers."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.layout.boxes import Box, Cut, all_boxes
from samestep.plan.exchanges import Exchange
from samestep.plan.layouts import Holding, Holdings, addends, by_box, whole, whole_on
from samestep.plan.sharding import Bucket, ParamSpec, ShardingPlan, plan_sharding
from tests.inside.plan import compared
from tests.soak import twin

KEY = (0, "")
MESH = (2, 3)
RANKS = math.prod(MESH)


@st.composite
def holdings(draw, shape, *, summed):
    """A mesh of six ranks cuts a tensor, or has copies, or, of a source, addends of it."""
    cuts = [Cut(draw(st.sampled_from([None, *range(len(shape))]))) for _ in MESH]
    boxes = all_boxes(shape, MESH, cuts)
    if not summed:
        return by_box(enumerate(boxes))
    # Ranks that differ along the first axis alone have addends of one sum.
    lines = {}
    for rank, box in enumerate(boxes):
        if box.numel:
            lines.setdefault(box, {}).setdefault(rank % MESH[1], []).append(rank)
    return Holdings(Holding(box, tuple(map(tuple, own.values()))) for box, own in lines.items())


@st.composite
def cases(draw):
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    summed = draw(st.booleans())
    return shape, draw(holdings(shape, summed=summed)), draw(holdings(shape, summed=False))


def contributions(shape, source):
    """What every rank has: random numbers, of which those of one source add up to the values."""
    chance = torch.Generator().manual_seed(0)
    values = torch.randint(-99, 99, shape, generator=chance)
    held = {}
    for holding in source:
        part = values[holding.box.slices]
        for ranks in holding.sources:
            rest = part.clone()
            for rank in ranks[1:]:
                held[rank, holding.box] = torch.randint(-99, 99, part.shape, generator=chance)
                rest -= held[rank, holding.box]
            held[ranks[0], holding.box] = rest
    return values, held


@given(cases(), st.sampled_from([0, 1, 2, 3]))
def test_every_rank_gets_what_it_needs(case, per_host):
    shape, source, target = case
    hosts = [rank // per_host for rank in range(RANKS)] if per_host else ()
    exchange = Exchange("e", {KEY: Holdings(source, hosts)}, {KEY: target}, RANKS)
    values, held = contributions(shape, source)
    travelled = 0
    for rank in range(RANKS):
        needed = {
            each.box: torch.zeros(each.box.sizes).long() for each in target if rank in each.ranks
        }
        written = {box: torch.zeros(box.sizes).long() for box in needed}
        for hop in exchange.hops_to(rank):
            piece = held[hop.source, hop.held][hop.box.within(hop.held).slices]
            needed[hop.needed][hop.box.within(hop.needed).slices] += piece
            written[hop.needed][hop.box.within(hop.needed).slices] += hop.number == hop.addends - 1
            assert hop in exchange.hops_from(hop.source)
            sources = next(each.sources for each in source if each.box == hop.held)
            own = [ranks for ranks in sources if rank in ranks]
            assert not own or hop.source in own[0]  # it has what it needs
            travelled += hop.source != rank
        for box, found in needed.items():
            assert found.equal(values[box.slices])
            assert written[box].eq(1).all()
    assert exchange.is_silent == (travelled == 0)
    sent = sum(len([h for h in exchange.hops_from(r) if h.target != r]) for r in range(RANKS))
    assert sent == travelled
    for rank in range(RANKS):
        out, into = exchange.packed_from(rank), exchange.packed_to(rank)
        assert exchange.moved.sent[rank] == sum(out.sizes) == sum(p.numel for p in out.parts)
        assert exchange.moved.got[rank] == sum(into.sizes) == sum(p.numel for p in into.parts)
        for other in range(RANKS):  # both have the same order
            theirs = [p.sizes for p in exchange.packed_to(other).parts if p.rank == rank]
            assert [p.sizes for p in out.parts if p.rank == other] == theirs
        known = {h.source for h in exchange.hops_to(rank)}
        assert known == set(exchange.givers(KEY, rank))


@twin
@given(st.lists(cases(), min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_tensors_that_lie_alike_are_counted_as_often_as_there_are(some, random):
    """Whole on one rank or on several, on either side, as blocks are."""
    pairs = []
    for shape, source, _ in some:
        source = by_box((rank, each.box) for each in source for rank in each.ranks)
        for _ in range(random.randrange(1, 4)):
            ranks = random.sample(range(RANKS), random.choice([1, 1, 2, RANKS]))
            pairs.append((source, whole_on(shape, ranks)))
            if random.random() < 0.5:
                pairs[-1] = pairs[-1][::-1]
    random.shuffle(pairs)
    layouts = [{(n, ""): pair[side] for n, pair in enumerate(pairs)} for side in (0, 1)]
    exchange = Exchange("e", *layouts, RANKS)
    for rank in range(RANKS):
        assert exchange.moved.sent[rank] == exchange.elements_sent(rank) or exchange.is_gather
        assert exchange.moved.sent[rank] == sum(exchange.packed_from(rank).sizes)
        assert exchange.moved.got[rank] == sum(exchange.packed_to(rank).sizes)


@given(cases())
def test_a_gather_gives_every_box_once(case):
    shape, source, _ = case
    to_all = whole_on(shape, range(RANKS))
    exchange = Exchange("e", {KEY: source}, {KEY: to_all}, RANKS)
    if any(len(ranks) > 1 for each in source for ranks in each.sources):
        assert not exchange.is_gather
        return
    assert exchange.is_gather
    covered = torch.zeros(shape, dtype=torch.int64)
    for rank, hops in enumerate(exchange.gathered):
        for hop in hops:
            assert rank in next(each for each in source if each.box == hop.held).ranks
            covered[hop.box.slices] += 1
    for hop in exchange.held_by_all():
        covered[hop.box.slices] += 1
    assert covered.eq(1).all()
    assert list(exchange.segments) == [sum(h.box.numel for h in own) for own in exchange.gathered]


def test_ranks_with_copies_take_turns():
    halves = [Box((0,), (4,)), Box((4,), (4,))]
    keys = [(number, "") for number in range(4)]
    source = dict.fromkeys(keys, by_box((rank, halves[rank % 2]) for rank in range(4)))
    target = dict.fromkeys(keys, whole_on((8,), range(4)))
    exchange = Exchange("e", source, target, 4)
    assert list(exchange.segments) == [8, 8, 8, 8]
    assert [exchange.elements_sent(rank) for rank in range(4)] == [24] * 4


def test_of_several_copies_the_one_on_the_same_host_is_sent():
    source = Holdings(whole_on((8,), [0, 2]), near=[0, 0, 1, 1])
    exchange = Exchange("e", {KEY: source}, {KEY: whole_on((8,), [1, 3])}, 4)
    assert [hop.source for rank in (1, 3) for hop in exchange.hops_to(rank)] == [0, 2]


def test_a_layout_of_other_tensors_is_refused():
    some = whole_on((8,), [0])
    with pytest.raises(ValueError, match="different tensors"):
        Exchange("e", {KEY: some}, {(1, ""): some}, 1)


def test_sums_keep_the_order_of_ranks():
    box = whole((4,))
    order = [3, 1, 0, 2]
    source = Holdings([addends(box, order)])
    exchange = Exchange("e", {KEY: source}, {KEY: whole_on((4,), [1])}, 4)
    assert {hop.source: hop.number for hop in exchange.hops_to(1)} == {3: 0, 1: 1, 0: 2, 2: 3}


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_buckets_are_exchanges(ranks):
    specs = [
        ParamSpec(f"p{i}", shape, "torch.float32", 0, "adamw", None)
        for i, shape in enumerate([(33, 7), (4, 4), (129,), (64, 64)])
    ]
    plan = plan_sharding(specs, ranks, crossover=100, bucket_elements=1000)
    compared.compare_buckets(plan, ranks)


def test_a_bucket_that_counts_wrong_is_seen():
    spec = ParamSpec("p", (64,), "torch.float32", 0, "adamw", None)
    (bucket,) = plan_sharding([spec], 2, crossover=0).buckets
    (first, second) = bucket.segments
    (piece,) = second.pieces
    twice = second._replace(pieces=(piece._replace(start=piece.start - 1),))
    plan = ShardingPlan((spec,), 2, (Bucket(bucket.dtype, (first, twice)),))
    with pytest.raises(AssertionError):
        compared.compare_buckets(plan, 2)


def test_thousands_of_ranks_have_a_holding_for_each_different_box():
    boxes = all_boxes((4096, 64), (64, 64), [Cut(None), Cut(0)])
    found = by_box(enumerate(boxes))
    assert len(found) == 64
    assert all(len(each.sources) == 64 for each in found)
    bounds = [each.box.offsets[0] for each in found]
    assert all(after - before == 64 for before, after in pairwise(bounds))
