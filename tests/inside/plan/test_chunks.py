"""Blocks spread over ranks: every element reaches the owner once, and every holder gets it back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.layout.blocks import blocks_of
from samestep.layout.boxes import Cut, all_boxes, replicas
from samestep.layout.owners import busiest_lower_bound
from samestep.plan.chunks import (
    OF_WHOLE,
    block_box,
    blocks_to_all,
    blocks_to_owners,
    chunk_of,
)
from samestep.plan.layouts import RankBoxes
from samestep.plan.sharding import ParamSpec
from samestep.rules.orthogonalize import orthogonalize_flops
from tests.soak import SOAK, twin


def sharded(name, shape, mesh, cuts, splits=None, flatten=False):
    """A parameter, and what ranks hold of it."""
    shape = tuple(shape)
    blocks = tuple(blocks_of(shape, splits, flatten))
    spec = ParamSpec(name, shape, "torch.float32", 0, "muon", blocks)
    return spec, RankBoxes(tuple(all_boxes(shape, mesh, cuts)), tuple(replicas(mesh, cuts)))


def plan_of(sharded, ranks, **options):
    return blocks_to_owners(*map(list, zip(*sharded, strict=True)), ranks, **options)


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


def chunks_of(plan, ranks, extra=0, gives_back=True):
    """Of a plan, with so many elements that belong to all of a block, in float64."""
    dtypes = {"dtype": torch.float32, "wide": torch.float64}
    return [
        chunk_of(n, blocks, [extra] * len(blocks), ranks, gives_back=gives_back, **dtypes)
        for n, blocks in enumerate(plan)
    ]


@twin
@given(cases(), st.integers(1, 200), st.sampled_from(["balanced", "cyclic", None]))
def test_every_element_goes_to_the_owner_once_and_back_to_all_who_hold_it(case, size, owners):
    specs, mesh = case
    ranks, gives_back = torch.Size(mesh).numel(), owners is not None
    plan = blocks_to_all(*map(list, zip(*specs, strict=True)), ranks, chunk_elements=size)
    if gives_back:
        plan = plan_of(specs, ranks, chunk_elements=size, owners=owners)
    seen = set()
    for chunk in chunks_of(plan, ranks, gives_back=gives_back):
        for place, planned in enumerate(chunk.blocks):
            spec, of_ranks = specs[planned.param]
            assert planned.key not in seen
            seen.add(planned.key)
            assert len(planned.owners) == (1 if gives_back else ranks)
            for owner in planned.owners:
                arrived = torch.zeros(planned.box.sizes, dtype=torch.int64)
                for hop in chunk.collection.hops_to(owner):
                    if hop.key == (place, ""):
                        arrived[hop.box.slices] += 1
                assert arrived.eq(1).all()
            for rank, box in enumerate(of_ranks.boxes):
                held = torch.zeros(spec.shape, dtype=torch.int64)
                for hop in chunk.giving_back.hops_to(rank) if gives_back else ():
                    if hop.key == (place, ""):
                        held[hop.box.shifted(planned.box).slices] += 1
                expected = torch.zeros(spec.shape, dtype=torch.int64)
                expected[block_box(planned.block, spec.shape).overlap(box).slices] = 1
                assert torch.equal(held, expected) or not gives_back
                mine = planned.held.box_of(rank)
                assert (mine.numel if mine else 0) == expected.sum()
    assert len(seen) == sum(len(spec.blocks) for spec, _ in specs)


@given(cases(), st.integers(0, 3))
def test_what_belongs_to_a_whole_block_goes_to_all_ranks(case, extra):
    specs, mesh = case
    ranks = torch.Size(mesh).numel()
    plan = plan_of(specs, ranks, chunk_elements=50)
    for chunk in chunks_of(plan, ranks, extra):
        for rank in range(ranks):
            got = [h for h in chunk.giving_back.hops_to(rank) if h.key[1] == OF_WHOLE]
            assert all(hop.box.sizes == (2 * extra,) for hop in got)  # of float64 in float32
            owners = [
                (place, *planned.owners) for place, planned in enumerate(chunk.blocks) if extra
            ]
            assert sorted((hop.key[0], hop.source) for hop in got) == owners
            assert chunk.collection.transfer.sizes[rank] == sum(
                chunk.collection.packed_from(rank).sizes
            )
            assert chunk.giving_back.transfer.incoming[rank] == sum(
                chunk.giving_back.packed_to(rank).sizes
            )


def test_copies_that_are_near_the_owner_are_sent():
    """Two replicas of two shards: traffic stays in the owner's replica."""
    specs = [sharded(f"m{i}", (8, 8), (2, 2), [Cut(None), Cut(0)]) for i in range(8)]
    plan = plan_of(specs, 4, chunk_elements=1)
    for chunk in chunks_of(plan, 4):
        assert sorted(owner for planned in chunk.blocks for owner in planned.owners) == [0, 1, 2, 3]
        for place, planned in enumerate(chunk.blocks):
            (owner,) = planned.owners
            senders = chunk.collection.givers((place, ""), owner)
            assert owner in senders
            assert {rank // 2 for rank in senders} == {owner // 2}
            assert sorted(planned.held.sizes) == [0, 1, 2, 3]


def test_an_owner_that_holds_nothing_hears_the_ranks_of_its_copy():
    """Of a matrix of one row two ranks have copies, and the others have no shard of it."""
    (planned,) = plan_of([sharded("m", (1, 8), (2, 2), [Cut(None), Cut(0)])], 4, chunk_elements=1)[
        0
    ]
    planned = planned._replace(owners=(3,))
    (chunk,) = chunks_of([(planned,)], 4)
    assert chunk.collection.givers((0, ""), 3) == [2]


def test_whole_experts_stay_where_they_are():
    spec = sharded("experts", (8, 6, 4), (4,), [Cut(0)])
    plan = plan_of([spec], 4, chunk_elements=1)
    chunks = chunks_of(plan, 4)
    assert all(chunk.collection.is_silent and chunk.giving_back.is_silent for chunk in chunks)
    owners = {planned.number: planned.owners for chunk in chunks for planned in chunk.blocks}
    assert owners == {i: (i // 2,) for i in range(8)}


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
    specs = [by_shape[shape] for shape in MODELS[model]]
    plan = plan_of(specs, ranks, chunk_elements=1 << 26)
    work = [0] * ranks
    flops = []
    for chunk in plan:
        for planned in chunk:
            flops.append(orthogonalize_flops(planned.block.rows, planned.block.cols))
            work[planned.owners[0]] += flops[-1]
    assert max(work) <= 1.05 * busiest_lower_bound(flops, ranks)
