"""The formats of checkpoints by name: how each is planned, written and opened."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from samestep.checkpoint.local_files import (
    Here,
    LocalFiles,
    finish_locally,
    refuse_elsewhere,
    write_locally,
)
from samestep.checkpoint.logical import Tensors
from samestep.checkpoint.ranks import Owners, Ranks, WritePlan, plan_alone, plan_together
from samestep.checkpoint.storage import (
    INDEX,
    CheckpointError,
    Index,
    Places,
    Read,
    Values,
    read_index,
    write_boxes,
    write_index,
)
from samestep.checkpoint.torch_files import (
    TorchFiles,
    finish_with_torch,
    torch_state_dict,
    write_with_torch,
)

FormatName = Literal["fully_reshardable", "fsdp_dtensor", "dp_local"]
Facts = Mapping[str, Any]  # of the index: versions, layout, groups, extra
WRITTEN_AS = "written_as"  # the key in the index


class Format(NamedTuple):
    """The steps of a save that differ between formats."""

    state_dict: Callable[[Tensors, Facts], Mapping[str, Any]]  # what is to be stored
    is_nested: bool  # its keys are then joined by dots
    plan: Callable[[DefaultSavePlanner, Owners, Ranks], WritePlan]
    # A rank's files; gives what the first rank needs to know. Objects are what is no tensor.
    write: Callable[[Path, int, WritePlan, Values, Mapping[str, Any]], Any]
    finish: Callable[[Path, Metadata, list[Any], Facts], None]  # on the first rank


class Stored(Protocol):
    """A checkpoint on the disk: all files are there, in their sizes, and the index is right."""

    folder: Path
    content: dict[str, Any]
    tensors: dict[str, TensorStorageMetadata]

    def verify(self, share: int = 0, shares: int = 1) -> None:
        """Raise unless every bit is right of this share."""

    def reading(self) -> AbstractContextManager[Read]:
        """What gives the values of a box, while the block runs."""


def _write_boxes(
    folder: Path, rank: int, plan: WritePlan, values: Values, _: Mapping[str, Any]
) -> Places:
    return write_boxes(folder, rank, plan.items, values)


def _finish_boxes(folder: Path, metadata: Metadata, everyones: list[Places], facts: Facts) -> None:
    places = {index: place for of_rank in everyones for index, place in of_rank.items()}
    write_index(folder, metadata, places, facts)


def _as_they_are(tensors: Tensors, _: Facts) -> Mapping[str, Any]:
    return tensors


FORMATS: dict[str, Format] = {
    "fully_reshardable": Format(_as_they_are, False, plan_together, _write_boxes, _finish_boxes),
    "fsdp_dtensor": Format(
        torch_state_dict, True, plan_together, write_with_torch, finish_with_torch
    ),
    "dp_local": Format(_as_they_are, False, plan_alone, write_locally, finish_locally),
}


def format_named(name: str) -> Format:
    if name not in FORMATS:
        raise CheckpointError(f"format must be one of {', '.join(FORMATS)}, got {name!r}")
    return FORMATS[name]


def open_checkpoint(folder: Path, here: Here | None = None) -> Stored:
    """What is in a folder; for who is `here`, or all of it, to look at and to convert."""
    if not (folder / INDEX).exists():
        return TorchFiles(folder, None)
    content = read_index(folder)
    if "world_size" not in content:
        raise CheckpointError(f"{folder} is the part of one rank: load {folder.parent}")
    written_as = content.get(WRITTEN_AS, "fully_reshardable")
    if written_as == "fully_reshardable":
        return Index(folder, content)
    if written_as == "fsdp_dtensor":
        return TorchFiles(folder, content)
    if written_as != "dp_local":
        raise CheckpointError(
            f"{folder / INDEX} has format {written_as}, which this version of samestep does not "
            "know: load it with the version that wrote it"
        )
    if here is None:
        return LocalFiles(folder, content, range(content["world_size"]))
    refuse_elsewhere(folder, content, here)
    return LocalFiles(folder, content, [here.rank])
