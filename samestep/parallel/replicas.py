"""Checks that copies of parameters are equal on all ranks that hold them."""

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from samestep.comm.groups import registry
from samestep.comm.integrity.checksum import checksums
from samestep.comm.meshes import own_box
from samestep.comm.messages import gather_everywhere


class ReplicasDifferError(RuntimeError):
    """Raised on every rank when copies of a parameter differ."""


def require_same_values(model: nn.Module) -> None:
    """Raise unless parameters of the same name are the same on all ranks. Collective."""
    _compare(model, "before they are laid out: seed all ranks alike, or load the same file")


def check_replicas(model: nn.Module) -> int:
    """Raise unless ranks that hold the same piece of a parameter hold the same bits. Collective.

    Pieces of all kinds: copies of tensor parallel, of data parallel, of meshes side by side.
    Returns how many pieces have copies.
    """
    return _compare(model, "after they were laid out: a gradient was not combined")


def _compare(model: nn.Module, when: str) -> int:
    if not dist.is_initialized():
        return 0
    pieces, values = [], []
    for name, param in model.named_parameters():
        pieces.append((name, own_box(param) if isinstance(param, DTensor) else None))
        values.append(param.to_local() if isinstance(param, DTensor) else param)
    mine = list(zip(pieces, checksums(values).tolist(), strict=True))
    seen: dict[object, tuple[int, int]] = {}  # by piece: who holds it first, and its checksum
    copied = set()
    for rank, theirs in enumerate(gather_everywhere(mine, registry.of().handle)):
        for piece, found in theirs:
            first, expected = seen.setdefault(piece, (rank, found))
            if first != rank:
                copied.add(piece)
            if found != expected:
                raise ReplicasDifferError(
                    f"parameter {piece[0]!r} differs between ranks {first} and {rank} {when}"
                )
    return len(copied)
