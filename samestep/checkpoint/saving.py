"""`samestep.save`, and the parts that it has in common with `samestep.async_save`."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from samestep.checkpoint.background import finish_background
from samestep.checkpoint.errors import CheckpointError
from samestep.checkpoint.folder import Unfinished, partial_of
from samestep.checkpoint.logical import Tensors, tensors_of
from samestep.checkpoint.options import group_facts
from samestep.checkpoint.plan import Owners, WritePlan, plan_locally, plan_together
from samestep.checkpoint.ranks import Ranks, all_ranks
from samestep.checkpoint.storage import Place, write_boxes, write_index
from samestep.full_values import FullValues
from samestep.version import __version__

Values = Callable[[WriteItem], Tensor]


class Request(NamedTuple):
    """What is to be saved, and where."""

    path: Path
    model: nn.Module | None
    optimizer: FullValues | None
    extra: Any
    keep: int | None


class Prepared(NamedTuple):
    """A save of which nothing is written yet, but that can be."""

    request: Request
    ranks: Ranks
    unfinished: Unfinished | None  # on the first rank
    tensors: Tensors
    plan: WritePlan
    facts: Mapping[str, Any]

    def value(self, item: WriteItem) -> Tensor:
        """What this rank has now of a box."""
        return self.tensors[item.index.fqn].__get_tensor_shard__(item.index)


@torch.no_grad()
def save(
    path: str | Path,
    model: nn.Module | None = None,
    optimizer: FullValues | None = None,
    *,
    extra: Any = None,
    keep: int | None = None,
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

    Raises:
        CheckpointError: On all ranks, with nothing left behind: training can go on.
    """
    finish_background()
    request = Request(Path(path), model, optimizer, extra, keep)
    prepared = prepare(request, all_ranks())
    write(prepared, prepared.value)
    return request.path


def prepare(request: Request, ranks: Ranks, before: WritePlan | None = None) -> Prepared:
    """Everything that can go wrong before something is written. Collective.

    `before` is the plan of an earlier save, which holds if no rank has anything else now.
    """
    unfinished: Unfinished | None = None

    def check() -> tuple[tuple[Tensors, dict[str, Any], DefaultSavePlanner], bool]:
        nonlocal unfinished
        if request.keep is not None and request.keep < 1:
            raise CheckpointError(f"keep must be at least 1, got {request.keep}")
        _check_json("extra", request.extra)
        tensors = tensors_of(request.model, request.optimizer)
        planner = plan_locally(tensors)
        facts = _facts(request, ranks.size)
        if ranks.rank == 0:
            unfinished = Unfinished(request.path)
        unchanged = before is not None and before.held == planner.plan.items
        return (tensors, facts, planner), unchanged

    try:
        (tensors, facts, planner), unchanged = ranks.agreed(check)
        if unchanged and before is not None:
            plan = before
        else:
            plan = plan_together(planner, _owners(request.optimizer, ranks.size), ranks)
    except BaseException as error:
        give_up(unfinished, ranks, error)
        raise
    return Prepared(request, ranks, unfinished, tensors, plan, facts)


def write(prepared: Prepared, values: Values) -> None:
    """Write the files and move them to their place. Collective, on the group it was prepared on."""
    request, ranks, unfinished = prepared.request, prepared.ranks, prepared.unfinished

    def write_mine() -> dict[Any, Place]:
        try:
            return write_boxes(partial_of(request.path), ranks.rank, prepared.plan.items, values)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{error.filename} is not there: do all ranks see the same disk?"
            ) from None

    def finish() -> None:
        if unfinished is not None:
            places = {index: place for of_rank in everyones for index, place in of_rank.items()}
            write_index(unfinished.folder, prepared.plan.metadata, places, prepared.facts)
            unfinished.commit(request.keep)

    try:
        mine = ranks.everywhere(write_mine)
        everyones = ranks.to_first(mine)
        ranks.everywhere(finish)
    except BaseException as error:
        give_up(unfinished, ranks, error)
        raise


def give_up(unfinished: Unfinished | None, ranks: Ranks, error: BaseException) -> None:
    """Leave nothing behind; what all ranks raise, they raise when that is done."""
    if unfinished is not None:
        unfinished.abandon()
    if isinstance(error, CheckpointError):
        ranks.all_of(None)


def _facts(request: Request, ranks: int) -> dict[str, Any]:
    opt = request.optimizer
    return {
        "samestep": __version__,
        "torch": torch.__version__,
        "world_size": ranks,
        "fingerprint": "" if opt is None else opt.fingerprint(),
        "layout": [] if opt is None else opt.layout_lines(),
        "groups": [] if opt is None else group_facts(opt),
        "extra": request.extra,
    }


def _owners(opt: FullValues | None, ranks: int) -> Owners:
    return {} if opt is None else {n: m for n, m in opt.owners().items() if len(m) < ranks}


def _check_json(what: str, value: Any) -> None:
    """Raise unless JSON gives it back, but for tuples."""
    try:
        json.dumps(value, allow_nan=False)
        _refuse_other_keys(value)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{what} must be what JSON can have: {error}") from None


def _refuse_other_keys(value: Any) -> None:
    """JSON would make texts of numbers, and `MultiStepLR` would not find its milestones."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} of a dict is no text; store a list of pairs")
            _refuse_other_keys(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            _refuse_other_keys(entry)
