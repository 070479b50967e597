"""Holds the planners of buckets and of blocks against exchanges between layouts.

`SAMESTEP_COMPARE_PLANS=1 pytest ...` does so for every plan that any test makes in its own process
or in forked ranks; `make soak` always does.
"""

from collections import Counter
from functools import wraps
from itertools import islice

from samestep.layout.boxes import Box
from samestep.placements.parts import block_exchange
from samestep.placements.whole import planned
from samestep.plan.block_exchange import ExchangePlan, from_owners, to_owners
from samestep.plan.exchanges import Exchange
from samestep.plan.layouts import Holding, addends, by_box, copies
from samestep.plan.sharding import ShardingPlan

SOME = 64  # buckets, chunks and ranks of a plan that are compared: large plans have thousands


def watch_plans():
    """Compare every plan from here on, as soon as it is made."""
    for module, name, compare in (
        (planned, "plan_sharding", compare_buckets),
        (planned, "plan_flat", compare_buckets),
        (block_exchange, "plan_exchange", compare_blocks),
        (block_exchange, "plan_gather", compare_blocks),
    ):
        setattr(module, name, _compared(getattr(module, name), compare))


def _compared(planner, compare):
    @wraps(planner)
    def plan(specs, ranks, *args, **options):
        made = planner(specs, ranks, *args, **options)
        compare(made, ranks)
        return made

    return plan


def compare_buckets(plan: ShardingPlan, ranks: int) -> None:
    """Gradients go from addends everywhere to the owners of pieces; values go back to everyone.

    Gaps of flat buffers travel as well, and belong to no parameter.
    """
    for bucket in islice(plan.buckets, SOME):
        if bucket.replicated:
            continue
        pieces = [(p, rank) for rank, segment in bucket.filled for p in segment.pieces]
        boxes: dict[tuple[int, str], list[tuple[Box, int]]] = {}
        for piece, rank in pieces:
            boxes.setdefault((piece.param, ""), []).append((_stretch(piece), rank))
        everywhere = {
            key: tuple(addends(box, range(ranks)) for box, _ in own) for key, own in boxes.items()
        }
        owned = {key: tuple(copies(box, [rank]) for box, rank in own) for key, own in boxes.items()}
        to_all = {
            key: tuple(copies(box, range(ranks)) for box, _ in own) for key, own in boxes.items()
        }
        reduction = Exchange("reduction", everywhere, owned, ranks)
        gather = Exchange("gather", owned, to_all, ranks)
        assert gather.is_gather
        of_rank = Counter[int]()
        for piece, rank in pieces:
            of_rank[rank] += piece.size
        assert list(gather.segments) == [of_rank[rank] for rank in range(ranks)]
        for rank in sorted({0, 1, ranks // 2, ranks - 1} & set(range(ranks))):
            assert reduction.elements_sent(rank) == sum(of_rank.values()) - of_rank[rank]


def _stretch(piece):
    return Box((piece.start,), (piece.size,))


def compare_blocks(plan: ExchangePlan, ranks: int) -> None:
    """Parts of blocks go to the owner, and the results back to whoever holds a part."""
    for chunk in islice(plan.chunks, SOME):
        by_block: dict[tuple[int, str], list] = {}
        for route in chunk:
            by_block.setdefault((route.param, str(route.number)), []).append(route)
        source = {
            key: by_box((part.rank, part.in_param) for part in routes[0].parts)
            for key, routes in by_block.items()
        }
        blocks = {
            key: (copies(routes[0].box, sorted(r.owner for r in routes)),)
            for key, routes in by_block.items()
        }
        to = Exchange("collection", source, _parts_of_blocks(source, blocks), ranks)
        gives_back = all(len(routes) == 1 for routes in by_block.values())
        back = Exchange("return", blocks, source, ranks)
        for rank in islice(range(ranks), SOME):
            assert _hops(to.hops_to(rank), rank) == _items(chunk, to_owners(chunk, rank)[1], rank)
            if gives_back:
                got = from_owners(chunk, rank, ranks, to_all=False)[1]
                assert _hops(back.hops_to(rank), rank) == _items(chunk, got, rank)


def _parts_of_blocks(source, blocks):
    """Where blocks are whole, cut as their parts are, so that hops are these parts."""
    found: dict[tuple[int, str], tuple[Holding, ...]] = {}
    for key, (block,) in blocks.items():
        found[key] = tuple(Holding(part.box, block.sources) for part in source[key])
    return found


def _hops(hops, rank):
    """What a rank gets from others. Who of several sends a copy of it is not compared."""
    return Counter((hop.key, hop.box) for hop in hops if hop.source != rank)


def _items(chunk, items, rank):
    """The same as the planner of blocks has it."""
    return Counter(
        ((chunk[item.route].param, str(chunk[item.route].number)), item.part.in_param)
        for item in items
        if item.part is not None and item.part.in_param.numel and item.rank != rank
    )
