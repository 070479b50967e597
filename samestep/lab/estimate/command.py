"""`samestep plan`: plan, show the tables, write the files."""

import gc
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from typing import Any

import torch
from rich.console import Console

from samestep.groups.state_flags import offload_of
from samestep.lab.common.page import templates
from samestep.lab.common.provenance import versions
from samestep.lab.estimate import tables
from samestep.lab.estimate.cluster import STAGES, Job, Settings, Stage
from samestep.lab.estimate.decoder import SHAPES
from samestep.lab.estimate.figures import (
    StageFigures,
    StageNeeds,
    cost_of_planning,
    figures_as_json,
    judge,
    stage_figures,
    stage_needs,
)
from samestep.lab.estimate.hardware import Hardware, find_hardware
from samestep.lab.estimate.model import load_model
from samestep.lab.estimate.options import Options as Options
from samestep.lab.estimate.options import not_counted, questions, read_batch, read_mesh
from samestep.lab.estimate.scaling import Point, as_json, batch_of, points, table_of
from samestep.lab.estimate.slots import bubble
from samestep.lab.estimate.timeline import Timeline, chrome_trace
from samestep.tooling.output import check_folder, json_file, write_files
from samestep.tooling.request import BadRequestError

MOST_DRAWN, DRAWN_OF_A_STAGE = 8, 2  # ranks in a picture of a timeline
# Shares of the device's memory that stay free: for activations that nobody counted, or for what the
# allocator and NCCL take.
FOR_ACTIVATIONS, FREE = 0.3, 0.1


