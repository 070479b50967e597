"""Options of an optimizer's groups, as JSON has them: learning rates, betas, momentum."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from samestep.checkpoint.errors import CheckpointError
from samestep.checkpoint.storage import DTYPES
from samestep.groups.param_groups import Group, decisive_changes, options_of, parameter_names
from samestep.optimizer.full_values import FullValues

GroupFacts = dict[str, Any]  # "params": names, "options": by key
PLAIN = bool | int | float | str | None
OWN = ("rule", "fused", "state_dtypes", "split_sizes", "flatten")  # not the checkpoint's business


def group_facts(opt: FullValues) -> list[GroupFacts]:
    """Per group its parameters' names and options; also numbers that others keep in there."""
    facts = []
    for index, group in enumerate(opt.param_groups):
        others = {key: value for key, value in group.items() if isinstance(value, PLAIN)}
        options = plain_options({**others, **options_of(group)})
        facts.append({"params": list(parameter_names(group, index)), "options": options})
    return facts


def of_all_stages(groups: Iterable[Sequence[GroupFacts]]) -> list[GroupFacts]:
    """Groups that ranks have told of, each parameter once: pipeline stages have different ones."""
    merged: list[GroupFacts] = []
    known: set[str] = set()
    for group in (group for of_rank in groups for group in of_rank):
        new = [name for name in group["params"] if name not in known]
        if new:
            known.update(new)
            merged.append({**group, "params": new})
    return merged


def check_options(opt: FullValues, groups: list[GroupFacts], partial: bool) -> None:
    """Raise if a parameter's state was made by another rule, or for other options."""
    for group, name, saved in _pairs(opt, groups):
        if saved["rule"] != group["rule"]:
            raise CheckpointError(
                f"parameter {name!r} was trained with rule {saved['rule']!r} and has "
                f"{group['rule']!r} here: give it the same rule, or load the model alone"
            )
        kept_as_here = {"state_dtypes": group.get("state_dtypes")}
        changes = decisive_changes(
            _alone(name, {**group, **saved, **kept_as_here}), _alone(name, group)
        )
        if changes and not partial:
            raise CheckpointError(
                f"parameter {name!r} was saved with options that its state depends on and that "
                f"differ here ({changes}): build the optimizer with the saved values"
            )


def restore_options(opt: FullValues, groups: list[GroupFacts]) -> None:
    """Give every group the options that its first parameter was saved with."""
    seen: set[int] = set()
    for group, _, saved in _pairs(opt, groups):
        if id(group) in seen:
            continue
        seen.add(id(group))
        for key, value in saved.items():
            if key in OWN or decisive_changes(group, {**group, key: value}):
                continue
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = value


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON can have them."""
    return {key: _plain(value) for key, value in options.items()}


def options_from(plain: Mapping[str, Any]) -> Group:
    """The opposite of `plain_options`, but for lists, which are tuples now."""
    return {key: _back(value) for key, value in plain.items()}


def _pairs(opt: FullValues, groups: list[GroupFacts]) -> Iterator[tuple[Group, str, Group]]:
    """Every parameter here that was saved: its group, its name, the options it was saved with."""
    options = [options_from(group["options"]) for group in groups]
    saved = {name: own for g, own in zip(groups, options, strict=True) for name in g["params"]}
    for index, group in enumerate(opt.param_groups):
        for name in parameter_names(group, index):
            if name in saved:
                yield group, name, saved[name]


def _alone(name: str, options: Group) -> Group:
    """A group's options as those of one parameter, since others may be grouped otherwise."""
    cut = options.get("split_sizes")
    return {**options, "split_sizes": cut.get(name) if isinstance(cut, Mapping) else cut}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return {"entries": {str(key): _plain(entry) for key, entry in value.items()}}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value


def _back(value: Any) -> Any:
    if isinstance(value, dict):
        if "dtype" in value:
            return DTYPES[value["dtype"]]
        return {key: _back(entry) for key, entry in value["entries"].items()}
    return tuple(map(_back, value)) if isinstance(value, list) else value
