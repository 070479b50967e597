"""Kernels against their twins in plain torch, on whatever device they run.

`test_interpreted.py` runs this file through Triton's interpreter on CPU, `test_cuda.py` on a GPU.
"""

from __future__ import annotations

import os
from contextlib import contextmanager

import pytest
import torch
import triton.language as tl

import samestep
import samestep.kernels.call
import samestep.kernels.logits
import samestep.kernels.muon
import samestep.kernels.symmetric
from samestep.kernels.adamw import AdamWTensors
from samestep.kernels.call import Gradients, Step, Table
from samestep.kernels.logits import fits, largest_of_heads
from samestep.kernels.muon import MuonBlocks, muon_, strides_of
from samestep.kernels.norm import DTYPES, square_sum
from samestep.kernels.orthogonalize import orthogonalize_blocks
from samestep.kernels.symmetric import Tiling, symmetric_product
from samestep.layout.splits import Form, Split
from samestep.qk_clip import largest_logits
from samestep.qk_clip.logits import HIDDEN
from samestep.rules.adamw import AdamWRule
from samestep.rules.muon import MuonRule, variance_shape
from samestep.rules.orthogonalize import orthogonalize, step_coefficients
from samestep.rules.state import MASTER
from tests.inside.kernels import quick_interpreter
from tests.soak import SOAK

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
SMALL = Tiling(16, 32, 32, warps=4, stages=1)  # several tiles in a small matrix
QUICK = INTERPRETED and not SOAK  # the interpreter takes milliseconds for each line of a kernel
if INTERPRETED:
    quick_interpreter.count_by_tensors()
if QUICK:
    quick_interpreter.install()
# The interpreter cannot multiply bfloat16.
HALVES = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]
TILINGS = [SMALL, Tiling(16, 16, 16, warps=4, stages=1)] if INTERPRETED else [None]
SIZES = [(40, 40), (8, 24)] if INTERPRETED else [(64, 64), (40, 72), (8, 136), (1000, 1416)]
SHAPES = [(24, 40), (21, 13), (16, 16)]  # wide, tall and uneven, square
SHAPES += [] if INTERPRETED else [(768, 768), (2048, 1100), (600, 4104)]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    torch.manual_seed(0)
    if INTERPRETED:
        monkeypatch.setitem(samestep.kernels.symmetric.TILINGS, "small", SMALL)
        monkeypatch.setattr(samestep.kernels.call, "TILE", 16)
        monkeypatch.setattr(samestep.kernels.muon, "AGAIN", 2)  # fewer than there are tiles
    if QUICK:
        monkeypatch.setattr(samestep.kernels.call, "WIDE", 32)  # tiles of several rows


@pytest.fixture
def products_by_torch(monkeypatch):
    """For tests of what is around products, which have tests of their own."""
    if QUICK:
        monkeypatch.setattr(samestep.kernels.symmetric, "way_of", lambda size, depth: "torch")


def random(*shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(shape, dtype=torch.float32) * scale).to(DEVICE, dtype)


def distance(found, wanted):
    found, wanted = found.double(), wanted.double()
    return float((found - wanted).norm() / wanted.norm())


def number(value):
    return torch.tensor(value, dtype=torch.float64, device=DEVICE)


# --- products --------------------------------------------------------------------------------


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("size", "depth"), SIZES)
def test_gram_matrices_are_right_and_symmetric(size, depth, dtype, tiling):
    X = random(3, size, depth, dtype=dtype)
    scales = torch.tensor([1.0, 0.5, 3.0], device=DEVICE)
    found = symmetric_product(X, X, scales=scales, dtype=torch.float16, alpha=0.1, tiling=tiling)
    wanted = 0.1 * X.double() @ X.double().mT * scales.double()[:, None, None]
    assert distance(found, wanted) < 1e-3
    assert torch.equal(found, found.mT)


