"""Tries cells of the table on forked ranks."""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from tests.limits import HANG, limit
from tests.promises import (  # they put what they promise on the list  # noqa: F401
    of_distributed,
    of_flat,
    of_mistakes,
    of_troubleshooting,
)
from tests.promises.claims import heard
from tests.promises.layouts import LAYOUTS
from tests.promises.listed import PROMISES, Promise
from tests.promises.trial import Ranks, Trial
from tests.ranks import RanksFailed, run_forked

COLLECTIVE = min(limit(20.0), 60.0)  # seconds for a rank that does not come


@dataclass(frozen=True)
class Cell:
    promise: Promise
    layout: str
    option: str

    def __str__(self) -> str:
        return f"{self.promise.name} / {self.layout} / {self.option or 'as it is'}"


def cells(promises: Iterable[Promise] = PROMISES) -> list[Cell]:
    """All that something is promised of."""
    return [
        Cell(each, layout, option)
        for each in promises
        for option in each.options
        for layout in LAYOUTS
        if each.why_not(layout, option) is None
    ]


def _attempt(ranks: Ranks, cell: Cell) -> str | None:
    """None if the promise was kept on this rank, otherwise what was found."""
    gc.collect()  # optimizers of earlier trials would hold launches back beside this one's
    try:
        said = heard(lambda: cell.promise.action(Trial(ranks, cell.layout, cell.option)))
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())
    ours = [text for text in said if "torch." not in text.split(":")[0]]
    return f"warned of {ours}" if ours else None


def _work(rank: int, world: int, chosen: list[Cell], folder: Path) -> None:
    """Tries one cell after another. A rank that finds one broken ends all: they may have parted."""
    ranks = Ranks(rank, world)
    with (folder / f"rank_{rank}").open("a", buffering=1) as file:
        for number, cell in enumerate(chosen):
            found = _attempt(ranks, cell)
            file.write(json.dumps([number, found]) + "\n")
            if found:
                raise AssertionError(found)
            dist.barrier(group=ranks.told)


def _try_on(world: int, chosen: list[Cell], tell: Callable[[Cell, str | None], None]) -> None:
    while chosen:
        with tempfile.TemporaryDirectory() as folder:
            ended = ""
            try:
                run_forked(
                    world,
                    _work,
                    world,
                    chosen,
                    Path(folder),
                    timeout=HANG,
                    collective_timeout=COLLECTIVE,
                )
            except RanksFailed as failed:
                ended = str(failed)
            found = [
                [json.loads(line)[1] for line in path.read_text().splitlines()]
                for path in (Path(folder) / f"rank_{rank}" for rank in range(world))
                if path.exists()
            ]
        found += [[]] * (world - len(found))
        done = min(map(len, found))
        for number in range(done):
            said = {rank: own[number] for rank, own in enumerate(found) if own[number]}
            text = "; ".join(f"rank {rank}: {what}" for rank, what in said.items())
            tell(chosen[number], text or None)
        told = done and any(own[done - 1] for own in found)
        if ended and not told and done < len(chosen):
            said = {rank: own[done] for rank, own in enumerate(found) if len(own) > done}
            tell(chosen[done], f"did not end on every rank ({said}): {ended[-2000:]}")
            done += 1
        if not done:
            raise AssertionError(f"no cell was tried: {ended}")
        chosen = chosen[done:]


def try_cells(
    chosen: list[Cell], tell: Callable[[Cell, str | None], None] = lambda cell, found: None
) -> dict[Cell, str | None]:
    """What was found of each cell: None where the promise was kept on every rank."""
    outcome: dict[Cell, str | None] = {}

    def keep(cell: Cell, found: str | None) -> None:
        outcome[cell] = found
        tell(cell, found)

    for world in (2, 4):
        _try_on(world, [cell for cell in chosen if LAYOUTS[cell.layout][0] == world], keep)
    return outcome
