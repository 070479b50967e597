"""Whole parameters, gradients and state, wherever their pieces are: for looking and for editing."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from samestep.comm.collectives import from_first
from samestep.group_optimizer import GroupOptimizer
from samestep.param_groups import parameter_names
from samestep.replicated import ReplicatedParameters
from samestep.state import MASTER, State, math_dtype

if TYPE_CHECKING:
    from samestep.sharded import ShardedParameters


class _Sharding(NamedTuple):
    placement: "ShardedParameters"
    place: int


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
        if self._rank_group is None:
            for group in self.param_groups:
                for param in group["params"]:
                    self._keep_state_beside(param, group)
        placements = self._all_placements()
        # All that travels is on its way before anything can raise.
        gathers = [p.gather_state(self.state, self.param_groups) for p in placements]
        by_param = {param: state for finish in gathers for param, state in finish().items()}
        return {name: by_param[param] for name, param in self._by_name().items()}

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
        value, sharded = param.detach(), self._sharding(param)
        if sharded is not None:
            value = sharded.placement.whole(sharded.place, value)
        return value.to(math_dtype(param), copy=True)

    @torch.no_grad()
    def set_full_parameter(self, name: str, value: Tensor) -> None:
        """Replace a parameter, and its master copy with it."""
        self.wait_for_parameters()
        param = self._param(name)
        wide = self._checked(name, value, param.shape).to(param.device, math_dtype(param))
        wide = wide.contiguous().clone()
        self._from_first(name, "value", wide)
        sharded = self._sharding(param)
        if sharded is None:
            param.copy_(wide)
        else:
            sharded.placement.put_whole(sharded.place, param, wide)
        if MASTER in self.state[param]:
            whole = self._state_of(name, MASTER)
            whole[MASTER].copy_(wide)
            self._put_state(name, MASTER, whole)

    @torch.no_grad()
    def full_gradient(self, name: str) -> Tensor | None:
        """The mean gradient over ranks, before clipping; None if no rank has one.

        Between backward and step. On several ranks it calls `synchronize()`: gradients are reduced
        now, are gone from `.grad`, and the step reduces what may come after.
        """
        shared, sharded = self._holder(name), self._sharding(self._param(name))
        if sharded is not None:
            return sharded.placement.full_gradient(sharded.place)
        if shared is None or shared.distribution.grads == "reduced":
            grad = self._param(name).grad
            return None if grad is None else grad.detach().clone()
        self.synchronize()
        return shared.full_gradient(name)

    @torch.no_grad()
    def set_full_gradient(self, name: str, value: Tensor) -> None:
        """Replace the mean gradient over ranks; the parameter is then present.

        As `full_gradient`. What the step uses is value * ranks / ranks, rounded.
        """
        param, shared = self._param(name), self._holder(name)
        value = self._checked(f"gradient of {name}", value, param.shape)
        value = value.to(param.device, math_dtype(param)).contiguous().clone()
        self._from_first(name, "gradient", value)
        sharded = self._sharding(param)
        if sharded is not None:
            sharded.placement.set_gradient(sharded.place, value)
            return
        if shared is None or shared.distribution.grads == "reduced":
            param.grad = value.to(param.dtype)
            return
        self.synchronize()
        shared.set_full_gradient(name, value)

    @torch.no_grad()
    def refresh_master_weights(self) -> None:
        """Take the parameters' present values for their master copies, on every rank.

        After weights were changed from outside (loaded, clipped, averaged), where
        `master_weights` is on. Without this call a step takes an edited element for what it is,
        unless the edit is smaller than the parameter's rounding.
        """
        self.wait_for_parameters()
        for shared in self._replicated:
            shared.refresh_masters(self.state)
        pieces = {param for shared in self._replicated for param in shared.params}
        for param, state in self.state.items():
            if MASTER in state and param not in pieces:
                state[MASTER].copy_(param)

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

    def _holder(self, name: str) -> ReplicatedParameters | None:
        """The plan that has the parameter; None in one process."""
        param = self._param(name)
        for shared in self._replicated:
            if any(param is other for other in shared.params):
                return shared
        return None

    def _sharding(self, param: Tensor) -> "_Sharding | None":
        """The plan that has a DTensor, and the DTensor's place in it; None for others."""
        for placement in self._sharded:
            index = placement.index_of(param)
            if index is not None:
                return _Sharding(placement, index)
        return None

    def _state_of(self, name: str, key: str) -> State:
        """The whole state of one parameter, which has `key`."""
        param, shared = self._param(name), self._holder(name)
        if key not in self.state[param]:
            raise KeyError(f"{name!r} has no state {key!r}; it has {sorted(self.state[param])}")
        sharded = self._sharding(param)
        if sharded is not None:
            return sharded.placement.gather_state(self.state, self.param_groups, only=param)()[
                param
            ]
        if shared is None:
            return {k: tensor.clone() for k, tensor in self.state[param].items()}
        return shared.gather_state(self.state, self.param_groups, only=param)()[param]

    def _put_state(self, name: str, key: str, whole: Mapping[str, Tensor]) -> None:
        param, shared = self._param(name), self._holder(name)
        sharded = self._sharding(param)
        if sharded is not None:
            sharded.placement.put_whole(sharded.place, self.state[param][key], whole[key])
        elif shared is None:
            self.state[param][key].copy_(whole[key])
        else:
            shared.put_state(self.state, self.param_groups, param, key, whole)

    def _from_first(self, name: str, what: str, value: Tensor) -> None:
        shared, sharded = self._holder(name), self._sharding(self._param(name))
        placement = shared if sharded is None else sharded.placement
        if placement is not None:
            from_first(f"{what} of {name}", value, placement.group).wait()

    def _checked(self, what: str, value: Tensor, shape: torch.Size) -> Tensor:
        if not isinstance(value, Tensor) or value.shape != shape:
            found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{what} must be a tensor of shape {tuple(shape)}, got {found}")
        return value.detach()
