"""Implements `samestep.save` and `samestep.async_save`.

Both look, plan and write in the same steps. After `async_save` training waits for a copy in memory,
not for the disk or for others; at most one save is in the background, which later calls wait for.
"""

import io
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from samestep.checkpoint.folder import Unfinished
from samestep.checkpoint.formats import FORMATS, WRITTEN_AS, FormatName, own_name
from samestep.checkpoint.logical import GroupFacts, Pieces, group_facts, of_all_stages, tensors_of
from samestep.checkpoint.ranks import Ranks, all_ranks, plan_locally
from samestep.checkpoint.storage import CheckpointError, Values, WritePlan
from samestep.comm.groups import RankGroup
from samestep.optimizer.rule_optimizer import RuleOptimizer
from samestep.version import __version__


class SaveRequest(NamedTuple):
    """The arguments of a save."""

    path: Path
    model: nn.Module | None
    optimizer: RuleOptimizer | None
    extra: Any
    keep: int | None
    format: str


class Seen(NamedTuple):
    """Tensors that a rank has to save."""

    planner: DefaultSavePlanner | None  # None: there is a plan
    state_dict: Mapping[str, Any]  # Pieces, and in some formats other things
    facts: Mapping[str, Any]
    groups: Sequence[GroupFacts] = ()  # those that this rank tells the first of


class Prepared(NamedTuple):
    """A checked and planned save, before anything is written."""

    request: SaveRequest
    ranks: Ranks
    unfinished: Unfinished | None  # on the first rank
    folder: Path  # in which all ranks write; the first moves it to its place
    seen: Seen
    plan: WritePlan


def value_in(state_dict: Mapping[str, Any], item: WriteItem) -> Tensor:
    """Current values of a box on this rank."""
    tensor: Pieces = state_dict[item.index.fqn]
    return tensor.__get_tensor_shard__(item.index)


class Boxes(DefaultSavePlanner):
    """Gives a writer the values of one box at a time, from a model, copies or files."""

    def __init__(self, values: Values, objects: Mapping[str, Any]) -> None:
        super().__init__()
        self._values, self._objects = values, objects

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type != WriteItemType.BYTE_IO:
            values: Tensor = self._values(write_item)
            return values.detach()
        buffer = io.BytesIO()
        torch.save(self._objects[write_item.index.fqn], buffer)
        return buffer


def objects_in(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state_dict.items() if not isinstance(value, Pieces)}


@torch.no_grad()
def save(
    path: str | Path,
    model: nn.Module | None = None,
    optimizer: RuleOptimizer | None = None,
    *,
    extra: Any = None,
    keep: int | None = None,
    format: FormatName = "fully_reshardable",
) -> Path:
    """Write a checkpoint that any layout on any number of ranks can load. Collective.

    The folder `path` appears when everything in it is written, never before, and `LATEST` beside
    it then names it. Each rank writes what it owns; nothing is gathered.

    Args:
        path: A folder that does not exist yet, on a disk that all ranks share.
        model: Parameters and buffers are saved.
        optimizer: State, master weights and options are saved.
        extra: What JSON can have: step, data position, `scaler.state_dict()`. The first rank's.
        keep: Remove all but so many of the newest checkpoints beside it.
        format: "fsdp_dtensor" is what torch's own tools read; it loads anywhere too. "dp_local"
            is written without planning and loads in the same layout only.
            "fully_sharded_model_space", Megatron's name, is the default.

    Raises:
        CheckpointError: On all ranks, with nothing left behind: training can go on.
    """
    finish_background()
    request = SaveRequest(Path(path), model, optimizer, extra, keep, own_name(format))
    ranks = all_ranks(f"save of {path}")
    prepared = prepare(request, ranks, lambda: look(request, ranks.size))
    write(prepared, partial(value_in, prepared.seen.state_dict))
    return request.path


