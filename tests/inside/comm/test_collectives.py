"""Collectives on uneven segments, on threads and on real processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.comm.collectives import (
    CollectiveError,
    exchange_segments,
    from_first,
    gather_segments,
    gather_stretch,
    maximum,
    reduce_segments,
    sum_in_order,
    total,
)
from samestep.comm.groups import RankGroup, rank_group
from samestep.plan.transfers import gather_of
from tests.ranks import run_forked, run_threaded
from tests.soak import some

WORLDS = [1, 2, 3, 4, 5]


def whole_group() -> RankGroup:
    """All ranks, also where there is only one, for which `rank_group` gives None."""
    size = dist.get_world_size()
    return RankGroup(dist.group.WORLD, dist.get_rank(), size, tuple(range(size)))


def contribution(rank, size, dtype=torch.float32):
    """Values of very different magnitude: the order of a sum shows in its bits."""
    generator = torch.Generator().manual_seed(1000 + rank)
    values = torch.randn(size, generator=generator)
    scales = torch.randint(-6, 7, (size,), generator=generator)
    return (values * 10.0**scales).to(dtype)


def rank_order_sum(world, size, dtype=torch.float32):
    result = contribution(0, size, dtype).to(torch.promote_types(dtype, torch.float32))
    for rank in range(1, world):
        result = result + contribution(rank, size, dtype).to(result.dtype)
    return result


def uneven_sizes(world):
    return [[0, 7, 1, 12, 0][rank] for rank in range(world)]


def all_on_one_rank(world):
    return [0] * (world - 1) + [9]


def even_sizes(world):
    return [4] * world


SIZES = [uneven_sizes, all_on_one_rank, even_sizes]


def add_segments(name, values, sizes, group, ordered):
    """Segments in rank order, added in rank order or by the backend."""
    if not ordered:
        return reduce_segments(name, values, sizes, group)
    return exchange_segments(name, values, sizes, group)


def every_collective(rank, world, dtype):
    """Results of each collective for each kind of sizes, with the expected value beside it."""
    group = whole_group()
    found = {}
    for make_sizes in SIZES:
        sizes = make_sizes(world)
        size, start = sum(sizes), sum(sizes[:rank])
        mine = slice(start, start + sizes[rank])
        exact = rank_order_sum(world, size, dtype)
        for ordered in (True, False):
            key = (make_sizes.__name__, "ordered" if ordered else "fast")
            values = contribution(rank, size, dtype)
            segment = add_segments("s", values, sizes, group, ordered).wait()
            found["segments", *key] = segment, exact[mine]
        whole = total("w", contribution(rank, size, dtype), group).wait()
        found["whole", make_sizes.__name__, "fast"] = whole, exact
        part = contribution(99, size, dtype)[mine].clone()
        gathered = torch.cat(gather_segments("g", part, sizes, group).wait())
        found["gather", make_sizes.__name__, "exact"] = gathered, contribution(99, size, dtype)
        room = torch.full((size,), -1.0, dtype=dtype)
        room[mine] = part
        transfer = gather_of("g", dtype, sizes, on_cpu=True, uneven=False)
        gather_stretch(transfer, room[mine], group, into=room).wait()
        found["gather in place", make_sizes.__name__, "exact"] = room, contribution(99, size, dtype)
    marks = torch.tensor([rank, -rank, 3, int(rank == world - 1)], dtype=torch.int32)
    largest = torch.tensor([world - 1, 0, 3, 1], dtype=torch.int32)
    found["maximum", "", "exact"] = maximum("m", marks, group).wait(), largest
    number = torch.tensor([1.0, float(rank)])
    expected = torch.tensor([float(world), float(sum(range(world)))])
    found["total", "", "exact"] = total("t", number, group).wait(), expected
    nothing = torch.zeros(0, dtype=dtype)
    found["nothing", "", "exact"] = total("e", nothing, group).wait(), nothing
    return found


def check_every_collective(results, dtype):
    for found in results:
        for key, (value, expected) in found.items():
            assert value.shape == expected.shape, key
            if key[2] == "fast":
                assert value.dtype == dtype
                scale = float(expected.abs().max()) if expected.numel() else 0.0
                limit = 0.05 if dtype == torch.bfloat16 else 1e-5
                assert (value.to(expected.dtype) - expected).abs().sum() <= limit * scale, key
            else:
                assert value.dtype == expected.dtype, key
                assert torch.equal(value, expected), key


@pytest.mark.parametrize("world", WORLDS)
def test_threaded(world):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        check_every_collective(run_threaded(world, every_collective, world, dtype), dtype)


@pytest.mark.parametrize("world", some([3, 1, 5], 3))
def test_forked(world):
    def job(rank):
        dtypes = (torch.float32, torch.float64, torch.bfloat16)
        return [every_collective(rank, world, dtype) for dtype in dtypes]

    results = run_forked(world, job)
    for place, dtype in enumerate((torch.float32, torch.float64, torch.bfloat16)):
        check_every_collective([result[place] for result in results], dtype)


def test_the_order_of_a_sum_shows_in_these_values():
    """Else the tests of ordered sums could not fail."""
    forwards = rank_order_sum(4, 50)
    backwards = contribution(3, 50)
    for rank in (2, 1, 0):
        backwards = backwards + contribution(rank, 50)
    assert not torch.equal(forwards, backwards)


def test_16_bit_contributions_are_added_in_32_bits():
    """256 + 1 is 256 in bf16."""
    rows = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    result = sum_in_order(rows)
    assert result.dtype == torch.float32
    assert result.tolist() == [258.0]
    assert torch.cat(rows).tolist() == [256.0, 1.0, 1.0]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5))
@settings(max_examples=15)
def test_any_sizes(sizes):
    world, size = len(sizes), sum(sizes)

    def job(rank):
        group = whole_group()
        values = contribution(rank, size)
        part = add_segments("r", values, sizes, group, ordered=True).wait()
        assert torch.equal(values, contribution(rank, size))  # an input is left as it was
        return torch.cat(gather_segments("g", part, sizes, group).wait())

    expected = rank_order_sum(world, size)
    assert all(torch.equal(result, expected) for result in run_threaded(world, job))


def test_several_in_flight_are_waited_for_in_any_order():
    """Each result belongs to its own launch, and buffers live until then."""

    def job(rank):
        group, sizes = whole_group(), [3, 0, 2]
        launched = [
            add_segments(f"r{i}", torch.full((5,), 10.0**i), sizes, group, ordered=i % 2 == 0)
            for i in range(6)
        ]
        return [pending.wait() for pending in reversed(launched)]

    for rank, results in enumerate(run_forked(3, job)):
        for power, result in zip(reversed(range(6)), results, strict=True):
            assert torch.equal(result, torch.full(([3, 0, 2][rank],), 3 * 10.0**power))


def test_a_failing_launch_names_the_operation():
    def job(rank):
        group = whole_group()
        with pytest.raises(CollectiveError, match="the third bucket failed: "):
            exchange_segments("the third bucket", torch.zeros(3), [1, 1], group).wait()
        return True

    assert run_forked(2, job) == [True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_group_of_one_does_not_communicate(dtype):
    """It has no process group to do so."""
    group = RankGroup(None, 0, 1, (0,))
    values = contribution(0, 5, dtype)
    wide = values.to(torch.promote_types(dtype, torch.float32))
    result = exchange_segments("s", values, [5], group).wait()
    assert result.dtype == wide.dtype
    assert torch.equal(result, wide)
    assert result.data_ptr() != values.data_ptr()
    for result in (
        reduce_segments("s", values, [5], group).wait(),
        *gather_segments("g", values, [5], group).wait(),
        maximum("m", values, group).wait(),
        total("t", values, group).wait(),
        from_first("f", values, group).wait(),
    ):
        assert result.dtype == dtype
        assert torch.equal(result, contribution(0, 5, dtype))


# --- groups ----------------------------------------------------------------------------------


def test_without_other_ranks_there_is_no_group():
    assert rank_group() is None
    assert run_threaded(1, lambda rank: rank_group()) == [None]


def test_a_group_that_is_not_mine_is_refused():
    def job(rank):
        handle = dist.new_group([0, 2])
        if rank == 1:
            with pytest.raises(ValueError, match="rank 1 is not a member"):
                rank_group(handle)
            return None
        return rank_group(handle)[1:4]

    assert run_forked(3, job) == [(0, 2, (0, 2)), None, (1, 2, (0, 2))]


def test_a_subgroup_works_by_its_own_places():
    """Segments are by place in the group, not by global rank."""

    def job(rank):
        handle = dist.new_group([1, 2])
        if rank == 0:
            return None
        group = rank_group(handle)
        part = add_segments("r", torch.arange(5.0), [1, 4], group, ordered=True).wait()
        return torch.cat(gather_segments("g", part, [1, 4], group).wait()).tolist()

    assert run_forked(3, job)[1:] == [[0.0, 2.0, 4.0, 6.0, 8.0]] * 2
