"""Format `fsdp_dtensor`: files of torch.distributed.checkpoint with samestep's index beside them.

.metadata, __0_0.distcp, __1_0.distcp, ...   what torch writes and reads
index.json, index.json.sha256                checksums of these files, options, and what was given
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from samestep.checkpoint.archive import DTYPE_NAMES, layout_of, plain_dict, read_archive, shape_of
from samestep.checkpoint.claims import (
    ClaimError,
    check_box,
    entry_of,
    file_size,
    inside,
    uncovered,
)
from samestep.checkpoint.folder import METADATA
from samestep.checkpoint.foreign.dialects import in_our_words
from samestep.checkpoint.logical import Tensors, name_and_key, options_from, state_key
from samestep.checkpoint.plain_pickle import Maker, PickleError, Table, read_pickle, whole_number
from samestep.checkpoint.sources import Collected, model_name
from samestep.checkpoint.storage import (
    FORMAT,
    INDEX,
    CheckpointError,
    Files,
    StoredCheckpoint,
    check_sizes,
    claims_of,
    done,
    sizes_in,
    write_json,
)
from samestep.comm.integrity.checksum import checksum
from samestep.groups.group_keys import with_keys_of_torchs_muon
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
}


# --- writing -------------------------------------------------------------------------------


def torch_state_dict(tensors: Tensors, facts: Mapping[str, Any]) -> dict[str, Any]:
    """{"model": ..., "optimizer": ...} in the form of torch's `get_state_dict`."""
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
            **with_keys_of_torchs_muon(options_from(group["options"])),
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


class TorchWriter(dcp.FileSystemWriter):
    """torch's file writer, which also writes checksums and samestep's index."""

    def __init__(self, folder: Path, rank: int, facts: Mapping[str, Any]) -> None:
        super().__init__(folder, overwrite=True)
        self.set_up_storage_writer(is_coordinator=True)
        self._rank, self._facts = rank, facts

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        # torch names files by the place of a plan.
        *_, mine = self.prepare_global_plan([SavePlan([])] * self._rank + [plan])
        results = super().write_data(mine, planner).wait()
        sums = _checksums(Path(self.path), {each.storage_data.relative_path for each in results})
        return done([*results, *(WriteResult(MetadataIndex(n), 0, s) for n, s in sums.items())])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write torch's metadata, then samestep's index."""
        folder, sums = Path(self.path), Checksums()
        files: list[list[WriteResult]] = [[] for _ in results]
        for own, of_rank in zip(files, results, strict=True):
            for each in of_rank:
                if isinstance(each.storage_data, int):
                    sums[each.index.fqn] = each.storage_data
                else:
                    own.append(each)
        super().finish(metadata, files)
        sums = _checksums(folder, [METADATA]) | sums
        facts = {"format": FORMAT, **self._facts, "files": sizes_in(folder, sums)}
        write_json(folder / INDEX, {**facts, "checksums": sums})


def _checksums(folder: Path, names: Any) -> Checksums:
    files = Files(folder)
    return {name: int(checksum(files.all_of(name))) for name in names}


# --- reading -------------------------------------------------------------------------------


class TorchFiles(StoredCheckpoint):
    """Reads a folder of torch.distributed.checkpoint; checksums only if samestep wrote it.

    Nothing in it is executed. Its tensors are whole, and what is announced of them is compared
    with the files before anything is read.
    """

    def __init__(self, folder: Path, content: Mapping[str, Any] | None, _: object = None) -> None:
        self.folder = folder
        self._sums: Checksums = {}
        if content is not None:
            with claims_of(folder / INDEX):
                self._sums = entry_of(content, "checksums", dict)
                if METADATA not in self._sums or self._sums.keys() != content["files"].keys():
                    raise ClaimError("it has not one checksum for every file")
                for name in self._sums:
                    entry_of(self._sums, name, int, "its checksums")
            check_sizes(folder, content["files"])
            self._compare([METADATA])  # before it is looked into
        self._metadata = read_metadata(folder)
        self._entries = entries_in(self._metadata, partial(load_entry, folder, self._metadata))
        with claims_of(folder / METADATA):
            for entry in self._entries.values():
                problem = uncovered(entry.shape, [box for box, _ in entry.chunks])
                if problem:
                    raise ClaimError(f"its chunks of {entry.key!r} have {problem}")
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

    def read(self, box: MetadataIndex) -> Tensor:
        """Read the values of a box."""
        return self._found.read(box)

    def _translate(self, state: Mapping[str, Mapping[str, str]]) -> None:
        """Translate state and options of other optimizers into samestep's names."""
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
        """Compare the checksums of this rank's share of the files."""
        self._compare(list(self._sums)[share::shares])

    def _compare(self, names: list[str]) -> None:
        found = _checksums(self.folder, names)
        for name in names:
            if found[name] != self._sums[name]:
                raise CheckpointError(
                    f"{self.folder / name} is damaged: its checksum is not that of "
                    f"{INDEX}; load another checkpoint"
                )


