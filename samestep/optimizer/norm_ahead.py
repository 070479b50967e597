"""Sums squares of gradients on the device while the host prepares the step.

The host looks at groups, options and state before every step, for half a millisecond and more. The
norm needs nothing of that: so a GPU has work meanwhile. Nothing is changed by it, and a step that
is refused has lost nothing.
"""

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from samestep.groups.param_groups import Group
from samestep.kernels.choice import missing as missing_kernels
from samestep.update.metrics import can_sum_with_kernels

if TYPE_CHECKING:
    from samestep.kernels.norm import SquareSum


class NormAhead:
    """The sum of squares of a step, at a fixed address for CUDA graphs."""

    def __init__(self) -> None:
        self._grads: list[Tensor] = []  # of the step that runs
        self._square: Tensor | None = None
        # Gradients come back to where they were, step after step: most sums are prepared.
        self._known: object = None
        self._sum: SquareSum | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    @contextmanager
    def started(self, groups: Sequence[Group], *, as_graph: bool) -> Iterator[None]:
        """Context in which the sum is computed, where a kernel supports it.

        as_graph: gradients that are where they were before are summed by a CUDA graph.
        """
        grads = [grad for group in groups for p in group["params"] if (grad := p.grad) is not None]
        if _are_plain(grads) and missing_kernels(grads[0].device) is None:
            self._start(grads, as_graph)
        try:
            yield
        finally:
            self._grads = []  # whoever sets gradients to None gets their memory back

    def _start(self, grads: list[Tensor], as_graph: bool) -> None:
        from samestep.kernels.call import recorded
        from samestep.kernels.norm import SquareSum

        if torch.cuda.is_current_stream_capturing():
            return
        device = grads[0].device
        stream = torch.cuda.current_stream(device).cuda_stream
        known = [(g.data_ptr(), g.numel(), g.dtype, g.is_contiguous()) for g in grads], stream
        again = known == self._known
        if not again:
            self._known = self._sum = self._graph = None
            if not can_sum_with_kernels(grads):
                return
            self._sum, self._known = SquareSum(grads), known
        if self._square is None or self._square.device != device:
            self._square = torch.zeros((), dtype=torch.float64, device=device)
        if self._graph is None and again and as_graph:
            self._graph, _ = recorded(self._write, device)
        if self._graph is None:
            self._write()
        else:
            self._graph.replay()
        self._grads = grads

    def _write(self) -> None:
        assert self._sum is not None
        assert self._square is not None
        self._square.copy_(self._sum.run())

    def sum_of(self, grads: Sequence[Tensor]) -> Tensor | None:
        """Sum of squares, (); None if it was not started."""
        known = self._grads
        same = len(known) == len(grads) > 0 and all(map(operator.is_, grads, known))
        return self._square if same else None


def _are_plain(grads: list[Tensor]) -> bool:
    """Whether all gradients are dense and no DTensors."""
    types, layouts = {type(grad) for grad in grads}, {grad.layout for grad in grads}
    return types == {Tensor} and layouts == {torch.strided}
