"""Kernels around the products compile for a GPU: what the interpreter lets pass need not."""

from __future__ import annotations

import os
from collections import Counter

import pytest

tl = pytest.importorskip("triton.language")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource, compile  # noqa: A004, E402

from samestep.kernels import elementwise, logits, muon_tiles, part_tiles  # noqa: E402
from samestep.kernels.call import FUSION  # noqa: E402
from samestep.kernels.symmetric import TILINGS, _symmetric_kernel  # noqa: E402
from tests.soak import SOAK, some, twin  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
NUMBERS = "only_if writes mu factor lr weight_decay sums"
TYPES = {
    **dict.fromkeys(NUMBERS.split(), "*fp64"),
    **dict.fromkeys(["rows", "cols", "short", "long", "count", "tiles", "along"], "i32"),
    **dict.fromkeys(["grads", "momenta", "tensors", "parts", "moves", "sources"], "*i64"),
    **dict.fromkeys(["across", "room"], "i32"),
    **dict.fromkeys(["group", "group_stride", "row_stride", "col_stride"], "i32"),
    **dict.fromkeys(["directions", "out"], "*bf16"),
    **dict.fromkeys(["factors", "lr_factors", "powers", "norms", "squares"], "*fp32"),
    **dict.fromkeys(["programs", "again", "flags"], "*i32"),
    **dict.fromkeys(["lr_factor", "limit", "norm_factor", "eps", "root_rows", "least"], "fp32"),
}
# As they are launched, or a quarter: the time goes into what a thread does, element by element.
SIDE, SHARE = (64, 1) if SOAK else (32, 4)
TILE = {"ROWS": SIDE, "COLS": SIDE, "TILES": 1}
ON = {"BFLOAT16": True, **dict.fromkeys(["LAID", "RANDOM"], False), "Q": 0, "PLACES": "near"}
ON |= dict.fromkeys(["scales", "steps", "origins", "kept", "unscaled"])
DTYPES = {
    "grad_dtype": tl.float32,
    "state_dtype": tl.float32,
    "param_dtype": tl.bfloat16,
    "master_dtype": tl.float32,
    "step_dtype": tl.float32,
    "direction_dtype": tl.bfloat16,
    "dtype": tl.bfloat16,
}


def compiled(kernel, types=(), **constants):
    """The PTX of a kernel for pointers and sizes that are multiples of 16; None: not given."""
    given = {**TILE, **ON, **DTYPES, **constants}
    names = kernel.arg_names
    types = {n: kind for n, kind in {**TYPES, **dict(types)}.items() if n not in constants}
    source = ASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): given[name] for name in names if name not in types},
        {(names.index(n),): [["tt.divisibility", 16]] for n in names if n in types},
    )
    options = {"num_warps": given.get("warps", 4), "enable_fp_fusion": FUSION}
    return compile(source, target=HOPPER, options=options).asm["ptx"]


def operations(ptx, *, codes=0):
    """How many of each kind of float32 arithmetic; `codes`: signed ones that a thread writes.

    Only what encodes them is written as fma, three of each, all of which are exact.
    """
    words = [line.split()[0] for line in ptx.splitlines() if line.strip()]
    others = ("mov", "cvt")  # rounding is rounding, of one value or of two at once
    words = [word for word in words if word.endswith(".f32") and not word.startswith(others)]
    found = Counter(words)
    assert found["mul.rn.f32"] + found["add.rn.f32"] > 0
    assert found.pop("fma.rn.f32", 0) == 3 * codes
    assert not [word for word in found if word.startswith("fma")]
    return found


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("kernels are interpreted here, not compiled")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@twin
@pytest.mark.parametrize("form", [{"EMA": True}, *[{"EMA": False}] * SOAK], ids=str)
def test_momentum_of_a_part_is_that_of_a_block(form):
    """The same arithmetic, as it is written: or layouts would differ in last bits."""
    options = {**form, "NESTEROV": True, "MAXIMIZE": False, "ALIGNED": True, "writes": None}
    of_part = compiled(part_tiles.momentum_of_parts, GRADS_ALIGNED=True, **options)
    of_block = compiled(
        muon_tiles.momentum, GIVEN=False, TALL=False, ONLY_SUMS=False, powers=None,
        **options,
    )  # fmt: skip
    assert operations(of_part) == operations(of_block)
    assert "ld.global.v4.b32" in of_part  # 16 bytes at once
    assert "st.global.v4.b32" in of_part