class Entry(NamedTuple):
    """A stored tensor, with a reader for each of its chunks."""

    key: str
    shape: torch.Size
    dtype: torch.dtype
    chunks: Sequence[tuple[Box, Callable[[], Tensor]]]


def entries_in(metadata: Metadata, load: Callable[[MetadataIndex], Any]) -> dict[str, Entry]:
    """All stored tensors."""
    found = {}
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            dtype, chunks = entry.properties.dtype, list[tuple[Box, Callable[[], Tensor]]]()
            for chunk in entry.chunks:
                index = MetadataIndex(key, chunk.offsets)
                box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
                chunks.append((box, partial(_load_chunk, load, index, box, dtype)))
            found[key] = Entry(key, entry.size, dtype, chunks)
    return found


def _flat(read: Callable[[], Tensor]) -> Tensor:
    return read().flatten()


def _groups(folder: Path, metadata: Metadata) -> list[dict[str, Any]]:
    """Options of groups from either form: a list of groups, or options per parameter."""
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
    """Turn dicts whose keys are indices back into lists."""
    if isinstance(value, dict):
        entries = {key: _with_lists(entry) for key, entry in value.items()}
        numbered = bool(entries) and all(isinstance(key, int) for key in entries)
        return [entries[place] for place in sorted(entries)] if numbered else entries
    return list(map(_with_lists, value)) if isinstance(value, list) else value


class Place:
    """File and bytes of an entry."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: Sequence[str] | None


def load_entry(folder: Path, metadata: Metadata, index: MetadataIndex) -> Any:
    """Load one entry as views of the file."""
    info = metadata.storage_data[index]
    path = folder / info.relative_path
    if info.transform_descriptors:
        how = ", ".join(info.transform_descriptors)
        raise CheckpointError(
            f"{path}: {index.fqn!r} was written with {how}, which samestep cannot read: "
            "save it without that"
        )
    try:
        return read_archive(Files(folder).part_of(info.relative_path, info.offset, info.length))
    except PickleError as error:
        raise CheckpointError(
            f"{path} has invalid contents: {index.fqn!r} is more than tensors and plain "
            f"values ({error}); no code of it was run. Load another checkpoint"
        ) from None
    except Exception as error:  # what is damaged can raise anything
        reason = str(error).split("\n")[0]
        raise CheckpointError(f"{path}: {index.fqn!r} cannot be read: {reason}") from None


def _load_chunk(
    load: Callable[[MetadataIndex], Any], index: MetadataIndex, box: Box, dtype: torch.dtype
) -> Tensor:
    """Load a chunk, checked against the metadata."""
    found = load(index)
    if not isinstance(found, Tensor) or (tuple(found.shape), found.dtype) != (box.sizes, dtype):
        there = f"{tuple(found.shape)} {found.dtype}" if isinstance(found, Tensor) else type(found)
        raise CheckpointError(
            f"{METADATA} does not fit its files: it has {index.fqn!r} at {box.offsets} "
            f"as {box.sizes} {dtype}, and the file has {there}. Load another checkpoint"
        )
    return found


# --- metadata --------------------------------------------------------------------------------


def read_metadata(folder: Path) -> Metadata:
    """Read torch's metadata, and check that all files exist and are large enough."""
    path = folder / METADATA
    with claims_of(path):
        found = _unpickled(inside(folder, METADATA))
        _check_metadata(folder, found)
    return found


