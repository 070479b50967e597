"""The step on one device: who is updated, in which stacks, and that layout never matters.

Where two ways of writing the same update are compared, they are compared bit for bit: stacking
blocks, cutting stacks or storing a tensor with other strides must not change a single rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samestep
from samestep.rules import RULES, AdamWRule, MuonRule, Update, register_rule
from tests.soak import twin

COMMON = {"lr": 0.02, "master_weights": False}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "muon": lambda params, **options: samestep.Muon(params, **{**COMMON, **options}),
    "adamw": lambda params, **options: samestep.AdamW(params, **{**COMMON, **options}),
}
both_rules = pytest.mark.parametrize("rule", list(OPTIMIZERS))

# Every kind of state a Muon block can have, and a decay that depends on the parameter's sign.
MUON_OPTIONS = {
    "default": {},
    "variance": {"variance_beta2": 0.9},
    "cautious": {"cautious": True},
    "variance and cautious": {"variance_beta2": 0.9, "cautious": True},
    "nanochat": {k: v for k, v in samestep.presets.nanochat().items() if k not in ("rule", "lr")},
}
muon_options = pytest.mark.parametrize("options", MUON_OPTIONS.values(), ids=MUON_OPTIONS)

Shapes = Sequence[tuple[int, ...]]


def draw(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal values, drawn in float64 so that every dtype rounds the same ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def draw_parameters(shapes: Shapes, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(draw(shape, seed, dtype)) for seed, shape in enumerate(shapes)]


def draw_gradients(
    shapes: Shapes, steps: int = 3, dtype: torch.dtype = torch.float32
) -> list[list[Tensor]]:
    """Per step and parameter a gradient; their sizes differ from step to step."""
    return [
        [draw(shape, 1000 + 100 * step + i, dtype) * 4.0**-step for i, shape in enumerate(shapes)]
        for step in range(steps)
    ]


def train(
    optimizer: torch.optim.Optimizer,
    params: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor | None]],
) -> None:
    """One step per row of gradients; None: the parameter was not used in that step."""
    for row in gradients:
        for param, gradient in zip(params, row, strict=True):
            param.grad = None if gradient is None else gradient.clone()
        optimizer.step()


def bits(tensor: Tensor) -> Tensor:
    """The bytes of the values in logical order, whatever the strides."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    return (
        actual.dtype == expected.dtype
        and actual.shape == expected.shape
        and torch.equal(bits(actual), bits(expected))
    )


def snapshot(optimizer: torch.optim.Optimizer, param: Tensor) -> dict[str, Tensor]:
    """Copies of a parameter and of its state."""
    return {
        "param": param.detach().clone(),
        **{key: tensor.clone() for key, tensor in optimizer.state[param].items()},
    }


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(actual) == list(expected)
    for key, tensor in expected.items():
        assert same_bits(actual[key], tensor), key


# --- No gradient and a zero gradient -------------------------------------------------------


@both_rules
@pytest.mark.parametrize("options", [{}, {"maximize": True}], ids=["minimize", "maximize"])
def test_without_a_gradient_nothing_of_a_parameter_changes(rule, options):
    param, other = draw_parameters([(4, 6), (4, 6)])
    optimizer = OPTIMIZERS[rule]([param, other], weight_decay=0.5, **options)
    train(optimizer, [param, other], draw_gradients([(4, 6), (4, 6)], steps=2))
    before = snapshot(optimizer, param)
    train(optimizer, [param, other], [[None, draw((4, 6), 7)], [None, None]])
    assert_same(snapshot(optimizer, param), before)  # no decay, no momentum, no step counted


@both_rules
def test_a_zero_gradient_is_a_step_like_any_other(rule):
    [param] = draw_parameters([(4, 6)])
    # Without decay, so that only the momentum can move the parameter.
    optimizer = OPTIMIZERS[rule]([param], weight_decay=0.0)
    train(optimizer, [param], draw_gradients([(4, 6)], steps=2))
    before = snapshot(optimizer, param)
    train(optimizer, [param], [[torch.zeros(4, 6)]])
    after = snapshot(optimizer, param)
    for key in before:
        assert not same_bits(after[key], before[key]), key
    if rule == "adamw":
        assert after["step"] == before["step"] + 1 == 3


@both_rules
def test_a_zero_gradient_in_the_first_step_only_decays(rule):
    """No momentum yet: the orthogonalized zero is zero, not NaN."""
    [param] = draw_parameters([(4, 6)])
    before = param.detach().clone()
    optimizer = OPTIMIZERS[rule]([param], lr=0.5, weight_decay=0.5)
    train(optimizer, [param], [[torch.zeros(4, 6)]])
    assert same_bits(param, before * 0.75)


@both_rules
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_decides_between_the_two(rule, set_to_none):
    [param] = draw_parameters([(4, 6)])
    optimizer = OPTIMIZERS[rule]([param])
    train(optimizer, [param], draw_gradients([(4, 6)], steps=1))
    before = snapshot(optimizer, param)
    optimizer.zero_grad(set_to_none=set_to_none)
    assert (param.grad is None) == set_to_none
    optimizer.step()
    assert same_bits(param, before["param"]) == set_to_none


