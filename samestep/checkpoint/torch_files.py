"""Format `fsdp_dtensor`: a folder of torch.distributed.checkpoint, and our index beside its files.

.metadata, __0_0.distcp, __1_0.distcp, ...   what torch writes and reads
index.json, index.json.sha256                checksums of these files, options, and what was given
"""

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from samestep.checkpoint.convert.from_dcp import METADATA, read_dcp
from samestep.checkpoint.errors import CheckpointError
from samestep.checkpoint.logical import MODEL, Tensors
from samestep.checkpoint.options import options_from
from samestep.checkpoint.plan import WritePlan
from samestep.checkpoint.storage import (
    FORMAT,
    INDEX,
    Files,
    Read,
    Values,
    check_sizes,
    sizes_in,
    write_json,
)
from samestep.comm.integrity.checksum import checksum

Checksums = dict[str, int]  # by the name of a file
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
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        if part == MODEL:
            model[rest] = tensor
        else:
            param, _, key = rest.rpartition(".")
            state.setdefault(param, {})[key] = tensor
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
    """Torch's metadata, then our index."""
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
    with Files(folder) as files:
        return {name: int(checksum(files.all_of(name))) for name in names}


class _Boxes(DefaultSavePlanner):
    """Gives torch the values of one box at a time."""

    def __init__(self, values: Values, objects: Mapping[str, Any]) -> None:
        super().__init__()
        self._values, self._objects = values, objects

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """What is to be written."""
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

    def __init__(self, folder: Path, content: Mapping[str, Any] | None) -> None:
        self.folder = folder
        self._sums: Checksums = {}
        if content is not None:
            check_sizes(folder, content["files"])
            self._sums = content["checksums"]
            self._compare([METADATA])  # before it is looked into
        source = read_dcp(folder, with_groups=content is None)
        self._read, self.left_out = source.read, source.left_out
        self.content: dict[str, Any] = {
            "world_size": source.world_size,
            "layout": [],
            "groups": source.groups,
            "extra": source.extra,
            **(content or {}),
        }
        self.tensors = {
            name: TensorStorageMetadata(
                TensorProperties(dtype=tensor.dtype), tensor.shape, tensor.__create_chunk_list__()
            )
            for name, tensor in source.tensors.items()
        }

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

    @contextmanager
    def reading(self) -> Iterator[Read]:
        """What gives the values of a box."""
        yield self._read
