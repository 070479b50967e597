"""Two "hosts" of one machine with slow cards: what crosses between them in one level and in two.

Every rank is a network namespace with a card of its own, which is slow (`tc`) towards ranks of the
other host. Ranks have gradients of their own and take steps in every layout, in one level and in
two. Told are the bytes that the cards have counted between hosts, with headers, over the least
possible: the sum of each gradient crosses once, and each updated parameter; and the time of a step
beside the simulator's. With sums in the order of hosts both must give the same bits.

    python -m benchmarks.two_levels --out receipts/two_levels

Needs Linux and root (`ip netns`, `unshare`, `tc`).
"""

import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist

import samestep
from benchmarks import run_script, slowest, write_json
from benchmarks.namespaces import bytes_to_other_hosts, cards, end, require_hosts, start_on_card
from benchmarks.plan_time import MODELS, SIDES
from samestep.comm.collectives import exchange_segments
from samestep.comm.groups import registry
from samestep.comm.integrity.checksum import checksums
from samestep.lab.bench.gpu.report import Screen
from samestep.lab.estimate.calibration import Measured, hardware, measure
from samestep.lab.estimate.decoder import Decoder
from samestep.lab.estimate.grid import one_axis
from samestep.lab.estimate.grid_plan import plan_on_grid
from samestep.lab.estimate.hardware import Hardware
from samestep.lab.estimate.timeline import simulate
from samestep.plan.links import CPU_LINKS, Link
from samestep.tooling.output import check_folder

MODEL = MODELS["large"]
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero2": {"sharding": "zero2"},
    "zero2, ordered": {"sharding": "zero2", "reduction": "ordered"},
    "flat zero1, ordered": {"sharding": "zero1", "buffers": "flat", "reduction": "ordered"},
}
HOSTS = 2
PROBE = 250_000  # elements of 4 bytes that are exchanged to find out how fast a link is
BUCKET = 4_000_000  # elements, all in one: gloo has two on their way at a time, others one
TIMEOUT = 120.0
ASKED = "SAMESTEP_TWO_LEVELS"  # what ranks are to do, for their environment


@dataclass(frozen=True)
class Options:
    """What to run."""

    ranks_per_host: int = 4
    steps: int = 2
    pace: Annotated[
        float, "bytes per second between hosts, in each direction of each rank's card"
    ] = 2e6
    limit: Annotated[float, "seconds for the whole run"] = 900.0
    out: Path = Path("out/two_levels")


def optimizer_of(model: torch.nn.Module, per_host: int, **layout: Any) -> samestep.MuonAdamW:
    return samestep.MuonAdamW(model, lr=1e-2, ranks_per_host=per_host, bucket_size=BUCKET, **layout)


def on_rank(per_host: int, steps: int, *, shaped: bool) -> list[dict[str, Any]]:
    """A row per layout and number of levels; shaped: there are links between hosts to look at."""
    rank = dist.get_rank()
    rows = []
    for layout, keywords in LAYOUTS.items():
        for two in (False, True):
            torch.manual_seed(0)
            model = Decoder(MODEL)
            optimizer = optimizer_of(model, per_host, two_levels=two, **keywords)
            generator = torch.Generator().manual_seed(rank)
            seconds, crossed = [], []
            for _ in range(steps + 1):
                for param in model.parameters():
                    param.grad = torch.randn(param.shape, generator=generator)
                dist.barrier()
                before = bytes_to_other_hosts() if shaped else 0
                dist.barrier()
                begun = time.perf_counter()
                optimizer.step()
                dist.barrier()
                seconds.append(time.perf_counter() - begun)
                crossed.append((bytes_to_other_hosts() if shaped else 0) - before)
                optimizer.zero_grad()
            rows.append(
                {
                    "layout": layout,
                    "levels": 1 + two,
                    "least_bytes": 8 * sum(param.numel() for param in model.parameters()),
                    "crossed_bytes": statistics.median(crossed[1:]),
                    "measured_ms": 1e3 * statistics.median(seconds[1:]),
                    "checksum": checksums(list(model.parameters())).tolist(),
                }
            )
    return rows


def pace_between(per_host: int) -> float:
    """Bytes per second that a rank and the one at its place on the other host exchange.

    Less than cards let pass: while data goes both ways, answers to it wait behind data.
    """
    rank = dist.get_rank()
    group = registry.of_members((rank % per_host, rank % per_host + per_host))
    assert group is not None
    buffer = torch.zeros(2 * PROBE)
    seconds = []
    for _ in range(4):
        dist.barrier()
        begun = time.perf_counter()
        exchange_segments("probe", buffer, [PROBE, PROBE], group).wait()
        seconds.append(time.perf_counter() - begun)
    return 4 * PROBE / slowest(statistics.median(seconds[1:]))


def predicted_seconds(machine: Hardware, levels: int, layout: str) -> float:
    """By the simulator."""
    per_host, keywords = machine.ranks_per_host, {**LAYOUTS[layout], "two_levels": levels == 2}
    with torch.device("meta"):
        optimizer = optimizer_of(Decoder(MODEL), per_host, **keywords)
    plan = plan_on_grid(optimizer, one_axis(HOSTS * per_host), hardware=machine)
    return simulate(plan, machine).seconds


