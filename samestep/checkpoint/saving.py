"""`samestep.save`, and the parts that it has in common with `samestep.async_save`."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from samestep.checkpoint.background import finish_background
from samestep.checkpoint.errors import CheckpointError
from samestep.checkpoint.folder import Unfinished, partial_of
from samestep.checkpoint.formats import WRITTEN_AS, FormatName, format_named
from samestep.checkpoint.logical import tensors_of
from samestep.checkpoint.options import GroupFacts, group_facts, of_all_stages
from samestep.checkpoint.pieces import Pieces
from samestep.checkpoint.plan import Owners, WritePlan, plan_locally
from samestep.checkpoint.ranks import Ranks, all_ranks
from samestep.checkpoint.storage import Values
from samestep.optimizer.full_values import FullValues
from samestep.version import __version__


class Request(NamedTuple):
    """What is to be saved, and where."""

    path: Path
    model: nn.Module | None
    optimizer: FullValues | None
    extra: Any
    keep: int | None
    format: str


class Seen(NamedTuple):
    """What a rank has to save."""

    planner: DefaultSavePlanner | None  # None: there is a plan
    state_dict: Mapping[str, Any]  # Pieces, and in some formats other things
    held: list[WriteItem]
    facts: Mapping[str, Any]
    groups: Sequence[GroupFacts] = ()  # those that this rank tells the first of


class Prepared(NamedTuple):
    """A save of which nothing is written yet, but that can be."""

    request: Request
    ranks: Ranks
    unfinished: Unfinished | None  # on the first rank
    seen: Seen
    plan: WritePlan


def value_in(state_dict: Mapping[str, Any], item: WriteItem) -> Tensor:
    """What a rank has now of a box."""
    tensor: Pieces = state_dict[item.index.fqn]
    return tensor.__get_tensor_shard__(item.index)


def objects_in(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """What is no tensor."""
    return {key: value for key, value in state_dict.items() if not isinstance(value, Pieces)}


@torch.no_grad()
def save(
    path: str | Path,
    model: nn.Module | None = None,
    optimizer: FullValues | None = None,
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

    Raises:
        CheckpointError: On all ranks, with nothing left behind: training can go on.
    """
    finish_background()
    request = Request(Path(path), model, optimizer, extra, keep, format)
    ranks = all_ranks(f"save of {path}")
    prepared = prepare(request, ranks, lambda: look(request, ranks.size))
    write(prepared, partial(value_in, prepared.seen.state_dict))
    return request.path


def look(request: Request, ranks: int) -> Seen:
    """What this rank has to save, as views; raises if it cannot be saved."""
    if request.keep is not None and request.keep < 1:
        raise CheckpointError(f"keep must be at least 1, got {request.keep}")
    _check_json("extra", request.extra)
    wanted = format_named(request.format)
    if wanted.is_nested and request.optimizer is not None and request.optimizer.is_stage:
        raise CheckpointError(
            f"format {request.format!r} has the options of all groups where torch looks for them, "
            "and ranks of a pipeline know those of their stage: save as fully_reshardable, which "
            f"`samestep convert PATH NEW --to {request.format}` then converts"
        )
    facts = _facts(request, ranks)
    state_dict = wanted.state_dict(tensors_of(request.model, request.optimizer), facts)
    planner = plan_locally(state_dict, wanted.is_nested)
    told = facts["groups"] if request.optimizer and request.optimizer.leads_stage else []
    return Seen(planner, planner.state_dict, planner.plan.items, facts, told)


def prepare(
    request: Request, ranks: Ranks, see: Callable[[], Seen], before: WritePlan | None = None
) -> Prepared:
    """Everything that can go wrong before something is written. Collective.

    `before` is the plan of an earlier save, if what this rank holds is still the same.
    """
    unfinished: Unfinished | None = None

    def check() -> Seen:
        nonlocal unfinished
        seen = see()
        if ranks.rank == 0:
            unfinished = Unfinished(request.path)
        return seen

    try:
        seen, as_before = ranks.agreed(lambda: (check(), before is not None))
        if len(set(as_before)) > 1:
            raise CheckpointError(
                "what is to be saved has changed on some ranks and not on others: save once more"
            )
        if before is not None:
            plan = before
        else:
            assert seen.planner is not None
            owners = _owners(request.optimizer, ranks.size)
            plan = format_named(request.format).plan(seen.planner, owners, ranks)
    except BaseException as error:
        give_up(unfinished, ranks, error)
        raise
    return Prepared(request, ranks, unfinished, seen, plan)


def write(prepared: Prepared, values: Values) -> None:
    """Write the files and move them to their place. Collective, on the group it was prepared on."""
    request, ranks, unfinished = prepared.request, prepared.ranks, prepared.unfinished

    chosen, objects = format_named(request.format), objects_in(prepared.seen.state_dict)

    def write_mine() -> Any:
        try:
            folder = partial_of(request.path)
            return chosen.write(folder, ranks.rank, prepared.plan, values, objects)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{error.filename} is not there: do all ranks see the same disk?"
            ) from None

    def finish() -> None:
        if unfinished is not None:
            groups = of_all_stages(
                [prepared.seen.facts["groups"], *(told for _, told in everyones)]
            )
            facts = {**prepared.seen.facts, "groups": groups}
            mine = [files for files, _ in everyones]
            chosen.finish(unfinished.folder, prepared.plan.metadata, mine, facts)
            unfinished.commit(request.keep)

    try:
        mine = ranks.everywhere(write_mine)
        everyones = ranks.to_first((mine, prepared.seen.groups))
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
        WRITTEN_AS: request.format,
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
