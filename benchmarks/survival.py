"""Whether every singular value stays in bounds: survey of hard blocks, and a climb to the worst.

For each polynomial, execution, arithmetic and compute dtype: blocks of many shapes and spectra,
scaled by 1e-8 to 1e8, through 1 to 25 steps; then a search that changes blocks so that their
result grows. Nothing may be non-finite, and no singular value may exceed the largest of the exact
polynomial by more than 0.15.

On a GPU the kernels run; on a CPU their arithmetic is emulated. Needs torch alone.
"""

import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks import heading, run_script, write_json
from benchmarks.hard_blocks import KINDS, Shape, blocks_of
from benchmarks.kernel_arithmetic import BFLOAT16, FLOAT16, emulated
from samestep.rules.basin import FEW_ROWS, TOLERANCE, Coefficients, as_table, basin_of
from samestep.rules.orthogonalize import (
    POLYNOMIALS,
    Execution,
    orthogonalize_plain,
    step_coefficients,
)

SHAPES: tuple[Shape, ...] = (
    (2, 2), (2, 8), (3, 3), (3, 6), (4, 4), (4, 16), (6, 12), (12, 6), (8, 8), (8, 32), (16, 16),
    (16, 64), (32, 32), (32, 128), (64, 64), (64, 256), (128, 128), (128, 512), (256, 256),
    (256, 1024),
)  # fmt: skip
LARGE: tuple[Shape, ...] = ((768, 768), (768, 3072), (1280, 5120), (2048, 2048))
CLIMBED: tuple[Shape, ...] = ((2, 2), (3, 3), (3, 6), (4, 8), (6, 12), (16, 32), (80, 160))
STEPS = (5, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 5, 12, 14, 15, 5, 17, 20, 22, 25)
ELEMENTS = 1 << 22  # of a batch at most, so that small machines manage; 32 times that on a GPU
CHAINS = 1 << 15  # elements that climb at once; 32 times that on a GPU

Run = Callable[[Tensor, Sequence[Coefficients]], Tensor]


class Combination(NamedTuple):
    """A way to orthogonalize: polynomial, execution, and dtype."""

    polynomial: str
    execution: Execution
    by: str  # "kernels" or "plain"
    dtype: torch.dtype

    @property
    def name(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.polynomial} {self.execution} {self.by} {dtype}"


@dataclass
class Worst:
    """The block that came out largest, relative to what the exact polynomial can give."""

    excess: float = -float("inf")
    value: float = 0.0
    where: str = ""


@dataclass
class Result:
    """What one combination came to on all blocks."""

    name: str
    blocks: int = 0
    climbed: int = 0
    failures: int = 0
    seconds: float = 0.0
    worst: Worst = field(default_factory=Worst)
    worst_climbed: Worst = field(default_factory=Worst)


def combinations() -> Iterator[Combination]:
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    executions: tuple[Execution, ...] = ("standard", "gram")
    for polynomial, execution in itertools.product(POLYNOMIALS, executions):
        for dtype in dtypes[:2]:
            yield Combination(polynomial, execution, "kernels", dtype)
        for dtype in dtypes:
            yield Combination(polynomial, execution, "plain", dtype)


def runner(combination: Combination, device: torch.device) -> Run:
    """The function that is tried: blocks (B, rows, cols) and one triple per step."""
    execution, dtype = combination.execution, combination.dtype
    norm_factor = POLYNOMIALS[combination.polynomial].norm_factor
    if combination.by == "kernels" and device.type != "cuda":
        arithmetic = FLOAT16 if dtype == torch.float16 else BFLOAT16
        return lambda blocks, table: emulated(
            blocks, table, execution, norm_factor=norm_factor, arithmetic=arithmetic
        )
    function: Callable[..., Tensor] = orthogonalize_plain
    if combination.by == "kernels":
        from samestep.kernels.choice import missing_products
        from samestep.kernels.orthogonalize import orthogonalize_blocks

        reason = missing_products(device)
        if reason is not None:
            raise SystemExit(f"no kernels: {reason}")
        function = orthogonalize_blocks
    return lambda blocks, table: function(
        blocks.double() if dtype == torch.float64 else blocks,
        table,
        execution,
        norm_factor=norm_factor,
        eps=0.0,
        eps_form="clamp",
        dtype=dtype,
    )


