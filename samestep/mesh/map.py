"""The map of a mesh: the coordinates and peers of each rank."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import islice, pairwise
from typing import TextIO

from samestep.mesh.degrees import Degrees

SHOWN = 64  # rows; more are counted


def header(degrees: Degrees, hosts: Sequence[str] = ()) -> list[str]:
    peers = [f"{axis} peers" for axis, size in degrees.axes.items() if size > 1]
    return ["rank", *(["host"] if any(hosts) else []), *degrees.axes, *peers]


def rows(degrees: Degrees, hosts: Sequence[str] = ()) -> Iterator[list[str]]:
    """One row per rank: its host, its place on each axis, and the ranks it meets along each."""
    for rank in range(degrees.world):
        places = degrees.coordinates(rank)
        peers = [degrees.peers(rank, axis) for axis in degrees.axes if degrees.sizes[axis] > 1]
        yield [
            str(rank),
            *([hosts[rank]] if any(hosts) else []),
            *(str(places[axis]) for axis in degrees.axes),
            *(shortened(group) for group in peers),
        ]


def text(degrees: Degrees, hosts: Sequence[str] = ()) -> str:
    table = [header(degrees, hosts), *islice(rows(degrees, hosts), SHOWN)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
    return "\n".join([degrees.name, *lines, *_rest(degrees)])


def show(degrees: Degrees, stream: TextIO, hosts: Sequence[str] = ()) -> None:
    """Write the map, as a table where rich is installed."""
    if find_spec("rich") is None:
        stream.write(f"{text(degrees, hosts)}\n")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=degrees.name, caption="\n".join(_rest(degrees)) or None)
    for column in header(degrees, hosts):
        table.add_column(column, justify="left" if column == "host" else "right")
    for row in islice(rows(degrees, hosts), SHOWN):
        table.add_row(*row)
    Console(file=stream).print(table)


def shortened(ranks: Sequence[int]) -> str:
    """A list of ranks as short text."""
    if len(ranks) < 4:
        return " ".join(map(str, ranks))
    step = ranks[1] - ranks[0]
    if any(b - a != step for a, b in pairwise(ranks)):
        return " ".join(map(str, ranks))
    return f"{ranks[0]}-{ranks[-1]}" + (f" by {step}" if step > 1 else "")


def _rest(degrees: Degrees) -> list[str]:
    return [f"and {degrees.world - SHOWN} more ranks"] if degrees.world > SHOWN else []