@pytest.mark.parametrize("cautious", [True, *[False] * SOAK])
def test_the_step_of_a_part_is_that_of_a_block(cautious):
    options = {
        "CAUTIOUS": cautious, "SCALE_DECAY": False, "INDEPENDENT": not cautious, "ALIGNED": True,
    }  # fmt: skip
    of_part = compiled(part_tiles.step_of_parts, TURNED_ALIGNED=True, **options)
    of_block = compiled(muon_tiles.step_along, TALL=False, FACTORS=0, **options)
    beside = operations(of_block) - operations(of_part)  # of the sum that tells outliers
    assert not operations(of_part) - operations(of_block)
    assert set(beside) <= {"mul.rn.f32", "add.rn.f32", "selp.f32", "setp.le.f32"}
    assert "ld.global.v4.b32" in of_part


@pytest.mark.parametrize("tall", [True, *[False] * SOAK])
def test_blocks_in_the_gaps_of_others_have_the_arithmetic_of_contiguous_ones(tall):
    options = {"ALIGNED": False, "TALL": tall}
    of_momentum = {
        **options, **dict.fromkeys(["EMA", "NESTEROV"], True),
        **dict.fromkeys(["GIVEN", "MAXIMIZE", "ONLY_SUMS"], False),
    }  # fmt: skip
    of_step = {
        **options, "CAUTIOUS": True, "SCALE_DECAY": False, "INDEPENDENT": False, "FACTORS": 2,
    }  # fmt: skip
    both = [(muon_tiles.momentum, of_momentum), (muon_tiles.step_along, of_step)]
    for kernel, given in both if SOAK else [both[tall]]:
        laid, contiguous = (compiled(kernel, LAID=laid, **given) for laid in (True, False))
        assert laid != contiguous
        found, wanted = operations(laid), operations(contiguous)
        del found["selp.f32"], wanted["selp.f32"]  # what is outside: a choice, or not stored
        assert found == wanted


@pytest.mark.parametrize("aligned", some([False, True]))
def test_others_compile(aligned):
    flags = {"ALIGNED": aligned, "TURNED_ALIGNED": aligned}
    assert ("ld.global.b16" not in compiled(part_tiles.moved, **flags)) == aligned
    given = dict.fromkeys(["EMA", "NESTEROV", "MAXIMIZE", "ONLY_SUMS"], False)
    values = {"grads": "*bf16", "momenta": "*bf16"}
    for tall in (False, True) if SOAK else (aligned,):
        compiled(
            muon_tiles.momentum, values, GIVEN=True, TALL=tall, ALIGNED=False, **given,
        )  # fmt: skip
        halves = {"directions": "*fp16"}
        compiled(muon_tiles.direction_again, halves, TALL=tall, **flags, **given)
        compiled(muon_tiles.equilibrate, {**halves, "given": "*bf16"}, TALL=tall, MULTIPLIED=False)


@pytest.mark.parametrize("known", [True, *[False] * SOAK])
def test_numbers_of_blocks_compile(known):
    types = {"parts": "i32", "scales": "*fp32"}
    compiled(muon_tiles.block_numbers, types, ADD=known, HAS_POWER=known, PARTS=1024)
    compiled(muon_tiles.squares_along, {"sums": "*fp32", "directions": "*fp16"}, SHORT=known)
    compiled(
        muon_tiles.direction_factors,
        {"square_sums": "*fp32", "variances": "*i64", "beta2": "*fp64"},
        RENORMALIZE=known, ADD=known, SIZE=1024, variance_dtype=tl.float32,
    )  # fmt: skip


FORMS = [("decoupled", True, False), ("l2", False, True)]  # decay, cautious, eps_hat
FORMS += [("decoupled", False, False), ("independent", True, True)] if SOAK else []


def compiled_adamw(types=(), **given):
    numbers = ["step_sizes", "root_corrections", "beta1", "beta2", "eps"]
    options = {
        "MAXIMIZE": False, "CAUTIOUS": False, "DECAY": "decoupled", "EPS_HAT": False,
        "ALIGNED": True, "BLOCK": 4096 // SHARE, "warps": 8, "first_dtype": tl.float32,
        "second_dtype": tl.float32, "master_dtype": None, "step_dtype": tl.float32, "Q": 0,
        "FIRST_RANDOM": False, "SECOND_RANDOM": False, "PLACES": "near",
        **dict.fromkeys(["scales", "steps", "origins"]),
    }  # fmt: skip
    for name in dict(types):
        del options[name]
    types = {**dict.fromkeys(numbers, "*fp64"), "chunks": "*i64", **dict(types)}
    return compiled(elementwise.adamw, types, **{**options, **given})


@pytest.mark.parametrize(("decay", "cautious", "eps_hat"), FORMS)
def test_forms_of_adamw_compile(decay, cautious, eps_hat):
    ptx = compiled_adamw(DECAY=decay, CAUTIOUS=cautious, EPS_HAT=eps_hat)
    assert "ld.global.v4.b32" in ptx


