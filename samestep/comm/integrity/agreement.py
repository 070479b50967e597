"""Find out whether all ranks have the same values, and the ranks that differ."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from samestep.comm.collectives import gather_segments, maximum
from samestep.comm.groups import RankGroup, ranks_text
from samestep.comm.integrity.checksum import text_checksum

MOST = 3  # differences that are told


class RanksDisagreeError(RuntimeError):
    """Values that must agree differ between ranks; raised on every rank."""


def require_same_lines(
    what: str, lines: list[str], group: RankGroup, device: torch.device, way_out: str = ""
) -> None:
    """Raise on every rank, naming the first difference, unless all ranks give the same lines.

    A digest is compared first; the lines travel only if digests differ. `way_out`: advice in
    the error, for ranks that differ on purpose.
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


class LineDifferences(NamedTuple):
    """Lines "what = value" in which ranks differ.

    first: the first few differences, each by global rank.
    more: number of further differences.
    """

    first: list[dict[int, str]]
    more: int


def differences_between_ranks(
    lines: Sequence[str], groups: Sequence[RankGroup], device: torch.device
) -> LineDifferences:
    """Return the lines in which ranks differ, among ranks that `groups` reach in turn.

    Checksums travel first, and then only the lines that differ. Collective.
    """
    name = "comparison of what ranks do"
    length = torch.tensor([len(lines)], dtype=torch.int64, device=device)
    for group in groups:
        length = maximum(name, length, group).wait()
    own = [*lines, *[""] * (int(length) - len(lines))]
    sums = torch.tensor(list(map(text_checksum, own)), dtype=torch.int64, device=device)
    highest = torch.cat([sums, ~sums])
    for group in groups:
        highest = maximum(name, highest, group).wait()
    high, low = highest.chunk(2)
    places: list[int] = torch.nonzero(high != ~low).flatten().tolist()
    first = groups[0]
    told = {first.members[first.rank]: [own[place] for place in places[:MOST]]}
    for group in groups:
        for text in gather_texts(name, json.dumps(told), group, device):
            told |= {int(rank): of_rank for rank, of_rank in json.loads(text).items()}
    return LineDifferences(
        [{rank: told[rank][n] for rank in sorted(told)} for n in range(len(places[:MOST]))],
        max(0, len(places) - MOST),
    )


def differences_text(found: LineDifferences) -> str:
    """Return the differences as text, with the values and the ranks that have them."""
    parts = [_difference_text(by_rank) for by_rank in found.first]
    more = f" ({found.more} more differ)" if found.more else ""
    return "; ".join(parts) + more


def _difference_text(by_rank: Mapping[int, str]) -> str:
    what = next(line.partition(" = ")[0] for line in by_rank.values() if line)
    ranks: dict[str, list[int]] = {}
    for rank, line in by_rank.items():
        ranks.setdefault(line.partition(" = ")[2] or "not there", []).append(rank)
    return f"{what} is " + " and ".join(f"{v} on {ranks_text(r)}" for v, r in ranks.items())


def agreed(values: Tensor, group: RankGroup, name: str = "comparison of replicas") -> Tensor:
    """Return, per element of an int64 vector, whether ranks agree; the host waits for no GPU."""
    # ~ turns the order around without overflow, so the largest ~value is the smallest value's.
    highest = maximum(name, torch.cat([values, ~values]), group).wait()
    high, low = highest.chunk(2)
    return high == ~low


def differing(values: Tensor, group: RankGroup, name: str = "comparison of replicas") -> list[int]:
    """Return the indices of an int64 vector at which ranks have different values."""
    return torch.nonzero(~agreed(values, group, name)).flatten().tolist()


def gather_texts(name: str, text: str, group: RankGroup, device: torch.device) -> list[str]:
    """Gather the texts of all ranks, by their place in the group."""
    encoded = text.encode()
    length = torch.tensor([len(encoded)], dtype=torch.int64, device=device)
    lengths = [int(row) for row in gather_rows(name, length, group)]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
    rows = zip(gather_rows(name, padded, group), lengths, strict=True)
    return [bytes(row[:size].tolist()).decode() for row, size in rows]


def gather_rows(name: str, row: Tensor, group: RankGroup) -> list[Tensor]:
    """Gather equally long rows of all ranks, by their place in the group."""
    sizes = [row.numel()] * group.size
    return gather_segments(name, row, sizes, group).wait()
