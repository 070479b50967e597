"""What traces of Muon's steps tell: pure functions, the rows of a table, and timelines.

A rank waits for a transfer either because another rank has not launched it yet (idle: work is
uneven), or because it is on the link or behind others there (exposed communication).
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from benchmarks.modelled_link import Transfer
from benchmarks.timeline import Look, Panel, Trace, picture

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
    return sum(
        max(stop - max(start, transfer.ready), 0.0)
        for transfer in trace.transfers
        for start, stop in transfer.waits
    )


def computed(trace: Trace) -> float:
    """What a step takes from its first operation to its last, without its waits."""
    return trace.marks[-1][2] - trace.marks[0][1] - waited(trace)


def measure(traces: Sequence[Trace]) -> Step:
    moves = list(map(about_blocks, traces))
    begin = min(trace.marks[0][1] for trace in traces)
    end = max(trace.marks[-1][2] for trace in traces)
    shown = list(map(exposed, moves))
    ends = [t.seconds for t in moves[0].transfers if t.name.startswith("collection")][:1]
    ends += [t.seconds for t in moves[0].transfers if t.name.startswith("return")][-1:]
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
