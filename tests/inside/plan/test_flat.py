"""Plans for flat buffers: what holds for any parameters, ranks and bucket sizes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.plan.flat import places, plan_flat
from samestep.plan.sharding import ParamSpec
from tests.inside.plan.test_sharding import matrix, param_lists
from tests.soak import twin

plans = st.builds(
    lambda params, ranks, size: plan_flat(params, ranks, bucket_elements=size),
    param_lists(),
    st.one_of(st.integers(1, 9), st.sampled_from([64, 512])),
    st.one_of(st.integers(1, 8), st.integers(1, 300)),
)


@twin
@given(plans)
def test_pieces_lie_in_their_buckets_as_in_their_parameters(plan):
    """Elements numbered in every parameter: read through segments, they are those of views."""
    where = places(plan)
    seen = [torch.zeros(spec.numel, dtype=torch.int64) for spec in plan.params]
    for number, bucket in enumerate(plan.buckets):
        flat = torch.full((bucket.size,), -1)
        for index in bucket.params:
            assert where[index].bucket == number  # never cut by a bucket
            start, size = where[index].start, plan.params[index].numel
            flat[start : start + size] = torch.arange(size)
        for segment, part in zip(
            bucket.segments, torch.split(flat, bucket.segment_sizes), strict=True
        ):
            for piece, place in segment.places():
                assert torch.equal(part[place], torch.arange(piece.start, piece.stop))
                seen[piece.param][piece.start : piece.stop] += 1
    assert all(bool((count == 1).all()) for count in seen)
    for place, spec in zip(where, plan.params, strict=True):
        assert place is not None or spec.numel == 0


@given(plans)
def test_shards_are_equal_for_elementwise_rules_and_whole_blocks_for_others(plan):
    for bucket in plan.buckets:
        pieces = [piece for segment in bucket.segments for piece in segment.pieces]
        if bucket.replicated:
            assert bucket.size == 0  # nothing to share
            continue
        kinds = {plan.params[piece.param].blocks is not None for piece in pieces}
        assert len(kinds) == 1
        assert {plan.params[piece.param].dtype for piece in pieces} == {bucket.dtype}
        if kinds == {False}:
            assert len(set(bucket.segment_sizes)) == 1
        else:
            assert all(piece.size == piece.block.rows * piece.block.cols for piece in pieces)


def test_lines_tell_bucket_sizes_and_ranks_apart():
    params = [matrix("a", (8, 8)), ParamSpec("b", (100,), "torch.float32", 0, "adamw", None)] * 2
    texts = {
        tuple(plan_flat(params, ranks, bucket_elements=size).lines())
        for ranks in (2, 3)
        for size in (64, 1000)
    }
    assert len(texts) == 4


@pytest.mark.parametrize("ranks", [1, 2, 7])
def test_last_used_first(ranks):
    params = [ParamSpec(f"p{i}", (100,), "torch.float32", 0, "adamw", None) for i in range(6)]
    plan = plan_flat(params, ranks, bucket_elements=200)
    assert [bucket.params for bucket in plan.buckets] == [[4, 5], [2, 3], [0, 1]]
