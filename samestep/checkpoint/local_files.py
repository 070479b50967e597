"""Format `dp_local`: every rank writes what it holds as it is, and reads that alone.

rank_0/, rank_1/, ...            of each rank a folder like one of `fully_reshardable`
index.json, index.json.sha256    the layout, the only one that loads it; sizes and checksums
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from samestep.checkpoint.logical import Tensors
from samestep.checkpoint.ranks import WritePlan
from samestep.checkpoint.storage import (
    FORMAT,
    INDEX,
    CheckpointError,
    Index,
    Read,
    Values,
    check_sizes,
    sizes_in,
    sync,
    write_boxes,
    write_index,
    write_json,
)

SUM = f"{INDEX}.sha256"


class Here(NamedTuple):
    """Who wants to load."""

    rank: int
    size: int
    layout: list[str]


# --- writing -------------------------------------------------------------------------------


def write_locally(
    folder: Path, rank: int, plan: WritePlan, values: Values, _: Mapping[str, Any]
) -> tuple[dict[str, int], str]:
    """A rank's folder; gives the sizes of its files and the checksum of its index."""
    own = folder / _name(rank)
    own.mkdir()
    places = write_boxes(own, rank, plan.items, values)
    write_index(own, plan.metadata, places, {})
    sync(own)
    names = sorted(f"{own.name}/{file.name}" for file in own.iterdir())
    return sizes_in(folder, names), (own / SUM).read_text()


def finish_locally(
    folder: Path,
    _: Metadata,
    everyones: list[tuple[dict[str, int], str]],
    facts: Mapping[str, Any],
) -> None:
    files = {name: size for sizes, _ in everyones for name, size in sizes.items()}
    parts = [text for _, text in everyones]
    write_json(folder / INDEX, {"format": FORMAT, **facts, "files": files, "parts": parts})


def _name(rank: int) -> str:
    return f"rank_{rank}"


# --- reading -------------------------------------------------------------------------------


class LocalFiles:
    """What some ranks have written, each by itself: one who loads takes its own, others all."""

    def __init__(self, folder: Path, content: dict[str, Any], ranks: Sequence[int]) -> None:
        self.folder, self.content = folder, content
        check_sizes(folder, content["files"])
        self._parts = [self._part(rank) for rank in ranks]
        self.tensors: dict[str, TensorStorageMetadata] = {}
        self._holder: dict[MetadataIndex, Index] = {}  # of what several have, the first
        for part in self._parts:
            for name, theirs in part.tensors.items():
                known = TensorStorageMetadata(theirs.properties, theirs.size, [])
                known = self.tensors.setdefault(name, known)
                known.chunks += [chunk for chunk in theirs.chunks if chunk not in known.chunks]
            for box in part.places:
                self._holder.setdefault(box, part)

    def _part(self, rank: int) -> Index:
        own = self.folder / _name(rank)
        if (own / SUM).read_text(errors="replace") != self.content["parts"][rank]:
            raise CheckpointError(
                f"{own / SUM} is not what was saved here: it was changed, or is of another "
                "checkpoint; take another checkpoint"
            )
        return Index(own)

    def verify(self, *_: int) -> None:
        """Raise unless every bit is right: nobody else reads these files."""
        for part in self._parts:
            part.verify()

    @contextmanager
    def reading(self) -> Iterator[Read]:
        with ExitStack() as opened:
            reads = {id(part): opened.enter_context(part.reading()) for part in self._parts}
            yield lambda box: reads[id(self._holder[box])](box)

    def refuse_other_boxes(self, wanted: Tensors, here: Here) -> None:
        """Raise if this rank holds anything else now: its part says nothing of the rest."""
        for name, tensor in wanted.items():
            if set(map(repr, tensor.__create_chunk_list__())) != set(
                map(repr, self.tensors[name].chunks)
            ):
                raise _elsewhere(
                    self.folder, self.content, here, f"rank {here.rank} holds other parts of {name}"
                )


def refuse_elsewhere(folder: Path, content: Mapping[str, Any], here: Here) -> None:
    """Raise unless as many ranks are here, in the layout that it was saved in."""
    if content["world_size"] != here.size:
        raise _elsewhere(folder, content, here, "the number of ranks differs")
    if content["layout"] and here.layout and content["layout"] != here.layout:
        raise _elsewhere(folder, content, here, "the layout differs")


def _elsewhere(folder: Path, content: Mapping[str, Any], here: Here, why: str) -> CheckpointError:
    there, now = set(content["layout"]), set(here.layout)
    saved = [f"{content['world_size']} ranks", *sorted(there - now if now else there)]
    found = [f"{here.size} ranks", *sorted(now - there if there else now)]
    return CheckpointError(
        f"{folder} has format dp_local, which loads only where it was saved, and {why}: saved on "
        f"{', '.join(saved)}; here are {', '.join(found)}. Convert it with `samestep convert "
        f"{folder} NEW --to fully_reshardable`, or load it in its own layout and save it with "
        'format="fully_reshardable"'
    )