@both_rules
def test_frozen_then_unfrozen(rule):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    first, second = model[0].weight, model[1].weight
    with torch.no_grad():
        first.copy_(draw((4, 4), 1))
        second.copy_(draw((4, 4), 2))
    first.requires_grad_(False)  # from the start, but listed
    optimizer = OPTIMIZERS[rule]([first, second], weight_decay=0.5)
    moved = []
    for step in range(6):
        first.requires_grad_(step in (2, 3, 5))
        before = snapshot(optimizer, first), snapshot(optimizer, second)
        optimizer.zero_grad()
        model(draw((3, 4), 10 + step)).square().sum().backward()
        optimizer.step()
        moved.append(not same_bits(first, before[0]["param"]))
        assert not same_bits(second, before[1]["param"])
        if not moved[-1]:
            assert_same(snapshot(optimizer, first), before[0])
    assert moved == [False, False, True, True, False, True]
    if rule == "adamw":
        assert [optimizer.state[p]["step"].item() for p in (first, second)] == [3, 6]


PRESENCE = [(1, 1, 1, 1), (1, 0, 1, 1), (0, 0, 1, 0), (0, 0, 0, 0), (1, 1, 0, 1)]


@pytest.mark.parametrize(
    ("rule", "options"),
    [("adamw", {}), *[("muon", options) for options in MUON_OPTIONS.values()]],
    ids=["adamw", *MUON_OPTIONS],
)
def test_unused_neighbours_leave_no_trace(rule, options):
    """A stack with fewer blocks gives each of them what it gets in an optimizer of its own."""
    shapes = [(6, 4)] * 4
    together, alone = draw_parameters(shapes), draw_parameters(shapes)
    optimizer = OPTIMIZERS[rule](together, **options)
    own = [OPTIMIZERS[rule]([param], **options) for param in alone]
    for present, row in zip(PRESENCE, draw_gradients(shapes, steps=5), strict=True):
        gradients = [g if here else None for g, here in zip(row, present, strict=True)]
        train(optimizer, together, [gradients])
        for param, gradient, of_its_own in zip(alone, gradients, own, strict=True):
            train(of_its_own, [param], [[gradient]])
    for param, single, of_its_own in zip(together, alone, own, strict=True):
        assert_same(snapshot(optimizer, param), snapshot(of_its_own, single))


# --- Blocks and stacks ---------------------------------------------------------------------


@pytest.fixture
def orthogonalized(monkeypatch) -> list[tuple[int, ...]]:
    """The shapes of the stacks given to `orthogonalize`, in order."""
    seen: list[tuple[int, ...]] = []
    original = samestep.rules.muon.orthogonalize

    def recording(blocks, **options):
        seen.append(tuple(blocks.shape))
        return original(blocks, **options)

    monkeypatch.setattr("samestep.rules.muon.orthogonalize", recording)
    return seen


def test_each_shape_of_a_group_costs_one_orthogonalization(orthogonalized):
    shapes = {
        "a": (8, 6), "tall": (10, 6), "qkv": (24, 6), "stack": (3, 8, 6), "b": (8, 6),
        "gqa": (20, 6), "wide": (6, 8),
    }  # fmt: skip
    first = dict(zip(shapes, draw_parameters(list(shapes.values())), strict=True))
    second = dict(zip(shapes, draw_parameters(list(shapes.values())), strict=True))
    split_sizes = {"*.qkv": (8, 8, 8), "*.gqa": (10, 5, 5)}
    groups = [
        {
            "params": [(f"{layer}.{name}", param) for name, param in params.items()],
            "split_sizes": split_sizes,
        }
        for layer, params in enumerate((first, second))
    ]
    optimizer = samestep.Muon(groups)
    params = [*first.values(), *second.values()]
    train(optimizer, params, draw_gradients([tuple(p.shape) for p in params], steps=1))
    # 8 x 6: a, b, three of qkv and three of the stack; 10 x 6: tall and the q of gqa.
    one_group = [(8, 8, 6), (2, 10, 6), (2, 5, 6), (1, 6, 8)]
    assert sorted(orthogonalized) == sorted(one_group * 2)

    orthogonalized.clear()
    first["stack"].grad = second["tall"].grad = None  # the stacks shrink, their number does not
    optimizer.step()
    assert sorted(orthogonalized) == sorted(
        [(5, 8, 6), (2, 10, 6), (2, 5, 6), (1, 6, 8), (8, 8, 6), (1, 10, 6), (2, 5, 6), (1, 6, 8)]
    )


@pytest.mark.parametrize(("limit", "stacks"), [(1, [1] * 5), (2 * 6 * 4, [2, 2, 1]), (1000, [5])])
@muon_options
def test_cutting_a_stack_changes_no_bit(orthogonalized, options, limit, stacks):
    shapes = [(6, 4)] * 5
    runs = []
    for elements in (None, limit):
        params = draw_parameters(shapes)
        optimizer = samestep.Muon(params, lr=0.02, batch_elements=elements, **options)
        orthogonalized.clear()
        train(optimizer, params, draw_gradients(shapes, steps=2))
        runs.append([snapshot(optimizer, param) for param in params])
    assert [shape[0] for shape in orthogonalized] == stacks * 2
    for cut, whole in zip(runs[1], runs[0], strict=True):
        assert_same(cut, whole)


SPLITS = {
    "equal": (8, 8, 8),
    "grouped-query": (12, 4, 4),
    "multi-query": (16, 2, 2),
    "unequal and odd": (11, 3, 5),
    "single rows": (1, 1, 1),  # the variance of such a block has the block's own shape
    "single and more rows": (7, 1, 1),
}


