"""Ranks that save or load together: their communication, and who writes which shard.

They tell small things, on a group of any backend. Every element is written once, in equal shares,
as torch plans it.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from samestep.checkpoint.storage import CheckpointError, WritePlan, in_boxes
from samestep.comm.diagnosis.flight import attempt
from samestep.comm.groups import RankGroup, rank_group
from samestep.comm.messages import gather_everywhere, gather_on_first, scatter_from_first

T = TypeVar("T")
Answer = TypeVar("Answer")
Owners = Mapping[str, tuple[int, ...]]  # per parameter the ranks that have it, where not all do


class Ranks(NamedTuple):
    """The ranks that save or load together; an error of one names it on the others."""

    group: RankGroup | None = None  # None: this process alone
    task: str = ""  # what they do, for the error

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size

    def everywhere(self, act: Callable[[], T]) -> T:
        """Call a function, and raise on all ranks if it fails on one."""
        return self.agreed(lambda: (act(), True))[0]

    def agreed(self, act: Callable[[], tuple[T, Answer]]) -> tuple[T, list[Answer]]:
        """Call `together`, and return the answers of all ranks with its result."""
        problem: Exception | None = None
        answer: Any = None  # of whoever has failed
        try:
            result, answer = act()
        except Exception as error:
            problem = error
        answers = self.all_of(("" if problem is None else _words(problem), answer))
        if problem is not None:
            if isinstance(problem, CheckpointError):
                raise problem
            raise CheckpointError(_words(problem)) from problem
        for rank, (text, _) in enumerate(answers):
            if text:
                raise CheckpointError(f"rank {rank}: {text}")
        return result, [answer for _, answer in answers]

    def all_of(self, value: T) -> list[T]:
        """Gather a small object of every rank on every rank."""
        return self._told([value], partial(gather_everywhere, value))

    def to_first(self, value: T) -> list[T]:
        """Gather an object of every rank on rank 0; an empty list elsewhere."""
        return self._told([value], lambda group: gather_on_first(value, group) or [])

    def from_first(self, values: list[T]) -> T:
        """Receive the value that rank 0 has for this rank."""
        return self._told(values[0], partial(scatter_from_first, values))

    def _told(self, alone: T, tell: Callable[[dist.ProcessGroup], T]) -> T:
        """Exchange objects between ranks, or return `alone` on one process."""
        group = self.group
        return alone if group is None else attempt(self.task, group, lambda: tell(group.handle))


def all_ranks(task: str) -> Ranks:
    return Ranks(rank_group(), task)


def _words(error: Exception) -> str:
    if isinstance(error, OSError):
        where = "" if error.filename is None else f"{error.filename}: "
        return f"{where}{error.strerror or error}"
    return str(error) or type(error).__name__


def plan_locally(state_dict: Mapping[str, Any], is_nested: bool) -> DefaultSavePlanner:
    """All boxes that this rank holds and could write."""
    planner = DefaultSavePlanner(flatten_state_dict=is_nested)
    planner.set_up_planner(dict(state_dict))
    planner.create_local_plan()
    return planner


def plan_alone(planner: DefaultSavePlanner, owners: Owners, ranks: Ranks) -> WritePlan:
    """All boxes that this rank holds, including copies on other ranks. Collective."""
    _refuse_different_things(ranks.all_of(owners))
    items = planner.plan.items
    tensors = {  # also those of which this rank has no box
        name: in_boxes(tensor.shape, tensor.dtype, [])
        for name, tensor in planner.state_dict.items()
    }
    for item in items:
        assert item.tensor_data is not None
        tensors[item.index.fqn].chunks.append(item.tensor_data.chunk)
    return WritePlan(items, items, Metadata(dict(tensors)))


def plan_together(planner: DefaultSavePlanner, owners: Owners, ranks: Ranks) -> WritePlan:
    """The boxes that each rank writes, each box once. Collective."""
    asked = ranks.to_first((planner.plan, dict(owners)))
    problem, answers = "", [(SavePlan([]), Metadata({}))] * ranks.size
    if ranks.rank == 0:
        try:
            _refuse_different_things([theirs for _, theirs in asked])
            plans, metadata = planner.create_global_plan([plan for plan, _ in asked])
            answers = [(plan, metadata if not r else Metadata({})) for r, plan in enumerate(plans)]
        except (CheckpointError, ValueError) as error:
            problem = str(error)
    problem, (plan, metadata) = ranks.from_first([(problem, answer) for answer in answers])
    if problem:
        raise CheckpointError(problem)
    return WritePlan(planner.plan.items, plan.items, metadata)


def _refuse_different_things(owners: list[Owners]) -> None:
    """Raise if groups of ranks hold different parameters under one name."""
    known: dict[str, tuple[int, ...]] = {}
    for of_rank in owners:
        for name, members in of_rank.items():
            if known.setdefault(name, members) != members:
                raise CheckpointError(
                    f"parameter {name!r} is one tensor on ranks {list(known[name])} and "
                    f"another on ranks {list(members)}, and one of them would be lost: "
                    "give them different names, or make them one DTensor"
                )
