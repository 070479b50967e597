"""State dicts, whole or of one rank.

Where ranks share the state, one of them cannot give all of it. The words for that are those of
torch's ZeroRedundancyOptimizer, which trainers know: all ranks call `consolidate_state_dict()`, and
`state_dict()` is then whole on one of them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samestep.groups.param_groups import Group, rule_of
from samestep.layout.blocks import Block
from samestep.layout.boxes import mesh_of
from samestep.optimizer.full_values import FullValues
from samestep.optimizer.loading import (
    GATHERED_ON,
    PART,
    StateDict,
    check_part,
    load_state,
    shapes_of_whole_state,
    stored_of,
)
from samestep.optimizer.optimizer_plan import OptimizerPlan, has_state
from samestep.rules.rule import owned_state
from samestep.rules.state import State, initial_state

AT_ONCE = 1 << 26  # elements of parameters whose state is gathered together


class LoadedState(NamedTuple):
    """State as given to load_state_dict.

    part: which part of the whole state it is, to be told in it; None: all of it.
    """

    state: defaultdict[Tensor, State]
    part: dict[str, Any] | None = None


class SavedState:
    """The state dicts of one optimizer; groups and state are handed in.

    as_built: there was no step yet, and nothing was loaded.
    is_known: it is as built, or was gathered since it has changed.
    """

    def __init__(self, plan: OptimizerPlan, *, as_built: bool = True) -> None:
        self._plan = plan
        self._consolidated: LoadedState | None = None  # good until the next change of the state
        self._as_built = self.is_known = as_built

    def changes(self) -> None:
        """Drop gathered state, which is out of date."""
        self._consolidated, self._as_built, self.is_known = None, False, False

    def drop(self) -> None:
        """Drop everything for other parameters."""
        self._consolidated = None

    def given(self, groups: Sequence[Group], state: defaultdict[Tensor, State]) -> LoadedState:
        """This rank's state for `state_dict()`."""
        plan = self._plan
        part = plan.part()
        if part is None:
            whole: dict[Tensor, State] = {}
            for shared in plan.shared:
                whole |= shared.values.kept_state(state)
            return LoadedState(defaultdict(dict, {**state, **whole}) if whole else state)
        if self._consolidated is not None:
            return self._consolidated
        owned = _rules_of_owners(groups)
        if owned and (plan.sharded or plan.distribution.state_dict_form != "part"):
            raise _refuse_owned(part, owned)  # torch's checkpoints would take one rank's for all
        if plan.sharded:
            raise RuntimeError(
                "plain parameters beside DTensors keep only a part of their state on "
                "each rank, which torch's state dicts of DTensors would lose: build "
                'the optimizer with sharding="none", which only affects the plain '
                "ones, or use samestep.save"
            )
        if plan.distribution.state_dict_form == "part":
            return LoadedState(state, part)
        alike = plan.are_alike()
        if alike and self._as_built and not has_state(state):
            return LoadedState(defaultdict(dict, _as_built(groups, plan.blocks, plan.masters)))
        raise _refuse_part(part, plan.distribution.kept_by(), alike=alike)

    def consolidate(self, to: int | None, values: Callable[[], FullValues]) -> None:
        """Gather the whole state for the state dict of rank `to`, or of all. Collective."""
        ranks, part = self._plan.ranks, self._plan.part()
        if ranks is None or part is None:
            return
        if to is not None and not (type(to) is int and 0 <= to < ranks.size):
            raise ValueError(
                f"consolidate_state_dict: to must be a rank from 0 to {ranks.size - 1}, or "
                f"None, got {to!r}"
            )
        if not self._plan.are_alike():
            raise _refuse_part(part, self._plan.distribution.kept_by(), alike=False)
        keep = to is None or to == ranks.rank
        gathered = defaultdict(dict, _gathered(values(), keep=keep))
        self._consolidated = LoadedState(gathered, None if keep else {**part, GATHERED_ON: to})
        self.is_known = True

    def needs_no_plans(self, state_dict: StateDict) -> bool:
        """Whether a state dict has no state yet."""
        is_dict = isinstance(state_dict, Mapping)
        return self._plan.is_deferred and is_dict and not state_dict.get("state")

    def load(
        self,
        optimizer: torch.optim.Optimizer,
        torch_load: Callable[[StateDict], None],
        state_dict: StateDict,
        ready: Callable[[], None],
    ) -> None:
        """Check a state dict and take out of it what belongs here; `torch_load` is torch's own.

        `ready()` is called before anything changes.
        """
        plan, groups = self._plan, optimizer.param_groups
        shapes, stored = {}, {}
        if not plan.is_deferred:
            check_part(state_dict, plan.part(), alike=plan.are_alike())
            if isinstance(state_dict, Mapping) and PART not in state_dict:
                stored = stored_of(groups, plan.blocks, plan.masters)
                if plan.placed:
                    shapes = shapes_of_whole_state(groups, plan.blocks, stored)
            self.changes()
        put_whole, take_parameters = plan.put_whole, plan.refresh_masters
        load_state(
            optimizer, torch_load, state_dict, shapes, put_whole, take_parameters, stored, ready
        )
        for placement in plan.placed:
            placement.mend_replicas()


