"""Small orthogonalizations as CUDA graphs: their launches take longer than their arithmetic.

A graph has tensors of its own: a block is copied into them and the result out, which is little
against fifteen launches.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

SMALL = 5e11  # floating-point operations: what a GPU does while the host launches all of it
KEPT = 64  # graphs

Function = Callable[[Tensor, Tensor], Tensor]


class _Recorded(NamedTuple):
    graph: torch.cuda.CUDAGraph
    X: Tensor
    scales: Tensor
    result: Tensor


_recorded: OrderedDict[Hashable, _Recorded] = OrderedDict()


def can_replay(X: Tensor, flops: float) -> bool:
    """Whether it is small, and nobody else is recording."""
    return flops < SMALL and X.is_cuda and not torch.cuda.is_current_stream_capturing()


def replayed(function: Function, key: Hashable, X: Tensor, scales: Tensor) -> Tensor:
    """`function(X, scales)` through a graph, which is recorded at the first call with a key."""
    key = (key, X.shape, X.dtype, X.device)
    found = _recorded.get(key)
    if found is None:
        function(X.clone(), scales)  # compiles what a graph cannot
        found = _recorded[key] = _record(function, X, scales)
        if len(_recorded) > KEPT:
            _recorded.popitem(last=False)
    _recorded.move_to_end(key)
    found.X.copy_(X)
    found.scales.copy_(scales)
    found.graph.replay()
    return found.result.clone()


def _record(function: Function, X: Tensor, scales: Tensor) -> _Recorded:
    own_X, own_scales = torch.zeros_like(X), torch.zeros_like(scales)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream(X.device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(X.device))
    with torch.cuda.stream(stream):
        # Other threads (gloo's, NCCL's, a data loader's) allocate and wait as they like.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            result = function(own_X, own_scales)
        finally:
            graph.capture_end()
    torch.cuda.current_stream(X.device).wait_stream(stream)
    return _Recorded(graph, own_X, own_scales, result)
