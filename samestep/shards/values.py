"""Conversion between shards of state and values and whole tensors.

A placement has one `ShardValues`. State dicts, checkpoints, swapped parameters and whoever reads or
edits whole values ask it; no step does.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from samestep.layout.boxes import HeldState, whole_box
from samestep.rules.state import MASTER, State
from samestep.rules.stored import REMAINDER_KEY
from samestep.update.plain import scale


class ShardValues:
    """State and values of shards; defaults are for a rank that has everything.

    State is handed in by the optimizer. `param` is always a parameter of the placement.

    params: the parameters of the placement.
    """

    params: Sequence[Tensor]

    def holds(self, param: Tensor) -> bool:
        """Whether the placement has a parameter."""
        return any(param is other for other in self.params)

    def index(self, param: Tensor) -> int:
        """Index of a parameter among `params`."""
        return next(i for i, other in enumerate(self.params) if other is param)

    # --- state ---------------------------------------------------------------------------

    @property
    def keeps_all(self) -> bool:
        """Whether every rank has all state."""
        raise NotImplementedError

    def state_alike(self, state: Mapping[Tensor, State]) -> Iterator[tuple[str, str, Tensor]]:
        """State that all ranks hold in common: name, key and tensor."""
        raise NotImplementedError

    def gather_state(
        self, state: Mapping[Tensor, State], only: Sequence[Tensor] | None = None
    ) -> Callable[[], dict[Tensor, State]]:
        """Start gathering all state, or that of some parameters. Collective.

        Returns:
            A function that waits, and gives the state of one process.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no gather_state(), which whole_state() and saving need"
        )

    def held_state(self, state: Mapping[Tensor, State]) -> Iterator[HeldState]:
        """State of this rank as boxes of whole tensors."""
        for param, entries in state.items():
            if self.holds(param):
                for key, tensor in entries.items():
                    yield HeldState(param, key, tuple(tensor.shape), [whole_box(tensor)])

    def put_state(
        self, state: Mapping[Tensor, State], param: Tensor, key: str, whole: Mapping[str, Tensor]
    ) -> None:
        """Copy this rank's part out of whole state."""
        state[param][key].copy_(whole[key])

    # --- parameters ----------------------------------------------------------------------

    def whole_value(self, param: Tensor) -> Tensor:
        """The whole parameter. Collective."""
        return param.detach()

    def put_value(self, param: Tensor, whole: Tensor) -> None:
        """Copy this rank's part out of a whole parameter."""
        param.copy_(whole)

    def scale(self, state: Mapping[Tensor, State], param: Tensor, factor: Tensor) -> None:
        """Multiply a parameter and its main parameter by `factor`, which has its shape.

        Every rank gives the same one. Collective where ranks share main parameters.
        """
        scale(param, state[param], factor)

    def put_parameter(self, param: Tensor, key: str, into: Tensor) -> None:
        """Write parameter values into the state `key`."""
        into.copy_(param)

    @torch.no_grad()
    def refresh_masters(self, state: Mapping[Tensor, State]) -> None:
        """Set main parameters from the parameters."""
        for param, entries in state.items():
            if not self.holds(param):
                continue
            if MASTER in entries:
                self.put_parameter(param, MASTER, entries[MASTER])
            if REMAINDER_KEY in entries:
                entries[REMAINDER_KEY].zero_()

    # --- gradients -----------------------------------------------------------------------

    def whole_gradient(self, param: Tensor) -> Tensor | None:
        """The mean gradient so far; None if no rank has one. Collective."""
        return None if param.grad is None else param.grad.detach().clone()

    def put_gradient(self, param: Tensor, whole: Tensor) -> None:
        """Set the mean gradient, which makes the parameter present."""
        param.grad = whole.to(param.dtype)
