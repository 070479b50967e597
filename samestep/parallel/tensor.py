"""Tensor and sequence parallel, by torch's `parallelize_module`."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import pad

from samestep.mesh import Mesh
from samestep.mesh.degrees import nearest_multiples
from samestep.parallel.fused import cut_fused
from samestep.parallel.plan import Plan, PlanError
from samestep.tooling.warn import some

SEQUENCE = Shard(1)  # of (B, T, C)


class WholeInput(ParallelStyle):
    """Style of a branch: gathers its first argument from the sequence-parallel stream."""

    def __init__(self, stream: Placement) -> None:
        self._stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def whole(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            given = _spread(inputs[0], device_mesh, self._stream)
            return given.redistribute(device_mesh, [Replicate()]), *inputs[1:]

        # Not through distribute_module, which would also copy the parameters inside.
        module.register_forward_pre_hook(whole)
        return module


class Vocabulary(ColwiseParallel):
    """Style of an output head sharded by vocabulary, with whole logits on every rank.

    The last ranks may have fewer entries than others, or none: nothing is padded but what travels.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        entries = next(module.parameters()).shape[0]
        super()._apply(module, device_mesh)
        module.register_forward_hook(lambda _, __, part: gathered(part, device_mesh, entries))
        return module


def gathered(part: Tensor, mesh: DeviceMesh, length: int) -> Tensor:
    """Concatenate the last dim over ranks, with gradients for this rank's part.

    length: of the whole; the parts are as `torch.chunk` makes them.
    A tensor of its own: FSDP2 warns of a module that gives a view, which DTensor would.
    """
    whole: Tensor = _Gathered.apply(part, mesh, length)  # type: ignore[no-untyped-call]
    return whole


class _Gathered(torch.autograd.Function):
    """Autograd function whose backward keeps this rank's part of the gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, mesh: DeviceMesh, length: int) -> Tensor:
        most = -(-length // mesh.size())
        start = min(length, most * mesh.get_local_rank())
        ctx.own = slice(start, start + part.shape[-1])
        part = pad(part, (0, most - part.shape[-1])).contiguous()
        parts = [torch.empty_like(part) for _ in range(mesh.size())]
        dist.all_gather(parts, part, group=mesh.get_group())
        starts = range(0, length, most)  # of parts that are not empty
        found = zip(parts, starts, strict=False)
        return torch.cat([part[..., : length - start] for part, start in found], dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0][..., ctx.own].contiguous(), None, None


class CopiedModule(ParallelStyle):
    """A replicated module that takes and returns plain tensors.

    Ranks work on parts of their own (`own_part`; gradients of parameters are then parts of a sum,
    and are combined after backward), or all on the same.
    """

    def __init__(self, own_part: bool) -> None:
        # Which dim is cut makes no difference to what each position is turned into.
        self._given: Placement = Shard(0) if own_part else Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
            return _spread(inputs[0], mesh, self._given), *inputs[1:]

        def leave(_: nn.Module, output: Any, mesh: DeviceMesh) -> Tensor:
            found: Tensor = output.redistribute(mesh, [self._given]).to_local()
            return found

        hooks: Any = (enter, leave)  # torch types them as functions that return nothing
        return distribute_module(module, device_mesh, _copy_parameters, *hooks)


def parallelize(model: nn.Module, plan: Plan, mesh: Mesh) -> dict[str, int]:
    """Shard a model over the model axis; returns the number of hooks per module."""
    axis = mesh.axis("model")
    if axis is None:
        return {}
    styles = dict(_styles(model, plan, mesh))
    hooks = {}
    if plan.fused:
        cut_fused(model, plan, mesh)
    for name, style in styles.items():
        # All ranks have the same values, which was checked: nothing needs to be sent.
        parallelize_module(model.get_submodule(name), axis, style, src_data_rank=None)
        hooks[name] = {WholeInput: 1, Vocabulary: 3}.get(type(style), 2)
    if mesh.degrees.sequence_parallel:
        for name, module in plan.named(model, "embedding"):
            # Before torch's own hooks: what a module was given, not what they make of it.
            module.register_forward_pre_hook(partial(_look_at_positions, name, axis), prepend=True)
            hooks[name] += 1
    return hooks


def _look_at_positions(name: str, axis: DeviceMesh, _: nn.Module, inputs: tuple[Any, ...]) -> None:
    if inputs and inputs[0].dim() > 1:
        check_positions(inputs[0].shape[1], axis.size(), repr(name))


def check_positions(positions: int, ranks: int, where: str) -> None:
    """Raise unless sequence parallel ranks can divide the positions evenly."""
    if positions % ranks:
        sizes = " or ".join(map(str, nearest_multiples(ranks, positions)))
        raise PlanError(
            f"sequence parallel: {where} was given {positions} positions, which {ranks} "
            f"ranks of tensor parallel cannot share evenly: use sequences of {sizes} "
            "(pad them, with targets that the loss ignores), or leave "
            "sequence_parallel=True out"
        )


def _styles(model: nn.Module, plan: Plan, mesh: Mesh) -> Iterator[tuple[str, ParallelStyle]]:
    shared = mesh.degrees.sequence_parallel
    stream: Placement = SEQUENCE if shared else Replicate()
    styles = {
        # By channels: cut by vocabulary, every rank would make the whole gradient.
        "embedding": ColwiseParallel(output_layouts=stream),
        "branches": WholeInput(stream),
        "column": ColwiseParallel(),
        "row": RowwiseParallel(output_layouts=stream),
        "on_stream": CopiedModule(own_part=shared),
        "on_heads": CopiedModule(own_part=True),
        "head": Vocabulary(input_layouts=stream),
    }
    for part, style in styles.items():
        for name, _ in plan.named(model, part):
            yield name, style


def check_all_named(model: nn.Module) -> None:
    """Raise if the plan does not mention a parameter."""
    left = [name for name, param in model.named_parameters() if not isinstance(param, DTensor)]
    if left:
        raise PlanError(
            f"the plan does not mention parameters {some(left, 6)}: name their modules "
            "in the plan's column, fused, row, on_stream, on_heads, embedding, head or "
            "experts"
        )


def _spread(x: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    return (
        x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [placement], run_check=False)
    )


def _copy_parameters(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for key, param in module.named_parameters(recurse=False):
        copies = distribute_tensor(param.detach(), mesh, [Replicate()], src_data_rank=None)
        module.register_parameter(key, nn.Parameter(copies, requires_grad=param.requires_grad))
