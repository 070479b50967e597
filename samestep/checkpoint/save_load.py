"""`samestep.save` and `samestep.load`."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from samestep.checkpoint import folder
from samestep.checkpoint.errors import CheckpointError
from samestep.checkpoint.logical import (
    Tensors,
    check_fits,
    group_facts,
    model_tensors,
    restore_options,
    state_key,
    state_tensors,
)
from samestep.checkpoint.storage import Index, Reader, Writer
from samestep.comm.agreement import gather_texts
from samestep.comm.groups import RankGroup, rank_group
from samestep.full_values import FullValues
from samestep.state import MASTER
from samestep.version import __version__

T = TypeVar("T")


@dataclass(frozen=True)
class Loaded:
    """What `load` has found. `extra` is what `save` was given."""

    path: Path
    extra: Any
    world_size: int  # of the ranks that saved


@torch.no_grad()
def save(
    path: str | Path,
    model: nn.Module | None = None,
    optimizer: FullValues | None = None,
    *,
    extra: Any = None,
    keep: int | None = None,
) -> Path:
    """Write a checkpoint that any layout on any number of ranks can load. Collective.

    The folder `path` appears when everything in it is written, never before, and `LATEST` beside
    it then names it. Each rank writes what it owns; nothing is gathered.

    Args:
        path: A folder that does not exist yet, on a disk that all ranks share.
        model: Parameters and buffers are saved.
        optimizer: State, master weights and options are saved.
        extra: What JSON can have: step, data position, `scaler.state_dict()`. The first rank's.
        keep: Remove all but so many of the newest checkpoints beside it.

    Raises:
        CheckpointError: On all ranks, with nothing left behind: training can go on.
    """
    path = Path(path)
    group = rank_group()
    rank = 0 if group is None else group.rank
    partial: Path | None = None

    def prepare() -> tuple[Tensors, dict[str, Any]]:
        if keep is not None and keep < 1:
            raise CheckpointError(f"keep must be at least 1, got {keep}")
        _json("extra", extra)
        facts = _facts(optimizer, extra, 1 if group is None else group.size)
        return _tensors(model, optimizer), facts

    tensors, facts = _everywhere("save", group, prepare)
    if rank == 0:
        partial = _everywhere("save", group, lambda: folder.begin(path))
    else:
        _everywhere("save", group, lambda: None)
        partial = path.with_name(f".{path.name}{folder.PARTIAL}")
    try:
        _in_words(path, lambda: dcp.save(tensors, storage_writer=Writer(partial, rank, facts)))
    except BaseException:
        if rank == 0:
            folder.abandon(partial)
        raise
    _everywhere("save", group, lambda: folder.commit(partial, path, keep) if rank == 0 else None)
    return path


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
    group = rank_group()
    rank, ranks = (0, 1) if group is None else (group.rank, group.size)

    def check() -> tuple[Index, Tensors, list[str]]:
        index = Index(folder.find(Path(path)))
        tensors = _tensors(model, optimizer)
        names = check_fits(tensors, index.tensors, partial)
        if optimizer is not None:
            _check_rules(optimizer, index)
        if verify:
            index.verify(rank, ranks)
        return index, tensors, names

    index, tensors, names = _everywhere("load", group, check)
    chosen = {name: tensors[name] for name in names}
    _in_words(index.folder, lambda: dcp.load(chosen, storage_reader=Reader(index)))
    if optimizer is not None:
        restore_options(optimizer, index.content["groups"])
        stale = [name for name, part in optimizer.held_state() if part.key == MASTER]
        if any(state_key(name, MASTER) not in index.tensors for name in stale):
            optimizer.refresh_master_weights()
    return Loaded(index.folder, index.content["extra"], index.content["world_size"])


def _tensors(model: nn.Module | None, optimizer: FullValues | None) -> Tensors:
    if model is None and optimizer is None:
        raise CheckpointError(
            "there is nothing to save or load: give a model, an optimizer or both"
        )
    tensors: Tensors = {}
    if optimizer is not None:
        optimizer.wait_for_parameters()
        tensors |= state_tensors(optimizer)
    if model is not None:
        tensors |= model_tensors(model)
    return tensors


def _facts(optimizer: FullValues | None, extra: Any, ranks: int) -> dict[str, Any]:
    return {
        "samestep": __version__,
        "torch": torch.__version__,
        "world_size": ranks,
        "fingerprint": "" if optimizer is None else optimizer.fingerprint(),
        "layout": [] if optimizer is None else optimizer.layout_lines(),
        "groups": [] if optimizer is None else group_facts(optimizer),
        "extra": extra,
    }


def _json(what: str, value: Any) -> None:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{what} must be what JSON can have: {error}") from None


def _check_rules(optimizer: FullValues, index: Index) -> None:
    saved = {
        name: group["options"]["rule"]
        for group in index.content["groups"]
        for name in group["params"]
    }
    for group in group_facts(optimizer):
        for name in group["params"]:
            rule = group["options"]["rule"]
            if saved.get(name, rule) != rule:
                raise CheckpointError(
                    f"parameter {name!r} was trained with rule {saved[name]!r} and has {rule!r} "
                    "here: give it the same rule, or load the model alone"
                )


def _everywhere(what: str, group: RankGroup | None, act: Callable[[], T]) -> T:
    """Do something; if it fails on any rank, raise on all of them."""
    problem: CheckpointError | None = None
    try:
        result = act()
    except CheckpointError as error:
        problem = error
    if group is not None:
        # The device of the group's backend; a text is small.
        kind = "cuda" if dist.get_backend(group.handle) == "nccl" else "cpu"
        texts = gather_texts(
            what, "" if problem is None else str(problem), group, torch.device(kind)
        )
        for member, text in zip(group.members, texts, strict=True):
            if text and problem is None:
                problem = CheckpointError(f"rank {member}: {text}")
    if problem is not None:
        raise problem
    return result


def _in_words(path: Path, act: Callable[[], object]) -> None:
    """What torch collects of all ranks' errors, as one sentence; it raises on all ranks."""
    try:
        act()
    except CheckpointException as error:
        rank, failure = min(error.failures.items())
        cause = failure[0] if isinstance(failure, tuple) else failure
        reason = cause.strerror if isinstance(cause, OSError) else str(cause)
        raise CheckpointError(f"{path}: rank {rank}: {reason}") from error
