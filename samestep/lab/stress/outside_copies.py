"""Compares copies of DTensors on ranks outside of their mesh, without a process group of their own.

Meshes side by side hold copies: norms along a tensor parallel axis, or a model that is tensor
parallel on some ranks and again on others. No process group has just those ranks. So every rank
tells all others one checksum for each kind of DTensors that it holds; only where they differ do
names and values travel.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from samestep.comm.collectives import gather_segments
from samestep.comm.groups import RankGroup
from samestep.comm.integrity.agreement import gather_rows, gather_texts
from samestep.comm.integrity.checksum import checksum, checksums, text_checksum
from samestep.comm.integrity.differences import compared, difference_of
from samestep.comm.meshes import place_here
from samestep.lab.stress.check import Drift, Kind

NAME = "check of copies on other meshes"
KINDS = 8  # of DTensors that a rank tells of; what is beyond is told as one


class Part(NamedTuple):
    """The local tensor of a DTensor."""

    kind: Kind
    name: str
    local: Tensor


class OutsideCopies:
    """This rank's DTensors whose meshes leave out some ranks."""

    def __init__(self, tensors: Iterable[tuple[Kind, str, Tensor]], ranks: RankGroup) -> None:
        self._ranks = ranks
        alike: dict[str, list[Part]] = {}
        inside: dict[Any, bool] = {}
        for kind, name, tensor in tensors:
            if not isinstance(tensor, DTensor):
                continue
            mesh = tensor.device_mesh
            if mesh not in inside:
                inside[mesh] = set(ranks.members) <= set(mesh.mesh.flatten().tolist())
            if not inside[mesh]:
                part = Part(kind, name, tensor.to_local().detach())
                alike.setdefault(_place(tensor), []).append(part)
        kinds = list(alike.items())
        if len(kinds) > KINDS:
            rest = kinds[KINDS - 1 :]
            place = "; ".join(place for place, _ in rest)
            kinds[KINDS - 1 :] = [(place, [part for _, parts in rest for part in parts])]
        self._kinds: dict[int, list[Part]] = {}
        for place, parts in kinds:
            lines = [f"{kind} {name} {tuple(local.shape)}" for kind, name, local in parts]
            self._kinds[text_checksum("\n".join([place, *lines]))] = parts

    def __bool__(self) -> bool:
        return bool(self._kinds)

    def drifts(self) -> list[Drift]:
        """Return differences of copies, equal on every rank; collective, and the host waits."""
        sums = {key: checksums([p.local for p in parts]) for key, parts in self._kinds.items()}
        own = [value for key, numbers in sums.items() for value in (key, int(checksum(numbers)))]
        self._device = next(iter(self._kinds.values()))[0].local.device
        row = torch.tensor(own + [0] * (2 * KINDS - len(own)), device=self._device)
        holders: dict[int, dict[int, int]] = {}  # by kind: place of a rank, and its checksum
        for place, told in enumerate(gather_rows(NAME, row, self._ranks)):
            numbers = told.tolist()
            for key, number in zip(numbers[::2], numbers[1::2], strict=True):
                if key:
                    holders.setdefault(key, {})[place] = number
        differing = {
            key: places for key, places in holders.items() if len(set(places.values())) > 1
        }
        return self._located(differing, sums) if differing else []

    def _located(
        self, differing: Mapping[int, Mapping[int, int]], sums: Mapping[int, Tensor]
    ) -> list[Drift]:
        mine = {}
        for key in differing.keys() & self._kinds.keys():
            parts = zip(self._kinds[key], sums[key].tolist(), strict=True)
            mine[str(key)] = [
                [kind, name, str(local.dtype).removeprefix("torch."), list(local.shape), number]
                for (kind, name, local), number in parts
            ]
        texts = gather_texts(NAME, json.dumps(mine), self._ranks, self._device)
        of_ranks = [json.loads(text) for text in texts]
        found = []
        for key, holders in differing.items():
            places = sorted(holders)
            lists = [of_ranks[place][str(key)] for place in places]
            for index, entries in enumerate(zip(*lists, strict=True)):
                if len({entry[-1] for entry in entries}) > 1:
                    part = self._kinds[key][index].local if key in self._kinds else None
                    found += self._drift(entries[0], places, part)
        return found

    def _drift(
        self, entry: Sequence[Any], places: Sequence[int], part: Tensor | None
    ) -> list[Drift]:
        """Return differences of one DTensor; every rank receives all copies of its parts."""
        kind, name, dtype_name, shape, _ = entry
        dtype: torch.dtype = getattr(torch, dtype_name)
        mine = torch.empty(0, dtype=torch.uint8, device=self._device)
        if part is not None:
            mine = part.contiguous().view(-1).view(torch.uint8)
        size = torch.Size(shape).numel() * dtype.itemsize
        sizes = [size if place in places else 0 for place in range(self._ranks.size)]
        parts = gather_segments(NAME, mine, sizes, self._ranks).wait()
        first, *others = [parts[place].view(dtype) for place in places]
        members = [self._ranks.members[place] for place in places]
        told = [compared(first, own, shape) for own in (first, *others)]
        difference = difference_of(told, members)
        if difference is None:
            return []
        return [Drift(name, kind, **vars(difference), first_rank=members[0])]


def _place(tensor: DTensor) -> str:
    """Return how a DTensor is sharded and which shard this rank holds; equal for copies."""
    mesh, placements = tensor.device_mesh, tensor.placements
    pairs = zip(place_here(mesh), placements, strict=True)
    cut = [at for at, placement in pairs if not placement.is_replicate()]
    return f"{tuple(mesh.shape)} {placements} {cut}"
