"""Whole training iterations on two gloo ranks: samestep against DistributedDataParallel.

Two contests on one GPT, each interleaved: MuonAdamW against a Muon that every rank runs in full,
and AdamW against ZeroRedundancyOptimizer. Before anything is timed, all contestants of a contest
take three steps on the same data and must end with the same parameters.
"""

import os
import platform
import statistics
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import samestep
from benchmarks import write_json
from benchmarks.cpu_step import Twin
from examples.gpt import GPT, GPTConfig
from samestep.launch import run_forked
from samestep.tooling.output import check_folder
from samestep.tooling.progress import from_other_processes, progress_bar

# Training loops, each with its own copy of one GPT. Those of samestep work on the plain model. The
# others are what users write today: a DistributedDataParallel model, and an optimizer that runs in
# full on every rank or is sharded by ZeroRedundancyOptimizer.

HEAD_WIDTH = 64


def build_model(width: int, layers: int, vocabulary: int) -> GPT:
    """A GPT drawn from torch's global generator."""
    heads = max(1, width // HEAD_WIDTH)
    shape = {"width": width, "layers": layers, "heads": heads, "kv_heads": heads}
    return GPT(GPTConfig(vocab_size=vocabulary, **shape))


class Moments(NamedTuple):
    """Seconds of one iteration on this rank."""

    whole: float
    after_forward: float
    cpu: float  # of all threads of the rank


class Training(NamedTuple):
    """A model, plain and as it is called, and what follows its backward pass."""

    plain: GPT
    called: nn.Module
    step: Callable[[], Any]
    zero_grad: Callable[[], Any]

    def iterate(self, tokens: Tensor, targets: Tensor) -> Moments:
        cpu, start = time.process_time(), time.perf_counter()
        loss = cross_entropy(self.called(tokens).flatten(0, 1), targets.flatten())
        forward = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        self.step()
        self.zero_grad()
        end = time.perf_counter()
        return Moments(end - start, end - forward, time.process_time() - cpu)


def forward_and_backward(model: GPT) -> Training:
    """The floor: no communication, no optimizer."""
    plain = deepcopy(model)
    return Training(plain, plain, lambda: None, plain.zero_grad)


def samestep_muon(model: GPT, **options: Any) -> Training:
    """samestep's Muon and AdamW, with the twin's numbers."""
    plain = deepcopy(model)
    optimizer = samestep.MuonAdamW(
        plain, lr=1e-3, orthogonalize="newton-schulz", adjust_lr="match_rms_adamw",
        betas=(0.9, 0.999), sharding="zero2", **options,
    )  # fmt: skip
    for group in optimizer.param_groups:  # the twin's two optimizers differ in this
        group["weight_decay"] = 0.1 if group["rule"] == "muon" else 0.01
    return Training(plain, plain, optimizer.step, optimizer.zero_grad)


def samestep_adamw(model: GPT, **options: Any) -> Training:
    plain = deepcopy(model)
    optimizer = samestep.AdamW(plain, **{"sharding": "zero2", **options})
    return Training(plain, plain, optimizer.step, optimizer.zero_grad)


def ddp_twin(model: GPT, *, keep_grads: bool) -> Training:
    """Every rank orthogonalizes every matrix."""
    plain, wrapped = _wrapped(model)
    matrices = [param for param in plain.blocks.parameters() if param.ndim == 2]
    known = set(matrices)
    others = [param for param in plain.parameters() if param not in known]
    return _ddp(plain, wrapped, Twin(matrices, others).step, keep_grads)


def ddp_zero_adamw(
    model: GPT, *, keep_grads: bool, bucket_view: bool, grad_view: bool = True, **options: Any
) -> Training:
    """Each rank updates its parameters and broadcasts them.

    There is no overlapped one: torch refuses ZeroRedundancyOptimizer's overlap on gloo.
    """
    plain, wrapped = _wrapped(model, grad_view)
    optimizer = ZeroRedundancyOptimizer(
        plain.parameters(), torch.optim.AdamW, parameters_as_bucket_view=bucket_view, **options
    )
    return _ddp(plain, wrapped, optimizer.step, keep_grads)


def _wrapped(model: GPT, grad_view: bool = True) -> tuple[GPT, DistributedDataParallel]:
    plain = deepcopy(model)
    for name, buffer in list(plain.named_buffers()):
        # Constant tables: as plain attributes DDP does not broadcast them every iteration.
        delattr(plain, name)
        setattr(plain, name, buffer)
    return plain, DistributedDataParallel(plain, gradient_as_bucket_view=grad_view)


def _ddp(
    plain: GPT, wrapped: DistributedDataParallel, step: Callable[[], Any], keep_grads: bool
) -> Training:
    return Training(plain, wrapped, step, lambda: wrapped.zero_grad(set_to_none=not keep_grads))


# What a contest has shown, as a table, a sentence and JSON


@dataclass(frozen=True)
class ContestResult:
    """Samples in milliseconds, per contestant and kind; the first contestant is the floor."""

    KINDS: ClassVar[tuple[str, ...]] = ("iteration", "after_forward", "cpu")

    name: str
    parameters: int
    peers: list[str]
    ours: list[str]
    bar: float
    largest_difference: float
    milliseconds: dict[str, dict[str, list[float]]]

    def median(self, name: str, kind: str = "iteration") -> float:
        return statistics.median(self.milliseconds[name][kind])

    @property
    def best_peer(self) -> str:
        return min(self.peers, key=self.median)

    @property
    def floor(self) -> str:
        return next(iter(self.milliseconds))

    def speed(self, name: str) -> tuple[float, float, float]:
        """How many times faster than the best peer: by medians; least and most in one round."""
        peer = self.milliseconds[self.best_peer]["iteration"]
        own = self.milliseconds[name]["iteration"]
        rounds = [theirs / mine for theirs, mine in zip(peer, own, strict=True)]
        return self.median(self.best_peer) / self.median(name), min(rounds), max(rounds)

    def bytes_sent(self, name: str, ranks: int) -> int:
        """Per rank and step, in fp32: a reduction and a gather, or an all-reduce, are 2 P (N-1)/N.

        ZeroRedundancyOptimizer gathers after an all-reduce.
        """
        if name == self.floor:
            return 0
        passes = 3 if "ZeRO" in name else 2
        return passes * 4 * self.parameters * (ranks - 1) // ranks

    def summary(self, ranks: int) -> dict[str, Any]:
        return {
            "contest": self.name,
            "parameters": self.parameters,
            "largest_difference_after_checked_steps": self.largest_difference,
            "best_peer": self.best_peer,
            "bar": self.bar,
            "met": self.speed(self.ours[0])[0] >= self.bar,
            "contestants": {
                name: {
                    "bytes_per_step_and_rank": self.bytes_sent(name, ranks),
                    "times_faster_than_best_peer": self.speed(name)[0],
                    "in_single_rounds": self.speed(name)[1:],
                    "median_ms": {kind: self.median(name, kind) for kind in self.KINDS},
                    "samples_ms": samples,
                }
                for name, samples in self.milliseconds.items()
            },
        }


def closing_table(result: ContestResult, width: int, ranks: int) -> Table:
    millions = result.parameters / 1e6
    title = f"{result.name}: width {width}, {millions:.1f} M parameters, {ranks} gloo ranks"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 0, 0, 1), show_edge=False)
    table.add_column("", no_wrap=True)
    columns = ["ms", "least-most", "after\nforward", "CPU\nms", "x\npeer", "floor", "MB"]
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    floor = result.median(result.floor)
    for name, samples in result.milliseconds.items():
        times = samples["iteration"]
        table.add_row(
            name,
            f"{result.median(name):.0f}",
            f"{min(times):.0f}-{max(times):.0f}",
            f"{result.median(name, 'after_forward'):.0f}",
            f"{result.median(name, 'cpu'):.0f}",
            "" if name == result.floor else f"{result.speed(name)[0]:.2f}",
            f"{floor / result.median(name):.0%}",
            f"{result.bytes_sent(name, ranks) / 1e6:.0f}",
        )
    return table


