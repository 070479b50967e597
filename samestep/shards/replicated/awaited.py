"""Parameters being gathered: any access waits for their arrival.

`ParametersInFlight` has what is still on its way when a step is over: modules wait for their own
parameters, and everyone else for all.

While it is on its way a parameter has another class, which torch's functions and methods ask before
they run (`__torch_function__`); the first of them waits, and gives it its class back. Only C++ code
that is handed a parameter itself, and memory that somebody took of it before, know nothing of that.
"""

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from samestep.layout.boxes import mesh_of

ARRIVAL = "_samestep_arrival"  # attribute: what returns when the parameter has arrived
_grad: Any = torch._C.TensorBase.grad
_requires_grad: Any = torch._C.TensorBase.requires_grad
Untouched: Any = torch._C.DisableTorchFunctionSubclass


def mark(param: Tensor, arrive: Callable[[], None]) -> None:
    """Make every access to the parameter call `arrive` first."""
    setattr(param, ARRIVAL, arrive)
    param.__class__ = _kind_on_its_way(type(param))


def unmark(param: Tensor) -> None:
    """Restore the class of a parameter that has arrived."""
    kind = type(param)
    if issubclass(kind, _OnItsWay):
        param.__class__ = kind._kind
        delattr(param, ARRIVAL)


class _OnItsWay:
    """Mixin for the class of a parameter that is being gathered."""

    _kind: type[Tensor]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Wait for all arguments, then run the function."""
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
    """Local tensor of a DTensor, after its arrival."""
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


# --- who waits for what is on its way when a step is over --------------------------------------

# They compute with the weights of modules inside them, without calling these.
READ_THEIR_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


class ParametersInFlight:
    """Pending gathers: `arrivals` by parameter.

    Modules that are watched wait before they run, are saved or are loaded into. Everyone else
    who reads or writes parameters between steps calls `wait_for_all` first.
    """

    def __init__(self) -> None:
        self.arrivals: dict[Tensor, Callable[[], None]] = {}
        self._watched: set[Tensor] = set()
        _tables.add(weakref.ref(self, _tables.discard))

    def watch(self, model: nn.Module) -> None:
        """Make the modules of a model wait for their parameters before forward."""
        for module in model.modules():
            reads_children = isinstance(module, READ_THEIR_CHILDREN)
            own = list(module.parameters(recurse=reads_children))
            if own:
                wait = _kind_of_hook()(self, recurse=reads_children)
                module.register_forward_pre_hook(wait, prepend=True)
                module.register_state_dict_pre_hook(wait)  # type: ignore[no-untyped-call]
                module.register_load_state_dict_pre_hook(wait)  # type: ignore[no-untyped-call]
                self._watched.update(own)

    def all_watched(self, params: Iterable[Tensor]) -> bool:
        """Whether every parameter is in a watched module."""
        return self._watched.issuperset(params)

    def add(self, params: Iterable[Tensor], arrive: Callable[[], None]) -> None:
        """Mark parameters as pending until `arrive` was called."""
        for param in params:
            self.arrivals[param] = arrive
            # Whoever takes the part of a DTensor takes a view, which autograd keeps: the memory
            # that it shares with others must not be written any more.
            whole = mesh_of(param) is not None
            mark(param, self.wait_for_all if whole else partial(self.wait_for, (param,)))

    def wait_for(self, params: Iterable[Tensor]) -> None:
        """Wait for these parameters."""
        if self.arrivals:
            for param in params:
                arrive = self.arrivals.pop(param, None)
                if arrive is not None:
                    arrive()
                    unmark(param)

    def wait_for_all(self) -> None:
        """Wait for all pending parameters."""
        self.wait_for(list(self.arrivals))


class _WaitFor:
    """A forward pre-hook that waits; copies of the model do not have it."""

    def __init__(self, in_flight: ParametersInFlight, *, recurse: bool) -> None:
        self._in_flight = in_flight
        self._recurse = recurse

    def __call__(self, module: nn.Module, *_: object) -> None:
        self._in_flight.wait_for(module.parameters(recurse=self._recurse))

    def __reduce__(self) -> Any:
        return _Nothing, ()


@cache
def _kind_of_hook() -> type[_WaitFor]:
    """The hook class, hidden from compilers.

    To say so imports all of torch._dynamo, as long again as torch itself: not before there is one.
    """
    disable: Any = torch.compiler.disable
    _WaitFor.__call__ = disable(_WaitFor.__call__)  # type: ignore[method-assign]
    return _WaitFor


class _Nothing:
    def __call__(self, *_: object) -> None:
        """Do nothing: a copied model belongs to no optimizer."""


# A set of references, since a WeakSet cannot be looked through while another thread makes an
# optimizer. Copying a set is one step for all threads.
_tables: set["weakref.ref[ParametersInFlight]"] = set()


def wait_for_anyone(params: Iterable[Tensor]) -> None:
    """Wait for these parameters, whichever optimizer gathers them."""
    wanted = list(params)
    for reference in list(_tables):
        table = reference()
        if table is not None:
            table.wait_for(wanted)