def look(request: SaveRequest, ranks: int) -> Seen:
    """Views of everything this rank must save; raises if something cannot be saved."""
    if request.keep is not None and request.keep < 1:
        raise CheckpointError(f"keep must be at least 1, got {request.keep}")
    _check_json("extra", request.extra)
    wanted = FORMATS[request.format]
    if wanted.is_nested and request.optimizer is not None and request.optimizer.is_stage:
        raise CheckpointError(
            f"format {request.format!r} needs the options of all groups in one place, "
            "and a rank of a pipeline knows only those of its stage: save with "
            'format="fully_reshardable", and run `samestep convert PATH NEW --to '
            f"{request.format}`"
        )
    opt = request.optimizer
    groups = [] if opt is None else group_facts(opt)
    facts = facts_of(request.format, ranks, groups, request.extra)
    if opt is not None:
        facts |= {"fingerprint": opt.fingerprint(), "layout": opt.layout_lines()}
    state_dict = wanted.state_dict(tensors_of(request.model, opt), facts)
    planner = plan_locally(state_dict, wanted.is_nested)
    told = groups if opt and opt.leads_stage else []
    return Seen(planner, planner.state_dict, facts, told)


def prepare(
    request: SaveRequest, ranks: Ranks, see: Callable[[], Seen], before: WritePlan | None = None
) -> Prepared:
    """Run all checks that can fail before anything is written. Collective.

    `before` is the plan of an earlier save, if what this rank holds is still the same.
    """
    unfinished: Unfinished | None = None

    def check() -> tuple[Seen, tuple[bool, str]]:
        nonlocal unfinished
        seen = see()
        if ranks.rank == 0:
            unfinished = Unfinished(request.path)
        name = "" if unfinished is None else unfinished.folder.name
        return seen, (before is not None, name)

    try:
        seen, everyones = ranks.agreed(check)
        folder = request.path.with_name(everyones[0][1])
        if len({as_before for as_before, _ in everyones}) > 1:
            raise CheckpointError(
                "parameters or state changed during the save on some ranks: call save "
                "again on every rank, between steps"
            )
        if before is not None:
            plan = before
        else:
            assert seen.planner is not None
            known = {} if request.optimizer is None else request.optimizer.owners()
            owners = {name: own for name, own in known.items() if len(own) < ranks.size}
            plan = FORMATS[request.format].plan(seen.planner, owners, ranks)
    except BaseException as error:
        give_up(unfinished, ranks, error)
        raise
    return Prepared(request, ranks, unfinished, folder, seen, plan)


def write(prepared: Prepared, values: Values) -> None:
    """Write the files and rename the folder. Collective, on the group of `prepare`."""
    request, ranks, unfinished, folder, seen, plan = prepared
    writer = FORMATS[request.format].writer
    boxes = Boxes(values, objects_in(seen.state_dict))

    def write_mine() -> list[WriteResult]:
        try:
            mine = writer(folder, ranks.rank, seen.facts)
            return mine.write_data(SavePlan(plan.items, planner_data=plan.metadata), boxes).wait()
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{error.filename} is missing on this rank: every rank must write to "
                "the same shared file system"
            ) from None

    def finish() -> None:
        if unfinished is not None:
            groups = of_all_stages([seen.facts["groups"], *(told for _, told in everyones)])
            facts = {**seen.facts, "groups": groups}
            results = [files for files, _ in everyones]
            writer(folder, ranks.rank, facts).finish(plan.metadata, results)
            unfinished.commit(request.keep)

    try:
        mine = ranks.everywhere(write_mine)
        everyones = ranks.to_first((mine, seen.groups))
        ranks.everywhere(finish)
    except BaseException as error:
        give_up(unfinished, ranks, error)
        raise


def give_up(unfinished: Unfinished | None, ranks: Ranks, error: BaseException) -> None:
    """Delete what was written, then raise the error on all ranks."""
    if unfinished is not None:
        unfinished.abandon()
    if isinstance(error, CheckpointError):
        ranks.all_of(None)


def facts_of(name: str, ranks: int, groups: list[GroupFacts], extra: Any) -> dict[str, Any]:
    """Entries of the index beside the tensors, in a fixed order."""
    return {
        WRITTEN_AS: name,
        "samestep": __version__,
        "torch": torch.__version__,
        "world_size": ranks,
        "fingerprint": "",
        "layout": [],
        "groups": groups,
        "extra": extra,
    }


def _check_json(what: str, value: Any) -> None:
    """Raise unless a value survives a round trip through JSON; tuples may become lists."""
    try:
        json.dumps(value, allow_nan=False)
        _refuse_other_keys(value)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{what} must be of types that JSON can store: {error}") from None


