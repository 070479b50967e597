"""Exchanges that autograd sees. torch has them without a public name, so they are here alone."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["all_to_all_single", "all_to_all_single_autograd", "gathered"]


def gathered(part: Tensor, mesh: DeviceMesh) -> Tensor:
    """The parts of all ranks side by side in the last dim; all ranks go on with the whole.

    A tensor of its own: FSDP2 warns of a module that gives a view, which DTensor would.
    """
    whole: Tensor = _Gathered.apply(part, mesh)  # type: ignore[no-untyped-call]
    return whole


class _Gathered(torch.autograd.Function):
    """Every rank knows the whole gradient, and keeps its part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(mesh.size())]
        dist.all_gather(parts, part, group=mesh.get_group())
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        own = grads[0].chunk(ctx.mesh.size(), dim=-1)[ctx.mesh.get_local_rank()]
        return own.contiguous(), None
