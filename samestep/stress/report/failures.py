"""What a failed case tells: findings, where each rank was, and where ranks went different ways."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samestep.stress.report.distances import Case
from samestep.stress.report.words import STATUSES, count, duration, ranks, size

Dump = Mapping[str, Any]
Operation = tuple[str, str, int, str]  # kind, name, elements, dtype


@dataclass(frozen=True)
class Position:
    """The operation a rank was in. `odd`: most others were in another one."""

    rank: str
    operation: str
    odd: bool


@dataclass(frozen=True)
class Flight:
    """One of a rank's last operations, as text.

    state: failed, flying or ended.
    parts: it is the first that ranks do not share.
    """

    number: int
    name: str
    kind: str
    elements: str
    sent: str
    launched: str
    waited: str
    state: str
    ended: str
    parts: bool


@dataclass(frozen=True)
class Rank:
    """A rank's last operations, newest first, of so many."""

    rank: str
    launched: str
    flights: list[Flight]


@dataclass(frozen=True)
class Failure:
    """A case that failed, or was interrupted."""

    layout: str
    status: str
    symbol: str
    headline: str
    findings: Sequence[Mapping[str, Any]]
    positions: list[Position]
    parting: str | None
    ranks: list[Rank]


def failure(case: Case) -> Failure:
    """Everything that is known of it."""
    symbol, label = STATUSES[case["status"]]
    taken = f"{case['steps_taken']:,} of {count(case['steps'], 'step')}"
    dumps = {rank: dump for rank, dump in _by_rank(case["flights"]).items() if dump.get("records")}
    parted = parting(dumps)
    return Failure(
        case["layout"],
        case["status"],
        symbol,
        f"{label} after {taken}",
        case["findings"],
        positions(case["positions"]),
        None if parted is None else parted[1],
        [_rank(rank, dump, parted[0] if parted else None) for rank, dump in dumps.items()],
    )


def positions(of_ranks: Mapping[str, str]) -> list[Position]:
    """In the order of ranks; those in another operation than most are odd."""
    [(usual, times)] = Counter(of_ranks.values()).most_common(1) or [("", 0)]
    told = times > 1  # of two ranks in two operations none is the odd one
    return [
        Position(rank, operation, told and operation != usual)
        for rank, operation in _by_rank(of_ranks).items()
    ]


def parting(dumps: Mapping[str, Dump]) -> tuple[int, str] | None:
    """The first operation that ranks do not share, and which rank launched what there.

    None if all have launched the same, as far as their last operations reach.
    """
    by_rank = {int(rank): _operations(dump) for rank, dump in dumps.items()}
    if len(by_rank) < 2:
        return None
    begin = max(min(operations) for operations in by_rank.values())
    end = max(max(operations) for operations in by_rank.values())
    for number in range(begin, end + 1):
        launched: dict[Operation | None, list[int]] = {}
        for rank, operations in by_rank.items():
            launched.setdefault(operations.get(number), []).append(rank)
        if len(launched) > 1:
            ways = [_launched(who, operation) for operation, who in launched.items()]
            return number, f"Ranks part at operation {number:,}: {'; '.join(ways)}."
    return None


def _operations(dump: Dump) -> dict[int, Operation]:
    return {
        record["number"]: (record["kind"], record["name"], record["elements"], record["dtype"])
        for record in dump["records"]
    }


def _launched(who: Sequence[int], operation: Operation | None) -> str:
    if operation is None:
        return f"{ranks(who)} launched nothing"
    kind, name, elements, dtype = operation
    return f"{ranks(who)} launched {name} ({kind} of {elements:,} {dtype})"


def _by_rank(of_ranks: Mapping[str, Any]) -> dict[str, Any]:
    return dict(sorted(of_ranks.items(), key=lambda item: int(item[0])))


def _rank(rank: str, dump: Dump, parts_at: int | None) -> Rank:
    records = sorted(dump["records"], key=lambda record: -record["number"])
    flights = [_flight(record, record["number"] == parts_at) for record in records]
    return Rank(rank, count(dump.get("count", len(records)), "operation"), flights)


def _flight(record: Mapping[str, Any], parts: bool) -> Flight:
    if record["failed"]:
        state, ended = "failed", "failed"
    elif record["finished_ago"] is None:
        state, ended = "flying", "in flight"
    else:
        state, ended = "ended", f"ended {duration(record['finished_ago'])} ago"
    return Flight(
        record["number"],
        record["name"],
        record["kind"],
        f"{record['elements']:,} {record['dtype']}",
        size(record["sent"]),
        f"{duration(record['launched_ago'])} ago",
        duration(record["waited"]),
        state,
        ended,
        parts,
    )
