"""Which host each rank is on, and groups that would span hosts."""

import socket
from collections.abc import Sequence

import torch

from samestep.comm.groups import RankGroup, ranks_text
from samestep.comm.integrity.agreement import gather_texts
from samestep.mesh.degrees import Degrees, DegreesError

LOCAL_AXES = {"model": "tp", "expert": "ep"}  # they talk inside every layer


def hosts_of(world: RankGroup, device: torch.device) -> tuple[str, ...]:
    """The name of each rank's host. All ranks call it."""
    return tuple(gather_texts("names of hosts", socket.gethostname(), world, device))


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
    fewest = min(_runs(hosts))
    fits = [size for size in range(1, fewest + 1) if all(run % size == 0 for run in _runs(hosts))]
    raise DegreesError(
        f"groups of the model and expert axes must stay inside a host. {'; '.join(problems)}. "
        f"Choose ep x tp from {', '.join(map(str, fits))}, or allow it with across_hosts=True"
    )


def _runs(hosts: Sequence[str]) -> list[int]:
    """How many neighbouring ranks share a host, stretch by stretch."""
    runs: list[int] = []
    for rank, host in enumerate(hosts):
        if rank and hosts[rank - 1] == host:
            runs[-1] += 1
        else:
            runs.append(1)
    return runs