@pytest.mark.parametrize("sizes", SPLITS.values(), ids=SPLITS)
@muon_options
def test_fused_equals_separate_parameters(options, sizes):
    cols = 6
    fused = nn.Parameter(draw((sum(sizes), cols), 1))
    whole = nn.Parameter(fused.detach().clone())
    parts = [nn.Parameter(part.clone()) for part in fused.detach().split(sizes)]
    optimizer = samestep.Muon([fused], lr=0.02, split_sizes=sizes, **options)
    separate = samestep.Muon(parts, lr=0.02, **options)
    unsplit = samestep.Muon([whole], lr=0.02, **options)
    gradients = draw_gradients([(sum(sizes), cols)])
    train(optimizer, [fused], gradients)
    train(separate, parts, [row[0].split(sizes) for row in gradients])
    train(unsplit, [whole], gradients)

    assert same_bits(fused, torch.cat([part.detach() for part in parts]))
    state = optimizer.state[fused]
    for key in state:
        joined = torch.cat([separate.state[part][key].reshape(-1) for part in parts])
        assert same_bits(state[key].reshape(-1), joined), key
    assert not torch.allclose(fused, whole)  # the test would see a split that is ignored


@pytest.mark.parametrize("sizes", [None, (5, 2, 1)], ids=["whole", "fused"])
@muon_options
def test_a_stack_equals_its_matrices_as_parameters(options, sizes):
    stack = nn.Parameter(draw((3, 8, 6), 1))
    matrices = [nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    optimizer = samestep.Muon([stack], lr=0.02, split_sizes=sizes, **options)
    separate = samestep.Muon(matrices, lr=0.02, split_sizes=sizes, **options)
    gradients = draw_gradients([(3, 8, 6)])
    train(optimizer, [stack], gradients)
    train(separate, matrices, [list(row[0]) for row in gradients])

    assert same_bits(stack, torch.stack([matrix.detach() for matrix in matrices]))
    for key, tensor in optimizer.state[stack].items():
        joined = torch.cat([separate.state[matrix][key].reshape(-1) for matrix in matrices])
        assert same_bits(tensor.reshape(-1), joined), key


FORMATS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}


@pytest.mark.parametrize("grad_format", FORMATS.values(), ids=[f"grad {name}" for name in FORMATS])
@pytest.mark.parametrize("param_format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("shape", [(5, 3, 2, 2), (20, 2, 3, 1), (1, 3, 2, 2)], ids=str)
@muon_options
def test_flatten_equals_the_flattened_matrix(options, shape, param_format, grad_format):
    values, gradients = draw(shape, 1), draw_gradients([shape])
    weight = nn.Parameter(values.to(memory_format=param_format))
    matrix = nn.Parameter(values.flatten(1))
    optimizer = samestep.Muon([weight], lr=0.02, flatten=True, **options)
    expected = samestep.Muon([matrix], lr=0.02, **options)
    laid_out = [[row[0].to(memory_format=grad_format)] for row in gradients]
    train(optimizer, [weight], laid_out)
    train(expected, [matrix], [[row[0].flatten(1)] for row in gradients])

    assert weight.is_contiguous(memory_format=param_format)
    assert same_bits(weight.flatten(1), matrix)
    for key, tensor in optimizer.state[weight].items():
        assert same_bits(tensor.reshape(-1), expected.state[matrix][key].reshape(-1)), key


def test_flattened_weights_share_the_stack_of_equal_matrices(orthogonalized):
    shapes = [(5, 3, 2, 2), (5, 12), (5, 4, 3, 1)]
    params = draw_parameters(shapes)
    optimizer = samestep.Muon(params, lr=0.02, flatten=True)
    train(optimizer, params, draw_gradients(shapes, steps=1))
    assert orthogonalized == [(3, 5, 12)]


# --- Memory: strides, order ----------------------------------------------------------------

CANARY = 12345.0


def in_larger_memory(values: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """`values` as a view into a larger tensor full of canaries, and a mask of what is outside."""
    rows, cols = values.shape
    if layout == "transposed":
        memory = torch.full((cols + 4, rows + 5), CANARY, dtype=values.dtype)
        view = memory[2 : 2 + cols, 3 : 3 + rows].t()
    elif layout == "strided":
        memory = torch.full((2 * rows + 1, 3 * cols + 2), CANARY, dtype=values.dtype)
        view = memory[1 : 2 * rows : 2, 1 : 3 * cols : 3]
    else:
        memory = torch.full((rows + 2, cols), CANARY, dtype=values.dtype)
        view = memory[1 : 1 + rows]
    view.copy_(values)
    outside = memory == CANARY
    assert outside.sum() == memory.numel() - values.numel()
    return view, outside


@both_rules
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided"])
def test_strides_change_no_bit_and_nothing_outside_is_written(rule, layout):
    shape = (24, 10)
    values, gradients = draw(shape, 1), draw_gradients([shape])
    view, outside = in_larger_memory(values, layout)
    param, expected = nn.Parameter(view), nn.Parameter(values)
    assert param.data_ptr() == view.data_ptr()
    assert param.is_contiguous() == (layout == "contiguous")
    optimizer, reference = OPTIMIZERS[rule]([param]), OPTIMIZERS[rule]([expected])
    train(optimizer, [param], [[in_larger_memory(g, layout)[0] for g in row] for row in gradients])
    train(reference, [expected], gradients)
    assert_same(snapshot(optimizer, param), snapshot(reference, expected))
    memory = view._base
    assert torch.equal(memory == CANARY, outside)


@both_rules
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_gradients_are_read_only(rule, maximize, layout, dtype):
    """Not even scratch space: gradient accumulation and logging read them after the step."""
    [param] = draw_parameters([(24, 10)], dtype)
    optimizer = OPTIMIZERS[rule]([param], maximize=maximize)
    for step in range(2):
        gradient, _ = in_larger_memory(draw((24, 10), 10 + step, dtype), layout)
        param.grad = gradient
        before, version = gradient.clone(), gradient._version
        optimizer.step()
        assert param.grad is gradient
        assert gradient._version == version
        assert same_bits(gradient, before)


@pytest.mark.parametrize("order", [[5, 4, 3, 2, 1, 0], [2, 0, 4, 1, 5, 3]], ids=str)
@both_rules
def test_the_order_of_parameters_changes_no_bit(rule, order):
    shapes = [(6, 4), (4, 6), (6, 4), (12, 4), (3, 6, 4), (6, 4)]
    options = {"variance_beta2": 0.9} if rule == "muon" else {}
    gradients = draw_gradients(shapes)
    straight, permuted = draw_parameters(shapes), draw_parameters(shapes)
    first = OPTIMIZERS[rule](straight, **options)
    second = OPTIMIZERS[rule]([permuted[i] for i in order], **options)
    train(first, straight, gradients)
    train(second, permuted, gradients)
    for a, b in zip(straight, permuted, strict=True):
        assert_same(snapshot(second, b), snapshot(first, a))


# --- Unusual parameters --------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 4), (4, 0)], ids=str)
def test_adamw_takes_any_shape(shape):
    usual = (5, 3)
    param, neighbour = draw_parameters([shape, usual])
    [alone] = draw_parameters([shape])
    optimizer = samestep.AdamW([param, neighbour], lr=0.02)
    own = samestep.AdamW([alone], lr=0.02)
    gradients = draw_gradients([shape, usual])
    train(optimizer, [param, neighbour], gradients)
    train(own, [alone], [[row[0]] for row in gradients])
    assert_same(snapshot(optimizer, param), snapshot(own, alone))
    assert param.shape == shape
    assert optimizer.state[param]["exp_avg"].shape == shape
    assert optimizer.state[param]["step"] == 3
    if param.numel():
        assert not same_bits(param, draw_parameters([shape])[0])


def test_a_0d_parameter_steps_like_an_element_of_a_vector():
    """To the bit: arithmetic among 0-D tensors must not slip into the scalars' float64."""
    scalar = draw_parameters([()])[0]
    vector = nn.Parameter(scalar.detach().reshape(1).clone())
    optimizer = samestep.AdamW([scalar, vector], lr=0.02)
    gradients = [[row[0], row[0].reshape(1)] for row in draw_gradients([()], steps=5)]
    train(optimizer, [scalar, vector], gradients)
    for key, tensor in snapshot(optimizer, vector).items():
        assert same_bits(snapshot(optimizer, scalar)[key].reshape(-1), tensor.reshape(-1)), key


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 4, 6), (2, 0, 6)], ids=str)
@muon_options
def test_muon_passes_over_empty_parameters(options, shape):
    shapes = [shape, (6, 4)]
    params, [alone] = draw_parameters(shapes), draw_parameters([shape, (6, 4)])[1:]
    optimizer = samestep.Muon(params, lr=0.02, **options)
    own = samestep.Muon([alone], lr=0.02, **options)
    gradients = draw_gradients(shapes)
    train(optimizer, params, gradients)
    train(own, [alone], [[row[1]] for row in gradients])
    assert params[0].shape == shape
    assert_same(snapshot(optimizer, params[1]), snapshot(own, alone))


