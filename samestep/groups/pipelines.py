"""Finds torch.distributed.pipelining stages that hold an optimizer's parameters.

A stage leaves no mark on its parameters, and a schedule none on its stages, so objects are looked
through, in a process that has imported that module and at few moments: when an optimizer is built,
in its first step, and before a warning of edited gradients. Attributes with an underscore are
torch's; there is no public way to ask a schedule for them.
"""

import gc
import sys
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import Tensor

WAY_OF_STAGES = (
    "For stages of a pipeline pass process_group=, the ranks that hold this stage "
    "(even if it is only this rank), and stage_group=, one rank of each stage (the "
    "group= of a PipelineStage)"
)
_without_instances: dict[type, int] = {}  # how many references classes had
_PIPELINING = "torch.distributed.pipelining"


class PipelineStages:
    """Stages and schedules of this process that hold some of the parameters."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        wanted = set(params)
        found = _instances() if _PIPELINING in sys.modules and wanted else ()
        self._schedules = [one for one in found if hasattr(one, "_n_microbatches")]
        self.stages = [one for one in found if not wanted.isdisjoint(_params(one))]

    def beside(self) -> Any:
        """A stage whose neighbours are on other ranks; None if there is none."""
        return next((s for s in self.stages if s.num_stages > 1 and s.group_size > 1), None)

    def silent(self) -> set[Tensor]:
        """Parameters whose schedule does not mark the last backward of a step."""
        stages = [s for s in self.stages if not getattr(s, "announces_last_backward", False)]
        return {param for stage in stages for param in _params(stage)}

    def edits(self) -> dict[Tensor, int | None]:
        """Writes of a schedule to a gradient after its last backward hook.

        Once if they divide it by the number of micro-batches. None: nobody knows, where backward of
        weights comes by itself (ZeroBubble), which calls no hooks.
        """
        found: dict[Tensor, int | None] = {}
        for schedule in self._schedules:
            times: int | None = 0
            if schedule.scale_grads and schedule._n_microbatches > 1:
                times = 1
            if _parts_backward(schedule):
                times = None
            for stage in getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)]:
                if stage in self.stages:
                    found.update(dict.fromkeys(_params(stage), times))
        return found


def _instances() -> list[Any]:
    """All existing stages and schedules.

    To look through a million objects takes 0.1 s. An instance holds a reference to its class: while
    there are as many as when no instance was found, there is none.
    """
    from torch.distributed.pipelining.schedules import _PipelineSchedule
    from torch.distributed.pipelining.stage import _PipelineStageBase

    kinds = with_subclasses(_PipelineStageBase) | with_subclasses(_PipelineSchedule)
    references = {kind: sys.getrefcount(kind) for kind in kinds}
    if references == _without_instances:
        return []
    found = instances_of(kinds)
    _without_instances.clear()
    if not found:
        _without_instances.update(references)
    return found


def instances_of(kinds: Collection[type]) -> list[Any]:
    """All existing objects of exactly these classes.

    `gc.get_objects` would hold every object for a moment, and a thread that builds a tuple from an
    iterator fails with a SystemError while somebody else holds that tuple.
    """
    return [one for one in gc.get_referrers(*kinds) if type(one) in kinds]


def with_subclasses(kind: type) -> set[type]:
    """A class and all its subclasses."""
    return {kind}.union(*map(with_subclasses, kind.__subclasses__()))


def _params(stage: Any) -> Iterator[Tensor]:
    module = getattr(stage, "submod", None)  # none: its construction has failed
    return iter(()) if module is None else module.parameters()


def _parts_backward(schedule: Any) -> bool:
    """Whether the schedule splits backward into inputs and weights."""
    order = schedule.pipeline_order or {}  # of GPipe there is none
    actions = [action for of_rank in order.values() for action in of_rank if action is not None]
    actions += [part for action in actions for part in getattr(action, "sub_actions", None) or ()]
    return any(action.computation_type.value in ("I", "W") for action in actions)
