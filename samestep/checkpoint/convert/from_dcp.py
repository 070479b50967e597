"""Folders that torch.distributed.checkpoint has written. Nothing in them is executed."""

import io
import pathlib
import pickle
import re
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from samestep.checkpoint.convert.source import Source, boxes_of, model_name
from samestep.checkpoint.errors import CheckpointError
from samestep.checkpoint.logical import state_key

METADATA = ".metadata"
STATE_KEY = re.compile(r"(?:.*\.)?optim(?:izer)?\.state\.(?P<name>.+)\.(?P<key>[^.]+)")
GROUP_KEY = re.compile(r"(?:.*\.)?optim(?:izer)?\.param_groups(?:\.(?P<rest>.+))?")


def read_dcp(folder: Path, *, with_groups: bool = True) -> Source:
    """What a folder has, box by box as it was saved."""
    metadata = _metadata(folder / METADATA)
    keys: dict[str, str] = {}  # ours: theirs
    with_prefix = any(key.startswith("model.") for key in metadata.state_dict_metadata)

    def read(box: MetadataIndex) -> Tensor:
        found = _load(folder, metadata, MetadataIndex(keys[box.fqn], box.offset))
        assert isinstance(found, Tensor)
        return found

    source = Source(read)
    for key, entry in metadata.state_dict_metadata.items():
        state = STATE_KEY.fullmatch(key)
        if isinstance(entry, TensorStorageMetadata) and state is not None:
            name = state_key(state["name"], state["key"])
        elif isinstance(entry, TensorStorageMetadata) and (
            key.startswith("model.") or not with_prefix
        ):
            name = model_name(key.removeprefix("model."))
        else:
            if GROUP_KEY.fullmatch(key) is None:
                source.left_out.append(key)
            continue
        keys[name] = key
        source.add(name, entry.size, entry.properties.dtype, boxes_of(entry.chunks))
    if with_groups:
        source.add_groups(_groups(folder, metadata))
    return source


def _groups(folder: Path, metadata: Metadata) -> list[dict[str, Any]]:
    """Options of groups, in both forms: a list of groups, or options per parameter."""
    groups: dict[Any, Any] = {}
    single: dict[str, dict[str, Any]] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if not GROUP_KEY.fullmatch(key) or not isinstance(entry, BytesStorageMetadata):
            continue
        value = _load(folder, metadata, MetadataIndex(key))
        path = list((metadata.planner_data or {}).get(key, ()))
        if path[-1:] == ["param_groups"]:
            groups.update(enumerate(value))
        elif "param_groups" in path:
            *places, last = path[path.index("param_groups") + 1 :]
            inside = groups
            for place in places:
                inside = inside.setdefault(place, {})
            inside[last] = value
        else:
            name, _, option = str(path[-1]).removeprefix("param_groups.").rpartition(".")
            single.setdefault(name, {})[option] = value
    per_parameter = [{**options, "params": [name]} for name, options in single.items()]
    return [*_with_lists(list(groups.values())), *per_parameter]


def _with_lists(value: Any) -> Any:
    """Dicts of places as the lists that they were."""
    if isinstance(value, dict):
        entries = {key: _with_lists(entry) for key, entry in value.items()}
        numbered = bool(entries) and all(isinstance(key, int) for key in entries)
        return [entries[place] for place in sorted(entries)] if numbered else entries
    return list(map(_with_lists, value)) if isinstance(value, list) else value


def _load(folder: Path, metadata: Metadata, index: MetadataIndex) -> Any:
    """One entry; torch.load with weights_only."""
    info = metadata.storage_data[index]
    path = folder / info.relative_path
    try:
        with path.open("rb") as file:
            file.seek(info.offset)
            data = io.BytesIO(file.read(info.length))
        return torch.load(data, map_location="cpu", weights_only=True)
    except Exception as error:  # what is damaged can raise anything
        reason = str(error).split("\n")[0]
        raise CheckpointError(f"{path}: {index.fqn!r} cannot be read: {reason}") from None


class _OnlyMetadata(pickle.Unpickler):
    """Makes what the metadata of a checkpoint consists of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse everything that is not named here."""
        if module == "torch":
            found = getattr(torch, name, None)
            if name == "Size" or isinstance(found, torch.dtype):
                return found
        ours = module in (
            "torch.distributed.checkpoint.metadata",
            "torch.distributed.checkpoint.filesystem",
        ) and (name.lstrip("_")[:1].isupper())
        if ours or (module, name) == ("torch.serialization", "_get_layout"):
            return super().find_class(module, name)
        if module.startswith("pathlib") and name in ("PosixPath", "Path", "PurePosixPath"):
            return getattr(pathlib, name)
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        raise pickle.UnpicklingError(f"it wants {module}.{name}, which no metadata needs")


def _metadata(path: Path) -> Metadata:
    try:
        with path.open("rb") as file:
            found = _unpickled(file)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{path} is no metadata of torch's checkpoints: {error}") from None
    if not isinstance(found, Metadata):
        raise CheckpointError(f"{path} is no metadata of torch's checkpoints")
    return found


def _unpickled(file: BinaryIO) -> Any:
    return _OnlyMetadata(file).load()