@pytest.mark.parametrize("way", ["small", "torch"])
@pytest.mark.parametrize("size", [size for size, _ in SIZES])
def test_every_way_gives_the_same_product(size, way):
    A = random(2, size, size, scale=0.1)
    A = (A + A.mT).half()
    scales = torch.tensor([2.0, 0.5], device=DEVICE)
    wide = A.double()
    identity = torch.eye(size, device=DEVICE).double()
    for addend, gamma, shift in ((A, 3.0, 0.0), (None, 0.0, -1.5), (None, 0.7, 0.0)):
        found = symmetric_product(
            A, A, addend=addend, scales=scales, alpha=0.5, beta=-2.0, gamma=gamma, shift=shift,
            way=way,
        )  # fmt: skip
        wanted = 0.5 * wide @ wide + gamma * identity
        if addend is not None:
            wanted = wanted - 2.0 * wide
        wanted = wanted * scales.double()[:, None, None] + shift * identity
        assert distance(found, wanted) < 1e-3


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("size", [size for size, _ in SIZES])
def test_polynomials_of_symmetric_matrices_are_right(size, tiling):
    A = random(2, size, size, scale=0.1)
    A = (A + A.mT).half()
    found = symmetric_product(A, A, addend=A, alpha=0.5, beta=-2.0, gamma=3.0, tiling=tiling)
    wide = A.double()
    wanted = 0.5 * wide @ wide - 2 * wide + 3 * torch.eye(size, device=DEVICE).double()
    assert distance(found, wanted) < 1e-3
    assert (found - found.mT).abs().max() <= 4e-3


@pytest.mark.parametrize("tiling", TILINGS)
def test_a_product_with_a_residue_is_right_in_both_triangles(tiling):
    """P = p(A) and A commute but for rounding: a mirrored triangle of P A is not the other one."""
    size = 40 if INTERPRETED else 1000
    X = random(2, size, 2 * size) * torch.linspace(0.5, 1.5, size, device=DEVICE)[:, None]
    X = X / torch.linalg.matrix_norm(X, keepdim=True)
    A = (X @ X.mT).half()
    residue = torch.full((2, size), torch.nan, device=DEVICE)
    P = symmetric_product(
        A, A, addend=A, alpha=15.9, beta=-22.5, gamma=8.16, residue=residue, tiling=tiling
    )
    exact = 15.9 * A.double() @ A.double() - 22.5 * A.double() + 8.16 * torch.eye(size).to(A.device)
    moved = (P.double() - exact).diagonal(dim1=-2, dim2=-1)
    assert float(moved.abs().max()) > 1e-3
    assert torch.allclose(residue.double(), moved, rtol=0, atol=1e-5)
    wanted = P.double() @ A.double()
    found, mirrored = (
        symmetric_product(P, A, left_residue=given, dtype=torch.float32, tiling=tiling)
        for given in (residue, None)
    )
    assert torch.equal(torch.tril(found), torch.tril(mirrored))
    assert distance(mirrored, wanted) > 2e-5
    assert distance(found, wanted) < 0.2 * distance(mirrored, wanted)


def test_every_element_of_a_product_is_written(monkeypatch):
    plain = torch.Tensor.new_empty

    def poisoned(like, *shape, **options):
        made = plain(like, *shape, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    X = random(2, 40, 24, dtype=torch.float16)
    assert symmetric_product(X, X).isfinite().all()


FORMS = [(shape, execution) for shape in SHAPES for execution in ("standard", "gram")]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("shape", "execution"), FORMS[1:3] if QUICK else FORMS)
def test_orthogonalization_is_that_of_plain_torch(shape, dtype, execution):
    blocks = random(2, *shape, scale=1e-4)
    blocks[1] = 0
    table = step_coefficients("polar-express", 5)
    found = orthogonalize_blocks(
        blocks, table, execution, norm_factor=1.01, eps=0.0, eps_form="clamp", dtype=dtype
    )
    wanted = orthogonalize(blocks, compute_dtype=torch.float32, execution=execution)
    assert found.dtype == blocks.dtype
    assert torch.equal(found[1], torch.zeros_like(found[1]))
    # As far as rounding the block alone may bring it: about 40 times the rounding.
    assert distance(found, wanted) < 40 * torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("execution", ["standard", "gram"])
