"""The tables and pictures of docs/plan.md, from plans: print them, and write the pictures.

python -m benchmarks.plan_tables --out docs
"""

import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro

import samestep
from samestep.estimate.activations import Batch
from samestep.estimate.blueprint import SpreadOver, blueprint
from samestep.estimate.cluster import Job, Settings
from samestep.estimate.figures import stage_figures
from samestep.estimate.grid import one_axis
from samestep.estimate.hardware import PRESETS
from samestep.estimate.memory import kept_memory
from samestep.estimate.model import load_model
from samestep.estimate.pictures import gantt
from samestep.estimate.timeline import Timeline, chrome_trace, simulate
from samestep.estimate.training import Training
from samestep.layout.boxes import Cut
from samestep.mesh.degrees import Degrees
from samestep.plan.links import Link
from samestep.stress.models import Matrices
from samestep.tooling.output import write_files

CUDA = torch.device("cuda")
GB = 1e9


@dataclass(frozen=True)
class Options:
    """Where to."""

    out: Path = Path("out/bench")
    only: str = ""
    """One of stages, muon, timelines, overlap, copies, scale; empty: all."""


def stages() -> Iterator[str]:
    """Megatron: bytes per rank of AdamW with 16-bit parameters, per stage."""
    yield "| model | ranks | none | zero1 | zero2 | zero3 |"
    yield "|---|---|---|---|---|---|"
    for name, ranks in (
        ("llama-7b", 8), ("llama-13b", 16), ("llama-70b", 32), ("llama-70b", 64), ("gpt-175b", 64),
    ):  # fmt: skip
        model = load_model(name, torch.bfloat16)
        cells = []
        for sharding in ("none", "zero1", "zero2", "zero3"):
            settings = Settings(sharding=sharding, muon=False, clip=False)
            plan = Job(model, Degrees(ranks), settings, PRESETS["h200x8"]).blueprint(0)
            kept = max(kept_memory(plan, rank) for rank in (0, ranks - 1))
            whole = 2 * model.parameters
            gradients = whole if sharding in ("none", "zero1") else whole / ranks
            cells.append(f"{(sum(kept) + gradients) / GB:,.2f}")
        yield f"| {name}, {model.parameters / GB:.2f}B | {ranks} | {' | '.join(cells)} |"


def muon_savings() -> Iterator[str]:
    """nanochat: bytes over all ranks, in units of the parameters."""
    yield "| ranks | DDP | sharded | saved |"
    yield "|---|---|---|---|"
    for ranks in (2, 4, 8, 16, 32, 64):
        with torch.device("meta"):
            layers = [
                torch.nn.Linear(256, 256, bias=False, dtype=torch.bfloat16) for _ in range(64)
            ]
            model = torch.nn.Sequential(*layers)
        optimizer = samestep.Muon(
            model,
            sharding="zero2",
            state_dtypes={"momentum_buffer": torch.bfloat16},
            master_weights=False,
        )
        plan = blueprint(optimizer, one_axis(ranks))
        whole = sum(param.nbytes for param in model.parameters())
        kept = [kept_memory(plan, rank) for rank in range(ranks)]
        together = sum(k.parameters + k.state for k in kept) / whole + 1
        yield f"| {ranks} | {3 * ranks}P | {together:g}P | {1 - together / (3 * ranks):.1%} |"


def timelines(files: dict[str, bytes]) -> Iterator[str]:
    """Parallel Muon: four ways to run Muon over shards, on four ranks."""
    layer: dict[str, tuple[int, ...]] = {
        "attention": (1536, 1024),
        "out": (1024, 1024),
        "up": (4096, 1024),
        "down": (1024, 4096),
    }
    shapes = {f"{name}_{i}": shape for i in range(6) for name, shape in layer.items()}
    machine = replace(PRESETS["mi250x8"], inside=Link(3e-5, 1.2e10, 2e-6))
    ways: dict[str, dict[str, Any]] = {
        "distributed": {"muon_schedule": "gather"},
        "parallel": {"owners": "cyclic", "chunks_ahead": 0},
        "re-scheduled": {"owners": "cyclic"},
        "load-balanced": {"owners": "balanced"},
    }
    found: dict[str, Timeline] = {}
    over = SpreadOver((("data",),), (Cut(0),))
    for name, options in ways.items():
        with torch.device("meta"):
            model = Matrices(shapes)
        groups = [{"params": ["*"], "rule": "muon"}]
        optimizer = samestep.MuonAdamW(model, groups=groups, bucket_size=1, **options)
        plan = blueprint(optimizer, one_axis(4), spread=lambda name, param: over, device=CUDA)
        found[name] = simulate(plan, machine, show=range(4))
    yield "| way | step, ms | exposed, ms | idle, ms |"
    yield "|---|---|---|---|"
    for name, timeline in found.items():
        numbers = (timeline.seconds, timeline.exposed_seconds, float(timeline.idle.mean()))
        yield f"| {name} | {' | '.join(f'{1e3 * n:.2f}' for n in numbers)} |"
    files["plan_timelines.png"] = gantt(found, "Muon over shards on 4 ranks, simulated")
    files["plan_timelines_trace.json.gz"] = chrome_trace(found)