class Tied(nn.Module):
    """A language model's tied pair: the head uses the embedding's matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


def test_a_tied_parameter_is_stepped_once():
    model = Tied()
    with torch.no_grad():
        model.embedding.weight.copy_(draw((7, 4), 1))
    expected = nn.Parameter(draw((7, 4), 1))
    optimizer = samestep.MuonAdamW(model, lr=0.02)
    reference = samestep.AdamW([expected], lr=0.02, betas=(0.9, 0.95), weight_decay=0.1)
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.tensor([1, 2, 3])).square().sum().backward()
        expected.grad = model.embedding.weight.grad.clone()
        optimizer.step()
        reference.step()
    assert_same(snapshot(optimizer, model.head.weight), snapshot(reference, expected))


@both_rules
def test_a_parameter_listed_twice_is_told_of(rule):
    """In one group a warning, as torch has; in two groups an error."""
    [param] = draw_parameters([(4, 6)])
    with pytest.warns(UserWarning, match="duplicate parameters.*once per step.*List it once"):
        optimizer = OPTIMIZERS[rule]([param, param])
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]
    with pytest.raises(ValueError, match="more than one parameter group"):
        OPTIMIZERS[rule]([{"params": [param]}, {"params": [param]}])


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@both_rules
@pytest.mark.parametrize("master_weights", [False, True])
def test_dtypes_mixed_in_one_group(rule, master_weights):
    def make(dtype: torch.dtype, seed: int) -> nn.Parameter:
        return nn.Parameter(draw((6, 4), seed, dtype))

    mixed = [make(dtype, seed) for seed, dtype in enumerate(DTYPES * 2)]
    optimizer = OPTIMIZERS[rule](mixed, master_weights=master_weights)
    gradients = [
        [g.to(p.dtype) for g, p in zip(row, mixed, strict=True)]
        for row in draw_gradients([(6, 4)] * len(mixed))
    ]
    train(optimizer, mixed, gradients)
    for index, (seed, dtype) in enumerate(enumerate(DTYPES * 2)):
        alone = make(dtype, seed)
        own = OPTIMIZERS[rule]([alone], master_weights=master_weights)
        train(own, [alone], [[row[index]] for row in gradients])
        assert_same(snapshot(optimizer, mixed[index]), snapshot(own, alone))
        math_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        state = optimizer.state[mixed[index]]
        assert {tensor.dtype for tensor in state.values()} == {math_dtype}
        assert ("master_weight" in state) == (master_weights and dtype.itemsize == 2)


@both_rules
def test_devices_mixed_in_one_group(rule):
    """Two devices, one shape: each device steps its own. Meta tensors stand for the second."""
    here, alone = (draw_parameters([(6, 4)])[0] for _ in range(2))
    there = nn.Parameter(torch.empty(6, 4, device="meta"))
    optimizer, own = OPTIMIZERS[rule]([there, here]), OPTIMIZERS[rule]([alone])
    gradients = draw_gradients([(6, 4)])
    meta = torch.empty(6, 4, device="meta")
    train(optimizer, [there, here], [[meta, row[0]] for row in gradients])
    train(own, [alone], gradients)
    assert_same(snapshot(optimizer, here), snapshot(own, alone))
    assert {tensor.device.type for tensor in optimizer.state[there].values()} == {"meta"}


def test_a_graph_of_several_devices_is_refused(monkeypatch):
    """It would have the work of one of them alone."""
    pytest.importorskip("triton")
    from samestep.optimizer.recorded_step import RecordedStep, StepShape, _refuse

    params = [nn.Parameter(torch.ones(6, 4, device=device)) for device in ("meta", "cpu")]
    groups: Any = (SimpleNamespace(params=params, operands=list),)
    shape = StepShape(groups, (), [], [], False, False)
    maths: Any = [None]
    with pytest.raises(
        RuntimeError, match="needs all parameters on one device, and they are on cpu and meta"
    ):
        _refuse(shape, maths)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert not RecordedStep(asked_for=False)._may_record(shape, maths, [])


FORMATS: list[dict[str, Any]] = [
    {"max_grad_norm": 0.1, "update_rms": True},
    {"variance_beta2": 0.9, "cautious": True},
    {"state_dtypes": "8bit"},
    {"state_dtypes": "bf16_stochastic"},
]


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("options", FORMATS)
def test_nothing_depends_on_the_default_dtype(options, default):
    """Trainers set it while they build a model, and some leave it there."""
    shapes = [(6, 64), (64, 6), (64,)]
    found = []
    for dtype in (torch.float32, default):
        params = draw_parameters(shapes)
        torch.set_default_dtype(dtype)
        try:
            optimizer = samestep.MuonAdamW(
                [{"params": params[:2], "rule": "muon"}, {"params": params[2:], "rule": "adamw"}],
                **options,
            )
            train(optimizer, params, draw_gradients(shapes))
        finally:
            torch.set_default_dtype(torch.float32)
        found.append([snapshot(optimizer, param) for param in params])
    for actual, expected in zip(*found, strict=True):
        assert_same(actual, expected)


# --- Options -------------------------------------------------------------------------------


@both_rules
def test_maximize_is_minimizing_the_negated_gradient(rule):
    shapes = [(6, 4), (4, 6)]
    up, down = draw_parameters(shapes), draw_parameters(shapes)
    maximizing, minimizing = OPTIMIZERS[rule](up, maximize=True), OPTIMIZERS[rule](down)
    gradients = draw_gradients(shapes)
    train(maximizing, up, gradients)
    train(minimizing, down, [[-g for g in row] for row in gradients])
    for a, b in zip(up, down, strict=True):
        assert_same(snapshot(maximizing, a), snapshot(minimizing, b))


@dataclass(frozen=True)
class Change:
    """A value of an option, and a setting in which it must make a difference."""

    value: Any
    base: dict[str, Any] = field(default_factory=dict)
    shape: tuple[int, ...] = (6, 10)
    roundings: bool = False  # the same update in exact arithmetic


CHANGES = {
    "muon": {
        "lr": [Change(0.05), Change(torch.tensor(0.05))],
        "weight_decay": [Change(0.5), Change(0.0)],
        "momentum": [Change(0.5), Change(0.0)],
        # A sum is an average times a constant, which only eps can tell apart.
        "momentum_form": [Change("sum", {"eps": 10.0})],
        "nesterov": [Change(False)],
        "equilibrate": [Change(True)],
        "orthogonalize": [Change("newton-schulz")],
        "ns_steps": [Change(3), Change(7)],
        "ns_coefficients": [Change((2.0, -1.5, 0.5)), Change([(3.0, -3.0, 1.0), (2, -1.5, 0.5)])],
        "execution": [Change("gram", {"execution": "standard"}, roundings=True)],
        "ns_start": [Change("gram"), Change("aol"), Change("aol", {"ns_start": "gram"})],
        "eps": [Change(10.0)],
        "eps_form": [Change("add", {"eps": 0.5})],
        "renormalize": [Change(True)],
        "variance_beta2": [Change(0.9), Change(0.0), Change(0.5, {"variance_beta2": 0.9})],
        # Directions of these sizes have rows about as large as each other: eps tells more.
        "variance_axis": [Change("rows", {"variance_beta2": 0.9})],
        "variance_eps": [Change(0.5, {"variance_beta2": 0.9})],
        "variance_eps_form": [Change("add", {"variance_beta2": 0.9, "variance_eps": 0.5})],
        "norm_factor": [Change(1.2)],
        "update_scale": [Change(0.5)],
        "decay_form": [Change("independent")],
        "adjust_lr": [Change("original"), Change(None), Change("original", shape=(10, 6))],
        "cautious": [Change(True)],
        "scale_decay": [Change(True)],
        "split_sizes": [
            Change((3, 3)),
            Change([1, 5], {"split_sizes": [5, 1]}),
            Change("interleaved:2x3", {"split_sizes": "halves"}),
        ],
        "flatten": [Change(True, shape=(3, 4, 5))],
        "transposed": [Change(True, {"equilibrate": True})],
        "compute_dtype": [Change(torch.float64, roundings=True), Change(torch.bfloat16)],
        "state_dtypes": [Change({"momentum_buffer": torch.bfloat16})],
        "maximize": [Change(True)],
    },
    "adamw": {
        "lr": [Change(0.05), Change(torch.tensor(0.05))],
        "betas": [Change((0.5, 0.999)), Change((0.9, 0.5)), Change((0.0, 0.0))],
        "eps": [Change(0.1)],
        "weight_decay": [Change(0.5), Change(0.0)],
        "amsgrad": [Change(True, {"betas": (0.9, 0.5)})],
        "eps_hat": [Change(True, {"eps": 0.1})],
        "cautious": [Change(True, {"weight_decay": 0.5})],
        "decay_form": [Change("independent"), Change("l2", {"weight_decay": 0.5})],
        "fused": [Change(True, shape=(640, 65), roundings=True)],
        "state_dtypes": [Change({"exp_avg": torch.bfloat16}), Change({"exp_avg_sq": torch.half})],
        "maximize": [Change(True)],
    },
}
changes = pytest.mark.parametrize(
    ("rule", "option", "change"),
    [(r, o, c) for r, options in CHANGES.items() for o, cs in options.items() for c in cs],
    ids=[
        f"{r} {o} {c.value}"
        for r, options in CHANGES.items()
        for o, cs in options.items()
        for c in cs
    ],
)


@pytest.mark.parametrize("rule", [MuonRule(), AdamWRule()], ids=lambda rule: rule.name)
def test_no_option_is_left_out_below(rule):
    assert set(CHANGES[rule.name]) == {*rule.defaults, "maximize"}


@changes
def test_every_option_makes_a_difference(rule, option, change):
    gradients = draw_gradients([change.shape])
    results = []
    for options in (change.base, {**change.base, option: change.value}):
        [param] = draw_parameters([change.shape])
        train(OPTIMIZERS[rule]([param], **options), [param], gradients)
        results.append(param.detach())
    difference = (results[1] - results[0]).abs().max()
    moved = (results[0] - draw(change.shape, 0)).abs().max()
    assert difference > (0 if change.roundings else 1e-3 * moved)
    assert results[1].isfinite().all()

    # The same key in a group of MuonAdamW means the same. Its own defaults are set aside.
    [param] = draw_parameters([change.shape])
    defaults = {"adamw": {"betas": (0.9, 0.999), "weight_decay": 0.01}, "muon": {}}[rule]
    group = {"rule": rule, "lr": 0.02, **defaults, **change.base, option: change.value}
    train(samestep.MuonAdamW([{"params": [param], **group}]), [param], gradients)
    assert same_bits(param, results[1])


MID_RUN = [
    ("muon", "lr", 0.05),
    ("muon", "lr", torch.tensor(0.05)),
    ("muon", "momentum", 0.5),
    ("muon", "weight_decay", 0.7),
    ("muon", "variance_beta2", 0.3),
    ("muon", "nesterov", False),
    ("muon", "cautious", True),
    ("muon", "ns_steps", 3),
    ("muon", "maximize", True),
    ("adamw", "lr", 0.05),
    ("adamw", "lr", torch.tensor(0.05)),
    ("adamw", "betas", (0.5, 0.6)),
    ("adamw", "eps", 0.1),
    ("adamw", "weight_decay", 0.7),
    ("adamw", "maximize", True),
]


@pytest.mark.parametrize(
    ("rule", "key", "value"), MID_RUN, ids=[f"{r} {k} {v}" for r, k, v in MID_RUN]
)
def test_a_value_changed_in_the_group_counts_from_the_next_step(rule, key, value):
    """As a fresh optimizer that was built with it and given the same state."""
    shapes = [(6, 4), (4, 6)]
    base = {"variance_beta2": 0.9} if rule == "muon" else {}
    gradients = draw_gradients(shapes, steps=5)

    def warm() -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
        params = draw_parameters(shapes)
        optimizer = OPTIMIZERS[rule](params, **base)
        train(optimizer, params, gradients[:2])
        return params, optimizer

    params, optimizer = warm()
    fresh_params = [nn.Parameter(param.detach().clone()) for param in params]
    fresh = OPTIMIZERS[rule](fresh_params, **{**base, key: value})
    for param, fresh_param in zip(params, fresh_params, strict=True):
        for name, tensor in optimizer.state[param].items():
            fresh.state[fresh_param][name].copy_(tensor)
    optimizer.param_groups[0][key] = value
    train(optimizer, params, gradients[2:])
    train(fresh, fresh_params, gradients[2:])
    unchanged_params, unchanged = warm()
    train(unchanged, unchanged_params, gradients[2:])
    for param, fresh_param, other in zip(params, fresh_params, unchanged_params, strict=True):
        assert_same(snapshot(optimizer, param), snapshot(fresh, fresh_param))
        assert not torch.equal(param, other)


@both_rules
def test_the_tensor_learning_rate_of_a_group_may_be_filled_in_place(rule):
    """This is how a schedule runs without waiting for a device; torch's schedulers do it."""
    shapes = [(6, 4), (6, 4)]
    own_lr = torch.tensor(0.02, dtype=torch.float64)
    params, expected = draw_parameters(shapes), draw_parameters(shapes)
    # The first group has the tensor of the keyword, the second one of its own.
    groups = [{"params": [params[0]]}, {"params": [params[1]], "lr": own_lr}]
    optimizer = OPTIMIZERS[rule](groups, lr=torch.tensor(0.5, dtype=torch.float64))
    reference = OPTIMIZERS[rule]([{"params": [param]} for param in expected])
    assert optimizer.param_groups[1]["lr"] is own_lr
    for step, row in enumerate(draw_gradients(shapes)):
        for place in range(2):
            lr = 0.02 / (1 + step + place)
            optimizer.param_groups[place]["lr"].fill_(lr)
            reference.param_groups[place]["lr"] = lr
        train(optimizer, params, [row])
        train(reference, expected, [row])
    for param, other in zip(params, expected, strict=True):
        assert_same(snapshot(optimizer, param), snapshot(reference, other))