@pytest.mark.usefixtures("products_by_torch")
def test_polynomials_without_a_square_to_complete(execution):
    table = [(1.5, -0.5, 0.0), (2.0, -1.5, 0.02), (1.5, 0.0, 0.0), (1.2, -0.2, 0.0)]
    blocks = random(2, 16, 24)
    found = orthogonalize_blocks(
        blocks, table, execution, norm_factor=1.0, eps=0.0, eps_form="clamp", dtype=torch.float16
    )
    X = blocks.double() / torch.linalg.matrix_norm(blocks.double(), keepdim=True)
    for a, b, c in table:
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    assert distance(found, X) < 40 * torch.finfo(torch.float16).eps / 2


# --- elementwise -----------------------------------------------------------------------------


def test_squares_of_many_tensors_are_summed():
    tensors = [random(size) for size in (1, 5, 4096, 10000)]
    tensors += [random(33, 7, dtype=torch.bfloat16), random(3, scale=1e30)]
    wanted = sum(float(tensor.double().square().sum()) for tensor in tensors)
    assert float(square_sum(tensors)) == pytest.approx(wanted, rel=1e-12)


def gradients(grads, writes=None):
    table = Table([grads])
    dtype = DTYPES[grads[0].dtype]
    return Gradients(table.addresses[0], table.aligned, dtype, writes)


def adamw_case(dtype=torch.float32, master=False):
    params = [random(100, dtype=dtype), random(33, 5, dtype=dtype), random(4100, dtype=dtype)]
    grads = [random(*param.shape, dtype=dtype) for param in params]
    states = []
    for place, param in enumerate(params):
        state = {
            "step": torch.tensor(3.0 + place, device=DEVICE),
            "exp_avg": random(*param.shape),
            "exp_avg_sq": random(*param.shape).square(),
        }
        if master:
            state["master_weight"] = param.float() * (1 + 1e-4)  # it rounds to the parameter
        states.append(state)
    return params, grads, states


ADAMW = AdamWRule()
ADAMW_NUMBERS = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}


ADAMW_FORMS = [
    {"eps_hat": True, "decay_form": "independent"}, {"cautious": True, "decay_form": "independent"},
    {"cautious": True}, {"decay_form": "l2"},
]  # fmt: skip


@pytest.mark.parametrize(
    ("factor", "maximize", "own"),
    [
        *((factor, maximize, {}) for factor in (None, 0.5) for maximize in (False, True)),
        *((None, False, own) for own in ADAMW_FORMS),
    ],
)
def test_adamw_is_that_of_plain_torch(factor, maximize, own):
    params, grads, states = adamw_case()
    options = {**ADAMW.defaults, **own}
    scalars = {key: number(value) for key, value in ADAMW_NUMBERS.items()}
    sign = (-1 if maximize else 1) * (1 if factor is None else factor)
    wanted = [
        ADAMW.update(param, grad * sign, state, scalars, options)
        for param, grad, state in zip(params, grads, states, strict=True)
    ]
    step = Step(scalars, options, None if factor is None else number(factor), maximize, None)
    AdamWTensors(params, states).step_(gradients(grads), step)
    for param, state, new in zip(params, states, wanted, strict=True):
        torch.testing.assert_close(param, new.param, rtol=2e-6, atol=2e-6)
        for key, tensor in state.items():
            torch.testing.assert_close(tensor, new.state[key], rtol=2e-6, atol=2e-6)


