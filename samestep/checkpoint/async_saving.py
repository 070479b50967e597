"""`samestep.async_save`: training waits for a copy in memory, not for the disk or for others."""

from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from samestep.checkpoint.background import SaveHandle, finish_background, start_background
from samestep.checkpoint.errors import CheckpointError
from samestep.checkpoint.formats import FormatName
from samestep.checkpoint.plan import WritePlan
from samestep.checkpoint.ranks import Ranks, all_ranks
from samestep.checkpoint.saving import (
    Request,
    Seen,
    look,
    objects_in,
    prepare,
    value_in,
    write,
)
from samestep.checkpoint.storage import Values
from samestep.comm.groups import RankGroup
from samestep.optimizer.full_values import FullValues


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
    optimizer use again; if nothing but values has changed since the last one, nobody waits for
    another rank. A second save, or a load, waits for the first. What goes wrong in the background
    is raised by `wait()` of the handle, or else by the next save or load. Call `wait()` before
    `torch.distributed.destroy_process_group()`.
    """
    finish_background()
    request = Request(Path(path), model, optimizer, extra, keep, format)
    ranks = _own_group(f"save of {path}")
    staging = _staging_of(optimizer if optimizer is not None else model)
    seen, plan = _see_again(request, ranks, staging)
    planned = None
    if seen is None or plan is None:
        planned = prepare(request, ranks, partial(look, request, ranks.size))
        seen, plan = planned.seen, planned.plan
    values = staging.copy(plan, request.format, seen.state_dict)
    # The optimizer may go while the background writes: without the live tensors from here on.
    copied = Seen(None, objects_in(seen.state_dict), [], seen.facts, seen.groups)
    in_files = request._replace(model=None, optimizer=None)
    if planned is not None:
        planned = planned._replace(request=in_files, seen=copied)

    def work() -> None:
        try:
            write(planned or prepare(in_files, ranks, lambda: copied, plan), values)
        except CheckpointError:  # on all ranks, so all of them plan anew
            staging.forget()
            raise

    return start_background(request.path, work)


def _see_again(
    request: Request, ranks: Ranks, staging: "Staging"
) -> tuple[Seen | None, WritePlan | None]:
    """What is to be saved, and the plan of the last save if it holds for that."""
    try:
        seen = look(request, ranks.size)
    except Exception:  # raised once more where other ranks hear of it
        return None, None
    return seen, staging.plan_for(request.format, seen.held)


class Staging:
    """Copies on the host of what a rank writes, and the plan that says what that is."""

    def __init__(self) -> None:
        self._format = ""
        self._plan: WritePlan | None = None
        self._buffers: dict[MetadataIndex, Tensor] = {}

    def plan_for(self, name: str, held: list[WriteItem]) -> WritePlan | None:
        """The plan of the last save, if this is one of the same things in the same format."""
        plan = self._plan
        return plan if plan is not None and (name, held) == (self._format, plan.held) else None

    def forget(self) -> None:
        """The next save is planned anew."""
        self._plan = None

    def copy(self, plan: WritePlan, name: str, state_dict: Mapping[str, Any]) -> Values:
        """Take the present values; gives what has them."""
        if plan is not self._plan:
            self._plan, self._format, self._buffers = plan, name, {}
        try:
            self._copy(plan.items, state_dict)
        except Exception as error:  # there may be no memory: other ranks hear of it when they write
            return partial(_raise, error)
        return lambda item: self._buffers[item.index]

    def _copy(self, items: list[WriteItem], state_dict: Mapping[str, Any]) -> None:
        streams = False
        for item in items:
            if item.type == WriteItemType.BYTE_IO:
                continue
            live = value_in(state_dict, item).detach()
            buffer = self._buffers.get(item.index)
            if buffer is None or buffer.dtype != live.dtype:
                buffer = torch.empty(live.shape, dtype=live.dtype, pin_memory=live.is_cuda)
                self._buffers[item.index] = buffer
            buffer.copy_(live, non_blocking=True)
            streams |= live.is_cuda
        if streams:
            torch.cuda.current_stream().synchronize()


def _raise(error: Exception, _: WriteItem) -> Tensor:
    raise error


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
