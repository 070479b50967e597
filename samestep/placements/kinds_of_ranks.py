"""Refuses parameters whose plans other ranks do not make: those would wait for an answer."""

import json
from collections.abc import Sequence

import torch
from torch import Tensor

from samestep.comm.collectives import maximum
from samestep.comm.groups import RankGroup, ranks_text
from samestep.comm.integrity.agreement import RanksDisagreeError, gather_texts
from samestep.comm.presence import sent_from
from samestep.layout.boxes import local_of, mesh_of

NAME = "comparison of kinds of parameters"
KINDS = PLAIN, DTENSORS = "plain parameters", "DTensors"


def refuse_kinds_of_some_ranks(named: Sequence[tuple[str, Tensor]], ranks: RankGroup) -> None:
    """Raise on every rank where some have plain parameters, or DTensors, and others have none.

    Plain parameters are compared with all ranks, and so are DTensors on meshes that leave ranks
    out. Collective: every rank of the group calls it before it makes a plan.
    """
    members = set(ranks.members)
    first: dict[str, str] = {}  # by kind
    for name, param in named:
        mesh = mesh_of(param)
        if mesh is None:
            first.setdefault(PLAIN, name)
        elif not members <= set(mesh.mesh.flatten().tolist()):
            first.setdefault(DTENSORS, name)
    device = sent_from(ranks, local_of(named[0][1]).device)
    here = torch.tensor([kind in first for kind in KINDS], dtype=torch.int64, device=device)
    somewhere, lacking = maximum(NAME, torch.cat([here, 1 - here]), ranks).wait().chunk(2)
    if bool((somewhere & lacking).any()):
        raise _difference(first, ranks, device)


def _difference(
    first: dict[str, str], ranks: RankGroup, device: torch.device
) -> RanksDisagreeError:
    texts = gather_texts(NAME, json.dumps(first), ranks, device)
    told = dict(zip(ranks.members, map(json.loads, texts), strict=True))
    for kind in KINDS:
        has = [rank for rank, own in told.items() if kind in own]
        lacks = [rank for rank, own in told.items() if kind not in own]
        if has and lacks:
            break
    return RanksDisagreeError(
        f"the plan differs between ranks: {ranks_text(has)} with {kind} (the first is "
        f"{told[has[0]][kind]!r}), {ranks_text(lacks)} with none. Build the same model and "
        "optimizer on every rank, or give process_group= the ranks that have the same"
    )
