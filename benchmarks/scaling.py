"""Models on 8 to 4096 ranks: as samestep plans them, as it did, and as others would.

python -m benchmarks.scaling --out DIR   # scaling.json, pictures; prints the tables of docs/plan.md
python -m benchmarks.scaling --out benchmarks/results --page docs/plan.md   # and writes them there
python -m benchmarks.scaling --models llama-7b

All plans are simulated on one hardware file; `peer_plans` says what was assumed of others. "before"
is our plan with what it had until buckets were chosen by ranks and links: buckets of 6,553,600
elements, one level, and unequal segments gathered as an all-to-all of copies, in which an owner
sends its block to each of the others. Only these differ: the ring model of reductions, and slices
that are cut end to end, are today's in both, so that "before" is no slower than it was.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import torch

from benchmarks import run_script
from benchmarks.pages import put_table
from benchmarks.peer_plans import all_peers
from samestep.lab.common.numbers import duration, size
from samestep.lab.estimate.activations import Batch
from samestep.lab.estimate.cluster import Job, Settings
from samestep.lab.estimate.grid_plan import GridPlacement, GridPlan
from samestep.lab.estimate.hardware import PRESETS, Hardware, hardware_as_json
from samestep.lab.estimate.model import Model, load_model
from samestep.lab.estimate.pictures import scaling_picture
from samestep.lab.estimate.scaling import RANKS, Point, as_json, numbers_of_ranks, point_of
from samestep.lab.estimate.timeline import simulate
from samestep.lab.estimate.training import training_of
from samestep.mesh.degrees import Degrees
from samestep.tooling.output import json_file, write_files

TOKENS = 4096  # of a rank; strong scaling divides those of the fewest ranks
BEFORE = 6_553_600  # elements of a bucket, before ranks and links chose
SHOWN = (8, 64, 512, 4096)  # of the ranks, in tables; all of them where there are as few
FIELDS = [field.name for field in fields(Point)]
MOST_BEFORE = 1024  # ranks: by then it takes minutes
COLUMNS = "| plan | ranks | step | exposed | iteration | exposed | sent | busiest | owners | peak |"


# Of each model the axes beside data, and on how many ranks.
CASES: dict[str, tuple[Degrees, Sequence[int]]] = {
    "nanochat-d20": (Degrees(8), RANKS),
    "llama-7b": (Degrees(8), RANKS),
    "llama-70b": (Degrees(8), (8, 64, 512, 1024, 4096)),
    "deepseek-v3": (Degrees(64, ep=64), (64, 512, 4096)),
}


@dataclass(frozen=True)
class Options:
    """Of which models, and where to."""

    models: tuple[str, ...] = tuple(CASES)
    hardware: str = "h200x8"
    most: Annotated[int, "ranks"] = 4096
    out: Path = Path("out/bench")
    page: Annotated[Path | None, "write the tables into this page, and the pictures beside it"] = (
        None
    )


def in_copies(plan: GridPlan) -> GridPlan:
    """The same plan with unequal segments as an all-to-all of copies, in one level."""

    def old(placement: GridPlacement) -> GridPlacement:
        buckets = placement.plan.buckets
        if buckets is None:
            return placement
        policy = buckets.policy._replace(uneven=False, levels=1)
        buckets = replace(buckets, policy=policy)
        return replace(placement, plan=replace(placement.plan, buckets=buckets))

    return replace(plan, placements=tuple(map(old, plan.placements)))


def points(
    model: Model, degrees: Degrees, first: int, hardware: Hardware
) -> Iterator[tuple[str, Point]]:
    """Every plan on one number of ranks, by name."""
    settings = Settings()
    job = Job(model, degrees, settings, hardware)
    batches = Batch(TOKENS), Batch(max(1, TOKENS * first // degrees.world))
    weak, strong = (training_of(replace(job, batch=each)) for each in batches)
    assert weak is not None
    assert strong is not None

    def of(plan: GridPlan) -> Point:
        return point_of(plan, hardware, degrees.world, weak, strong)

    def plan_of(settings: Settings) -> GridPlan:
        return replace(job, settings=settings).grid_plan(0)

    plan = plan_of(settings)
    yield "samestep", of(plan)
    flat = replace(settings, buffers="flat")
    found = of(plan_of(flat))
    waits = replace(flat, overlap_gathers=False)  # a step alone has no forward to gather in
    alone = simulate(plan_of(waits), hardware)
    yield "samestep, flat", replace(found, step=alone.seconds, exposed=alone.exposed_seconds)
    if degrees.world <= MOST_BEFORE:
        yield "before", of(in_copies(plan_of(replace(settings, bucket_size=BEFORE))))
    yield from all_peers(plan, model, hardware, (weak, strong)).items()


def rows(curves: Mapping[str, Sequence[Point]], shown: Sequence[int]) -> Iterator[str]:
    """A table of some numbers of ranks."""
    yield COLUMNS
    yield "|---" * (COLUMNS.count("|") - 1) + "|"
    for ranks in shown:
        for name, curve in curves.items():
            for p in curve:
                if p.ranks != ranks:
                    continue
                cells = [
                    name, f"{p.ranks:,}", duration(p.step), duration(p.exposed),
                    duration(p.iteration), f"{p.iteration_exposed / p.iteration:.0%}",
                    size(p.sent), f"{p.sent_ratio:.2f}", f"{p.owners:.1f}", size(p.peak),
                ]  # fmt: skip
                yield f"| {' | '.join(cells)} |"


def tables_of(receipt: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Of each model what stands above its table, and the table."""
    for name, found in receipt["models"].items():
        curves = {
            label: [Point(**{key: each[key] for key in FIELDS}) for each in curve]
            for label, curve in found["plans"].items()
        }
        there = sorted({point.ranks for curve in curves.values() for point in curve})
        shown = there if len(there) <= 5 else [ranks for ranks in there if ranks in SHOWN]
        above = f"{name}, ep={found['mesh']['ep']}:" if found["mesh"]["ep"] > 1 else f"{name}:"
        yield above, list(rows(curves, shown))


