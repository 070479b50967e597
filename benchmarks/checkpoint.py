"""Saving on two CPU ranks: against a plain dcp.save of the same bytes, in turns.

A GPT's parameters in fp32 with AdamW's moments, shared by zero2. Both write the same boxes of the
same tensors, planned alike, and wait for the disk. A save takes as long as on the slowest rank;
medians of the rounds after the first are compared. Run it on a quiet machine: all of it is memory
and disk.
"""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import samestep
from benchmarks import gpt_parameters, heading, run_script, slowest, timed, write_json
from samestep.checkpoint import storage
from samestep.checkpoint.logical import tensors_of
from samestep.lab.bench.gpu.measure import in_rounds
from samestep.lab.bench.gpu.report import Screen
from samestep.launch.forked import run_forked

BARS = {"with checksums": 0.65, "without checksums": 0.9, "extra memory": 0.1, "blocked": 0.1}


@dataclass(frozen=True)
class Options:
    """What to measure."""

    parameters: Annotated[
        float, "about so many; 250e6 needs 3 GB of disk per save and 6 GB of memory"
    ] = 20e6
    rounds: int = 5
    out: Path = Path("out/bench/checkpoint")


def gpt(parameters: float) -> nn.Module:
    """Six layers, and a vocabulary that takes a fourth."""
    width = max(64, int((0.75 * parameters / 72) ** 0.5) // 64 * 64)
    matrices, others = gpt_parameters(width, 6, max(1, int(0.125 * parameters / width)))
    return nn.ParameterList([*matrices, *others])


def memory(field: str) -> int:
    """Bytes of this process: VmRSS now, or VmHWM at most."""
    line = next(li for li in Path("/proc/self/status").read_text().splitlines() if field in li)
    return int(line.split()[1]) * 1024


def measure(rank: int, options: Options, folder: Path) -> dict[str, object]:
    torch.manual_seed(0)
    model = gpt(options.parameters)
    opt = samestep.AdamW(model, sharding="zero2", grads="reduced")
    opt.step()
    for param in model.parameters():
        param.grad = None
    blocked: list[float] = []
    extra, written = 0, 0

    def save(target: Path) -> None:
        samestep.save(target, model, opt)

    def plain(target: Path) -> None:
        writer = dcp.FileSystemWriter(target)
        dcp.save(dict(tensors_of(model, opt)), storage_writer=writer)

    def background(target: Path) -> None:
        start = time.perf_counter()
        handle = samestep.async_save(target, model, opt)
        blocked.append(slowest(time.perf_counter() - start))
        handle.wait()

    def unchecked(target: Path) -> None:
        with patch.object(storage, "checksum", lambda _: torch.zeros(())):
            save(target)

    def turn(number: int, act: Callable[[Path], None]) -> float:
        nonlocal extra, written
        target, counted = folder / "checkpoint", act is save and number >= 0
        if counted:
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
        before = memory("VmRSS")
        took = slowest(timed(partial(act, target)))
        if counted:
            extra = max(extra, memory("VmHWM") - before)
        dist.barrier()
        if rank == 0:
            written = sum(file.stat().st_size for file in target.rglob("*"))
            shutil.rmtree(target)
        dist.barrier()
        return took

    ways = {"ours": save, "dcp": plain, "ours unchecked": unchecked, "async": background}
    turns = {way: partial(turn, act=act) for way, act in ways.items()}
    seconds = in_rounds(turns, options.rounds - 1, warmup=1)
    held = sum(t.nbytes for state in opt.state.values() for t in state.values())
    held += sum(param.nbytes for param in model.parameters())
    return {
        "seconds": {**seconds, "blocked": blocked[1:]},
        "held": held,
        "extra": extra,
        "written": written,
    }


def main(options: Options) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="checkpoints_", dir=options.out))
    try:
        ranks = run_forked(2, measure, options, folder, timeout=3000.0, collective_timeout=600.0)
    finally:
        with suppress(OSError):
            shutil.rmtree(folder)
    first = ranks[0]
    medians = {way: statistics.median(taken) for way, taken in first["seconds"].items()}
    found = {
        "with checksums": medians["dcp"] / medians["ours"],
        "without checksums": medians["dcp"] / medians["ours unchecked"],
        "extra memory": max(rank["extra"] / rank["held"] for rank in ranks),
        "blocked": medians["blocked"] / medians["async"],
    }
    written = first["written"] / 1e6
    rows = [
        [way, f"{medians[way]:.3f}", f"{written / medians[way]:,.0f}"]
        for way in ("dcp", "ours", "ours unchecked", "async", "blocked")
    ]
    screen = Screen()
    screen.table(f"{written:,.0f} MB, two ranks", ("", "seconds", "MB/s"), rows)
    bars, met = [], {}
    for name, value in found.items():
        least = "checksums" in name  # throughput is to be at least, memory and time at most that
        met[name] = value >= BARS[name] if least else value <= BARS[name]
        bar = f"{'>=' if least else '<='} {BARS[name]}"
        bars.append([name, f"{value:.3f}", bar, "met" if met[name] else "not met"])
    screen.table("", ("", "found", "bar", ""), bars)
    content = {
        **heading("checkpoint", options),
        "bars": BARS,
        "found": found,
        "met": met,
        "medians": medians,
        "ranks": ranks,
    }
    write_json(options.out, "checkpoint.json", content, indent=1)


if __name__ == "__main__":
    run_script(main, Options)