@pytest.mark.parametrize(
    ("key", "value"), [("split_sizes", (3, 3)), ("flatten", True), ("variance_beta2", 0.9)]
)
def test_what_the_state_was_made_for_cannot_change(key, value):
    shapes = [(6, 4), (6, 4)]
    params = draw_parameters(shapes)
    optimizer = samestep.Muon([{"params": [params[0]]}, {"params": [params[1]]}])
    optimizer.param_groups[1][key] = value  # the first group is fine, and is not stepped either
    before = [snapshot(optimizer, param) for param in params]
    with pytest.raises(RuntimeError, match=key if key != "variance_beta2" else "variance"):
        train(optimizer, params, draw_gradients(shapes, steps=1))
    for param, old in zip(params, before, strict=True):
        assert_same(snapshot(optimizer, param), old)


@both_rules
def test_the_closure_is_called_once_with_gradients_enabled(rule):
    [param] = draw_parameters([(6, 4)])
    optimizer = OPTIMIZERS[rule]([param])
    before = param.detach().clone()
    calls = []

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        calls.append(loss.detach())
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert len(calls) == 1
    assert loss.detach() == calls[0] == before.square().sum()
    assert not same_bits(param, before)


def test_a_sparse_gradient_is_refused_before_anything_changes():
    embedding = nn.Embedding(7, 4, sparse=True)
    [other] = draw_parameters([(6, 4)])
    optimizer = samestep.AdamW([other, embedding.weight])
    before = snapshot(optimizer, other)
    other.grad = draw((6, 4), 3)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert_same(snapshot(optimizer, other), before)


