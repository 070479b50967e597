"""Flat buffers: the worked example with four ranks, and what holds for any sizes and ranks."""

import cProfile
import pstats
from itertools import accumulate
from math import lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.layout.flat_ranges import BlockSizes, Range, equal_shards, owner_shards
from samestep.layout.owners import busiest_lower_bound
from samestep.rules.orthogonalize import orthogonalize_flops
from tests.soak import twin


def fragments(layout):
    """Of all buckets and ranks."""
    return [f for number in range(len(layout.buckets)) for f in layout.fragments(number)]


def test_the_worked_example():
    """A, B and C of 2000, 5000 and 3000 elements in one bucket on 4 ranks: 2500 each."""
    layout = equal_shards([2000, 5000, 3000], 4, 10_000, start_alignment=1, shard_alignment=1)
    assert (layout.size, layout.padding, len(layout.buckets)) == (10_000, 0, 1)
    assert layout.buckets[0].shards == (
        Range(0, 2500),
        Range(2500, 5000),
        Range(5000, 7500),
        Range(7500, 10_000),
    )
    owned = [
        [(f.param, f.in_buffer, f.in_shard, f.in_param) for f in fragments(layout) if f.rank == r]
        for r in range(4)
    ]
    assert owned == [
        [(0, (0, 2000), (0, 2000), (0, 2000)), (1, (2000, 2500), (2000, 2500), (0, 500))],
        [(1, (2500, 5000), (0, 2500), (500, 3000))],
        [(1, (5000, 7000), (0, 2000), (3000, 5000)), (2, (7000, 7500), (2000, 2500), (0, 500))],
        [(2, (7500, 10_000), (0, 2500), (500, 3000))],
    ]


def test_ranges():
    whole, part = Range(10, 50), Range(20, 30)
    assert part.size == 10
    assert part.normalize() == (0, 10)
    assert part.normalize(7) == (7, 17)
    assert part.within(whole) == (10, 20)
    assert whole.overlap(part) == part.overlap(whole) == part
    assert Range(0, 15).overlap(part).size == 0
    assert Range(40, 60).overlap(part).size == 0
    assert Range(25, 60).overlap(part) == (25, 30)


def test_buckets_are_padded_so_that_shards_are_equal_and_aligned():
    layout = equal_shards([1000, 1000, 10], 3, 1500)
    assert [bucket.params for bucket in layout.buckets] == [(0, 1), (2,)]
    assert layout.params[1].start == 1024  # the next multiple of 64
    first, second = layout.buckets
    assert first.in_buffer == (0, 2112)  # the next multiple of 3 x 32
    assert {shard.size for shard in first.shards} == {704}
    assert second.in_buffer == (2112, 2208)
    assert layout.padding == 2208 - 2010


@pytest.mark.parametrize("ranks", [8, 48, 64, 128, 256])
def test_no_more_padding_than_megatrons(ranks):
    """Unaligned sizes in small buckets; Megatron pads starts to 64 and ends to lcm(ranks, 128)."""
    sizes = [1500 + 37 * (number * number % 101) for number in range(200)]
    ours = equal_shards(sizes, ranks, 16_000)
    cursor, start = 0, 0
    for number, size in enumerate(sizes):
        cursor = rounded_up(cursor, 64) + size
        if cursor - start >= 16_000 or number == len(sizes) - 1:
            start = cursor = rounded_up(cursor, lcm(ranks, 128))
    assert ours.size <= cursor
    assert ours.padding < 0.02 * sum(sizes)


def test_nothing():
    layout = equal_shards([], 4, 100)
    assert (layout.size, layout.padding, fragments(layout)) == (0, 0, [])