def _refuse_other_keys(value: Any) -> None:
    """Refuse dict keys that are not str, which JSON would turn into text."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            if not isinstance(key, str):
                raise TypeError(
                    f"the dict has the key {key!r}, and JSON's keys are str: store a list of pairs"
                )
            _refuse_other_keys(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            _refuse_other_keys(entry)


# --- in the background ----------------------------------------------------------------------


class SaveHandle:
    """A save that runs in the background."""

    def __init__(self, path: Path, work: Callable[[], None]) -> None:
        self.path = path
        self._work = work
        self._problem: BaseException | None = None
        # Not a daemon: a process that ends by itself finishes its last checkpoint.
        self._thread = threading.Thread(target=self._run, name=f"save {path.name}")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._problem = error

    def done(self) -> bool:
        """Whether the save has ended, successfully or not."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until the checkpoint is on disk; raises the error of the save, once."""
        self._thread.join()
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem
        return self.path


_running: SaveHandle | None = None


def finish_background() -> None:
    """Wait for a running save; raises its error if nobody has seen it."""
    global _running
    handle, _running = _running, None
    if handle is not None:
        handle.wait()


@torch.no_grad()
def async_save(
    path: str | Path,
    model: nn.Module | None = None,
    optimizer: RuleOptimizer | None = None,
    *,
    extra: Any = None,
    keep: int | None = None,
    format: FormatName = "fully_reshardable",
) -> SaveHandle:
    """Like `save`, but returns when everything is copied to host memory. Collective.

    What this rank will write is copied, to buffers that later saves of the same model and
    optimizer use again; if nothing but values has changed since the last one, nobody waits for
    another rank. A second save, or a load, waits for the first. What goes wrong in the background
    is raised by `wait()` of the handle, or else by the next save or load. Call `wait()` before
    `torch.distributed.destroy_process_group()`.
    """
    global _running
    finish_background()
    request = SaveRequest(Path(path), model, optimizer, extra, keep, own_name(format))
    ranks = _own_group(f"save of {path}")
    staging = _staging_of(optimizer if optimizer is not None else model)
    plan = planned = None
    with suppress(Exception):  # raised once more where other ranks hear of it
        seen = look(request, ranks.size)
        plan = staging.plan_for(request.format, seen.planner)
    if plan is None:
        planned = prepare(request, ranks, partial(look, request, ranks.size))
        seen, plan = planned.seen, planned.plan
    values = staging.copy(plan, request.format, seen.state_dict)
    # The optimizer may go while the background writes: without the live tensors from here on.
    copied = Seen(None, objects_in(seen.state_dict), seen.facts, seen.groups)
    in_files = request._replace(model=None, optimizer=None)
    if planned is not None:
        planned = planned._replace(request=in_files, seen=copied)

    def work() -> None:
        try:
            write(planned or prepare(in_files, ranks, lambda: copied, plan), values)
        except CheckpointError:  # on all ranks, so all of them plan anew
            staging.forget()
            raise

    _running = SaveHandle(request.path, work)
    return _running


class HostCopies:
    """Copies in host memory of everything a rank writes, with the plan of the files."""

    def __init__(self) -> None:
        self._format = ""
        self._plan: WritePlan | None = None
        self._buffers: dict[MetadataIndex, Tensor] = {}

    def plan_for(self, name: str, planner: DefaultSavePlanner | None) -> WritePlan | None:
        """The plan of the last save, if it was of the same tensors in the same format."""
        plan, held = self._plan, [] if planner is None else planner.plan.items
        return plan if plan is not None and (name, held) == (self._format, plan.held) else None

    def forget(self) -> None:
        self._plan = None

    def copy(self, plan: WritePlan, name: str, state_dict: Mapping[str, Any]) -> Values:
        """Copy the current values, and return the copies."""
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


_stagings: "WeakKeyDictionary[object, HostCopies]" = WeakKeyDictionary()
_groups: "WeakKeyDictionary[dist.ProcessGroup, RankGroup]" = WeakKeyDictionary()


def _staging_of(owner: object) -> HostCopies:
    """Host copies of an optimizer, or of a model without one, which live as long as it."""
    if owner is None:
        return HostCopies()
    return _stagings.setdefault(owner, HostCopies())


def _own_group(task: str) -> Ranks:
    """A process group only for background saves; collective when first called."""
    ranks = all_ranks(task)
    if ranks.group is None:
        return ranks
    own = _groups.get(ranks.group.handle)
    if own is None:
        handle = dist.new_group(backend="gloo", timeout=timedelta(minutes=30))
        own = _groups[ranks.group.handle] = ranks.group._replace(handle=handle)
    return ranks._replace(group=own)