def main(options: Options) -> None:
    hardware = PRESETS[options.hardware]
    files: dict[str, bytes] = {}
    models: dict[str, object] = {}
    for name in options.models:
        (axes, wanted), curves = CASES[name], dict[str, list[Point]]()
        model = load_model(name, torch.bfloat16)
        numbers = [ranks for ranks in numbers_of_ranks(axes, wanted) if ranks <= options.most]
        begun = time.process_time()
        for ranks in numbers:
            degrees = replace(axes, world=ranks)
            for label, found in points(model, degrees, numbers[0], hardware):
                curves.setdefault(label, []).append(found)
        spent = time.process_time() - begun
        title = f"{name}, ep={axes.ep}" if axes.ep > 1 else name
        print(f"\n## {title} ({spent:.0f} s of CPU)\n", flush=True)
        for line in rows(curves, numbers):
            print(line, flush=True)
        title += f", zero2, {hardware.name}, {TOKENS:,} tokens per rank"
        files[f"scaling_{name}.png"] = scaling_picture(curves, title)
        models[name] = {
            "mesh": {"ep": axes.ep},
            "cpu_seconds": spent,
            "plans": {label: as_json(curve) for label, curve in curves.items()},
        }
    content = {
        "kind": "samestep scaling",
        "format": 1,
        "hardware": hardware_as_json(hardware),
        "tokens": TOKENS,
        "models": models,
    }
    if options.page is not None:
        for above, lines in tables_of(content):
            put_table(options.page, lines, f"\n{above}\n")
        pictures = {name: files.pop(name) for name in list(files)}
        write_files(options.page.parent, pictures)
    files["scaling.json"] = json_file(content)
    write_files(options.out, files)


if __name__ == "__main__":
    run_script(main, Options)