def test_adamw_keeps_the_master_of_a_narrow_parameter():
    params, grads, states = adamw_case(torch.float16, master=True)
    scalars = {key: number(value) for key, value in ADAMW_NUMBERS.items()}
    masters = [state["master_weight"].clone() for state in states]
    own = [{k: t for k, t in state.items() if k != "master_weight"} for state in states]
    wanted = [
        ADAMW.update(master, grad.float(), state, scalars, ADAMW.defaults).param
        for master, grad, state in zip(masters, grads, own, strict=True)
    ]
    AdamWTensors(params, states).step_(
        gradients(grads), Step(scalars, ADAMW.defaults, None, False, None)
    )
    for param, state, new in zip(params, states, wanted, strict=True):
        torch.testing.assert_close(state["master_weight"], new, rtol=2e-6, atol=2e-6)
        assert torch.equal(param, state["master_weight"].half())


def huge(grad):
    """A gradient with elements that are zero, too large for their squares, and as large as any."""
    grad = grad.clone()
    grad[..., 0], grad[..., 1], grad[..., 2] = 0.0, 1e25, -3.4e38
    return grad


@pytest.mark.parametrize("own", [{}, {"eps_hat": True}])
def test_adamw_of_huge_gradients_is_that_of_plain_torch(own):
    params, grads, _ = adamw_case()
    grads = [huge(grad) for grad in grads]
    states = [
        {
            "step": torch.zeros((), device=DEVICE),
            **{key: torch.zeros_like(param) for key in ("exp_avg", "exp_avg_sq")},
        }
        for param in params
    ]
    options = {**ADAMW.defaults, **own}
    scalars = {key: number(value) for key, value in {**ADAMW_NUMBERS, "eps": 0.0}.items()}
    wanted = [
        ADAMW.update(param, grad, state, scalars, options)
        for param, grad, state in zip(params, grads, states, strict=True)
    ]
    AdamWTensors(params, states).step_(gradients(grads), Step(scalars, options, None, False, None))
    for param, state, new in zip(params, states, wanted, strict=True):
        assert param.isfinite().all()
        torch.testing.assert_close(param, new.param, rtol=2e-6, atol=2e-6)
        for key, tensor in state.items():
            assert tensor.isfinite().all()
            torch.testing.assert_close(tensor, new.state[key], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("whole", [False, True])
def test_adamw_leaves_alone_what_it_shall(whole):
    params, grads, states = adamw_case()
    before = [[t.clone() for t in (p, *s.values())] for p, s in zip(params, states, strict=True)]
    scalars = {key: number(value) for key, value in ADAMW_NUMBERS.items()}
    writes = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64, device=DEVICE)
    only_if = number(0.0) if whole else None
    AdamWTensors(params, states).step_(
        gradients(grads, writes), Step(scalars, ADAMW.defaults, None, False, only_if)
    )
    for place, (param, state) in enumerate(zip(params, states, strict=True)):
        same = [torch.equal(*x) for x in zip(before[place], (param, *state.values()), strict=True)]
        assert all(same) if whole or place == 1 else not any(same)


# --- Muon ------------------------------------------------------------------------------------

MUON = MuonRule()
NANOCHAT = {
    "equilibrate": True,
    "renormalize": True,
    "variance_beta2": 0.9,
    "scale_decay": True,
    "eps": 1e-6,
    "eps_form": "add",
    "adjust_lr": "original",
    "lr": 0.02,
}


def muon_case(rows, cols, options, count=2):
    shapes = MUON.state_shapes((rows, cols), options)
    params = [random(rows, cols) for _ in range(count)]
    grads = [random(rows, cols, scale=1e-3) for _ in range(count)]
    states = [{"momentum_buffer": random(rows, cols, scale=1e-3)} for _ in range(count)]
    if "variance" in shapes:
        for state in states:
            state["variance"] = random(*shapes["variance"]).square() / max(rows, cols)
    return params, grads, states


def stacked(params, grads, states, scalars, options, factor):
    return MUON.update(
        torch.stack(params),
        torch.stack(grads) * factor,
        {key: torch.stack([state[key] for state in states]) for key in states[0]},
        scalars,
        {**options, "compute_dtype": torch.float32},
    )


