"""Files of others, read without running what is in them.

`torch.load` makes tensors and plain values. A few classes that packages put beside these are made
as empty shells: they are known by name, and neither they nor their packages are imported.
"""

import json
import mmap
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import safe_globals

from samestep.checkpoint.storage import CheckpointError

# Of safetensors, https://huggingface.co/docs/safetensors#format
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class Shell:
    """Stands for an object of a package: what it was made with, and what it had."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments


def load(path: Path, shells: Iterable[str] = ()) -> Any:
    """What a file of torch.save has; mapped, not read. `shells` are full names of classes."""
    allowed: list[Any] = [(type("Shell", (Shell,), {}), name) for name in shells]
    try:
        with safe_globals(allowed):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        reason = str(error).split("\n")[0]
        raise CheckpointError(
            f"{path} cannot be loaded without running what is in it ({reason}): load it yourself "
            "if you trust it, and save its state dicts alone"
        ) from None
    except (OSError, RuntimeError, ValueError, EOFError) as error:
        raise CheckpointError(f"{path} is no file of torch.save: {str(error)[:200]}") from None


def load_dict(path: Path, shells: Iterable[str] = ()) -> Mapping[str, Any]:
    content = load(path, shells)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} has a {type(content).__name__}, and a dict is needed")
    return content


def safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file; views of the file."""
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        header.pop("__metadata__", None)
        found = {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            dtype, raw = DTYPES[entry["dtype"]], torch.frombuffer(data, dtype=torch.uint8)
            raw = raw[start + begin : start + end]
            if (start + begin) % dtype.itemsize:  # files of today are aligned
                raw = raw.clone()
            found[name] = raw.view(dtype).view(entry["shape"])
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{path} is no file of safetensors: {reason[:200]}") from None
    return found


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is no JSON: {error}") from None
