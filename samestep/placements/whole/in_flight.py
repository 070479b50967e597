"""Parameters that are still on their way when the step is over, and who waits for them."""

import weakref
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

# They compute with the weights of modules inside them, without calling these.
READ_THEIR_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


class ParametersInFlight:
    """Gathers that nobody has waited for yet.

    Modules that are watched wait before they run, are saved or are loaded into. Everyone else
    who reads or writes parameters between steps calls `wait_for_all` first.
    """

    def __init__(self) -> None:
        self._arrivals: dict[Tensor, Callable[[], None]] = {}
        self._watched: set[Tensor] = set()
        _tables.add(weakref.ref(self, _tables.discard))

    def watch(self, model: nn.Module) -> None:
        """From now on the modules of a model wait for their own parameters."""
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
        """Whether some module waits for each of them."""
        return self._watched.issuperset(params)

    def add(self, params: Iterable[Tensor], arrive: Callable[[], None]) -> None:
        """These are on their way until `arrive` was called; calling it again does nothing."""
        self._arrivals.update(dict.fromkeys(params, arrive))

    def wait_for(self, params: Iterable[Tensor]) -> None:
        """Return when these have arrived."""
        if self._arrivals:
            for param in params:
                arrive = self._arrivals.pop(param, None)
                if arrive is not None:
                    arrive()

    def wait_for_all(self) -> None:
        """Return when nothing is on its way."""
        self.wait_for(list(self._arrivals))


class _WaitFor:
    """A hook of a module. A copy of the model has none; the original's are not saved with it."""

    def __init__(self, in_flight: ParametersInFlight, *, recurse: bool) -> None:
        self._in_flight = in_flight
        self._recurse = recurse

    def __call__(self, module: nn.Module, *_: object) -> None:
        self._in_flight.wait_for(module.parameters(recurse=self._recurse))

    def __reduce__(self) -> Any:
        return _Nothing, ()


@cache
def _kind_of_hook() -> type[_WaitFor]:
    """The hooks, which compilers leave alone from now on.

    To say so imports all of torch._dynamo, as long again as torch itself: not before there is one.
    """
    disable: Any = torch.compiler.disable
    _WaitFor.__call__ = disable(_WaitFor.__call__)  # type: ignore[method-assign]
    return _WaitFor


class _Nothing:
    def __call__(self, *_: object) -> None:
        """The copied or loaded model belongs to no optimizer."""


# A set of references, since a WeakSet cannot be looked through while another thread makes an
# optimizer. Copying a set is one step for all threads.
_tables: set["weakref.ref[ParametersInFlight]"] = set()


def wait_for_anyone(params: Iterable[Tensor]) -> None:
    """Return when these have arrived, whichever optimizer has sent them on their way."""
    wanted = list(params)
    for reference in list(_tables):
        table = reference()
        if table is not None:
            table.wait_for(wanted)
