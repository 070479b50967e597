"""How much communication of Muon over FSDP2 shows, in each schedule, on a modelled link.

python -m benchmarks.muon_schedules --ranks 4 --out DIR   # measure; needs torch alone
python -m benchmarks.muon_schedules --draw DIR            # pictures of that; needs matplotlib
"""

import argparse
import json
import math
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import samestep
import samestep.optimizer.step
from benchmarks import VERSIONS, Shape
from benchmarks.modelled_link import FREE, ModelledLink, Speed, Transfer
from benchmarks.muon_exposure import Case, Results, computed, measure, pictures, table, verdicts
from benchmarks.timeline import Trace, chrome_trace
from examples.gpt import GPT, GPTConfig
from samestep.launch import run_forked
from samestep.optimizer.step import Handlers, execute
from samestep.plan.schedule import Operation, Schedule, line_of
from samestep.tooling.output import check_folder, write_files

# Steps of Muon over FSDP2 on a modelled link, traced operation by operation

SHAPE = Shape(width=256, layers=8, vocabulary=256, sequences=2, tokens=32)
HEADS, KV_HEADS = 4, 1
ONE_TURN = 1  # elements of a chunk: as small as can be, one block per owner
LINKS = ("fast", "middle", "slow")  # by what transfers of a step cost, as a share of its computing

CASES = (
    Case("gather", False),
    Case("gather", True),
    Case("parallel", False, "cyclic"),
    Case("parallel", True, "cyclic"),
    Case("parallel", False, "balanced"),
    Case("parallel", True, "balanced"),
)


class RankResult(NamedTuple):
    """What a rank has seen: a trace per round."""

    speeds: dict[str, Speed]
    traces: dict[tuple[Case, str], list[Trace]]
    parameters: int
    chunks: dict[Case, int]


class Marks(list[tuple[str, float, float]]):
    """Runs schedules as the executor does, and notes when each operation began and ended."""

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__()
        self._now = now

    def execute(self, schedule: Schedule, handlers: Handlers) -> None:
        execute(schedule, {kind: self._timed(handler) for kind, handler in handlers.items()})

    def _timed(self, handler: Callable[[Any], None]) -> Callable[[Any], None]:
        def run(operation: Operation) -> None:
            begin = self._now()
            handler(operation)
            self.append((line_of(operation), begin, self._now()))

        return run


class Training:
    """A GPT under FSDP2 with an optimizer of its own.

    The six matrices of a layer are blocks of unequal work: dealt out in turn they leave two of
    four ranks with all the large ones.
    """

    def __init__(self, case: Case, shape: Shape, link: ModelledLink, marks: Marks) -> None:
        self._shape, self._link, self._marks = shape, link, marks
        torch.manual_seed(0)
        config = GPTConfig(
            vocab_size=shape.vocabulary, context=shape.tokens, width=shape.width,
            layers=shape.layers, heads=HEADS, kv_heads=KV_HEADS,
        )  # fmt: skip
        self._model = GPT(config)
        self.parameters = sum(param.numel() for param in self._model.parameters())
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in self._model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self._model, mesh=mesh)
        self._optimizer = samestep.MuonAdamW(
            self._model,
            bucket_size=ONE_TURN,
            muon_schedule=case.schedule,
            chunks_ahead=int(case.pipelined),
            owners=case.owners or "balanced",
        )
        self._generator = torch.Generator().manual_seed(dist.get_rank())

    @property
    def chunks(self) -> int:
        return sum(line.startswith("Transform") for line in self._optimizer.schedule_lines())

    def step(self, speed: Speed) -> Trace:
        """Forward and backward on a free link, then the traced step on the one that is asked for.

        All ranks begin it together, so that nobody waits for another's backward.
        """
        size = (2, self._shape.sequences, self._shape.tokens)
        tokens, targets = torch.randint(self._shape.vocabulary, size, generator=self._generator)
        self._optimizer.zero_grad()
        self._model.loss(tokens, targets).backward()  # type: ignore[no-untyped-call]
        dist.barrier()
        self._link.set_speed(*speed)
        transfers: list[Transfer] = []
        self._link.transfers = transfers
        self._marks.clear()
        self._optimizer.step()
        self._link.set_speed(0.0, math.inf)
        self._link.transfers = []  # FSDP2's are not of interest
        return Trace(list(self._marks), transfers)


