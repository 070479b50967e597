"""Copies of parameters: the same bits on every rank that holds one."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from samestep.comm.groups import registry
from samestep.comm.integrity.checksum import checksums
from samestep.comm.meshes import held, mesh_group
from samestep.comm.messages import gather_everywhere

Held = dict[tuple[str, object], int]  # what a rank holds, and its checksum


class ReplicasDifferError(RuntimeError):
    """Copies that are not the same. Raised on every rank."""


def require_same_values(model: nn.Module) -> None:
    """Raise unless parameters of the same name are the same on all ranks. Collective."""
    _compare(_held(model), "before they are laid out: seed all ranks alike, or load the same file")


@torch.no_grad()
def check_replicas(model: nn.Module) -> int:
    """Raise unless ranks that hold the same piece of a parameter hold the same bits. Collective.

    Pieces of all kinds: copies of tensor parallel, of data parallel, of meshes side by side.
    Returns how many pieces have copies.
    """
    return _compare(_held(model), "after they were laid out: a gradient was not combined")


def _held(model: nn.Module) -> Held:
    pieces: list[tuple[str, object]] = []
    values: list[Tensor] = []
    for name, param in model.named_parameters():
        box: object = None
        if isinstance(param, DTensor):
            group = mesh_group(param.device_mesh)
            box = held(param, group).boxes[group.rank]
        pieces.append((name, box))
        values.append(param.to_local() if isinstance(param, DTensor) else param)
    return dict(zip(pieces, checksums(values).tolist(), strict=True))


def _compare(mine: Held, when: str) -> int:
    if not dist.is_initialized():
        return 0
    seen: dict[tuple[str, object], tuple[int, int]] = {}
    copied = set()
    for rank, theirs in enumerate(gather_everywhere(mine, registry.of().handle)):
        for piece, found in theirs.items():
            if piece not in seen:
                seen[piece] = rank, found
                continue
            copied.add(piece)
            first, expected = seen[piece]
            if found != expected:
                raise ReplicasDifferError(
                    f"parameter {piece[0]!r} differs between ranks {first} and {rank} {when}"
                )
    return len(copied)
