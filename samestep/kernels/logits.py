"""A kernel for the largest attention logit of each head, which stores no logits.

The kernel reads queries and keys and keeps one number for each tile of queries, where plain torch
writes every logit in 32 bits, several times.
"""

import sys
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST_HEAD = 256  # elements: of more, tiles would be too small


def fits(query: Tensor, key: Tensor) -> bool:
    """Whether the kernel supports queries and keys: 16 bits, at most LARGEST_HEAD per head.

    GPUs before Ampere have too little shared memory, and no tensor cores that Triton uses.
    """
    device = query.device
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return False
    halves = query.dtype == key.dtype and query.dtype in (torch.float16, torch.bfloat16)
    return halves and 0 < query.shape[-1] <= LARGEST_HEAD and min(query.numel(), key.numel()) > 0


def largest_of_heads(
    query: Tensor,  # (B, H, T, D)
    key: Tensor,  # (B, G, S, D): H / G heads of queries share one of keys
    scale: float,  # above 0
    *,
    is_causal: bool,
    mask: Tensor | None,  # (B, H, T, S): bool, or what is added
    hidden: float,  # where that is added, or less, a pair does not attend
) -> Tensor:
    """Return the largest scale * q k of pairs that attend, (H,) float32; -inf: no pair does."""
    (batch, heads, length, size), (kv_heads, places) = query.shape, key.shape[1:3]
    wide = max(16, triton.next_power_of_2(size))
    cut = _cut(wide, query.device)
    tiles = -(-length // cut["ROWS"])
    found = torch.empty(batch, heads, tiles, dtype=torch.float32, device=query.device)
    strides: tuple[int, ...] = (0, 0, 0, 0)
    if mask is not None:
        strides = mask.stride()
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    with torch.cuda.device_of(query):
        _largest[(tiles * batch, heads)](
            query,
            key,
            mask,
            found,
            length,
            places,
            size,
            heads // kv_heads,
            *query.stride(),
            *key.stride(),
            *strides,
            hidden,
            CAUSAL=is_causal,
            SIZE=wide,
            **cut,
        )
    return found.amax((0, 2)) * scale  # rounding keeps the order


def _cut(size: int, device: torch.device) -> dict[str, int]:
    """Return the tile sizes of queries and keys, and the pipeline stages of key tiles."""
    rows, cols, stages = 128, 64 if size > 128 else 128, 3
    if 2 * size * (rows + stages * cols) <= _room(device):
        return {"ROWS": rows, "COLS": cols, "num_stages": stages, "num_warps": 8}
    return {"ROWS": 64, "COLS": 64, "num_stages": 2, "num_warps": 4}


@cache
def _room(device: torch.device) -> int:
    """Return the shared memory that a program may use, in bytes."""
    if device.type != "cuda":
        return sys.maxsize  # of Triton's interpreter
    told: Any = torch.cuda.get_device_properties(device)  # torch's types do not have it
    return int(told.shared_memory_per_block_optin)


@triton.jit
def _largest(
    query,
    key,
    mask,  # None: none
    found,  # (batch, heads, tiles)
    length,
    places,
    size,
    share,  # heads of queries for one of keys
    query_batch, query_head, query_row, query_col,
    key_batch, key_head, key_row, key_col,
    mask_batch, mask_head, mask_row, mask_col,
    hidden,  # what a mask adds where a pair does not attend, or less
    CAUSAL: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Compute the largest logit of one tile of queries and all keys."""
    # In 64 bits: long sequences lie far apart.
    tiles, head = tl.cdiv(length, ROWS), tl.program_id(1).to(tl.int64)
    tile, batch = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    row, inner = tile * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, SIZE)[None, :]
    begin = query + batch * query_batch + head * query_head
    at = begin + row.to(tl.int64) * query_row + inner * query_col
    rows = tl.load(at, (row < length) & (inner < size), 0.0)
    keys = key + batch * key_batch + (head // share) * key_head
    masks = mask
    if mask is not None:
        masks = mask + batch * mask_batch + head * mask_head
    best = tl.full((ROWS, COLS), float("-inf"), tl.float32)
    # Tiles of keys that all rows see whole need no comparison.
    end = tl.cdiv(places, COLS)
    whole = places // COLS
    if CAUSAL:
        end = tl.minimum(end, tl.cdiv(tile * ROWS + ROWS, COLS))
        whole = tl.minimum(whole, (tile * ROWS + 1) // COLS)
    if mask is not None:
        whole = end * 0
    for number in tl.range(0, whole):
        s = _product(rows, keys, number, places, size, key_row, key_col, False, COLS, SIZE)
        best = tl.maximum(best, s, propagate_nan=tl.PropagateNan.ALL)
    for number in tl.range(whole, end):
        s = _product(rows, keys, number, places, size, key_row, key_col, True, COLS, SIZE)
        col = number * COLS + tl.arange(0, COLS)[None, :]
        seen = (row < length) & (col < places)
        if CAUSAL:
            seen = seen & (col <= row)
        if mask is not None:
            there = masks + row.to(tl.int64) * mask_row + col.to(tl.int64) * mask_col
            if mask.dtype.element_ty == tl.uint8:
                seen = seen & (tl.load(there, seen, 0) != 0)
            else:
                seen = seen & (tl.load(there, seen, float("-inf")).to(tl.float32) > hidden)
        s = tl.where(seen, s, float("-inf"))
        best = tl.maximum(best, s, propagate_nan=tl.PropagateNan.ALL)
    best = tl.where(row < length, best, float("-inf"))
    # A reduction would lose a NaN.
    broken = tl.max(tl.max((best != best).to(tl.int32), 1), 0)
    largest = tl.max(tl.max(tl.where(best != best, float("-inf"), best), 1), 0)
    place = (batch * tl.num_programs(1) + head) * tiles + tile
    tl.store(found + place, tl.where(broken != 0, float("nan"), largest))


@triton.jit
def _product(
    rows, keys, number, places, size, key_row, key_col,
    PARTLY: tl.constexpr, COLS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Return queries times a tile of keys, (ROWS, COLS) float32; PARTLY: the tile is cut off."""
    col, inner = number * COLS + tl.arange(0, COLS)[None, :], tl.arange(0, SIZE)[:, None]
    inside = inner < size
    if PARTLY:
        inside = inside & (col < places)
    at = keys + col.to(tl.int64) * key_row + inner * key_col
    return tl.dot(rows, tl.load(at, inside, 0.0))
