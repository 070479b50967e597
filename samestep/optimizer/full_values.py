"""Whole parameters, gradients and state, wherever their pieces are: for looking and for editing."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from samestep.comm.collectives import from_first
from samestep.groups.param_groups import parameter_names
from samestep.layout.held_state import HeldState
from samestep.optimizer.group_optimizer import GroupOptimizer
from samestep.placements.placement import Placement
from samestep.placements.registry import mesh_of
from samestep.rules.state import MASTER, State, math_dtype


class FullValues(GroupOptimizer):
    """Values by the parameter's name, as one process would have them.

    All of these are collective: every rank calls them, in the same order, between backward and
    step or between steps. Each rank gets copies of its own. A setter takes the value of the first
    rank, whatever the others give.
    """

    @torch.no_grad()
    def whole_state(self) -> dict[str, State]:
        """The state of every parameter by name, as one process would keep it, on every rank.

        Put together from the pieces of all ranks; what every rank has does not travel and is this
        rank's own. For a moment about three times the whole state is in memory: for checks and
        small models, not for saving large ones.
        """
        self.wait_for_parameters()
        self._make_missing_state()
        placements = self._all_placements()
        # All that travels is on its way before anything can raise.
        gathers = [p.gather_state(self.state, self.param_groups) for p in placements]
        by_param = {param: state for finish in gathers for param, state in finish().items()}
        return {name: by_param[param] for name, param in self._by_name().items()}

    def held_state(self) -> Iterator[tuple[str, HeldState]]:
        """What this rank holds of every state tensor, as boxes of what one process has.

        Views, by the parameter's name, for whoever saves and loads. Every rank tells of every
        parameter. Not collective.
        """
        self._make_missing_state()
        names = {param: name for name, param in self._by_name().items()}
        for placement in self._all_placements():
            for part in placement.held_state(self.state, self.param_groups):
                yield names[part.param], part

    def owners(self) -> dict[str, tuple[int, ...]]:
        """By name the ranks that have a plain parameter; ranks beyond have others, or none."""
        if self._outer_group is not None:  # what others have is a copy
            return {}
        return {
            name: held_by.members
            for name, param in self._by_name().items()
            if mesh_of(param) is None and (held_by := self._holder(param).held_by) is not None
        }

    @property
    def is_stage(self) -> bool:
        """Whether ranks of other pipeline stages have parameters that are not here."""
        return self._stage_group is not None

    @property
    def leads_stage(self) -> bool:
        """Whether this rank is the first of its pipeline stage; False without stages."""
        return self.is_stage and (self._rank_group is None or self._rank_group.rank == 0)

    def layout_lines(self) -> list[str]:
        """How work and state are laid out, as text."""
        return self._distribution.lines()

    def _make_missing_state(self) -> None:
        if self._rank_group is None:
            for group in self.param_groups:
                for param in group["params"]:
                    self._keep_state_beside(param, group)

    def full_state(self, name: str, key: str) -> Tensor:
        """One state tensor, such as "exp_avg" or "momentum_buffer"."""
        return self._state_of(name, key)[key]

    @torch.no_grad()
    def set_full_state(self, name: str, key: str, value: Tensor) -> None:
        """Replace one state tensor."""
        whole = self._state_of(name, key)
        whole[key].copy_(self._checked(f"{key} of {name}", value, whole[key].shape))
        self._from_first(name, key, whole[key])
        self._put_state(name, key, whole)

    @torch.no_grad()
    def full_parameter(self, name: str) -> Tensor:
        """A parameter in 32 bits or more: its master copy where there is one."""
        self.wait_for_parameters()
        param = self._param(name)
        if MASTER in self.state[param]:
            return self.full_state(name, MASTER)
        return self._holder(param).whole_value(param).to(math_dtype(param), copy=True)

    @torch.no_grad()
    def set_full_parameter(self, name: str, value: Tensor) -> None:
        """Replace a parameter, and its master copy with it."""
        self.wait_for_parameters()
        param = self._param(name)
        wide = self._checked(name, value, param.shape).to(param.device, math_dtype(param))
        wide = wide.contiguous().clone()
        self._from_first(name, "value", wide)
        self._holder(param).put_value(param, wide)
        if MASTER in self.state[param]:
            whole = self._state_of(name, MASTER)
            whole[MASTER].copy_(wide)
            self._put_state(name, MASTER, whole)

    @torch.no_grad()
    def full_gradient(self, name: str) -> Tensor | None:
        """The mean gradient over ranks, before clipping; None if no rank has one.

        Between backward and step. It calls `synchronize()`: gradients that are averaged here are
        reduced now, are gone from `.grad`, and the step reduces what may come after.
        """
        param = self._param(name)
        self.synchronize()
        return self._holder(param).whole_gradient(param)

    @torch.no_grad()
    def set_full_gradient(self, name: str, value: Tensor) -> None:
        """Replace the mean gradient over ranks; the parameter is then present.

        As `full_gradient`. What the step uses is value * ranks / ranks, rounded.
        """
        param = self._param(name)
        value = self._checked(f"gradient of {name}", value, param.shape)
        value = value.to(param.device, math_dtype(param)).contiguous().clone()
        self._from_first(name, "gradient", value)
        self.synchronize()
        self._holder(param).put_gradient(param, value)

    @torch.no_grad()
    def refresh_master_weights(self) -> None:
        """Take the parameters' present values for their master copies, on every rank.

        After weights were changed from outside (loaded, clipped, averaged), where
        `master_weights` is on. Without this call a step takes an edited element for what it is,
        unless the edit is smaller than the parameter's rounding.
        """
        self.wait_for_parameters()
        for placement in self._all_placements():
            placement.refresh_masters(self.state)

    def synchronize(self) -> None:
        """See `RuleOptimizer`."""
        raise NotImplementedError

    # --- names ---------------------------------------------------------------------------

    def _by_name(self) -> dict[str, Tensor]:
        return {
            name: param
            for index, group in enumerate(self.param_groups)
            for name, param in zip(parameter_names(group, index), group["params"], strict=True)
        }

    def _param(self, name: str) -> Tensor:
        known = self._by_name()
        if name not in known:
            some = ", ".join(list(known)[:6])
            raise KeyError(f"there is no parameter {name!r}; there are {some}, ...")
        return known[name]

    def _holder(self, param: Tensor) -> Placement:
        return next(p for p in self._all_placements() if p.holds(param))

    def _state_of(self, name: str, key: str) -> State:
        """The whole state of one parameter, which has `key`."""
        param = self._param(name)
        if key not in self.state[param]:
            raise KeyError(f"{name!r} has no state {key!r}; it has {sorted(self.state[param])}")
        gather = self._holder(param).gather_state(self.state, self.param_groups, only=param)
        return gather()[param]

    def _put_state(self, name: str, key: str, whole: Mapping[str, Tensor]) -> None:
        param = self._param(name)
        self._holder(param).put_state(self.state, self.param_groups, param, key, whole)

    def _from_first(self, name: str, what: str, value: Tensor) -> None:
        ranks = self._holder(self._param(name)).held_by
        if ranks is not None:
            from_first(f"{what} of {name}", value, ranks).wait()

    def _checked(self, what: str, value: Tensor, shape: torch.Size) -> Tensor:
        if not isinstance(value, Tensor) or value.shape != shape:
            found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{what} must be a tensor of shape {tuple(shape)}, got {found}")
        return value.detach()