# --- Rules of one's own --------------------------------------------------------------------


class HeavyBall:
    """SGD with momentum, and a count that the update does not read: state of shape ()."""

    name = "test-heavy-ball"
    kind = "elementwise"
    defaults = {"lr": 0.1, "momentum": 0.9}  # noqa: RUF012
    schedulable = frozenset({"lr", "momentum"})

    def check(self, options):
        if options["lr"] < 0:
            raise ValueError(f"lr {options['lr']} is negative")

    def scalars(self, options):
        return {"lr": options["lr"], "momentum": options["momentum"]}

    def state_shapes(self, shape, options):
        return {"velocity": shape, "count": ()}

    def update(self, param, grad, state, scalars, options):
        velocity = state["velocity"] * scalars["momentum"] + grad
        new_state = {"velocity": velocity, "count": state["count"] + 1}
        return Update(param - velocity * scalars["lr"], new_state)


class RowNormalized:
    """Gradient rows over the mean of their norms so far: per-block state of odd shapes."""

    name = "test-row-normalized"
    kind = "matrix"
    defaults = {"lr": 0.1, "floor": 1e-6}  # noqa: RUF012
    schedulable = frozenset({"lr"})

    def check(self, options):
        pass

    def scalars(self, options):
        return {"lr": options["lr"]}

    def state_shapes(self, shape, options):
        return {"last": shape, "norm_sum": (shape[0],), "count": ()}

    def update(self, param, grad, state, scalars, options):
        count = state["count"] + 1  # (B,)
        norm_sum = state["norm_sum"] + grad.square().sum(-1).sqrt()  # (B, rows)
        mean = (norm_sum / count[:, None]).clamp_min(options["floor"])
        new_state = {"last": grad.clone(), "norm_sum": norm_sum, "count": count}
        return Update(param - grad / mean[..., None] * scalars["lr"], new_state)


