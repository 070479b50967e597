"""The tables and pictures of docs/plan.md, from plans: printed, and kept as a receipt.

python -m benchmarks.plan_tables                                             # to look at
python -m benchmarks.plan_tables --out benchmarks/results --page docs/plan.md   # 5 minutes

A test compares the page with the receipt, and some of the receipt with what plans say.
"""

import json
import platform
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch

import samestep
from benchmarks import run_script
from benchmarks.pages import put_table
from benchmarks.peer_plans import all_peers
from samestep.lab.estimate.activations import Batch
from samestep.lab.estimate.cluster import Job, Settings
from samestep.lab.estimate.figures import stage_figures
from samestep.lab.estimate.grid import one_axis
from samestep.lab.estimate.grid_plan import SpreadOver, plan_on_grid
from samestep.lab.estimate.hardware import PRESETS, Hardware
from samestep.lab.estimate.memory import kept_memory
from samestep.lab.estimate.model import load_model
from samestep.lab.estimate.pictures import gantt
from samestep.lab.estimate.timeline import Timeline, chrome_trace, simulate
from samestep.lab.estimate.training import Training, training_of
from samestep.lab.stress.models import Matrices
from samestep.layout.boxes import Cut
from samestep.mesh.degrees import Degrees
from samestep.plan.links import Link
from samestep.tooling.output import write_files

CUDA = torch.device("cuda")
GB, M = 1e9, 10**6


@dataclass(frozen=True)
class Options:
    """Where to."""

    out: Path = Path("out/bench")
    only: Annotated[
        str,
        "one table: stages, muon, overlap, copies, scale, timelines, throughput, strong, distmuon "
        "or parallel_muon; empty: all",
    ] = ""
    page: Annotated[Path | None, "write the tables into this page"] = None


STAGED = (
    ("llama-7b", 8), ("llama-13b", 16), ("llama-70b", 32), ("llama-70b", 64), ("gpt-175b", 64),
)  # fmt: skip


def stages(models: tuple[tuple[str, int], ...] = STAGED) -> Iterator[str]:
    """Megatron: bytes per rank of AdamW with 16-bit parameters, per stage."""
    yield "| model | ranks | none | zero1 | zero2 | zero3 |"
    yield "|---|---|---|---|---|---|"
    for name, ranks in models:
        model = load_model(name, torch.bfloat16)
        cells = []
        for sharding in ("none", "zero1", "zero2", "zero3"):
            settings = Settings(sharding=sharding, muon=False, clip=False)
            plan = Job(model, Degrees(ranks), settings, PRESETS["h200x8"]).grid_plan(0)
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
        plan = plan_on_grid(optimizer, one_axis(ranks))
        whole = sum(param.nbytes for param in model.parameters())
        kept = [kept_memory(plan, rank) for rank in range(ranks)]
        together = sum(k.parameters + k.state for k in kept) / whole + 1
        yield f"| {ranks} | {3 * ranks}P | {together:g}P | {1 - together / (3 * ranks):.1%} |"


def simulated() -> dict[str, Timeline]:
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
        plan = plan_on_grid(optimizer, one_axis(4), spread=lambda name, param: over, device=CUDA)
        found[name] = simulate(plan, machine, show=range(4))
    return found


def timelines() -> Iterator[str]:
    """The four ways in figures."""
    yield "| way | step, ms | exposed, ms | idle, ms |"
    yield "|---|---|---|---|"
    for name, timeline in simulated().items():
        numbers = (timeline.seconds, timeline.exposed_seconds, float(timeline.idle.mean()))
        yield f"| {name} | {' | '.join(f'{1e3 * n:.2f}' for n in numbers)} |"


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
            plan = Job(model, Degrees(64), settings, PRESETS["a100x8"]).grid_plan(0)
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


def with_cards(hardware: Hardware, cards: int) -> Hardware:
    """With so many network cards per host, which its devices share, in place of one for each."""
    link, share = hardware.between, cards / hardware.ranks_per_host
    return replace(
        hardware, between=Link(link.latency, link.bandwidth * share, link.latency_per_rank)
    )


def throughput() -> Iterator[str]:
    """Megatron's claim of Llama-7B on 64 A100: what ZeRO-1 costs beside DDP."""
    model, common = load_model("llama-7b", torch.bfloat16), {"muon": False, "bucket_size": 40 * M}
    flat: dict[str, Any] = {**common, "sharding": "zero1", "buffers": "flat"}
    ways = {
        "DDP": Settings(sharding="none", **common),  # type: ignore[arg-type]
        "ZeRO-1, no overlap": Settings(**flat, overlap=False, overlap_gathers=False),
        "ZeRO-1, both overlaps": Settings(**flat),
    }
    yield "| cards per host | tokens per GPU | plan | iteration, ms | tokens/s | beside DDP |"
    yield "|---|---|---|---|---|---|"
    for cards, tokens in ((8, 2048), (8, 8192), (1, 2048), (1, 8192)):
        machine, base = with_cards(PRESETS["a100x8"], cards), 0.0
        for name, settings in ways.items():
            plan = Job(model, Degrees(64), settings, machine).grid_plan(0)
            seconds = simulate(plan, machine, training=Training(tokens)).seconds
            speed = 64 * tokens / seconds
            base = base or speed
            cells = [
                str(cards), f"{tokens:,}", name, f"{1e3 * seconds:.0f}",
                f"{speed:,.0f}", f"{speed / base - 1:+.0%}",
            ]  # fmt: skip
            yield f"| {' | '.join(cells)} |"


