"""Degrees: what they mean for ranks, and sizes that do not fit."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.mesh import AXES, Degrees, DegreesError
from samestep.mesh.degrees import nearest_divisors, nearest_multiples
from tests.mesh.strategies import degrees


@given(degrees())
def test_the_axes_are_those_of_a_grid_of_ranks(degrees):
    shape = list(degrees.sizes.values())
    grid = torch.arange(degrees.world).view(shape)
    for rank in range(degrees.world):
        place = degrees.coordinates(rank)
        assert list(place) == list(AXES)
        assert grid[tuple(place.values())].item() == rank
        assert degrees.rank(place) == rank
        for dim, axis in enumerate(AXES):
            along = [*place.values()]
            along[dim] = slice(None)
            assert list(degrees.peers(rank, axis)) == grid[tuple(along)].tolist()


@given(degrees(), st.sets(st.sampled_from(AXES)))
def test_groups_divide_the_world(degrees, axes):
    groups = degrees.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(degrees.world))
    assert {len(group) for group in groups} == {math.prod(degrees.sizes[axis] for axis in axes)}
    for group in groups:
        assert all(degrees.peers(rank, *axes) == group for rank in group)


@given(degrees())
def test_the_sizes_of_data_parallelism(degrees):
    assert degrees.data_parallel == degrees.world // (degrees.pp * degrees.tp * degrees.ep)
    assert degrees.data_parallel == degrees.replicate * degrees.data
    # Ranks with tokens of their own: along replicate and data, and along expert if it carries data.
    axes = ["replicate", "data", *(["expert"] if degrees.ep_carries_data else [])]
    assert degrees.batch_ranks == len(degrees.peers(0, *axes))
    assert degrees.expert_tp in (1, degrees.tp)
    assert set(degrees.axes) == {axis for axis in AXES if degrees.sizes[axis] > 1} | {"data"}


def test_the_lane_of_four_dimensions():
    lane = Degrees(8, ep=2, tp=2, sequence_parallel=True)
    assert (lane.data, lane.data_parallel, lane.batch_ranks, lane.expert_tp) == (2, 2, 4, 2)
    assert lane.name == "pipe1.data2.expert2.model2"
    assert lane.coordinates(5) == {"pipe": 0, "replicate": 0, "data": 1, "expert": 0, "model": 1}
    assert Degrees(8, ep=2, tp=2, ep_carries_data=False).batch_ranks == 2
    assert Degrees(8, replicate=2, tp=2).name == "pipe1.replicate2.data2.expert1.model2"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"world": 8, "tp": 3},
            "tp 3 does not divide a world of 8 ranks. What works, changing one: tp 2 or 4, or a "
            "world of 6 or 9 ranks",
        ),
        (
            {"world": 8, "tp": 4, "ep": 4},
            "ep 4 x tp 4 = 16 does not divide a world of 8 ranks. What works, changing one: ep 2, "
            "or tp 2, or a world of 16 ranks",
        ),
        (
            {"world": 8, "sequence_parallel": True},
            "sequence_parallel shares the sequence among the ranks of tp, but tp is 1",
        ),
        (
            {"world": 8, "tp": 4, "expert_tensor_parallel": 2},
            "expert_tensor_parallel must be 0 (follow tp), 1 or tp = 4, got 2: other sizes would "
            "need an axis of their own",
        ),
        (
            {"world": 8, "expert_tensor_parallel": -1},
            "expert_tensor_parallel must be 0 (follow tp), 1 or tp, got -1",
        ),
        (
            {"world": 0, "pp": True, "ep": 1.5},
            "world must be a whole number of ranks, at least 1, got 0; pp must be a whole number "
            "of ranks, at least 1, got True; ep must be a whole number of ranks, at least 1, got "
            "1.5",
        ),
    ],
)
def test_sizes_that_do_not_fit(sizes, message):
    with pytest.raises(DegreesError) as caught:
        Degrees(**sizes)
    assert str(caught.value) == message


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(DegreesError) as caught:
        Degrees(10, pp=4, sequence_parallel=True, expert_tensor_parallel=2)
    for part in ("pp 4", "sequence_parallel", "expert_tensor_parallel must be"):
        assert part in str(caught.value)


@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 200), st.integers(1, 200))
def test_sizes_that_are_offered_work(world, ep, tp, pp):
    """Every number in the message, put in place of the one that was asked for, is accepted."""
    asked = {"ep": ep, "tp": tp, "pp": pp}
    try:
        Degrees(world, **asked)
    except DegreesError as error:
        offers = str(error).partition("changing one: ")[2].split(", or ")
        assert offers[-1].startswith("a world of ")
        for offer in offers:
            offer = offer.replace("a world of", "world").replace(" ranks", "")
            name, _, sizes = offer.partition(" ")
            for size in sizes.split(" or "):
                Degrees(**{"world": world, **asked, name: int(size)})


@given(st.integers(1, 300), st.integers(1, 300))
def test_nearest(whole, wanted):
    divisors = nearest_divisors(whole, wanted)
    assert all(whole % size == 0 for size in divisors)
    near = [size for size in range(1, whole + 1) if whole % size == 0 and size <= wanted]
    assert max(near) in divisors
    multiples = nearest_multiples(whole, wanted)
    assert all(size % whole == 0 and abs(size - wanted) < whole for size in multiples)


def test_a_rank_that_does_not_exist():
    with pytest.raises(ValueError, match="rank must be from 0 to 3, got 4"):
        Degrees(4).coordinates(4)
