"""Kernels on parts of blocks: near plain torch, and with the bits of kernels on whole blocks.

`test_interpreted.py` runs this file through Triton's interpreter on CPU, `test_cuda_parts.py` its
single launches on a GPU.
"""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import samestep
import samestep.kernels.call
import samestep.kernels.muon
import samestep.optimizer.step
import samestep.shards.dtensor.block_exchange
import samestep.shards.dtensor.kernel_stages
import samestep.update.triton
from samestep.kernels.call import Step, Table
from samestep.kernels.parts import (
    GradientTable,
    MomentumOfParts,
    MomentumPart,
    Move,
    Moves,
    Rows,
    Size,
    SourceRows,
    StepOfParts,
    StepPart,
)
from samestep.layout.boxes import local_of
from samestep.rules.executions import EXECUTIONS
from samestep.rules.muon import MuonRule, lr_factor
from samestep.rules.orthogonalize import _standard
from samestep.shards.dtensor.kernel_stages import KernelStages
from tests.inside.kernels.cases import DEVICE, INTERPRETED, NANOCHAT, QUICK, number, random
from tests.ranks import run_forked

MUON = MuonRule()


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    torch.manual_seed(0)
    if INTERPRETED:
        monkeypatch.setattr(samestep.kernels.call, "TILE", 16)
    if QUICK:
        monkeypatch.setattr(samestep.kernels.call, "WIDE", 32)  # tiles of several rows


# --- one launch ------------------------------------------------------------------------------

# Rows of a matrix, columns of one, a matrix of a stack, some of a row, all in tensors of their own.
VIEWS = [
    ((40, 24), (slice(7, 40), slice(None))),
    ((17, 37), (slice(None), slice(5, 22))),
    ((3, 18, 8), (1, slice(2, 18))),
    ((2, 9), (slice(0, 1), slice(3, 4))),
]
SIZES = [Size(33, 24), Size(17, 17), Size(16, 8), Size(1, 1)]


def lying(whole, view):
    return Rows(whole[view].storage_offset(), whole[view].stride(0))


def step_of(options, *, factor=None, maximize=False, only_if=None):
    options = {**MUON.defaults, **options}
    scalars = {key: number(value) for key, value in MUON.scalars(options).items()}
    flags = [None if value is None else number(value) for value in (factor, only_if)]
    return Step(scalars, options, flags[0], maximize, flags[1])


def flags(*values):
    return torch.tensor(values, dtype=torch.float64, device=DEVICE)