SUM = {"momentum_form": "sum", "nesterov": False, "adjust_lr": None}
ROWS = {
    "variance_beta2": 0.9, "variance_axis": "rows", "variance_eps": 0.1, "variance_eps_form": "add",
    "adjust_lr": "unit_rms_norm", "update_scale": 3.0, "norm_factor": 1.2, "lr": 0.02,
    "decay_form": "independent", "weight_decay": 1e-3,
}  # fmt: skip
QUINTIC = {"eps": 0.0, "weight_decay": 0.0, "orthogonalize": "newton-schulz"}


@pytest.mark.parametrize(
    ("shape", "own"),
    [
        *((shape, own) for shape in SHAPES for own in ({}, NANOCHAT)),
        (SHAPES[0], SUM),
        (SHAPES[1], QUINTIC),
        (SHAPES[0], ROWS),
        (SHAPES[2], ROWS),
    ],
)
@pytest.mark.usefixtures("products_by_torch")
def test_muon_is_that_of_plain_torch(shape, own):
    options = {**MUON.defaults, **own, "compute_dtype": torch.float16}
    scalars = {key: number(value) for key, value in MUON.scalars(options).items()}
    case = muon_case(*shape, options)
    params, grads, states = case
    before = torch.stack(params)
    wanted = stacked(*case, scalars, options, factor=0.5)
    step = Step(scalars, options, number(0.5), False, number(1.0))
    (squares,) = muon_([(MuonBlocks(params, states), gradients(grads))], step, measure=True)
    # The step itself: what is left when the decayed parameter is taken away.
    assert distance(torch.stack(params) - before, wanted.param - before) < 0.02
    for key, new in wanted.state.items():
        found = torch.stack([state[key] for state in states])
        assert distance(found, new) < (1e-6 if key == "momentum_buffer" else 2e-3)
    torch.testing.assert_close(
        squares.double(), wanted.direction().double().square().sum((-2, -1)), rtol=0.02, atol=0
    )


@pytest.mark.parametrize(
    "own",
    [SUM, NANOCHAT, {"variance_beta2": 0.9, "variance_eps": 1e-20, "variance_eps_form": "add"}],
)
@pytest.mark.usefixtures("products_by_torch")
def test_muon_of_huge_gradients_is_that_of_plain_torch(own):
    options = {**MUON.defaults, **own, "compute_dtype": torch.float16}
    scalars = {key: number(value) for key, value in MUON.scalars(options).items()}
    one, many = torch.zeros(2, 12, 20, device=DEVICE)
    one[2, 3] = 3.4e38
    many[:6] = 2e38
    for grad in (one, many):
        params, _, states = muon_case(12, 20, options)
        for state in states:
            for tensor in state.values():
                tensor.zero_()
        for sign in (1.0, -1.0):
            before = torch.stack(params)
            grads = [grad * sign] * 2
            wanted = stacked(params, grads, states, scalars, options, factor=1.0)
            step = Step(scalars, options, None, False, None)
            muon_([(MuonBlocks(params, states), gradients(grads))], step, measure=False)
            found = torch.stack(params)
            assert distance(found - before, wanted.param - before) < 0.02
            for key, new in wanted.state.items():
                kept = torch.stack([state[key] for state in states])
                assert kept.isfinite().all()
                # Of a block with one singular value nothing averages rounding to 16 bits out.
                assert distance(kept, new) < (1e-6 if key == "momentum_buffer" else 0.03)


