"""Symmetric products in Triton: one triangle is computed, both are written.

With `L` and `R` of (B, m, k) whose product `L R^T` is symmetric,

    out = s (alpha L R^T + beta D + gamma I) + shift I

for a scale `s` per block. That covers every m x m product of an orthogonalization: `X X^T`, the
polynomial `a I + b A + c A A` of a symmetric `A`, and products of polynomials of the same `A`,
which commute.

Rounding breaks this. In `P = p(A)` the diagonal is rounded most, since it contains `a`. Its
rounding error `d` can be kept (`residue`) and given to the product with `A`, whose other triangle
is then `P A` too: `A P` and `P A` differ by `A_ij (d_j - d_i)`.

Tiles are read through Hopper's copy engine (TMA), which also clips them at the edges.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from samestep.kernels.choice import Way, way_of
from samestep.kernels.launch import launch


class Tiling(NamedTuple):
    """The tiling of a product: tiles of rows x cols, in steps of `depth` of the inner dimension."""

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int


# The best of a dozen on an H200 that is as hot as in training: it then draws all the power it may.
TILINGS: dict[Way, Tiling] = {
    "large": Tiling(128, 256, 64, warps=8, stages=4),
    "small": Tiling(128, 128, 64, warps=8, stages=3),
}


def symmetric_product(
    left: Tensor,  # (B, m, k)
    right: Tensor,  # (B, m, k)
    *,
    addend: Tensor | None = None,  # (B, m, m), symmetric
    scales: Tensor | None = None,  # (B,) float32
    alpha: float = 1.0,
    beta: float = 0.0,
    gamma: float = 0.0,
    shift: float = 0.0,
    residue: Tensor | None = None,  # (B, m) float32, written: the result's diagonal, less unrounded
    left_residue: Tensor | None = None,  # (B, m) float32: why `left` and a square `right` differ
    dtype: torch.dtype | None = None,
    way: Way | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """Return scales (alpha left right^T + beta addend + gamma I) + shift I, (B, m, m).

    The result is symmetric; `left_residue`, for two operands alone, corrects its mirrored triangle.
    Products by torch compute both triangles: they write no residue and need none.
    """
    count, size, depth = left.shape
    way = way or way_of(size, depth)
    if alpha == 0.0 or (tiling is None and way == "torch"):  # kernels divide by alpha
        found = _by_torch(left, right, addend, scales, alpha, beta, gamma, dtype or left.dtype)
        if shift != 0.0:
            found.diagonal(dim1=-2, dim2=-1).add_(shift)
        return found
    out = left.new_empty(count, size, size, dtype=dtype or left.dtype)
    tiling = tiling or TILINGS[way]
    rows, cols = tiling.rows, tiling.cols
    bands = triton.cdiv(size, cols)
    tiles = cols // rows * bands * (bands + 1) // 2

    def tiled(tensor: Tensor, *block: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(tensor, [1, *block])

    launch(
        _symmetric_kernel,
        (count * tiles,),
        tiled(left, rows, tiling.depth),
        tiled(right, cols, tiling.depth),
        tiled(right, rows, tiling.depth) if cols > rows else None,
        addend,
        None if addend is None else tiled(addend, rows, cols),
        None if addend is None else tiled(out, rows, cols),
        out,
        scales,
        residue,
        left_residue,
        None if left_residue is None else tiled(right, rows, cols),
        alpha,
        beta,
        gamma,
        shift,
        tiles,
        size,
        depth,
        ROWS=rows,
        COLS=cols,
        DEPTH=tiling.depth,
        HAS_GAMMA=gamma != 0.0,
        HAS_SHIFT=shift != 0.0,
        num_warps=tiling.warps,
        num_stages=min(tiling.stages, 3) if addend is not None else tiling.stages,  # it takes room
        # So that a multiprocessor has room for two programs, as without a residue.
        maxnreg=128 if left_residue is not None and rows == cols else None,
    )
    return out


def _by_torch(
    left: Tensor,
    right: Tensor,
    addend: Tensor | None,
    scales: Tensor | None,
    alpha: float,
    beta: float,
    gamma: float,
    dtype: torch.dtype,
) -> Tensor:
    """Compute the symmetric product by torch, both triangles."""
    if addend is None:
        out = torch.bmm(left, right.mT)
        out = out if alpha == 1.0 else out * alpha
    elif alpha == 0.0:  # which baddbmm gets wrong on x86
        out = addend * beta
    else:
        out = torch.baddbmm(addend, left, right.mT, beta=beta, alpha=alpha)
    if gamma != 0.0:
        out.diagonal(dim1=-2, dim2=-1).add_(gamma)
    if scales is not None:
        out = out.float() * scales.view(-1, 1, 1)
    return out.to(dtype)


@triton.jit
def _symmetric_kernel(
    left,
    right,
    right_half,
    addend,
    addend_tiles,
    out_tiles,
    out,
    scales,
    residue,
    left_residue,
    right_tiles,
    alpha,
    beta,
    gamma,
    shift,
    tiles,
    size,
    depth: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    HAS_GAMMA: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
):
    """Compute one tile of a block's lower triangle, band by band of COLS rows."""
    batch, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    # Band b has IN_BAND (b + 1) tiles: invert the triangular numbers, then mend rounding.
    IN_BAND: tl.constexpr = COLS // ROWS
    band = ((tl.sqrt(8.0 * (tile // IN_BAND).to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    band = tl.where(IN_BAND * (band + 1) * (band + 2) // 2 <= tile, band + 1, band)
    band = tl.where(IN_BAND * band * (band + 1) // 2 > tile, band - 1, band)
    place = tile - IN_BAND * band * (band + 1) // 2
    row, col = (band * IN_BAND + place // (band + 1)) * ROWS, place % (band + 1) * COLS
    scale = 1.0
    if scales is not None:
        scale = tl.load(scales + batch)
    if IN_BAND == 2 and row == col:  # the right half of this tile is above the diagonal
        _tile(
            left, right_half, addend, addend_tiles, out_tiles, out, scale, residue, left_residue,
            right_tiles, alpha, beta, gamma, shift, batch, row, col, size, depth,
            ROWS, ROWS, DEPTH, HAS_GAMMA, HAS_SHIFT, WHOLE=False,
        )  # fmt: skip
    else:
        _tile(
            left, right, addend, addend_tiles, out_tiles, out, scale, residue, left_residue,
            right_tiles, alpha, beta, gamma, shift, batch, row, col, size, depth,
            ROWS, COLS, DEPTH, HAS_GAMMA, HAS_SHIFT, WHOLE=True,
        )  # fmt: skip


@triton.jit
def _tile(
    left,
    right,
    addend,
    addend_tiles,
    out_tiles,
    out,
    scale,
    residue,
    left_residue,
    right_tiles,
    alpha,
    beta,
    gamma,
    shift,
    batch,
    row,
    col,
    size,
    depth: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    HAS_GAMMA: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    WHOLE: tl.constexpr,  # whether it is a tile as the copy engine knows them
):
    """Compute a tile, and write it and its mirror image."""
    rows, cols = row + tl.arange(0, ROWS)[:, None], col + tl.arange(0, COLS)[None, :]
    inside = (rows < size) & (cols < size)
    begin = batch.to(tl.int64) * size * size
    if addend is not None:  # the first value of the sum: it comes while the first tiles do
        if WHOLE:
            added = addend_tiles.load([batch, row, col]).reshape(ROWS, COLS)
        else:
            added = tl.load(addend + begin + rows * size + cols, inside, 0.0)
        total = added.to(tl.float32) * (beta / alpha)
    else:
        total = tl.zeros((ROWS, COLS), tl.float32)
    for k in range(0, depth, DEPTH):
        a = left.load([batch, row, k]).reshape(ROWS, DEPTH)
        b = right.load([batch, col, k]).reshape(COLS, DEPTH)
        total = tl.dot(a, b.T, total)
    total = total * alpha
    if HAS_GAMMA:
        total = tl.where(rows == cols, total + gamma, total)
    total = total * scale
    if HAS_SHIFT:
        total = tl.where(rows == cols, total + shift, total)
    result = total.to(out.dtype.element_ty)
    if addend is not None and WHOLE:  # which way is faster was measured
        out_tiles.store([batch, row, col], result.reshape(1, ROWS, COLS))
    else:
        tl.store(out + begin + rows * size + cols, result, inside)
    own = batch * size
    if residue is not None:
        if row < col + COLS:  # the diagonal is in this tile
            moved = tl.where(rows == cols, result.to(tl.float32) - total, 0.0)
            place = row + tl.arange(0, ROWS)
            tl.store(residue + own + place, tl.sum(moved, 1), place < size)
    # Squares on the diagonal are complete: a second writer there would be a race.
    if WHOLE:
        if row != col:
            if left_residue is not None:
                apart = tl.load(left_residue + own + cols, cols < size, 0.0)
                apart -= tl.load(left_residue + own + rows, rows < size, 0.0)
                values = right_tiles.load([batch, row, col]).reshape(ROWS, COLS)
                result = (total + values.to(tl.float32) * apart).to(out.dtype.element_ty)
            row_, col_ = row + tl.arange(0, ROWS)[None, :], col + tl.arange(0, COLS)[:, None]
            below = (row_ // ROWS > col_ // ROWS) & (row_ < size) & (col_ < size)
            tl.store(out + begin + col_ * size + row_, result.T, below)
