"""LoRA: a frozen linear layer W learns W + scale * B A, of which only A and B are trained.

    names = add_lora(model, ["*.attention.*", "*.mlp.*"], rank=8, alpha=16.0)

Layers are converted where they are, so that names, hooks and FSDP2 units stay: the factors of
`blocks.0.attention.q` are `blocks.0.attention.q.lora_A` (rank, in) and `.lora_B` (out, rank).

Both ways into a model that is spread over ranks:

- before FSDP2: `add_lora(model, ..., mesh=mesh)`, then `fully_shard(..., ignored_params=
  set(lora_parameters(model)))`;
- after it: `add_lora(model, ...)` sees in each layer's weight which ranks there are.

Tensor parallel comes first in both. The factor on the cut side of a layer is cut with it: B of a
column layer, A of a row layer. Factors are DTensors then, whole on every data rank. Their
gradients are summands of a mean (and of a sum over the model axis) until somebody needs them:
samestep's optimizers combine them once per step, and `combine_after_backward` after each backward,
for other optimizers.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn.functional import linear

from samestep.comm.meshes import own_box
from samestep.groups.param_groups import name_matches
from samestep.groups.routing import Elsewhere
from samestep.mesh import Mesh
from samestep.mesh.replicate_list import ShardRule
from samestep.shards.dtensor.gradients import combine, is_partial

FACTORS = ("lora_A", "lora_B")
MODEL = "model"  # the axis of tensor parallel


class LoRAError(ValueError):
    """Raised for layers that LoRA factors cannot be added to."""


class LoRALinear(nn.Linear):
    """A linear layer with LoRA factors; made by `add_lora`."""

    lora_A: nn.Parameter  # noqa: N815
    lora_B: nn.Parameter  # noqa: N815
    scale: float
    cut: int | None  # the dim of the weight that tensor parallel has cut
    grads: tuple[list[Placement], list[Placement]]  # of A and B, before they are combined

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        return super().forward(x) + self._learned(x)

    def _learned(self, x: Tensor) -> Tensor:
        """scale * B A x; in a row layer a partial sum, like the output of the weight."""
        a, b = (
            factor.to_local(grad_placements=grads) if isinstance(factor, DTensor) else factor
            for factor, grads in zip((self.lora_A, self.lora_B), self.grads, strict=True)
        )
        if not isinstance(x, DTensor):
            return self.scale * linear(linear(x, a), b)
        # Each rank of a column layer sees all inputs, and adds a part to their gradient.
        own = x.to_local(grad_placements=[Partial()] if self.cut == 0 else None)
        out = self.scale * linear(linear(own, a), b)
        placement = Shard(out.ndim - 1) if self.cut == 0 else Partial()
        return DTensor.from_local(out, x.device_mesh, [placement], run_check=False)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, lora_rank={self.lora_A.shape[0]}, scale={self.scale:g}"


def add_lora(
    model: nn.Module,
    patterns: Sequence[str],
    *,
    rank: int = 8,
    alpha: float = 16.0,
    mesh: Mesh | DeviceMesh | None = None,
    seed: int = 0,
    freeze: bool = True,
) -> list[str]:
    """Add LoRA factors to linear layers; returns the names of the layers.

    A is drawn by its name and `seed`, the same in every layout; B is zero, so that nothing changes
    at first. Every rank calls it; nothing is sent.

    Args:
        model: Or one part of a pipeline. After tensor parallel.
        patterns: Of module names, as in a shell.
        rank: Of the factors.
        alpha: The scale is alpha / rank.
        mesh: All ranks of this stage, for a model that FSDP2 does not have yet.
        seed: For A.
        freeze: Train the factors alone.
    """
    if rank < 1:
        raise LoRAError(f"LoRA: rank must be at least 1, got {rank}")
    chosen = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and any(name_matches(name, p) for p in patterns)
    ]
    known = [name for name, _ in chosen] + [
        f"{path}.{name}" if name else path
        for path, module in model.named_modules()
        if isinstance(module, Elsewhere)
        for name in module.linear_layers
    ]
    for pattern in patterns:
        if not any(name_matches(name, pattern) for name in known):
            raise LoRAError(f"{pattern!r} matches no linear layer of the model")
    for name, module in chosen:
        _check(name, module, mesh)
    if freeze:
        model.requires_grad_(False)
    for name, module in chosen:
        _convert(name, module, rank, alpha / rank, mesh, seed)
    return [name for name, _ in chosen]


def lora_layers(model: nn.Module) -> Iterator[tuple[str, LoRALinear]]:
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            yield name, module


def lora_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The factors, for `ignored_params` of FSDP2."""
    return [factor for _, layer in lora_layers(model) for factor in (layer.lora_A, layer.lora_B)]


def lora_shard_rules(model: nn.Module) -> tuple[ShardRule, ...]:
    """Rules that allow factors to be sharded like their layers."""
    why = "LoRALinear computes with the parts, and gradients of the whole factor are summed"
    return tuple(
        ShardRule(f"{name}.{FACTORS[1 - layer.cut]}", MODEL, layer.cut, why)
        for name, layer in lora_layers(model)
        if layer.cut is not None
    )


def adapters(model: nn.Module) -> nn.Module:
    """The factors as a module by their names, for `samestep.save` and `load`."""
    found = nn.Module()
    for name, layer in lora_layers(model):
        holder = found
        for part in name.split("."):
            if part not in holder._modules:
                holder.add_module(part, nn.Module())
            holder = holder.get_submodule(part)
        for factor in FACTORS:
            holder.register_parameter(factor, getattr(layer, factor))
    return found


