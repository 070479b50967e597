"""Where a parameter and its state lie in an SPMD program, before a step and after it."""

from collections.abc import Iterable

from torch import Tensor

from samestep.rules.state import State
from samestep.xla.tiling import Tiling, annotate, clear, lay, tiling_of, whole_on_all

Lying = list[tuple[Tensor, Tiling]]  # a parameter and its state


def lay_out(param: Tensor, state: State, *, shares: bool, crossover: int) -> Lying:
    """Settle where a parameter and its state lie; without such a program nowhere.

    A parameter stays where it is; one that nobody has laid is whole on every device, and is said to
    be, or the partitioner might divide it from some step on. State that has an element for each of
    the parameter's lies as it does, and copies of a part divide it if the optimizer `shares`; the
    state of fewer than `crossover` elements stays in copies. All other state is whole.
    """
    everywhere = whole_on_all()
    if everywhere is None:
        return []
    own = tiling_of(param) or everywhere.whole(param.ndim)
    parts = own
    if shares and param.numel() >= crossover:
        parts = own.without_copies(param.shape)
    found = [(param, own)]
    for tensor in state.values():
        whole = everywhere.whole(tensor.ndim)
        found.append((tensor, parts if tensor.shape == param.shape else whole))
    for tensor, tiling in found:
        lay(tensor, tiling)
    return found


def stay(found: Iterable[tuple[Tensor, Tiling]]) -> None:
    """Say it again of values that a step has written: they would lie as the partitioner likes."""
    for tensor, tiling in found:
        clear(tensor)
        annotate(tensor, tiling)
