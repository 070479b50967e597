"""Tensors in what modules are called with and give: tuples, lists, dicts, dataclasses, nested."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor


def requiring_gradients(values: Any) -> Iterator[Tensor]:
    """The tensors in nested containers that require a gradient."""
    if isinstance(values, Tensor):
        if values.requires_grad:
            yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from requiring_gradients(value)
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from requiring_gradients(value)
    elif is_dataclass(values) and not isinstance(values, type):
        for field in fields(values):
            yield from requiring_gradients(getattr(values, field.name))


def with_others(values: Any, new: Callable[[Tensor], Tensor]) -> Any:
    """The same containers, with others for the tensors that require a gradient."""
    if isinstance(values, Tensor):
        return new(values) if values.requires_grad else values
    if isinstance(values, MutableMapping):
        made = copy(values)
        made.update({key: with_others(value, new) for key, value in values.items()})
        return made
    if isinstance(values, (tuple, list)):
        parts = [with_others(value, new) for value in values]
        return type(values)(*parts) if hasattr(values, "_fields") else type(values)(parts)
    if is_dataclass(values) and not isinstance(values, type):
        held = {field.name: getattr(values, field.name) for field in fields(values) if field.init}
        return replace(values, **{name: with_others(value, new) for name, value in held.items()})
    return values
