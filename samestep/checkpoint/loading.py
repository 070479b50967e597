"""`samestep.load`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from samestep.checkpoint import folder
from samestep.checkpoint.background import finish_background
from samestep.checkpoint.fits import names_that_fit
from samestep.checkpoint.logical import Tensors, state_key, tensors_of
from samestep.checkpoint.options import check_options, restore_options
from samestep.checkpoint.ranks import all_ranks
from samestep.checkpoint.storage import Files, Index
from samestep.full_values import FullValues
from samestep.state import MASTER


@dataclass(frozen=True)
class Loaded:
    """What `load` has found. `extra` is what `save` was given."""

    path: Path
    extra: Any
    world_size: int  # of the ranks that saved


@torch.no_grad()
def load(
    path: str | Path,
    model: nn.Module | None = None,
    optimizer: FullValues | None = None,
    *,
    partial: bool = False,
    verify: bool = True,
) -> Loaded:
    """Load a checkpoint into a model and an optimizer as they are laid out here. Collective.

    Everything is checked before anything changes: files, checksums, names and shapes.

    Args:
        path: A checkpoint, or a folder in which `LATEST` names one.
        model: Left as it is if None.
        optimizer: Left as it is if None. Build it before loading, as for a new run.
        partial: Load what both sides have, instead of raising if one has more.
        verify: Compare all checksums first; each rank reads its share of the files.

    Raises:
        CheckpointError: On all ranks; nothing has changed.
    """
    finish_background()
    ranks = all_ranks()

    def check() -> tuple[Index, Tensors]:
        index = Index(folder.find(Path(path)))
        tensors = tensors_of(model, optimizer)
        if optimizer is not None:
            check_options(optimizer, index.content["groups"], partial)
        names = names_that_fit(tensors, index.tensors, partial)
        if verify:
            index.verify(ranks.rank, ranks.size)
        return index, {name: tensors[name] for name in names}

    index, chosen = ranks.everywhere(check)
    ranks.everywhere(lambda: read_into(chosen, index))
    if optimizer is not None:
        restore_options(optimizer, index.content["groups"])
        stale = [name for name, part in optimizer.held_state() if part.key == MASTER]
        if any(state_key(name, MASTER) not in chosen for name in stale):
            optimizer.refresh_master_weights()
    return Loaded(index.folder, index.content["extra"], index.content["world_size"])


def read_into(tensors: Tensors, index: Index) -> None:
    """Copy what is stored into the boxes that are here; torch finds out what overlaps."""
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(tensors), index.metadata())
    items = planner.create_local_plan().items
    with Files(index.folder, {index.places[item.storage_index].file for item in items}) as files:
        for item in items:
            stored = files.values_of(index, item.storage_index)
            for dim, (start, length) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                stored = stored.narrow(dim, start, length)
            planner.resolve_tensor(item).detach().copy_(stored)
