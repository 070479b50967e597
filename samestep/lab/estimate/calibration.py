"""Rates of hardware: measured on this machine, or computed from a benchmark receipt of a GPU.

`samestep plan --calibrate` measures on all ranks at once, since they share the machine when they
train, and writes the hardware file; `hardware_of` reads a receipt of `samestep bench step`.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console

import samestep
from samestep.comm.collectives import exchange_segments, gather_segments, reduce_segments, total
from samestep.comm.groups import RankGroup, registry
from samestep.groups.param_groups import complete
from samestep.lab.estimate.grid import one_axis
from samestep.lab.estimate.grid_plan import GridPlan, plan_on_grid
from samestep.lab.estimate.hardware import PRESETS, Hardware, hardware_as_json
from samestep.lab.estimate.options import Options
from samestep.lab.estimate.work import local_work
from samestep.launch.forked import run_forked
from samestep.models.parameter_sets import SETS
from samestep.plan.links import Link
from samestep.rules import RULES
from samestep.rules.orthogonalize import orthogonalize, orthogonalize_flops
from samestep.tooling.output import check_folder, json_file, write_files
from samestep.tooling.request import BadRequestError
from samestep.update.plain import Operand, update_elementwise

SIDES = (32, 64, 128, 256)
BYTES = (1 << 10, 1 << 22)  # of a small and a large collective
PIECES = (1 << 6, 1 << 21)  # elements of a slice that is updated
ROUNDS = 5
OURS, OURS_ADAMW = "ours", "ours-adamw"
FILE = "hardware.json"
Clock = Callable[[], float]  # seconds


class Measured(NamedTuple):
    """The rates and links that one rank has measured."""

    product_rates: dict[int, float]
    bytes_rate: float
    call: float
    model_rate: float
    links: dict[str, dict[int, Link]]


def measure(
    rank: int,
    sizes: tuple[int, ...],
    sides: tuple[int, ...] = SIDES,
    clock: Clock = time.perf_counter,
) -> Measured:
    """Measure on every rank at the same time; links for groups of each of the given `sizes`."""
    rates = {side: _product_rate(side, clock) for side in sides}
    bytes_rate, call = _elementwise(clock)
    links: dict[str, dict[int, Link]] = {}
    for size in sizes:
        group = registry.of_ranks(range(size))
        if group is None or group.size == 1:
            dist.barrier()
            continue
        for kind, launch in _collectives(group).items():
            links.setdefault(kind, {})[size] = _link(group, launch, clock)
        dist.barrier()
    return Measured(rates, bytes_rate, call, _model_rate(clock), links)


def hardware(found: Measured, ranks: int) -> Hardware:
    links = found.links.get("all_to_all") or {}
    usual = links[max(links)] if links else Link(0.0, 1e12)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Hardware(
        name="this machine",
        source=f"samestep plan --calibrate with {ranks} gloo ranks of one thread on this machine",
        device_memory=memory // ranks,
        ranks_per_host=ranks,
        product_rates=found.product_rates,
        bytes_rate=found.bytes_rate,
        call=found.call,
        model_rate=found.model_rate,
        inside=usual,
        between=usual,
        on_cpu=True,
        measured=found.links,
    )


def _seconds(call: Callable[[], object], clock: Clock) -> float:
    call()
    times = []
    for _ in range(ROUNDS):
        begun = clock()
        call()
        times.append(clock() - begun)
    return statistics.median(times)


def _product_rate(side: int, clock: Clock) -> float:
    """Return FLOP/s of orthogonalizing a square block of that side and one four times as long."""
    blocks = [torch.randn(1, side, side), torch.randn(1, side, 4 * side)]
    flops = sum(orthogonalize_flops(*block.shape[1:]) for block in blocks)
    dist.barrier()
    return flops / sum(_seconds(lambda b=block: orthogonalize(b), clock) for block in blocks)  # type: ignore[misc]


def _elementwise(clock: Clock) -> tuple[float, float]:
    """Return bytes per second of an AdamW update, and the seconds per piece whatever its size."""
    rule = RULES["adamw"]
    options = complete({"rule": "adamw"}, {})
    given = {key: options[key] for key in rule.defaults}
    scalars = {
        key: torch.tensor(float(value), dtype=torch.float64)
        for key, value in rule.scalars(options).items()
    }
    times = []
    for elements in PIECES:
        state = {"step": torch.zeros(())}
        state |= {key: torch.zeros(elements) for key in ("exp_avg", "exp_avg_sq")}
        operand = Operand(torch.zeros(elements), torch.ones(elements), state)
        dist.barrier()
        times.append(_seconds(lambda o=operand: update_elementwise(rule, o, scalars, given), clock))  # type: ignore[misc]
    call = times[0]
    return 28 * PIECES[1] / max(times[1] - call, 1e-9), call


def _model_rate(clock: Clock) -> float:
    """Return FLOP/s of a matrix product such as those of forward."""
    left, right = torch.randn(64, 512), torch.randn(512, 512)
    dist.barrier()
    return 2 * 64 * 512 * 512 / _seconds(lambda: left @ right, clock)


def _collectives(group: RankGroup) -> dict[str, Callable[[int], object]]:
    """Return functions by kind that launch a collective of so many bytes, and wait for it."""

    def even(carried: int, launch: Callable[..., Any], parts: int) -> object:
        count = carried // 4 * group.size // (group.size - 1)
        own = max(count // group.size, 1)
        return launch("calibration", torch.ones(parts * own), [own] * group.size, group).wait()

    def both(carried: int) -> object:
        return even(carried, exchange_segments, group.size), even(carried, gather_segments, 1)

    def reduce(carried: int) -> object:
        count = carried // 4 * group.size // (2 * (group.size - 1))
        return total("calibration", torch.ones(max(count, group.size)), group).wait()

    return {
        "all_to_all": both,
        "reduce_scatter": lambda carried: even(carried, reduce_segments, group.size),
        "all_reduce": reduce,
    }


def _link(group: RankGroup, launch: Callable[[int], object], clock: Clock) -> Link:
    """Fit latency and bandwidth to the times of a small and a large collective."""
    both = 2 if isinstance(launch(BYTES[0]), tuple) else 1
    small, large = (
        _together(group, lambda size=size: launch(size), clock) / both  # type: ignore[misc]
        for size in BYTES
    )
    per_byte = max((large - small) / (BYTES[1] - BYTES[0]), 1e-13)
    return Link(max(small - per_byte * BYTES[0], 1e-7), 1 / per_byte)


def _together(group: RankGroup, call: Callable[[], object], clock: Clock) -> float:
    """Return the mean over ranks of each rank's median over rounds, in seconds."""
    seconds = torch.tensor([_seconds(call, clock)], dtype=torch.float64)
    return float(total("mean time", seconds, group).wait()) / group.size


