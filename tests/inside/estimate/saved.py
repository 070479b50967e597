"""Bytes that autograd holds between forward and backward, tensor by tensor."""

from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor


class Saved:
    """Storages that were saved for backward, known by their addresses; each counts once."""

    def __init__(self):
        self.sizes = {}
        self._alive = []  # so that no address is given out again

    @property
    def bytes(self):
        return sum(self.sizes.values())


@contextmanager
def saved_for_backward(model, *inputs):
    """Collect what the forward of this block saves, without parameters, buffers and inputs."""
    found = Saved()

    def pack(tensor):
        storage = _storage(tensor)
        # FSDP2 puts whole parameters in place while a module runs: those of this moment.
        known = (*model.parameters(), *model.buffers(), *inputs)
        if storage.data_ptr() not in {_storage(each).data_ptr() for each in known}:
            found.sizes[storage.data_ptr()] = storage.nbytes()
            found._alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def _storage(tensor):
    """Of what this rank has."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor  # `to_local` would be another step of autograd
    return getattr(tensor, "elem", tensor).untyped_storage()  # a collective that nobody awaited
