"""Which operands with small state the kernels take: what they do not know is plain torch's."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from samestep.rules.noise import Origin
from samestep.rules.stored import REMAINDER_KEY, encode, split_remainder
from samestep.update.plain import Operand
from samestep.update.triton import _by_kind, _fits

SHAPE = (4, 64)


def codes(key, q=32, shape=SHAPE):
    found, scale = encode(torch.randn(shape).abs(), q, signed=key != "exp_avg_sq")
    return {key: found, f"{key}_scale": scale}


def operand(*states, dtype=torch.float32, random=("exp_avg", "exp_avg_sq"), **own):
    """AdamW's, of a whole tensor."""
    state = {"step": torch.zeros(())}
    for other in states:
        state |= other
    for key in ("exp_avg", "exp_avg_sq"):
        state.setdefault(key, torch.zeros(SHAPE))
    seeds = {key: 7 for key in random if state[key].dtype != torch.float32}
    given = {"origin": Origin(0, (64, 1), seeds) if seeds else None, **own}
    return Operand(torch.zeros(SHAPE, dtype=dtype), torch.zeros(SHAPE), state, **given)


def narrow(key):
    return {key: torch.zeros(SHAPE, dtype=torch.bfloat16)}


def remainder():
    return {REMAINDER_KEY: split_remainder(torch.randn(SHAPE))[1]}


KNOWN = {
    "32 bits": lambda: operand(),
    "8 bits": lambda: operand(codes("exp_avg"), codes("exp_avg_sq")),
    "one of them": lambda: operand(codes("exp_avg_sq")),
    "bf16": lambda: operand(narrow("exp_avg"), random=()),
    "bf16 at random": lambda: operand(narrow("exp_avg"), codes("exp_avg_sq")),
    "a remainder": lambda: operand(remainder(), dtype=torch.bfloat16),
    "a part": lambda: operand(codes("exp_avg"), origin=Origin(192, (192, 1), {"exp_avg": 7})),
}
UNKNOWN = {
    "a frame": lambda: operand(
        codes("exp_avg"), origin=Origin(0, (192, 1), {"exp_avg": 7}, frame=(9, 64), start=64)
    ),
    "codes without a seed": lambda: operand(codes("exp_avg"), random=()),
    "blocks of two sizes": lambda: operand(codes("exp_avg", 32), codes("exp_avg_sq", 64)),
    "codes of another kind": lambda: operand(
        {**codes("exp_avg"), "exp_avg": torch.zeros(SHAPE, dtype=torch.uint8)}
    ),
    "a remainder of float16": lambda: operand(remainder(), dtype=torch.float16),
    "a master of bf16": lambda: operand(narrow("master_weight"), dtype=torch.bfloat16),
    "float16 at random": lambda: operand({"exp_avg": torch.zeros(SHAPE, dtype=torch.float16)}),
    "float64": lambda: operand({"exp_avg": torch.zeros(SHAPE, dtype=torch.float64)}, random=()),
    "other state at random": lambda: operand(
        {"variance": torch.zeros(SHAPE, dtype=torch.bfloat16)},
        origin=Origin(0, (64, 1), {"variance": 7}),
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_kernels_take(name):
    assert _fits(KNOWN[name]())


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_they_leave_to_plain_torch(name):
    assert not _fits(UNKNOWN[name]())


def test_boxes_of_boxes_are_left():
    """Elements in runs, and runs in groups that lie apart: more than kernels can tell."""
    shape = (2, 4, 32)
    state = {"step": torch.zeros(()), **codes("exp_avg", 32, shape)}
    state["exp_avg_sq"] = torch.zeros(shape)
    for strides, fits in (((1024, 64, 1), False), ((256, 64, 1), True), ((1024, 32, 1), True)):
        origin = Origin(0, strides, {"exp_avg": 7})
        whole = Operand(torch.zeros(shape), torch.zeros(shape), state, origin=origin)
        assert _fits(whole) == fits


def test_matrices_in_the_gaps_of_others_are_left():
    """There rows may share scales, and places are not in order."""
    stored = torch.zeros(64, 8)
    view = stored[:, ::2].mT
    scale = torch.zeros(2, 8)[:, ::2].mT
    state = {"step": torch.zeros(()), "momentum_buffer": view.to(torch.int8)}
    origin = Origin(0, (1, 8), {"momentum_buffer": 7})
    plain = Operand(view, view, {"momentum_buffer": view}, rows=4)
    assert _fits(plain)
    state["momentum_buffer_scale"] = scale
    assert not _fits(Operand(view, view, state, rows=4, origin=origin))
    lies_alike = torch.zeros(64, 8, dtype=torch.bfloat16)[:, ::2].mT
    narrow_state = {"step": torch.zeros(()), "momentum_buffer": lies_alike}
    assert _fits(Operand(view, view, narrow_state, rows=4))
    assert not _fits(Operand(view, view, narrow_state, rows=4, origin=origin))


def test_only_what_is_rounded_alike_is_launched_together():
    operands = [
        operand(narrow("exp_avg")),
        operand(narrow("exp_avg"), random=()),
        operand(codes("exp_avg", 32)),
        operand(codes("exp_avg", 64)),
        operand(narrow("exp_avg")),
        operand(codes("exp_avg", 64)),
    ]
    assert sorted(_by_kind(operands, range(6))) == [[0, 4], [1], [2], [3, 5]]


def test_rows_in_the_gaps_of_others_are_left():
    """Kernels would take places in memory for places in the whole tensor."""
    view = torch.zeros(8, 64)[::2]
    narrow_view = torch.zeros(8, 64, dtype=torch.bfloat16)[::2]
    state = {"step": torch.zeros(()), "momentum_buffer": narrow_view}
    origin = Origin(0, (128, 1), {"momentum_buffer": 7})
    assert _fits(Operand(view, view, state, rows=4))
    assert not _fits(Operand(view, view, state, rows=4, origin=origin))
