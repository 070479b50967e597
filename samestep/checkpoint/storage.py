"""Format `fully_reshardable`: one file of raw values per rank and a JSON index, without pickle.

rank_0.bin, rank_1.bin, ...   boxes of tensors, each padded with zeros to a multiple of 64 bytes
index.json                    where each box is, its checksum, and what the user gave
index.json.sha256             of the index, for `sha256sum --check` too

Formats are written and read through the doors of torch.distributed.checkpoint: a `StorageWriter`
and a `StorageReader` each, which its planners fill and ask. `samestep.save` and `load` go through
them, and so may anybody's `dcp.save` and `dcp.load` (`doors`).
"""

import abc
import ctypes
import hashlib
import json
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

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
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from samestep.checkpoint.claims import (
    ClaimError,
    check_box,
    check_facts,
    entry_of,
    file_size,
    inside,
    sizes_from,
    uncovered,
    whole,
)
from samestep.comm.integrity.checksum import checksum
from samestep.layout.boxes import Box

FORMAT = 1
INDEX = "index.json"
ALIGNMENT = 64
AT_ONCE = 1 << 25  # bytes that are copied from a device or written at a time
T = TypeVar("T")
DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if type(d) is torch.dtype}


class CheckpointError(RuntimeError):
    """Raised when a checkpoint cannot be written or read; names the file and the remedy."""


class FileRange(NamedTuple):
    """The file and bytes of a box."""

    file: str
    start: int
    size: int  # bytes
    checksum: int


class BoxWriter(StorageWriter, abc.ABC):
    """Writes one rank's boxes into a folder, and on rank 0 the index.

    Plans are not changed on their way: they are complete before a writer is made.

    Args:
        folder: There already, on a disk that all ranks share.
        rank: Whose boxes are written.
        facts: Of the index, beside tensors; for `finish`.
    """

    def __init__(self, folder: Path, rank: int, facts: Mapping[str, Any]) -> None:
        self.folder, self.rank, self.facts = folder, rank, facts

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: no state is kept between checkpoints."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the folder exists already."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether the id is a path."""
        return isinstance(checkpoint_id, str | os.PathLike)


class StoredCheckpoint(StorageReader, abc.ABC):
    """An opened checkpoint: all files exist with the right sizes, and the index is valid."""

    folder: Path
    content: dict[str, Any]
    tensors: dict[str, TensorStorageMetadata]

    @abc.abstractmethod
    def verify(self, share: int = 0, shares: int = 1) -> None:
        """Compare the checksums of this rank's share of the files."""

    @abc.abstractmethod
    def read(self, box: MetadataIndex) -> Tensor:
        """Read the values of a box."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Check that dcp reads the checkpoint that was opened."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(dict(self.tensors))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: the checkpoint is open already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy stored values into the boxes of the plan."""
        for item in plan.items:
            target = planner.resolve_tensor(item)
            target.detach().copy_(self.read_item(item))
            planner.commit_tensor(item, target)
        return done(None)

    def read_item(self, item: ReadItem) -> Tensor:
        """Read the overlap of a stored box and a requested box."""
        values = self.read(item.storage_index)
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            values = values.narrow(dim, start, length)
        return values

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether the id is a path."""
        return isinstance(checkpoint_id, str | os.PathLike)


def done(value: T) -> Future[T]:
    """A completed future."""
    future: Future[T] = Future()
    future.set_result(value)
    return future


class WritePlan(NamedTuple):
    """The files that this rank writes; on rank 0 also those of all ranks."""

    held: list[WriteItem]  # before anything was left to others
    items: list[WriteItem]
    metadata: Metadata


Places = dict[MetadataIndex, FileRange]
Values = Callable[[WriteItem], Any]  # a tensor, or bytes of what is none


# --- writing -------------------------------------------------------------------------------


class RawWriter(BoxWriter):
    """Writes the format `fully_reshardable`."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        places = write_boxes(self.folder, self.rank, plan.items, planner.resolve_data)
        return done([WriteResult(index, place.size, place) for index, place in places.items()])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index, the last file of a checkpoint."""
        places = {found.index: found.storage_data for of_rank in results for found in of_rank}
        write_index(self.folder, metadata, places, self.facts)


def write_boxes(folder: Path, rank: int, items: Sequence[WriteItem], values: Values) -> Places:
    """Write a rank's boxes, and wait until they are on disk.

    Checksums are computed meanwhile, of what is in memory and not of what was written.
    """
    name = f"rank_{rank}.bin"
    places: Places = {}
    if not items:
        return places
    with ThreadPoolExecutor(1) as beside, (folder / name).open("xb", buffering=0) as file:
        for item in items:
            tensor = values(item).detach().contiguous()
            if tensor.device.type == "xla":  # read once; threads would write into one program
                tensor = tensor.cpu()
            own_sum = beside.submit(checksum, tensor)
            start, size = _append(file, tensor)
            places[item.index] = FileRange(name, start, size, int(own_sum.result()))
        os.fsync(file.fileno())
    return places


def _append(file: BinaryIO, tensor: Tensor) -> tuple[int, int]:
    """Write a contiguous tensor with padding; returns its offset and size in bytes."""
    start = file.tell()
    for part in torch.split(tensor.view(-1), AT_ONCE // tensor.element_size()):
        host = part.cpu()
        size = host.numel() * host.element_size()
        # Without numpy, which is not needed elsewhere, and without a copy.
        view = memoryview((ctypes.c_char * size).from_address(host.data_ptr()))
        _write_all(file, view)
    size = tensor.numel() * tensor.element_size()
    _write_all(file, memoryview(bytes(-size % ALIGNMENT)))
    return start, size


def _write_all(file: BinaryIO, view: memoryview) -> None:
    done = 0
    while done < len(view):
        done += file.write(view[done:])


def write_index(folder: Path, metadata: Metadata, places: Places, facts: Mapping[str, Any]) -> None:
    """Write the index: where each box of each rank is stored."""
    tensors = {}
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        boxes = [
            {
                "offsets": list(chunk.offsets),
                "sizes": list(chunk.sizes),
                **places[MetadataIndex(name, chunk.offsets)]._asdict(),
            }
            for chunk in entry.chunks
        ]
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "shape": list(entry.size), "boxes": boxes}
    sizes = sizes_in(folder, sorted({place.file for place in places.values()}))
    write_json(folder / INDEX, {"format": FORMAT, **facts, "files": sizes, "tensors": tensors})


def sizes_in(folder: Path, files: Iterable[str]) -> dict[str, int]:
    return {file: (folder / file).stat().st_size for file in files}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file and its checksum, and wait until both are on disk."""
    text = json.dumps(content, allow_nan=False).encode() + b"\n"
    for file_path, data in ((path, text), (_beside(path), _sha256_line(path, text))):
        with file_path.open("xb") as file:
            file.write(data)
        sync(file_path)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- reading -------------------------------------------------------------------------------


