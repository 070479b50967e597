"""Applies a plan in one XLA program, as partition specs.

With SPMD a tensor is whole to the program, and `mark_sharding` tells which device holds which part.
So nothing of a model changes, and no gradient needs to be combined: its values are those of one
process wherever things lie. Each device holds the part that the rank in its place would hold:

| of the plan | model | data, and expert where it brings tokens |
|---|---|---|
| embedding, row | columns | rows |
| head, column, fused | rows | rows, inside of those |
| experts | rows or columns of each | experts, inside of those that the expert axis gives |
| on_stream, on_heads, LoRA | whole | rows; LoRA whole |

What is wrong with a layout does not show in values here, only in memory and time. Hence the
contract: what tensors say of themselves is read back and held against the plan and its rules.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import samestep
from samestep.mesh import Degrees, SpmdMesh
from samestep.mesh.predicates import predicates, trace_program
from samestep.mesh.replicate_list import CUT_AXES, ReplicateList, ShardRule
from samestep.mesh.spmd import Spec
from samestep.parallel.apply import (
    check_sizes,
    hooks_of,
    refuse_experts_in_branches,
    refuse_stale,
    shard_rules,
)
from samestep.parallel.experts import ProgramPlaces, TokenDispatch
from samestep.parallel.fused import check_fused
from samestep.parallel.lora import FACTORS
from samestep.parallel.pipeline import Loss, evaluating
from samestep.parallel.plan import Plan, PlanError
from samestep.parallel.tensor import check_positions
from samestep.tooling.warn import some
from samestep.xla.tiling import annotate, laid, lay, stay, tiling_of


class PartitionError(ValueError):
    """Raised for parameters whose sharding differs from the plan; the text names all."""


def partition_specs(
    model: nn.Module, plan: Plan, degrees: Degrees, *, fsdp: bool = True
) -> dict[str, Spec]:
    """Partition spec of every parameter, matching the shards of ranks.

    Raises where `samestep.parallel.apply` does: for sizes that cannot be shared evenly, and
    parameters that the plan does not name.
    """
    plan.check(model)
    rules = shard_rules(model, plan)
    check_fused(model, plan, degrees.tp)
    _check_fused_rows(model, plan, degrees.tp)
    if degrees.tp > 1:
        refuse_experts_in_branches(model, plan)
        _check_all_named(model, plan)
    check_sizes(model, plan, rules, degrees)
    stacks = {name for name, _ in plan.stacks(model)}
    dims = {(rule.pattern, rule.axis): rule.dim for rule in rules}
    specs = {}
    for name, param in model.named_parameters():
        is_factor = name.rpartition(".")[2] in FACTORS
        spec: list[list[str]] = [[] for _ in param.shape]
        for axis in CUT_AXES:
            ranks = degrees.expert_tp if name in stacks and axis == "model" else degrees.sizes[axis]
            dim = dims.get((name, axis))
            if dim is not None and ranks > 1 and not is_factor:
                spec[dim].append(axis)
        if fsdp and spec and not is_factor:
            spec[0] += data_share(degrees, is_stack=name in stacks)
        specs[name] = tuple(map(tuple, spec))
    return specs


def _check_fused_rows(model: nn.Module, plan: Plan, tp: int) -> None:
    """Raise if an even division of fused rows would split a head."""
    for name, _, parts in plan.fused_layers(model):
        heads = sum(part.heads for part in parts)
        if all(part.heads for part in parts) and heads % tp:
            counts = " + ".join(str(part.heads) for part in parts)
            raise PlanError(
                f"fused: {name!r} has {counts} = {heads} heads, which {tp} devices of "
                "the model axis cannot share evenly: use another tp, or a separate "
                "weight for each projection"
            )


def _check_all_named(model: nn.Module, plan: Plan) -> None:
    """Raise if the plan does not mention a parameter."""
    named = set(plan.modules(model)) | {name for name, _ in plan.expert_modules(model)}
    left = [name for name, _ in model.named_parameters() if name.rpartition(".")[0] not in named]
    if left:
        raise PlanError(
            f"the plan does not mention parameters {some(left, 6)}: name their modules "
            "in the plan's column, fused, row, on_stream, on_heads, embedding, head or "
            "experts"
        )


def data_share(degrees: Degrees, *, is_stack: bool) -> tuple[str, ...]:
    """Mesh axes over which FSDP2 would shard a parameter."""
    axes = ("data",) if is_stack or not degrees.ep_carries_data else ("data", "expert")
    return tuple(axis for axis in axes if degrees.sizes[axis] > 1)


def batch_axes(degrees: Degrees) -> tuple[str, ...]:
    """Mesh axes along which sequences differ."""
    axes = ("replicate", "data", *(("expert",) if degrees.ep_carries_data else ()))
    return tuple(axis for axis in axes if degrees.sizes[axis] > 1)


def lay_out(model: nn.Module, plan: Plan, mesh: SpmdMesh, *, fsdp: bool = True) -> dict[str, Spec]:
    """Shard every parameter and buffer of a model; returns the specs.

    The first dim of what layers give each other lies along the batch; tensor parallel cuts inside
    of branches, and sequence parallel between them.
    """
    refuse_stale(hooks_of(model), plan, model)
    specs = partition_specs(model, plan, mesh.degrees, fsdp=fsdp)
    for name, param in model.named_parameters():
        if param.device.type != "xla":
            raise PartitionError(
                f"{name!r} is on {param.device}, and the mesh is of XLA devices: move "
                'the model there (model.to("xla")), or use samestep.mesh.build for a '
                "mesh of ranks"
            )
    for name, param in model.named_parameters():
        lay(param, mesh.tiling(specs[name]))
    for buffer in model.buffers():
        lay(buffer, mesh.tiling(((),) * buffer.ndim))
    _lay_values(model, plan, mesh)
    return specs


def _lay_values(model: nn.Module, plan: Plan, mesh: SpmdMesh) -> None:
    """Add hooks that shard values between modules."""
    degrees = mesh.degrees
    batch, model_axis = batch_axes(degrees), ("model",) if degrees.tp > 1 else ()
    stream: Spec = (batch, model_axis if degrees.sequence_parallel else (), ())
    of_parts: dict[str, Spec] = {
        "embedding": stream,
        "row": stream,
        "on_stream": stream,
        "column": (batch, (), model_axis),
    }
    for part, spec in of_parts.items():
        for _, module in plan.named(model, part):
            module.register_forward_hook(_output_lies(mesh, spec))
    for _, module in plan.named(model, "branches"):
        module.register_forward_pre_hook(_input_lies(mesh, (batch, (), ())))
    shares_tokens = degrees.tp > degrees.expert_tp
    groups = (*batch, *(model_axis if shares_tokens else ()))
    experts = ("expert",) if degrees.ep > 1 else ()
    places = ProgramPlaces(
        groups=degrees.batch_ranks * (degrees.tp if shares_tokens else 1),
        tokens=mesh.tiling((groups, (), ())),
        rows=mesh.tiling((experts, tuple(a for a in groups if a != "expert"), (), ())),
    )
    for module in model.modules():
        if isinstance(module, TokenDispatch):
            module.program = places


Hook = Callable[..., Any]


def _output_lies(mesh: SpmdMesh, spec: Spec) -> Hook:
    """Shard an output (B, T, C); others are left alone."""
    tiling = mesh.tiling(spec)
    return lambda _, __, out: laid(out, tiling) if out.ndim == len(spec) else out


def _input_lies(mesh: SpmdMesh, spec: Spec) -> Hook:
    tiling = mesh.tiling(spec)
    return lambda _, inputs: (laid(inputs[0], tiling), *inputs[1:])


# --- what tensors say of themselves ---------------------------------------------------------------


def check_layout(model: nn.Module, plan: Plan, mesh: SpmdMesh, specs: Mapping[str, Spec]) -> None:
    """Raise unless parameters are sharded as plan, replicate list and specs say.

    Raises:
        ReplicateListError: Something is cut over model or expert that no rule allows.
        PartitionError: Something lies otherwise than its spec.
    """
    found = {name: _spec_of(param, mesh) for name, param in model.named_parameters()}
    if problems := [
        f"{name!r} lies as {tiling_of(param)}, which is not along the axes of {mesh.name}"
        for name, param in model.named_parameters()
        if found[name] is None
    ]:
        raise PartitionError("; ".join(problems))
    stacks = {name for name, _ in plan.stacks(model)}
    rules: tuple[ShardRule, ...] = (*shard_rules(model, plan), *plan.rules)
    ReplicateList(rules).check(
        model, cuts_of=lambda name, param: _cuts(param, mesh, is_stack=name in stacks)
    )
    if problems := [
        f"{name!r} lies as {spec}, and the plan says {specs[name]}"
        for name, spec in found.items()
        if spec != specs[name]
    ]:
        raise PartitionError("; ".join(problems))


def observed(model: nn.Module, plan: Plan, mesh: SpmdMesh) -> dict[str, Any]:
    """Facts as in `samestep.mesh.predicates`, read from the model."""
    stacks = {name for name, _ in plan.stacks(model)}
    cut: set[str] = set()
    of_stacks: set[str] = set()
    is_shared = False
    for name, param in model.named_parameters():
        axes = {axis for axis, _ in _cuts(param, mesh, is_stack=name in stacks)}
        cut |= axes
        of_stacks |= axes if name in stacks else set()
        is_shared |= sum(map(len, _spec_of(param, mesh) or ())) > len(axes)
    seen: dict[str, Any] = {"tensor_parallel_active": "model" in cut, "data_sharded": is_shared}
    places = [module.program for module in model.modules() if isinstance(module, TokenDispatch)]
    if places:
        seen["expert_parallel_active"] = "expert" in of_stacks
        seen["expert_lane"] = all(each is not None and _is_lane(each, mesh) for each in places)
        seen["expert_tensor_parallel_active"] = "model" in of_stacks
    return seen


def _is_lane(places: ProgramPlaces, mesh: SpmdMesh) -> bool:
    """Whether rows travel over the expert axis."""
    specs = mesh.spec_of(places.tokens), mesh.spec_of(places.rows)
    return all(spec is not None and "expert" in spec[0] for spec in specs)


def _spec_of(param: Tensor, mesh: SpmdMesh) -> Spec | None:
    """Mesh axes of the dims of a parameter; None if it follows no axis."""
    tiling = tiling_of(param)
    return ((),) * param.ndim if tiling is None else mesh.spec_of(tiling)


def _cuts(param: Tensor, mesh: SpmdMesh, *, is_stack: bool) -> Iterator[tuple[str, int]]:
    """Mesh axes and dims over which a parameter is sharded during computation.

    What ranks with other tokens share of it is gathered first, and does not count.
    """
    share = data_share(mesh.degrees, is_stack=is_stack)
    for dim, axes in enumerate(_spec_of(param, mesh) or ()):
        shared = bool(share) and dim == 0 and axes[-len(share) :] == share
        inner = axes[: -len(share)] if shared else axes
        yield from ((axis, dim) for axis in inner if axis in CUT_AXES)


# --- training -------------------------------------------------------------------------------------


class SpmdStack:
    """A model on the devices of one XLA program, with the interface of `Stack`.

        mesh = samestep.mesh.build_spmd(tp=2, ep=2)
        stack = SpmdStack(model, plan, mesh, loss=cross_entropy)
        opt = stack.optimizer(lr=3e-4, max_grad_norm=1.0)
        loss = stack.backward(tokens, targets); opt.step(); opt.zero_grad()

    `backward` is given the whole batch of this process, whose rows are divided over the devices.

    Args:
        model: On XLA, with no hooks on modules of the plan.
        plan: What is cut, and what stays whole.
        mesh: From `samestep.mesh.build_spmd`.
        loss: (outputs, targets) to their mean, ().
        fsdp: Cut parameters over the data axis. False: copies there, and the optimizer's state is
            divided between them.
    """

    def __init__(
        self, model: nn.Module, plan: Plan, mesh: SpmdMesh, *, loss: Loss, fsdp: bool = True
    ) -> None:
        if not isinstance(mesh, SpmdMesh):
            raise PartitionError(
                f"mesh must be a SpmdMesh (samestep.mesh.build_spmd), got {type(mesh).__name__}: "
                "a mesh of ranks is for samestep.parallel.stack.Stack"
            )
        self.model, self.plan, self.mesh, self.loss, self.fsdp = model, plan, mesh, loss, fsdp
        self.specs = lay_out(model, plan, mesh, fsdp=fsdp)
        self._versions = {id(buffer): buffer._version for buffer in model.buffers()}
        self.check()

    def optimizer(self, **keywords: Any) -> samestep.MuonAdamW:
        """An optimizer whose state is sharded like the parameters."""
        if self.plan.fused:
            keywords.setdefault("split_sizes", self.plan.split_sizes(self.model) or None)
        return samestep.MuonAdamW(self.model, **keywords)

    def backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Forward and backward of the batch, (B, ...); the mean loss, ()."""
        inputs, targets = self._given(inputs, targets)
        loss = self.loss(self.model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self._stay_whole()
        return loss.detach()

    def _stay_whole(self) -> None:
        """Mark buffers that were written as replicated again.

        Of others it holds, and to say it again would move them through the host.
        """
        for buffer in self.model.buffers():
            if self._versions.get(id(buffer)) != buffer._version:
                self._versions[id(buffer)] = buffer._version
                stay([(buffer, self.mesh.tiling(((),) * buffer.ndim))])

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of a batch, (), in evaluation mode."""
        inputs, targets = self._given(inputs, targets)
        with evaluating([self.model]):
            return self.loss(self.model(inputs), targets)

    def _given(self, *batch: Tensor) -> Iterator[Tensor]:
        """Inputs on the devices, sharded by rows."""
        degrees = self.mesh.degrees
        rows = len(batch[0])
        if rows % degrees.batch_ranks:
            raise PlanError(
                f"a batch of {rows} rows cannot be shared evenly by "
                f"{degrees.batch_ranks} devices with tokens of their own "
                f"({self.mesh.name}): use a multiple"
            )
        if degrees.sequence_parallel and batch[0].ndim > 1:
            check_positions(batch[0].shape[1], degrees.tp, "the model")
        device = next(self.model.parameters()).device
        for each in batch:
            spec: Spec = (batch_axes(degrees), *((),) * (each.ndim - 1))
            tiling = self.mesh.tiling(spec)
            # What comes from the host is sent in parts; what is on the devices stays as it is.
            on_host = each.device.type != "xla"
            yield annotate(each.to(device), tiling) if on_host else laid(each, tiling)

    def check(self) -> None:
        """Raise unless parameters are sharded as planned; see `check_layout`."""
        check_layout(self.model, self.plan, self.mesh, self.specs)

    def trace(self, tell: Callable[[str], None] = print) -> dict[str, Any]:
        """Print what runs, compare it, and return the receipt's entry.

        Raises:
            RanksDisagreeError: Parameters lie otherwise than the degrees say.
        """
        self.check()
        facts = predicates(self.mesh.degrees, experts=bool(self.plan.experts), fsdp=self.fsdp)
        seen = observed(self.model, self.plan, self.mesh)
        return trace_program(self.mesh, facts, observed=seen, tell=tell)
