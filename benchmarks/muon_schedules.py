"""How much communication of Muon over FSDP2 shows, in each schedule, on a modelled link.

python -m benchmarks.muon_schedules --ranks 4 --out DIR   # measure; needs torch alone
python -m benchmarks.muon_schedules --draw DIR            # pictures of that; needs matplotlib

A rank waits for a transfer either because another rank has not launched it yet (idle: work is
uneven), or because it is on the link or behind others there (exposed communication).
"""

import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import samestep
import samestep.optimizer.step
from benchmarks import Shape, heading, load_line, run_script, teller
from benchmarks.modelled_link import FREE, Clock, ModelledLink, Speed, Transfer
from benchmarks.timeline import Look, Panel, Trace, chrome_trace, picture
from examples.gpt import GPT, GPTConfig
from samestep.lab.bench.gpu.measure import in_rounds
from samestep.launch.forked import run_forked
from samestep.optimizer.step import Handlers, execute
from samestep.plan.schedule import Operation, Schedule, describe_operation
from samestep.tooling.output import check_folder, json_file, write_files

BAR = 1 / 3  # of what is exposed without a pipeline, at most


class Case(NamedTuple):
    """A way to run Muon over shards."""

    schedule: str
    pipelined: bool
    owners: str = ""  # of the gather schedule everyone is one

    @property
    def unpipelined(self) -> "Case":
        return self._replace(pipelined=False)

    @property
    def title(self) -> str:
        words = [self.schedule, self.owners, "pipelined" if self.pipelined else "no pipeline"]
        return ", ".join(word for word in words if word)


class Step(NamedTuple):
    """One step over all ranks, in seconds: the slowest's end, and means over ranks."""

    whole: float
    compute: float
    busy: float  # the link, with Muon's transfers
    exposed: float
    most_exposed: float  # of any rank
    idle: float
    ends: float  # the first collection and the last return, which nothing can hide


def about_blocks(trace: Trace) -> Trace:
    """Without transfers of anything but Muon's blocks."""
    kinds = ("collection", "return")
    return Trace(trace.marks, [t for t in trace.transfers if t.name.startswith(kinds)])


def waited(trace: Trace) -> float:
    return sum(stop - start for t in trace.transfers for start, stop in t.waits)


def exposed(trace: Trace) -> float:
    """Seconds inside waits for transfers that every rank has launched."""
    waits = [(*wait, t.ready) for t in trace.transfers for wait in t.waits]
    return sum(max(stop - max(start, ready), 0.0) for start, stop, ready in waits)


def computed(trace: Trace) -> float:
    """What a step takes from its first operation to its last, without its waits."""
    return trace.marks[-1][2] - trace.marks[0][1] - waited(trace)


def measure(traces: Sequence[Trace]) -> Step:
    moves = list(map(about_blocks, traces))
    begin = min(trace.marks[0][1] for trace in traces)
    end = max(trace.marks[-1][2] for trace in traces)
    shown, first = list(map(exposed, moves)), moves[0].transfers
    ends = [t.seconds for t in first if t.name.startswith("collection")][:1]
    ends += [t.seconds for t in first if t.name.startswith("return")][-1:]
    return Step(
        whole=end - begin,
        compute=statistics.mean(map(computed, traces)),
        busy=max(sum(t.seconds for t in trace.transfers) for trace in moves),
        exposed=statistics.mean(shown),
        most_exposed=max(shown),
        idle=statistics.mean(map(waited, moves)) - statistics.mean(shown),
        ends=sum(ends),
    )