@pytest.mark.parametrize(
    ("sizes", "groups", "cols", "transposed", "own"),
    [((5, 5), 3, 10, False, NANOCHAT), ((12,), 1, 40, True, NANOCHAT)]
    + [((5, 5), 3, 20, True, {})] * (not QUICK),
)
@pytest.mark.usefixtures("products_by_torch")
def test_blocks_in_the_gaps_of_others_get_the_bits_of_contiguous_ones(
    sizes, groups, cols, transposed, own
):
    """Also where gradients grow so much that directions are written again."""
    options = {**MUON.defaults, **own}
    scalars = {key: number(value) for key, value in MUON.scalars(options).items()}
    form = Form(Split(sizes, groups), transposed)
    rows = sum(sizes) * groups
    stored = (cols, rows) if transposed else (rows, cols)
    shape = form.shapes(stored)[0]
    step = Step(scalars, options, None, False, None)
    found = []
    for contiguous in (False, True):
        torch.manual_seed(1)
        param, master = random(*stored).half(), random(*stored)
        momentum = random(*stored)
        tensors = [form.views(tensor) for tensor in (param, momentum, master)]
        if contiguous:
            tensors = [[view.reshape(shape).contiguous() for view in views] for views in tensors]
        params, momenta, masters = tensors
        states = [{"momentum_buffer": m, MASTER: w} for m, w in zip(momenta, masters, strict=True)]
        if options["variance_beta2"] is not None:
            for state in states:
                state["variance"] = torch.zeros(variance_shape(*shape), device=DEVICE)
        strides = None if contiguous else strides_of(params[0])
        blocks = MuonBlocks(params, states, shape[0], strides)
        for scale in (1.0, 300.0):
            grads = form.views(random(*stored, scale=scale))
            if contiguous:
                grads = [grad.reshape(shape).contiguous() for grad in grads]
            muon_([(blocks, gradients(grads))], step, measure=False)
        found.append(
            [t.reshape(-1) for t in (*params, *(t for state in states for t in state.values()))]
        )
    assert all(map(torch.equal, *found))
    assert len(found[0]) > len(sizes)


@pytest.mark.parametrize("own", [{}, NANOCHAT] + [{"compute_dtype": torch.float16}] * (not QUICK))
@pytest.mark.usefixtures("products_by_torch")
def test_no_result_depends_on_the_power_of_an_earlier_step(own):
    options = {**MUON.defaults, **own}
    scalars = {key: number(value) for key, value in MUON.scalars(options).items()}
    found = []
    for power in (2.0**-30, 2.0**30):  # what is written first is 0 or infinite
        torch.manual_seed(1)
        params, grads, states = muon_case(16, 24, options)
        blocks = MuonBlocks(params, states)
        blocks.powers.fill_(power)
        muon_(
            [(blocks, gradients(grads))], Step(scalars, options, None, False, None), measure=False
        )
        found.append([*params, *(tensor for state in states for tensor in state.values())])
        assert not blocks.outliers.any()
    assert all(map(torch.equal, *found))


@pytest.mark.usefixtures("products_by_torch")
def test_an_update_that_is_not_finite_is_flagged():
    options = {**MUON.defaults}
    scalars = {key: number(value) for key, value in MUON.scalars(options).items()}
    params, grads, states = muon_case(12, 20, options, count=3)
    grads[1][3, 18] = torch.inf
    blocks = MuonBlocks(params, states)
    muon_([(blocks, gradients(grads))], Step(scalars, options, None, False, None), measure=False)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert blocks.outliers.tolist() == [0, 1, 0]


@pytest.mark.usefixtures("products_by_torch")
def test_a_shape_and_its_transpose_are_orthogonalized_together():
    options = {**MUON.defaults, "compute_dtype": torch.float16}
    scalars = {key: number(value) for key, value in MUON.scalars(options).items()}
    cases = [muon_case(12, 20, options), muon_case(20, 12, options, count=3)]
    before = [torch.stack(params) for params, _, _ in cases]
    wanted = [stacked(*case, scalars, options, factor=1.0) for case in cases]
    parts = [(MuonBlocks(params, states), gradients(grads)) for params, grads, states in cases]
    muon_(parts, Step(scalars, options, None, False, None), measure=False)
    for (params, _, _), old, new in zip(cases, before, wanted, strict=True):
        assert distance(torch.stack(params) - old, new.param - old) < 0.02


