"""The interface of placements, which the step and `explain()` use."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from samestep.comm.groups import RankGroup
from samestep.comm.presence import Call, Intent, RankFailure
from samestep.groups.group_checks import same_objects
from samestep.groups.param_groups import Group
from samestep.layout.boxes import local_of
from samestep.plan.schedule import Fetch, OfBucket, OfWindow, PlacementShape, Stage, WindowId
from samestep.plan.sharding import ParamSpec
from samestep.rules.state import State
from samestep.shards.values import ShardValues
from samestep.shards.windows import OffloadSlice, OffloadUnit, Windows
from samestep.update.offload import Staging
from samestep.update.plain import GroupMaths, Operand

if TYPE_CHECKING:
    from samestep.shards.planner import Request

Arrived = Callable[[WindowId], list[tuple[OffloadSlice, State]]]


class PlanMembers(NamedTuple):
    """Parameters of a plan, in the order of forward.

    lines: what all ranks must have alike, as text.
    places: how late forward uses each; -1: nobody knows.
    problem: why they cannot be shared, where all ranks have these lines.
    """

    params: tuple[Tensor, ...]
    specs: tuple[ParamSpec, ...]
    lines: list[str]
    places: tuple[int, ...]
    problem: str | None = None


class Placement:
    """Some parameters of an optimizer in buckets; defaults do nothing, as on one process.

    A kind whose `shape.agrees` defines at least `plans`, `make_state`, `begin_step`, `agree`,
    `meet`, `run`, `operands`, `present`, `lines` and `abandon_step`, and sets the attributes that
    have no default, and `held_by`. `run` gets the operations that its shape asks for: `Reduce` and
    `Average`, `Gather` and `Place`, or those about chunks. `tests/inside/shards/test_kinds.py` has
    a small one.

    values: state and whole values, for whoever asks between steps.
    params: those that are here, where there is a plan for them.
    group_indices: of the optimizer's groups, those that they are in.
    holds_parts: a rank has parts of parameters that others have the rest of, and their state is
        laid out as they are.
    """

    holds_parts = False
    values: ShardValues
    params: Sequence[Tensor]
    group_indices: tuple[int, ...]
    shape: PlacementShape
    device: torch.device
    group: RankGroup  # the ranks that hold the same of it, or of parts those that hold them all
    # All ranks that have these parameters, for state dicts and what all agree on; None: this
    # process alone. Set it wherever there are other ranks.
    held_by: RankGroup | None = None
    sums_over: RankGroup | None = (
        None  # where sums of it are taken; None: over the optimizer's ranks
    )
    compares_copies = False  # which gradients ranks with copies have, when it agrees on presence
    problem: RankFailure | None = None  # what keeps this rank from taking the step
    intent: Intent | None = None  # what the step is about to do, as ranks compare it
    windows: Windows | None = None  # of state that stays on the host
    staging: Staging | None = None  # where it comes to, in a step
    _windows_of: Sequence[Tensor] = ()

    @classmethod
    def plans(cls, request: "Request") -> "Sequence[Placement]":
        """The placements of a kind's parameters; none in one process. Collective."""
        raise NotImplementedError

    def activate(self) -> None:
        """Start taking part, after plans were agreed on and state exists."""

    def make_state(self, groups: Sequence[Group], master_weights: bool) -> dict[Tensor, State]:
        """Create the state of this rank's shards."""
        raise NotImplementedError

    def begin_step(self, state: Mapping[Tensor, State], problem: RankFailure | None) -> None:
        """Begin a step with this state; no more gradients arrive."""

    def run(self, operation: OfBucket, maths: GroupMaths) -> None:
        """Run an operation of the schedule on a bucket or chunk."""

    def travel(self, operation: OfWindow) -> None:
        """Start copying a window of state to or from the device."""
        assert self.windows is not None
        assert self.staging is not None
        if isinstance(operation, Fetch):
            self.windows.fetch(operation, self.staging, self.may_be_present)
        else:
            self.staging.give_back(operation.window)

    def may_be_present(self, about: Any) -> bool:
        """Whether a unit of state may have a gradient, as far as the host knows."""
        return True

    def meet(self, call: Call, problem: RankFailure | None) -> None:
        """Raise on all ranks if any has a problem, or makes another call than this one.

        Called where `shape.agrees`: `PresenceAgreement.meet` does it.
        """
        raise NotImplementedError

    def agree(self, problem: RankFailure | None) -> None:
        """Find out what is present anywhere; raises on all ranks if any has a problem.

        Called where `shape.agrees`: `PresenceAgreement.agree` does it, given `intent`, and so
        compares hyperparameters too.
        """
        raise NotImplementedError

    def operands(
        self, number: int, window: WindowId | None = None
    ) -> Iterable[tuple[int, Operand]]:
        """What this rank updates in a bucket or window, with groups.

        Of state that stays on the host only those of a window can be updated.
        """
        raise NotImplementedError

    def _keep_windows(
        self,
        state: Iterable[State],
        make: Callable[[], Mapping[tuple[Stage, int], list[OffloadUnit]]],
    ) -> None:
        """Create windows of offloaded state, again if tensors were replaced."""
        tensors = [tensor for own in state for tensor in own.values()]
        if self.windows and same_objects(tensors, self._windows_of):
            return
        self._windows_of, self.windows = tensors, Windows(make())
        self.shape = self.shape._replace(
            windows=self.windows.sizes(len(self.shape.bucket_sizes)),
            chunk_windows=self.windows.chunk_sizes(self.shape.chunks),
        )

    def chunk_arrived(self, operation: OfBucket) -> Arrived | None:
        """A function that waits for the state of a chunk; None without offload."""
        sizes = self.shape.chunk_windows
        return self.arrived if sizes and sizes[operation.bucket.bucket] else None

    def arrived(self, window: WindowId) -> list[tuple[OffloadSlice, State]]:
        """Wait for a window of state."""
        assert self.windows is not None
        assert self.staging is not None
        return self.windows.arrived(window, self.staging)

    def gradients(self) -> Iterable[Tensor]:
        """Averaged gradients that this rank counts in norms."""
        return (grad for _, grad in self.grouped_gradients())

    def grouped_gradients(self) -> Iterator[tuple[int, Tensor]]:
        """Averaged gradients with the index of their group."""
        for number in range(len(self.shape.bucket_sizes)):
            for index, operand in self.operands(number):
                if operand.counted:
                    yield index, operand.grad

    def drop_gradients(self, number: int) -> None:
        """Free the averaged gradients of an updated bucket."""

    def begin_look(self) -> None:
        """Average gradients for inspection before the step."""

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply the gradients of the coming step."""
        for param in self.params:
            if param.grad is not None:
                local_of(param.grad).mul_(factor.to(param.grad))

    def end_look(self) -> None:
        """End the inspection, as if backward had reduced the gradients."""

    def present(self) -> Iterable[tuple[int, bool | Tensor]]:
        """Group of each parameter, and whether it was present in the last step."""
        raise NotImplementedError

    def finish_step(self) -> None:
        """End a step after all updates."""

    def abandon_step(self) -> None:
        """Drop the gradients of a failed step."""

    # --- gradients of several rounds, before the step ------------------------------------------

    def pause(self, paused: bool) -> None:
        """Whether arriving gradients are only accumulated."""

    def end_round(self) -> None:
        """Note that no more gradients arrive before the launches."""

    def launch(self, number: int) -> None:
        """Start the reduction of a bucket, unless backward has."""

    def keep_sums(self) -> None:
        """Wait for reductions, keep this rank's part, and begin a new round."""

    def drop_reduced(self) -> None:
        """Drop reductions of gradients that are about to be zeroed."""

    # --- agreement with other ranks -----------------------------------------------------------

    def lines(self) -> list[str]:
        """The plan as text, equal on every rank."""
        return []

    def lines_here(self) -> list[str]:
        """The plan with this rank's memory, equal on the ranks of `group`."""
        return self.lines()

    def averaged_by(self, param: Tensor) -> str:
        """Who averages the gradients of a parameter's copies, as text."""
        return "-"

    def updated_by(self, param: Tensor) -> str:
        """Which ranks update a parameter, as text."""
        return "-"

    def mend_replicas(self) -> None:
        """Compare copies between ranks; copy rank 0's where they differ, or raise."""

    def expect_edits(self) -> None:
        """Allow writes to gradients after backward, as pipeline schedules make."""

    def holds(self, param: Tensor) -> bool:
        """Whether the placement has a parameter."""
        return self.values.holds(param)
