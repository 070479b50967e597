"""The plan: every element in one piece, blocks whole, buckets within their limit."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.layout.blocks import blocks_of
from samestep.plan.flat import plan_flat
from samestep.plan.sharding import ParamSpec, plan_sharding, whole_pieces
from tests.soak import twin

DTYPES = ("torch.float32", "torch.bfloat16", "torch.float64")


def elementwise(name, shape, dtype=DTYPES[0], group=0):
    return ParamSpec(name, tuple(shape), dtype, group, "adamw", None)


def matrix(name, shape, splits=None, dtype=DTYPES[0], group=0):
    return ParamSpec(name, tuple(shape), dtype, group, "muon", tuple(blocks_of(shape, splits)))


@st.composite
def one_param(draw, name):
    dtype, group = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 2))
    if draw(st.booleans()):
        shape = draw(st.lists(st.integers(0, 9), max_size=3))
        return elementwise(name, shape, dtype, group)
    splits = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    stack = draw(st.one_of(st.just(()), st.tuples(st.integers(0, 4))))
    cols = draw(st.integers(0, 7))
    return matrix(name, (*stack, sum(splits), cols), splits, dtype, group)


@st.composite
def param_lists(draw):
    count = draw(st.integers(0, 12))
    return [draw(one_param(f"p{i}")) for i in range(count)]


plans = st.builds(
    lambda params, ranks, **options: plan_sharding(params, ranks, **options),
    param_lists(),
    st.one_of(st.integers(1, 9), st.integers(1, 64)),
    crossover=st.sampled_from([1, 5, 40]),
    bucket_elements=st.one_of(st.integers(1, 8), st.integers(1, 300)),
    owners=st.sampled_from(["balanced", "cyclic"]),
)


def all_pieces(plan):
    return [p for bucket in plan.buckets for segment in bucket.segments for p in segment.pieces]


@given(plans)
def test_every_element_is_in_exactly_one_piece(plan):
    counts = [torch.zeros(spec.shape, dtype=torch.int64) for spec in plan.params]
    for piece in all_pieces(plan):
        counts[piece.param].view(-1)[piece.start : piece.stop] += 1
    assert all(bool((count == 1).all()) for count in counts)


@given(plans)
def test_owned_is_what_the_segments_say(plan):
    shared = [p for b in plan.buckets if b.replicated for s in b.segments for p in s.pieces]
    owned = [plan.owned(rank) for rank in range(plan.ranks)]
    expected = Counter(all_pieces(plan))
    for piece in shared:
        expected[piece] = plan.ranks  # every rank updates what is replicated
    assert sum(map(Counter, owned), Counter()) == +expected
    for bucket in plan.buckets:
        assert len(bucket.segments) == (1 if bucket.replicated else plan.ranks)
        assert bucket.size == sum(bucket.segment_sizes)
        assert bucket.params == sorted({p.param for s in bucket.segments for p in s.pieces})


@given(plans)
def test_blocks_are_never_cut_and_their_ranges_are_their_elements(plan):
    for index, spec in enumerate(plan.params):
        mine = [piece for piece in all_pieces(plan) if piece.param == index]
        if spec.blocks is None:
            assert all(piece.block is None for piece in mine)
            continue
        assert sorted(p.block for p in mine) == sorted(spec.blocks)
        for piece in mine:
            painted = torch.zeros(spec.shape)
            piece.block.view(painted).fill_(1)
            expected = torch.zeros(painted.numel())
            expected[piece.start : piece.stop] = 1
            assert torch.equal(painted.view(-1), expected)
            assert piece.size == prod(piece.block.shape)


def test_the_range_of_a_flattened_block_is_its_elements():
    shape = (6, 3, 2)
    spec = ParamSpec("conv", shape, DTYPES[0], 0, "muon", tuple(blocks_of(shape, (2, 4), True)))
    first, second = whole_pieces(0, spec)
    assert (first.start, first.stop, second.start, second.stop) == (0, 12, 12, 36)


@given(
    param_lists(),
    st.integers(2, 64),
    st.integers(1, 60),
    st.sampled_from([1, 20]),
)
def test_buckets_keep_to_the_limit_and_are_filled_in_order(params, ranks, limit, crossover):
    plan = plan_sharding(params, ranks, crossover=crossover, bucket_elements=limit)
    sharded = [b for b in plan.buckets if not b.replicated]
    for bucket in sharded:
        pieces = [p for segment in bucket.segments for p in segment.pieces]
        assert bucket.size > 0
        assert {params[p.param].dtype for p in pieces} == {bucket.dtype}
        if bucket.size > limit:
            assert len(pieces) == 1
            assert pieces[0].block is not None
    for matrices in (False, True):
        alike = [b for b in sharded if (params[b.params[0]].blocks is not None) == matrices]
        for one, following in pairwise(alike):
            if one.dtype == following.dtype:
                # Backward finishes the last parameters first.
                assert min(one.params) >= max(following.params)


def test_a_bucket_is_closed_only_when_the_next_part_does_not_fit():
    params = [matrix(f"m{i}", (2, 5)) for i in range(5)]
    plan = plan_sharding(params, 2, crossover=1, bucket_elements=25)
    assert [bucket.size for bucket in plan.buckets] == [20, 20, 10]
    assert [bucket.params for bucket in plan.buckets] == [[3, 4], [1, 2], [0]]
    exact = plan_sharding(params, 2, crossover=1, bucket_elements=20)
    assert [bucket.size for bucket in exact.buckets] == [20, 20, 10]


@given(param_lists(), st.integers(2, 64))
def test_without_blocks_slices_differ_by_at_most_one_element(params, ranks):
    params = [spec._replace(blocks=None) for spec in params]
    for bucket in plan_sharding(params, ranks, crossover=1, bucket_elements=20).buckets:
        assert max(bucket.segment_sizes) - min(bucket.segment_sizes) <= 1


@twin
@given(param_lists(), st.integers(1, 64))
def test_neighbours_are_packed_as_one(params, ranks):
    """Parts are the pieces, and of what is cut there are as many as parameters, not as ranks."""
    for bucket in plan_sharding(params, ranks, crossover=1, bucket_elements=50).buckets:
        pieces, parts = list(bucket.places()), bucket.packing.parts
        elements = [(p.param, i) for p, _ in pieces for i in range(p.start, p.stop)]
        packed = [(p.key[0], i) for p in parts for i in range(p.elements.start, p.elements.stop)]
        assert packed == elements
        assert [part.start for part in parts] == [
            sum(part.numel for part in parts[:number]) for number in range(len(parts))
        ]
        if params[bucket.params[0]].blocks is None:
            assert len(parts) == len(bucket.params)
        for rank in range(0 if bucket.replicated else ranks):
            own = {
                (piece.param, i)
                for piece in bucket.owned(rank).pieces
                for i in range(piece.start, piece.stop)
            }
            others = bucket.packing_without(rank).parts
            places = {}
            for part in others:
                for offset, i in enumerate(range(part.elements.start, part.elements.stop)):
                    places[part.key[0], i] = part.start + offset
            whole = {e: place for place, e in enumerate(elements)}
            assert places == {e: place for e, place in whole.items() if e not in own}


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(2, 16), st.sampled_from([0.5, 1, 2]))
def test_slices_even_out_the_state_of_blocks(rows, ranks, kept):
    """As far as there are slices to do it with: else the emptiest ranks get all of them."""
    blocks = [matrix(f"m{i}", (n, 8)) for i, n in enumerate(rows)]
    table = elementwise("table", (500, 10))._replace(state_per_element=kept)
    plan = plan_sharding([table, *blocks], ranks, crossover=1, bucket_elements=1000)
    state, of_blocks = [0.0] * ranks, [0.0] * ranks
    for rank in range(ranks):
        for piece in plan.owned(rank):
            state[rank] += piece.size * plan.params[piece.param].state_per_element
            of_blocks[rank] += piece.size * (piece.block is not None)
    mean = sum(state) / ranks
    slack = 1 + kept * len(plan.buckets)  # every cut may be one element off
    if max(of_blocks) <= mean:
        assert max(state) - min(state) <= 2 * slack
    else:
        assert max(state) <= max(of_blocks) + slack


def test_slices_run_through_the_parameter_in_rank_order():
    plan = plan_sharding([elementwise("w", (10,))], 4, crossover=1)
    (bucket,) = plan.buckets
    assert [(p.start, p.stop) for (p,) in (s.pieces for s in bucket.segments)] == [
        (0, 2),
        (2, 5),
        (5, 7),
        (7, 10),
    ]
    few = plan_sharding([elementwise("w", (2,))], 4, crossover=1).buckets[0]
    assert sorted(few.segment_sizes) == [0, 0, 1, 1]


@given(param_lists(), st.integers(2, 64), st.integers(1, 100), st.integers(1, 60))
def test_small_parameters_are_replicated_in_one_bucket_per_dtype(params, ranks, crossover, limit):
    plan = plan_sharding(params, ranks, crossover=crossover, bucket_elements=limit)
    replicated = [b for b in plan.buckets if b.replicated]
    assert len({b.dtype for b in replicated}) == len(replicated)
    shared = {i for b in replicated for i in b.params}
    for index, spec in enumerate(params):
        small = spec.numel < crossover
        has_pieces = spec.blocks is None or bool(spec.blocks)
        assert (index in shared) == (small and has_pieces)


@given(param_lists(), st.integers(1, 64))
def test_without_sharding_and_on_one_rank_everything_is_replicated(params, ranks):
    for plan in (
        plan_sharding(params, ranks, shard=False, crossover=1, bucket_elements=3),
        plan_sharding(params, 1, crossover=1, bucket_elements=3),
    ):
        assert all(bucket.replicated for bucket in plan.buckets)
        assert all(b.size <= 3 or len(b.segments[0].pieces) == 1 for b in plan.buckets)
        owned = plan.owned(plan.ranks - 1)
        assert sum(piece.size for piece in owned) == sum(spec.numel for spec in params)


@given(param_lists(), st.integers(1, 64), st.sampled_from(["balanced", "cyclic"]))
def test_the_same_input_gives_the_same_plan(params, ranks, owners):
    one, two = (
        plan_sharding(list(params), ranks, crossover=9, bucket_elements=50, owners=owners)
        for _ in range(2)
    )
    assert one == two
    assert one.lines() == two.lines()


BASE = [
    elementwise("emb", (37, 5)),
    matrix("qkv", (12, 6), (6, 3, 3)),
    matrix("experts", (4, 8, 8)),
    matrix("up", (24, 6)),
    elementwise("bias", (3,)),
]
VARIANTS = {
    "another name": [BASE[0]._replace(name="embedding"), *BASE[1:]],
    "another shape": [elementwise("emb", (5, 37)), *BASE[1:]],
    "another dtype": [BASE[0]._replace(dtype=DTYPES[1]), *BASE[1:]],
    "another group": [BASE[0]._replace(group=1), *BASE[1:]],
    "another rule": [BASE[0]._replace(rule="muon"), *BASE[1:]],
    "another split": [BASE[0], matrix("qkv", (12, 6), (4, 4, 4)), *BASE[2:]],
    "no split": [BASE[0], matrix("qkv", (12, 6)), *BASE[2:]],
    "another order": [BASE[1], BASE[0], *BASE[2:]],
    "one more": [*BASE, elementwise("scale", ())],
    "one less": BASE[:-1],
}
OPTIONS = [
    {"shard": False},
    {"crossover": 1},
    {"crossover": 100},
    {"bucket_elements": 50},
    {"owners": "cyclic"},
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_lines_tell_parameters_apart(variant):
    options = {"crossover": 16, "bucket_elements": 1 << 20}
    base = plan_sharding(BASE, 3, **options).lines()
    assert plan_sharding(VARIANTS[variant], 3, **options).lines() != base
    assert plan_sharding(BASE, 3, **options).lines() == base


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_lines_tell_options_apart(options):
    base = {"crossover": 16, "bucket_elements": 1 << 20}
    lines = plan_sharding(BASE, 3, **base).lines()
    assert plan_sharding(BASE, 3, **{**base, **options}).lines() != lines
    assert plan_sharding(BASE, 4, **base).lines() != lines


def test_lines_name_ranks_and_pieces():
    text = "\n".join(plan_sharding(BASE, 3, crossover=16).lines())
    assert "3 ranks" in text
    assert "emb: (37, 5) torch.float32, group 0, adamw" in text
    assert "all ranks, 3: bias[0:3] at 0" in text
    assert "experts[64:128]" in text


def test_owners_are_chosen_over_all_parameters_at_once():
    """Eight equal matrices in eight buckets: two for each of four ranks."""
    params = [matrix(f"m{i}", (8, 8)) for i in range(8)]
    for owners in ("balanced", "cyclic"):
        plan = plan_sharding(params, 4, crossover=1, bucket_elements=64, owners=owners)
        assert len(plan.buckets) == 8
        assert [len(plan.owned(rank)) for rank in range(4)] == [2, 2, 2, 2]
    thin = [matrix("big", (64, 64)), *(matrix(f"m{i}", (8, 8)) for i in range(8))]
    plan = plan_sharding(thin, 3, crossover=1)
    assert sorted(len(plan.owned(rank)) for rank in range(3)) == [1, 4, 4]


def test_the_size_cap_reaches_the_plan():
    params = [matrix(f"t{i}", (8, 512)) for i in range(8)]
    params += [matrix(f"s{i}", (64, 64)) for i in range(8)]

    def fullest(**options):
        plan = plan_sharding(params, 3, crossover=1, **options)
        return max(sum(p.size for p in plan.owned(rank)) for rank in range(3))

    assert fullest(max_size_ratio=1.0) <= fullest()
    assert fullest(max_size_ratio=1.2) <= 1.2 * 16 * 4096 / 3


@pytest.mark.parametrize("flat", [False, True])
def test_owners_that_follow_each_other_are_in_different_columns(flat):
    """Four ranks on each of two hosts: what crosses between hosts is shared by all of a host."""
    params = [matrix(f"m{i}", (8, 8)) for i in range(4)]
    options = {"bucket_elements": 1000, "columns": 4}
    plan = (
        plan_flat(params, 8, **options)
        if flat
        else plan_sharding(params, 8, crossover=1, **options)
    )
    owners = [place for bucket in plan.buckets for place, _ in bucket.filled]
    assert sorted(place // 2 for place in owners) == [0, 1, 2, 3]
