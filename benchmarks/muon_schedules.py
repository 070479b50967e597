"""How much communication of Muon over FSDP2 shows, in each schedule, on a modelled link.

python -m benchmarks.muon_schedules --ranks 4 --out DIR   # measure; needs torch alone
python -m benchmarks.muon_schedules --draw DIR            # pictures of that; needs matplotlib
"""

import argparse
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import samestep
from benchmarks.modelled_link import ModelledLink, Transfer
from benchmarks.muon_exposure import Case, Results, measure, table, verdicts
from benchmarks.muon_runs import FREE, RankResult, Regime, Shape, on_rank
from benchmarks.timeline import Trace, chrome_trace
from samestep.launch import run_forked
from samestep.tooling.output import check_folder, write_files

RESULT, TRACE = "muon_schedules.json", "muon_schedules_trace.json.gz"
LINKS = ("fast", "middle", "slow")
DRAWN = {
    "muon_distributed": ("Distributed: every rank gathers all", Case("gather", False)),
    "muon_parallel": ("Parallel, owners in turn", Case("parallel", False, "cyclic")),
    "muon_pipelined": ("Pipelined, owners in turn", Case("parallel", True, "cyclic")),
    "muon_balanced": ("Pipelined, owners by FLOPs", Case("parallel", True, "balanced")),
}


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """What to do."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5, help="steps of a case on a link")
    parser.add_argument("--width", type=int, default=Shape.width)
    parser.add_argument("--layers", type=int, default=Shape.layers)
    parser.add_argument(
        "--ratios", type=float, nargs=len(LINKS), default=[0.3, 0.6, 0.9],
        help="communication against computing on the fast, the middle and the slow link",
    )  # fmt: skip
    parser.add_argument("--latency", type=float, default=2e-4, help="seconds per transfer")
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall",
        help="cpu: computing time plus modelled waits, for a machine that has other work too",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    parser.add_argument("--draw", type=Path, help="only draw, what is in this folder")
    return parser.parse_args(given)


def traces_of(ranks: Sequence[RankResult], case: Case, link: str, number: int) -> list[Trace]:
    """Of all ranks in one step."""
    return [result.traces[case, link][number] for result in ranks]


def run(options: argparse.Namespace) -> None:
    """Measure, print the table and how the bar was met, write JSON and a trace."""
    check_folder(options.out)
    load = [os.getloadavg()[0]]
    shape = Shape(width=options.width, layers=options.layers)
    regime = Regime(options.latency, dict(zip(LINKS, options.ratios, strict=True)))
    link = ModelledLink(options.ranks, options.clock)
    ranks: list[RankResult] = run_forked(
        options.ranks, on_rank, shape, regime, options.rounds, link, LINKS,
        timeout=float("inf"), collective_timeout=300.0,
    )  # fmt: skip
    load.append(os.getloadavg()[0])
    first = ranks[0]
    steps = {
        key: [measure(traces_of(ranks, *key, number)) for number in range(options.rounds)]
        for key in first.traces
    }
    results = Results(steps, FREE)
    rows = sorted(results.rows(), key=lambda row: LINKS.index(row["link"]))
    shown = {
        name: (title, traces_of(ranks, case, "middle", results.typical(case, "middle")))
        for name, (title, case) in DRAWN.items()
    }
    bandwidths = {name: first.speeds[name].bandwidth / 1e6 for name in LINKS}
    print(table(rows))
    print("ms, medians of steps; exposed and idle are means over ranks.")
    print(*verdicts(rows), sep="\n")
    print("MB/s:", ", ".join(f"{name} {speed:.1f}" for name, speed in bandwidths.items()))
    print(f"load of this machine before and after: {load[0]:.1f}, {load[1]:.1f}")
    receipt = {
        "command": "python -m benchmarks.muon_schedules",
        "ranks": options.ranks,
        "rounds": options.rounds,
        "shape": asdict(shape),
        "clock": options.clock,
        "latency": options.latency,
        "ratios": regime.ratios,
        "megabytes_per_second": bandwidths,
        "parameters": first.parameters,
        "chunks": {case.title: count for case, count in first.chunks.items()},
        "versions": {"samestep": samestep.__version__, "torch": torch.__version__},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "load": load,
        "rows": rows,
        "traces": {
            name: {"title": title, "ranks": [asdict(trace) for trace in traces]}
            for name, (title, traces) in shown.items()
        },
    }
    files = {
        RESULT: json.dumps(receipt, indent=1).encode() + b"\n",
        TRACE: chrome_trace(dict(shown.values())),
    }
    write_files(options.out, files)
    print(f"written to {options.out}: {', '.join(files)}")


def read_trace(found: dict[str, Any]) -> Trace:
    """A trace as JSON has it."""
    marks = [(name, begin, end) for name, begin, end in found["marks"]]
    return Trace(marks, [Transfer(**transfer) for transfer in found["transfers"]])


def draw(folder: Path) -> None:
    """Pictures of a run, into its folder."""
    from benchmarks.muon_pictures import pictures  # needs matplotlib

    receipt = json.loads((folder / RESULT).read_bytes())
    shown = {
        f"{name}.png": (drawn["title"], [read_trace(trace) for trace in drawn["ranks"]])
        for name, drawn in receipt["traces"].items()
    }
    speed, shape = receipt["megabytes_per_second"]["middle"], receipt["shape"]
    about = (
        f"{receipt['ranks']} ranks under FSDP2, {shape['layers']} layers of width "
        f"{shape['width']}, a link of {speed:.0f} MB/s"
    )
    made = pictures(shown, about)
    write_files(folder, made)
    print(f"written to {folder}: {', '.join(made)}")


def main(options: argparse.Namespace) -> None:
    """Measure, or draw what was measured."""
    if options.draw is None:
        run(options)
    else:
        draw(options.draw)


if __name__ == "__main__":
    main(arguments())
