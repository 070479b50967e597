"""Whole training iterations on two gloo ranks: samestep against DistributedDataParallel.

Two contests on one GPT, each interleaved: MuonAdamW against a Muon that every rank runs in full,
and AdamW against ZeroRedundancyOptimizer. Before anything is timed, all contestants of a contest
take three steps on the same data and must end with the same parameters.
"""

import json
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from torch import Tensor

import samestep
from benchmarks import trainings
from benchmarks.trainings import Training
from benchmarks.two_ranks_table import ContestResult, bar_line, closing_table
from examples.gpt import GPT
from samestep.launch import run_forked
from samestep.tooling.output import check_folder, write_files
from samestep.tooling.progress import from_other_processes, progress_bar

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
        return with_options(trainings.ddp_zero_adamw, **{"bucket_view": True, **given})

    adamw_peers = {
        "ZeRO as it comes": zero(keep_grads=False, bucket_view=False, grad_view=False),
        "ZeRO foreach, views": zero(keep_grads=False, foreach=True),
        "ZeRO fused, views": zero(keep_grads=False, fused=True),
    }
    muon_peers = {"DDP and twin": with_options(trainings.ddp_twin, keep_grads=True)}
    muon, adamw = ways(trainings.samestep_muon), ways(trainings.samestep_adamw)
    # DDP overlaps its reductions too, so the first of these, which does, is that of the bar.
    flat = {
        f"samestep flat {sharding}, fused{', overlap' * overlap}": with_options(
            trainings.samestep_adamw,
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
    """Check, warm up, and time all contestants in turns."""
    torch.manual_seed(0)
    model = trainings.build_model(options.width, options.layers, options.vocabulary)
    built = {**contest.peers, **contest.ours}
    field = {name: build(model) for name, build in built.items()}
    for number in range(CHECKED_STEPS):
        for training in field.values():
            training.iterate(*batch(rank, number, options))
            report()
    difference = require_same_work(contest, field, model)
    field = {"forward and backward": trainings.forward_and_backward(model), **field}
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
    """How many iterations a contest takes in all."""
    contestants = len(contest.peers) + len(contest.ours)
    return contestants * CHECKED_STEPS + (contestants + 1) * (1 + contest.rounds)


def measure(options: Options, console: Console) -> list[ContestResult]:
    """Both contests on forked ranks."""
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
    """Measure, print the tables and how the bars were met, write JSON."""
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
    content = json.dumps(receipt, indent=2).encode() + b"\n"
    write_files(options.out, {"two_ranks.json": content})
    console.print(f"written to {options.out / 'two_ranks.json'}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
