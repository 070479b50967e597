"""How much communication of a layer hides behind its own computation, on gloo ranks.

Shared experts: a layer of experts with one that all tokens share, which computes after the others
or while rows travel to them. Tensor parallel: a pair of matrices, cut by columns and by rows, whose
sum over ranks goes as a whole or in pieces beside the product, and whose gradient's sum goes before
or beside the products of weight gradients.

A model says how long the link takes (`benchmarks/modelled_link.py`, clock "cpu": other work on the
machine does not count), at several speeds. `gloo` is the backend as it is, by the clock on the
wall, with all ranks on this machine: it wants a quiet one.
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import heading, load_line, run_script, slowest
from benchmarks.modelled_link import ModelledLink, Speed, Transfer
from benchmarks.timeline import WAITING, Look, Panel, Trace, picture
from samestep.lab.bench.gpu.measure import in_rounds
from samestep.lab.bench.gpu.report import Screen
from samestep.launch.forked import run_forked
from samestep.models.gpt import GPTConfig, MixtureOfExperts
from samestep.parallel.experts import Places
from samestep.tooling.output import check_folder, json_file, write_files

GLOO = "gloo"
RATIOS = {"fast": 0.25, "middle": 0.5, "slow": 1.0}  # busy, against computing time
SHARED = ("shared expert after the others", "shared expert while rows travel")
TENSOR = ("sums as a whole", "gradient beside products", "sums in 4 pieces", "both")
PIECES = 4
LATENCY = 2e-5  # seconds of a transfer
FREE = Speed(0.0, float("inf"))


@dataclass(frozen=True)
class Options:
    """What to measure."""

    tokens: Annotated[int, "of a rank"] = 256
    width: int = 256
    layers: int = 4
    hidden: Annotated[int, "channels of an expert, and of each --shared of the shared one"] = 512
    shared: int = 2
    rounds: int = 8
    ranks: tuple[int, ...] = (2, 4)
    out: Path = Path("out/bench")


class Way(NamedTuple):
    """A stack of layers that communicates in some way."""

    kind: str
    name: str


WAYS = (*(Way("shared", name) for name in SHARED), *(Way("tensor", name) for name in TENSOR))


# --- layers of tensor parallel, in plain torch ---------------------------------------------------


class ColumnThenRow(nn.Module):
    """(N, C) to (N, C): two matrices of which a rank has a part, and a sum over ranks."""

    def __init__(self, options: Options, way: Way) -> None:
        super().__init__()
        hidden = 4 * options.width // dist.get_world_size()
        self.up = nn.Parameter(torch.randn(hidden, options.width) * options.width**-0.5)
        self.down = nn.Parameter(torch.randn(options.width, hidden) * hidden**-0.5)
        self.beside = way.name in ("gradient beside products", "both")
        self.pieces = PIECES if way.name in ("sums in 4 pieces", "both") else 1

    def forward(self, x: Tensor) -> Tensor:
        inside = _Column.apply(x, self.up, self.beside)  # type: ignore[no-untyped-call]
        made: Tensor = _Row.apply(torch.relu(inside), self.down, self.pieces)  # type: ignore[no-untyped-call]
        return made


class _Column(torch.autograd.Function):
    """x Wᵀ; in backward, the input's gradient is summed before or beside the weight's product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, beside: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.beside = beside
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        into = grads[0] @ weight
        work = dist.all_reduce(into, async_op=True)
        assert work is not None
        if not ctx.beside:
            work.wait()
        of_weight = grads[0].T @ x
        if ctx.beside:
            work.wait()
        return into, of_weight, None


