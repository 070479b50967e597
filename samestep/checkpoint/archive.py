"""Reads files of torch.save without torch.load: tensors are views of the file, no code runs.

Such a file is a zip without compression: data.pkl, which says what tensors there are, and data/0,
data/1, ... with their bytes. Sizes, offsets and strides that data.pkl claims are compared with the
bytes that are there before a tensor is made.
"""

import io
import sys
import zipfile
from collections.abc import Callable, Iterable
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samestep.checkpoint.plain_pickle import (
    Maker,
    PickleError,
    Table,
    checked_key,
    read_pickle,
    whole_number,
)
from samestep.checkpoint.storage import DTYPES


class Shell:
    """Stands for an object of another class: its arguments and its state."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.fields: dict[str, Any] = {}


def fill_shell(shell: Shell, state: Any) -> None:
    if type(state) is dict:
        shell.fields.update(state)


def read_archive(data: memoryview, shells: Iterable[str] = ()) -> Any:
    """Read the saved object; classes named in `shells` become Shell objects.

    Raises:
        PickleError: It asks for more than tensors and plain values, or claims what is not there.
        zipfile.BadZipFile: It is no such file.
    """
    archive = _Archive(data)
    pairs = (full.rpartition(".") for full in shells)
    names = {(module, name): Maker(name, Shell) for module, _, name in pairs}
    table = Table({**names, **NAMES}, {dict: _ignore, Tensor: _ignore, Shell: fill_shell}, KEYS)
    return read_pickle(archive.pickle, table, archive.stored)


class _Window(io.RawIOBase):
    """A file object over a memory range, for zipfile."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        part = self._data[self._at : self._at + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        at = (0, self._at, len(self._data))[whence] + offset
        if at < 0:
            raise OSError("an offset before the start of the file")
        self._at = at
        return at

    def tell(self) -> int:
        return self._at


class _Stored(NamedTuple):
    """The bytes of a storage, and the dtype in which it was saved."""

    data: Tensor
    dtype: torch.dtype


class _StorageClass(NamedTuple):
    dtype: torch.dtype


