"""Which rank writes which boxes: every element once, in equal shares. Planned by torch."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from samestep.checkpoint.errors import CheckpointError
from samestep.checkpoint.ranks import Ranks

Owners = Mapping[str, tuple[int, ...]]  # per parameter the ranks that have it, where not all do


class WritePlan(NamedTuple):
    """What this rank writes; on the first rank also what all of them write."""

    held: list[WriteItem]  # before anything was left to others
    items: list[WriteItem]
    metadata: Metadata


def plan_locally(state_dict: Mapping[str, Any], is_nested: bool) -> DefaultSavePlanner:
    """What this rank could write: all that it holds."""
    planner = DefaultSavePlanner(flatten_state_dict=is_nested)
    planner.set_up_planner(dict(state_dict))
    planner.create_local_plan()
    return planner


def plan_alone(planner: DefaultSavePlanner, owners: Owners, ranks: Ranks) -> WritePlan:
    """All that this rank holds, whoever else has it too. Collective."""
    _refuse_different_things(ranks.all_of(owners))
    items = planner.plan.items
    tensors = {
        name: TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.shape, [])
        for name, tensor in planner.state_dict.items()
    }
    for item in items:
        assert item.tensor_data is not None
        tensors[item.index.fqn].chunks.append(item.tensor_data.chunk)
    return WritePlan(items, items, Metadata(dict(tensors)))


def plan_together(planner: DefaultSavePlanner, owners: Owners, ranks: Ranks) -> WritePlan:
    """What each rank writes of that. Collective."""
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
    """Groups of ranks that have parameters of their own must have names of their own for them."""
    known: dict[str, tuple[int, ...]] = {}
    for of_rank in owners:
        for name, members in of_rank.items():
            if known.setdefault(name, members) != members:
                raise CheckpointError(
                    f"parameter {name!r} is one on ranks {list(known[name])} and another on ranks "
                    f"{list(members)}, and one of them would be lost: give them different names, "
                    "or make them one DTensor"
                )