SMALL = {
    "8 bits": {"first_dtype": tl.int8, "second_dtype": tl.uint8, "Q": 256},
    "8 bits of 32": {"first_dtype": tl.int8, "second_dtype": tl.uint8, "Q": 32, "PLACES": "runs"},
    "at random": {"first_dtype": tl.bfloat16, "second_dtype": tl.bfloat16},
}


@pytest.mark.parametrize("name", some(list(SMALL), 3))
def test_adamw_with_small_state_compiles(name):
    types = {"scales": "*i64", "steps": "*i64", "origins": "*i64"}
    own = {**SMALL[name], "FIRST_RANDOM": True, "SECOND_RANDOM": True, "master_dtype": tl.int16}
    ptx = compiled_adamw(types, **own)
    operations(ptx, codes=16 // SHARE if "Q" in own else 0)
    assert "ld.global.b8" not in ptx  # codes are read many at once


def test_small_momentum_compiles():
    """Of parts and of tall blocks, in tiles as wide as a block of codes; and what follows."""
    narrow = {"directions": "*fp16", "unscaled": "*bf16"}
    given = {
        **dict.fromkeys(["EMA", "NESTEROV", "RANDOM", "ALIGNED", "TALL"], True), "PLACES": "far",
        **dict.fromkeys(["MAXIMIZE", "GIVEN"], False), "state_dtype": tl.int8, "Q": 256,
    }  # fmt: skip
    types = dict.fromkeys(["scales", "steps", "origins", "kept"], "*i64")
    wide = {**given, "ROWS": 16 // SHARE, "COLS": 256}
    ptx = compiled(part_tiles.momentum_of_parts, types, GRADS_ALIGNED=True, **wide)
    operations(ptx, codes=32 // SHARE)
    ptx = compiled(muon_tiles.direction_again, narrow, **given)
    assert "st.global.v4.b32" in ptx  # 16 bytes at once
    if SOAK:
        ptx = compiled(muon_tiles.momentum, {**types, **narrow}, ONLY_SUMS=False, **wide)
        operations(ptx, codes=32 // SHARE)


@pytest.mark.parametrize("given", ["residue", *["left_residue"] * SOAK])
@pytest.mark.parametrize("way", TILINGS if SOAK else ["small"])
def test_symmetric_products_compile(way, given):
    """As they are launched for `a I + b A + c A A` and for `P A`."""
    rows, cols, depth, warps, _ = TILINGS[way]

    def tiles(*block):
        return f"tensordesc<fp16[1, {block[0]}, {block[1]}]>"

    types = {
        **dict.fromkeys(["alpha", "beta", "gamma", "shift"], "fp32"),
        "left": tiles(rows, depth), "right": tiles(cols, depth), "out": "*fp16", "size": "i32",
        given: "*fp32",
    }  # fmt: skip
    names = ["right_half", "addend", "addend_tiles", "out_tiles", "right_tiles", "scales"]
    absent = dict.fromkeys([*names, "residue", "left_residue"])
    if cols > rows:
        types["right_half"] = tiles(rows, depth)
    if given == "residue":
        types |= {
            "addend": "*fp16",
            **dict.fromkeys(["addend_tiles", "out_tiles"], tiles(rows, cols)),
        }
    else:
        types["right_tiles"] = tiles(rows, cols)
    ptx = compiled(
        _symmetric_kernel, types, warps=warps, ROWS=rows, COLS=cols, DEPTH=depth, depth=2048,
        HAS_GAMMA=given == "residue", HAS_SHIFT=False,
        **{name: None for name in absent if name not in types},
    )  # fmt: skip
    assert "wgmma" in ptx


@pytest.mark.parametrize("mask", ["*u8", *[None, "*fp32", "*bf16"] * SOAK])
def test_largest_logits_compile(mask):
    places = ("batch", "head", "row", "col")
    strides = {f"{of}_{place}": "i32" for of in ("query", "key", "mask") for place in places}
    types = {
        **strides, **dict.fromkeys(["length", "places", "size", "share"], "i32"),
        **dict.fromkeys(["query", "key"], "*bf16"), "found": "*fp32",
    }  # fmt: skip
    # The last dim lies as it should, which a launch sees.
    constants = {"query_col": 1, "key_col": 1, "CAUSAL": True, "ROWS": 128, "COLS": 128}
    types |= {"hidden": "fp32"} if mask is None else {"mask": mask, "hidden": "fp32"}
    constants |= {"mask": None} if mask is None else {}
    ptx = compiled(logits._largest, types, SIZE=128, warps=8, **constants)
    assert "wgmma" in ptx
    assert "cp.async" in ptx  # the next keys come while these are multiplied
