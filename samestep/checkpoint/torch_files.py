"""Format `fsdp_dtensor`: a folder of torch.distributed.checkpoint, and our index beside its files.

.metadata, __0_0.distcp, __1_0.distcp, ...   what torch writes and reads
index.json, index.json.sha256                checksums of these files, options, and what was given
"""

import io
import pathlib
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from samestep.checkpoint.folder import METADATA
from samestep.checkpoint.foreign.dialects import in_our_words
from samestep.checkpoint.logical import Tensors, name_and_key, options_from, state_key
from samestep.checkpoint.sources import Collected, model_name
from samestep.checkpoint.storage import (
    FORMAT,
    INDEX,
    CheckpointError,
    Files,
    Values,
    WritePlan,
    check_sizes,
    sizes_in,
    write_json,
)
from samestep.comm.integrity.checksum import checksum
from samestep.layout.boxes import Box

BESIDE = ("train_state.", "lr_scheduler.", "dataloader.")  # a model without prefix, in torchtitan
MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
Checksums = dict[str, int]  # by the name of a file
STATE_KEY = re.compile(r"(?:.*\.)?optim(?:izer)?\.state\.(?P<name>.+)\.(?P<key>[^.]+)")
GROUP_KEY = re.compile(r"(?:.*\.)?optim(?:izer)?\.param_groups(?:\.(?P<rest>.+))?")
# What groups of torch.optim have beside: whoever loads into them is asked for it.
OF_TORCH: dict[str, dict[str, Any]] = {
    "adamw": {
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "decoupled_weight_decay": True,
    },
    "muon": {},
}


# --- writing -------------------------------------------------------------------------------


def torch_state_dict(tensors: Tensors, facts: Mapping[str, Any]) -> dict[str, Any]:
    """{"model": ..., "optimizer": ...} as torch's `get_state_dict` gives it."""
    model: dict[str, Any] = {}
    state: dict[str, dict[str, Any]] = {}
    for whole_name, tensor in tensors.items():
        name, key = name_and_key(whole_name)
        if key is None:
            model[name] = tensor
        else:
            state.setdefault(name, {})[key] = tensor
    groups = [
        {
            **OF_TORCH.get(group["options"]["rule"], {}),
            **options_from(group["options"]),
            "params": group["params"],
            "param_names": group["params"],
        }
        for group in facts["groups"]
    ]
    whole: dict[str, Any] = {"model": model} if model else {}
    if groups:
        whole["optimizer"] = {"state": state, "param_groups": groups}
    if facts["extra"] is not None:
        whole["extra"] = facts["extra"]
    return whole


def write_with_torch(
    folder: Path, rank: int, plan: WritePlan, values: Values, objects: Mapping[str, Any]
) -> tuple[list[WriteResult], Checksums]:
    """A rank's file; torch writes it, box by box."""
    writer = _writer(folder)
    # Torch names files by the place of a plan.
    *_, mine = writer.prepare_global_plan([SavePlan([])] * rank + [SavePlan(plan.items)])
    results = writer.write_data(mine, _Boxes(values, objects)).wait()
    names = {result.storage_data.relative_path for result in results}
    return results, _checksums(folder, names)


def finish_with_torch(
    folder: Path,
    metadata: Metadata,
    everyones: list[tuple[list[WriteResult], Checksums]],
    facts: Mapping[str, Any],
) -> None:
    _writer(folder).finish(metadata, [results for results, _ in everyones])
    sums = _checksums(folder, [METADATA])
    for _, of_rank in everyones:
        sums |= of_rank
    content = {"format": FORMAT, **facts, "files": sizes_in(folder, sums), "checksums": sums}
    write_json(folder / INDEX, content)


def _writer(folder: Path) -> dcp.FileSystemWriter:
    writer = dcp.FileSystemWriter(folder, overwrite=True)
    writer.set_up_storage_writer(is_coordinator=True)
    return writer


def _checksums(folder: Path, names: Any) -> Checksums:
    files = Files(folder)
    return {name: int(checksum(files.all_of(name))) for name in names}


class _Boxes(DefaultSavePlanner):
    """Gives torch the values of one box at a time."""

    def __init__(self, values: Values, objects: Mapping[str, Any]) -> None:
        super().__init__()
        self._values, self._objects = values, objects

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type != WriteItemType.BYTE_IO:
            return self._values(write_item).detach()
        buffer = io.BytesIO()
        torch.save(self._objects[write_item.index.fqn], buffer)
        return buffer


# --- reading -------------------------------------------------------------------------------