def calibrate(training: Training, options: argparse.Namespace) -> dict[str, Speed]:
    """Links on which communication is the wanted share of computing, the same on all ranks."""
    free = Speed(0.0, math.inf)
    training.step(free)
    traces = [training.step(free) for _ in range(3)]
    carried = sum(transfer.bytes for transfer in traces[0].transfers)
    least = torch.tensor([statistics.median(map(computed, traces)), -carried], dtype=torch.float64)
    dist.all_reduce(least, dist.ReduceOp.MIN)  # the rank with the least noise, and the most bytes
    computing, most = float(least[0]), -float(least[1])
    latencies = options.latency * len(traces[0].transfers)
    speeds = {FREE: free}
    for name, ratio in zip(LINKS, options.ratios, strict=True):
        speeds[name] = Speed(options.latency, most / max(ratio * computing - latencies, 1e-3))
    return speeds


def on_rank(rank: int, options: argparse.Namespace, shape: Shape, link: ModelledLink) -> RankResult:
    link.install()
    marks = Marks(link.now)
    recorder = samestep.FlightRecorder()
    link.take_names(recorder)
    with patch.object(samestep.optimizer.step, "execute", marks.execute), recorder:
        trainings = {case: Training(case, shape, link, marks) for case in CASES}
        speeds = calibrate(trainings[CASES[-1]], options)
        for training in trainings.values():
            training.step(speeds[FREE])
        traces: dict[tuple[Case, str], list[Trace]] = {
            (case, name): [] for case in CASES for name in (FREE, *LINKS)
        }
        for number in range(options.rounds):
            turns = list(traces)
            for case, name in turns if number % 2 else reversed(turns):
                traces[case, name].append(trainings[case].step(speeds[name]))
            if rank == 0:
                print(f"round {number + 1} of {options.rounds}", flush=True)
    chunks = {case: training.chunks for case, training in trainings.items()}
    return RankResult(speeds, traces, trainings[CASES[0]].parameters, chunks)


# The command

RESULT, TRACE = "muon_schedules.json", "muon_schedules_trace.json.gz"
DRAWN = {
    "muon_distributed": ("Distributed: every rank gathers all", Case("gather", False)),
    "muon_parallel": ("Parallel, owners in turn", Case("parallel", False, "cyclic")),
    "muon_pipelined": ("Pipelined, owners in turn", Case("parallel", True, "cyclic")),
    "muon_balanced": ("Pipelined, owners by FLOPs", Case("parallel", True, "balanced")),
}


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5, help="steps of a case on a link")
    parser.add_argument("--width", type=int, default=SHAPE.width)
    parser.add_argument("--layers", type=int, default=SHAPE.layers)
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
    return [result.traces[case, link][number] for result in ranks]


def run(options: argparse.Namespace) -> None:
    check_folder(options.out)
    load = [os.getloadavg()[0]]
    shape = replace(SHAPE, width=options.width, layers=options.layers)
    link = ModelledLink(options.ranks, options.clock)
    ranks: list[RankResult] = run_forked(
        options.ranks, on_rank, options, shape, link, timeout=math.inf, collective_timeout=300.0
    )
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
        "ratios": dict(zip(LINKS, options.ratios, strict=True)),
        "megabytes_per_second": bandwidths,
        "parameters": first.parameters,
        "chunks": {case.title: count for case, count in first.chunks.items()},
        "versions": VERSIONS,
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
    marks = [(name, begin, end) for name, begin, end in found["marks"]]
    return Trace(marks, [Transfer(**transfer) for transfer in found["transfers"]])


def draw(folder: Path) -> None:
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
    if options.draw is None:
        run(options)
    else:
        draw(options.draw)


if __name__ == "__main__":
    main(arguments())
