"""Holds the planners of buckets against exchanges between layouts.

`SAMESTEP_COMPARE_PLANS=1 pytest ...` does so for every plan that any test makes in its own process
or in forked ranks; `make soak` always does.
"""

from collections import Counter
from functools import wraps
from itertools import islice

from samestep.layout.boxes import Box
from samestep.plan import placement_plan
from samestep.plan.exchanges import Exchange
from samestep.plan.layouts import Holdings, Key, addends, copies
from samestep.plan.sharding import ShardingPlan

SOME = 64  # buckets of a plan that are compared: large plans have thousands


def watch_plans():
    """Compare every plan from here on, as soon as it is made."""
    for module, name, compare in (
        (placement_plan, "plan_sharding", compare_buckets),
        (placement_plan, "plan_flat", compare_buckets),
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
        boxes: dict[Key, list[tuple[Box, int]]] = {}
        for piece, rank in pieces:
            boxes.setdefault((piece.param, ""), []).append((_stretch(piece), rank))
        everywhere = {
            key: Holdings(addends(box, range(ranks)) for box, _ in own)
            for key, own in boxes.items()
        }
        owned = {
            key: Holdings(copies(box, [rank]) for box, rank in own) for key, own in boxes.items()
        }
        to_all = {
            key: Holdings(copies(box, range(ranks)) for box, _ in own) for key, own in boxes.items()
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
