"""Kernels on parts of blocks on a GPU; `tests/test_cuda_layouts.py` has them on two ranks."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import samestep
from tests.gpu import needs_gpu, no_host_wait

pytestmark = [needs_gpu, pytest.mark.own_process]

if torch.cuda.is_available():
    from tests.inside.kernels.part_cases import (
        small_tiles,  # noqa: F401
        test_a_parameter_that_was_edited_counts_more_than_its_master,  # noqa: F401
        test_momentum_of_parts,  # noqa: F401
        test_regions_are_moved,  # noqa: F401
        test_step_of_parts,  # noqa: F401
    )
    from tests.inside.kernels.test_cuda import model


@pytest.fixture
def one_rank(tmp_path):
    torch.cuda.set_device(0)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


def trained(net, steps=4, *, watched=False, **options):
    """With `watched`, no step but the first two may wait for the device."""
    optimizer = samestep.MuonAdamW(net, max_grad_norm=1.0, **options)
    for step in range(steps):
        generator = torch.Generator("cuda").manual_seed(step)
        for param in net.parameters():
            grad = torch.empty_like(param)
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            local.normal_(generator=generator)
            param.grad = grad
        torch.cuda.synchronize()
        with no_host_wait() if watched and step > 1 else nullcontext():
            optimizer.step()
    return [
        (param.to_local() if isinstance(param, DTensor) else param).detach()
        for param in net.parameters()
    ]


@pytest.mark.parametrize("options", [{}, {"bucket_size": 1 << 26}, {"momentum_form": "sum"}])
def test_one_rank_has_the_bits_of_plain_parameters_and_never_waits(one_rank, options):
    expected = trained(model(), **options)
    net = fully_shard(model(), mesh=one_rank)
    assert all(map(torch.equal, trained(net, watched=True, **options), expected))