def run(options: Options) -> None:
    if options.calibrate:
        from samestep.lab.estimate.calibration import calibrate

        calibrate(options)
        return
    with _no_collection():
        _plan(options)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Plans have a million small parts and no cycles, for which Python would look in vain."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _plan(options: Options) -> None:
    since = time.monotonic()
    if not options.model:
        raise BadRequestError(
            f"MODEL is missing: give a preset ({', '.join(SHAPES)}), a Hugging Face config.json or "
            "PACKAGE:FACTORY"
        )
    if options.reserve is not None and not 0 <= options.reserve < 1:
        raise BadRequestError(f"--reserve must be from 0 to below 1, got {options.reserve}")
    if options.remainders and options.dtype != "bfloat16":
        raise BadRequestError(
            f"--remainders needs bfloat16 parameters, and --dtype is {options.dtype}, which has no "
            "main parameters: leave one of the two out"
        )
    hardware = find_hardware(options.hardware)
    degrees = read_mesh(options.mesh, options.ranks, sequence_parallel=options.sequence_parallel)
    batch = read_batch(options, degrees)
    model = load_model(options.model, getattr(torch, options.dtype))
    if options.out is not None:
        check_folder(options.out)
    settings = settings_of(options)
    job = Job(model, degrees, settings, hardware, batch)
    console = Console(highlight=False)
    most = MOST_DRAWN if degrees.pp == 1 else DRAWN_OF_A_STAGE
    drawn = 0 if options.out is None else most
    figures, timelines = [], []
    for stage in job.stages():
        found, _, timeline = stage_figures(job, stage, drawn=drawn)
        figures.append(found)
        timelines.append(timeline)
    worst = max(figures, key=lambda each: each.peak)
    every = _every_stage(job, worst)
    peaks = {stage: needs.peak for stage, needs in every.items()}
    has_activations = worst.activations is not None
    reserve = options.reserve
    if reserve is None:
        reserve = FREE if has_activations else FOR_ACTIVATIONS
    verdict = judge(
        options.sharding, peaks, hardware.device_memory, reserve, activations=has_activations
    )
    shown = [
        tables.memory_table(figures, degrees.world // degrees.pp),
        tables.activations_table(figures),
        tables.traffic_table(max(figures, key=lambda each: each.sent), degrees.pp),
        tables.owner_table(worst),
        tables.choices_table(worst),
        tables.time_table(max(figures, key=lambda each: each.step_seconds), batch),
        tables.stages_table(every, hardware.device_memory),
    ]
    shown = [table for table in shown if table.rows]
    asks = questions(model, degrees, options.sequence)
    lacks = not_counted(model, degrees, options.sharding, batch)
    content = {
        "kind": "samestep plan",
        "format": 1,
        "command": shlex.join(["samestep", "plan", *_words()]),
        "versions": versions(),
        "model": {
            "name": model.name, "source": model.source, "parameters": model.parameters,
        },
        "mesh": {**degrees.sizes, "ranks": degrees.world},
        "settings": asdict(settings),
        "tokens": 0 if batch is None else batch.all_tokens,
        "batch": None if batch is None else asdict(batch),
        "bubble": None if batch is None else float(
            bubble(degrees.pp, batch.micro_batches, batch.stages_per_rank)
        ),
        "hardware": {"name": hardware.name, "source": hardware.source},
        "questions": asks,
        "not_counted": lacks,
        "stages": [figures_as_json(each) for each in figures],
        "every_stage": {s: {"peak": needs.peak, "sent": needs.sent} for s, needs in every.items()},
        "verdict": asdict(verdict),
    }  # fmt: skip
    curve: list[Point] = []
    if options.scaling:
        of_rank, curve = batch_of(job), list(points(job))
        content["scaling"] = {"batch": asdict(of_rank), "points": as_json(curve)}
        shown.append(table_of(curve, of_rank))
    gb = f"{hardware.device_memory / 1e9:.0f} GB"
    about = (
        f"{model.name} ({_counted(model.parameters)} parameters) on {degrees.world:,} "
        f"rank{'s' * (degrees.world > 1)} of {hardware.name} ({degrees.name}, {gb}), "
        f"{options.sharding}"
    )
    first = verdict.headline(
        about, figures, hardware.device_memory, activations=has_activations,
        iteration=batch is not None,
    )  # fmt: skip
    console.print(first, soft_wrap=True)
    console.print(f"{verdict.advice}\n", soft_wrap=True)
    for line in asks:
        console.print(f"note: {line}", soft_wrap=True)
    for table in shown:
        console.print(table.on_screen())
    for line in lacks:
        console.print(f"not counted: {line}", soft_wrap=True)
    content["planning"] = cost_of_planning(since)
    if options.out is not None:
        pairs = zip(figures, timelines, strict=True)
        named = {f"stage {each.stage}" if degrees.pp > 1 else "step": t for each, t in pairs}
        files = _files(options, content, shown, figures, named, hardware, every, curve)
        write_files(options.out, files)
        console.print(f"Wrote {', '.join(files)} to {options.out}.", soft_wrap=True)


def _counted(elements: int) -> str:
    """82240 as 82.24 K, and so with M and B; fewer than a thousand as they are."""
    for unit, size in {"B": 10**9, "M": 10**6, "K": 10**3}.items():
        if elements >= size:
            return f"{elements / size:,.4g} {unit}"
    return str(elements)


def settings_of(options: Options) -> Settings:
    return Settings(
        sharding=options.sharding,
        buffers=options.buffers,
        overlap=options.overlap,
        muon=options.rule == "muon",
        master_weights=options.dtype == "bfloat16",
        state=options.state,
        remainders=options.remainders,
        bucket_size=options.bucket_size,
        stages_per_rank=options.stages_per_rank,
        offload=offload_of(options.offload),
    )


def _every_stage(job: Job, worst: StageFigures) -> dict[Stage, StageNeeds]:
    """The plans of all stages on this mesh."""
    every: dict[Stage, StageNeeds] = {}
    settings = job.settings
    for stage in STAGES:
        if stage == settings.sharding:
            every[stage] = worst
            continue
        flat = settings.buffers == "flat" and stage in ("zero1", "zero2")
        buffers = "flat" if flat else "per_parameter"
        other = replace(job, settings=replace(settings, sharding=stage, buffers=buffers))
        with suppress(BadRequestError):  # does not exist here
            every[stage] = stage_needs(other, other.grid_plan(worst.stage), worst.stage)
    return every


def _files(
    options: Options,
    content: dict[str, Any],
    shown: list[tables.Table],
    figures: list[StageFigures],
    timelines: dict[str, Timeline],
    hardware: Hardware,
    every: dict[Stage, StageNeeds],
    curve: list[Point],
) -> dict[str, bytes]:
    from samestep.lab.estimate.pictures import gantt, memory_bars, scaling_picture

    title = f"{content['model']['name']}, {options.sharding}, {content['mesh']['ranks']:,} ranks"
    drawn = gantt(timelines, title)
    memory = memory_bars(every, hardware.device_memory)
    for table in shown:
        if table.title.startswith("Every sharding"):
            table.show("memory by stage", memory)
        if table.title.startswith("Simulated time"):
            table.show("timeline of a step", drawn)
    files = {"timeline.png": drawn, "timeline_trace.json.gz": chrome_trace(timelines)}
    if curve:
        name = content["model"]["name"]
        about = f"{name}, {options.sharding}, {hardware.name}, data ranks grow"
        files["scaling.png"] = scaling_picture({name: curve}, about)
        shown[-1].show("scaling", files["scaling.png"])
    page = _page(content, shown, figures)
    return {
        "plan.json": json_file(content),
        "plan.html": page.encode(),
        **files,
    }


def _page(content: dict[str, Any], shown: list[tables.Table], figures: list[StageFigures]) -> str:
    slowest = max(figures, key=lambda each: each.step_seconds)
    return (
        templates("samestep.lab.estimate")
        .get_template("plan.html.jinja")
        .render(plan=content, tables=shown, tiles=tables.tiles(content, slowest))
    )


def _words() -> list[str]:
    words = sys.argv[1:]
    return words[1:] if words[:1] == ["plan"] else words
