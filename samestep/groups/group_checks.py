"""Checks before every step that groups still fit their state and blocks."""

import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from samestep.groups.group_keys import refuse_lost_keys
from samestep.groups.hyperparameters import HyperparameterReader
from samestep.groups.param_groups import (
    Group,
    check,
    decisive_changes,
    is_constant,
    members,
    naming_group,
    options_of,
    parameter_names,
    rule_of,
)
from samestep.rules.rule import math_dtype

STRIDED = {torch.strided}
_UNSET = object()  # in place of a key that is gone


def same_objects(found: Sequence[object], known: Sequence[object]) -> bool:
    """Whether both have the same objects in the same order; equal values are not enough."""
    return len(found) == len(known) and all(map(operator.is_, found, known))


class UnknownParameterError(RuntimeError):
    """A group has a parameter that it was not built with."""


class GroupChecks:
    """The groups as they were planned and as the last step found them.

    hyperparameters: what rules read of them, as ranks compare it.
    """

    def __init__(self) -> None:
        self.hyperparameters = HyperparameterReader()
        self._planned: dict[int, Group] = {}  # options
        self._params: dict[int, list[Tensor]] = {}
        self._made_for: dict[Tensor, tuple[torch.Size, torch.dtype]] = {}
        self._checked_options: dict[int, Group] = {}  # where all are constants
        self._checked_params: dict[int, CheckedParameters] = {}

    def plan(self, index: int, group: Group) -> None:
        """Record the present parameters and options of a group."""
        self._planned[index] = options_of(group)
        self._params[index] = list(group["params"])
        self._checked_options.pop(index, None)
        self.hyperparameters.set_since(index)
        for param in group["params"]:
            self._made_for[param] = (param.shape, math_dtype(param))

    def forget(self, index: int, params: Iterable[Tensor]) -> None:
        """Drop the record of a group whose addition failed."""
        for known in (self._planned, self._params, self._checked_options, self._checked_params):
            known.pop(index, None)
        self.hyperparameters.set_since(index)
        for param in params:
            self._made_for.pop(param, None)

    def swapped(self, groups: Sequence[Group]) -> dict[Tensor, Tensor] | None:
        """Replaced parameters of a group, old to new; None if there are none.

        Wrappers that shard a model after its optimizer was built put their parameters into the
        groups (accelerate with FSDP2 does). Raises unless each is as large as the one before.
        """
        found = {}
        for index, group in enumerate(groups[: len(self._params)]):
            before = self.counted(index, group)
            names = parameter_names(group, index)
            for name, old, new in zip(names, before, group["params"], strict=True):
                if new is not old and new.shape != old.shape:
                    raise UnknownParameterError(
                        f"{name!r} in param_groups[{index}] is now another parameter, "
                        f"of shape {tuple(new.shape)}, than the one of shape "
                        f"{tuple(old.shape)} that the optimizer was built with: build "
                        "the optimizer after changing the model, or call "
                        "opt.adopt(model)"
                    )
                found[old] = new
        problem = in_several_places((name, param) for _, name, param in members(groups))
        if problem is not None:
            raise UnknownParameterError(problem)
        return None if all(old is new for old, new in found.items()) else found

    def counted(self, index: int, group: Group) -> list[Tensor]:
        """Original parameters of a group; raises if their number has changed."""
        before = self._params[index]
        now: object = group.get("params")
        count = len(now) if isinstance(now, list | tuple) else None
        if count != len(before):
            has = f"a {type(now).__name__} now" if count is None else f"{count} now"
            raise UnknownParameterError(
                f"param_groups[{index}] was built with {len(before)} parameters and has "
                f"{has}: do not change its list, call opt.add_param_group()"
            )
        return before

    def check(self, groups: Sequence[Group]) -> None:
        """Raise if a group or a gradient cannot be used; fast if nothing was set.

        A step is short beside full checks, so objects, shapes and dtypes are compared first.
        """
        for index, group in enumerate(groups):
            options, checked = self._checked_options.get(index), self._checked_params.get(index)
            if options is None or not _are_the_same(group, options):
                self._check_options(index, group)
                options = {k: group[k] for k in group if k not in ("params", "param_names")}
                if is_constant(tuple(options.values())):
                    self._checked_options[index] = options
            params = group.get("params", ())
            if not (
                checked is not None
                and isinstance(params, list | tuple)
                and len(params) == len(checked.params)
                and all(map(operator.is_, params, checked.params))
                and [param.shape for param in params] == checked.shapes
                and [param.dtype for param in params] == checked.dtypes
                and {grad.layout for param in params if (grad := param.grad) is not None} <= STRIDED
            ):
                self._check_parameters(index, group)
                self._checked_params[index] = CheckedParameters.of(params)

    def _check_options(self, index: int, group: Group) -> None:
        self._checked_options.pop(index, None)
        self.hyperparameters.set_since(index)
        planned = self._planned[index]
        with naming_group(index):
            if rule_of(group).name == planned["rule"]:
                check(group)
                refuse_lost_keys(group, made=True)
        changes = decisive_changes(planned, group)
        if changes:
            raise RuntimeError(
                f"param_groups[{index}] has changed options that its state does not fit "
                f"({changes}): set them back, or build a new optimizer"
            )

    def _check_parameters(self, index: int, group: Group) -> None:
        self.counted(index, group)
        named = list(zip(parameter_names(group, index), group["params"], strict=True))
        problem = in_several_places(named)
        if problem is not None:
            raise RuntimeError(problem)
        for name, param in named:
            made_for = self._made_for.get(param)
            if made_for is None:
                raise UnknownParameterError(
                    f"param_groups[{index}] has a parameter that the optimizer was not "
                    "built with: add it with opt.add_param_group()"
                )
            _check_parameter(name, param, *made_for)


def in_several_places(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """An error text if one parameter is in groups under several names."""
    first: dict[Tensor, str] = {}
    for name, param in named:
        if first.setdefault(param, name) != name:
            return (
                f"{first[param]!r} and {name!r} are now one parameter: build the "
                "optimizer after tying weights"
            )
    return None


class CheckedParameters(NamedTuple):
    """Parameters of a group that passed the checks."""

    params: list[Tensor]
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]

    @classmethod
    def of(cls, params: Sequence[Tensor]) -> "CheckedParameters":
        """Record the parameters as they are now."""
        return cls(list(params), [param.shape for param in params], [p.dtype for p in params])


def _check_parameter(name: str, param: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    grad = param.grad
    if grad is not None and grad.layout != torch.strided:
        raise sparse_gradient(name)
    if param.shape != shape or math_dtype(param) != dtype:
        raise RuntimeError(
            f"parameter {name!r} is {param.dtype} {tuple(param.shape)} now, and the "
            f"optimizer was built when it had shape {tuple(shape)} and computed in "
            f"{dtype}: build the optimizer after changing the model"
        )


def sparse_gradient(name: str) -> RuntimeError:
    """The error of a parameter with a sparse gradient."""
    return RuntimeError(
        f"parameter {name!r} has a sparse gradient, which no rule supports: build its "
        "embedding with sparse=False"
    )


def _are_the_same(group: Group, checked: Group) -> bool:
    """Whether no option of a group was set since it was checked."""
    own = len(group) - ("params" in group) - ("param_names" in group)
    return own == len(checked) and all(
        group.get(key, _UNSET) is value for key, value in checked.items()
    )
