"""One rank of `benchmarks.two_hosts`: trains the small hybrid lane, and tells what it saw.

Started by torchrun. Its last line of output is JSON, also if it fails.
"""

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from samestep.comm.groups import registry
from samestep.comm.integrity.checksum import checksums
from samestep.mesh import build
from samestep.models.gpt import GPTConfig, mean_loss
from samestep.parallel.replicas import check_replicas
from samestep.parallel.stack import Stack
from samestep.stress.scenarios.hybrid import HybridGPT


def lane(layers: int) -> HybridGPT:
    """Width 128, heads of 32, 2 KV heads, 128 tokens, 8 experts of 64, a sequence per rank."""

    class Lane(HybridGPT):
        config = GPTConfig(
            context=128, width=128, layers=layers, heads=4, kv_heads=2, experts=8, expert_size=64
        )
        sequences = 1

    return Lane(0, dist.get_world_size())


def train(layers: int, steps: int, told: dict[str, Any], marks: Path | None) -> None:
    """Fill `told` as it goes; a file in `marks` says that a step was taken."""
    scenario = lane(layers)
    mesh = build(tp=2, sequence_parallel=True, ep=2)  # FSDP2 has the rest
    model = scenario.model_to_cut()
    stack = Stack(model, scenario.plans()[0], mesh, loss=mean_loss, ordered=True)
    optimizer = stack.optimizer(reduction="ordered", **scenario.options())
    told["hosts"] = list(mesh.hosts)
    told["trace"] = stack.trace(tell=lambda line: None)["ranks"][mesh.rank]
    told["groups"] = [str(creation) for creation in registry.creations if creation.mine]
    share = mesh.degrees.world // mesh.degrees.batch_ranks
    mine = range(share * stack.batch_place, share * (stack.batch_place + 1))
    for step in range(steps):
        tokens = torch.cat([scenario.tokens(step, rank) for rank in mine])
        loss = stack.backward(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        optimizer.step()
        optimizer.zero_grad()
        told["losses"].append(loss.item())
        if marks is not None:
            (marks / f"rank{mesh.rank}_step{step}").touch()
    told["copies"] = check_replicas(model)
    held = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    told["checksum"] = checksums(held).tolist()


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("layers", type=int)
    parser.add_argument("steps", type=int)
    parser.add_argument("timeout", type=float, help="seconds that a collective may take")
    parser.add_argument("marks", type=Path, nargs="?", help="folder for a file per rank and step")
    return parser.parse_args(given)


def main(options: argparse.Namespace) -> NoReturn:
    """Train as torchrun says; end with the exit status."""
    torch.set_num_threads(1)
    told: dict[str, Any] = {"host": socket.gethostname(), "losses": []}
    status = 0
    last = time.time()
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=options.timeout))
        told["rank"] = dist.get_rank()
        train(options.layers, options.steps, told, options.marks)
    except Exception as error:
        status = 1
        told["error"] = f"{type(error).__name__}: {error}".split("\n")[0]
    told["ended"] = time.time()
    told["seconds"] = told["ended"] - last
    print(f"\nTOLD {json.dumps(told)}", flush=True)
    # Groups of a host that is cut off cannot be taken down in an orderly way.
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    main(arguments())
