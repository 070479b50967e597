"""Tables of addresses: with them one launch works on many tensors where they lie."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

CHUNK = 4096  # elements of one tensor that one program works on


def on_device(values: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Rows of integers as a tensor on a device that nobody waits for."""
    on_gpu = device.type == "cuda"
    return torch.tensor(values, dtype=torch.int64, pin_memory=on_gpu).to(device, non_blocking=True)


def addresses(rows: Sequence[Sequence[Tensor]]) -> Tensor:
    """(rows, tensors): where each tensor begins."""
    return on_device([[t.data_ptr() for t in row] for row in rows], rows[0][0].device)


def aligned(rows: Sequence[Sequence[Tensor]]) -> bool:
    """Whether every tensor begins at a multiple of 16 bytes and has a multiple of 8 elements."""
    return all(t.data_ptr() % 16 == 0 and t.numel() % 8 == 0 for row in rows for t in row)


@lru_cache(maxsize=256)
def chunk_table(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """(chunks, 3): tensor, first element, size of the tensor; `CHUNK` elements or fewer each."""
    rows = [
        (number, first, size)
        for number, size in enumerate(sizes)
        for first in range(0, size, CHUNK)
    ]
    return torch.tensor(rows or [(0, 0, 0)], dtype=torch.int64).to(device)