class TorchFiles:
    """A folder of torch's; with our index if `save` has written it, and without checksums if not.

    Nothing in it is executed.
    """

    def __init__(self, folder: Path, content: Mapping[str, Any] | None, _: object = None) -> None:
        self.folder = folder
        self._sums: Checksums = {}
        if content is not None:
            check_sizes(folder, content["files"])
            self._sums = content["checksums"]
            self._compare([METADATA])  # before it is looked into
        self._metadata = read_metadata(folder / METADATA)
        self._entries = entries_in(self._metadata, partial(load_entry, folder, self._metadata))
        self._found = Collected()
        self.left_out: list[str] = []
        with_prefix = any(key.startswith("model.") for key in self._metadata.state_dict_metadata)
        state: dict[str, dict[str, str]] = {}  # by name and key, where it is
        for key in self._metadata.state_dict_metadata:
            found = STATE_KEY.fullmatch(key)
            of_model = key.startswith("model.") or not (with_prefix or key.startswith(BESIDE))
            if found and key in self._entries:
                state.setdefault(found["name"], {})[found["key"]] = key
            elif key in self._entries and of_model:
                self._add(model_name(key.removeprefix("model.")), key)
            elif GROUP_KEY.fullmatch(key) is None:
                self.left_out.append(key)
        self.content: dict[str, Any] = dict(
            content or {"world_size": 1, "layout": [], "extra": None, "groups": []}
        )
        self.by: set[str] = set()  # whose optimizer it was
        self.refusal: CheckpointError | None = None  # why its state is not that of a rule here
        if content is None:
            try:
                self._translate(state)
                self.content["groups"] = self._found.groups
            except CheckpointError as error:
                self.refusal = error
                self.left_out += [key for keys in state.values() for key in keys.values()]
        else:
            for name, keys in state.items():
                for own, key in keys.items():
                    self._add(state_key(name, own), key)
        self.tensors, self.origins = self._found.tensors, self._found.origins
        self.read = self._found.read

    def _translate(self, state: Mapping[str, Mapping[str, str]]) -> None:
        """State and options of an optimizer of others in our words."""
        groups = _groups(self.folder, self._metadata)
        known = {name for group in groups for name in group["params"]}
        without = [name for name in state if name not in known]
        if without:  # nobody has saved options: state alone tells
            groups.append({"params": without})
        for name, found, count in in_our_words(self._found, groups, state):
            self.by.add(found.by)
            for theirs, ours in found.keys.items():
                self._add(state_key(name, ours), state[name][theirs])
            self._found.add_step(name, count, state_key(name, "step"))
            self.left_out += [key for own, key in state[name].items() if own not in found.keys]

    def _add(self, name: str, key: str) -> None:
        _, shape, dtype, chunks = self._entries[key]
        # An empty stretch is left out, but an empty tensor has one.
        chunks = [(box, read) for box, read in chunks if box.numel] or chunks[:1]
        if name.endswith(".variance") and shape[1:] == (1,):  # of dion: ours is 1-D
            shape = shape[:1]
            chunks = [
                (Box(box.offsets[:1], box.sizes[:1]), partial(_flat, read)) for box, read in chunks
            ]
        self._found.add_boxes(name, shape, dtype, chunks, key)

    def verify(self, share: int = 0, shares: int = 1) -> None:
        """Raise unless every bit is right of this share of the files."""
        self._compare(list(self._sums)[share::shares])

    def _compare(self, names: list[str]) -> None:
        found = _checksums(self.folder, names)
        for name in names:
            if found[name] != self._sums[name]:
                raise CheckpointError(
                    f"{self.folder / name} is damaged: its checksum is not that of {INDEX}; take "
                    "another checkpoint"
                )


class Entry(NamedTuple):
    """A tensor of the files, and what reads each chunk of it."""

    key: str
    shape: torch.Size
    dtype: torch.dtype
    chunks: Sequence[tuple[Box, Callable[[], Tensor]]]


def entries_in(metadata: Metadata, load: Callable[[MetadataIndex], Tensor]) -> dict[str, Entry]:
    """All that are tensors."""
    found = {}
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            chunks = [
                (
                    Box(tuple(chunk.offsets), tuple(chunk.sizes)),
                    partial(load, MetadataIndex(key, chunk.offsets)),
                )
                for chunk in entry.chunks
            ]
            found[key] = Entry(key, entry.size, entry.properties.dtype, chunks)
    return found


def _flat(read: Callable[[], Tensor]) -> Tensor:
    return read().flatten()


def _groups(folder: Path, metadata: Metadata) -> list[dict[str, Any]]:
    """Options of groups, in both forms: a list of groups, or options per parameter."""
    groups: dict[Any, Any] = {}
    single: dict[str, dict[str, Any]] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if not GROUP_KEY.fullmatch(key) or not isinstance(entry, BytesStorageMetadata):
            continue
        value = load_entry(folder, metadata, MetadataIndex(key))
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


def load_entry(folder: Path, metadata: Metadata, index: MetadataIndex) -> Any:
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
        if module == "torch":
            found = getattr(torch, name, None)
            if name == "Size" or isinstance(found, torch.dtype):
                return found
        ours = (
            module
            in (
                "torch.distributed.checkpoint.metadata",
                "torch.distributed.checkpoint.filesystem",
                "torch.distributed.checkpoint.planner",  # Megatron's has the plans of ranks too
            )
            and (name.lstrip("_")[:1].isupper())
        )
        if ours or (module, name) == ("torch.serialization", "_get_layout"):
            return super().find_class(module, name)
        if module.startswith("pathlib") and name in ("PosixPath", "Path", "PurePosixPath"):
            return getattr(pathlib, name)
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if (module, name) == (MEGATRON, "MCoreMetadata"):  # the same with notes of its own
            return Metadata
        raise pickle.UnpicklingError(f"it wants {module}.{name}, which no metadata needs")


def read_metadata(path: Path) -> Metadata:
    try:
        with path.open("rb") as file:
            found: object = _OnlyMetadata(file).load()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{path} is no metadata of torch's checkpoints: {error}") from None
    if not isinstance(found, Metadata):
        raise CheckpointError(f"{path} is no metadata of torch's checkpoints")
    return found
