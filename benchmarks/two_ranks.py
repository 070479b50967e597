"""Whole training iterations of AdamW on two gloo ranks: samestep beside ZeroRedundancyOptimizer.

Contestants take turns on one GPT. Before anything is timed, all of them take three steps on the
same data and must end with the same parameters.
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import samestep
from benchmarks import batch, gpt_config, heading, run_script, write_json
from examples.gpt import GPT
from samestep.lab.bench.gpu.measure import in_rounds
from samestep.lab.bench.gpu.report import Screen
from samestep.launch.forked import run_forked
from samestep.models.gpt import mean_loss
from samestep.tooling.output import check_folder

# Training loops, each with its own copy of one GPT. Those of samestep work on the plain model. The
# others are what users write today: a DistributedDataParallel model and ZeroRedundancyOptimizer.


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
        loss = mean_loss(self.called(tokens), targets)
        forward = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        self.step()
        self.zero_grad()
        end = time.perf_counter()
        return Moments(end - start, end - forward, time.process_time() - cpu)


def samestep_adamw(model: GPT, **options: Any) -> Training:
    plain = deepcopy(model)
    optimizer = samestep.AdamW(plain, **{"sharding": "zero2", **options})
    return Training(plain, plain, optimizer.step, optimizer.zero_grad)


def ddp_zero_adamw(model: GPT, *, views: bool = True, **options: Any) -> Training:
    """Each rank updates its parameters and broadcasts them.

    There is no overlapped one: torch refuses ZeroRedundancyOptimizer's overlap on gloo.
    """
    plain, wrapped = _wrapped(model, views)
    optimizer = ZeroRedundancyOptimizer(
        plain.parameters(), torch.optim.AdamW, parameters_as_bucket_view=views, **options
    )
    return Training(plain, wrapped, optimizer.step, wrapped.zero_grad)


def _wrapped(model: GPT, grad_view: bool = True) -> tuple[GPT, DistributedDataParallel]:
    plain = deepcopy(model)
    for name, buffer in list(plain.named_buffers()):
        # Constant tables: as plain attributes DDP does not broadcast them every iteration.
        delattr(plain, name)
        setattr(plain, name, buffer)
    return plain, DistributedDataParallel(plain, gradient_as_bucket_view=grad_view)


# The contest

RANKS = 2
CHECKED_STEPS = 3
BAR = 1.0  # how many times faster than the fastest peer the first of ours shall be
FLOOR = "forward and backward"  # the name of that contestant

Builders = Mapping[str, Callable[[GPT], Training]]
Summary = dict[str, Any]  # of a contest, as the receipt has it


@dataclass(frozen=True)
class Options:
    """What to measure."""

    width: Annotated[int, "512 is the one that counts; it takes minutes"] = 256
    layers: int = 12
    vocabulary: int = 4096
    sequences: int = 2
    tokens: int = 32
    rounds: Annotated[int, "turns of every contestant; medians are compared"] = 15
    out: Path = Path("out/bench")


class Contest(NamedTuple):
    """Who runs against whom, and what counts as the same work."""

    name: str
    rounds: int
    tolerance: float  # of parameters after the checked steps
    bar: float  # how many times faster than the fastest peer samestep shall be
    peers: Builders
    ours: Builders  # the first one is held to the bar


def contest(options: Options) -> Contest:
    """torch's optimizer gets every setting that may make it faster."""
    peers = {
        "ZeRO as it comes": partial(ddp_zero_adamw, views=False),
        "ZeRO foreach, views": partial(ddp_zero_adamw, foreach=True),
        "ZeRO fused, views": partial(ddp_zero_adamw, fused=True),
    }
    # DDP overlaps its reductions too, so the first of these, which does, is that of the bar.
    flat: Builders = {
        f"samestep flat {sharding}, fused{', overlap' * overlap}": partial(
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
    ways: Builders = {
        f"samestep {reduction}{', overlap' * overlap}": partial(
            samestep_adamw, reduction=reduction, overlap_grad_reduce=overlap
        )
        for reduction in ("fast", "ordered")
        for overlap in (False, True)
    }
    return Contest("AdamW", options.rounds, 2e-5, BAR, peers, {**flat, **ways})


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


def run_contest(contest: Contest, options: Options, rank: int) -> Summary:
    torch.manual_seed(0)
    model = GPT(gpt_config(options.width, options.layers, vocab_size=options.vocabulary))
    built = {**contest.peers, **contest.ours}
    field = {name: build(model) for name, build in built.items()}
    for number in range(CHECKED_STEPS):
        for training in field.values():
            training.iterate(*batch(options, number))
    difference = require_same_work(contest, field, model)
    # The floor has no communication and no optimizer.
    field = {FLOOR: Training(model, model, lambda: None, model.zero_grad), **field}

    def turn(number: int, training: Training) -> Moments:
        dist.barrier()
        return training.iterate(*batch(options, CHECKED_STEPS + 1 + number))

    def tell(done: int) -> None:
        if rank == 0:
            print(f"{contest.name}: round {done - 1} of {contest.rounds}", flush=True)

    turns = {name: partial(turn, training=training) for name, training in field.items()}
    moments = in_rounds(turns, contest.rounds, warmup=1, tell=tell)
    times = torch.tensor([moments[name] for name in field], dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)  # an iteration ends when the last rank's does
    milliseconds = {
        name: dict(zip(KINDS, (1e3 * samples).T.tolist(), strict=True))
        for name, samples in zip(field, times, strict=True)
    }
    parameters = sum(param.numel() for param in model.parameters())
    return summary(contest, parameters, difference, milliseconds)


# What a contest has shown: for the receipt, as a table, and in a sentence

KINDS = ("iteration", "after_forward", "cpu")


def summary(
    contest: Contest,
    parameters: int,
    difference: float,
    milliseconds: dict[str, dict[str, list[float]]],
) -> Summary:
    """From samples per contestant and kind; the first contestant is the floor."""
    medians = {
        name: {kind: statistics.median(samples[kind]) for kind in KINDS}
        for name, samples in milliseconds.items()
    }
    best_peer = min(contest.peers, key=lambda name: medians[name]["iteration"])
    contestants: dict[str, Any] = {}
    for name, samples in milliseconds.items():
        both = zip(milliseconds[best_peer]["iteration"], samples["iteration"], strict=True)
        rounds = [theirs / mine for theirs, mine in both]
        contestants[name] = {
            # In fp32: a reduction and a gather, or an all-reduce, are 2 P (N-1)/N; and
            # ZeroRedundancyOptimizer gathers after an all-reduce.
            "bytes_per_step_and_rank": (0 if name == FLOOR else 3 if "ZeRO" in name else 2)
            * 4
            * parameters
            * (RANKS - 1)
            // RANKS,
            "times_faster_than_best_peer": (
                medians[best_peer]["iteration"] / medians[name]["iteration"]
            ),
            "in_single_rounds": (min(rounds), max(rounds)),
            "median_ms": medians[name],
            "samples_ms": samples,
        }
    first = contestants[next(iter(contest.ours))]
    return {
        "contest": contest.name,
        "parameters": parameters,
        "largest_difference_after_checked_steps": difference,
        "best_peer": best_peer,
        "bar": contest.bar,
        "met": first["times_faster_than_best_peer"] >= contest.bar,
        "contestants": contestants,
    }


COLUMNS = ("", "ms", "least-most", "after forward", "CPU ms", "x peer", "floor", "MB")


def cells(name: str, found: Summary, floor: float) -> list[str]:
    """Of a contestant; floor: milliseconds without any."""
    times, medians = found["samples_ms"]["iteration"], found["median_ms"]
    return [
        name,
        f"{medians['iteration']:.0f}",
        f"{min(times):.0f}-{max(times):.0f}",
        f"{medians['after_forward']:.0f}",
        f"{medians['cpu']:.0f}",
        "" if name == FLOOR else f"{found['times_faster_than_best_peer']:.2f}",
        f"{floor / medians['iteration']:.0%}",
        f"{found['bytes_per_step_and_rank'] / 1e6:.0f}",
    ]


def bar_line(result: Summary, contest: Contest) -> str:
    """How samestep did against the bar, which is for the first of ours."""
    ours = {name: result["contestants"][name] for name in contest.ours}
    first, found = next(iter(ours.items()))
    least, most = found["in_single_rounds"]
    best = min(ours, key=lambda name: ours[name]["median_ms"]["iteration"])
    return (
        f"'{first}' is {found['times_faster_than_best_peer']:.2f} times as fast as "
        f"'{result['best_peer']}' ({least:.2f} to {most:.2f} in single rounds); the bar is "
        f"{result['bar']}: {'met' if result['met'] else 'not met'}. The fastest of ours, "
        f"'{best}': {ours[best]['times_faster_than_best_peer']:.2f}. After the checked steps "
        f"parameters differed by {result['largest_difference_after_checked_steps']:.1e} at most.\n"
    )


# The command


def on_rank(rank: int, options: Options) -> list[Summary]:
    return [run_contest(contest(options), options, rank)]


def main(options: Options) -> None:
    screen = Screen()
    check_folder(options.out)
    load = os.getloadavg()[0]
    ranks = run_forked(RANKS, on_rank, options, timeout=float("inf"), collective_timeout=300.0)
    results: list[Summary] = ranks[0]
    for result in results:
        millions, contestants = result["parameters"] / 1e6, result["contestants"]
        about = f"width {options.width}, {millions:.1f} M parameters, {RANKS} gloo ranks"
        floor = contestants[FLOOR]["median_ms"]["iteration"]
        rows = [cells(name, found, floor) for name, found in contestants.items()]
        screen.table(f"{result['contest']}: {about}", COLUMNS, rows)
        screen.say(bar_line(result, contest(options)))
    ran = {"ranks": RANKS, "threads_per_rank": 1, "contests": results}
    receipt = {**heading("two_ranks", options, load), **ran}
    screen.say(
        "ms: median of whole iterations, each as long as the slower rank's. floor: the share of "
        "forward and backward alone. MB: sent per rank and step, by arithmetic."
    )
    write_json(options.out, "two_ranks.json", receipt)


if __name__ == "__main__":
    run_script(main, Options)