def bar_line(result: ContestResult) -> str:
    """How samestep did against the bar, which is for the first of ours."""
    speed, least, most = result.speed(result.ours[0])
    verdict = "met" if speed >= result.bar else "not met"
    best = min(result.ours, key=result.median)
    return (
        f"'{result.ours[0]}' is {speed:.2f} times as fast as '{result.best_peer}' ({least:.2f} to "
        f"{most:.2f} in single rounds); the bar is {result.bar}: {verdict}. The fastest of ours, "
        f"'{best}': {result.speed(best)[0]:.2f}. After the checked steps parameters differed by "
        f"{result.largest_difference:.1e} at most.\n"
    )


# The contests

RANKS = 2
CHECKED_STEPS = 3
MUON_BAR, ADAMW_BAR = 1.6, 1.0


@dataclass(frozen=True)
class Options:
    """What to measure."""

    width: int = 256
    """512 is the one that counts; it takes minutes."""
    layers: int = 12
    vocabulary: int = 4096
    sequences: int = 2
    tokens: int = 32
    muon_rounds: int = 5
    """Interleaved repetitions of the contest with Muon; medians are compared."""
    adamw_rounds: int = 15
    """The same without Muon, which is faster and so noisier."""
    out: Path = Path("out/bench")


class Contest(NamedTuple):
    """Who runs against whom, and what counts as the same work."""

    name: str
    rounds: int
    tolerance: float  # of parameters after the checked steps
    bar: float  # how many times faster than the fastest peer samestep shall be
    peers: dict[str, Callable[[GPT], Training]]
    ours: dict[str, Callable[[GPT], Training]]  # the first one is held to the bar


