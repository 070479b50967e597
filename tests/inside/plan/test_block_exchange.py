"""Blocks spread over ranks: every element reaches the owner once, and every holder gets it back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.layout.blocks import blocks_of
from samestep.layout.boxes import Cut, all_boxes, replicas
from samestep.layout.owners import busiest_lower_bound
from samestep.plan.block_exchange import ShardedSpec, block_box, plan_exchange
from samestep.rules.orthogonalize import orthogonalize_flops
from tests.soak import SOAK


def sharded(name, shape, mesh, cuts, splits=None, flatten=False):
    return ShardedSpec(
        name,
        tuple(shape),
        tuple(blocks_of(tuple(shape), splits, flatten)),
        tuple(all_boxes(tuple(shape), mesh, cuts)),
        tuple(replicas(mesh, cuts)),
    )


@st.composite
def cases(draw):
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    specs = []
    for index in range(draw(st.integers(1, 6))):
        splits = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
        stack = draw(st.sampled_from([(), (3,)]))
        shape = (*stack, sum(splits), draw(st.integers(1, 6)))
        cuts = [Cut(draw(st.sampled_from([None, *range(len(shape))]))) for _ in mesh]
        specs.append(sharded(f"p{index}", shape, mesh, cuts, splits))
    return specs, mesh


@given(cases(), st.integers(1, 200), st.sampled_from(["balanced", "cyclic"]))
def test_every_element_goes_to_the_owner_once_and_back_to_all_who_hold_it(case, size, owners):
    specs, mesh = case
    ranks = torch.Size(mesh).numel()
    plan = plan_exchange(specs, ranks, chunk_elements=size, owners=owners)
    seen = set()
    for chunk in plan.chunks:
        for route in chunk:
            spec = specs[route.param]
            assert (route.param, route.number) not in seen
            seen.add((route.param, route.number))
            arrived = torch.zeros(route.box.sizes, dtype=torch.int64)
            held = [torch.zeros(spec.shape, dtype=torch.int64) for _ in range(ranks)]
            for part in route.parts:
                assert part.in_param.sizes == part.in_block.sizes
                held[part.rank][part.in_param.slices] += 1
                if part.sent:
                    arrived[part.in_block.slices] += 1
            assert arrived.eq(1).all()
            for rank, box in enumerate(spec.boxes):
                expected = torch.zeros(spec.shape, dtype=torch.int64)
                expected[block_box(route.block, spec.shape).overlap(box).slices] = 1
                assert torch.equal(held[rank], expected)
    assert len(seen) == sum(len(spec.blocks) for spec in specs)


def test_copies_that_are_near_the_owner_are_sent():
    """Two replicas of two shards: traffic stays in the owner's replica."""
    specs = [sharded(f"m{i}", (8, 8), (2, 2), [Cut(None), Cut(0)]) for i in range(8)]
    plan = plan_exchange(specs, 4, chunk_elements=1)
    for chunk in plan.chunks:
        assert sorted(route.owner for route in chunk) == [0, 1, 2, 3]
        for route in chunk:
            senders = [part.rank for part in route.parts if part.sent]
            assert route.owner in senders
            assert {rank // 2 for rank in senders} == {route.owner // 2}
            assert [part.rank for part in route.parts] == [0, 1, 2, 3]


def test_whole_experts_stay_where_they_are():
    spec = sharded("experts", (8, 6, 4), (4,), [Cut(0)])
    plan = plan_exchange([spec], 4, chunk_elements=1)
    routes = [route for chunk in plan.chunks for route in chunk]
    assert not any(route.travels for route in routes)
    assert {route.number: route.owner for route in routes} == {i: i // 2 for i in range(8)}


MODELS = {
    "GPT-2 XL": [(4800, 1600), (1600, 1600), (6400, 1600), (1600, 6400)] * 48,
    "Llama-8B": [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096),
                 (14336, 4096), (4096, 14336)] * 32,
    "64 experts": [(2048, 2048)] * 4 * 16 + [(1408, 2048), (1408, 2048), (2048, 1408)] * 64 * 16,
}  # fmt: skip


@pytest.mark.parametrize("ranks", [8, 64, 256] if SOAK else [8, 64])
@pytest.mark.parametrize("model", MODELS)
def test_the_busiest_owner_is_near_the_bound(model, ranks):
    by_shape = {
        shape: sharded("", shape, (ranks,), [Cut(0)], (1600,) * 3 if shape[0] == 4800 else None)
        for shape in set(MODELS[model])
    }
    specs = [by_shape[shape]._replace(name=f"p{i}") for i, shape in enumerate(MODELS[model])]
    plan = plan_exchange(specs, ranks, chunk_elements=1 << 26)
    work = [0] * ranks
    flops = []
    for chunk in plan.chunks:
        for route in chunk:
            flops.append(orthogonalize_flops(route.block.rows, route.block.cols))
            work[route.owner] += flops[-1]
    assert max(work) <= 1.05 * busiest_lower_bound(flops, ranks)