@pytest.fixture
def own_rules():
    rules = [HeavyBall(), RowNormalized()]
    for rule in rules:
        register_rule(rule)
    yield
    for rule in rules:
        del RULES[rule.name]


OWN_SHAPES = [(7, 5), (), (300,), (6, 4), (12, 4), (2, 6, 4), (6, 4)]


def with_own_rules(params: Sequence[nn.Parameter], **options: Any) -> samestep.MuonAdamW:
    """Both of our own rules next to one of the package's."""
    names = ["matrix 0", "scalar", "vector", "matrix", "fused", "stack", "muon"]
    named = list(zip(names, params, strict=True))
    return samestep.MuonAdamW(
        [
            {"params": named[:3], "rule": "test-heavy-ball", "lr": 0.05},
            {
                "params": named[3:6], "rule": "test-row-normalized",
                "split_sizes": {"fused": (7, 5)},
            },
            {"params": named[6:], "rule": "muon"},
        ],
        **options,
    )  # fmt: skip


@pytest.mark.usefixtures("own_rules")
def test_own_rules_get_their_groups_and_state():
    params = draw_parameters(OWN_SHAPES)
    optimizer = with_own_rules(params)
    groups = optimizer.param_groups
    assert {"lr": 0.05, "momentum": 0.9, "maximize": False}.items() <= groups[0].items()
    assert {"lr": 0.1, "floor": 1e-6, "maximize": False}.items() <= groups[1].items()
    # Keys of other rules would only suggest that they do something.
    assert not {"ns_steps", "weight_decay", "betas"} & (set(groups[0]) | set(groups[1]))
    shapes = [{k: tuple(t.shape) for k, t in optimizer.state[p].items()} for p in params]
    assert shapes[0] == {"velocity": (7, 5), "count": ()}
    assert shapes[3] == {"last": (6, 4), "norm_sum": (6,), "count": (1,)}
    assert shapes[4] == {"last": (12, 4), "norm_sum": (12,), "count": (2,)}
    assert shapes[5] == {"last": (2, 6, 4), "norm_sum": (12,), "count": (2,)}
    assert "test-row-normalized" in optimizer.table()


