"""Predicted against measured time of an optimizer step, after a calibration in the same run.

Ranks measure the rates of the machine, then take steps of every model in turns, and calibrate once
more. The prediction is the simulator's, with the mean of both calibrations. Gradients are there
when a step begins, and all ranks begin together; a step is as long as the slowest rank's.

With `--hosts 2 --clock cpu` the modelled link is fast inside hosts and slow between them, and
buckets go in one level and in two.
"""

import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
import torch.distributed as dist

import samestep
from benchmarks import heading, run_script, slowest, write_json
from benchmarks.modelled_link import ModelledLink, Speed, Speeds
from samestep.lab.bench.gpu.measure import in_rounds
from samestep.lab.bench.gpu.report import Screen
from samestep.lab.estimate.calibration import Measured, hardware, measure
from samestep.lab.estimate.decoder import Decoder, Shape
from samestep.lab.estimate.grid import one_axis
from samestep.lab.estimate.grid_plan import plan_on_grid
from samestep.lab.estimate.hardware import Hardware, hardware_as_json
from samestep.lab.estimate.timeline import simulate
from samestep.launch.forked import run_forked
from samestep.plan.links import Fabric, Link
from samestep.tooling.output import check_folder
from samestep.tooling.request import BadRequestError

MODELS = {
    "small": Shape("small", 512, 64, 2, 1, 1, 64, 256, gated=False),
    "middle": Shape("middle", 512, 128, 3, 2, 2, 64, 512, gated=False),
    "large": Shape("large", 1024, 192, 4, 3, 3, 64, 768, gated=False),
}
SIDES = (32, 64, 128, 192)  # of blocks that are measured
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero2": {"sharding": "zero2"},
    "flat zero1": {"sharding": "zero1", "buffers": "flat"},
    "none": {"sharding": "none"},
}
LEVELS: dict[str, dict[str, Any]] = {
    f"{layout} in {'two' if two else 'one'}": {**LAYOUTS[layout], "two_levels": two}
    for layout in ("zero2", "flat zero1")
    for two in (False, True)
}
BAR = 0.25
KINDS = ("all_to_all", "all_reduce", "reduce_scatter")
LATENCY, BANDWIDTH = 2e-4, 5e7  # of the modelled link
INSIDE = Link(2e-4, 4e8)  # between ranks of a modelled host
BUCKETS = 100_000  # elements, where there are hosts: their links are not those that ranks plan for


@dataclass(frozen=True)
class Options:
    """What to measure."""

    ranks: tuple[int, ...] = (2, 4)
    rounds: int = 7
    clock: Annotated[
        Literal["wall", "cpu"],
        '"cpu": computing time plus waits of a modelled link, for a machine with other work',
    ] = "wall"
    hosts: Annotated[int, "modelled ones, of neighbouring ranks"] = 1
    out: Path = Path("out/bench")


class Found(NamedTuple):
    """What a rank has seen."""

    before: Measured
    after: Measured
    seconds: dict[str, list[float]]


def optimizer_of(model: torch.nn.Module, layout: str, ranks: int, hosts: int) -> samestep.MuonAdamW:
    if hosts == 1:
        return samestep.MuonAdamW(model, **LAYOUTS[layout])
    per_host = ranks // hosts
    return samestep.MuonAdamW(model, ranks_per_host=per_host, bucket_size=BUCKETS, **LEVELS[layout])


