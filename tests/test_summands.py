"""Gradients of DTensors of which every rank has a summand, and of which a rank may have none."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import samestep
from tests.ranks import run_cases, run_forked
from tests.soak import twin

SHAPES = {"norm": (6,), "matrix": (4, 6), "other": (8, 6), "unused": (3, 2)}


def placed(name, mesh, local, kind):
    shape = torch.Size(SHAPES[name])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [kind], run_check=False, shape=shape, stride=stride)


def whole(name, step, rank=0):
    seed = 1000 + 100 * step + 10 * rank + list(SHAPES).index(name)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SHAPES[name], generator=generator)


def build():
    """Copies on every rank, but for one that is cut."""
    mesh = init_device_mesh("cpu", (2,))
    params = {}
    for name in SHAPES:
        value, kind = whole(name, -1), Replicate()
        if name == "other":
            value, kind = value.chunk(2)[mesh.get_rank()].clone(), Shard(0)
        params[name] = nn.Parameter(placed(name, mesh, value, kind))
    return mesh, params, samestep.MuonAdamW(list(params.items()), lr=0.1, max_grad_norm=1.0)


def give_gradients(mesh, params, rank, step, lacks, operation):
    """A summand of each on every rank; of rank 1 in a step of `lacks` zeros, or none if False."""
    for name, param in params.items():
        if name == "unused" or (name == "norm" and step == 1):
            continue
        grad, kind = whole(name, step, rank), Partial(operation)
        if name == "other":
            grad, kind = grad.chunk(2)[rank].clone(), Shard(0)
        elif rank == 1 and step in lacks:
            if not lacks[step]:
                continue
            grad = torch.zeros_like(grad)
        param.grad = placed(name, mesh, grad, kind)


@twin
def test_a_rank_without_a_summand():
    """The same bits as with zeros there; in the first step as well, when nobody has told before."""

    def job(rank, operation):
        found = []
        for zeros in (True, False):
            mesh, params, opt = build()
            for step in range(4):
                lacks = {0: zeros, 2: zeros}
                give_gradients(mesh, params, rank, step, lacks, operation)
                opt.step()
                opt.zero_grad()
            found.append({name: param.to_local().clone() for name, param in params.items()})
        return found

    for _, ranks in run_cases(2, ["sum", "avg"], job):
        for explicit, lacking in ranks:
            assert all(torch.equal(explicit[name], lacking[name]) for name in SHAPES)
            assert not torch.equal(lacking["matrix"], whole("matrix", -1))
        (_, first), (_, second) = ranks
        assert all(torch.equal(first[name], second[name]) for name in SHAPES if name != "other")


def test_whole_gradient_of_a_rank_without_a_summand():
    """And the step after it uses the sum on every rank."""

    def job(rank):
        mesh, params, opt = build()
        give_gradients(mesh, params, rank, 0, {0: False}, "sum")
        found = opt.full_gradient("matrix"), opt.full_gradient("unused")
        opt.step()
        return *found, params["matrix"].to_local().clone()

    (gradient, nothing, first), (other, _, second) = run_forked(2, job)
    assert nothing is None
    assert torch.equal(gradient, whole("matrix", 0, 0))
    assert torch.equal(other, gradient)
    assert torch.equal(first, second)


def test_summands_that_cannot_be_added_up():
    """On one rank: all raise, and nothing has changed."""

    def job(rank):
        mesh, params, opt = build()
        give_gradients(mesh, params, rank, 0, {}, "max" if rank else "sum")
        try:
            opt.step()
        except RuntimeError as error:
            return str(error), params["norm"].to_local().clone()
        return None

    for text, value in run_forked(2, job):
        assert "'norm'" in text
        assert "rank 1" in text
        assert torch.equal(value, whole("norm", -1))