def combine_after_backward(model: nn.Module) -> None:
    """Sum gradients of factors over ranks after every backward."""
    for factor in lora_parameters(model):
        if isinstance(factor, DTensor):
            # Before it is added to the gradients of other micro-batches, which are combined.
            factor.register_hook(partial(_combined, factor))  # type: ignore[no-untyped-call]


@torch.no_grad()
def merge_lora(model: nn.Module) -> None:
    """Add the factors to their weights, and restore plain layers. Collective."""
    for _, layer in list(lora_layers(model)):
        a, b = (
            factor.full_tensor() if isinstance(factor, DTensor) else factor
            for factor in (layer.lora_A, layer.lora_B)
        )
        learned, weight = layer.scale * (b @ a), layer.weight
        if isinstance(weight, DTensor):
            weight.to_local().add_(learned[own_box(weight).slices])
        else:
            weight.add_(learned)
        for name in FACTORS:
            delattr(layer, name)
        layer.__class__ = nn.Linear  # type: ignore[assignment]


def _check(name: str, module: nn.Linear, mesh: Mesh | DeviceMesh | None) -> None:
    if isinstance(module, LoRALinear):
        raise LoRAError(f"{name!r} has LoRA factors already: add them once")
    if type(module) is not nn.Linear:
        raise LoRAError(
            f"{name!r} is a {type(module).__name__}, and LoRA factors can only be added "
            "to nn.Linear; add them before fully_shard is called on the layer"
        )
    weight = module.weight
    if not isinstance(weight, DTensor):
        return
    axes = weight.device_mesh.mesh_dim_names or ()
    if axes == (MODEL,) and mesh is None and dist.get_world_size() > weight.device_mesh.size():
        raise LoRAError(
            f"{name!r} has a weight that is sharded over ranks, and which other ranks "
            "hold copies of it is unknown: pass mesh="
        )
    if MODEL in axes and _cut(weight) is None:
        raise LoRAError(
            f"{name!r} is replicated over the tensor parallel ranks, which may see "
            "different positions: add LoRA factors to column and row layers only"
        )


def _convert(
    name: str, module: nn.Linear, rank: int, scale: float, mesh: Mesh | DeviceMesh | None, seed: int
) -> None:
    weight = module.weight
    rows, columns = weight.shape
    generator = torch.Generator().manual_seed(crc32(name.encode()) + seed)
    a = (torch.rand(rank, columns, generator=generator) * 2 - 1) / math.sqrt(columns)
    a, b = a.to(weight.dtype), torch.zeros(rows, rank, dtype=weight.dtype)
    ranks = _ranks(weight, mesh)
    cut = _cut(weight) if isinstance(weight, DTensor) else None
    module.__class__ = LoRALinear
    assert isinstance(module, LoRALinear)
    module.scale, module.cut = scale, cut
    # B is cut by rows with the weight's rows, A by columns with its columns.
    cuts = (1 if cut == 1 else None, 0 if cut == 0 else None)
    summands = []
    for key, whole, own_cut in zip(FACTORS, (a, b), cuts, strict=True):
        factor: Tensor = whole.to(weight.device)
        grads: list[Placement] = []
        if ranks is not None:
            factor, grads = _spread(factor, ranks, own_cut, _batch_axes(ranks, mesh))
        module.register_parameter(key, nn.Parameter(factor))
        summands.append(grads)
    module.grads = (summands[0], summands[1])


def _spread(
    whole: Tensor, ranks: DeviceMesh, cut: int | None, batch_axes: Iterable[str]
) -> tuple[DTensor, list[Placement]]:
    """A factor as a DTensor, with the placement of its gradient."""
    placements: list[Placement] = []
    grads: list[Placement] = []
    for axis in ranks.mesh_dim_names or ("data",) * ranks.ndim:
        own = Shard(cut) if axis == MODEL and cut is not None else Replicate()
        placements.append(own)
        if axis == MODEL:
            grads.append(own if cut is not None else Partial())
        else:
            grads.append(Partial("avg") if axis in batch_axes else own)
    local = whole
    if cut is not None:
        of_model = ranks[MODEL]
        own_part = whole.chunk(of_model.size(), dim=cut)[of_model.get_local_rank()]
        local = own_part.clone(memory_format=torch.contiguous_format)  # a view would keep the whole
    spread = DTensor.from_local(local, ranks, placements, run_check=False)
    return spread, grads


def _ranks(weight: Tensor, mesh: Mesh | DeviceMesh | None) -> DeviceMesh | None:
    """Ranks that hold a factor, by axis; None for a plain tensor."""
    if isinstance(mesh, Mesh):
        axes = tuple(axis for axis in mesh.degrees.axes if axis != "pipe")
        return mesh.device_mesh[axes]
    if mesh is not None:
        return mesh
    return weight.device_mesh if isinstance(weight, DTensor) else None


def _batch_axes(ranks: DeviceMesh, mesh: Mesh | DeviceMesh | None) -> set[str]:
    """Mesh axes along which tokens differ."""
    axes = set(ranks.mesh_dim_names or ("data",)) - {MODEL}
    if isinstance(mesh, Mesh) and not mesh.degrees.ep_carries_data:
        axes.discard("expert")
    return axes


def _cut(weight: DTensor) -> int | None:
    """The dim that tensor parallel shards."""
    axes = weight.device_mesh.mesh_dim_names or ()
    placements = dict(zip(axes, weight.placements, strict=False))
    dim: int | None = getattr(placements.get(MODEL), "dim", None)
    return dim


def _combined(factor: DTensor, grad: Tensor) -> Tensor:
    return combine([(grad, factor.placements)])[0] if is_partial(grad) else grad
