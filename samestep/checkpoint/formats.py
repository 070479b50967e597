"""The formats of checkpoints by name: how each is planned, written and opened.

`storage` has the files of `fully_reshardable`, `torch_files` those of `fsdp_dtensor`. In format
`dp_local` every rank writes what it holds as it is, and reads that alone:

rank_0/, rank_1/, ...            of each rank a folder like one of `fully_reshardable`
index.json, index.json.sha256    the layout, the only one that loads it; sizes and checksums
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from samestep.checkpoint.claims import ClaimError, entry_of, file_size, inside
from samestep.checkpoint.logical import Tensors
from samestep.checkpoint.ranks import Owners, Ranks, plan_alone, plan_together
from samestep.checkpoint.storage import (
    FORMAT,
    INDEX,
    BoxWriter,
    CheckpointError,
    Index,
    RawWriter,
    StoredCheckpoint,
    WritePlan,
    check_sizes,
    claims_of,
    done,
    read_index,
    sizes_in,
    sync,
    write_boxes,
    write_index,
    write_json,
)
from samestep.checkpoint.torch_files import TorchFiles, TorchWriter, torch_state_dict

FormatName = Literal["fully_reshardable", "fully_sharded_model_space", "fsdp_dtensor", "dp_local"]
# What Megatron calls it: every rank writes the boxes of parameters and state that it owns.
ALIASES = {"fully_sharded_model_space": "fully_reshardable"}
Facts = Mapping[str, Any]  # of the index: versions, layout, groups, extra
WRITTEN_AS = "written_as"  # the key in the index
SUM = f"{INDEX}.sha256"


class Here(NamedTuple):
    """The loading rank, with a description of its layout."""

    rank: int
    size: int
    layout: list[str]


# --- dp_local: writing -----------------------------------------------------------------------


class LocalWriter(BoxWriter):
    """Writes everything a rank holds into a folder of its own, with its own index.

    Plans have the metadata of this rank as `planner_data`: a list of boxes does not tell of tensors
    that it has none of.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        own = self.folder / _name(self.rank)
        own.mkdir()
        places = write_boxes(own, self.rank, plan.items, planner.resolve_data)
        write_index(own, plan.planner_data, places, {})
        sync(own)
        names = sorted(file.name for file in own.iterdir())
        sums = MetadataIndex(own.name)
        told = sizes_in(self.folder, [f"{own.name}/{name}" for name in names])
        return done([WriteResult(sums, 0, (told, (own / SUM).read_text()))])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        told = [found.storage_data for [found] in results]
        files = {name: size for sizes, _ in told for name, size in sizes.items()}
        parts = [text for _, text in told]
        content = {"format": FORMAT, **self.facts, "files": files, "parts": parts}
        write_json(self.folder / INDEX, content)


def _name(rank: int) -> str:
    return f"rank_{rank}"


# --- dp_local: reading -----------------------------------------------------------------------


