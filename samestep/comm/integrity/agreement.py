"""Finding out whether all ranks have the same, and who differs."""

import hashlib

import torch
from torch import Tensor

from samestep.comm.collectives import gather_segments, maximum
from samestep.comm.groups import RankGroup


class RanksDisagreeError(RuntimeError):
    """Ranks that must have the same have not. Raised on every rank, with the first difference."""


def require_same_lines(
    what: str, lines: list[str], group: RankGroup, device: torch.device, way_out: str = ""
) -> None:
    """Raise on every rank, naming the first difference, unless all ranks give the same lines.

    A digest is compared first; the lines travel only if digests differ. `way_out`: for ranks that
    differ on purpose.
    """
    name = f"comparison of the {what}"
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    mine = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    digests = [bytes(row.tolist()) for row in gather_rows(name, mine, group)]
    if len(set(digests)) == 1:
        return
    texts = [text.split("\n") for text in gather_texts(name, "\n".join(lines), group, device)]
    for index in range(max(map(len, texts))):
        entries = [text[index] if index < len(text) else "(nothing)" for text in texts]
        if len(set(entries)) > 1:
            other = next(rank for rank, entry in enumerate(entries) if entry != entries[0])
            raise RanksDisagreeError(
                f"the {what} differs between ranks: rank {group.members[0]} has "
                f"{entries[0]!r}, rank {group.members[other]} has {entries[other]!r}. Build the "
                "same model and optimizer, in the same order, on every rank" + way_out
            )


def agreed(values: Tensor, group: RankGroup, name: str = "comparison of replicas") -> Tensor:
    """Per place of an int64 vector: do all ranks have the same there? The host waits for no GPU."""
    # ~ turns the order around without overflow, so the largest ~value is the smallest value's.
    highest = maximum(name, torch.cat([values, ~values]), group).wait()
    high, low = highest.chunk(2)
    return high == ~low


def differing(values: Tensor, group: RankGroup, name: str = "comparison of replicas") -> list[int]:
    """The places of an int64 vector at which ranks have different values."""
    return torch.nonzero(~agreed(values, group, name)).flatten().tolist()


def gather_texts(name: str, text: str, group: RankGroup, device: torch.device) -> list[str]:
    """The texts of all ranks, by their place in the group."""
    encoded = text.encode()
    length = torch.tensor([len(encoded)], dtype=torch.int64, device=device)
    lengths = [int(row) for row in gather_rows(name, length, group)]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
    rows = zip(gather_rows(name, padded, group), lengths, strict=True)
    return [bytes(row[:size].tolist()).decode() for row, size in rows]


def gather_rows(name: str, row: Tensor, group: RankGroup) -> list[Tensor]:
    """The rows of all ranks, which are equally long, by their place in the group."""
    sizes = [row.numel()] * group.size
    return gather_segments(name, row, sizes, group).wait()