class _Archive:
    """The entries of the zip file."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        with zipfile.ZipFile(io.BufferedReader(_Window(data))) as opened:
            self._records = {info.filename: info for info in opened.infolist()}
        found = [name for name in self._records if name.partition("/")[2] == "data.pkl"]
        if len(found) != 1:
            raise zipfile.BadZipFile(f"it has {len(found)} entries named data.pkl instead of one")
        self._root = found[0].removesuffix("data.pkl")
        self.pickle = bytes(self._record("data.pkl"))
        if f"{self._root}byteorder" in self._records:
            order = bytes(self._record("byteorder")).decode(errors="replace")
            if order != sys.byteorder:
                raise PickleError(f"its byte order is {order!r}, and {sys.byteorder} is read here")
        self._known: dict[str, Tensor] = {}

    def _record(self, name: str) -> memoryview:
        """The bytes of an entry, which torch.save stores uncompressed."""
        info = self._records.get(self._root + name)
        if info is None:
            raise PickleError(f"it refers to {name}, which is not in it")
        head = bytes(self._data[info.header_offset : info.header_offset + 30])
        stored = info.compress_type == zipfile.ZIP_STORED and info.file_size == info.compress_size
        if len(head) < 30 or head[:4] != b"PK\3\4" or not stored or info.flag_bits & 1:
            raise PickleError(f"its entry {name} is not stored as torch.save does")
        lengths = (int.from_bytes(head[at : at + 2], "little") for at in (26, 28))
        start = info.header_offset + 30 + sum(lengths)
        if start + info.file_size > len(self._data):
            raise PickleError(f"its entry {name} extends beyond the end of the file")
        return self._data[start : start + info.file_size]

    def stored(self, pid: Any) -> _Stored:
        if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage":
            raise PickleError("it refers to an external object that is no tensor storage")
        _, kind, key, _, count = pid
        if type(kind) is not _StorageClass or type(key) is not str:
            raise PickleError("it refers to an external object that is no tensor storage")
        size = whole_number(count, "the elements of a storage") * kind.dtype.itemsize
        if key not in self._known:
            record = self._record(f"data/{key}")
            self._known[key] = (
                torch.frombuffer(record, dtype=torch.uint8)
                if len(record)
                else torch.empty(0, dtype=torch.uint8)
            )
        data = self._known[key]
        if len(data) < size:
            raise PickleError(f"its entry data/{key} has {len(data)} bytes instead of {size}")
        return _Stored(data[:size], kind.dtype)


# --- what data.pkl may name ------------------------------------------------------------------


def _ignore(_: Any, __: Any) -> None:
    """Ignore attributes of a dict or tensor, such as versions of a state dict."""


def _tensor(
    storage: Any, offset: Any, size: Any, stride: Any, _: Any = None, __: Any = None, *rest: Any
) -> Tensor:
    """Rebuild a tensor as a view of its storage; `dtype` where the storage is untyped."""
    if rest and isinstance(rest[0], torch.dtype):
        dtype, rest = rest[0], rest[1:]
    else:
        dtype = storage.dtype
    if type(storage) is not _Stored or any(rest):
        raise PickleError("it has a tensor with hooks or metadata")
    sizes, strides = shape_of(size), _numbers(stride)
    if len(sizes) != len(strides):
        raise PickleError(f"it has a tensor of shape {sizes} with strides {strides}")
    data, count = storage.data, sizes.numel()
    last = whole_number(offset, "the offset of a tensor")
    last += sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
    there = len(data) // dtype.itemsize
    if not count:
        return torch.empty(sizes, dtype=dtype)
    if last >= there or count > there:
        raise PickleError(
            f"it has a tensor of shape {tuple(sizes)} at {offset} in a storage of {there} elements"
        )
    data = data[: there * dtype.itemsize]
    if data.data_ptr() % dtype.itemsize:  # a zip inside of another file
        data = data.clone()
    return data.view(dtype).as_strided(sizes, strides, offset)


def _of_type(make: Any, _: Any, arguments: Any, __: Any = None) -> Any:
    """Rebuild a tensor of a subclass as a plain tensor."""
    if type(make) is not Maker or make.make is not _tensor:
        raise PickleError("it builds a tensor by an unknown function")
    return make.make(*arguments)


def _parameter(data: Any, *_: Any) -> Tensor:
    if not isinstance(data, Tensor):
        raise PickleError("it has an nn.Parameter without a tensor")
    return data


def _of_device(data: Any, dtype: Any, *_: Any) -> Tensor:
    """Rebuild a tensor that was saved from a device without storages, such as XLA."""
    if not isinstance(data, Tensor) or type(dtype) is not torch.dtype:
        raise PickleError("it has a tensor of the meta device, which has no values")
    return data.to(dtype)


def _numbers(sizes: Any) -> list[int]:
    """Check sizes or strides: whole numbers, one per dim, at most 64."""
    if not isinstance(sizes, tuple) or len(sizes) > 64:
        raise PickleError("it has a tensor whose shape is no tuple of integers")
    return [whole_number(size, "a size") for size in sizes]


def shape_of(sizes: Any = ()) -> torch.Size:
    """Check a shape, or offsets in one."""
    numbers = _numbers(sizes)
    whole_number(prod(max(1, size) for size in numbers), "the elements of a tensor")
    return torch.Size(numbers)


def plain_dict(pairs: Any = ()) -> dict[Any, Any]:
    if type(pairs) not in (dict, list, tuple):
        raise PickleError(f"it builds a dict from a {type(pairs).__name__}")
    entries = pairs.items() if type(pairs) is dict else pairs
    return {checked_key(key, KEYS): value for key, value in entries}


def _set(items: Any = ()) -> set[Any]:
    if type(items) not in (list, tuple, set):
        raise PickleError(f"it builds a set from a {type(items).__name__}")
    return {checked_key(item, KEYS) for item in items}


def _encoded(text: Any = "", encoding: Any = "latin1") -> bytes:
    """Decode bytes as protocol 2 writes them."""
    if type(text) is bytes:
        return text
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise PickleError("it has bytes in an encoding other than latin1")
    return text.encode("latin1")


def _device(kind: Any, index: Any = None) -> str:
    if type(kind) is not str or type(index) not in (int, type(None)):
        raise PickleError("it has a device without a name")
    return kind if index is None else f"{kind}:{index}"


def _complex(real: Any, imaginary: Any) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        raise PickleError("it builds a complex number from other things than numbers")
    return complex(real, imaginary)


LAYOUTS = {str(own): own for own in vars(torch).values() if isinstance(own, torch.layout)}


def layout_of(name: Any) -> torch.layout:
    return LAYOUTS[name]


KEYS = frozenset({torch.dtype, torch.Size})
TENSORS = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3")
STORAGES = {
    "Double": torch.float64, "Float": torch.float32, "Half": torch.float16,
    "BFloat16": torch.bfloat16, "Long": torch.int64, "Int": torch.int32, "Short": torch.int16,
    "Char": torch.int8, "Byte": torch.uint8, "Bool": torch.bool,
    "ComplexDouble": torch.complex128, "ComplexFloat": torch.complex64,
}  # fmt: skip
MAKERS: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): plain_dict,
    ("collections", "Counter"): plain_dict,
    ("torch", "Size"): shape_of,
    ("torch", "device"): _device,
    ("torch.serialization", "_get_layout"): layout_of,
    ("torch._tensor", "_rebuild_from_type_v2"): _of_type,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"): _of_device,
    ("_codecs", "encode"): _encoded,
    **{("torch._utils", name): _tensor for name in TENSORS},
    **{
        (builtins, name): make
        for builtins in ("builtins", "__builtin__")
        for name, make in (("set", _set), ("bytearray", _encoded), ("complex", _complex))
    },
}
DTYPE_NAMES = {("torch", name): dtype for name, dtype in DTYPES.items()}
NAMES: dict[tuple[str, str], Any] = {
    ("torch", "Tensor"): "torch.Tensor",
    ("torch.nn.parameter", "Parameter"): "torch.nn.Parameter",
    ("torch", "UntypedStorage"): _StorageClass(torch.uint8),
    ("torch.storage", "UntypedStorage"): _StorageClass(torch.uint8),
    **{("torch", f"{name}Storage"): _StorageClass(dtype) for name, dtype in STORAGES.items()},
    **DTYPE_NAMES,
    **{pair: Maker(".".join(pair), make) for pair, make in MAKERS.items()},
}
