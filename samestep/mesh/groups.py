"""The process groups of a mesh: all that its parameters will need, compared before one is made."""

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch

from samestep.comm.collectives import maximum
from samestep.comm.groups import ranks_text, registry
from samestep.comm.integrity.agreement import require_same_lines
from samestep.mesh.degrees import Degrees


class DuplicateGroupError(RuntimeError):
    """The same ranks have several groups. One that is made twice has hung NCCL."""


def require_single_groups() -> None:
    """Raise if the registry has made a group of the same ranks twice."""
    made = Counter(creation.members for creation in registry.creations)
    twice = [f"{n} groups of {ranks_text(members)}" for members, n in made.items() if n > 1]
    if twice:
        raise DuplicateGroupError(
            f"there are {', '.join(twice)}: take groups from samestep.comm.groups.registry, which "
            "makes one"
        )


def axes_with_groups(degrees: Degrees) -> list[tuple[str, ...]]:
    """The axes along which there are groups, in the order of their creation.

    One for each axis; then those of several axes together that parameters are spread over: the
    optimizer gathers norms and matrices among all ranks that hold a part.
    """
    copies = ("replicate",) if degrees.replicate > 1 else ()
    shard = ("data", "expert") if degrees.ep_carries_data else ("data",)
    expert = (*copies, "data", "expert")
    together = [shard, (*copies, *shard), (*copies, *shard, "model"), expert, (*expert, "model")]
    single = [(axis,) for axis in degrees.axes]
    return list(dict.fromkeys([*single, *together]))


def make_groups(
    groups: Iterable[Sequence[int]], timeout: timedelta | None, device: torch.device | None
) -> None:
    """Make process groups in one order. All ranks of the default group call it with the same ones.

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