class Index(StoredCheckpoint):
    """The index of a checkpoint whose files exist with the right sizes.

    So is every box, and boxes are all of each tensor. Those of one rank need not be (`alone`).
    """

    def __init__(
        self, folder: Path, content: dict[str, Any], _: object = None, *, alone: bool = False
    ) -> None:
        self.folder, self._files = folder, Files(folder)
        self.content = content
        self.tensors: dict[str, TensorStorageMetadata] = {}
        self.places: Places = {}
        self._sizes: dict[MetadataIndex, tuple[int, ...]] = {}
        left = dict(content["files"])  # bytes of each file that no box has yet
        with claims_of(folder / INDEX):
            for name, entry in entry_of(content, "tensors", dict).items():
                boxes = self._add(name, entry, left)
                problem = "" if alone else uncovered(self.tensors[name].size, boxes)
                if problem:
                    raise ClaimError(f"its boxes of {name!r} have {problem}")
        check_sizes(folder, content["files"])

    def _add(self, name: str, entry: Any, left: dict[str, int]) -> list[Box]:
        if not name.isprintable():
            raise ClaimError(f"a tensor has the name {name[:80]!r}")
        dtype = DTYPES.get(entry_of(entry, "dtype", str, name))
        if dtype is None:
            raise ClaimError(f"{name!r} has the dtype {entry['dtype'][:40]!r}")
        shape = sizes_from(entry_of(entry, "shape", list, name), f"the shape of {name!r}")
        boxes: list[Box] = []
        for told in entry_of(entry, "boxes", list, name):
            if type(told) is not dict:
                raise ClaimError(f"{name!r} has {told!r:.40} for a box")
            box = Box(
                sizes_from(told.get("offsets"), f"the offsets of a box of {name!r}"),
                sizes_from(told.get("sizes"), f"the sizes of a box of {name!r}"),
            )
            check_box(name, shape, box)
            place = FileRange(
                entry_of(told, "file", str, f"a box of {name!r}"),
                whole(told.get("start"), f"the start of a box of {name!r}"),
                whole(told.get("size"), f"the size of a box of {name!r}"),
                entry_of(told, "checksum", int, f"a box of {name!r}"),
            )
            if place.size != box.numel * dtype.itemsize or place.start % ALIGNMENT:
                raise ClaimError(
                    f"a box of {name!r} of {box.sizes} in {entry['dtype']} is said to "
                    f"have {place.size} bytes from {place.start} on"
                )
            if place.start + place.size > self.content["files"].get(place.file, -1):
                raise ClaimError(f"a box of {name!r} ends behind {place.file!r}, or has no file")
            left[place.file] -= place.size
            if left[place.file] < 0:
                raise ClaimError(f"its boxes have more bytes than {place.file!r}")
            index = MetadataIndex(name, box.offsets)
            self.places[index], self._sizes[index] = place, box.sizes
            boxes.append(box)
        self.tensors[name] = in_boxes(shape, dtype, boxes)
        return boxes

    def verify(self, share: int = 0, shares: int = 1) -> None:
        """Compare the checksums of this rank's share of boxes, and check their padding."""
        for index, place in list(self.places.items())[share::shares]:
            right = int(checksum(self._files.bytes_of(place))) == place.checksum
            if not right or self._files.padding_of(place).any():
                raise CheckpointError(
                    f"{self.folder / place.file} is damaged: the checksum of "
                    f"{index.fqn!r} at {tuple(index.offset or ())} is not that of the "
                    "index; load another checkpoint"
                )

    def read(self, box: MetadataIndex) -> Tensor:
        """The values of a box in its shape, as a view of the file."""
        dtype = self.tensors[box.fqn].properties.dtype
        return self._files.bytes_of(self.places[box]).view(dtype).view(self._sizes[box])


