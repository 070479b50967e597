"""Reads distributed checkpoints of Megatron in the format torch_dist.

optimizer.state.KEY.NAME    state in the shape of the model (`fully_reshardable`), or with the last
                            dim flat (`fully_sharded_model_space`); main parameters are fp32_param
optimizer.distributed...    flat buckets (`dp_reshardable`), which have no names
common.pt                   what is no tensor: iteration, options of groups, arguments

Layers of a kind are one tensor there, with the layer as its first dim: `decoder.layers.mlp...` is
`decoder.layers.0.mlp...` and so on here. Which parameters a group has is not saved; that ones of
one dim and biases have no weight decay is known, and tells them apart.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from samestep.checkpoint.folder import METADATA, pointed
from samestep.checkpoint.foreign import safe
from samestep.checkpoint.foreign.dialects import meaning
from samestep.checkpoint.foreign.naming import as_lists, names_of
from samestep.checkpoint.logical import state_key
from samestep.checkpoint.sources import Collected, Source, SourceOptions, model_name
from samestep.checkpoint.storage import CheckpointError
from samestep.checkpoint.torch_files import Entry, entries_in, load_entry, read_metadata
from samestep.layout.boxes import Box, range_boxes
from samestep.rules.state import MASTER

CONFIG, COMMON, LATEST = "metadata.json", "common.pt", "latest_checkpointed_iteration.txt"
# What Megatron has in common.pt beside plain values; made as shells.
SHELLS = (
    "argparse.Namespace",
    "types.SimpleNamespace",
    "signal.Signals",
    "megatron.core.enums.ModelType",
    "megatron.core.enums.Fp8Recipe",
    "megatron.core.enums.Fp4Recipe",
    "megatron.core.rerun_state_machine.RerunDiagnostic",
    "megatron.core.rerun_state_machine.RerunMode",
    "megatron.core.rerun_state_machine.RerunState",
    "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.AttnMaskType",
    "megatron.core.transformer.enums.CudaGraphScope",
    "megatron.core.transformer.enums.LayerType",
)
STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<key>[^.]+)\.(?P<name>.+)")
BUCKET = re.compile(
    r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_(?P<ranks>\d+)\.gbuf_idx_(?P<buffer>\d+)"
    r"\.dtype_\(torch\.(?P<dtype>\w+), .*\)\.bucket_idx_(?P<bucket>\d+)\.(?P<key>\w+)"
)
OBJECT = re.compile(
    r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.optimizer(?:/.*)?"
)
STACKED = re.compile(r"(?P<before>.*\blayers)\.(?P<after>(?!\d+\.).+)")
MAIN = ("fp32_param", "param")
ALIGNMENT = 64  # of the start of a parameter in a bucket, in elements


def folder_of(path: Path) -> Path | None:
    """The checkpoint in a folder: itself, or its newest iteration; None if neither."""
    if (path / LATEST).is_file():
        newest = pointed(path, LATEST)
        is_number = newest.name.isdecimal()
        path = path / f"iter_{int(newest.name):07d}" if is_number else newest
    if not (path / CONFIG).is_file():
        return None
    try:
        config = json.loads((path / CONFIG).read_text())
    except ValueError:
        return None
    return path if isinstance(config, dict) and "sharded_backend" in config else None


def read(path: Path, given: SourceOptions) -> Source:
    """Read a checkpoint, or only its model.

    Names or a model give the order of parameters for dp_reshardable. Where the count of steps is
    given, common.pt is left out if it cannot be read.
    """
    folder = folder_of(path)
    if folder is None:
        raise CheckpointError(
            f"{path} is no distributed checkpoint of Megatron: it has no {CONFIG} with "
            f'"sharded_backend", and no {LATEST} that names one'
        )
    backend = json.loads((folder / CONFIG).read_text())["sharded_backend"]
    if backend != "torch_dist" or not (folder / METADATA).is_file():
        raise CheckpointError(
            f"{folder} has the format {backend}, and only torch_dist is supported: load "
            "it with Megatron and save it with --ckpt-format torch_dist"
        )
    metadata = read_metadata(folder)
    load = partial(load_entry, folder, metadata)
    # Several boxes may want a chunk one after the other.
    entries = entries_in(metadata, lru_cache(maxsize=8)(load))
    objects = [key for key in metadata.state_dict_metadata if key not in entries]
    left = [key for key in objects if not OBJECT.fullmatch(key)]
    common = {key: load(MetadataIndex(key)) for key in objects if OBJECT.fullmatch(key)}
    try:
        if (folder / COMMON).is_file():
            common |= safe.load_dict(folder / COMMON, SHELLS)
    except CheckpointError as error:
        if given.step is None and given.only != "model":
            raise CheckpointError(
                f"{error}; or give --step N to convert it without {COMMON}"
            ) from None
        left.append(COMMON)
    options = list(_param_groups(common))
    collected = Collected()
    params, state, buckets = dict[str, Entry](), dict[str, dict[str, Entry]](), list[Entry]()
    for key, entry in entries.items():
        found = STATE.fullmatch(key)
        if found:
            state.setdefault(found["name"], {})[found["key"]] = entry
        elif BUCKET.fullmatch(key):
            buckets.append(entry)
        elif key.startswith(("optimizer.", "chained_")):
            left.append(key)
        else:
            params[key] = entry
    if given.only == "model":
        state, buckets = {}, []
    shapes, dtypes = dict[str, torch.Size](), dict[str, torch.dtype]()
    for key, entry in params.items():
        for name, one in _layers(entry):
            shapes[name], dtypes[name] = one.shape, one.dtype
            collected.add_boxes(model_name(name), one.shape, one.dtype, one.chunks, key)
    for raw, of_keys in state.items():
        if raw not in params:
            raise CheckpointError(
                f"{folder} has optimizer state of {raw!r} and no such parameter: give a "
                "checkpoint that has the model too"
            )
        for theirs, entry in of_keys.items():
            whole = _unflattened(entry, params[raw].shape)
            for name, one in _layers(whole, raw):
                own = state_key(name, MASTER if theirs in MAIN else theirs)
                collected.add_boxes(own, one.shape, one.dtype, one.chunks, entry.key)
        for name, _ in _layers(params[raw]):
            _add_options(collected, name, shapes[name], of_keys, options, left)
    if buckets:
        order = _order(folder, given)
        for name, keys in _from_buckets(folder, buckets, order, shapes, dtypes, collected).items():
            _check_main(folder, name, collected)
            _add_options(collected, name, shapes[name], keys, options, left)
    for name, dtype in dtypes.items():
        main = state_key(name, MASTER)
        if main in collected and dtype.itemsize >= 4:
            collected.drop(main)
    iteration = common.get("iteration")
    extra = {"megatron": {"iteration": iteration}} if isinstance(iteration, int) else None
    return collected.source(extra=extra, left_out=sorted(set(left)))


def _layers(entry: Entry, name: str | None = None) -> Iterator[tuple[str, Entry]]:
    """Names of a stack's layers, and each layer's slice."""
    name = entry.key if name is None else name
    found = STACKED.fullmatch(name)
    if found is None:
        yield name, entry
        return
    for layer in range(entry.shape[0]):
        chunks = []
        for box, read in entry.chunks:
            place = layer - box.offsets[0]
            if 0 <= place < box.sizes[0]:
                inner = Box(box.offsets[1:], box.sizes[1:])
                chunks.append((inner, partial(_of_layer, read, place)))
        own = f"{found['before']}.{layer}.{found['after']}"
        yield own, Entry(entry.key, entry.shape[1:], entry.dtype, chunks)


def _of_layer(read: Callable[[], Tensor], place: int) -> Tensor:
    return read()[place]


def _unflattened(entry: Entry, shape: torch.Size) -> Entry:
    """Reshape flat state to the shape of its parameter.

    In fully_sharded_model_space a tensor of (X, Y) in parts of (x, y) is one of (X/x, Y/y, x y),
    whose last dim is cut anywhere.
    """
    if entry.shape == shape:
        return entry
    if len(entry.shape) != len(shape) + 1 or prod(entry.shape) != prod(shape):
        raise CheckpointError(
            f"{entry.key} has shape {tuple(entry.shape)} and its parameter "
            f"{tuple(shape)}: this form of Megatron is not supported; convert the model "
            "alone with --only model"
        )
    part = tuple(size // parts for size, parts in zip(shape, entry.shape[:-1], strict=True))
    chunks = []
    for box, read in entry.chunks:
        corner = [at * size for at, size in zip(box.offsets[:-1], part, strict=True)]
        start, done = box.offsets[-1], 0
        for inner in range_boxes(part, start, start + box.sizes[-1]):
            offsets = tuple(map(sum, zip(corner, inner.offsets, strict=True)))
            chunks.append((Box(offsets, inner.sizes), partial(_range, read, done, inner.sizes)))
            done += inner.numel
    return Entry(entry.key, shape, entry.dtype, chunks)


def _range(read: Callable[[], Tensor], start: int, sizes: tuple[int, ...]) -> Tensor:
    return read().reshape(-1)[start : start + prod(sizes)].view(sizes)


# --- options ---------------------------------------------------------------------------------


def _param_groups(content: Any, count: Any = None) -> Iterator[dict[str, Any]]:
    """The param_groups of the optimizer, with the step count where it is saved apart."""
    if isinstance(content, Mapping):
        state = content.get("state")
        count = state.get("common_step", count) if isinstance(state, Mapping) else count
        for group in content.get("param_groups") or ():
            yield {"step": count, **{k: v for k, v in group.items() if v is not None}}
        for key, value in content.items():
            if key not in ("param_groups", "state", "args"):
                yield from _param_groups(value, count)
    elif isinstance(content, list | tuple):
        for value in content:
            yield from _param_groups(value, count)


def _add_options(
    collected: Collected,
    name: str,
    shape: torch.Size,
    keys: Mapping[str, Any],
    options: Sequence[Mapping[str, Any]],
    left: list[str],
) -> None:
    """Add the rule, options and step count of a parameter."""
    held = [key for key in keys if key not in MAIN]
    fitting = [g for g in options if ("betas" in g) == ("exp_avg" in held)] or list(options)
    bare = len(shape) < 2 or name.endswith(".bias")
    decayed = [g for g in fitting if (g.get("wd_mult", 1.0) == 0.0) == bare]
    fitting = decayed or fitting
    same = {
        key: value
        for key, value in (fitting[0] if fitting else {}).items()
        if all(other.get(key) == value for other in fitting[1:])
    }
    unsure = {key for group in fitting for key in group} - set(same) - {"params"}
    if unsure & {"lr", "weight_decay", "betas", "eps", "momentum"}:
        left.append(f"of several groups that fit: {', '.join(sorted(unsure))}")
    found = meaning(name, held, same)
    place = [options.index(group) for group in fitting]
    collected.add_options(place, name, found.options)
    if found.rule == "adamw":
        collected.add_step(name, same.get("step"), f"{COMMON}: step")


# --- dp_reshardable --------------------------------------------------------------------------


def _order(folder: Path, given: SourceOptions) -> list[str]:
    if given.model is not None:
        return names_of(given.model)
    if given.names is None:
        raise CheckpointError(
            f"{folder} has its optimizer state in flat buckets without names "
            "(dp_reshardable): give the names of model.named_parameters() in order "
            "with --names, or the model with --model, or save it once with "
            "--dist-ckpt-optim-fully-reshardable"
        )
    return [name.removeprefix("module.") for own in as_lists(given.names) for name in own]


def _from_buckets(
    folder: Path,
    buckets: Sequence[Entry],
    order: Sequence[str],
    shapes: Mapping[str, torch.Size],
    dtypes: Mapping[str, torch.dtype],
    collected: Collected,
) -> dict[str, dict[str, None]]:
    """Extract the state of parameters from flat buckets; returns the keys of each.

    Buckets of a buffer have its parameters in reverse order, each from a multiple of 64 elements
    on; a bucket ends with a parameter.
    """
    of_buffer: dict[tuple[int, str], dict[int, dict[str, Entry]]] = {}
    for entry in buckets:
        found = BUCKET.fullmatch(entry.key)
        assert found is not None
        if found["ranks"] != "0":
            raise CheckpointError(
                f"{entry.key} comes from tensor or pipeline parallel ranks, whose "
                f"buckets have parts of parameters: save {folder} once with "
                "--dist-ckpt-optim-fully-reshardable"
            )
        buffer = of_buffer.setdefault((int(found["buffer"]), found["dtype"]), {})
        buffer.setdefault(int(found["bucket"]), {})[found["key"]] = entry
    kinds = [dtype for _, dtype in of_buffer]
    if len(set(kinds)) < len(kinds):
        raise CheckpointError(
            f"{folder} has several buffers of {kinds[0]} (of experts, or model chunks), "
            "and nothing says which parameters are in which: save it once with "
            "--dist-ckpt-optim-fully-reshardable"
        )
    unknown = [name for name in order if name not in shapes]
    if unknown:
        raise CheckpointError(
            f"--names or --model has the name {unknown[0]!r}, which {folder} does not have"
        )
    keys_of: dict[str, dict[str, None]] = {}
    for (_, dtype), numbered in sorted(of_buffer.items()):
        left = [name for name in reversed(order) if str(dtypes[name]) == f"torch.{dtype}"]
        for number, keys in sorted(numbered.items()):
            size, start = next(iter(keys.values())).shape[0], 0
            while start < size and left:
                name = left.pop(0)
                stop = start + shapes[name].numel()
                if stop > size:
                    raise _no_fit(folder, number, name, stop, size)
                for theirs, entry in keys.items():
                    own = state_key(name, MASTER if theirs in MAIN else theirs)
                    chunks = list(_cut(entry, start, stop, tuple(shapes[name])))
                    collected.add_boxes(own, shapes[name], entry.dtype, chunks, entry.key)
                    keys_of.setdefault(name, {})[theirs] = None
                start = stop if stop == size else -(-stop // ALIGNMENT) * ALIGNMENT
            if start < size:
                raise _no_fit(folder, number, "nothing", start, size)
        if left:
            raise _no_fit(folder, len(numbered) - 1, left[0], 0, 0)
    return keys_of


def _check_main(folder: Path, name: str, collected: Collected) -> None:
    """Raise unless a bucket's main parameter equals the model's: shapes do not prove the order."""
    model = collected.whole(model_name(name))
    main = collected.whole(state_key(name, MASTER))
    if not torch.equal(main.to(model.dtype), model):
        raise CheckpointError(
            f"{folder}: the values in its bucket at the place of {name!r} differ from "
            "the model's: give the names in the order of model.named_parameters()"
        )


def _no_fit(folder: Path, bucket: int, name: str, stop: int, size: int) -> CheckpointError:
    return CheckpointError(
        f"{folder}: {name!r} would end at {stop} of {size} elements of bucket {bucket}: the names "
        "are not in the order of model.named_parameters(), or some have no gradients"
    )


def _cut(entry: Entry, start: int, stop: int, shape: tuple[int, ...]) -> Iterator[Any]:
    """Boxes of a parameter that occupies elements start to stop - 1 of a bucket."""
    for box, read in entry.chunks:
        first, last = max(start, box.offsets[0]), min(stop, box.offsets[0] + box.sizes[0])
        done = first - box.offsets[0]
        for inner in range_boxes(shape, first - start, last - start) if first < last else ():
            yield inner, partial(_range, read, done, inner.sizes)
            done += inner.numel
