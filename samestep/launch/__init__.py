"""Ranks on this machine: started here, or joined where torchrun has started them.

This module does without torch: it has the place of this process and the error of failed ranks.
`forked.py` starts ranks.
"""

import os
from typing import NamedTuple


class RanksFailed(RuntimeError):  # noqa: N818
    """Some ranks raised, died or did not finish; ``reports`` has a text on each."""

    def __init__(self, world_size: int, reports: dict[int, str]) -> None:
        self.reports = reports  # in the order in which the failures were noticed
        returned = [rank for rank in range(world_size) if rank not in reports]
        head = f"{len(reports)} of {world_size} ranks failed; ranks that finished: {returned}"
        parts = [f"--- rank {rank} {report.rstrip()}" for rank, report in reports.items()]
        super().__init__("\n".join([head, *parts]))


class TorchrunRank(NamedTuple):
    """The environment of torchrun; the local numbers count one machine's ranks."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def torchrun_rank() -> TorchrunRank | None:
    """Return this process's place among torchrun's ranks; None if torchrun did not start it."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    rank, world_size = _number("RANK"), _number("WORLD_SIZE")
    if rank >= world_size:
        raise ValueError(f"RANK={rank} in the environment is not below WORLD_SIZE={world_size}")
    local_rank = _number("LOCAL_RANK", rank)
    return TorchrunRank(rank, world_size, local_rank, _number("LOCAL_WORLD_SIZE", world_size))


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise ValueError(f"{name}={text!r} in the environment is not a whole number")
    return int(text)
