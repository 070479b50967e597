"""Tensor parallel for fused matrices, such as QKV or gate and up in one Linear.

Rows that are cut in equal parts from the top would give the first rank queries and no values. So
each part (`Plan.fused`) becomes a parameter of its own, a DTensor that is cut by itself: rank r has
[q_r; k_r; v_r] and multiplies once with them. Muon sees parts whole, each a block of its own.

    tp 2, 4 query heads, 2 key and value heads       tp 4
    rank 0: q0 q1 k0 v0                              rank 0: q0 k0 v0     rank 2: q2 k1 v1
    rank 1: q2 q3 k1 v1                              rank 1: q1 k0 v0     rank 3: q3 k1 v1

Where there are more ranks than key and value heads, neighbours have copies of a head. What each of
them finds is a summand of its gradient, which FSDP2 or the optimizer's step adds up.

To everybody else it is one matrix: state dicts and checkpoints have `qkv.weight`, and patterns and
`split_sizes` speak of it. The parameters are called `qkv.weight[0:64]` (`layout/fused_rows.py`).
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.nn.functional import linear

from samestep.comm.meshes import own_box, whole_tensor
from samestep.layout.fused_rows import FusedRows, are_apart
from samestep.mesh import Mesh
from samestep.mesh.build import model_axis_in_two
from samestep.parallel.plan import FusedPart, Plan, PlanError
from samestep.shards.dtensor.gradients import placed

KEYS = ("weight", "bias")
CUT_BY_PARTS = "FusedLinear computes with this rank's heads or rows of every part"


class PlacedPart(NamedTuple):
    """Rows of a fused matrix, with their sharding."""

    start: int
    stop: int
    mesh: DeviceMesh
    placements: list[Placement]
    grads: list[Placement]  # before summands are added up

    def key(self, of: str) -> str:
        """Parameter name of these rows of the weight or bias."""
        return str(FusedRows(of, self.start, self.stop))

    @property
    def own_rows(self) -> int:
        """The number of rows that a rank has."""
        ways = [self.mesh.size(axis) for axis, p in enumerate(self.placements) if p.is_shard()]
        return (self.stop - self.start) // (ways[0] if ways else 1)


class FusedLinear(nn.Linear):
    """A fused linear layer that is sharded part by part; made by `cut_fused`."""

    model_axis: DeviceMesh
    parts: tuple[PlacedPart, ...]
    has_bias: bool

    def forward(self, x: Tensor) -> Tensor:
        """Map whole inputs (..., in) to this rank's outputs of every part."""
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, self.model_axis, [Replicate()], run_check=False)
        if x.placements != (Replicate(),):
            x = x.redistribute(self.model_axis, [Replicate()])
        # Each rank sees all inputs, and adds a part to their gradient.
        own = x.to_local(grad_placements=[Partial()])
        return linear(own, self.weight, self.bias)

    @property
    def own_sizes(self) -> tuple[int, ...]:
        """The number of outputs of each part that this rank has."""
        return tuple(part.own_rows for part in self.parts)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """This rank's rows of all parts, (rows, in).

        A copy: what is written into it is lost. Load a state dict, or write into the parts.
        """
        return self._own("weight")

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        """This rank's part of the bias, (rows,), a copy."""
        return self._own("bias") if self.has_bias else None

    def _own(self, of: str) -> Tensor:
        found = []
        for part in self.parts:
            param: Any = self._parameters[part.key(of)]
            # Outside of forward FSDP2 has axes of its own there, and nobody wants a gradient.
            grads = part.grads if len(param.placements) == len(part.grads) else None
            found.append(param.to_local(grad_placements=grads))
        return torch.cat(found)

    def reset_parameters(self) -> None:
        """Raise: random values per rank would differ from those of one process."""
        raise RuntimeError(
            "reset_parameters() cannot initialize a fused layer that is sharded over "
            "the model axis: initialize the model before the plan is applied, or load "
            "a state dict"
        )

    def extra_repr(self) -> str:
        parts = ", ".join(f"[{part.start}:{part.stop}]" for part in self.parts)
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.has_bias}, parts={parts}"
        )


def own_sizes(layer: nn.Module, sizes: Sequence[int]) -> list[int]:
    """Output sizes of a fused layer on this rank, from the whole sizes."""
    return list(layer.own_sizes if isinstance(layer, FusedLinear) else sizes)


