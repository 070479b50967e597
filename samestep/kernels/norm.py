"""Sums of squares of many tensors, in one launch per dtype."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from samestep.kernels import elementwise
from samestep.kernels.call import CHUNK, Table, chunk_table
from samestep.kernels.launch import launch

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# Of state too: codes, and remainders of bfloat16.
STORED_DTYPES = {**DTYPES, torch.int8: tl.int8, torch.uint8: tl.uint8, torch.int16: tl.int16}


class _Launch(NamedTuple):
    """The arguments of one launch on tensors of one dtype, which it does not keep."""

    addresses: Tensor
    aligned: bool
    chunks: Tensor
    sums: Tensor  # of each chunk, float64
    dtype: tl.dtype


class SquareSum:
    """A sum of squares of contiguous tensors of one device, which can run many times."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._launches = []
        for dtype in dict.fromkeys([tensor.dtype for tensor in tensors]):
            alike = [tensor for tensor in tensors if tensor.dtype is dtype]
            chunks = chunk_table(tuple(map(Tensor.numel, alike)), alike[0].device)
            sums = torch.empty(len(chunks), dtype=torch.float64, device=alike[0].device)
            table = Table([alike])
            self._launches.append(
                _Launch(table.addresses, table.aligned, chunks, sums, DTYPES[dtype])
            )

    def run(self) -> Tensor:
        """Return the sum of squares, () float64."""
        for addresses, aligned, chunks, sums, dtype in self._launches:
            with torch.cuda.device_of(sums):  # type: ignore[no-untyped-call]
                launch(
                    elementwise.square_sums,
                    (len(chunks),),
                    addresses,
                    chunks,
                    sums,
                    dtype=dtype,
                    ALIGNED=aligned,
                    BLOCK=CHUNK,
                    num_warps=8,
                )
        parts = [launch.sums.sum() for launch in self._launches]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


def square_sum(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of contiguous tensors of one device, () float64."""
    return SquareSum(tensors).run()