class _Row(torch.autograd.Function):
    """x Wᵀ, summed over ranks, in pieces of which one travels while the next is computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, pieces: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        made, works = x.new_empty(len(x), len(weight)), []
        for part, rows in zip(made.chunk(pieces), x.chunk(pieces), strict=True):
            torch.mm(rows, weight.T, out=part)
            works.append(dist.all_reduce(part, async_op=True))
        for work in works:
            assert work is not None
            work.wait()
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].T @ x, None


# --- one training --------------------------------------------------------------------------------


def build(options: Options, way: Way) -> nn.ModuleList:
    torch.manual_seed(0)
    if way.kind == "tensor":
        return nn.ModuleList(ColumnThenRow(options, way) for _ in range(options.layers))
    ranks = dist.get_world_size()
    config = GPTConfig(
        width=options.width, experts=2 * ranks, expert_size=options.hidden, capacity=1.0,
        shared_experts=options.shared, overlap_shared=way.name == SHARED[1],
    )  # fmt: skip
    layers = nn.ModuleList(MixtureOfExperts(config) for _ in range(options.layers))
    for layer in layers:
        assert isinstance(layer, MixtureOfExperts)
        for weight in layer.parameters():
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
        layer.dispatch.places = Places(exchange=dist.group.WORLD)
        here = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
        for name, stack in list(layer.experts.named_parameters()):
            layer.experts.register_parameter(name, nn.Parameter(stack[here].detach().clone()))
    return layers


Now = Callable[[], float]


def run(layers: nn.ModuleList, x: Tensor, now: Now) -> list[tuple[str, float, float]]:
    """Forward and backward, with what happened when."""
    times = [now()]
    y = x
    for layer in layers:
        y = y + 0.1 * layer(y[None])[0] if isinstance(layer, MixtureOfExperts) else y + layer(y)
    times.append(now())
    y.square().mean().backward()  # type: ignore[no-untyped-call]
    times.append(now())
    layers.zero_grad()
    return [("forward", *times[:2]), ("backward", *times[1:])]  # type: ignore[list-item]


def watched(layers: nn.ModuleList, now: Now, marks: list[tuple[str, float, float]]) -> None:
    """Shared experts tell when they compute; the time of their backward is that between hooks."""
    for layer in layers:
        if not isinstance(layer, MixtureOfExperts) or layer.shared_experts is None:
            continue
        begun: list[float] = []

        def start(*_: Any, begun: list[float] = begun) -> None:
            begun.append(now())

        def stop(*_: Any, begun: list[float] = begun) -> None:
            marks.append(("shared", begun.pop(), now()))

        layer.shared_experts.register_forward_pre_hook(start)
        layer.shared_experts.register_forward_hook(stop)
        layer.shared_experts.register_full_backward_pre_hook(start)
        layer.shared_experts.register_full_backward_hook(stop)


class Sample(NamedTuple):
    """One forward and backward of the slowest rank, in seconds."""

    whole: float
    busy: float  # the link
    waited: float  # of the host, for the link


Samples = dict[tuple[Way, str], list[Sample]]


def measure_modelled(
    rank: int, options: Options, link: ModelledLink
) -> tuple[Samples, dict[Way, Trace], dict[str, dict[str, Speed]]]:
    link.install()
    ways = {way: build(options, way) for way in WAYS}
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(options.tokens, options.width, generator=generator, requires_grad=True)
    speeds = {"free": {"shared": FREE, "tensor": FREE}, **_calibrated(ways, x, link)}

    def turn(_: int, way: Way, name: str) -> Sample:
        return _one(ways[way], x, link, speeds[name][way.kind])[0]

    keys = [(way, name) for way in ways for name in speeds]
    turns = {key: partial(turn, way=key[0], name=key[1]) for key in keys}
    samples: Samples = in_rounds(turns, options.rounds)
    traces = {}
    for way in WAYS[:2]:
        kept = []
        for _ in range(5):
            layers = build(options, way)
            marks: list[tuple[str, float, float]] = []
            watched(layers, link.now, marks)
            _one(layers, x, link, speeds["middle"][way.kind])
            marks.clear()
            sample, trace = _one(layers, x, link, speeds["middle"][way.kind])
            whole = slowest(sample.whole)  # the same on all ranks, which show the same attempt
            kept.append((whole, Trace([*trace.marks, *marks], trace.transfers)))
        kept.sort(key=lambda one: one[0])
        traces[way] = kept[len(kept) // 2][1]
    return samples, traces, speeds


def _one(
    layers: nn.ModuleList, x: Tensor, link: ModelledLink, speed: Speed
) -> tuple[Sample, Trace]:
    dist.barrier()
    link.set_speed(*speed)
    transfers: list[Transfer] = []
    link.transfers = transfers
    marks = run(layers, x, link.now)
    link.set_speed(*FREE)
    waited = sum(stop - start for each in transfers for start, stop in each.waits)
    busy = sum(each.seconds for each in transfers)
    return Sample(marks[-1][2] - marks[0][1], busy, waited), Trace(marks, transfers)


def _calibrated(
    ways: Mapping[Way, nn.ModuleList], x: Tensor, link: ModelledLink
) -> dict[str, dict[str, Speed]]:
    """Links that are busy for so long, by their names and kinds of layer."""
    speeds: dict[str, dict[str, Speed]] = {name: {} for name in RATIOS}
    for kind in ("shared", "tensor"):
        layers = next(layers for way, layers in ways.items() if way.kind == kind)
        compute, carried = [], 0.0
        for _ in range(6):
            sample, trace = _one(layers, x, link, FREE)
            carried = sum(each.bytes for each in trace.transfers)
            compute.append(sample.whole - sample.waited)
        least = torch.tensor(statistics.median(compute[1:]), dtype=torch.float64)
        dist.all_reduce(least, dist.ReduceOp.MIN)  # the same on all ranks
        for name, ratio in RATIOS.items():
            speeds[name][kind] = Speed(LATENCY, carried / (ratio * float(least)))
    return speeds


def measure_gloo(rank: int, options: Options) -> Samples:
    """The backend as it is, by the clock on the wall."""
    ways = {way: build(options, way) for way in WAYS}
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(options.tokens, options.width, generator=generator, requires_grad=True)

    def turn(_: int, way: Way) -> Sample:
        dist.barrier()
        marks = run(ways[way], x, time.perf_counter)
        return Sample(slowest(marks[-1][2] - marks[0][1]), 0.0, 0.0)

    turns = {(way, GLOO): partial(turn, way=way) for way in WAYS}
    return in_rounds(turns, 3 * options.rounds, warmup=1)


# --- rows of the receipt -------------------------------------------------------------------------

COLUMNS = ("ranks", "link", "layers", "step", "busy", "waited", "hidden", "step is shorter by")


def merged(per_rank: Sequence[Samples]) -> Samples:
    """Steps as long as those of the slowest rank."""
    return {
        key: [
            Sample(*(max(values) for values in zip(*step, strict=True)))
            for step in zip(*(samples[key] for samples in per_rank), strict=True)
        ]
        for key in per_rank[0]
    }


def rows_of(ranks: int, samples: Samples) -> list[dict[str, Any]]:
    """Medians in milliseconds, and what they are less than those of plain layers."""

    def ms(way: Way, link: str, of: str) -> float:
        return 1e3 * float(statistics.median(getattr(one, of) for one in samples[way, link]))

    rows = []
    for way, link in samples:
        plain = next(first for first in WAYS if first.kind == way.kind)
        found = {of: ms(way, link, of) for of in ("whole", "busy", "waited")}
        pairs = zip(samples[plain, link], samples[way, link], strict=True)
        shorter = [1e3 * (before.whole - after.whole) for before, after in pairs]
        about = {
            "hidden": ms(plain, link, "waited") - found["waited"],
            "shorter": statistics.median(shorter),
            "shorter_quartiles": statistics.quantiles(shorter, n=4)[::2],
        }
        rows.append({"ranks": ranks, "link": link, **way._asdict(), **found, **about})
    return rows


def cells(row: Mapping[str, Any]) -> list[str]:
    modelled = [f"{row[key]:.1f}" for key in ("busy", "waited", "hidden")]
    least, most = row["shorter_quartiles"]
    return [
        str(row["ranks"]),
        row["link"],
        row["name"],
        f"{row['whole']:.1f}",
        *(modelled if row["link"] != GLOO else ("", "", "")),
        "" if least == most == 0 else f"{row['shorter']:.1f} ({least:.1f} to {most:.1f})",
    ]


KINDS = {
    "forward": ("#7fb2e5", "forward"),
    "backward": ("#f2b872", "backward"),
    "shared": ("#4f9d4f", "shared expert"),
    WAITING: ("#c8243b", "waiting for the link"),
    "rows": ("#7b5ea7", "rows on the link"),
}


def drawn(ranks: int, shown: Mapping[Way, Sequence[Trace]]) -> bytes:
    panels = []
    for way, traces in shown.items():
        begin = min(trace.marks[0][1] for trace in traces)
        end = max(trace.marks[1][2] for trace in traces)
        waits = [wait for trace in traces for each in trace.transfers for wait in each.waits]
        mean = 1e3 * sum(stop - start for start, stop in waits) / len(traces)
        about = f"{1e3 * (end - begin):.0f} ms, {mean:.0f} of them waiting"
        panels.append(Panel(f"{way.name}: {about}", traces, begin, end))
    look = Look(KINDS, lambda name: (name, ""), lambda transfer: ("rows", ""))
    longest = 1.02 * max(panel.end - panel.begin for panel in panels)
    title = f"{len(panels[0].traces[0].transfers) // 4} layers of experts, {ranks} ranks"
    return picture(title, panels, look, longest=longest, rank_height=1.1)


def main(options: Options) -> None:
    screen = Screen()
    check_folder(options.out)
    load = os.getloadavg()[0]
    limits: dict[str, Any] = {"timeout": float("inf"), "collective_timeout": 300.0}
    rows: list[dict[str, Any]] = []
    links = {}
    files = {}
    for ranks in options.ranks:
        link = ModelledLink(ranks, "cpu")
        found = run_forked(ranks, measure_modelled, options, link, **limits)
        rows += rows_of(ranks, merged([samples for samples, _, _ in found]))
        links[str(ranks)] = {
            name: {kind: speed.bandwidth for kind, speed in of.items()}
            for name, of in found[0][2].items()
            if name in RATIOS
        }
        traces = {way: [of_rank[1][way] for of_rank in found] for way in WAYS[:2]}
        files[f"layer_overlap_{ranks}.png"] = drawn(ranks, traces)
        rows += rows_of(ranks, run_forked(ranks, measure_gloo, options, **limits)[0])
    for kind in ("shared", "tensor"):
        chosen = [row for row in rows if row["kind"] == kind]
        screen.table(f"{kind}, {options.layers} layers", COLUMNS, map(cells, chosen), 3)
    receipt = {**heading("layer_overlap", options, load), "links": links, "rows": rows}
    screen.say(
        "ms: medians of steps as long as the slowest rank's, forward and backward. busy: the link. "
        "waited: the host, for\nthe link. hidden: by how much that is less than in plain layers. "
        "In brackets quartiles of neighbouring steps.\n"
        f"{load_line(receipt)}"
    )
    files["layer_overlap.json"] = json_file(receipt, indent=1)
    write_files(options.out, files)
    screen.say(f"written to {options.out}: {', '.join(files)}")


if __name__ == "__main__":
    run_script(main, Options)
