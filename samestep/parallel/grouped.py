"""One product of all experts: a stack of matrices times the rows that each of them was given."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import linear

grouped_mm = getattr(functional, "grouped_mm", None)  # torch 2.9 has none

Products = Literal["auto", "grouped", "loop"]
ALIGNMENT = 16  # bytes; torch's kernels want rows of all operands to begin at multiples of it


def grouped_linear(
    rows: Tensor, stack: Tensor, counts: Sequence[int] | Tensor, products: Products = "auto"
) -> Tensor:
    """(n, C) by (E, D, C): the first `counts[0]` rows by the first matrix, and so on; (n, D).

    Args:
        rows: By expert; as many as all counts together.
        stack: A matrix for each expert, as `linear` takes it.
        counts: Rows of each expert, on the host or the device; any of them may be 0.
        products: "grouped": one call of torch's grouped_mm, which a GPU runs as one kernel.
            "loop": a call of `linear` for each expert. "auto": grouped in bfloat16 on a GPU
            that has a kernel for it, if sizes are aligned; otherwise the loop.
    """
    device = rows.device.type
    if torch.is_autocast_enabled(device):  # it knows linear, and not grouped_mm
        dtype = torch.get_autocast_dtype(device)
        rows, stack = rows.to(dtype), stack.to(dtype)
    if products == "auto":
        products = "grouped" if _pays(rows, stack) else "loop"
    if products == "grouped":
        _check(rows, stack)
    made: Tensor
    if products == "grouped" and rows.dtype is torch.bfloat16 and len(rows):
        made = _all_at_once(rows, stack, counts)
    else:
        made = _uncompiled(rows, stack, counts, products)
    return made


def _all_at_once(rows: Tensor, stack: Tensor, counts: Sequence[int] | Tensor) -> Tensor:
    ends = torch.as_tensor(counts, device=rows.device).cumsum(0, dtype=torch.int32)
    assert grouped_mm is not None  # `_check` has seen to it
    made: Tensor = grouped_mm(rows, stack.mT, offs=ends)
    if made.requires_grad and not torch.compiler.is_compiling():
        # The kernel takes no expanded gradient, as that of a sum is.
        made.register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call]
    return made


# A loop has sizes that differ from step to step, and would be compiled again and again. And torch's
# compiler (2.11, 2.13) knows grouped_mm in bfloat16 alone.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _uncompiled(
    rows: Tensor, stack: Tensor, counts: Sequence[int] | Tensor, products: Products
) -> Tensor:
    if products == "grouped" and len(rows):
        return _all_at_once(rows, stack, counts)
    sizes = counts.tolist() if isinstance(counts, Tensor) else list(counts)
    parts = zip(torch.split(rows, sizes), stack, strict=True)
    return torch.cat([linear(part, matrix) for part, matrix in parts])


def _aligned(stack: Tensor) -> bool:
    """Both ways: gradients are products of the transposed operands."""
    return all(size * stack.element_size() % ALIGNMENT == 0 for size in stack.shape[1:])


def _pays(rows: Tensor, stack: Tensor) -> bool:
    if not rows.is_cuda or rows.dtype is not torch.bfloat16 or not _aligned(stack):
        return False
    if grouped_mm is None or torch.version.hip is not None:  # nobody has tried it on ROCm
        return False
    return torch.cuda.get_device_capability(rows.device) >= (8, 0)


def _check(rows: Tensor, stack: Tensor) -> None:
    if grouped_mm is None:
        raise RuntimeError(
            f'products="grouped" needs a newer torch than {torch.__version__}: use '
            'products="auto" or "loop"'
        )
    if not _aligned(stack):
        raise ValueError(
            'products="grouped" needs matrices whose rows and columns are multiples of '
            f"{ALIGNMENT} bytes, and these are {stack.shape[1]} x {stack.shape[2]} of "
            f'{stack.dtype}: change the sizes, or use products="auto" or "loop"'
        )
    if rows.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f'products="grouped" does not support {rows.dtype}: use products="auto" or "loop"'
        )