def _unpickled(path: Path) -> Metadata:
    try:
        found = read_pickle(path.read_bytes(), METADATA_TABLE)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except PickleError as error:
        raise CheckpointError(
            f"{path} is no valid metadata of torch.distributed.checkpoint: {error}; no "
            "code of it was run. Do not load it with torch, which may run it; load "
            "another checkpoint"
        ) from None
    if type(found) is not Metadata:
        raise ClaimError("it is no metadata of torch.distributed.checkpoint")
    return found


def _check_metadata(folder: Path, metadata: Metadata) -> None:
    sizes: dict[str, int | None] = {}
    left: dict[str, int] = {}  # bytes of each file that no entry has yet
    for index, info in metadata.storage_data.items():
        if type(index) is not MetadataIndex or type(info) is not Place:
            raise ClaimError("it has other things than storage places")
        name = info.relative_path
        if name not in sizes:
            sizes[name] = size = file_size(inside(folder, name))
            if size is None:
                raise CheckpointError(f"{folder / name} is missing: load another checkpoint")
            left[name] = size
        if info.offset + info.length > (sizes[name] or 0):
            raise ClaimError(f"{index.fqn!r} ends behind {name!r}, which was cut short")
        left[name] -= info.length
        if left[name] < 0:
            raise ClaimError(f"its entries have more bytes than {name!r}")
    for key, entry in metadata.state_dict_metadata.items():
        if type(key) is not str or not key.isprintable():
            raise ClaimError(f"an entry has the name {key!r:.80}")
        if isinstance(entry, TensorStorageMetadata):
            _check_chunks(metadata, key, entry)
        elif isinstance(entry, BytesStorageMetadata):
            _place_of(metadata, MetadataIndex(key))
        else:
            raise ClaimError(f"{key!r} is a {type(entry).__name__}")


def _check_chunks(metadata: Metadata, key: str, entry: TensorStorageMetadata) -> None:
    for chunk in entry.chunks:
        if type(chunk) is not ChunkStorageMetadata:
            raise ClaimError(f"{key!r} has a {type(chunk).__name__} for a chunk")
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        check_box(key, entry.size, box)
        place = _place_of(metadata, MetadataIndex(key, chunk.offsets))
        size = box.numel * entry.properties.dtype.itemsize
        if place.length < size and not place.transform_descriptors:
            raise ClaimError(f"{key!r} has a box of {box.sizes} in {place.length} bytes, too few")


def _place_of(metadata: Metadata, index: MetadataIndex) -> Place:
    place: Place | None = metadata.storage_data.get(index)
    if place is None:
        raise ClaimError(f"it lacks the file of {index.fqn!r} at {index.offset}")
    return place


class _Note:
    """Placeholder for parts of the metadata that are not used."""

    def __init__(self, *_: Any) -> None:
        pass


def _new(kind: type) -> Callable[..., Any]:
    """Make an object without calling its class; its fields are set with its state."""

    def make(*arguments: Any) -> Any:
        if arguments:
            raise PickleError(f"it makes a {kind.__name__} of arguments")
        return object.__new__(kind)

    return make


def _fields(**kinds: tuple[type, ...]) -> Callable[[Any, Any], None]:
    """Set fields of an object, each of an allowed type; fields without None are required."""

    def build(made: Any, state: Any) -> None:
        found = state if type(state) is dict else {}
        for name, allowed in kinds.items():
            value = found.get(name)
            if type(value) not in allowed:
                raise PickleError(
                    f"it has a {type(value).__name__} for {name} of a {type(made).__name__}"
                )
            object.__setattr__(made, name, value)

    return build