def _gathered(values: FullValues, *, keep: bool) -> dict[Tensor, State]:
    """Whole state on the host; empty on ranks that do not keep it.

    Collective. On a device there is never more of it than that of `AT_ONCE` elements, or of one
    parameter.
    """
    whole: dict[Tensor, State] = {}
    for param, state in values.states_in_turn(AT_ONCE):
        if keep:
            whole[param] = {key: tensor.to("cpu", copy=True) for key, tensor in state.items()}
    return {param: whole[param] for param in values.by_name().values() if keep}


def _as_built(
    groups: Iterable[Group], blocks: Mapping[Tensor, list[Block] | None], master_weights: bool
) -> dict[Tensor, State]:
    """Initial whole state."""
    return {
        param: initial_state(
            rule_of(group), param.detach().to("cpu"), blocks[param], group, master_weights
        )
        for group in groups
        for param in group["params"]
    }


def _rules_of_owners(groups: Iterable[Group]) -> list[str]:
    """Rules of DTensors with state only on owners of blocks."""
    return sorted(
        {
            group["rule"]
            for group in groups
            if owned_state(rule_of(group), group) and any(map(mesh_of, group["params"]))
        }
    )


def _refuse_owned(part: Mapping[str, Any], rules: Sequence[str]) -> RuntimeError:
    """Error for state that only owners of blocks have."""
    return RuntimeError(
        f"rank {part['rank']} of {part['ranks']} has state of rule {', '.join(map(repr, rules))} "
        "for the blocks alone that it owns, and whoever saves what one rank gives loses the rest: "
        "save with samestep.save(path, model, optimizer), which all ranks call; or call "
        "consolidate_state_dict() on every rank right before, which gathers it on rank 0; or build "
        'the optimizer with muon_schedule="gather", where every rank owns every block'
    )


def _refuse_part(part: Mapping[str, Any], kept: str, *, alike: bool) -> RuntimeError:
    """Error for a state dict with only this rank's part."""
    has = (
        f"rank {part['rank']} of {part['ranks']} has a part of the optimizer's state ({kept}), and "
        "whoever saves what one rank gives loses the rest: "
    )
    by_part = (
        'build the optimizer with state_dict_form="part" if every rank saves and loads a file of '
        "its own"
    )
    if not alike:
        return RuntimeError(
            f"{has}save with samestep.save(path, model, optimizer), which all ranks call, or "
            f"{by_part}"
        )
    return RuntimeError(
        f"{has}call consolidate_state_dict() on every rank right before, which gathers it on rank "
        "0 (Lightning does so itself, Hugging Face's Trainer with "
        "callbacks=[samestep.hf.SaveWhole()], accelerate after "
        "samestep.hf.save_whole(accelerator, optimizer)); or build the optimizer with "
        'sharding="none", where every rank has all of it; or save with '
        f"samestep.save(path, model, optimizer), which all ranks call; or {by_part}"
    )
