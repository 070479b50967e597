"""The model and its optimizer, placed as asked: all that differs between layouts is here."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import samestep
from samestep.command.request import BadRequestError
from samestep.fsdp import use_ordered_reduction
from samestep.train.gpt import GPT
from samestep.train.options import Layout, Options
from samestep.train.world import World

KEYWORDS: dict[Layout, dict[str, Any]] = {
    "none": {"sharding": "none"},
    "zero1": {"sharding": "zero1", "overlap_grad_reduce": True},
    "zero2": {"sharding": "zero2", "overlap_grad_reduce": True},
    "flat": {
        "sharding": "zero2",
        "buffers": "flat",
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
    "fsdp2": {},  # parameters are DTensors, and stay where they are
    "hsdp": {},
}


def check_layout(options: Options, world: World) -> None:
    """Refuse what these ranks cannot do."""
    if options.batch_size < world.size:
        raise BadRequestError(
            f"--batch-size must be at least the number of ranks, {world.size}, "
            f"got {options.batch_size}"
        )
    if options.layout == "hsdp" and world.size % options.shards:
        raise BadRequestError(
            f"--layout hsdp has {options.shards} ranks per copy of the model, which do not divide "
            f"{world.size} ranks: change --shards or the number of ranks"
        )
    if (
        options.layout == "hsdp"
        and options.reduction == "ordered"
        and options.shards == 1 < world.size
    ):
        raise BadRequestError(
            "--shards 1 only copies the model, and torch adds up copies in an order of its own: "
            "take --reduction fast, more shards, or --layout none"
        )


def place(model: GPT, options: Options, world: World) -> samestep.MuonAdamW:
    """Lay a model out over the ranks; return its optimizer."""
    if options.layout in ("fsdp2", "hsdp"):
        shards = options.shards if options.layout == "hsdp" else world.size
        shape = (world.size // shards, shards) if options.layout == "hsdp" else (shards,)
        names = ("copy", "shard")[-len(shape) :]
        mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=names)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if options.reduction == "ordered":
            use_ordered_reduction(model)
    overrides: dict[Any, dict[str, Any]] = {}
    if options.experts:
        overrides["*.experts.*"] = {"rule": "muon"}  # stacks of matrices
        overrides["*.router.weight"] = {"rule": "adamw"}
    return samestep.MuonAdamW(
        model,
        lr=options.lr,
        weight_decay=options.weight_decay,
        momentum=options.momentum,
        max_grad_norm=options.max_grad_norm,
        reduction=options.reduction,
        overrides=overrides,
        **KEYWORDS[options.layout],
    )


@contextmanager
def no_sync(model: GPT, optimizer: samestep.MuonAdamW) -> Iterator[None]:
    """Keep gradients local, for all micro-batches of a step but the last."""
    sharded: Any = model if isinstance(model, FSDPModule) else None
    if sharded is not None:
        sharded.set_requires_gradient_sync(False)
    try:
        with optimizer.no_sync():
            yield
    finally:
        if sharded is not None:
            sharded.set_requires_gradient_sync(True)