def upper_bounds(found: Tensor) -> Tensor:
    """At least the largest singular value of each block: tr((Y Y^T)^64)^(1/128). inf for NaN.

    At most m^(1/128) times it: 1.5 percent too much for 6 rows, 4.5 for 256.
    """
    Y = found.mT if found.shape[1] > found.shape[2] else found
    wide = torch.float64 if Y.shape[1] <= 16 else torch.float32
    largest = Y.abs().amax((1, 2), keepdim=True).to(wide).clamp_min(1e-30)
    Y = Y.to(wide) / largest
    power = Y @ Y.mT
    log = torch.zeros(len(Y), dtype=torch.float64, device=Y.device)
    for doubling in range(7):
        trace = power.diagonal(dim1=-2, dim2=-1).sum(-1)
        log = log + trace.double().clamp_min(1e-300).log() / 2**doubling
        if doubling < 6:
            power = power / trace.clamp_min(1e-30)[:, None, None]
            power = power @ power
    bounds = (log / 2).exp() * largest.flatten().double()
    return torch.where(torch.isfinite(bounds), bounds, torch.inf)


def largest_singular_value(found: Tensor) -> float:
    if not bool(torch.isfinite(found).all()):
        return float("inf")
    return float(torch.linalg.matrix_norm(found.double().cpu(), 2))


def judge(
    found: Tensor, table: Sequence[Coefficients], norm_factor: float
) -> tuple[int, float, int]:
    """How many blocks are out of bounds, the largest singular value, and whose it is.

    Bounds first; exact values of all that the bounds do not clear, and of the largest.
    """
    limit = basin_of(as_table(table), norm_factor).largest[-1] + TOLERANCE
    bounds = upper_bounds(found)
    suspects = set(torch.nonzero(bounds > limit).flatten()[:64].tolist())
    suspects |= set(bounds.topk(min(2, len(bounds))).indices.tolist())
    exact = {place: largest_singular_value(found[place]) for place in sorted(suspects)}
    place = max(exact, key=lambda key: exact[key])
    return sum(not value <= limit for value in exact.values()), exact[place], place


class Trial:
    """A combination on a device, and what has come of it."""

    def __init__(self, combination: Combination, device: torch.device) -> None:
        self.result = Result(combination.name)
        self.polynomial, self.device = combination.polynomial, device
        self.run = runner(combination, device)
        self.larger = 32 if device.type == "cuda" else 1  # batches than on a CPU

    def look(self, worst: Worst, given: Tensor, table: Sequence[Coefficients], where: str) -> None:
        """Judge what comes of blocks, and note the worst of all so far."""
        norm_factor = POLYNOMIALS[self.polynomial].norm_factor
        failures, value, place = judge(self.run(given, table), table, norm_factor)
        self.result.failures += failures
        excess = value - basin_of(as_table(table), norm_factor).largest[-1]
        if not excess <= worst.excess:
            worst.excess, worst.value = excess, value
            worst.where = where.format(place)