def overlap() -> Iterator[str]:
    """Megatron: Llama-7B on 64 A100, data parallel alone, AdamW."""
    model = load_model("llama-7b", torch.bfloat16)
    yield "| tokens per rank | overlap | iteration, ms | exposed, ms | hidden | speedup |"
    yield "|---|---|---|---|---|---|"
    for tokens in (2048, 8192):
        base = None
        for name, overlaps in (("none", False), ("gradients", True), ("both", True)):
            settings = Settings(
                sharding="zero1", buffers="flat", overlap=overlaps, muon=False,
                overlap_gathers=name == "both",
                bucket_size=40_000_000,
            )  # fmt: skip
            plan = Job(model, Degrees(64), settings, PRESETS["a100x8"]).blueprint(0)
            timeline = simulate(plan, PRESETS["a100x8"], training=Training(tokens))
            base = base or timeline.seconds
            busy = float(timeline.link.mean())
            yield (
                f"| {tokens:,} | {name} | {1e3 * timeline.seconds:.0f} | "
                f"{1e3 * timeline.exposed_seconds:.0f} | "
                f"{1 - timeline.exposed_seconds / busy:.0%} | {base / timeline.seconds:.2f} |"
            )


def scale() -> Iterator[str]:
    """How long large plans take, and how much memory."""
    yield "| model | ranks | sharding | CPU s | memory of the process | peak of a rank | step |"
    yield "|---|---|---|---|---|---|---|"
    for name, degrees, sharding in (
        ("deepseek-v3", Degrees(2048, pp=16, ep=64), "zero1"),
        ("llama-70b", Degrees(1024, replicate=16), "zero3"),
        ("llama-70b", Degrees(1024, replicate=128), "zero2"),
        ("llama-70b", Degrees(1024), "zero2"),
        ("llama-70b", Degrees(1024, tp=8), "zero2"),
    ):
        begun = time.process_time()
        settings = Settings(sharding=sharding)  # type: ignore[arg-type]
        job = Job(load_model(name, torch.bfloat16), degrees, settings, PRESETS["h800x8"])
        found = [stage_figures(job, stage)[0] for stage in job.stages()]
        spent = time.process_time() - begun
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GB
        yield (
            f"| {name} | {degrees.name} | {sharding} | {spent:.1f} | {memory:.2f} GB | "
            f"{max(f.peak for f in found) / GB:,.1f} GB | "
            f"{max(f.step_seconds for f in found):,.3g} s |"
        )


def copies() -> Iterator[str]:
    """Llama-70B with tensor 4, pipeline 4, data 4: copies that the optimizer averages, and FSDP2.

    Iterations of 16 micro-batches of 4,096 tokens, blocks computed again in backward.
    """
    model, degrees = load_model("llama-70b", torch.bfloat16), Degrees(64, tp=4, pp=4)
    device = {name: PRESETS[f"{name}x8"].device_memory for name in ("h100", "h200")}
    batch = Batch(4096, 16, "full", 1)
    yield (
        "| sharding | buffers | kept | peak of a step | of an H100 | of an H200 | sent per rank "
        "| step | iteration, with activations |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for sharding, buffers in (
        ("none", "per_parameter"), ("zero1", "per_parameter"), ("zero2", "per_parameter"),
        ("zero1", "flat"), ("zero2", "flat"), ("zero3", "per_parameter"),
    ):  # fmt: skip
        settings = Settings(sharding=sharding, buffers=buffers)  # type: ignore[arg-type]
        job = Job(model, degrees, settings, PRESETS["h200x8"])
        with_batch = replace(job, batch=batch)
        found, whole = (
            [stage_figures(each, stage)[0] for stage in job.stages()] for each in (job, with_batch)
        )
        worst = max(found, key=lambda each: each.memory.peak)
        peak, step = worst.memory.peak, f"{max(f.step_seconds for f in found):.2f} s"
        yield (
            f"| {sharding} | {buffers} | {worst.memory.stays / GB:.1f} GB | {peak / GB:.1f} GB "
            f"| {peak / device['h100']:.0%} | {peak / device['h200']:.0%} "
            f"| {max(f.sent for f in found) / GB:.1f} GB | {step} "
            f"| {max(f.step_seconds for f in whole):.1f} s, "
            f"{max(f.peak for f in whole) / GB:.1f} GB |"
        )


def main(options: Options) -> None:
    files: dict[str, bytes] = {}
    tables = {
        "stages": stages(),
        "muon": muon_savings(),
        "overlap": overlap(),
        "copies": copies(),
        "scale": scale(),
        "timelines": timelines(files),
    }
    for name, lines in tables.items():
        if options.only in ("", name):
            print(f"\n## {name}\n", flush=True)
            for line in lines:
                print(line, flush=True)
    if files:
        write_files(options.out, files)


if __name__ == "__main__":
    main(tyro.cli(Options))
