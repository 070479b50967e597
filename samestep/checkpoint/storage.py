"""Files of a checkpoint: one of raw values per rank, and an index in JSON. Nothing is pickled.

    rank_0.bin, rank_1.bin, ...   boxes of tensors, one after the other, each from a multiple of 64
    index.json                    where each box is, its checksum, and what the user gave
    index.json.sha256             of the index, for `sha256sum --check` too

A torch.distributed.checkpoint storage, so that planning, deduplication and resharding are torch's.
"""

import ctypes
import hashlib
import json
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from samestep.checkpoint.errors import CheckpointError
from samestep.comm.checksum import checksum

FORMAT = 1
INDEX = "index.json"
ALIGNMENT = 64
DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if type(d) is torch.dtype}


class Place(NamedTuple):
    """Where a box is stored."""

    file: str
    start: int
    size: int  # bytes
    checksum: int


class Writer(StorageWriter):
    """Writes into a folder that exists, for this rank; the first rank adds the index."""

    def __init__(self, folder: Path, rank: int, facts: Mapping[str, Any]) -> None:
        self.folder, self._rank, self._facts = folder, rank, facts

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The folder is there already."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's boxes, then read them back."""
        results: list[WriteResult] = []
        if plan.items:
            name = f"rank_{self._rank}.bin"
            with (self.folder / name).open("xb", buffering=0) as file:
                for item in plan.items:
                    tensor = planner.resolve_data(item)
                    assert isinstance(tensor, Tensor)  # there are no others
                    place = _write(file, name, tensor.detach().cpu().contiguous())
                    results.append(WriteResult(item.index, place.size, place))
                os.fsync(file.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index, on the first rank."""
        places = {result.index: result.storage_data for of_rank in results for result in of_rank}
        tensors = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            tensors[name] = {
                "dtype": str(entry.properties.dtype).removeprefix("torch."),
                "shape": list(entry.size),
                "boxes": [
                    {
                        "offsets": list(chunk.offsets),
                        "sizes": list(chunk.sizes),
                        **places[MetadataIndex(name, chunk.offsets)]._asdict(),
                    }
                    for chunk in entry.chunks
                ],
            }
        files = sorted({place.file for place in places.values()})
        sizes = {file: (self.folder / file).stat().st_size for file in files}
        content = {"format": FORMAT, **self._facts, "files": sizes, "tensors": tensors}
        write_json(self.folder / INDEX, content)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """It is not asked."""
        return True


class Index:
    """What the index of a checkpoint says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.content = read_json(folder / INDEX)
        found = self.content.get("format")
        if found != FORMAT:
            raise CheckpointError(
                f"{folder / INDEX} has format {found}, and this version of samestep reads {FORMAT}:"
                " load it with the version that wrote it"
            )
        self.tensors = {
            name: _storage_metadata(entry) for name, entry in self.content["tensors"].items()
        }
        self.places = dict(self._places())

    def _places(self) -> Iterator[tuple[MetadataIndex, Place]]:
        for name, entry in self.content["tensors"].items():
            for box in entry["boxes"]:
                place = Place(*(box[field] for field in Place._fields))
                yield MetadataIndex(name, box["offsets"]), place

    def metadata(self) -> Metadata:
        """As torch.distributed.checkpoint wants it."""
        return Metadata(dict(self.tensors), storage_data=self.places)

    def verify(self, share: int = 0, shares: int = 1) -> None:
        """Raise unless every file is whole and, of this share of the boxes, every bit is right."""
        for name, size in self.content["files"].items():
            path = self.folder / name
            if not path.is_file():
                raise CheckpointError(f"{path} is missing: take another checkpoint")
            if path.stat().st_size != size:
                raise CheckpointError(
                    f"{path} has {path.stat().st_size} bytes and should have {size}: it was cut "
                    "short or changed; take another checkpoint"
                )
        mine = list(self.places.items())[share::shares]
        with Files(self.folder, {place.file for _, place in mine}) as files:
            for index, place in mine:
                stored = files.bytes_of(place)
                if int(checksum(stored)) != place.checksum:
                    raise CheckpointError(
                        f"{self.folder / place.file} is damaged: the checksum of {index.fqn!r} at "
                        f"{tuple(index.offset or ())} is not that of the index; take another "
                        "checkpoint"
                    )


class Reader(StorageReader):
    """Reads boxes of boxes out of the files, without loading what is not needed."""

    def __init__(self, index: Index) -> None:
        self._index = index

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index."""
        return self._index.metadata()

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """There is nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy every wanted box to its place."""
        index = self._index
        wanted = {index.places[item.storage_index].file for item in plan.items}
        with Files(index.folder, wanted) as files:
            for item in plan.items:
                place = index.places[item.storage_index]
                entry = index.tensors[item.storage_index.fqn]
                sizes = _sizes(entry, item.storage_index)
                stored = files.bytes_of(place).view(entry.properties.dtype).view(sizes)
                for dim, (start, length) in enumerate(
                    zip(item.storage_offsets, item.lengths, strict=True)
                ):
                    stored = stored.narrow(dim, start, length)
                target = planner.resolve_tensor(item).detach()
                target.copy_(stored)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """It is not asked."""
        return True


class Files:
    """Some files of a checkpoint, mapped into memory while the block runs."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self._maps = {}
        for name in names:
            with (folder / name).open("rb") as file:
                self._maps[name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def __enter__(self) -> "Files":
        return self

    def __exit__(self, *_: object) -> None:
        self._maps.clear()  # unmapped once no tensor looks at them

    def bytes_of(self, place: Place) -> Tensor:
        """The bytes of a box; a view of the file."""
        if place.size == 0:
            return torch.empty(0, dtype=torch.uint8)
        whole = torch.frombuffer(self._maps[place.file], dtype=torch.uint8)
        return whole[place.start : place.start + place.size]


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """With its checksum beside it; on the disk when it returns."""
    text = json.dumps(content, allow_nan=False).encode() + b"\n"
    checksums = f"{hashlib.sha256(text).hexdigest()}  {path.name}\n".encode()
    for file_path, data in ((path, text), (_beside(path), checksums)):
        with file_path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object whose checksum is right."""
    try:
        text, checksums = path.read_bytes(), _beside(path).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}") from None
    if checksums.split()[:1] != [hashlib.sha256(text).hexdigest().encode()]:
        raise CheckpointError(
            f"{path} is damaged: its SHA-256 is not that of {_beside(path).name}; take another "
            "checkpoint"
        )
    content: dict[str, Any] = json.loads(text)
    return content


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _write(file: BinaryIO, name: str, tensor: Tensor) -> Place:
    """Append a contiguous tensor on the CPU."""
    start = file.tell()
    padding = -start % ALIGNMENT
    if padding:
        file.write(bytes(padding))
    size = tensor.numel() * tensor.element_size()
    if size:
        # Without numpy, which is not needed elsewhere, and without a copy.
        view = memoryview((ctypes.c_char * size).from_address(tensor.data_ptr()))
        done = 0
        while done < size:
            done += file.write(view[done:])
    return Place(name, start + padding, size, int(checksum(tensor)))


def _storage_metadata(entry: Mapping[str, Any]) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(box["offsets"]), torch.Size(box["sizes"]))
        for box in entry["boxes"]
    ]
    properties = TensorProperties(dtype=DTYPES[entry["dtype"]])
    return TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)


def _sizes(entry: TensorStorageMetadata, index: MetadataIndex) -> torch.Size:
    chunks = entry.chunks
    if index.index is not None and chunks[index.index].offsets == index.offset:
        return chunks[index.index].sizes
    return next(chunk.sizes for chunk in chunks if chunk.offsets == index.offset)