def all_but(view, whole):
    """The elements of a tensor that are not in a view."""
    outside = torch.ones_like(whole, dtype=torch.bool)
    outside[view] = False
    return whole[outside]


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({}, {"factor": 0.5}),
        ({"momentum_form": "sum"}, {"maximize": True, "only_if": 1.0}),
        ({"nesterov": False}, {"only_if": 0.0}),
    ],
    ids=["default", "sum", "skipped"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_momentum_of_parts(options, given, dtype):
    """Where they lie, and nothing beside them; one is absent, the direction of one not wanted."""
    step = step_of(options, **given)
    grads = [random(*shape, dtype=dtype) for shape, _ in VIEWS]
    momenta = [random(*shape, dtype=dtype) for shape, _ in VIEWS]
    before = [m.clone() for m in momenta]
    starts = [8, 1000, None, 2000]  # in a buffer, the first with room between its rows
    strides = [30, 17, 0, 1]
    parts = [
        MomentumPart(place, size, lying(grads[place], view), momenta[place][view],
                     None if start is None else Rows(start, stride))
        for place, ((_, view), size, start, stride)
        in enumerate(zip(VIEWS, SIZES, starts, strides, strict=True))
    ]  # fmt: skip
    out = torch.full((2100,), 7.0, device=DEVICE)
    writes = flags(1, 0, 1, 1)
    table = GradientTable(Table([grads]).addresses[0], False, writes)
    MomentumOfParts(parts, dtype).run_(table, out, step)
    untouched = torch.ones_like(out, dtype=torch.bool)
    for place, ((_, view), size) in enumerate(zip(VIEWS, SIZES, strict=True)):
        grad = grads[place][view].double() * (0.5 if step.factor is not None else 1.0)
        grad = -grad if step.maximize else grad
        state = {"momentum_buffer": before[place][view].double()}
        direction, new = MUON.prepare(grad, state, step.scalars, step.options)
        written = writes[place] and (step.only_if is None or step.only_if != 0)
        wanted = new["momentum_buffer"] if written else state["momentum_buffer"]
        rounding = 2e-6 if dtype == torch.float32 else 1e-3
        torch.testing.assert_close(
            momenta[place][view].double(), wanted, rtol=rounding, atol=rounding
        )
        assert torch.equal(all_but(view, momenta[place]), all_but(view, before[place]))
        if not written:
            assert torch.equal(momenta[place], before[place])
        if starts[place] is not None:
            where = (starts[place], (strides[place], 1))
            found = out.as_strided(size, where[1], where[0])
            torch.testing.assert_close(found.double(), direction, rtol=2e-6, atol=2e-6)
            untouched.as_strided(size, where[1], where[0]).fill_(False)
    assert torch.equal(out[untouched], torch.full_like(out[untouched], 7.0))


def test_regions_are_moved():
    """Also out of transposes, and with room between rows."""
    sources = [random(3, 24, 40, dtype=torch.bfloat16), random(500, dtype=torch.bfloat16)]
    out = torch.zeros(3000, dtype=torch.bfloat16, device=DEVICE)
    moves = [
        Move(Size(20, 19), SourceRows(0, 960 + 4 * 40 + 3, 40), Rows(10, 25)),  # of the second
        Move(Size(33, 18), SourceRows(0, 1920 + 4 * 40 + 7, 40, True), Rows(700, 18)),  # turned
        Move(Size(1, 33), SourceRows(1, 3, 33), Rows(2000, 33)),
    ]
    Moves(moves, out.device).run_(sources, out)
    wanted = torch.zeros_like(out)
    wanted.as_strided((20, 19), (25, 1), 10).copy_(sources[0][1, 4:24, 3:22])
    wanted.as_strided((33, 18), (18, 1), 700).copy_(sources[0][2, 4:22, 7:40].mT)
    wanted[2000:2033] = sources[1][3:36]
    assert torch.equal(out, wanted)


@pytest.mark.parametrize(
    ("options", "skipped"),
    [({}, False), ({"cautious": True, "scale_decay": True, "adjust_lr": "original"}, False),
     ({}, True)],
    ids=["default", "cautious", "skipped"],
)  # fmt: skip
@pytest.mark.parametrize("master", [False, True])
def test_step_of_parts(options, skipped, master):
    """Along what came, and along own directions, of which some are turned."""
    dtype = torch.float16 if master else torch.float32
    step = step_of({"lr": 0.1, "weight_decay": 0.5, **options}, only_if=float(not skipped))
    params = [random(*shape, dtype=dtype) for shape, _ in VIEWS]
    masters = [param.float() * (1 + 1e-4) for param in params]  # they round to the parameters
    before = [(p.clone(), m.clone()) for p, m in zip(params, masters, strict=True)]
    came, own = random(5000), random(2, 24, 40)
    sources = [SourceRows(0, 9, 24), SourceRows(1, 960 + 7, 40, True), SourceRows(1, 3, 40),
               SourceRows(0, 4000, 1)]  # fmt: skip
    blocks = [Size(40, 24), Size(40, 17), Size(50, 8), Size(2, 9)]
    parts = [
        StepPart(place, size, params[place][view], masters[place][view] if master else None,
                 sources[place], blocks[place])
        for place, ((_, view), size) in enumerate(zip(VIEWS, SIZES, strict=True))
    ]  # fmt: skip
    writes = flags(1, 1, 1, 0)
    StepOfParts(parts, lr_factor).run_([came, own], writes, step)
    directions = [
        came[9 : 9 + 33 * 24].view(33, 24), own[1, :17, 7:24].mT, own[0, :16, 3:11],
        came[4000:4001].view(1, 1),
    ]  # fmt: skip
    for place, (_, view) in enumerate(VIEWS):
        value = before[place][1 if master else 0][view].double()
        new = MUON.finish(
            value, directions[place].double(), blocks[place], step.scalars, step.options
        )
        found = masters[place] if master else params[place]
        wanted = value if skipped or not writes[place] else new
        torch.testing.assert_close(found[view].double(), wanted, rtol=2e-6, atol=2e-6)
        assert torch.equal(all_but(view, found), all_but(view, before[place][bool(master)]))
        assert torch.equal(all_but(view, params[place]), all_but(view, before[place][0]))
        if master:
            assert torch.equal(params[place][view], masters[place][view].half())


def test_a_parameter_that_was_edited_counts_more_than_its_master():
    step = step_of({"lr": 0.1, "weight_decay": 0.0})
    param, master = random(4, 8, dtype=torch.float16), random(4, 8)
    direction = torch.zeros(32, device=DEVICE)
    part = StepPart(0, Size(4, 8), param, master, SourceRows(0, 0, 8), Size(4, 8))
    edited = param.float()
    StepOfParts([part], lr_factor).run_([direction], None, step)
    assert torch.equal(master, edited)


# --- on several ranks ------------------------------------------------------------------------

TENSORS = {  # shape, the dim that is sharded, options
    "tall": ((37, 17), 0, {}),
    "tall_columns": ((37, 17), 1, {}),
    "wide": ((17, 37), 1, {}),
    "split": ((16, 9), 0, {"split_sizes": (7, 9)}),
    "two": ((2, 20), 0, {}),  # a third rank holds nothing of it
    "experts": ((2, 10, 6), 0, {"rule": "muon"}),
    "expert_columns": ((2, 10, 6), 2, {"rule": "muon"}),
    "kernels": ((10, 3, 3, 2), 1, {"rule": "muon", "flatten": True}),
    "copies": ((6, 11), None, {}),
    "groups": ((20, 6), 0, {"split_sizes": "interleaved:3+1+1x4"}),
    "stored": ((7, 12), 1, {"split_sizes": (8, 4), "transposed": True}),
    "stored_experts": (
        (2, 6, 8),
        1,
        {"rule": "muon", "split_sizes": "interleaved:2x4", "transposed": True},
    ),
}
STEPS = 2  # the second has momentum
FEW = ("tall_columns", "wide", "split", "expert_columns", "copies", "groups")  # for long ones


ANY = "split"  # a name that is always there


@pytest.fixture
def few_tensors(request, monkeypatch):
    """Between the first case and the others all of them; everywhere when there is time."""
    if QUICK:
        first = "default" in request.node.name
        for name in {*FEW, "experts", "stored"} - {ANY} if first else TENSORS.keys() - set(FEW):
            monkeypatch.delitem(TENSORS, name)


def noise(name, step):
    seed = 1000 * list(TENSORS).index(name) + step
    return torch.randn(TENSORS[name][0], generator=torch.Generator().manual_seed(seed))


def one_by_one(X, scales, table, execution, *, overwrite):
    """Products in torch, block by block: on CPU they would depend on how many there are.

    Rounded to bfloat16 here: the interpreter cuts digits off where a GPU rounds.
    """
    blocks = X.float() * scales[:, None, None]
    found = torch.cat([_standard(block[None], table) for block in blocks])
    return found.bfloat16().to(X.dtype)


@pytest.fixture
def kernels(monkeypatch):
    """Kernels on CPU, all but the products; with tiles that most blocks fit in.

    Gives the numbers of parts in the chunks that they step in this process.
    """
    made = []

    class Noticed(KernelStages):
        def __init__(self, tables, step):
            made.append(len(tables.parts))
            super().__init__(tables, step)

    monkeypatch.setattr(samestep.kernels.call, "TILE", 32)
    if QUICK:
        monkeypatch.setattr(samestep.kernels.call, "WIDE", 64)
    monkeypatch.setattr(samestep.shards.dtensor.block_exchange, "missing", lambda device: None)
    monkeypatch.setitem(EXECUTIONS, "cpu", EXECUTIONS["cuda"]._replace(missing=None, products=None))
    monkeypatch.setattr(samestep.optimizer.step, "missing_kernels", lambda device: None)
    monkeypatch.setattr(
        samestep.update.triton, "kernels_run", lambda table, dtype, device: dtype.itemsize == 2
    )
    monkeypatch.setattr(samestep.kernels.muon, "orthogonalize_wide", one_by_one)
    monkeypatch.setattr(samestep.shards.dtensor.kernel_stages, "KernelStages", Noticed)
    return made


def trained(place=lambda name, whole: whole, absent=None, dtype=torch.float32, **options):
    """The optimizer and parameters by name after some steps; `place` puts tensors on ranks.

    Before the last one, state is replaced.
    """
    params = {name: torch.nn.Parameter(place(name, noise(name, 99).to(dtype))) for name in TENSORS}
    overrides = {name: own for name, (_, _, own) in TENSORS.items() if own}
    given = {"lr": 0.02, "weight_decay": 0.3, "max_grad_norm": 1.0, **options}
    opt = samestep.MuonAdamW(list(params.items()), overrides=overrides, **given)
    for step in range(STEPS):
        for name, param in params.items():
            grad = place(name, noise(name, step).to(dtype))
            param.grad = None if name == absent and step == 1 else grad
        del grad
        if step == STEPS - 1:
            for param in params.values():
                opt.state[param]["momentum_buffer"] = opt.state[param]["momentum_buffer"].clone()
        opt.step()
    with torch.no_grad():  # or it would be a view
        last = weakref.ref(local_of(params[ANY].grad))
    for param in params.values():
        param.grad = None
    assert last() is None  # nobody keeps gradients
    return opt, params


def values(opt, params):
    """Whole parameters and state by name."""
    found = {name: opt.full_parameter(name) for name in params}
    for name, state in opt.whole_state().items():
        found |= {f"{name}.{key}": tensor for key, tensor in state.items()}
    if "update_rms" in opt.metrics():
        found["update_rms"] = opt.metrics()["update_rms"]
    return found


def on_ranks(made, shape, by_kernels=True, **options):
    """What all ranks of a mesh end with; those along the first of two axes hold copies."""
    ranks = torch.Size(shape).numel()

    def job(rank):
        mesh = init_device_mesh("cpu", shape)

        def place(name, whole):
            dim = TENSORS[name][1]
            last = Replicate() if dim is None else Shard(dim)
            return distribute_tensor(whole, mesh, [Replicate()] * (mesh.ndim - 1) + [last])

        opt, params = trained(place, **options)
        assert (len(made) >= STEPS) == by_kernels
        here = {name: param.to_local().detach() for name, param in params.items()}
        return values(opt, params), here

    results = run_forked(ranks, job)
    first, here = results[0]
    for other, its in results[1:]:
        assert different(other, first) == []
        if len(shape) == 2 and shape[1] == 1:
            assert different(its, here) == []
    return first


def different(found, expected):
    assert found.keys() == expected.keys()
    return [name for name in found if not torch.equal(found[name], expected[name])]


PLAIN = {"block_dtype": torch.bfloat16}
WIDE = {"block_dtype": torch.float32, "compute_dtype": torch.float16}
ROWS = {"variance_axis": "rows", "variance_eps": 1e-8, "variance_eps_form": "add"}
ROWS |= {"update_scale": 0.5, "adjust_lr": "unit_rms_norm", "norm_factor": 1.02}


@pytest.mark.parametrize(
    ("shape", "travel", "options"),
    [
        ((3,), PLAIN, {"absent": "tall", "bucket_size": 1000}),
        (
            (2,),
            WIDE,
            {**NANOCHAT, **ROWS, "cautious": True, "absent": "tall_columns", "offload": "state"},
        ),
        ((2,), PLAIN, {"muon_schedule": "gather", "dtype": torch.float16, "master_weights": True}),
    ][: 2 if QUICK else 3],
    ids=["default", "nanochat", "gather"][: 2 if QUICK else 3],
)
def test_parts_have_the_bits_of_whole_blocks(kernels, shape, travel, options, few_tensors):
    of_ranks = {"muon_schedule", "bucket_size", "offload"}
    own = {key: value for key, value in options.items() if key not in of_ranks}
    if "compute_dtype" in travel:
        own["compute_dtype"] = travel["compute_dtype"]
    expected = values(*trained(**own))
    if "offload" in options and not QUICK:
        assert different(values(*trained(**own, offload=options["offload"])), expected) == []
    assert not kernels  # whole blocks have other ones
    assert different(on_ranks(kernels, shape, **travel, **options), expected) == []


SMALL = {
    "rows": ((24, 64), 0, {}),
    "columns": ((8, 96), 1, {}),
    "stack": ((2, 8, 32), 1, {"rule": "muon"}),
}


@pytest.mark.parametrize("form", ["8bit/32", "bf16_stochastic"][: 1 if QUICK else 2])
def test_parts_of_small_momentum_have_the_bits_of_whole_blocks(kernels, monkeypatch, form):
    monkeypatch.setattr(f"{__name__}.TENSORS", SMALL)
    monkeypatch.setattr(f"{__name__}.ANY", "rows")
    options = {"state_dtypes": {"momentum_buffer": form}, "absent": "stack"}
    if not INTERPRETED:  # which cuts digits off, where halves of a number are rounded
        options |= {"dtype": torch.bfloat16, "master_weights": True}
        options["state_dtypes"]["master_weight"] = "remainder"
    expected = values(*trained(**options))
    assert expected["rows.momentum_buffer"].dtype == (
        torch.int8 if form == "8bit/32" else torch.bfloat16
    )
    assert different(on_ranks(kernels, (3,), **PLAIN, **options), expected) == []


def test_copies_and_sizes_where_directions_are_rounded_on_their_way(
    kernels, monkeypatch, few_tensors
):
    """Of factors per block the product is rounded: not the bits of whole blocks, but one value."""
    options = {**NANOCHAT, "update_rms": True}
    found = on_ranks(kernels, (2, 1), **PLAIN, **options)
    monkeypatch.delitem(EXECUTIONS, "cpu")
    monkeypatch.setattr(samestep.optimizer.step, "missing_kernels", lambda device: "none")
    exact = values(*trained(**options))
    for name, wanted in exact.items():
        if name in TENSORS:
            way = (wanted - noise(name, 99)).norm()
            assert (found[name] - wanted).norm() / way < 0.02, name
    torch.testing.assert_close(found["update_rms"], exact["update_rms"], rtol=0.01, atol=0)


@pytest.mark.parametrize("why", ["a part that is no matrix", "wide products"])
def test_what_kernels_cannot_do_is_done_in_plain_torch(kernels, monkeypatch, few_tensors, why):
    options = {}
    if why == "wide products":
        options["compute_dtype"] = torch.float32
    else:
        monkeypatch.setitem(
            TENSORS, "kernels", ((5, 3, 4, 2), 2, {"rule": "muon", "flatten": True})
        )
    found = on_ranks(kernels, (2,), by_kernels=False, **options)
    monkeypatch.delitem(EXECUTIONS, "cpu")
    monkeypatch.setattr(samestep.optimizer.step, "missing_kernels", lambda device: "none")
    assert different(found, values(*trained(**options))) == []