def contests(options: Options) -> list[Contest]:
    """Both contests; torch's optimizers get every setting that may make them faster."""

    def with_options(build: Callable[..., Training], **given: Any) -> Callable[[GPT], Training]:
        return lambda model: build(model, **given)

    def ways(build: Callable[..., Training]) -> dict[str, Callable[[GPT], Training]]:
        return {
            f"samestep {reduction}{', overlap' * overlap}": with_options(
                build, reduction=reduction, overlap_grad_reduce=overlap
            )
            for reduction in ("fast", "ordered")
            for overlap in (False, True)
        }

    def zero(**given: Any) -> Callable[[GPT], Training]:
        return with_options(ddp_zero_adamw, **{"bucket_view": True, **given})

    adamw_peers = {
        "ZeRO as it comes": zero(keep_grads=False, bucket_view=False, grad_view=False),
        "ZeRO foreach, views": zero(keep_grads=False, foreach=True),
        "ZeRO fused, views": zero(keep_grads=False, fused=True),
    }
    muon_peers = {"DDP and twin": with_options(ddp_twin, keep_grads=True)}
    muon, adamw = ways(samestep_muon), ways(samestep_adamw)
    # DDP overlaps its reductions too, so the first of these, which does, is that of the bar.
    flat = {
        f"samestep flat {sharding}, fused{', overlap' * overlap}": with_options(
            samestep_adamw,
            buffers="flat",
            sharding=sharding,
            fused=True,
            overlap_grad_reduce=overlap,
            overlap_param_gather=overlap,
        )
        for overlap in (True, False)
        for sharding in ("zero1", "zero2")
    }
    adamw = {**flat, **adamw}
    return [
        Contest("Muon and AdamW", options.muon_rounds, 3e-4, MUON_BAR, muon_peers, muon),
        Contest("AdamW", options.adamw_rounds, 2e-5, ADAMW_BAR, adamw_peers, adamw),
    ]


