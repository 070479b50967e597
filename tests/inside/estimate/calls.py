"""Collectives of forward and backward, and memory that gloo lets go of in time.

`tests.counting_group` does neither for the hybrid stack: torch's functional collectives ask a group
for a backend that one written in Python has not.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fractions import Fraction
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from samestep.comm import collectives
from tests.counting_group import SettledWork

KINDS = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
}


class Call(NamedTuple):
    """A collective as it was launched; `functional`: by DTensors, not by FSDP2."""

    kind: str
    functional: bool
    shape: tuple[int, ...]  # of what this rank hands in
    sent: Fraction  # bytes, at least
    ranks: tuple[int, ...]


class Calls(TorchDispatchMode):
    """Collects the collectives of a block that gather and add up; no exchanges and sends."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # what they do inside comes here again
        name = func._schema.name.partition("::")[2]
        if func.namespace in ("c10d", "_c10d_functional") and name in KINDS:
            self.found.append(_call(func.namespace, name, args))
        return func(*args, **(kwargs or {}))


def _call(namespace, name, args):
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if name == "allreduce_":
        tensors = args[0]
    given = tensors[-1]  # after what is to be filled
    groups = [dist.ProcessGroup.unbox(arg) for arg in args if _is_group(arg)]
    if namespace == "_c10d_functional":
        groups = [dist.distributed_c10d._resolve_process_group(args[-1])]
    ranks = tuple(dist.get_process_group_ranks(groups[0]))
    share = Fraction(given.numel() * given.element_size() * (len(ranks) - 1))
    kind = KINDS[name]
    if kind != "all_gather":
        share /= len(ranks)
    sent = 2 * share if kind == "all_reduce" else share
    return Call(kind, namespace == "_c10d_functional", tuple(given.shape), sent, ranks)


def _is_group(arg):
    return isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())


@contextmanager
def settled():
    """Let the optimizer's collectives own their buffers, so that they end when it lets go."""
    launcher = ThreadPoolExecutor(1)  # gloo copies some inputs, which nobody shall see

    def through(call, count):
        def launch(*args, **kwargs):
            rest = args[count:]
            return SettledWork(
                lambda *lent: launcher.submit(call, *lent, *rest, **kwargs).result(), args[:count]
            )

        return launch

    plain = collectives.dist
    collectives.dist = SimpleNamespace(
        **{
            **vars(plain),
            "all_reduce": through(plain.all_reduce, 1),
            "all_to_all_single": through(plain.all_to_all_single, 2),
            "reduce_scatter": through(plain.reduce_scatter, 2),
        }
    )
    try:
        yield
    finally:
        collectives.dist = plain
        launcher.shutdown()