class Results:
    """All steps of a run, round by round."""

    def __init__(self, steps: Mapping[tuple[Case, str], Sequence[Step]], free: str) -> None:
        self._steps, self._free = steps, free

    def median(self, case: Case, link: str, of: str) -> float:
        """Of a field of steps, in milliseconds."""
        return 1e3 * float(statistics.median(getattr(s, of) for s in self._steps[case, link]))

    def longer(self, case: Case, link: str) -> float:
        """What a step takes more than on a link that costs nothing, in milliseconds."""
        return self.median(case, link, "whole") - self.median(case, self._free, "whole")

    def typical(self, case: Case, link: str) -> int:
        """The round whose step is in the middle."""
        lengths = [step.whole for step in self._steps[case, link]]
        return sorted(range(len(lengths)), key=lengths.__getitem__)[len(lengths) // 2]

    def row(self, case: Case, link: str) -> dict[str, Any]:
        """One case on one link, against the same without a pipeline."""
        plain = case.unpipelined
        medians = {f"{key}_ms": self.median(case, link, key) for key in Step._fields}
        kept: dict[str, Any] = {}
        if case.pipelined:
            exposed = self.median(plain, link, "exposed")
            kept["exposed_of_unpipelined"] = medians["exposed_ms"] / exposed
            kept["longer_of_unpipelined"] = self.longer(case, link) / self.longer(plain, link)
            pairs = zip(self._steps[case, link], self._steps[plain, link], strict=True)
            kept["in_single_rounds"] = [one.exposed / other.exposed for one, other in pairs]
        return {
            **case._asdict(),
            "link": link,
            **medians,
            "free_ms": self.median(case, self._free, "whole"),
            "longer_ms": self.longer(case, link),
            **kept,
        }

    def rows(self) -> list[dict[str, Any]]:
        return [self.row(case, link) for case, link in self._steps if link != self._free]


COLUMNS = {
    "link": "link",
    "schedule": "schedule",
    "owners": "owners",
    "pipelined": "pipeline",
    "whole_ms": "step",
    "free_ms": "on a free link",
    "busy_ms": "link busy",
    "exposed_ms": "exposed",
    "exposed_of_unpipelined": "of unpipelined",
    "idle_ms": "idle",
    "longer_ms": "longer than free",
    "longer_of_unpipelined": "of unpipelined",
}


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    head = [f"| {' | '.join(COLUMNS.values())} |", "|---" * len(COLUMNS) + "|"]
    cells = ([_cell(row, key) for key in COLUMNS] for row in rows)
    return "\n".join([*head, *(f"| {' | '.join(line)} |" for line in cells)])


def _cell(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key, "")
    if key.endswith("_ms"):
        return f"{value:.0f}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.0%}" if isinstance(value, float) else str(value)


def verdicts(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        if row["schedule"] == "parallel" and row["pipelined"]:
            share, rounds = row["exposed_of_unpipelined"], row["in_single_rounds"]
            lines.append(
                f"{row['link']} link ({row['busy_ms'] / row['compute_ms']:.2f} of computing), "
                f"{row['owners']} owners: a pipeline exposes {share:.0%} of what is exposed "
                f"without ({min(rounds):.0%} to {max(rounds):.0%} in single rounds); at most "
                f"{BAR:.0%}: {'met' if share <= BAR else 'not met'}. First collection and last "
                f"return: {row['ends_ms']:.1f} of {row['exposed_ms']:.1f} ms."
            )
    return lines


# The four timelines of Muon over shards, from the traces of a run

EXPOSED, IDLE = "exposed", "idle"

KINDS = {
    "collect": ("#9bd19b", "momentum"),
    "transform": ("#7fb2e5", "orthogonalization"),
    "apply": ("#f2b872", "update"),
    "other": ("#bbbbbb", "AdamW and more"),
    EXPOSED: ("#c8243b", "waiting for the link"),
    IDLE: ("#f4c6cb", "for another rank"),
    "collection": ("#7b5ea7", "to owners"),
    "return": ("#1f8a8a", "back"),
}


def of_mark(name: str) -> tuple[str, str]:
    """Kind and text of an operation such as "Transform 0.3": the chunk, if it is a long one."""
    word = name.split()[0].lower()
    kind = word if word in KINDS else "other"
    return kind, name.split(".")[-1] if kind == "transform" else ""


def of_transfer(transfer: Transfer) -> tuple[str, str]:
    """Kind and text of a transfer: the chunk that is on its way."""
    kind = transfer.name.split()[0] if transfer.name else ""
    if kind in ("collection", "return"):
        return kind, transfer.name.split()[-1]
    return "other", ""


def waits_apart(trace: Trace) -> Trace:
    """Operations cut where they wait, and waits among them, by what is waited for."""
    marks: list[tuple[str, float, float]] = []
    waits = sorted((*span, t.ready) for t in trace.transfers for span in t.waits)
    for name, begin, end in trace.marks:
        for start, stop, ready in waits:
            if begin <= start and stop <= end:
                others = min(max(start, ready), stop)
                pieces = (name, begin, start), (IDLE, start, others), (EXPOSED, others, stop)
                marks += [piece for piece in pieces if piece[2] > piece[1]]
                begin = stop
        marks.append((name, begin, end))
    return Trace(marks, [replace(transfer, waits=()) for transfer in trace.transfers])


def pictures(shown: Mapping[str, tuple[str, Sequence[Trace]]], about: str) -> dict[str, bytes]:
    """A picture per file name, from its title and traces; neighbours of similar length align."""
    steps = {name: measure(traces) for name, (_, traces) in shown.items()}
    shortest = min(step.whole for step in steps.values())
    alike = [step.whole for step in steps.values() if step.whole < 2.5 * shortest]
    made = {}
    for name, (title, traces) in shown.items():
        step = steps[name]
        begin = min(trace.marks[0][1] for trace in traces)
        ms = f"{1e3 * step.whole:.0f} ms, exposed communication {1e3 * step.exposed:.0f} ms"
        panel = Panel(f"{title}: {ms}", [*map(waits_apart, traces)], begin, begin + step.whole)
        made[name] = picture(
            about,
            [panel],
            Look(KINDS, of_mark, of_transfer),
            longest=1.02 * (max(alike) if step.whole in alike else step.whole),
            rank_height=0.75,
        )
    return made


# Steps of Muon over FSDP2 on a modelled link, traced operation by operation

SHAPE = Shape(width=256, layers=8, vocabulary=256, sequences=2, tokens=32)
HEADS, KV_HEADS = 4, 1
ONE_TURN = 1  # elements of a chunk: as small as can be, one block per owner
LINKS = ("fast", "middle", "slow")  # by what transfers of a step cost, as a share of its computing


@dataclass(frozen=True)
class Options:
    """How much communication of Muon over FSDP2 shows, in each schedule, on a modelled link."""

    ranks: int = 4
    rounds: Annotated[int, "steps of a case on a link"] = 5
    width: int = SHAPE.width
    layers: int = SHAPE.layers
    ratios: Annotated[
        tuple[float, float, float], "communication against computing, on each of the links"
    ] = (0.3, 0.6, 0.9)
    latency: Annotated[float, "seconds per transfer"] = 2e-4
    clock: Annotated[
        Clock, "cpu: computing time plus modelled waits, for a machine that has other work too"
    ] = "wall"
    out: Path = Path("out/bench")
    draw: Annotated[Path | None, "only draw, what is in this folder"] = None


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
            self.append((describe_operation(operation), begin, self._now()))

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


def calibrate(training: Training, options: Options) -> dict[str, Speed]:
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


def on_rank(rank: int, options: Options, shape: Shape, link: ModelledLink) -> RankResult:
    link.install()
    marks = Marks(link.now)
    recorder = samestep.FlightRecorder()
    link.take_names(recorder)
    with patch.object(samestep.optimizer.step, "execute", marks.execute), recorder:
        trainings = {case: Training(case, shape, link, marks) for case in CASES}
        speeds = calibrate(trainings[CASES[-1]], options)
        for training in trainings.values():
            training.step(speeds[FREE])

        def turn(_: int, case: Case, name: str) -> Trace:
            return trainings[case].step(speeds[name])

        keys = [(case, name) for case in CASES for name in (FREE, *LINKS)]
        turns = {key: partial(turn, case=key[0], name=key[1]) for key in keys}
        traces = in_rounds(turns, options.rounds, tell=teller(rank, options.rounds))
    chunks = {case: training.chunks for case, training in trainings.items()}
    return RankResult(speeds, traces, trainings[CASES[0]].parameters, chunks)


# The command

RESULT, TRACE = "muon_schedules.json", "muon_schedules_trace.json.gz"
DRAWN = {
    "muon_distributed": ("Distributed: every rank gathers all", CASES[0]),
    "muon_parallel": ("Parallel, owners in turn", CASES[2]),
    "muon_pipelined": ("Pipelined, owners in turn", CASES[3]),
    "muon_balanced": ("Pipelined, owners by FLOPs", CASES[5]),
}


def traces_of(ranks: Sequence[RankResult], case: Case, link: str, number: int) -> list[Trace]:
    return [result.traces[case, link][number] for result in ranks]


def run(options: Options) -> None:
    check_folder(options.out)
    load = os.getloadavg()[0]
    shape = replace(SHAPE, width=options.width, layers=options.layers)
    link = ModelledLink(options.ranks, options.clock)
    ranks: list[RankResult] = run_forked(
        options.ranks, on_rank, options, shape, link, timeout=math.inf, collective_timeout=300.0
    )
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
    receipt = {
        **heading("muon_schedules", options, load),
        "ranks": options.ranks,
        "shape": asdict(shape),
        "ratios": dict(zip(LINKS, options.ratios, strict=True)),
        "megabytes_per_second": bandwidths,
        "parameters": first.parameters,
        "chunks": {case.title: count for case, count in first.chunks.items()},
        "rows": rows,
        "traces": {
            name: {"title": title, "ranks": [asdict(trace) for trace in traces]}
            for name, (title, traces) in shown.items()
        },
    }
    files = {
        RESULT: json_file(receipt),
        TRACE: chrome_trace(dict(shown.values())),
    }
    write_files(options.out, files)
    print(load_line(receipt))
    print(f"written to {options.out}: {', '.join(files)}")


def draw(folder: Path) -> None:
    receipt = json.loads((folder / RESULT).read_bytes())

    def read_trace(found: dict[str, Any]) -> Trace:
        marks = [(name, begin, end) for name, begin, end in found["marks"]]
        return Trace(marks, [Transfer(**transfer) for transfer in found["transfers"]])

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


def main(options: Options) -> None:
    if options.draw is None:
        run(options)
    else:
        draw(options.draw)


if __name__ == "__main__":
    run_script(main, Options)