def check_fused(model: nn.Module, plan: Plan, tp: int) -> None:
    """Raise unless ranks can share the heads and rows of all fused matrices."""
    for name, _, parts in plan.fused_layers(model):
        misfit = _misfit(parts, tp)
        if misfit is not None:
            fits = [str(n) for n in range(1, tp) if _misfit(parts, n) is None]
            what = f"{misfit.heads} heads" if misfit.heads else f"{misfit.rows} rows"
            raise PlanError(
                f"fused: {name!r} has a part of {what}, which {tp} ranks of the model "
                f"axis cannot share evenly: use tp={' or '.join(fits[-2:])}"
            )


def _misfit(parts: Sequence[FusedPart], tp: int) -> FusedPart | None:
    """The first part that this number of ranks cannot divide.

    Ranks that share a head have other queries each: of most heads everybody has its own.
    """
    most = max(part.heads for part in parts)
    for part in parts:
        shared = 0 < part.heads < most and tp % part.heads == 0
        if (part.heads or part.rows) % tp and not shared:
            return part
    return None


def cut_fused(model: nn.Module, plan: Plan, mesh: Mesh) -> None:
    """Shard the fused matrices of a plan over the model axis. Collective."""
    axis = mesh.axis("model")
    assert axis is not None
    tp = axis.size()
    # By the plan, not by what is in this stage: all ranks make these groups.
    heads = {part.heads for parts in plan.fused.values() for part in parts}
    sets = {n: model_axis_in_two(mesh, n) for n in sorted(heads) if 1 < n < tp and tp % n == 0}
    for name, module, parts in list(plan.fused_layers(model)):
        if type(module) is not nn.Linear:
            raise PlanError(f"fused: {name!r} is a {type(module).__name__}, not a plain nn.Linear")
        stops = list(accumulate(part.rows for part in parts))
        placed = [
            PlacedPart(stop - part.rows, stop, *_placement(part, axis, sets))
            for part, stop in zip(parts, stops, strict=True)
        ]
        _convert(module, axis, tuple(placed))


def _placement(
    part: FusedPart, axis: DeviceMesh, sets: Mapping[int, DeviceMesh]
) -> tuple[DeviceMesh, list[Placement], list[Placement]]:
    """Sharding of a part, and the placement of its gradient."""
    if not part.heads or part.heads % axis.size() == 0:
        return axis, [Shard(0)], [Shard(0)]
    if part.heads == 1:
        return axis, [Replicate()], [Partial()]
    return sets[part.heads], [Shard(0), Replicate()], [Shard(0), Partial()]


def _convert(module: nn.Linear, axis: DeviceMesh, parts: tuple[PlacedPart, ...]) -> None:
    given = {key: getattr(module, key) for key in KEYS}
    for key in KEYS:
        delattr(module, key)
    module.__class__ = FusedLinear
    assert isinstance(module, FusedLinear)
    module.model_axis, module.parts = axis, parts
    module.has_bias = given["bias"] is not None
    for key, whole in given.items():
        for part in parts if whole is not None else ():
            rows = whole.detach()[part.start : part.stop].clone()  # a view would keep the whole
            own = distribute_tensor(rows, part.mesh, part.placements, src_data_rank=None)
            param = nn.Parameter(own, requires_grad=whole.requires_grad)
            module.register_parameter(part.key(key), param)
    module.register_state_dict_post_hook(_join)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(_divide)  # type: ignore[no-untyped-call]


# --- state dicts ----------------------------------------------------------------------------------


def _join(module: Any, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """Replace the parts in a state dict by whole tensors. Collective."""
    if are_apart():
        return
    for key in KEYS:
        parts = [state_dict.pop(prefix + part.key(key), None) for part in module.parts]
        if all(part is not None for part in parts):
            state_dict[prefix + key] = torch.cat([whole_tensor(part.detach()) for part in parts])


def _divide(
    module: Any,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Replace whole tensors in a state dict by this rank's parts."""
    for key in KEYS:
        whole = state_dict.pop(prefix + key, None)
        if whole is None:
            continue
        wanted = (module.out_features, *((module.in_features,) if key == "weight" else ()))
        if tuple(whole.shape) != wanted or (key == "bias" and not module.has_bias):
            errors.append(
                f"size mismatch for {prefix}{key}: {tuple(whole.shape)} is given, and the fused "
                f"layer has {wanted if key == 'weight' or module.has_bias else 'no bias'}"
            )
            continue
        if isinstance(whole, DTensor):
            whole = whole_tensor(whole)
        for part in module.parts:
            param = module._parameters[part.key(key)]
            rows = whole[part.start : part.stop][own_box(param).slices]
            own = rows.to(param.device).contiguous()
            state_dict[prefix + part.key(key)] = placed(own, param, param.placements)