def batch(rank: int, number: int, options: Options) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one iteration: the same for all contestants, not for all ranks."""
    generator = torch.Generator().manual_seed(RANKS * number + rank)
    shape = (2, options.sequences, options.tokens)
    tokens, targets = torch.randint(options.vocabulary, shape, generator=generator)
    return tokens, targets


def require_same_work(contest: Contest, field: dict[str, Training], start: GPT) -> float:
    """Compare all parameters with those of the first peer; give the largest difference."""
    first, *others = field
    largest = 0.0
    for name, begun in start.named_parameters():
        expected = field[first].plain.get_parameter(name)
        for other in [first, *others]:
            found = field[other].plain.get_parameter(name)
            difference = float((found - expected).detach().abs().max())
            largest = max(largest, difference)
            if torch.equal(found, begun):
                raise RuntimeError(f"{contest.name}: {other!r} has not moved {name}")
            if not difference <= contest.tolerance:
                raise RuntimeError(
                    f"{contest.name}: {name} of {other!r} is {difference:.1e} from that of "
                    f"{first!r} after {CHECKED_STEPS} steps; at most {contest.tolerance:.0e} is "
                    "the same work"
                )
    return largest


def run_contest(
    contest: Contest, rank: int, options: Options, report: Callable[[], None]
) -> ContestResult:
    torch.manual_seed(0)
    model = build_model(options.width, options.layers, options.vocabulary)
    built = {**contest.peers, **contest.ours}
    field = {name: build(model) for name, build in built.items()}
    for number in range(CHECKED_STEPS):
        for training in field.values():
            training.iterate(*batch(rank, number, options))
            report()
    difference = require_same_work(contest, field, model)
    field = {"forward and backward": forward_and_backward(model), **field}
    times = torch.zeros(len(field), contest.rounds, 3, dtype=torch.float64)
    for number in range(-1, contest.rounds):  # the one below 0 warms up
        entrants = list(enumerate(field.values()))
        for index, training in entrants if number % 2 else reversed(entrants):
            dist.barrier()
            moments = training.iterate(*batch(rank, CHECKED_STEPS + 1 + number, options))
            if number >= 0:
                times[index, number] = torch.tensor(moments)
            report()
    dist.all_reduce(times, dist.ReduceOp.MAX)  # an iteration ends when the last rank's does
    return ContestResult(
        name=contest.name,
        parameters=sum(param.numel() for param in model.parameters()),
        peers=list(contest.peers),
        ours=list(contest.ours),
        bar=contest.bar,
        largest_difference=difference,
        milliseconds={
            name: dict(zip(ContestResult.KINDS, (1e3 * samples).T.tolist(), strict=True))
            for name, samples in zip(field, times, strict=True)
        },
    )


def iterations(contest: Contest) -> int:
    contestants = len(contest.peers) + len(contest.ours)
    return contestants * CHECKED_STEPS + (contestants + 1) * (1 + contest.rounds)


def measure(options: Options, console: Console) -> list[ContestResult]:
    total = sum(map(iterations, contests(options)))

    def on_rank(rank: int) -> list[ContestResult]:
        done = 0

        def count() -> None:
            nonlocal done
            done += 1
            if rank == 0:
                report(done, total)

        return [run_contest(contest, rank, options, count) for contest in contests(options)]

    with progress_bar(console, "iteration") as show, from_other_processes(show) as report:
        values: list[list[ContestResult]] = run_forked(
            RANKS, on_rank, timeout=float("inf"), collective_timeout=300.0
        )
    return values[0]


def main(options: Options) -> None:
    console = Console(highlight=False)
    check_folder(options.out)
    load_before = os.getloadavg()[0]
    results = measure(options, console)
    for result in results:
        console.print(closing_table(result, options.width, RANKS))
        console.print(bar_line(result))
    load = [load_before, os.getloadavg()[0]]
    console.print(
        "ms: median of whole iterations, each as long as the slower rank's. floor: the share of "
        "forward and backward alone. MB: sent per rank and step, by arithmetic.\n"
        f"Load of this machine before and after: {load[0]:.1f}, {load[1]:.1f}; "
        f"{os.cpu_count()} CPUs."
    )
    receipt = {
        "command": "python -m benchmarks.two_ranks",
        "options": {**asdict(options), "out": str(options.out)},
        "versions": {"samestep": samestep.__version__, "torch": torch.__version__},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "load": load,
        "ranks": RANKS,
        "threads_per_rank": 1,
        "contests": [result.summary(RANKS) for result in results],
    }
    write_json(options.out, "two_ranks.json", receipt)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
