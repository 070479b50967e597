"""`samestep.async_save`: training waits for a copy in memory, not for the disk."""

from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from samestep.checkpoint.background import SaveHandle, finish_background, start_background
from samestep.checkpoint.formats import FormatName
from samestep.checkpoint.plan import WritePlan
from samestep.checkpoint.ranks import Ranks, all_ranks
from samestep.checkpoint.saving import Prepared, Request, give_up, prepare, write
from samestep.comm.groups import RankGroup
from samestep.full_values import FullValues


@torch.no_grad()
def async_save(
    path: str | Path,
    model: nn.Module | None = None,
    optimizer: FullValues | None = None,
    *,
    extra: Any = None,
    keep: int | None = None,
    format: FormatName = "fully_reshardable",
) -> SaveHandle:
    """`save`, but it returns when everything is copied to the host's memory. Collective.

    What this rank will write is copied, to buffers that later saves of the same model and
    optimizer use again. A second save, or a load, waits for the first. What goes wrong in the
    background is raised by `wait()` of the handle, or else by the next save or load. Call
    `wait()` before `torch.distributed.destroy_process_group()`.
    """
    finish_background()
    request = Request(Path(path), model, optimizer, extra, keep, format)
    staging = _staging_of(optimizer if optimizer is not None else model)
    prepared = prepare(request, _own_group(f"save of {path}"), staging.plan_for(format))
    try:
        staging.copy(prepared)
    except BaseException as error:  # there may be no memory
        give_up(prepared.unfinished, prepared.ranks, error)
        raise
    # Without the live tensors: the optimizer may go while this runs.
    in_files = prepared._replace(
        state_dict=prepared.objects(), request=request._replace(model=None, optimizer=None)
    )
    return start_background(request.path, lambda: write(in_files, staging.value))


class Staging:
    """Copies on the host of what a rank writes, and the plan that says what that is."""

    def __init__(self) -> None:
        self._format = ""
        self._plan: WritePlan | None = None
        self._buffers: dict[MetadataIndex, Tensor] = {}

    def plan_for(self, name: str) -> WritePlan | None:
        """The plan of the last save, if that had the same format."""
        return self._plan if name == self._format else None

    def copy(self, prepared: Prepared) -> None:
        """Take the present values."""
        if prepared.plan is not self._plan:
            self._plan, self._buffers = prepared.plan, {}
            self._format = prepared.request.format
        streams = False
        for item in prepared.plan.items:
            if item.type == WriteItemType.BYTE_IO:
                continue
            live = prepared.value(item).detach()
            buffer = self._buffers.get(item.index)
            if buffer is None or buffer.dtype != live.dtype:
                buffer = torch.empty(live.shape, dtype=live.dtype, pin_memory=live.is_cuda)
                self._buffers[item.index] = buffer
            buffer.copy_(live, non_blocking=True)
            streams |= live.is_cuda
        if streams:
            torch.cuda.current_stream().synchronize()

    def value(self, item: WriteItem) -> Tensor:
        """What was copied of a box."""
        return self._buffers[item.index]


_stagings: "WeakKeyDictionary[object, Staging]" = WeakKeyDictionary()
_groups: "WeakKeyDictionary[dist.ProcessGroup, RankGroup]" = WeakKeyDictionary()


def _staging_of(owner: object) -> Staging:
    """That of an optimizer, or of a model without one; it lives as long as they do."""
    if owner is None:
        return Staging()
    return _stagings.setdefault(owner, Staging())


def _own_group(task: str) -> Ranks:
    """A group that training does not use, for the background; made once. Collective then."""
    ranks = all_ranks(task)
    if ranks.group is None:
        return ranks
    own = _groups.get(ranks.group.handle)
    if own is None:
        handle = dist.new_group(backend="gloo", timeout=timedelta(minutes=30))
        own = _groups[ranks.group.handle] = ranks.group._replace(handle=handle)
    return ranks._replace(group=own)
