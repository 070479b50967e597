"""Host time of a step over NCCL, and its collectives, beside DDP with torch's AdamW.

    python -m benchmarks.nccl_host --ranks 2,4,8 --out out/nccl_host

Ranks may share a GPU (docs/prove.md): nothing of the device is measured. Every step begins on an
idle device, contestants take turns, and time is taken until `backward()` and `step()` have
returned. Collectives are those that torch's own record of NCCL has.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import samestep
from samestep.comm.nccl import library_version
from samestep.lab.common.provenance import code_digest, machine
from samestep.launch.forked import NCCL, run_forked
from samestep.tooling.output import json_file, write_files

WIDTH, LAYERS = 256, 24
WARMUP, STEPS = 6, 24


def model() -> nn.Module:
    """48 matrices of 256 x 256, and as many biases."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2 * LAYERS)]
    return nn.Sequential(*layers).cuda()


def ddp() -> tuple[nn.Module, torch.optim.Optimizer]:
    """DistributedDataParallel averages, torch's fused AdamW steps on every rank."""
    wrapped = DistributedDataParallel(model(), gradient_as_bucket_view=True)
    return wrapped, torch.optim.AdamW(wrapped.parameters(), fused=True)


def ours(kind: str, **options: Any) -> Callable[[], tuple[nn.Module, torch.optim.Optimizer]]:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        own = model()
        return own, getattr(samestep, kind)(own, lr=1e-3, **options)

    return make


CONTESTANTS = {
    "DDP and torch.optim.AdamW": ddp,
    "samestep.AdamW": ours("AdamW"),
    "samestep.AdamW, overlap_grad_reduce": ours("AdamW", overlap_grad_reduce=True),
    "samestep.AdamW, none": ours("AdamW", sharding="none"),
    "samestep.AdamW, flat": ours("AdamW", buffers="flat"),
    "samestep.MuonAdamW": ours("MuonAdamW"),
    "samestep.MuonAdamW, overlap_grad_reduce": ours("MuonAdamW", overlap_grad_reduce=True),
}


def launched() -> int:
    """Collectives of NCCL that torch has recorded in this process so far."""
    from torch._C._distributed_c10d import _dump_nccl_trace_json  # type: ignore[attr-defined]

    entries = json.loads(_dump_nccl_trace_json(includeCollectives=True, onlyActive=False))
    return max((entry["record_id"] for entry in entries.get("entries", [])), default=-1) + 1


def rank_times(rank: int) -> dict[str, Any]:
    """What one rank has measured, by contestant."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    data = torch.randn(8, WIDTH, device="cuda")
    made = {name: make() for name, make in CONTESTANTS.items()}
    found: dict[str, Any] = {name: {"backward": [], "step": [], "calls": 0} for name in made}
    for number in range(WARMUP + STEPS):
        for name, (net, optimizer) in made.items():
            loss = net(data).square().mean()
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            before = launched()
            start = time.perf_counter()
            loss.backward()
            middle = time.perf_counter()
            optimizer.step()
            end = time.perf_counter()
            torch.cuda.synchronize()
            optimizer.zero_grad()
            if number >= WARMUP:
                found[name]["backward"].append((middle - start) * 1e6)
                found[name]["step"].append((end - middle) * 1e6)
                found[name]["calls"] += launched() - before
    return {
        name: {
            "backward_us": statistics.median(each["backward"]),
            "step_us": statistics.median(each["step"]),
            "both_us": statistics.median(
                map(sum, zip(each["backward"], each["step"], strict=True))
            ),
            "collectives": each["calls"] / STEPS,
        }
        for name, each in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--out", type=Path, default=Path("out/nccl_host"))
    asked = parser.parse_args()
    # By its name of before torch 2.10, and since.
    for name in ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"):
        os.environ.setdefault(name, "4000")
    torch.set_num_threads(1)
    rows = []
    for ranks in map(int, asked.ranks.split(",")):
        limits: dict[str, Any] = {"timeout": 180.0, "collective_timeout": 60.0, "backend": NCCL}
        of_ranks = run_forked(ranks, rank_times, **limits)
        for name in CONTESTANTS:
            own = [each[name] for each in of_ranks]
            row: dict[str, Any] = {"ranks": ranks, "contestant": name}
            for key in ("backward_us", "step_us", "both_us", "collectives"):
                row[key] = statistics.median(each[key] for each in own)
            rows.append(row)
            print(json.dumps(row), flush=True)
        content = {
            "kind": "samestep nccl host",
            "matrices": 2 * LAYERS,
            "width": WIDTH,
            "steps": STEPS,
            "nccl": ".".join(map(str, library_version() or ())),
            "shared_gpus": ranks > torch.cuda.device_count(),
            **machine(),
            "code": code_digest(),
            "rows": rows,
        }
        write_files(asked.out, {"receipt.json": json_file(content)})


if __name__ == "__main__":
    main()
