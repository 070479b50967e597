"""What a contest on two ranks has shown, as a table, a sentence and JSON."""

import statistics
from dataclasses import dataclass
from typing import Any, ClassVar

from rich.box import SIMPLE_HEAD
from rich.table import Table


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
        """Milliseconds of one contestant."""
        return statistics.median(self.milliseconds[name][kind])

    @property
    def best_peer(self) -> str:
        """The peer that everyone is compared with."""
        return min(self.peers, key=self.median)

    @property
    def floor(self) -> str:
        """Forward and backward alone."""
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
        """Everything for JSON."""
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
    """All contestants."""
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