@pytest.mark.usefixtures("own_rules")
def test_own_elementwise_rule_equals_torch_sgd():
    shapes = OWN_SHAPES[:3]
    params, expected = draw_parameters(shapes), draw_parameters(shapes)
    optimizer = samestep.MuonAdamW([{"params": params, "rule": "test-heavy-ball", "lr": 0.05}])
    reference = torch.optim.SGD(expected, lr=0.05, momentum=0.9)
    gradients = draw_gradients(shapes, steps=4)
    train(optimizer, params, gradients)
    train(reference, expected, gradients)
    for a, b in zip(params, expected, strict=True):
        torch.testing.assert_close(a, b)
        assert optimizer.state[a]["count"] == 4


@pytest.mark.usefixtures("own_rules")
def test_own_matrix_rule_gets_stacks_of_whole_blocks():
    params = draw_parameters(OWN_SHAPES)
    optimizer = with_own_rules(params)
    gradients = draw_gradients(OWN_SHAPES)
    train(optimizer, params, gradients)
    # A row of any block is treated alike, so that whole parameters can be checked by formula.
    for index in (3, 4, 5):
        expected, norms = draw_parameters(OWN_SHAPES)[index].detach().double(), 0.0
        for step, row in enumerate(gradients):
            norms = norms + row[index].double().norm(dim=-1, keepdim=True)
            expected = expected - 0.1 * row[index] / (norms / (step + 1))
        torch.testing.assert_close(params[index].detach().double(), expected, rtol=1e-5, atol=1e-6)
        assert (optimizer.state[params[index]]["count"] == 3).all()


@pytest.mark.usefixtures("own_rules")
def test_own_rules_save_and_load():
    gradients = draw_gradients(OWN_SHAPES, steps=4)
    straight = draw_parameters(OWN_SHAPES)
    optimizer = with_own_rules(straight)
    train(optimizer, straight, gradients[:2])
    resumed = [nn.Parameter(param.detach().clone()) for param in straight]
    loaded = with_own_rules(resumed)
    loaded.load_state_dict(optimizer.state_dict())
    train(optimizer, straight, gradients[2:])
    train(loaded, resumed, gradients[2:])
    for a, b in zip(straight, resumed, strict=True):
        assert_same(snapshot(loaded, b), snapshot(optimizer, a))


@pytest.mark.usefixtures("own_rules")
def test_own_matrix_rules_refuse_state_of_other_blocks():
    """Its shape may fit by chance, as here; split_sizes is no option of the rule itself."""
    first, second = draw_parameters([(12, 4)])[0], draw_parameters([(12, 4)])[0]
    group = {"rule": "test-row-normalized"}
    saved = samestep.MuonAdamW([{**group, "params": [first], "split_sizes": (7, 5)}])
    other = samestep.MuonAdamW([{**group, "params": [second], "split_sizes": (6, 6)}])
    with pytest.raises(ValueError, match="split_sizes"):
        other.load_state_dict(saved.state_dict())
    other.param_groups[0]["split_sizes"] = (5, 7)
    with pytest.raises(RuntimeError, match="split_sizes"):
        other.step()


def torch_compiles():
    """Not before torch 2.10 with Python 3.14."""
    try:
        torch.compile(torch.neg)
    except RuntimeError:
        return False
    return True


def test_a_torch_that_cannot_compile_is_told_at_construction(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("not supported on Python 9.9")

    monkeypatch.setattr(torch, "compile", refuse)
    with pytest.raises(ValueError, match="leave compile out"):
        samestep.AdamW(draw_parameters(OWN_SHAPES), compile="eager")


@twin
@pytest.mark.usefixtures("own_rules")
@pytest.mark.skipif("not torch_compiles()")
def test_own_rules_compile():
    torch._dynamo.reset()
    gradients = draw_gradients(OWN_SHAPES)
    plain, compiled = draw_parameters(OWN_SHAPES), draw_parameters(OWN_SHAPES)
    first, second = with_own_rules(plain), with_own_rules(compiled, compile="eager")
    train(first, plain, gradients)
    train(second, compiled, gradients)
    torch._dynamo.reset()
    for a, b in zip(plain, compiled, strict=True):
        assert_same(snapshot(second, b), snapshot(first, a))
