"""Format `fully_reshardable`: one file of raw values per rank, and an index in JSON, no pickle.

rank_0.bin, rank_1.bin, ...   boxes of tensors, each padded with zeros to a multiple of 64 bytes
index.json                    where each box is, its checksum, and what the user gave
index.json.sha256             of the index, for `sha256sum --check` too
"""

import ctypes
import hashlib
import json
import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from torch.distributed.checkpoint.planner import WriteItem

from samestep.comm.integrity.checksum import checksum

FORMAT = 1
INDEX = "index.json"
ALIGNMENT = 64
AT_ONCE = 1 << 25  # bytes that are copied from a device or written at a time
DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if type(d) is torch.dtype}


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message names the file and the way out."""


class FileRange(NamedTuple):
    """Where a box is stored."""

    file: str
    start: int
    size: int  # bytes
    checksum: int


class WritePlan(NamedTuple):
    """What this rank writes; on the first rank also what all of them write."""

    held: list[WriteItem]  # before anything was left to others
    items: list[WriteItem]
    metadata: Metadata


Places = dict[MetadataIndex, FileRange]
Values = Callable[[WriteItem], Tensor]


# --- writing -------------------------------------------------------------------------------


def write_boxes(
    folder: Path, rank: int, plan: WritePlan, values: Values, _: Mapping[str, Any]
) -> Places:
    """Write a rank's boxes one after the other; they are on the disk when it returns.

    Checksums are computed meanwhile, of what is in memory and not of what was written.
    """
    name = f"rank_{rank}.bin"
    places: Places = {}
    if not plan.items:
        return places
    with ThreadPoolExecutor(1) as beside, (folder / name).open("xb", buffering=0) as file:
        for item in plan.items:
            tensor = values(item).detach().contiguous()
            if tensor.device.type == "xla":  # read once; threads would write into one program
                tensor = tensor.cpu()
            own_sum = beside.submit(checksum, tensor)
            start, size = _append(file, tensor)
            places[item.index] = FileRange(name, start, size, int(own_sum.result()))
        os.fsync(file.fileno())
    return places


def _append(file: BinaryIO, tensor: Tensor) -> tuple[int, int]:
    """Write a contiguous tensor and its padding; gives where it starts and its bytes."""
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


def write_index(
    folder: Path, metadata: Metadata, everyones: Iterable[Places], facts: Mapping[str, Any]
) -> None:
    """Say where everything is that ranks have written; the last file of a checkpoint."""
    places = {index: place for of_rank in everyones for index, place in of_rank.items()}
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
    """With its checksum beside it; on the disk when it returns."""
    text = json.dumps(content, allow_nan=False).encode() + b"\n"
    for file_path, data in ((path, text), (_beside(path), _sha256_line(path, text))):
        with file_path.open("xb") as file:
            file.write(data)
        sync(file_path)


def sync(path: Path) -> None:
    """Wait until a file, or what names there are in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- reading -------------------------------------------------------------------------------


class Index:
    """What the index of a checkpoint says; every file it names is there, in its size."""

    def __init__(self, folder: Path, content: dict[str, Any], _: object = None) -> None:
        self.folder, self._files = folder, Files(folder)
        self.content = content
        self.tensors: dict[str, TensorStorageMetadata] = {}
        self.places: Places = {}
        self._sizes: dict[MetadataIndex, list[int]] = {}
        for name, entry in self.content["tensors"].items():
            for box in entry["boxes"]:
                index = MetadataIndex(name, box["offsets"])
                self.places[index] = FileRange(*(box[field] for field in FileRange._fields))
                self._sizes[index] = box["sizes"]
            boxes = [(box["offsets"], box["sizes"]) for box in entry["boxes"]]
            self.tensors[name] = in_boxes(entry["shape"], DTYPES[entry["dtype"]], boxes)
        check_sizes(folder, self.content["files"])

    def verify(self, share: int = 0, shares: int = 1) -> None:
        """Raise unless every bit is right of this share of the boxes and of their padding."""
        for index, place in list(self.places.items())[share::shares]:
            right = int(checksum(self._files.bytes_of(place))) == place.checksum
            if not right or self._files.padding_of(place).any():
                raise CheckpointError(
                    f"{self.folder / place.file} is damaged: the checksum of {index.fqn!r} at "
                    f"{tuple(index.offset or ())} is not that of the index; take another "
                    "checkpoint"
                )

    def read(self, box: MetadataIndex) -> Tensor:
        """The values of a box, in its shape; a view of the file."""
        dtype = self.tensors[box.fqn].properties.dtype
        return self._files.bytes_of(self.places[box]).view(dtype).view(self._sizes[box])


def in_boxes(
    shape: Sequence[int],
    dtype: torch.dtype,
    boxes: Iterable[tuple[Sequence[int], Sequence[int]]],
) -> TensorStorageMetadata:
    """A tensor in the words of torch.distributed.checkpoint; of each box offsets and sizes."""
    chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes in boxes]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)


def read_index(folder: Path) -> dict[str, Any]:
    """What the index of a checkpoint says, if this version can read it."""
    content = read_json(folder / INDEX)
    found = content.get("format")
    if found != FORMAT:
        raise CheckpointError(
            f"{folder / INDEX} has format {found}, and this version of samestep reads {FORMAT}:"
            " load it with the version that wrote it"
        )
    return content


def check_sizes(folder: Path, sizes: Mapping[str, int]) -> None:
    """Raise unless every file is there, in its size."""
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing: take another checkpoint")
        if path.stat().st_size != size:
            raise CheckpointError(
                f"{path} has {path.stat().st_size} bytes and should have {size}: it was cut "
                "short or changed; take another checkpoint"
            )


class Files:
    """The files of a checkpoint, mapped into memory when first asked for.

    They are unmapped once neither this nor a tensor looks at them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps: dict[str, mmap.mmap] = {}

    def bytes_of(self, place: FileRange) -> Tensor:
        """The bytes of a box; a view of the file."""
        return self._between(place.file, place.start, place.start + place.size)

    def padding_of(self, place: FileRange) -> Tensor:
        """The bytes from its end to the next multiple of the alignment."""
        end = place.start + place.size
        return self._between(place.file, end, end + -end % ALIGNMENT)

    def all_of(self, name: str) -> Tensor:
        return self._between(name, 0, (self._folder / name).stat().st_size)

    def _between(self, name: str, start: int, stop: int) -> Tensor:
        if start == stop:
            return torch.empty(0, dtype=torch.uint8)
        if name not in self._maps:
            with (self._folder / name).open("rb") as file:
                self._maps[name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return torch.frombuffer(self._maps[name], dtype=torch.uint8)[start:stop]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object whose checksum is right."""
    try:
        text, checksums = path.read_bytes(), _beside(path).read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{error.filename} cannot be read ({error.strerror}): take another checkpoint"
        ) from None
    if checksums != _sha256_line(path, text):
        raise CheckpointError(
            f"{path} is damaged: its SHA-256 is not that of {_beside(path).name}; take another "
            "checkpoint"
        )
    content: dict[str, Any] = json.loads(text)
    return content


def _sha256_line(path: Path, text: bytes) -> bytes:
    return f"{hashlib.sha256(text).hexdigest()}  {path.name}\n".encode()


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")
