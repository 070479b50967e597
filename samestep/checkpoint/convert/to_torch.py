"""Our checkpoints as folders of torch.distributed.checkpoint."""

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex

from samestep.checkpoint.errors import CheckpointError
from samestep.checkpoint.folder import Unfinished
from samestep.checkpoint.logical import MODEL
from samestep.checkpoint.options import options_from
from samestep.checkpoint.pieces import Pieces
from samestep.checkpoint.storage import Files, Index
from samestep.held_state import HeldBox
from samestep.layout.dtensor_shards import Box

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


def write_dcp(index: Index, path: Path) -> None:
    """Write {"model": ..., "optimizer": ...} as torch's `get_state_dict` gives it, box by box."""
    unfinished = Unfinished(path)
    try:
        with Files(index.folder, index.content["files"]) as files, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that there is one process only
            writer = dcp.FileSystemWriter(unfinished.folder, overwrite=True)
            dcp.save(_state_dict(index, files), storage_writer=writer, no_dist=True)
        unfinished.publish()
    except BaseException as error:
        unfinished.abandon()
        if isinstance(error, OSError):
            raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from None
        raise


def _state_dict(index: Index, files: Files) -> dict[str, Any]:
    model: dict[str, Any] = {}
    state: dict[str, dict[str, Any]] = {}
    boxes: dict[str, list[MetadataIndex]] = {name: [] for name in index.tensors}
    for box in index.places:
        boxes[box.fqn].append(box)
    for name, of_tensor in boxes.items():
        part, _, rest = name.partition(".")
        if part == MODEL:
            model[rest] = _pieces(index, files, name, of_tensor)
        else:
            param, _, key = rest.rpartition(".")
            state.setdefault(param, {})[key] = _pieces(index, files, name, of_tensor)
    groups = [
        {
            **OF_TORCH.get(group["options"]["rule"], {}),
            **options_from(group["options"]),
            "params": group["params"],
            "param_names": group["params"],
        }
        for group in index.content["groups"]
    ]
    whole: dict[str, Any] = {"model": model}
    if groups:
        whole["optimizer"] = {"state": state, "param_groups": groups}
    if index.content["extra"] is not None:
        whole["extra"] = index.content["extra"]
    return whole


def _pieces(index: Index, files: Files, name: str, boxes: list[MetadataIndex]) -> Pieces:
    """A stored tensor; values are read from the file when they are written to the other."""
    entry = index.tensors[name]
    held = []
    for box in boxes:
        place = Box(tuple(box.offset or ()), tuple(index.sizes_of(box)))
        held.append(HeldBox(place, files.values_of(index, box)))
    return Pieces(entry.size, entry.properties.dtype, torch.device("cpu"), held)