def survey(trial: Trial, shapes: Sequence[Shape], blocks: int, until: float, seed: int) -> None:
    """Every shape with every kind, as many rounds as it takes; the steps go round on their own."""
    rounds, result = itertools.cycle(STEPS), trial.result
    most = ELEMENTS * trial.larger
    cells = list(itertools.product(shapes, KINDS))
    weights = {shape: 1 / (shape[0] * shape[1]) ** 0.75 for shape in shapes}
    whole = sum(weights[shape] for shape, _ in cells)
    shuffled = random.Random(seed)
    goal = result.blocks + blocks
    while result.blocks < goal and time.perf_counter() < until:
        shuffled.shuffle(cells)
        for shape, kind in cells:
            if time.perf_counter() > until:
                return
            share = blocks * weights[shape] / whole
            count = max(1, min(int(share) + 1, most // (4 * shape[0] * shape[1])))
            steps, seed = next(rounds), seed + 1
            table = step_coefficients(trial.polynomial, steps)
            given = blocks_of(kind, shape, count, seed, table, trial.device)
            result.blocks += count
            where = f"{shape[0]}x{shape[1]} {kind}, {steps} steps, seed {seed}"
            trial.look(result.worst, given, table, f"{where}, block {{}} of {count}")


def climb(trial: Trial, shapes: Sequence[Shape], until: float, seed: int) -> None:
    """Change blocks at random and keep what makes the largest singular value grow."""
    most, run, device = CHAINS * trial.larger, trial.run, trial.device
    turns = list(itertools.product((5, 3, 8), shapes))
    for number, (steps, shape) in enumerate(turns):
        now = time.perf_counter()
        end = now + max(0.0, until - now) / (len(turns) - number)
        table = step_coefficients(trial.polynomial, steps)
        count = max(8, most // (shape[0] * shape[1]))
        given = blocks_of("dangerous", shape, count, seed + number, table, device, scaled=False)
        generator = torch.Generator(device).manual_seed(seed + number)
        values, rounds = upper_bounds(run(given, table)), 0
        while time.perf_counter() < end:
            changed = given + _changes(given, generator)
            new = upper_bounds(run(changed, table))
            better = new > values
            given = torch.where(better[:, None, None], changed, given)
            values = torch.where(better, new, values)
            rounds += 1
            if rounds % 100 == 0:  # the worst quarter starts again from the best
                order = values.argsort(descending=True)
                quarter = max(1, count // 4)
                given[order[-quarter:]] = given[order[:quarter]]
                values[order[-quarter:]] = values[order[:quarter]]
        trial.result.climbed += count * (rounds + 1)
        where = f"{shape[0]}x{shape[1]}, {steps} steps, seed {seed + number}, {rounds} rounds"
        trial.look(trial.result.worst_climbed, given, table, f"{where}, block {{}}")


def _changes(given: Tensor, generator: torch.Generator) -> Tensor:
    """From a tenth to a hundred-thousandth of a block, of some or all of its entries."""
    count, rows, cols = given.shape

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=given.device)

    sizes = 10 ** (-1 - 4 * uniform(count, 1, 1)) * given.abs().amax((1, 2), keepdim=True)
    some = uniform(count, rows, cols) < uniform(count, 1, 1)
    noise = torch.randn(given.shape, generator=generator, device=given.device)
    return sizes * some * noise


@dataclass(frozen=True)
class Options:
    """What to try, and for how long."""

    device: str = "cpu"
    blocks: Annotated[int, "of each combination"] = 1_000_000
    seconds: Annotated[float, "for each combination at most"] = 10.0
    large: Annotated[bool, "also 768x768 and up"] = False
    only: Annotated[str, "combinations whose name has all these words"] = ""
    seed: int = 0
    out: Path = Path("out/bench")


def tried(combination: Combination, options: Options, seed: int) -> Result:
    device = torch.device(options.device)
    start = time.perf_counter()
    trial = Trial(combination, device)
    end = start + options.seconds
    graphs: Any = nullcontext()
    if device.type == "cuda":  # small ones are not recorded as graphs: every batch has a new shape
        graphs = patch("samestep.kernels.orthogonalize.SMALL", 0.0)
    with graphs:
        survey(trial, SHAPES, options.blocks, start + 0.6 * options.seconds, seed)
        if options.large:
            now = time.perf_counter()
            until = now + max(0.0, 0.5 * (end - now))
            survey(trial, LARGE, 3000, until, seed + 500_000)
    climb(trial, CLIMBED, end, seed + 900_000)
    trial.result.seconds = round(time.perf_counter() - start, 1)
    return trial.result


def describe_result(result: Result) -> str:
    return (
        f"{result.name:44s} {result.blocks:>9,d} {result.worst.value:>9.4f} "
        f"{result.worst.excess:>+9.4f} {result.climbed:>11,d} {result.worst_climbed.value:>9.4f} "
        f"{result.worst_climbed.excess:>+9.4f} {result.failures:>6d} {result.seconds:>6.1f}"
    )


HEAD = (
    f"{'':44s} {'blocks':>9s} {'worst':>9s} {'excess':>9s} {'climbed':>11s} {'worst':>9s} "
    f"{'excess':>9s} {'failed':>6s} {'s':>6s}"
)


def main(options: Options) -> int:
    """Try all, print the table, write JSON; 1 if anything is out of bounds."""
    if options.device == "cpu":
        torch.set_num_threads(1)
    results = []
    print(HEAD)
    for number, combination in enumerate(combinations()):
        if all(word in combination.name.split() for word in options.only.split()):
            print(f"{combination.name} ...", file=sys.stderr, flush=True)
            results.append(tried(combination, options, 1_000_000 * number + options.seed))
            print(describe_result(results[-1]), flush=True)
    failed = [result for result in results if result.failures]
    for result in failed:
        worst = max(result.worst, result.worst_climbed, key=lambda worst: worst.excess)
        print(f"out of bounds: {result.name}: {worst.value:.4f} at {worst.where}")
    receipt = {
        **heading("survival", options, device=torch.device(options.device)),
        "tolerance": TOLERANCE,
        "few_rows": FEW_ROWS,
        "results": [asdict(result) for result in results],
    }
    write_json(options.out, "survival.json", receipt)
    return 1 if failed or not results else 0


if __name__ == "__main__":
    run_script(main, Options)