def speeds(machine: Hardware, per_host: int) -> Speeds:
    """What the simulator says of groups of ranks on these hosts."""

    def of(kind: str, members: Sequence[int]) -> Speed:
        hosts = len({member // per_host for member in members})
        on_host = len(members) // hosts
        fabric = Fabric(machine.inside, machine.between, len(members), on_host)
        latency = machine.seconds(kind, 0.0, fabric)
        return Speed(latency, 1e6 / (machine.seconds(kind, 1e6, fabric) - latency))

    return of


def on_rank(rank: int, rounds: int, link: ModelledLink | None, hosts: int) -> Found:
    now = time.perf_counter
    if link is not None:
        link.install()
        now = link.now
    ranks = dist.get_world_size()
    measured = (ranks,) if link is None else ()
    trainings = {}
    for name, config in MODELS.items():
        for layout in LAYOUTS if hosts == 1 else LEVELS:
            torch.manual_seed(0)
            model = Decoder(config)
            trainings[f"{name}, {layout}"] = model, optimizer_of(model, layout, ranks, hosts)
    before = measure(rank, measured, SIDES, now)
    generator = torch.Generator().manual_seed(rank)

    def turn(number: int, model: Decoder, optimizer: samestep.MuonAdamW) -> float:
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator)
        dist.barrier()
        if link is not None and hosts > 1:
            machine = on_hosts(hardware(before, ranks), ranks, hosts)
            link.set_speeds(speeds(machine, ranks // hosts))
        elif link is not None:
            link.set_speed(LATENCY, BANDWIDTH)
        begun = now()
        optimizer.step()
        took = now() - begun
        if link is not None:
            link.set_speed(0.0, math.inf)
            link.transfers.clear()
        optimizer.zero_grad()
        return slowest(took)

    turns = {
        key: partial(turn, model=model, optimizer=optimizer)
        for key, (model, optimizer) in trainings.items()
    }
    seconds = in_rounds(turns, rounds, warmup=1)
    return Found(before, measure(rank, measured, SIDES, now), seconds)


def on_hosts(machine: Hardware, ranks: int, hosts: int) -> Hardware:
    """With the modelled links between them and inside."""
    between = Link(LATENCY, BANDWIDTH)
    return replace(
        machine, inside=INSIDE, between=between, ranks_per_host=ranks // hosts, measured={}
    )


def mean_of(found: Found, ranks: int) -> Hardware:
    """The rates between both calibrations."""
    both = found.before, found.after
    rate, mean = statistics.harmonic_mean, statistics.mean
    links = {kind: {ranks: Link(LATENCY, BANDWIDTH)} for kind in KINDS}
    if found.before.links:
        links = {}
        for kind in found.before.links:
            pair = [each.links[kind][ranks] for each in both]
            bandwidth = rate([link.bandwidth for link in pair])
            links[kind] = {ranks: Link(mean(link.latency for link in pair), bandwidth)}
    between = Measured(
        product_rates={
            side: rate([each.product_rates[side] for each in both])
            for side in found.before.product_rates
        },
        bytes_rate=rate([each.bytes_rate for each in both]),
        call=mean(each.call for each in both),
        model_rate=rate([each.model_rate for each in both]),
        links=links,
    )
    return hardware(between, ranks)


def main(options: Options) -> None:
    check_folder(options.out)
    screen = Screen()
    rows: list[dict[str, Any]] = []
    machines = {}
    load, hosts = os.getloadavg(), options.hosts
    if hosts > 1 and (options.clock != "cpu" or any(ranks % hosts for ranks in options.ranks)):
        raise BadRequestError("--hosts needs --clock cpu, and --ranks that it divides")
    for ranks in options.ranks:
        link = None
        if options.clock == "cpu":
            link = ModelledLink(ranks, groups=1 if hosts == 1 else 3)
        found: list[Found] = run_forked(
            ranks, on_rank, options.rounds, link, hosts, timeout=float("inf"),
            collective_timeout=300.0,
        )  # fmt: skip
        machine = mean_of(found[0], ranks)
        if hosts > 1:
            machine = on_hosts(machine, ranks, hosts)
        machines[str(ranks)] = hardware_as_json(machine)
        drift = max(
            abs(found[0].after.product_rates[side] / rate - 1)
            for side, rate in found[0].before.product_rates.items()
        )
        for key, times in found[0].seconds.items():
            name, layout = key.split(", ")
            with torch.device("meta"):
                model = Decoder(MODELS[name])
            optimizer = optimizer_of(model, layout, ranks, hosts)
            on_links = machine if hosts > 1 else None
            plan = plan_on_grid(optimizer, one_axis(ranks), hardware=on_links)
            timeline = simulate(plan, machine)
            measured = statistics.median(times)
            rows.append(
                {
                    "ranks": ranks,
                    "model": name,
                    "layout": layout,
                    "parameters": sum(p.numel() for p in model.parameters()),
                    "predicted_ms": 1e3 * timeline.seconds,
                    "measured_ms": 1e3 * measured,
                    "least_ms": 1e3 * min(times),
                    "most_ms": 1e3 * max(times),
                    "error": timeline.seconds / measured - 1,
                    "calibrations_differ_by": drift,
                    "parts_ms": {k: 1e3 * v for k, v in timeline.by_operation.items()},
                }
            )
    screen.table(
        f"step, predicted and measured; load {load[0]:.1f} -> {os.getloadavg()[0]:.1f}",
        ("ranks", "model", "layout", "predicted ms", "measured ms", "range", "error"),
        [
            [
                str(row["ranks"]), row["model"], row["layout"], f"{row['predicted_ms']:.1f}",
                f"{row['measured_ms']:.1f}", f"{row['least_ms']:.1f} to {row['most_ms']:.1f}",
                f"{row['error']:+.0%}",
            ]
            for row in rows
        ],
        texts=3,
    )  # fmt: skip
    within = sum(abs(row["error"]) <= BAR for row in rows)
    screen.say(f"{within} of {len(rows)} within {BAR:.0%}")
    content = {
        **heading("plan_time", options, load[0]),
        "rows": rows,
        "within": within,
        "bar": BAR,
        "hardware": machines,
    }
    name = options.clock if hosts == 1 else f"{hosts}_hosts"
    write_json(options.out, f"plan_time_{name}.json", content, indent=1)


if __name__ == "__main__":
    run_script(main, Options)
