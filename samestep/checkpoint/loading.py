"""`samestep.load`, after the checkpoint was found to fit the model and the optimizer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from samestep.checkpoint import folder
from samestep.checkpoint.formats import Here, LocalFiles, open_checkpoint
from samestep.checkpoint.logical import (
    Remainders,
    Tensors,
    check_options,
    restore_options,
    state_key,
    tensors_of,
)
from samestep.checkpoint.ranks import all_ranks
from samestep.checkpoint.saving import finish_background
from samestep.checkpoint.state_conversion import ReadPlan, plan_reads
from samestep.checkpoint.storage import CheckpointError, StoredCheckpoint
from samestep.checkpoint.torch_files import TorchFiles
from samestep.layout.fused_rows import whole_name
from samestep.optimizer.rule_optimizer import RuleOptimizer
from samestep.rules.state import MASTER, MASTERS
from samestep.tooling.warn import some


@dataclass(frozen=True)
class Loaded:
    """The result of `load`; `extra` is the object given to `save`."""

    path: Path
    extra: Any
    world_size: int  # of the ranks that saved


@torch.no_grad()
def load(
    path: str | Path,
    model: nn.Module | None = None,
    optimizer: RuleOptimizer | None = None,
    *,
    partial: bool = False,
    verify: bool = True,
) -> Loaded:
    """Load a checkpoint into a model and an optimizer in their present layout. Collective.

    Everything is checked before anything changes: files, checksums, names and shapes.

    Args:
        path: A checkpoint, or a folder in which `LATEST` names one, or a folder that
            torch.distributed.checkpoint has written, which has no checksums.
        model: Left as it is if None.
        optimizer: Left as it is if None. Build it before loading, as for a new run.
        partial: Load what both sides have, instead of raising if one has more.
        verify: Compare all checksums first; each rank reads its share of the files.

    Raises:
        CheckpointError: On all ranks; nothing has changed.
    """
    finish_background()
    ranks = all_ranks(f"load of {path}")
    here = Here(ranks.rank, ranks.size, [] if optimizer is None else optimizer.layout_lines())

    def look() -> tuple[tuple[StoredCheckpoint, ReadPlan], bool]:
        stored = open_checkpoint(folder.find(Path(path)), here)
        if isinstance(stored, TorchFiles) and stored.refusal and optimizer is not None:
            raise stored.refusal
        remainders: Remainders = {}
        tensors = tensors_of(model, optimizer, remainders)
        whole = not isinstance(stored, LocalFiles)
        reads = plan_reads(tensors, remainders, stored.tensors, optimizer, whole=whole)
        more = surplus(reads.tensors, stored.tensors, reads.optional)
        return (stored, reads), bool(more)

    (stored, (tensors, optional, second, conversions, formats)), more = ranks.agreed(look)
    # A pipeline stage has a part of the model: what others have is no surplus.
    of_ranks = ranks.all_of(frozenset(tensors) | optional) if any(more) else []

    def check() -> Tensors:
        if optimizer is not None:
            check_options(optimizer, stored.content["groups"], partial)
        elsewhere = frozenset().union(*of_ranks)
        names = names_that_fit(tensors, stored.tensors, partial, elsewhere | optional)
        chosen = {name: tensors[name] for name in names}
        if isinstance(stored, LocalFiles):
            stored.refuse_other_boxes(chosen, formats)
        if verify:
            stored.verify(ranks.rank, ranks.size)
        return chosen

    chosen = ranks.everywhere(check)

    def read() -> None:
        read_into(chosen, stored)
        for others, put in second:
            read_into(others, stored, put)
        for convert in conversions:
            convert()

    ranks.everywhere(read)
    if optimizer is not None:
        restore_options(optimizer, stored.content["groups"])
        stale = [name for name, part in optimizer.held_state() if part.key in MASTERS]
        done = chosen.keys() | optional
        if any(state_key(whole_name(name), MASTER) not in done for name in stale):
            optimizer.refresh_master_weights()
    return Loaded(stored.folder, stored.content["extra"], stored.content["world_size"])


def read_into(
    tensors: Tensors,
    stored: StoredCheckpoint,
    put: Callable[[Tensor, Tensor], object] | None = None,
) -> None:
    """Read stored values into local shards; torch computes which shards overlap.

    put: What is done with a box and its values; without it, boxes take them.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(tensors), Metadata(dict(stored.tensors)))
    plan = planner.create_local_plan()
    if put is None:
        stored.read_data(plan, planner).wait()
    else:
        for item in plan.items:
            put(planner.resolve_tensor(item).detach(), stored.read_item(item))


Entries = Mapping[str, TensorStorageMetadata]


def surplus(
    wanted: Mapping[str, Tensor], stored: Entries, optional: frozenset[str] = frozenset()
) -> list[str]:
    """Names of a model or optimizer in a checkpoint that were not requested."""
    parts = {name.split(".", 1)[0] for name in wanted}
    here = {name for name in stored if name.split(".", 1)[0] in parts}
    return sorted(name for name in here - wanted.keys() - optional if not _is_master(name))


def names_that_fit(
    wanted: Mapping[str, Tensor],
    stored: Entries,
    partial: bool,
    elsewhere: frozenset[str] = frozenset(),
) -> list[str]:
    """Names that can be loaded; raises if the checkpoint belongs to another model.

    Master copies are optional on both sides: without a stored one the parameter is taken. What is
    `elsewhere` other ranks load.
    """
    missing = sorted(name for name in wanted.keys() - stored.keys() if not _is_master(name))
    if missing and not partial:
        raise CheckpointError(_sentence("the checkpoint lacks", missing))
    more = [name for name in surplus(wanted, stored) if name not in elsewhere]
    if more and not partial:
        raise CheckpointError(_sentence("the checkpoint has more than is here", more))
    common = [name for name in wanted if name in stored]
    if not common:
        raise CheckpointError(
            "the checkpoint has none of the names of this model and optimizer: it was "
            "probably saved from another model"
        )
    for name in common:
        if stored[name].size != wanted[name].shape:
            raise CheckpointError(
                f"{name} has shape {tuple(stored[name].size)} in the checkpoint and "
                f"{tuple(wanted[name].shape)} in this model: load it into the model "
                "that it was saved from"
            )
    return common


def _is_master(name: str) -> bool:
    return name.endswith(f".{MASTER}")


def _sentence(what: str, names: list[str]) -> str:
    return f"{what}: {some(names, 4)}. Pass partial=True to load only what both have"
