"""Whole parameters, gradients and state by name, to read and to write."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from samestep.comm.collectives import from_first
from samestep.groups.param_groups import Group, members
from samestep.rules.converted import encoded, remainder_of, value_of
from samestep.rules.rule import math_dtype
from samestep.rules.state import MASTER, MASTERS, State
from samestep.rules.stored import REMAINDER_KEY, SCALE_SUFFIX, join_remainder, split_remainder
from samestep.shards.placement import Placement
from samestep.shards.values import ShardValues
from samestep.update.plain import exact_value


@dataclass(frozen=True, eq=False)
class FullValues:
    """Values by the parameter's name, as one process would have them; `RuleOptimizer` tells more.

    Of an optimizer at rest: nothing is on its way, and all gradients so far are reduced.
    """

    groups: Sequence[Group]
    states: Mapping[Tensor, State]
    placements: Sequence[Placement]

    def whole_state(self) -> dict[str, State]:
        """The state of every parameter."""
        # All that travels is on its way before anything can raise.
        gathers = [p.values.gather_state(self.states) for p in self.placements]
        by_param = {param: state for finish in gathers for param, state in finish().items()}
        return {name: by_param.get(param, {}) for name, param in self.by_name().items()}

    def states_in_turn(self, at_once: int) -> Iterator[tuple[Tensor, State]]:
        """The state of every parameter in turn; at any time that of `at_once` elements is there."""
        for some in _bundles(self.by_name().values(), at_once):
            for placement in self.placements:
                here = [param for param in some if placement.holds(param)]
                if here:
                    yield from placement.values.gather_state(self.states, here)().items()

    def value(self, name: str, key: str) -> Tensor:
        """One state tensor, whatever it is kept in."""
        param = self.param(name)
        if key == MASTER and REMAINDER_KEY in self.states[param]:
            rest = self.state(name, REMAINDER_KEY)[REMAINDER_KEY]
            whole = self.shards_of(param).whole_value(param)
            return join_remainder(whole, rest.to(whole.device))  # which may stay on the host
        return value_of(key, self.state(name, key))

    def state(self, name: str, key: str) -> State:
        """The whole state of one parameter, which has `key`, as it is kept."""
        param = self.param(name)
        self._refuse_unknown(name, param, key)
        gather = self.shards_of(param).gather_state(self.states, only=[param])
        return gather()[param]

    def set_state(self, name: str, key: str, value: Tensor) -> None:
        param = self.param(name)
        if key == MASTER and REMAINDER_KEY in self.states[param]:
            whole = self.state(name, REMAINDER_KEY)
            wide = self._wide(name, key, value, param.shape)
            rest = remainder_of(self.shards_of(param).whole_value(param), wide)
            self._put_state(name, REMAINDER_KEY, {**whole, REMAINDER_KEY: rest})
            return
        whole = self.state(name, key)
        scale = whole.get(key + SCALE_SUFFIX)
        if scale is None:
            whole[key].copy_(_checked(f"{key} of {name}", value, whole[key].shape))
            self._from_first(name, key, whole[key])
            self._put_state(name, key, whole)
            return
        wide = self._wide(name, key, value, whole[key].shape)
        whole |= encoded(key, wide, wide.shape[-1] // scale.shape[-1])
        for own in (key, key + SCALE_SUFFIX):
            self._put_state(name, own, whole)

    def _wide(self, name: str, key: str, value: Tensor, shape: torch.Size) -> Tensor:
        """Rank 0's value in fp32 or wider."""
        param = self.param(name)
        wide = _checked(f"{key} of {name}", value, shape).to(param.device, torch.float32)
        wide = wide.contiguous().clone()
        self._from_first(name, key, wide)
        return wide

    def parameter(self, name: str) -> Tensor:
        param = self.param(name)
        kept = {key: self.state(name, key)[key] for key in MASTERS if key in self.states[param]}
        whole = self.shards_of(param).whole_value(param)
        here = {key: tensor.to(whole.device) for key, tensor in kept.items()}
        return exact_value(whole, here).to(math_dtype(param), copy=not here)

    def set_parameter(self, name: str, value: Tensor) -> None:
        param = self.param(name)
        wide = _checked(name, value, param.shape).to(param.device, math_dtype(param))
        wide = wide.contiguous().clone()
        self._from_first(name, "value", wide)
        if REMAINDER_KEY in self.states[param]:
            rounded, rest = split_remainder(wide)
            self.shards_of(param).put_value(param, rounded)
            whole = self.state(name, REMAINDER_KEY)
            self._put_state(name, REMAINDER_KEY, {**whole, REMAINDER_KEY: rest})
            return
        self.shards_of(param).put_value(param, wide)
        if MASTER in self.states[param]:
            whole = self.state(name, MASTER)
            whole[MASTER].copy_(wide)
            self._put_state(name, MASTER, whole)

    def scale(self, factors: Mapping[str, Tensor]) -> None:
        """Multiply parameters and their master copies by what broadcasts to their shapes."""
        for name, factor in factors.items():
            param = self.param(name)
            wide = factor.detach().to(param.device).expand(param.shape)
            self.shards_of(param).scale(self.states, param, wide)

    def gradient(self, name: str) -> Tensor | None:
        param = self.param(name)
        return self.shards_of(param).whole_gradient(param)

    def set_gradient(self, name: str, value: Tensor) -> None:
        param = self.param(name)
        self.shards_of(param).put_gradient(param, value)

    def gradient_from_first(self, name: str, value: Tensor) -> Tensor:
        """Rank 0's gradient, after checks."""
        param = self.param(name)
        value = _checked(f"gradient of {name}", value, param.shape)
        value = value.to(param.device, math_dtype(param)).contiguous().clone()
        self._from_first(name, "gradient", value)
        return value

    def check(
        self, name: str, key: str | None = None, what: str = "", value: Tensor | None = None
    ) -> None:
        """Raise unless there are such a parameter and state, and a value, `what`, has its shape."""
        param = self.param(name)
        if key is not None and not (key == MASTER and REMAINDER_KEY in self.states[param]):
            self._refuse_unknown(name, param, key)
        if value is not None:
            _checked(what, value, param.shape)

    def _refuse_unknown(self, name: str, param: Tensor, key: str) -> None:
        if key not in self.states[param]:
            raise KeyError(f"{name!r} has no state {key!r}; it has {sorted(self.states[param])}")

    # --- names ---------------------------------------------------------------------------

    def by_name(self) -> dict[str, Tensor]:
        return {name: param for _, name, param in members(self.groups)}

    def param(self, name: str) -> Tensor:
        known = self.by_name()
        if name not in known:
            some = ", ".join(list(known)[:6])
            raise KeyError(f"the optimizer has no parameter {name!r}; it has {some}, ...")
        return known[name]

    def holder(self, param: Tensor) -> Placement:
        """The placement that a parameter is in."""
        return next(p for p in self.placements if p.holds(param))

    def shards_of(self, param: Tensor) -> ShardValues:
        """State and values of the placement that a parameter is in."""
        return self.holder(param).values

    def _put_state(self, name: str, key: str, whole: Mapping[str, Tensor]) -> None:
        param = self.param(name)
        self.shards_of(param).put_state(self.states, param, key, whole)

    def _from_first(self, name: str, what: str, value: Tensor) -> None:
        ranks = self.holder(self.param(name)).held_by
        if ranks is not None:
            from_first(f"{what} of {name}", value, ranks).wait()


def _bundles(params: Iterable[Tensor], at_once: int) -> Iterator[list[Tensor]]:
    """Group parameters into chunks of about this many elements."""
    some: list[Tensor] = []
    for param in params:
        if some and sum(one.numel() for one in some) + param.numel() > at_once:
            yield some
            some = []
        some.append(param)
    if some:
        yield some


def _checked(what: str, value: Tensor, shape: torch.Size) -> Tensor:
    if not isinstance(value, Tensor) or value.shape != shape:
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"{what} must be a tensor of shape {tuple(shape)}, got {found}")
    return value.detach()
