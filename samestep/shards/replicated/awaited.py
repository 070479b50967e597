"""Parameters that are on their way from other ranks: whoever touches one waits for it.

While it is on its way a parameter has another class, which torch's functions and methods ask before
they run (`__torch_function__`); the first of them waits, and gives it its class back. Only C++ code
that is handed a parameter itself, and memory that somebody took of it before, know nothing of that.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

ARRIVAL = "_samestep_arrival"  # attribute: what returns when the parameter has arrived
_grad: Any = torch._C.TensorBase.grad
_requires_grad: Any = torch._C.TensorBase.requires_grad
Untouched: Any = torch._C.DisableTorchFunctionSubclass


def mark(param: Tensor, arrive: Callable[[], None]) -> None:
    """From now on whoever touches the parameter calls `arrive`, which unmarks it."""
    setattr(param, ARRIVAL, arrive)
    param.__class__ = _kind_on_its_way(type(param))


def unmark(param: Tensor) -> None:
    """It has arrived."""
    kind = type(param)
    if issubclass(kind, _OnItsWay):
        param.__class__ = kind._kind
        delattr(param, ARRIVAL)


class _OnItsWay:
    """Mixed into the class of a parameter while it is on its way."""

    _kind: type[Tensor]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Wait for all that a function is given, and run it."""
        kwargs = kwargs or {}
        for param in _on_their_way([*args, *kwargs.values()]):
            getattr(param, ARRIVAL)()
        return func(*args, **kwargs)

    # What is asked between a step and a forward, and says nothing of values.

    @property
    def grad(self) -> Tensor | None:
        with Untouched():
            found: Tensor | None = _grad.__get__(self)
        return found

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        with Untouched():
            _grad.__set__(self, value)

    @property
    def requires_grad(self) -> bool:
        with Untouched():
            found: bool = _requires_grad.__get__(self)
        return found

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        with Untouched():
            _requires_grad.__set__(self, value)

    # Copying asks for the class first.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        getattr(self, ARRIVAL)()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        getattr(self, ARRIVAL)()
        return self.__reduce_ex__(protocol)


@cache
def _kind_on_its_way(kind: type[Tensor]) -> type[Tensor]:
    own: dict[str, Any] = {"_kind": kind, "__module__": kind.__module__}
    part = getattr(kind, "_local_tensor", None)  # of a DTensor
    if part is not None:
        # `to_local`, `full_tensor` and `redistribute` are no torch functions, and begin with it.
        own["_local_tensor"] = property(partial(_awaited_part, part), part.__set__)
    return type(kind.__name__, (_OnItsWay, kind), own)


def _awaited_part(part: Any, param: Any) -> Any:
    """The part of a DTensor that this rank holds, once it has arrived."""
    getattr(param, ARRIVAL)()
    return part.__get__(param)


def _on_their_way(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, _OnItsWay):
            assert isinstance(value, Tensor)
            yield value
        elif isinstance(value, list | tuple):
            yield from _on_their_way(value)
        elif isinstance(value, dict):
            yield from _on_their_way(value.values())
