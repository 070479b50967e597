"""Fused weights, and by hand which rows and columns of each are which matrix."""

from typing import NamedTuple

import torch
from torch import Tensor


class Fused(NamedTuple):
    """A stored weight; `rows`: of each matrix its rows, in the usual orientation (out, in)."""

    shape: tuple[int, ...]
    options: dict[str, object]
    rows: tuple[list[int], ...]
    transposed: bool = False

    def apart(self, stored: Tensor) -> list[Tensor]:
        """Its matrices, (out, in) each, as tensors of their own."""
        found = []
        for matrix in stored if stored.ndim == 3 else [stored]:
            usual = matrix.T if self.transposed else matrix
            found += [usual[rows].clone() for rows in self.rows]
        return found


def _columns(shape, split, *rows):
    options = {"split_sizes": split, "transposed": True}
    return Fused(shape, options, rows, transposed=True)


TALL_Q = [0, 1, 2, 9, 10, 11, 18, 19, 20]
FUSED = {
    # three of three heads of three rows: 9 x 4, 9 x 9, 9 x 14
    **{
        f"qkv {kind}": Fused(
            (27, cols),
            {"split_sizes": "interleaved:3x3"},
            (TALL_Q, [r + 3 for r in TALL_Q], [r + 6 for r in TALL_Q]),
        )
        for kind, cols in (("tall", 4), ("square", 9), ("wide", 14))
    },
    # two groups of three queries' rows, one of keys and one of values
    "grouped queries": Fused(
        (10, 5), {"split_sizes": "interleaved:3+1+1x2"}, ([0, 1, 2, 5, 6, 7], [3, 8], [4, 9])
    ),
    "halves": Fused((8, 3), {"split_sizes": "halves"}, ([0, 1, 2, 3], [4, 5, 6, 7])),
    "heads": Fused((6, 7), {"split_sizes": "heads:3"}, ([0, 1], [2, 3], [4, 5])),
    "stored tall": _columns((9, 5), None, [0, 1, 2, 3, 4]),
    "stored wide": _columns((5, 9), None, list(range(9))),
    "stored qkv": _columns((7, 10), (6, 2, 2), [0, 1, 2, 3, 4, 5], [6, 7], [8, 9]),
    "stored heads": _columns((5, 6), "interleaved:3x2", [0, 3], [1, 4], [2, 5]),
    "experts side by side": _columns((3, 4, 10), "halves", [0, 1, 2, 3, 4], [5, 6, 7, 8, 9]),
    "experts in turn": _columns((3, 6, 8), "interleaved:2x4", [0, 2, 4, 6], [1, 3, 5, 7]),
    "experts down": _columns((3, 4, 6), None, list(range(6))),
    "expert rows": Fused(
        (2, 8, 5), {"split_sizes": "interleaved:3+1x2"}, ([0, 1, 2, 4, 5, 6], [3, 7])
    ),
}
RATES = {
    "default": {},
    "keller": {"adjust_lr": "original", "variance_beta2": 0.9, "momentum_form": "sum"},
    "nanochat": {
        "adjust_lr": "original", "variance_beta2": 0.9, "equilibrate": True, "renormalize": True,
        "cautious": True, "scale_decay": True,
    },
}  # fmt: skip


def values(step: int, rank: int = 0) -> dict[str, Tensor]:
    """Numbers of the shape of each weight, others in each step and on each rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(of.shape, generator=generator) for name, of in FUSED.items()}