def measured_ms(receipt: Mapping[str, Any], contestant: str = OURS) -> float:
    """Return the median time of a step in the receipt's only parameter set, in ms."""
    (found,) = (c for c in receipt["sets"][0]["contestants"] if c["name"] == contestant)
    return float(found["ms"]["median"])


def one_process(name: str, *, muon: bool = True) -> GridPlan:
    """Plan a parameter set of `samestep bench step` on one device; with Muon, clipping is on."""
    shapes = SETS[name]
    params = [
        (f"{'matrix' if place < len(shapes.matrices) else 'other'}.{place}", shape)
        for place, shape in enumerate((*shapes.matrices, *shapes.others))
    ]
    named = [(n, torch.nn.Parameter(torch.empty(s, device="meta"))) for n, s in params]
    rules = {"matrix": "muon" if muon else "adamw", "other": "adamw"}
    groups = [
        {"params": [pair for pair in named if pair[0].startswith(kind)], "rule": rule}
        for kind, rule in rules.items()
    ]
    optimizer = samestep.MuonAdamW(groups, max_grad_norm=1.0 if muon else None)
    return plan_on_grid(optimizer, one_axis(1), device=torch.device("cuda"))


def hardware_of(receipt: Mapping[str, Any]) -> Hardware:
    """Return the device that a receipt was measured on, with the links of the preset h200x8.

    Bytes are read and written at the measured speed of a copy. Time that AdamW alone takes beyond
    that is time per call; time that Muon takes beyond both is time of matrix products.
    """
    name = receipt["sets"][0]["set"]
    found = replace(
        PRESETS["h200x8"],
        name=f"{receipt['device']['name']}, from {name}",
        source=f"samestep bench step, {receipt['date']}",
        bytes_rate=1e12 * receipt["ceilings"]["terabytes_per_second"],
        product_rates={1: 1e30},
        call=0.0,
    )
    adamw = local_work(one_process(name, muon=False), found)
    beyond = 1e-3 * measured_ms(receipt, OURS_ADAMW) - float(adamw.seconds(found))
    found = replace(found, call=beyond / float(adamw.pieces))
    muon = local_work(one_process(name), found)
    products = 1e-3 * measured_ms(receipt) - float(muon.seconds(found))
    return replace(found, product_rates={1: float(muon.flops) / products})


def calibrate(options: Options) -> None:
    """Measure this machine on forked gloo ranks and write the hardware file.

    Rates of a GPU come from receipts of `samestep bench step` (`hardware_of`).
    """
    if options.world_size < 2:
        raise BadRequestError(f"--world-size must be at least 2, got {options.world_size}")
    folder = options.out or Path()
    check_folder(folder)
    sizes = (*tuple(n for n in (2, 4, 8, 16) if n < options.world_size), options.world_size)
    console = Console(highlight=False)
    console.print(f"Measuring with {options.world_size} gloo ranks ...")
    found: list[Measured] = run_forked(
        options.world_size, measure, sizes, timeout=math.inf, collective_timeout=120.0
    )
    content = hardware_as_json(hardware(found[0], options.world_size))
    write_files(folder, {FILE: json_file(content)})
    rates = ", ".join(f"{side}: {rate / 1e9:.3g}" for side, rate in found[0].product_rates.items())
    console.print(f"GFLOP/s of orthogonalization by side of a block: {rates}", soft_wrap=True)
    console.print(
        f"Wrote {FILE} to {folder}: samestep plan MODEL --hardware {folder / FILE}", soft_wrap=True
    )
