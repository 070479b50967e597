"""Builds a DeviceMesh from degrees, on process groups of the registry.

All groups that parameters will need are compared before one is made, and kept inside hosts. Groups
that the user has made are taken.
"""

import json
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from itertools import groupby

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from samestep.comm.collectives import maximum
from samestep.comm.groups import ranks_text, registry
from samestep.comm.integrity.agreement import gather_texts, require_same_lines
from samestep.mesh.degrees import Degrees, DegreesError

DENSE = "dense"  # data and expert as one axis
LOCAL_AXES = {"model": "tp", "expert": "ep"}  # they talk inside every layer


class DuplicateGroupError(RuntimeError):
    """Raised for two groups of the same ranks, which can hang NCCL."""


@dataclass(frozen=True)
class Mesh:
    """A DeviceMesh with degrees and named axes; made by `build`."""

    degrees: Degrees
    device_mesh: DeviceMesh  # the axes of `degrees.axes`
    dense: DeviceMesh  # what dense parameters are sharded over: (replicate,) data and expert
    expert: DeviceMesh  # what experts are sharded over: (replicate,) data
    rank: int
    hosts: tuple[str, ...]  # by rank

    def axis(self, name: str) -> DeviceMesh | None:
        """The submesh of one axis; None if it has one rank (data always exists)."""
        if name not in self.degrees.sizes:
            known = ", ".join(self.degrees.sizes)
            raise ValueError(f"the mesh has no axis {name!r}; its axes are {known}")
        return self.device_mesh[name] if name in self.degrees.axes else None

    @property
    def coordinates(self) -> dict[str, int]:
        return self.degrees.coordinates(self.rank)

    @property
    def name(self) -> str:
        return self.degrees.name


