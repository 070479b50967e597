"""Reads other packages' files without running code in them.

Files of torch.save give tensors and plain values. A few classes that packages put beside these
become empty shells: they are known by name, and neither they nor their packages are imported.
"""

import json
import zipfile
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.checkpoint.archive import Shell, read_archive
from samestep.checkpoint.claims import ClaimError, file_size, sizes_from, whole
from samestep.checkpoint.plain_pickle import PickleError
from samestep.checkpoint.storage import CheckpointError, mapped

__all__ = ["Shell", "load", "load_dict", "read_json", "safetensors"]

# Of safetensors, https://huggingface.co/docs/safetensors#format
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def load(path: Path, shells: Iterable[str] = ()) -> Any:
    """Map a file of torch.save into memory and read its contents."""
    try:
        return read_archive(mapped(path), shells)
    except PickleError as error:
        raise CheckpointError(
            f"{path} has more than tensors and plain values ({error}), and loading it "
            "could run code; nothing was loaded. If you trust the file, load it with "
            "torch.load(weights_only=False) and save only its state dicts"
        ) from None
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError) as error:
        raise CheckpointError(f"{path} is no file of torch.save: {str(error)[:200]}") from None


def load_dict(path: Path, shells: Iterable[str] = ()) -> Mapping[str, Any]:
    content = load(path, shells)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__} instead of a dict")
    return content


def safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file; views of the file."""
    try:
        data = mapped(path)
        start = 8 + int.from_bytes(data[:8], "little")
        if start > len(data):
            raise ClaimError(
                f"its header is said to have {start - 8} bytes, and the file has {len(data)}"
            )
        header = json.loads(bytes(data[8:start]))
        raw = torch.frombuffer(data, dtype=torch.uint8)[start:]
        return {
            name: _of_header(name, entry, raw)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{path} is no file of safetensors: {reason[:200]}") from None


def _of_header(name: str, entry: Any, raw: Tensor) -> Tensor:
    dtype, shape = DTYPES[entry["dtype"]], sizes_from(entry["shape"], f"the shape of {name!r}")
    begin, end = (whole(at, f"the place of {name!r}") for at in entry["data_offsets"])
    if end > len(raw) or end - begin != prod(shape) * dtype.itemsize:
        raise ClaimError(
            f"{name!r} of shape {shape} is said to be at bytes {begin} to {end} of {len(raw)}"
        )
    values = raw[begin:end]
    if values.data_ptr() % dtype.itemsize:  # files of today are aligned
        values = values.clone()
    return values.view(dtype).view(shape)


def read_json(path: Path) -> Any:
    try:
        if path.exists() and file_size(path) is None:
            raise ValueError("it is no regular file")
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no JSON: {error}") from None