def strong() -> Iterator[str]:
    """Megatron's claim of Llama-70B: 1,024 sequences on 128 to 512 GPUs, 4 per replica."""
    model, settings = load_model("llama-70b", torch.bfloat16), Settings("zero1", "flat", muon=False)
    yield "| cards per host | sequence | 128 GPUs, tokens/s | 256 | 512 | efficiency, 256 | 512 |"
    yield "|---|---|---|---|---|---|---|"
    for cards, length in ((8, 4096), (4, 4096), (2, 4096), (1, 4096), (8, 512)):
        machine, speeds = with_cards(PRESETS["h100x8"], cards), {}
        for ranks in (128, 256, 512):
            batch = Batch(length, 1024 // (ranks // 4), "full", 1)
            job = Job(model, Degrees(ranks, tp=4), settings, machine, batch)
            timeline = simulate(job.grid_plan(0), machine, training=training_of(job))
            speeds[ranks] = 1024 * length / timeline.seconds
        gains = [f"{128 * speeds[n] / (n * speeds[128]):.0%}" for n in (256, 512)]
        told = [f"{speed:,.0f}" for speed in speeds.values()]
        yield f"| {cards} | {length:,} | {' | '.join([*told, *gains])} |"


def distmuon() -> Iterator[str]:
    """nanochat's claim: strong scaling of depth 20, 524,288 tokens per step, on H100s."""
    model, machine = load_model("nanochat-d20", torch.bfloat16), PRESETS["h100x8"]
    yield "| GPUs | of one GPU, ms | samestep, ms | efficiency | DistMuon, ms | efficiency |"
    yield "|---|---|---|---|---|---|"
    alone = 0.0
    for ranks in (1, 8, 64, 512):
        job = Job(model, Degrees(ranks), Settings(), machine, Batch(524_288 // ranks))
        training, plan = training_of(job), job.grid_plan(0)
        assert training is not None
        ours = simulate(plan, machine, training=training).seconds
        alone = alone or ours
        if ranks > 1:
            theirs = all_peers(plan, model, machine, (training, training))["nanochat"].iteration
            cells = [f"{1e3 * alone / ranks:.1f}"]
            for seconds in (ours, theirs):
                cells += [f"{1e3 * seconds:.1f}", f"{alone / ranks / seconds:.0%}"]
            yield f"| {ranks} | {' | '.join(cells)} |"


def parallel_muon() -> Iterator[str]:
    """Parallel Muon's measurement, 1.4 s on 8 devices with 15% exposed, from ours step by step."""
    model, machine = load_model("parallel-muon-10b", torch.bfloat16), PRESETS["mi250x8"]
    plain = replace(  # 847.3 TFLOP in place of the 620.9 on Gram matrices
        machine, product_rates={n: 620.9 / 847.3 * r for n, r in machine.product_rates.items()}
    )
    ours = Settings(sharding="zero3")
    theirs = replace(ours, bucket_size=1, owners="cyclic")
    slow = [
        replace(plain, inside=Link(machine.inside.latency, gigabytes * GB, 2e-6))
        for gigabytes in (10, 4, 3.5)
    ]
    cases = [
        ("as planned", machine, ours),
        ("products in the standard form, as theirs", plain, ours),
        ("and chunks of one block per owner, owners in turn", plain, theirs),
        *(
            (f"and links of {each.inside.bandwidth / GB:g} GB/s in place of 50", each, theirs)
            for each in slow
        ),
    ]
    yield "| what is assumed | step, s | products | the rest of the work | exposed |"
    yield "|---|---|---|---|---|"
    for name, hardware, settings in cases:
        found = simulate(Job(model, Degrees(8), settings, hardware).grid_plan(0), hardware)
        products = 620.9e12 / 8 / hardware.product_rate(4096) / found.seconds
        exposed = found.exposed_seconds / found.seconds
        idle = float(found.idle.mean()) / found.seconds
        rest = 1 - products - exposed - idle
        yield (
            f"| {name} | {found.seconds:.2f} | {products:.0%} | {rest:.0%} | "
            f"{exposed:.1%}, and {idle:.0%} waiting for ranks |"
        )


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "stages": stages,
    "muon": muon_savings,
    "overlap": overlap,
    "copies": copies,
    "scale": scale,
    "timelines": timelines,
    "throughput": throughput,
    "strong": strong,
    "distmuon": distmuon,
    "parallel_muon": parallel_muon,
}
RECEIPT = "plan_tables.json"


def main(options: Options) -> None:
    known = options.out / RECEIPT
    tables = json.loads(known.read_text())["tables"] if known.exists() else {}
    for name, make in TABLES.items():
        if options.only in ("", name):
            print(f"\n## {name}\n", flush=True)
            tables[name] = []
            for line in make():
                print(line, flush=True)
                tables[name].append(line)
            if options.page is not None:
                put_table(options.page, tables[name])
    ran = {
        "samestep": samestep.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    receipt = {"kind": "samestep plan tables", "versions": ran, "tables": tables}
    files = {RECEIPT: (json.dumps(receipt, indent=1) + "\n").encode()}
    if options.page is not None and options.only in ("", "timelines"):
        found = simulated()
        pictures = {
            "plan_timelines.png": gantt(found, "Muon over shards on 4 ranks, simulated"),
            "plan_timelines_trace.json.gz": chrome_trace(found),
        }
        write_files(options.page.parent, pictures)
    write_files(options.out, files)


if __name__ == "__main__":
    run_script(main, Options)