def build(
    *,
    tp: int = 1,
    ep: int = 1,
    pp: int = 1,
    replicate: int = 1,
    sequence_parallel: bool = False,
    expert_tensor_parallel: int = 0,
    ep_carries_data: bool = True,
    device_type: str | None = None,
    timeout: timedelta | float | None = None,
    across_hosts: bool = False,
    groups: DeviceMesh | Iterable[dist.ProcessGroup] = (),
) -> Mesh:
    """Build a mesh over all ranks. Collective, with the same arguments on every rank.

    Nothing is made before all sizes fit, all ranks agree and groups stay inside their hosts.

    Args:
        tp: Ranks that share a matrix (axis "model").
        ep: Ranks that share the experts (axis "expert").
        pp: Pipeline stages (axis "pipe").
        replicate: Copies of the sharded model (axis "replicate").
        sequence_parallel: Ranks that share matrices share the sequence between them.
        expert_tensor_parallel: Ranks that share an expert's matrix; 0: follow `tp`.
        ep_carries_data: Ranks along the expert axis see different tokens.
        device_type: Of the mesh; if not given, that of the default group's backend.
        timeout: Of new groups, in seconds; if not given, that of the default group.
        across_hosts: Allow groups of the model and expert axes that span hosts.
        groups: Process groups that were made already, to be taken instead of made once more: those
            that this rank is in, or a DeviceMesh that has them. Each must have the ranks of one of
            the mesh's groups, and all of its ranks give it.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "a mesh needs the default process group: call "
            "torch.distributed.init_process_group first"
        )
    world = registry.of()
    degrees = Degrees(
        world.size, pp, replicate, ep, tp, sequence_parallel, expert_tensor_parallel,
        ep_carries_data,
    )  # fmt: skip
    limit = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
    if limit is not None and limit <= timedelta(0):
        raise ValueError(f"mesh: timeout must be above 0 seconds, got {limit.total_seconds():g}")
    device_type = device_type or ("cuda" if "nccl" in dist.get_backend() else "cpu")
    # torch's fake backend plays one rank of a world in which nobody else answers.
    device = None if dist.get_backend() == "fake" else torch.device(device_type)
    hosts = ("",) * world.size
    if device is not None:
        lines = [f"{field.name} = {getattr(degrees, field.name)}" for field in fields(degrees)]
        lines.append(f"across_hosts = {across_hosts}")
        require_same_lines("mesh", lines, world, device)
        hosts = tuple(gather_texts("names of hosts", socket.gethostname(), world, device))
    if not across_hosts:
        require_local_groups(degrees, hosts)
    wanted = [g for axes in axes_with_groups(degrees) for g in degrees.groups(*axes)]
    adopt_groups(groups, wanted, device)
    make_groups(wanted, limit, device)
    me = dist.get_rank()
    along = {axis: degrees.peers(me, axis) for axis in degrees.axes}
    whole = _device_mesh(degrees, along, device_type)
    joined, shard = whole, "data"
    if degrees.ep > 1 and degrees.ep_carries_data:
        # The same ranks with two axes as one. Parts of both meshes can be combined, as FSDP2 does
        # with the model axis, because both count ranks alike.
        both = {DENSE if axis == "data" else axis: ranks for axis, ranks in along.items()}
        del both["expert"]
        both[DENSE] = degrees.peers(me, "data", "expert")
        joined, shard = _device_mesh(degrees, both, device_type), DENSE
    copies = ("replicate",) if replicate > 1 else ()
    require_single_groups()
    dense, expert = joined[(*copies, shard)], whole[(*copies, "data")]
    return Mesh(degrees, whole, dense, expert, me, hosts)


def _device_mesh(
    degrees: Degrees, along: Mapping[str, Sequence[int]], device_type: str
) -> DeviceMesh:
    """A DeviceMesh over all ranks; `along` has the peers of this rank by axis."""
    groups = [registry.of_ranks(ranks) for ranks in along.values()]
    return DeviceMesh.from_group(
        [group.handle for group in groups if group is not None],  # all are known, and I am in all
        device_type,
        mesh=torch.arange(degrees.world).view([len(ranks) for ranks in along.values()]),
        mesh_dim_names=tuple(along),
    )


def model_axis_in_two(mesh: Mesh, sets: int) -> DeviceMesh:
    """The model axis split into ("model_sets", "model_copies"), neighbours holding copies.

    All ranks of the default group call it, also those of other pipeline stages.
    """
    degrees, device_mesh = mesh.degrees, mesh.device_mesh
    if degrees.tp % sets:
        raise ValueError(
            f"tp={degrees.tp} cannot be divided into {sets} equal sets of ranks: choose a "
            "number that divides tp"
        )
    copies = degrees.tp // sets
    by_set = torch.arange(degrees.world).view(-1, sets, copies)  # neighbours are along model
    across, within = by_set.mT.reshape(-1, sets).tolist(), by_set.reshape(-1, copies).tolist()
    fake = dist.get_backend() == "fake"
    make_groups([*across, *within], None, None if fake else torch.device(device_mesh.device_type))
    along = {axis: degrees.peers(mesh.rank, axis) for axis in degrees.axes if axis != "model"}
    for name, groups in (("model_sets", across), ("model_copies", within)):
        along[name] = next(tuple(group) for group in groups if mesh.rank in group)
    whole = _device_mesh(degrees, along, device_mesh.device_type)
    return whole["model_sets", "model_copies"]


def require_single_groups() -> None:
    """Raise if the registry has made a group of the same ranks twice."""
    made = Counter(creation.members for creation in registry.creations)
    twice = [f"{n} groups of {ranks_text(members)}" for members, n in made.items() if n > 1]
    if twice:
        raise DuplicateGroupError(
            f"there are {', '.join(twice)}: take groups from "
            "samestep.comm.groups.registry, which makes each set of ranks one group"
        )


def axes_with_groups(degrees: Degrees) -> list[tuple[str, ...]]:
    """Axes that need process groups, in the order of their creation.

    One for each axis; then those of several axes together that parameters are spread over: the
    optimizer gathers norms and matrices among all ranks that hold a part.
    """
    copies = ("replicate",) if degrees.replicate > 1 else ()
    shard = ("data", "expert") if degrees.ep_carries_data else ("data",)
    expert = (*copies, "data", "expert")
    together = [shard, (*copies, *shard), (*copies, *shard, "model"), expert, (*expert, "model")]
    single = [(axis,) for axis in degrees.axes]
    return list(dict.fromkeys([*single, *together]))


def adopt_groups(
    given: DeviceMesh | Iterable[dist.ProcessGroup],
    wanted: Iterable[Sequence[int]],
    device: torch.device | None,
) -> None:
    """Use the caller's process groups where they have the required ranks.

    All ranks of the default group call it. `device` is None where there are no other ranks to ask.

    Raises:
        ValueError: A given group is not wanted, its ranks have another one, or not all of them give
            it. Raised on every rank.
    """
    whole = registry.of()
    handles = given.get_all_groups() if isinstance(given, DeviceMesh) else list(given)
    own = {}
    for handle in handles:
        if isinstance(handle, dist.ProcessGroup):  # new_group() gives other ranks a number
            own[tuple(sorted(dist.get_process_group_ranks(handle)))] = handle
    told = [json.dumps([(ranks, registry.has_another(handle)) for ranks, handle in own.items()])]
    if device is not None:
        told = gather_texts("groups that were given", told[0], whole, device)
    gave: dict[tuple[int, ...], list[int]] = {}  # by ranks of a group, those that gave it
    problems = []
    for rank, text in zip(whole.members, told, strict=False):
        for ranks, has_another in json.loads(text):
            gave.setdefault(tuple(ranks), []).append(rank)
            if has_another:
                problems.append(
                    f"of {ranks_text(ranks)}, which have another group already on rank {rank}: "
                    "give groups to the first mesh that needs them"
                )
    possible = {tuple(sorted(set(group))) for group in wanted} | {whole.members}
    needed = ", ".join(map(str, sorted(map(list, possible))))
    for ranks, holders in gave.items():
        lacks = sorted(set(ranks) - set(holders))
        if ranks not in possible:
            problems.append(
                f"of {ranks_text(ranks)}, and the mesh needs none of these ranks: leave it out. "
                f"The mesh needs groups of the ranks {needed}"
            )
        elif lacks and device is not None:
            problems.append(
                f"of {ranks_text(ranks)} on {ranks_text(holders)}, and not on {ranks_text(lacks)}: "
                "every rank gives the groups that it is in"
            )
    if problems:
        raise ValueError(f"groups= has an unusable group {problems[0]}")
    for ranks in gave.keys() - {whole.members}:
        registry.adopt(ranks, own.get(ranks))


def make_groups(
    groups: Iterable[Sequence[int]], timeout: timedelta | None, device: torch.device | None
) -> None:
    """Make process groups in one order. Collective, with the same groups on every rank.

    Ranks compare first, so that none waits for a group that others do not make. `device` is None
    where there are no other ranks to ask.
    """
    whole = registry.of()
    wanted = list(dict.fromkeys(tuple(sorted(set(group))) for group in groups))
    if device is not None:
        lines = [f"group {number}: ranks {group}" for number, group in enumerate(wanted)]
        lines.append(f"timeout: {timeout}")
        require_same_lines("list of groups to make", lines, whole, device)
        known = torch.tensor([registry.known_among_members(group) for group in wanted])
        known = known.to(device, torch.int32)
        anywhere = maximum("groups that members know", known, whole).wait().tolist()
        for group, found in zip(wanted, anywhere, strict=True):
            if found:
                registry.tell_everyone(group)
    for group in wanted:
        registry.of_ranks(group, timeout)


def require_local_groups(degrees: Degrees, hosts: Sequence[str]) -> None:
    """Raise, naming ranks and hosts, if a group of the model or expert axis spans hosts."""
    problems = []
    for axis, degree in LOCAL_AXES.items():
        spanning = [group for group in degrees.groups(axis) if len({hosts[r] for r in group}) > 1]
        if spanning:
            first = spanning[0]
            where = " and ".join(
                f"{host} ({ranks_text(r for r in first if hosts[r] == host)})"
                for host in dict.fromkeys(hosts[rank] for rank in first)
            )
            more = f", and {len(spanning) - 1} more groups do" if len(spanning) > 1 else ""
            problems.append(
                f"{degree} {degrees.sizes[axis]}: {ranks_text(first)} span {where}{more}"
            )
    if not problems:
        return
    runs = [len(list(run)) for _, run in groupby(hosts)]  # of neighbours that share a host
    fits = [size for size in range(1, min(runs) + 1) if all(run % size == 0 for run in runs)]
    raise DegreesError(
        f"groups of the model and expert axes must stay inside a host. {'; '.join(problems)}. "
        f"Choose ep x tp from {', '.join(map(str, fits))}, or allow it with across_hosts=True"
    )