def run(options: Options) -> list[dict[str, Any]]:
    """What every rank has told, in their order."""
    per_host = options.ranks_per_host
    with (
        cards(HOSTS, per_host, options.pace),
        tempfile.TemporaryDirectory(prefix="two_levels_") as folder,
    ):
        asked = json.dumps([per_host, options.steps, folder])
        started: list[subprocess.Popen[bytes]] = []
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(HOSTS * per_host)]
        deadline = time.time() + options.limit
        try:
            for rank, log in enumerate(logs):
                words = ["-m", "benchmarks.two_levels"]
                started.append(start_on_card(words, rank, HOSTS, per_host, log, **{ASKED: asked}))
            for rank, (process, log) in enumerate(zip(started, logs, strict=True)):
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(1.0, deadline - time.time()))
                if process.returncode != 0:
                    said = log.read_text()[-3000:]
                    raise RuntimeError(f"rank {rank} ended with {process.returncode}: {said}")
        finally:
            end(started)
        return [json.loads(log.with_suffix(".json").read_text()) for log in logs]


def problems_of(told: list[list[dict[str, Any]]]) -> list[str]:
    """Bits that differ between ranks, or between one level and two where sums are ordered."""
    problems = []
    for row, *others in zip(*told, strict=True):
        if any(other["checksum"] != row["checksum"] for other in others):
            problems.append(f"{row['layout']}, levels {row['levels']}: ranks differ")
    ordered = [row for row in told[0] if "ordered" in row["layout"]]
    if len({json.dumps(row["checksum"]) for row in ordered}) > 1:
        problems.append("ordered sums have other bits in another layout, or in two levels")
    return problems


def main(options: Options) -> int:
    """0: ranks and levels have the same bits; 1: they do not."""
    require_hosts()
    check_folder(options.out)
    load = os.getloadavg()[0]
    told = run(options)
    problems = problems_of([each["rows"] for each in told])
    rows, found, pace = told[0]["rows"], told[0]["measured"], told[0]["pace"]
    for number, row in enumerate(rows):
        of_ranks = [each["rows"][number]["crossed_bytes"] for each in told]
        row["crossed_bytes"] = sum(of_ranks)
        row["busiest_over_mean"] = max(of_ranks) / statistics.mean(of_ranks)
    found["product_rates"] = {int(side): rate for side, rate in found["product_rates"].items()}
    # The rates that ranks have measured, on links as they are here.
    machine = replace(
        hardware(Measured(**found), HOSTS * options.ranks_per_host),
        ranks_per_host=options.ranks_per_host,
        inside=CPU_LINKS[0],
        between=Link(CPU_LINKS[1].latency, pace),
        measured={},
    )
    screen, cells = Screen(), []
    for row in rows:
        row["predicted_ms"] = 1e3 * predicted_seconds(machine, row["levels"], row["layout"])
        row["over_least"] = row["crossed_bytes"] / row["least_bytes"]
        row["error"] = row["predicted_ms"] / row["measured_ms"] - 1
        cells.append(
            [
                row["layout"], str(row["levels"]), f"{row['crossed_bytes'] / 1e6:.2f}",
                f"{row['over_least']:.3f}", f"{row['predicted_ms']:.0f}",
                f"{row['measured_ms']:.0f}", f"{row['error']:+.0%}",
            ]
        )  # fmt: skip
    screen.table(
        f"{HOSTS} hosts of {options.ranks_per_host} ranks, {options.pace / 1e6:g} MB/s each; "
        f"load {load:.1f} -> {os.getloadavg()[0]:.1f}",
        ("layout", "levels", "crossed, MB", "over least", "predicted ms", "measured ms", "error"),
        cells,
    )
    screen.say(f"pairs of ranks on different hosts exchange {pace / 1e6:.2f} MB/s")
    screen.say("\n".join(problems) or "the same bits on all ranks, in one level and in two")
    receipt = {
        "kind": "samestep two levels",
        "format": 1,
        "asked": {**asdict(options), "out": str(options.out)},
        "pace_between": pace,
        "rows": rows,
        "problems": problems,
        "load_average": {"before": load, "after": os.getloadavg()[0], "cpus": os.cpu_count()},
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }
    write_json(options.out, "receipt.json", receipt, indent=1)
    return 1 if problems else 0


def rank_main(asked: str) -> None:
    """One rank, as torchrun has started it."""
    per_host, steps, folder = json.loads(asked)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    found = measure(dist.get_rank(), (), SIDES)
    told = {
        "measured": found._asdict(),
        "pace": pace_between(per_host),
        "rows": on_rank(per_host, steps, shaped=True),
    }
    (Path(folder) / f"rank{dist.get_rank()}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if ASKED in os.environ:
        rank_main(os.environ[ASKED])
    else:
        run_script(main, Options)