@pytest.mark.usefixtures("products_by_torch")
def test_cautious_decay_pulls_only_with_the_update():
    options = {**MUON.defaults, "cautious": True, "lr": 0.1, "weight_decay": 0.5}
    options |= {"compute_dtype": torch.float16, "adjust_lr": None}
    scalars = {key: number(value) for key, value in MUON.scalars(options).items()}
    params, grads, states = muon_case(12, 20, options)
    before = torch.stack(params)
    wanted = stacked(params, grads, states, scalars, options, factor=1.0)
    muon_(
        [(MuonBlocks(params, states), gradients(grads))],
        Step(scalars, options, None, False, None),
        measure=False,
    )
    direction = wanted.direction()
    clear = direction.abs() > 0.05 * direction.abs().mean()  # whose sign rounding cannot turn
    found = torch.stack(params) - before
    torch.testing.assert_close(found[clear], (wanted.param - before)[clear], rtol=0.05, atol=1e-3)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.usefixtures("products_by_torch")
def test_muon_leaves_alone_what_it_shall(whole):
    options = {**MUON.defaults, **NANOCHAT, "compute_dtype": torch.float16}
    scalars = {key: number(value) for key, value in MUON.scalars(options).items()}
    params, grads, states = muon_case(12, 20, options, count=3)
    before = [[t.clone() for t in (p, *s.values())] for p, s in zip(params, states, strict=True)]
    writes = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64, device=DEVICE)
    only_if = number(0.0) if whole else number(1.0)
    muon_(
        [(MuonBlocks(params, states), gradients(grads, writes))],
        Step(scalars, options, None, False, only_if),
        measure=False,
    )
    for place, (param, state) in enumerate(zip(params, states, strict=True)):
        same = [torch.equal(*x) for x in zip(before[place], (param, *state.values()), strict=True)]
        assert all(same) if whole or place == 1 else not any(same)


def test_dtypes_of_triton_are_those_of_torch():
    assert DTYPES[torch.float32] is tl.float32


# --- attention logits ------------------------------------------------------------------------

ATTENTION = [  # heads of queries and keys, places of both, size of a head, causal
    (4, 2, 150, 150, 24, True),
    (2, 2, 130, 70, 64, True),
    (2, 1, 20, 300, 160, False),
    (1, 1, 1, 1, 1, True),
]
ATTENTION += [] if INTERPRETED else [(8, 2, 1024, 1024, 128, True), (3, 3, 777, 1500, 192, False)]


def attention(heads, kv_heads, length, places, size, dtype):
    """Queries and keys whose heads lie beside each other, as linear layers give them."""
    query = torch.randn(2, length, heads, size, device=DEVICE).to(dtype).transpose(1, 2)
    key = torch.randn(2, places, kv_heads, size, device=DEVICE).to(dtype).transpose(1, 2)
    return query, key


MASKED = [(sizes, masked) for masked in (None, "bool", "added") for sizes in ATTENTION]
if QUICK:  # every size, and every mask
    MASKED = [MASKED[place] for place in (1, 3, 6, 8)]


@pytest.mark.parametrize(("sizes", "masked"), MASKED)
@pytest.mark.parametrize("dtype", HALVES)
def test_largest_logits_of_heads(sizes, dtype, masked, monkeypatch):
    *sizes, causal = sizes
    if sizes[-1] == 160:
        monkeypatch.setattr(samestep.kernels.logits, "_room", lambda device: 0)  # a small chip
    query, key = attention(*sizes, dtype)
    assert fits(query, key)
    assert not fits(query.float(), key.float())
    heads, _, length, places, size = sizes
    mask = None
    if masked is not None:
        mask = (torch.rand(2, 1, length, places, device=DEVICE) < 0.2).expand(-1, heads, -1, -1)
        if masked == "added":
            mask = torch.where(mask, 3.0, -1e4 if causal else torch.finfo(dtype).min).to(dtype)
    for one, other in ((query, key), (query.abs(), -key.abs())):  # what is not there is no 0
        found = largest_of_heads(one, other, size**-0.5, is_causal=causal, mask=mask, hidden=HIDDEN)
        wanted = largest_logits(one.double(), other.double(), is_causal=causal, attn_mask=mask)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)