def in_boxes(
    shape: Sequence[int],
    dtype: torch.dtype,
    boxes: Iterable[tuple[Sequence[int], Sequence[int]]],
) -> TensorStorageMetadata:
    """Storage metadata of torch.distributed.checkpoint for a tensor in boxes."""
    chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes in boxes]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)


def read_index(folder: Path) -> dict[str, Any]:
    """Read the index of a checkpoint, if this version supports its format."""
    with claims_of(folder / INDEX):
        content = read_json(inside(folder, INDEX))
        found = content.get("format")
        if found != FORMAT:
            raise CheckpointError(
                f"{folder / INDEX} has format {found}, and this version of samestep reads {FORMAT}:"
                " load it with the version that wrote it"
            )
        check_facts(content, DTYPES)
    return content


@contextmanager
def claims_of(path: Path) -> Iterator[None]:
    """Context that adds the file and the remedy to a ClaimError."""
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or path} cannot be read ({error.strerror or error}): load "
            "another checkpoint"
        ) from None
    except ClaimError as error:
        raise CheckpointError(_not_as_claimed(path, str(error))) from None
    except Exception as error:  # what is missing, or of another type, can end anywhere
        raise CheckpointError(
            _not_as_claimed(path, f"{type(error).__name__}: {str(error)[:200]}")
        ) from error


def _not_as_claimed(path: Path, why: str) -> str:
    return f"{path} has invalid contents: {why}; nothing was loaded. Load another checkpoint"


def check_sizes(folder: Path, sizes: Mapping[str, int]) -> None:
    """Raise unless every file exists with its size."""
    for name, size in sizes.items():
        with claims_of(folder / INDEX):
            path = inside(folder, name)
        found = file_size(path)
        if found is None:
            raise CheckpointError(f"{path} is missing: load another checkpoint")
        if found != size:
            raise CheckpointError(
                f"{path} has {found} bytes instead of {size}: it was truncated or "
                "changed; load another checkpoint"
            )


def mapped(path: Path) -> memoryview:
    """Map a regular file into memory."""
    if file_size(path) is None and path.exists():
        raise OSError(f"{path} is no regular file")
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))


class Files:
    """The files of a checkpoint, mapped into memory on demand.

    They are unmapped once neither this nor a tensor looks at them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps: dict[str, memoryview] = {}

    def bytes_of(self, place: FileRange) -> Tensor:
        """The bytes of a box, as a view of the file."""
        return self._between(place.file, place.start, place.start + place.size)

    def padding_of(self, place: FileRange) -> Tensor:
        """The padding bytes after a box."""
        end = place.start + place.size
        return self._between(place.file, end, end + -end % ALIGNMENT)

    def all_of(self, name: str) -> Tensor:
        return self._between(name, 0, (self._folder / name).stat().st_size)

    def part_of(self, name: str, start: int, size: int) -> memoryview:
        """A range of bytes of a file."""
        if name not in self._maps:
            self._maps[name] = mapped(self._folder / name)
        return self._maps[name][start : start + size]

    def _between(self, name: str, start: int, stop: int) -> Tensor:
        if start == stop:
            return torch.empty(0, dtype=torch.uint8)
        self.part_of(name, 0, 0)
        return torch.frombuffer(self._maps[name], dtype=torch.uint8)[start:stop]


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object whose checksum is correct."""
    with claims_of(path):
        text, checksums = (_read_all(file) for file in (path, _beside(path)))
        if checksums != _sha256_line(path, text):
            raise CheckpointError(
                f"{path} is damaged: its SHA-256 is not that of {_beside(path).name}; "
                "load another checkpoint"
            )
        try:
            content: object = json.loads(text, parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            raise ClaimError(f"it is no valid JSON ({str(error)[:100]})") from None
        if not isinstance(content, dict):
            raise ClaimError("it is no JSON object")
        return content


def _read_all(path: Path) -> bytes:
    """Read a regular file that is reached without links."""
    if path.exists() and file_size(inside(path.parent, path.name)) is None:
        raise ClaimError(f"{path} is no regular file")
    return path.read_bytes()


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number there")


def _sha256_line(path: Path, text: bytes) -> bytes:
    return f"{hashlib.sha256(text).hexdigest()}  {path.name}\n".encode()


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")