def rounded_up(number, divisor):
    return -(-number // divisor) * divisor


SIZES = st.lists(st.integers(0, 3000), min_size=1, max_size=12)


@given(
    sizes=SIZES,
    ranks=st.sampled_from([1, 2, 3, 5, 7, 8, 64, 512]) | st.integers(1, 512),
    bucket=st.integers(1, 8000),
    start=st.sampled_from([1, 4, 64]),
    shard=st.sampled_from([1, 16, 128]),
)
def test_every_element_is_owned_once_and_coordinates_agree(sizes, ranks, bucket, start, shard):
    layout = equal_shards(sizes, ranks, bucket, start_alignment=start, shard_alignment=shard)
    assert [place.size for place in layout.params] == sizes
    assert all(place.start % start == 0 for place in layout.params)
    end = 0
    for each in layout.buckets:
        assert each.in_buffer.start == each.shards[0].start == end
        assert each.in_buffer.stop == each.shards[-1].stop
        assert len({piece.size for piece in each.shards}) == 1
        end = each.in_buffer.stop
        filled = max((layout.params[i].stop for i in each.params), default=0)
        assert each.in_buffer.stop - filled < ranks * shard
        used = filled - each.in_buffer.start
        aligned, megatrons = rounded_up(used, ranks * shard), rounded_up(used, lcm(ranks, 128))
        if aligned <= max(megatrons, used + used // 1024):
            assert each.in_buffer.size == aligned
        else:
            assert each.in_buffer.size <= max(megatrons, used + used // 1024)
    assert end == layout.size
    covered: dict[int, list[Range]] = {}
    for fragment in fragments(layout):
        place, home = layout.params[fragment.param], layout.buckets[fragment.bucket]
        shard = home.shards[fragment.rank]
        sizes_found = {
            part.size
            for part in (
                fragment.in_buffer,
                fragment.in_bucket,
                fragment.in_shard,
                fragment.in_param,
            )
        }
        assert len(sizes_found) == 1
        assert fragment.in_buffer.start == place.start + fragment.in_param.start
        assert fragment.in_buffer.start == home.in_buffer.start + fragment.in_bucket.start
        assert fragment.in_buffer.start == shard.start + fragment.in_shard.start
        assert fragment.in_buffer.stop <= shard.stop
        covered.setdefault(fragment.param, []).append(fragment.in_param)
    for index, size in enumerate(sizes):
        parts = sorted(covered.get(index, []))
        assert sum(part.size for part in parts) == size
        ends = [0, *(part.stop for part in parts)]
        assert [part.start for part in parts] == ends[:-1]


# --- whole blocks --------------------------------------------------------------------------------


def gpt_matrices(width, layers):
    """Four d x d, one 4d x d and one d x 4d per layer."""
    square = BlockSizes((width * width,), (orthogonalize_flops(width, width),))
    oblong = BlockSizes((4 * width * width,), (orthogonalize_flops(width, 4 * width),))
    return [param for _ in range(layers) for param in (*[square] * 4, oblong, oblong)]


@pytest.mark.parametrize("ranks", [8, 64])
def test_blocks_of_a_gpt_hardly_pad_and_balance(ranks):
    params = gpt_matrices(2048, 24)
    layout = owner_shards(params, ranks, 25 * (1 << 18))
    assert layout.padding < 0.02 * layout.size
    work = [0] * ranks
    for fragment in fragments(layout):
        assert fragment.in_param.size == params[fragment.param].elements[0]  # whole
        work[fragment.rank] += params[fragment.param].flops[0]
    flops = [param.flops[0] for param in params]
    assert max(work) <= 1.05 * busiest_lower_bound(flops, ranks)


def test_elementwise_parameters_hardly_pad():
    for ranks in (8, 64):
        layout = equal_shards(
            [32768 * 2048, 2048, 32768 * 2048] + [2048] * 48, ranks, 25 * (1 << 18)
        )
        assert layout.padding < 0.01 * layout.size


def test_a_stack_of_experts_is_cut_between_experts():
    expert = 512 * 2048
    stack = BlockSizes((expert,) * 64, (orthogonalize_flops(512, 2048),) * 64)
    layout = owner_shards([*gpt_matrices(512, 1), stack], 8, 1 << 22)
    assert layout.buckets[-1].params == (6,)
    shares = [f.in_param.size / expert for f in fragments(layout) if f.param == 6]
    assert sum(shares) == 64
    assert all(share == int(share) for share in shares)
    assert max(shares) <= 9


@twin
def test_planning_a_70b_model_takes_a_few_steps_per_rank():
    """Counted in calls of functions, which do not depend on the machine."""
    width, kv, hidden = 8192, 1024, 28672
    shapes = [(width, width), (kv, width), (kv, width), (width, width)]
    shapes += [(hidden, width), (hidden, width), (width, hidden)]
    params = [
        BlockSizes((rows * cols,), (orthogonalize_flops(rows, cols),)) for rows, cols in shapes * 80
    ]
    calls = {}
    for ranks in (64, 256):
        counting = cProfile.Profile()
        layout = counting.runcall(owner_shards, params, ranks, 25 * (1 << 18))
        assert len(fragments(layout)) == len(params)
        calls[ranks] = pstats.Stats(counting).total_calls
    assert calls[256] < 5 * calls[64]


BLOCKS = st.lists(st.tuples(st.integers(1, 500), st.integers(0, 500)), min_size=0, max_size=6)


@given(
    params=st.lists(BLOCKS, min_size=1, max_size=10),
    ranks=st.integers(1, 12) | st.sampled_from([64, 512]),
    bucket=st.integers(1, 3000),
    start=st.sampled_from([1, 64]),
)
def test_every_block_lies_whole_in_one_shard(params, ranks, bucket, start):
    sizes = [BlockSizes(tuple(e for e, _ in p), tuple(f for _, f in p)) for p in params]
    layout = owner_shards(sizes, ranks, bucket, start_alignment=start)
    assert sorted(i for each in layout.buckets for i in each.params) == list(range(len(params)))
    for each in layout.buckets:
        ends = [each.in_buffer.start, *(shard.stop for shard in each.shards)]
        assert [shard.start for shard in each.shards] == ends[:-1]
        assert ends[-1] == each.in_buffer.stop
    owned: dict[int, list[Range]] = {}
    for fragment in fragments(layout):
        owned.setdefault(fragment.param, []).append(fragment.in_param)
        place = layout.params[fragment.param]
        assert fragment.in_buffer == fragment.in_param.normalize(
            place.start + fragment.in_param.start
        )
    for index, param in enumerate(sizes):
        assert layout.params[index].size == sum(param.elements)
        bounds = list(accumulate(param.elements, initial=0))
        parts = sorted(owned.get(index, []))
        assert sum(part.size for part in parts) == bounds[-1]
        assert all(part.start in bounds and part.stop in bounds for part in parts)