def test_logits_that_are_not_finite_are_told():
    query, key = attention(3, 3, 140, 140, 16, torch.float16)
    query[1, 0, 133, 5] = torch.nan
    query[0, 1, 2], key[0, 1, 1] = torch.inf, 1.0
    key[1, 2, 139] = torch.nan
    nowhere = torch.ones(2, 3, 140, 140, dtype=torch.bool, device=DEVICE)
    nowhere[1, 2, :, 139] = False  # nobody sees that key
    found = largest_of_heads(query, key, 1.0, is_causal=True, mask=nowhere, hidden=HIDDEN)
    assert found.isnan().tolist() == [True, True, False]  # infinity times some digits less than 0
    same = largest_of_heads(query, key, 1.0, is_causal=True, mask=None, hidden=HIDDEN)
    assert same.isnan().tolist() == [True, True, True]
    nothing = largest_of_heads(
        query, key, 1.0, is_causal=False, mask=nowhere & False, hidden=HIDDEN
    )
    assert nothing.isneginf().all()


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16][: 1 if QUICK else 2])
@pytest.mark.usefixtures("products_by_torch")
def test_results_do_not_depend_on_the_default_dtype(default):
    """Trainers set it while they build a model, and some leave it there."""
    query, key = attention(2, 1, 20, 20, 16, torch.bfloat16)

    def everything():
        found = [
            largest_of_heads(300 * query, 300 * key, 1.0, is_causal=True, mask=None, hidden=HIDDEN)
        ]
        for own in ({}, NANOCHAT):
            options = {**MUON.defaults, **own, "compute_dtype": torch.float16}
            scalars = {key: number(value) for key, value in MUON.scalars(options).items()}
            params, grads, states = muon_case(12, 20, options)
            for grad, state in zip(grads, states, strict=True):
                grad *= 1e-4
                state["momentum_buffer"] *= 1e-4  # powers beyond float16
            step = Step(scalars, options, None, False, None)
            found += muon_([(MuonBlocks(params, states), gradients(grads))], step, measure=True)
            found += [*params, *(tensor for state in states for tensor in state.values())]
        return found

    torch.manual_seed(1)
    wanted = everything()
    torch.manual_seed(1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        found = everything()
    finally:
        torch.set_default_dtype(before)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_masks_may_lie_as_they_like():
    """Far apart: rows that follow each other in memory are columns of the mask."""
    query, key = attention(1, 1, 4, 40, 16, torch.float16)
    far = torch.empty(40 << 26, dtype=torch.bool, device=DEVICE)  # never touched but here and there
    mask = far.as_strided((4, 40), (1, 1 << 26)).fill_(False)
    mask[:, 39] = True
    mask = mask.expand(2, 1, 4, 40)
    found = largest_of_heads(query, key, 1.0, is_causal=False, mask=mask, hidden=HIDDEN)
    wanted = largest_logits(query.float(), key[..., 39:, :].float(), scale=1.0)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("products_by_torch")
def test_launches_are_on_the_device_of_their_tensors(monkeypatch):
    """The current device may be another one, where the parts of a model are on several."""
    entered = []

    @contextmanager
    def guard(tensor):
        entered.append(tensor.data_ptr())
        yield

    monkeypatch.setattr(torch.cuda, "device_of", guard)
    query, key = attention(1, 1, 4, 4, 16, torch.float16)
    largest_of_heads(query, key, 1.0, is_causal=True, mask=None, hidden=HIDDEN)
    assert entered == [query.data_ptr()]
    square_sum([query.contiguous(), key.float().contiguous()])
    assert len(entered) == 3
    param = torch.nn.Parameter(torch.randn(8, 8, device=DEVICE))
    param.grad = torch.randn_like(param)
    samestep.Muon([param]).step()
    assert entered[-1] == param.data_ptr()
