"""Finds ranks outside of a mesh that hold copies of its DTensors, and who averages them.

A DTensor's gradient is combined over the ranks of its mesh at most: by FSDP2, or by the
tensor parallel layers that hold it. Where other ranks hold copies of it on a mesh of their own,
either all of them see the same data, as ranks along a tensor parallel axis do, and have the same
gradients anyway; or they see data of their own, and drift apart from the first step on, unless
somebody averages.

What FSDP2 does not manage is averaged by the optimizer: over the ranks that hold the same part of
the same parameters, each in a mesh of its own (`find_copies`). FSDP2 itself says over which axes
data differ. Ranks that some mesh joins work on one model together: a norm that FSDP2 has sharded
over the data axis alone has its copies along the model axis, where matrices join the ranks. Ranks
that no mesh joins, and that hold the same parameters, are replicas that nobody averages, which is
refused.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from samestep.comm.collectives import maximum
from samestep.comm.groups import RankGroup, ranks_text, registry
from samestep.comm.integrity.agreement import RanksDisagreeError, gather_rows, gather_texts
from samestep.comm.joint_call import sent_from
from samestep.layout.boxes import local_of, mesh_of
from samestep.tooling.warn import some

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

NAME = "comparison of who holds DTensors"
KINDS = PLAIN, DTENSORS = "plain parameters", "DTensors"
DIGEST = hashlib.sha256().digest_size

Named = tuple[str, Tensor]


class Copies(NamedTuple):
    """The ranks that hold copies of the DTensors of a mesh that FSDP2 does not manage.

    ranks: those with the same part, this rank among them, each in a mesh of its own.
    everyone: all ranks of all these meshes.
    number: which of these meshes is that of this rank.
    """

    ranks: RankGroup
    everyone: RankGroup
    number: int


def refuse_kinds_of_some_ranks(named: Sequence[Named], ranks: RankGroup) -> None:
    """Raise on every rank where some have plain parameters, or DTensors, and others have none.

    All ranks compare their plans of plain parameters, and step together where DTensors lie on
    meshes that leave ranks out. A rank that has none of a kind takes no part in that, and the
    others would wait for it. Collective: every rank of the group calls it before it makes a plan.
    """
    everyone = set(ranks.members)
    first: dict[str, str] = {}  # by kind
    for name, param in named:
        mesh = mesh_of(param)
        if mesh is None:
            first.setdefault(PLAIN, name)
        elif not everyone <= set(mesh.mesh.flatten().tolist()):
            first.setdefault(DTENSORS, name)
    device = sent_from(ranks, local_of(named[0][1]).device)
    call = "comparison of kinds of parameters"
    here = torch.tensor([kind in first for kind in KINDS], dtype=torch.int64, device=device)
    somewhere, lacking = maximum(call, torch.cat([here, 1 - here]), ranks).wait().chunk(2)
    differing: list[bool] = (somewhere & lacking).bool().tolist()
    if not any(differing):
        return
    kind = KINDS[differing.index(True)]
    texts = gather_texts(call, first.get(kind, ""), ranks, device)
    names = dict(zip(ranks.members, texts, strict=True))
    has = [rank for rank, text in names.items() if text]
    lacks = [rank for rank, text in names.items() if not text]
    raise RanksDisagreeError(
        f"the plan differs between ranks: {ranks_text(has)} with {kind} (the first is "
        f"{names[has[0]]!r}), {ranks_text(lacks)} with none. Build the same model and "
        "optimizer on every rank, or pass process_group=, the ranks that have the same "
        "parameters"
    )


def find_copies(named: Iterable[Named], ranks: RankGroup) -> "dict[DeviceMesh, Copies]":
    """Find every mesh of whose DTensors other ranks among `ranks` hold copies.

    Collective over all of them, unless each mesh has them all, which costs nothing.
    """
    by_mesh: dict[Any, list[Named]] = {}
    for name, param in unmanaged(named):
        by_mesh.setdefault(mesh_of(param), []).append((name, param))
    if all(set(mesh.mesh.flatten().tolist()) >= set(ranks.members) for mesh in by_mesh):
        return {}
    own = {_signature(mesh, pairs): mesh for mesh, pairs in by_mesh.items()}
    device = next(iter(by_mesh.values()))[0][1].to_local().device  # type: ignore[attr-defined]
    text = json.dumps({key: mesh.mesh.flatten().tolist() for key, mesh in own.items()})
    told = [json.loads(of_rank) for of_rank in gather_texts(NAME, text, ranks, device)]
    found = {}
    for key, mesh in own.items():
        holders = [
            rank for rank, of_rank in zip(ranks.members, told, strict=True) if key in of_rank
        ]
        meshes = [of_rank[key] for of_rank in told if key in of_rank]
        everyone = frozenset[int]().union(*meshes)
        if len(holders) == 1:
            continue
        if not everyone <= set(ranks.members):
            raise ValueError(
                f"{some([repr(name) for name, _ in by_mesh[mesh]], 4)} are on device "
                f"meshes of {ranks_text(sorted(everyone))}, and process_group has only "
                f"{ranks_text(ranks.members)}: give process_group= all ranks that train "
                "this model, also those that hold other shards of it, or leave it out"
            )
        number = sorted(first for first, *_ in meshes).index(int(mesh.mesh.flatten()[0]))
        groups = registry.of_members(holders), registry.of_members(everyone)
        found[mesh] = Copies(*groups, number)
    return found


def _signature(mesh: Any, pairs: Sequence[Named]) -> str:
    """Digest of the shards a rank holds of a mesh, equal only on ranks with copies."""
    lines = sorted(
        f"{name}: {tuple(param.shape)} {param.dtype} {param.placements}"  # type: ignore[attr-defined]
        for name, param in pairs
    )
    from samestep.comm.meshes import place_here  # DTensors take long to import

    lines.append(f"{tuple(mesh.shape)} at {place_here(mesh)}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def unmanaged(named: Iterable[Named]) -> list[Named]:
    """The DTensors that FSDP2 does not manage."""
    dtensors = [(name, param) for name, param in named if mesh_of(param) is not None]
    return _kinds(dtensors)[1].params if dtensors else []


class _Kind(NamedTuple):
    """DTensors whose gradients are combined in the same way, and the ranks of their meshes."""

    params: list[Named]
    meshes: list[frozenset[int]]

    def leaves_out_some(self, ranks: RankGroup) -> bool:
        """Whether no mesh contains all ranks; equal on all ranks of such a mesh."""
        return bool(self.params) and not any(mesh >= set(ranks.members) for mesh in self.meshes)

    def row(self, ranks: RankGroup) -> bytes:
        """Digest of the parameters, with one flag for every rank in a mesh with this one."""
        lines = sorted(f"{name}: {tuple(param.shape)}" for name, param in self.params)
        digest = hashlib.sha256("\n".join(lines).encode()).digest()
        joined = frozenset[int]().union(*self.meshes)
        bits = sum(1 << place for place, rank in enumerate(ranks.members) if rank in joined)
        return (digest if lines else bytes(DIGEST)) + bits.to_bytes(_bytes_of(ranks), "little")


def refuse_copies_nobody_averages(
    named: Iterable[Named], ranks: RankGroup | None, outer: RankGroup | None
) -> None:
    """Raise on every rank if ranks that no mesh joins hold the same DTensors.

    Among `ranks` only what FSDP2 manages is looked at: copies of others are averaged. Collective
    over both groups, unless a mesh has all of their ranks, which costs nothing.
    """
    dtensors = [(name, param) for name, param in named if mesh_of(param) is not None]
    if not dtensors:
        return
    by_fsdp, others = _kinds(dtensors)
    for group, kinds in (ranks, [by_fsdp]), (outer, [by_fsdp, others]):
        if group is not None and any(kind.leaves_out_some(group) for kind in kinds):
            _refuse(kinds, group)


def _kinds(dtensors: Sequence[Named]) -> list[_Kind]:
    """Sort DTensors into those that FSDP2 manages, and the others.

    The ranks of the first are joined by all that FSDP2 manages of the model: an optimizer may have
    its norms alone.
    """
    from samestep.shards.dtensor.fsdp_units import managed_beside  # DTensors take long to import

    managed = managed_beside(param for _, param in dtensors)
    known = set(map(id, managed))
    by_fsdp = [(name, param) for name, param in dtensors if id(param) in known]
    others = [(name, param) for name, param in dtensors if id(param) not in known]
    return [
        _Kind(by_fsdp, _meshes(managed)),
        _Kind(others, _meshes(param for _, param in others)),
    ]


def _meshes(params: Iterable[Tensor]) -> list[frozenset[int]]:
    meshes = dict.fromkeys(mesh_of(param) for param in params)
    return [frozenset(mesh.mesh.flatten().tolist()) for mesh in meshes]


def _refuse(kinds: Sequence[_Kind], ranks: RankGroup) -> None:
    """Compare between all ranks and raise the same error on each."""
    device = next(param for kind in kinds for _, param in kind.params).to_local().device  # type: ignore[attr-defined]
    row = torch.tensor(list(b"".join(kind.row(ranks) for kind in kinds)), dtype=torch.uint8)
    rows = [bytes(row.tolist()) for row in gather_rows(NAME, row.to(device), ranks)]
    size = DIGEST + _bytes_of(ranks)
    for number, kind in enumerate(kinds):
        own = [row[number * size : (number + 1) * size] for row in rows]
        apart = _apart(own, ranks)
        if apart:
            names = [repr(name) for name, _ in kind.params]
            holders = sorted(rank for replica in apart for rank in replica)
            told = gather_texts(NAME, some(names, 4), ranks, device)
            raise ValueError(_message(apart, told[ranks.members.index(holders[0])], number == 0))


def _apart(rows: Sequence[bytes], ranks: RankGroup) -> list[tuple[int, ...]]:
    """Groups of ranks with copies that no mesh joins; empty if there are none."""
    component = list(range(ranks.size))

    def root(place: int) -> int:
        while component[place] != place:
            place = component[place]
        return place

    for place, row in enumerate(rows):
        bits = int.from_bytes(row[DIGEST:], "little")
        for other in range(ranks.size):
            if bits >> other & 1:
                first, second = sorted((root(place), root(other)))
                component[second] = first
    holding: dict[bytes, dict[int, list[int]]] = {}
    for place, row in enumerate(rows):
        if any(row[:DIGEST]):
            of_model = holding.setdefault(row[:DIGEST], {})
            of_model.setdefault(root(place), []).append(ranks.members[place])
    for replicas in holding.values():
        if len(replicas) > 1:
            return [tuple(members) for members in replicas.values()]
    return []


def _bytes_of(ranks: RankGroup) -> int:
    return -(-ranks.size // 8)


def _message(apart: Sequence[Sequence[int]], names: str, by_fsdp: bool) -> str:
    who = "; ".join(map(ranks_text, apart[:8])) + ("; ..." if len(apart) > 8 else "")
    by_whom = "FSDP2 averages" if by_fsdp else "tensor parallel combines"
    shard = (
        'a mesh with both axes, fully_shard(model, mesh=mesh["replicate", "shard"]) (HSDP)'
        if by_fsdp
        else 'fully_shard(model, mesh=mesh["data"]) after parallelize_module, before the optimizer'
    )
    return (
        f"several groups of ranks ({who}) each hold a copy of {names}: {by_whom} their gradients "
        "inside of each group, and nobody is known to average between the groups, so that the "
        f"copies would drift apart from the first step on. If the groups see different data, give "
        f"FSDP2 all ranks that do: {shard}. If somebody else averages these gradients, or all "
        'groups see the same data, say grads="reduced". If they are different models, or stages '
        "of a pipeline, give process_group=, the ranks that train this one"
    )
