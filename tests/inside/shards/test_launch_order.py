"""Collectives of reductions are launched in one order."""

from __future__ import annotations

import torch

from samestep.shards.replicated import reduction
from tests.ranks import run_forked
from tests.test_overlap import LAYERS, Net, build, loss_of


def test_collectives_are_issued_in_one_order_though_hooks_are_not():
    """Which buckets, and when, while ranks walk their layers in opposite directions."""

    def job(rank):
        issued = []
        real = reduction.add_up
        model = Net()
        opt = build(model, overlap_grad_reduce=True)

        def spy(transfer, *args, **kwargs):
            issued.append(("backward" if in_backward else "step", transfer.name))
            return real(transfer, *args, **kwargs)

        reduction.add_up = spy
        order = LAYERS if rank == 0 else LAYERS[::-1]
        in_backward = True
        loss_of(model, (torch.arange(6), order, 1)).backward()
        in_backward = False
        opt.step()
        assert len(issued) == len(opt.shared_parameters[0].plan.buckets)
        return issued

    first, second = run_forked(2, job)
    assert [name for _, name in first] == [name for _, name in second]
    for issued in (first, second):
        early = [name for when, name in issued if when == "backward"]
        assert len(early) >= 4, "reductions did not start inside backward"
