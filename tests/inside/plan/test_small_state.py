"""Plans of state in 8 bits."""

from __future__ import annotations

import torch

from samestep.plan.flat import plan_flat
from samestep.plan.sharding import ParamSpec, plan_sharding
from samestep.rules.state import Stored, StoredTensors


def test_slices_are_cut_between_blocks():
    scales = StoredTensors(exp_avg=Stored(torch.int8, 1), exp_avg_scale=Stored(torch.float32, 64))
    specs = [
        ParamSpec("a", (37, 64), "torch.float32", 0, "adamw", None, stored=scales),
        ParamSpec("b", (11, 7), "torch.float32", 0, "adamw", None),
        ParamSpec("c", (5, 192), "torch.float32", 0, "adamw", None, stored=scales),
    ]
    for ranks in (2, 3, 5):
        plans = [
            plan_sharding(specs, ranks, crossover=1, bucket_elements=700),
            plan_flat(specs, ranks, bucket_elements=700),
        ]
        for plan in plans:
            pieces = [piece for rank in range(ranks) for piece in plan.owned(rank)]
            assert all(p.start % 64 == p.stop % 64 == 0 for p in pieces if p.param != 1)
            for index, spec in enumerate(specs):
                own = sorted(piece for piece in pieces if piece.param == index)
                ends = [0, *(piece.stop for piece in own)]
                assert [piece.start for piece in own] == ends[:-1]
                assert ends[-1] == spec.numel
        assert len([p for p in pieces if p.param != 1]) > 2  # some are cut
