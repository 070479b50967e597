"""Who runs the matrix rule on which block: one owner each, and nearly even work."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.layout.owners import (
    balance,
    balanced_owners,
    busiest_lower_bound,
    cyclic_owners,
)
from samestep.rules.orthogonalize import orthogonalize_flops

work = st.lists(st.integers(1, 1000), max_size=40)
ranks = st.integers(1, 70)

GPT = [(2048, 2048)] * 4 + [(8192, 2048), (2048, 8192)]
LLAMA = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 2 + [(4096, 14336)]
MODELS = {"gpt": GPT * 24, "llama": LLAMA * 32}


def totals(owners, values, ranks):
    found = [0] * ranks
    for owner, value in zip(owners, values, strict=True):
        found[owner] += value
    return found


def costs(shapes):
    flops = [orthogonalize_flops(*shape) for shape in shapes]
    return flops, [rows * cols for rows, cols in shapes]


@given(work, ranks)
def test_every_block_has_one_owner_in_range(flops, ranks):
    for owners in (balanced_owners(flops, flops, ranks), cyclic_owners(len(flops), ranks)):
        assert len(owners) == len(flops)
        assert all(0 <= owner < ranks for owner in owners)


@given(work, ranks)
def test_the_busiest_keeps_the_guarantee_of_largest_first(flops, ranks):
    """Whoever takes a block was at or below the mean before; with enough ranks nobody shares."""
    loads = totals(balanced_owners(flops, [1] * len(flops), ranks), flops, ranks)
    if len(flops) <= ranks:
        assert sorted(loads, reverse=True)[: len(flops)] == sorted(flops, reverse=True)
        assert max(loads) == max(flops, default=0)
    else:
        assert max(loads) <= sum(flops) / ranks + max(flops) * (1 - 1 / ranks) + 1e-9


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 3))
def test_against_every_possible_assignment(flops, ranks):
    """The bound is one, and largest first is within Graham's 4/3 - 1/(3 N) of the optimum."""
    every = product(range(ranks), repeat=len(flops))
    best = min(max(totals(owners, flops, ranks)) for owners in every)
    bound = busiest_lower_bound(flops, ranks)
    assert bound <= best
    assert bound >= max(max(flops), sum(flops) / ranks)
    found = max(totals(balanced_owners(flops, flops, ranks), flops, ranks))
    assert best <= found <= best * (4 / 3 - 1 / (3 * ranks)) + 1e-9


def test_two_of_the_largest_must_share():
    """Three equal blocks on two ranks: the mean says 1.5, the truth is 2."""
    assert busiest_lower_bound([10, 10, 10], 2) == 20
    assert busiest_lower_bound([10, 10], 2) == 10
    assert busiest_lower_bound([], 2) == 0


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("model", MODELS)
def test_real_models_are_within_five_percent_of_the_bound(model, ranks):
    flops, sizes = costs(MODELS[model])
    found = balance(balanced_owners(flops, sizes, ranks), flops, sizes, ranks)
    assert found.bound <= found.busiest <= 1.05 * found.bound
    assert found.fullest >= 1.0


def test_the_page_has_what_owners_do():
    flops, sizes = costs(MODELS["llama"])
    busiest, turns = (
        found.busiest / found.bound
        for found in (
            balance(balanced_owners(flops, sizes, 64), flops, sizes, 64),
            balance(cyclic_owners(len(flops), 64), flops, sizes, 64),
        )
    )
    said = f"{busiest:.2f} times the least that any assignment can reach, {turns:.2f} if blocks"
    text = (Path(__file__).parents[3] / "docs" / "several_gpus.md").read_text()
    assert said in " ".join(text.split())


@pytest.mark.parametrize("ranks", [7, 31, 61])
@pytest.mark.parametrize("model", MODELS)
def test_prime_rank_counts(model, ranks):
    flops, sizes = costs(MODELS[model])
    owners = balanced_owners(flops, sizes, ranks)
    assert set(owners) == set(range(ranks))
    loads = totals(owners, flops, ranks)
    # Whoever is busiest was the least busy before its last, smallest block came.
    assert max(loads) - min(loads) <= max(flops)
    assert max(loads) <= sum(flops) / ranks + max(flops)


def test_cyclic_is_less_even_where_costs_repeat_with_the_ranks():
    """Seven kinds of blocks on seven ranks: each rank gets all blocks of one kind."""
    flops, sizes = costs(MODELS["llama"])
    cyclic = balance(cyclic_owners(len(flops), 7), flops, sizes, 7)
    balanced = balance(balanced_owners(flops, sizes, 7), flops, sizes, 7)
    assert cyclic_owners(9, 7) == [0, 1, 2, 3, 4, 5, 6, 0, 1]
    assert balanced.busiest < 1.1 < 1.3 < cyclic.busiest
    assert cyclic.bound == balanced.bound


def test_the_size_cap_trades_work_for_size():
    """Flops and sizes that disagree: thin blocks are cheap and as large as square ones."""
    shapes = [(64, 4096)] * 24 + [(512, 512)] * 24
    flops, sizes = costs(shapes)
    free = balance(balanced_owners(flops, sizes, 7), flops, sizes, 7)
    capped = balance(balanced_owners(flops, sizes, 7, max_size_ratio=1.1), flops, sizes, 7)
    assert capped.fullest < free.fullest
    assert capped.busiest > free.busiest
    assert capped.fullest <= 1.1


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=30),
    st.integers(1, 9),
    st.floats(1.0, 3.0),
)
def test_the_cap_is_passed_only_if_no_rank_has_room(blocks, ranks, ratio):
    flops, sizes = [f for f, _ in blocks], [s for _, s in blocks]
    owners = balanced_owners(flops, sizes, ranks, max_size_ratio=ratio)
    assert len(owners) == len(blocks)
    room = ratio * sum(sizes) / ranks
    full = [0] * ranks
    for block in sorted(range(len(blocks)), key=lambda i: (-flops[i], -sizes[i], i)):
        if full[owners[block]] + sizes[block] > room:
            assert full[owners[block]] == min(full)  # the emptiest takes it
            assert min(full) + sizes[block] > room
        full[owners[block]] += sizes[block]
    assert max(full) <= room + max(sizes)


@given(work, ranks)
def test_a_cap_that_never_binds_changes_nothing(flops, ranks):
    loose = balanced_owners(flops, flops, ranks, max_size_ratio=float(ranks) + 1)
    assert loose == balanced_owners(flops, flops, ranks)


def test_ties_go_to_the_emptiest_rank():
    """Rank 0 and 1 are equally busy after two blocks, but rank 1 holds less."""
    assert balanced_owners([5, 5, 5], [9, 2, 1], 2) == [0, 1, 1]


def test_fewer_blocks_than_ranks_and_one_rank():
    assert sorted(balanced_owners([3, 1, 2], [1, 1, 1], 8)) == [0, 1, 2]
    assert balanced_owners([3, 1, 2], [1, 1, 1], 1) == [0, 0, 0]
    assert balanced_owners([], [], 4) == []
    alone = balance([0, 0, 0], [3, 1, 2], [4, 4, 4], 1)
    assert alone == (1.0, 1.0, 1.0)


def test_balance_counts_ranks_without_blocks():
    assert balance([0, 0, 1], [2, 2, 2], [1, 1, 6], 4) == (4 / 1.5, 2 / 1.5, 6 / 2.0)
    assert balance([], [], [], 3).busiest == 0


@given(work, ranks)
def test_the_choice_is_the_same_every_time(flops, ranks):
    assert balanced_owners(flops, flops, ranks) == balanced_owners(list(flops), flops, ranks)