class LocalFiles(StoredCheckpoint):
    """Reads parts that ranks wrote separately: a loading rank reads its own part only.

    Raises unless as many ranks are here, in the layout that it was saved in.
    """

    def __init__(self, folder: Path, content: dict[str, Any], here: Here | None) -> None:
        self.folder, self.content = folder, content
        self._here = here or Here(0, content["world_size"], [])
        if content["world_size"] != self._here.size:
            raise self._elsewhere("the number of ranks differs")
        if content["layout"] and self._here.layout and content["layout"] != self._here.layout:
            raise self._elsewhere("the layout differs")
        with claims_of(folder / INDEX):
            if len(entry_of(content, "parts", list)) != content["world_size"]:
                raise ClaimError("it does not have one part for each rank")
        check_sizes(folder, content["files"])
        ranks = range(content["world_size"]) if here is None else [here.rank]
        self._parts = [self._part(rank) for rank in ranks]
        self.tensors: dict[str, TensorStorageMetadata] = {}
        self._holder: dict[MetadataIndex, Index] = {}  # of what several have, the first
        for part in self._parts:
            for name, theirs in part.tensors.items():
                known = self.tensors.setdefault(name, replace(theirs, chunks=[]))
                if (known.size, known.properties) != (theirs.size, theirs.properties):
                    raise CheckpointError(
                        f"{part.folder / INDEX} has {name!r} with another shape or "
                        "dtype than the parts of other ranks: load another checkpoint"
                    )
                known.chunks += [chunk for chunk in theirs.chunks if chunk not in known.chunks]
            for box in part.places:
                self._holder.setdefault(box, part)
        if here is None:
            self._refuse_holes()

    def _refuse_holes(self) -> None:
        """Check that the parts of all ranks cover every tensor; they may overlap."""
        with claims_of(self.folder / INDEX):
            for name, entry in self.tensors.items():
                if sum(chunk.sizes.numel() for chunk in entry.chunks) < entry.size.numel():
                    raise ClaimError(f"its ranks have parts of {name!r} alone")

    def _part(self, rank: int) -> Index:
        own = self.folder / _name(rank)
        with claims_of(self.folder / INDEX):
            told = inside(self.folder, f"{_name(rank)}/{SUM}")
            if file_size(told) is None:
                raise ClaimError(f"{told} is not there")
        if told.read_text(errors="replace") != self.content["parts"][rank]:
            raise CheckpointError(
                f"{own / SUM} was changed since it was saved, or belongs to another "
                "checkpoint: load another checkpoint"
            )
        return Index(own, read_index(own), alone=True)

    def verify(self, *_: int) -> None:
        """Compare the checksums of all files that this rank must check."""
        for part in self._parts:
            part.verify()

    def read(self, box: MetadataIndex) -> Tensor:
        return self._holder[box].read(box)

    def refuse_other_boxes(self, wanted: Tensors, formats: Mapping[str, str]) -> None:
        """Raise if this rank holds other shards now than its part has.

        `formats` says of state how it is kept otherwise, which may have cut it elsewhere.
        """
        for name, tensor in wanted.items():
            held, saved = tensor.__create_chunk_list__(), self.tensors[name].chunks
            if set(map(repr, held)) != set(map(repr, saved)):
                why = f"rank {self._here.rank} holds other parts of {name}"
                if name in formats:
                    why += f", which is {formats[name]} (state_dtypes)"
                raise self._elsewhere(why)

    def _elsewhere(self, why: str) -> CheckpointError:
        folder, content, here = self.folder, self.content, self._here
        there, now = set(content["layout"]), set(here.layout)
        saved = [f"{content['world_size']} ranks", *sorted(there - now if now else there)]
        found = [f"{here.size} ranks", *sorted(now - there if there else now)]
        return CheckpointError(
            f"{folder} has format dp_local, which loads only where it was saved, and {why}: saved "
            f"on {', '.join(saved)}; here are {', '.join(found)}. Convert it with `samestep "
            f"convert {folder} NEW --to fully_reshardable`, or load it in its own layout and save "
            'it with format="fully_reshardable"'
        )


# --- all formats ---------------------------------------------------------------------------


class Format(NamedTuple):
    """The steps of a save that differ between formats."""

    state_dict: Callable[[Tensors, Facts], Mapping[str, Any]]  # what is to be stored
    is_nested: bool  # its keys are then joined by dots
    plan: Callable[[DefaultSavePlanner, Owners, Ranks], WritePlan]
    writer: Callable[[Path, int, Facts], StorageWriter]  # of a rank's files, and of the index
    open: Callable[[Path, dict[str, Any], Here | None], StoredCheckpoint]


def _as_they_are(tensors: Tensors, _: Facts) -> Mapping[str, Any]:
    return tensors


FORMATS: dict[str, Format] = {
    "fully_reshardable": Format(_as_they_are, False, plan_together, RawWriter, Index),
    "fsdp_dtensor": Format(torch_state_dict, True, plan_together, TorchWriter, TorchFiles),
    "dp_local": Format(_as_they_are, False, plan_alone, LocalWriter, LocalFiles),
}


def own_name(name: str) -> str:
    """Canonical name of a format; raises if it is unknown."""
    found = ALIASES.get(name, name)
    if found not in FORMATS:
        known = ", ".join([*FORMATS, *ALIASES])
        raise CheckpointError(f"format must be one of {known}, got {name!r}")
    return found


def open_checkpoint(folder: Path, here: Here | None = None) -> StoredCheckpoint:
    """Open a checkpoint: the part for `here`, or all of it to inspect or convert."""
    with claims_of(folder):
        if not (folder / INDEX).is_file():
            return TorchFiles(folder, None)
        content = read_index(folder)
        if "world_size" not in content:
            raise CheckpointError(
                f"{folder} is the part of one rank: load the whole checkpoint, {folder.parent}"
            )
        written_as = content.get(WRITTEN_AS, "fully_reshardable")
        if written_as not in FORMATS:
            raise CheckpointError(
                f"{folder / INDEX} has format {written_as}, which this version of samestep does "
                "not know: load it with the version that wrote it"
            )
        return FORMATS[written_as].open(folder, content, here)