def _fill_properties(made: Any, state: Any) -> None:
    kinds = (torch.dtype, torch.layout, bool, torch.memory_format, bool)
    if type(state) is not tuple or tuple(map(type, state)) != kinds:
        raise PickleError("it has other things than properties of a tensor")
    made.dtype, made.layout, made.requires_grad, made.memory_format, made.pin_memory = state


def _fill_place(made: Any, state: Any) -> None:
    _PLACE_FIELDS(made, state)
    whole_number(made.offset, "the offset of an entry")
    whole_number(made.length, "the length of an entry")
    if not all(type(name) is str for name in made.transform_descriptors or ()):
        raise PickleError("it has transforms without names")


def _memory_format(number: Any) -> torch.memory_format:
    """A memory format by torch's number for it."""
    return MEMORY_FORMATS[whole_number(number, "a memory format")]


def _nothing(_: Any, __: Any) -> None:
    """Ignore a state."""


NONE = type(None)
MEMORY_FORMATS = (torch.contiguous_format, torch.channels_last, torch.preserve_format)
_PLACE_FIELDS = _fields(
    relative_path=(str,), offset=(int,), length=(int,), transform_descriptors=(list, tuple, NONE)
)
OF_METADATA = "torch.distributed.checkpoint.metadata"
OF_FILES = "torch.distributed.checkpoint.filesystem"
OF_PLANS = "torch.distributed.checkpoint.planner"  # Megatron's has the plans of ranks too
READ: dict[tuple[str, str], type] = {
    (OF_METADATA, "Metadata"): Metadata,
    (MEGATRON, "MCoreMetadata"): Metadata,  # the same with notes of its own
    (OF_METADATA, "TensorStorageMetadata"): TensorStorageMetadata,
    (OF_METADATA, "BytesStorageMetadata"): BytesStorageMetadata,
    (OF_METADATA, "ChunkStorageMetadata"): ChunkStorageMetadata,
    (OF_METADATA, "TensorProperties"): TensorProperties,
    (OF_METADATA, "MetadataIndex"): MetadataIndex,
    (OF_FILES, "_StorageInfo"): Place,
}
NOTES = (
    (OF_METADATA, "StorageMeta"),
    (OF_FILES, "_StoragePrefix"),
    (OF_FILES, "SerializationFormat"),
    (OF_PLANS, "SavePlan"),
    (OF_PLANS, "WriteItem"),
    (OF_PLANS, "WriteItemType"),
    (OF_PLANS, "TensorWriteData"),
    (OF_PLANS, "BytesIOWriteData"),
    (MEGATRON, "MCoreSavePlan"),
    *(  # where it was saved
        (module, name)
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    ),
)
MAKERS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): shape_of,
    ("torch.serialization", "_get_layout"): layout_of,
    (OF_METADATA, "_MEM_FORMAT_ENCODING"): _memory_format,
    ("collections", "OrderedDict"): plain_dict,
    **{pair: _new(kind) for pair, kind in READ.items()},
    **dict.fromkeys(NOTES, _Note),
}
METADATA_TABLE = Table(
    {**DTYPE_NAMES, **{pair: Maker(".".join(pair), make) for pair, make in MAKERS.items()}},
    {
        Metadata: _fields(
            state_dict_metadata=(dict,),
            planner_data=(dict, NONE),
            storage_data=(dict,),
        ),
        TensorStorageMetadata: _fields(
            properties=(TensorProperties,), size=(torch.Size,), chunks=(list,)
        ),
        BytesStorageMetadata: _fields(),
        ChunkStorageMetadata: _fields(offsets=(torch.Size,), sizes=(torch.Size,)),
        TensorProperties: _fill_properties,
        MetadataIndex: _fields(fqn=(str,), offset=(torch.Size, NONE), index=(int, NONE)),
        Place: _fill_place,
        _Note: _nothing,
        dict: _nothing,
    },
    frozenset({MetadataIndex}),
)
