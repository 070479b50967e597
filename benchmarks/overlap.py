"""How much communication overlap hides, on two gloo ranks with a modelled link between them.

A GPT with a tied weight, recomputed activations and a layer that one rank leaves out now and then
trains with flat buffers: without overlap, with reductions inside backward, with gathers inside the
next forward, with both. Exposed communication is the median step minus the median step of the same
configuration on a link that costs nothing; both are run in turns.
"""

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import samestep
from benchmarks import Shape, batch, gpt_config, heading, load_line, run_script, teller
from benchmarks.modelled_link import FREE, Clock, ModelledLink, Speed, Transfer
from benchmarks.timeline import WAITING, Look, Panel, Trace, chrome_trace
from benchmarks.timeline import picture as draw
from examples.gpt import GPT, GPTConfig
from samestep.lab.bench.gpu.measure import in_rounds
from samestep.lab.bench.gpu.report import Screen
from samestep.launch.forked import run_forked
from samestep.tooling.output import check_folder, json_file, write_files

# Trainings whose communication may be hidden, run step after step on a modelled link


class RecomputedGPT(GPT):
    """Embedding and head are one weight; every layer runs again inside backward."""

    skipped: int | None = None  # the layer that the next forward leaves out

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        nn.init.normal_(self.embedding.weight, std=0.1 * config.width**-0.5)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, T, V) of the token after each one in ``tokens`` (B, T)."""
        length = tokens.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            if number != self.skipped:
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
        logits: Tensor = self.head(self.norm(x))
        return logits


@dataclass(frozen=True)
class Case:
    """An optimizer and what it overlaps."""

    sharding: str
    grad: bool
    gather: bool
    parts: int = 16  # a bucket has 1/parts of the parameters
    rule: str = "MuonAdamW"

    @property
    def overlap(self) -> str:
        if self.grad:
            return "both" if self.gather else "gradients"
        return "parameters" if self.gather else "none"

    @property
    def without(self) -> "Case":
        return Case(self.sharding, False, False, self.parts, self.rule)


class Sample(NamedTuple):
    """One step of one rank, in seconds."""

    whole: float  # to the start of the next step
    backward: float
    link: float  # that the modelled link is busy with it
    waited: float  # that the host was held up by transfers, whatever for
    skips: bool  # one rank left out a layer


class Training:
    """A model of its own with an optimizer."""

    def __init__(self, case: Case, shape: Shape, link: ModelledLink) -> None:
        self._shape, self._link = shape, link
        torch.manual_seed(0)
        sizes = {"vocab_size": shape.vocabulary, "context": shape.tokens}
        self.model = RecomputedGPT(gpt_config(shape.width, shape.layers, **sizes))
        self.parameters = sum(param.numel() for param in self.model.parameters())
        rule: Any = getattr(samestep, case.rule)
        self.optimizer = rule(
            self.model,
            buffers="flat",
            sharding=case.sharding,
            overlap_grad_reduce=case.grad,
            overlap_param_gather=case.gather,
            bucket_size=self.parameters // case.parts,
        )

    def run(self, speed: Speed, steps: int, skip_at: int = -1) -> tuple[list[Sample], Trace]:
        """Steps on a link, after one that fills the pipeline; `skip_at` leaves a layer out."""
        batches = [batch(self._shape, step) for step in range(steps + 1)]
        dist.barrier()
        self._link.set_speed(*speed)
        transfers: list[Transfer] = []
        self._link.transfers = transfers
        now = self._link.now
        last = dist.get_rank() == dist.get_world_size() - 1
        marks: list[tuple[str, float, float]] = []
        firsts = []  # of each step: how many transfers were launched before it
        for step, (tokens, targets) in enumerate(batches):
            firsts.append(len(transfers))
            self.model.skipped = self._shape.layers // 2 if last and step == skip_at else None
            times = [now()]
            loss = self.model.loss(tokens, targets)
            times.append(now())
            loss.backward()  # type: ignore[no-untyped-call]
            times.append(now())
            self.optimizer.step()
            self.optimizer.zero_grad()
            times.append(now())
            marks += zip(("forward", "backward", "step"), times, times[1:], strict=False)
        ended = now()
        self.optimizer.wait_for_parameters()
        self._link.set_speed(0.0, float("inf"))
        samples = []
        for step in range(1, steps + 1):
            (_, begin, _), (_, *backward), _ = marks[3 * step : 3 * step + 3]
            end = marks[3 * step + 3][1] if step < steps else ended
            own = transfers[firsts[step] : firsts[step + 1] if step < steps else None]
            waits = [wait for transfer in transfers for wait in transfer.waits]
            busy = sum(transfer.seconds for transfer in own)
            waited = sum(stop - start for start, stop in waits if begin <= start < end)
            passed = backward[1] - backward[0]
            samples.append(Sample(end - begin, passed, busy, waited, step == skip_at))
        return samples, Trace(marks, transfers)


def slowest(per_rank: list[list[Sample]]) -> list[Sample]:
    """Steps as long as those of the slowest rank."""
    return [Sample(*map(max, zip(*step, strict=True))) for step in zip(*per_rank, strict=True)]


# The picture of a step without and with overlap

DRAWN = 2  # the number of the step
KINDS = {
    "forward": ("#7fb2e5", "forward"),
    "backward": ("#f2b872", "backward"),
    "step": ("#9bd19b", "optimizer step"),
    WAITING: ("#c8243b", "waiting for the link"),
    "reduction": ("#7b5ea7", "gradients reduced"),
    "gather": ("#1f8a8a", "parameters gathered"),
    "presence": ("#333333", ""),
}


def picture(title: str, shown: Mapping[str, Sequence[Trace]]) -> bytes:
    """One configuration above the other on one scale: a whole step and the start of the next."""
    panels = []
    for name, traces in shown.items():
        begin = min(trace.marks[3 * DRAWN][1] for trace in traces)
        end = max(trace.marks[3 * DRAWN + 3][1] for trace in traces)
        waits = [wait for trace in traces for each in trace.transfers for wait in each.waits]
        waited = sum(max(min(stop, end) - max(start, begin), 0.0) for start, stop in waits)
        mean = 1e3 * waited / len(traces)
        about = f"{1e3 * (end - begin):.0f} ms per step, {mean:.0f} of them waiting"
        panels.append(Panel(f"{name}: {about}", traces, begin, end))

    def of_transfer(transfer: Transfer) -> tuple[str, str]:
        names = (kind for kind in ("reduction", "gather") if transfer.name.startswith(kind))
        return next(names, "presence"), ""

    look = Look(KINDS, lambda name: (name, name), of_transfer)
    longest = 1.12 * max(panel.end - panel.begin for panel in panels)
    return draw(title, panels, look, longest=longest, rank_height=1.1)


# Rows of the receipt; tables and sentences from them

BAR = 0.7  # by how much exposed communication shall fall

Samples = dict[tuple[Case, str], list[list[Sample]]]  # steps of each round
Row = dict[str, Any]


def numbers(samples: Samples, case: Case, link: str, *picked: int) -> dict[str, float]:
    """Milliseconds of one case on one link, from the samples of some rounds, or of all."""

    def ms(name: str, of: str, *, only_skips: bool = False) -> float:
        rounds = samples[case, name]
        some = [rounds[i] for i in picked] if picked else rounds
        steps = [step for steps in some for step in steps if step.skips or not only_skips]
        return 1e3 * float(statistics.median(getattr(step, of) for step in steps))

    return {
        "step": ms(link, "whole"),
        "compute": ms(FREE, "whole"),
        "backward": ms(FREE, "backward"),
        "skew": ms(FREE, "waited"),  # for other ranks, since that link costs nothing
        "busy": ms(link, "link"),
        "exposed": ms(link, "whole") - ms(FREE, "whole"),
        "waited": ms(link, "waited") - ms(FREE, "waited"),
        "skipping": ms(link, "whole", only_skips=True) - ms(FREE, "whole", only_skips=True),
    }


def row(samples: Samples, case: Case, link: str) -> Row:
    found = numbers(samples, case, link)

    def fall(*picked: int) -> float:
        """By which share overlap makes exposed communication fall."""
        plain = numbers(samples, case.without, link, *picked)
        return 1 - numbers(samples, case, link, *picked)["exposed"] / plain["exposed"]

    def whole(name: str) -> list[list[float]]:
        return [[1e3 * step.whole for step in steps] for steps in samples[case, name]]

    return {
        **asdict(case),
        "overlap": case.overlap,
        "link": link,
        **found,
        "hidden": 1 - found["exposed"] / found["busy"],
        "falls_by": fall(),
        "falls_by_in_single_rounds": [fall(i) for i in range(len(samples[case, link]))],
        "samples_ms": whole(link),
        "samples_free_ms": whole(FREE),
    }


COLUMNS = (
    "link", "layout", "overlap", "step", "free", "busy", "exposed", "hidden", "wait", "skip",
    "less",
)  # fmt: skip


def cells(r: Row) -> list[str]:
    return [
        r["link"],
        f"{r['sharding']} P/{r['parts']}",
        r["overlap"],
        *(f"{r[key]:.0f}" for key in ("step", "compute", "busy", "exposed")),
        f"{r['hidden']:.0%}",
        *(f"{r[key]:.0f}" for key in ("waited", "skipping")),
        "" if r["overlap"] == "none" else f"{r['falls_by']:.0%}",
    ]


def bar_line(row: Row) -> str:
    fall, rounds = row["falls_by"], row["falls_by_in_single_rounds"]
    verdict = "met" if fall >= BAR else "not met"
    return (
        f"{row['sharding']} on the {row['link']} link: exposed communication falls by {fall:.0%} "
        f"({min(rounds):.0%} to {max(rounds):.0%} in single rounds); the bar is {BAR:.0%}: "
        f"{verdict}."
    )


# The benchmark

RANKS = 2
MIDDLE = "middle"
SHARDINGS = ("zero1", "zero2")
ATTEMPTS = 5  # of the steps that are drawn


@dataclass(frozen=True)
class Options(Shape):
    """What to measure."""

    rounds: int = 4
    steps: Annotated[
        int, "of a block: a case on a link. In the third, one rank leaves out a layer"
    ] = 4
    ratio: Annotated[
        float,
        "all communication of a step on the middle link, against backward; fast: half, slow: twice",
    ] = 0.8
    latency: Annotated[float, "seconds per transfer"] = 2e-4
    bandwidth: Annotated[
        float | None, "MB/s of the middle link, in place of the one that follows from the ratio"
    ] = None
    clock: Annotated[
        Clock, '"cpu": computing time plus modelled waits, for a machine that has other work too'
    ] = "wall"
    links: tuple[Literal["fast", "middle", "slow"], ...] = ("fast", "middle", "slow")
    only_main: Annotated[bool, "leave out other bucket sizes and AdamW"] = False
    out: Path = Path("out/bench")


class RankResult(NamedTuple):
    """What a rank has measured."""

    parameters: int
    speeds: dict[str, Speed]
    samples: Samples
    traces: dict[tuple[Case, int], tuple[list[Sample], Trace]]


def cases(options: Options) -> dict[Case, tuple[str, ...]]:
    """All cases, with the links they run on."""
    every, two = (FREE, *options.links), (FREE, MIDDLE)
    ways = [(False, False), (True, False), (False, True), (True, True)]
    found = {Case(sharding, *way): every for sharding in SHARDINGS for way in ways}
    if not options.only_main:
        for on in (False, True):
            found |= {Case(s, on, on, parts): two for parts in (4, 64) for s in SHARDINGS}
            found |= {Case("zero2", on, on, parts, "AdamW"): two for parts in (16, 64)}
    return found


def calibrate(training: Training, options: Options) -> dict[str, Speed]:
    """Links whose transfers take so long as the ratio says."""
    free = Speed(0.0, float("inf"))
    training.run(free, 2)
    samples, trace = training.run(free, 7)
    steps = 1 + len(samples)
    backward = torch.tensor(statistics.median(sample.backward for sample in samples))
    dist.all_reduce(backward, dist.ReduceOp.MIN)  # the same on all ranks, with the least noise
    carried = sum(transfer.bytes for transfer in trace.transfers) / steps
    latencies = options.latency * len(trace.transfers) / steps
    middle = carried / max(options.ratio * float(backward) - latencies, 1e-3)
    if options.bandwidth is not None:
        middle = 1e6 * options.bandwidth
    return {
        FREE: free,
        "fast": Speed(options.latency, 2 * middle),
        MIDDLE: Speed(options.latency, middle),
        "slow": Speed(options.latency, middle / 2),
    }


def on_rank(rank: int, options: Options, link: ModelledLink) -> RankResult:
    link.install()
    trainings = {case: Training(case, options, link) for case in cases(options)}
    speeds = calibrate(trainings[Case("zero2", True, True)], options)
    for training in trainings.values():
        training.run(speeds[FREE], 1)

    def turn(_: int, case: Case, name: str) -> list[Sample]:
        return trainings[case].run(speeds[name], options.steps, skip_at=3)[0]

    keys = [(case, name) for case, names in cases(options).items() for name in names]
    turns = {key: partial(turn, case=key[0], name=key[1]) for key in keys}
    samples: Samples = in_rounds(turns, options.rounds, tell=teller(rank, options.rounds))
    recorder = samestep.FlightRecorder()
    link.take_names(recorder)
    traces = {}
    with recorder:
        for attempt in range(ATTEMPTS):
            for overlap in (False, True):
                case = Case("zero2", overlap, overlap)
                traces[case, attempt] = trainings[case].run(speeds[MIDDLE], 3)
    return RankResult(trainings[case].parameters, speeds, samples, traces)


def typical(results: list[RankResult], case: Case) -> list[Trace]:
    """The traces of all ranks in the attempt whose steps are in the middle."""
    first = results[0].traces
    attempts = [key for key in first if key[0] == case]
    attempts.sort(key=lambda key: sum(sample.whole for sample in first[key][0]))
    return [result.traces[attempts[len(attempts) // 2]][1] for result in results]


def main(options: Options) -> None:
    screen = Screen()
    check_folder(options.out)
    load = os.getloadavg()[0]
    link = ModelledLink(RANKS, options.clock)
    ranks: list[RankResult] = run_forked(
        RANKS, on_rank, options, link, timeout=float("inf"), collective_timeout=300.0
    )
    first = ranks[0]
    merged = {
        key: [
            slowest([result.samples[key][number] for result in ranks])
            for number in range(options.rounds)
        ]
        for key in first.samples
    }
    rows = [row(merged, case, name) for case, name in merged if name != FREE]
    muon = [r for r in rows if r["rule"] == "MuonAdamW"]
    main_rows = [r for r in muon if r["parts"] == 16]
    main_rows.sort(key=lambda r: (options.links.index(r["link"]), r["sharding"]))
    screen.table(f"{first.parameters / 1e6:.1f} M parameters", COLUMNS, map(cells, main_rows), 3)
    for r in main_rows:
        if r["overlap"] == "none":
            speed = first.speeds[r["link"]].bandwidth / 1e6
            screen.say(
                f"{r['sharding']}, {r['link']} link ({speed:.1f} MB/s): communication is "
                f"{r['busy'] / r['backward']:.0%} of backward"
            )
    for r in main_rows:
        if r["overlap"] == "both":
            screen.say(bar_line(r))
    if not options.only_main:
        of_sizes = [r for r in muon if r["link"] == MIDDLE and r["overlap"] in ("none", "both")]
        of_adamw = [r for r in rows if r["rule"] == "AdamW"]
        for title, found in ("bucket sizes", of_sizes), ("AdamW alone: equal segments", of_adamw):
            found.sort(key=lambda r: (r["sharding"], r["parts"]))
            screen.table(title, COLUMNS, map(cells, found), 3)
    receipt = {
        **heading("overlap", options, load),
        "ranks": RANKS,
        "threads_per_rank": 1,
        "parameters": first.parameters,
        "links": {n: s._asdict() for n, s in first.speeds.items() if n != FREE},
        "rows": rows,
    }
    screen.say(
        "ms: medians of steps as long as the slower rank's. free: on a link that costs nothing. "
        "busy: the link.\nexposed: step minus free. wait: the same by time inside waits. skip: "
        "exposed in steps in which one rank\nleaves out a layer. less: by how much overlap makes "
        f"exposed fall.\n{load_line(receipt)}"
    )
    shown = {
        "no overlap": typical(ranks, Case("zero2", False, False)),
        "overlap_grad_reduce, overlap_param_gather": typical(ranks, Case("zero2", True, True)),
    }
    files = {
        "overlap.json": json_file(receipt, indent=2),
        "overlap_trace.json.gz": chrome_trace(shown),
        "overlap.png": picture(
            f"MuonAdamW, flat buffers, zero2, {RANKS} ranks, a link of "
            f"{first.speeds[MIDDLE].bandwidth / 1e6:.0f} MB/s",
            shown,
        ),
    }
    write_files(options.out, files)
    screen.say(f"written to {options.out}: {', '.join(files)}")


if __name__ == "__main__":
    run_script(main, Options)
