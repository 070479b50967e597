"""The sum of squares of many tensors in one launch."""

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from samestep.kernels import elementwise
from samestep.kernels.call import CHUNK, Table, chunk_table

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def square_sum(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of squares of contiguous tensors of one device, () float64."""
    parts = []
    for dtype in dict.fromkeys([tensor.dtype for tensor in tensors]):
        alike = [tensor for tensor in tensors if tensor.dtype is dtype]
        chunks = chunk_table(tuple(map(Tensor.numel, alike)), alike[0].device)
        table = Table([alike])
        sums = torch.empty(len(chunks), dtype=torch.float64, device=alike[0].device)
        elementwise.square_sums[(len(chunks),)](
            table.addresses,
            chunks,
            sums,
            dtype=DTYPES[dtype],
            ALIGNED=table.aligned,
            BLOCK=CHUNK,
            num_warps=8,
        )
        parts.append(sums.sum())
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()
