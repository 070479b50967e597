"""The placement of a model and its optimizer: all code that differs between layouts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

import samestep
from samestep.groups.state_flags import offload_of, state_dtypes_of
from samestep.mesh import Degrees, DegreesError, build
from samestep.mesh.contract import ContractError, ModelSizes
from samestep.mesh.contract import check as check_contract
from samestep.mesh.gates import CompileFacts, Decision, decide
from samestep.models.gpt import GPT, gpt_plan, mean_loss
from samestep.parallel.lora import add_lora
from samestep.parallel.stack import Stack
from samestep.tooling.request import BadRequestError
from samestep.train.options import LAYOUTS, Options
from samestep.train.world import World


def degrees_of(options: Options, world: World) -> Degrees:
    """Return the degrees of the mesh axes; BadRequestError if they do not divide the ranks."""
    replicate = options.replicate
    if options.placed == "hsdp" and not options.meshed:
        if world.size % options.shards:
            raise BadRequestError(
                f"--layout hsdp has {options.shards} ranks per copy of the model, which do not "
                f"divide {world.size} ranks: change --shards or the number of ranks"
            )
        replicate = world.size // options.shards
    try:
        return Degrees(
            world.size, options.pp, replicate, options.ep, options.tp, options.sp,
            options.expert_tensor_parallel, options.ep_carries_data,
        )  # fmt: skip
    except DegreesError as error:
        raise BadRequestError(f"the mesh axes do not fit the number of ranks: {error}") from None


def check_layout(options: Options, world: World) -> None:
    degrees = degrees_of(options, world)
    if options.batch_size < degrees.batch_ranks:
        raise BadRequestError(
            f"--batch-size must be at least the number of ranks, {degrees.batch_ranks}, "
            f"got {options.batch_size}"
        )
    config = options.model
    sizes = ModelSizes(
        heads=config.heads,
        kv_heads=config.kv_heads,
        mlp_width=0 if config.experts else config.mlp_ratio * config.width,
        experts=config.experts,
        expert_width=config.expert_hidden if config.experts else 0,
        layers=config.layers,
        stages_per_rank=2 if options.schedule == "interleaved" else 1,
        sequence=config.context,
        batch=options.batch_size if options.pp > 1 else 0,
    )
    try:
        check_contract(sizes, degrees)
    except ContractError as error:
        raise BadRequestError(f"the model does not fit these ranks: {error}") from None
    if config.experts and degrees.expert_tp < degrees.tp and config.context % degrees.tp:
        raise BadRequestError(
            f"--expert-tensor-parallel {degrees.expert_tp} divides tokens among the {degrees.tp} "
            f"ranks of --tp, and --context is {config.context}: take a multiple of {degrees.tp}"
        )
    if options.pp > 1:
        _check_micro_batches(options, degrees)
    if options.reduction == "ordered" and degrees.data == 1 < degrees.replicate:
        raise BadRequestError(
            "--shards 1 only copies the model, and torch sums the gradients of copies "
            "in its own order: use --reduction fast, more shards, or --layout none"
            if options.layout == "hsdp"
            else "--replicate leaves one rank per copy to shard over, and torch sums the "
            "gradients of copies in its own order: use --reduction fast, or fewer "
            "copies"
        )


def _check_micro_batches(options: Options, degrees: Degrees) -> None:
    unit = degrees.batch_ranks * micro_batches(options, degrees)
    counts = {"--batch-size": options.batch_size, "--eval-sequences": options.eval_sequences}
    for name, count in counts.items():
        if unit == 0 or count % unit:
            raise BadRequestError(
                f"{name} {count} does not divide into micro-batches of a pipeline: take a multiple "
                f"of {max(unit, degrees.batch_ranks)} ({degrees.batch_ranks} ranks with sequences "
                f"of their own, {max(1, unit // degrees.batch_ranks)} micro-batches)"
            )
    if micro_batches(options, degrees) < options.pp:
        raise BadRequestError(
            f"--pp {options.pp} needs as many micro-batches, and --micro-batch "
            f"{options.micro_batch} makes {micro_batches(options, degrees)}: take a smaller one"
        )


def micro_batches(options: Options, degrees: Degrees) -> int:
    """Return the number of micro-batches into which a pipeline cuts a rank's batch."""
    rows = options.batch_size // degrees.batch_ranks
    return options.pp if options.micro_batch is None else rows // options.micro_batch


def place(model: GPT, options: Options, world: World) -> tuple[samestep.MuonAdamW, Stack, Decision]:
    """Lay a model out as asked; return its optimizer, its stack, and whether it is compiled."""
    same = ("lr", "weight_decay", "momentum", "max_grad_norm", "reduction")
    keywords = {key: getattr(options, key) for key in same}
    keywords |= {"overrides": _overrides(options), **LAYOUTS[options.placed].keywords}
    keywords["state_dtypes"] = state_dtypes_of(options.state)
    keywords["offload"] = offload_of(options.offload)
    keywords["bucket_size"] = options.bucket_size
    if options.parameters == "bf16":
        keywords["master_weights"] = True
        for param in model.parameters():  # positions and what balances experts stay in 32 bits
            param.data = param.data.bfloat16()
    degrees = degrees_of(options, world)
    sizes = {name: value for name, value in vars(degrees).items() if name != "world"}
    mesh = build(**sizes, device_type=world.device.type)
    facts = CompileFacts(bool(options.routed), bool(options.capacity))
    decision = decide(options.compile, degrees, facts)
    stack = Stack(
        model,
        gpt_plan(options.model),
        mesh,
        loss=mean_loss,
        micro_batches=micro_batches(options, degrees),
        schedule=options.schedule,
        ordered=options.reduction == "ordered",
        adapt=_adapter(options, mesh) if options.lora else None,
        compile=decision.compile,
        fsdp=LAYOUTS[options.placed].kind == "dtensor",
        recompute=False if options.recompute == "none" else options.recompute,
    )
    try:
        return stack.optimizer(**keywords), stack, decision
    except ValueError as error:
        if not options.state.startswith("8bit"):
            raise
        # An axis may cut what shares a scale.
        raise BadRequestError(f"--state {options.state}: {error}") from None


def _overrides(options: Options) -> dict[Any, dict[str, Any]]:
    """Return the rules of parameters for which names and shapes are not enough."""
    if options.lora:
        return {"*.lora_*": {"rule": options.lora_rule}}
    if options.routed:
        return {"*.experts.*": {"rule": "muon"}, "*.router.weight": {"rule": "adamw"}}
    return {}


def _adapter(options: Options, mesh: Any) -> Callable[[nn.Module], object]:
    patterns = ["*.attention.[qkv]", "*.attention.out"]
    if not options.routed:
        patterns += ["*.mlp.up", "*.mlp.down"]
    return lambda part: add_lora(
        part, patterns, rank=options.lora_rank, mesh=mesh, seed=options.seed
    )


@contextmanager
def no_sync(model: GPT, optimizer: samestep.MuonAdamW) -> Iterator[None]:
    """Keep gradients unreduced inside, for all micro-batches of a step but the last."""
    sharded: Any = model if isinstance(model, FSDPModule) else None
    if sharded is not None:
        sharded.set_requires_gradient_sync(False)
    try:
        with optimizer.no_sync():
            yield
    finally:
        if sharded is not None:
            sharded.set_requires_gradient_sync(True)
