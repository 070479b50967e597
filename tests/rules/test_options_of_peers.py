"""Options that other libraries have, each against its formula written out here in float64.

`tests/peers` runs their classes beside ours, `tests/stress/test_reference.py` any options at once.
"""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor, nn

import samestep
from samestep import presets
from samestep.rules import RULES
from samestep.rules.muon import lr_factor
from samestep.update.plain import GroupMath
from samestep.update.triton import can_run
from tests.ranks import run_cases
from tests.soak import SOAK

LR, DECAY, STEPS = 0.02, 0.1, 4
SHAPES = [(6, 10), (10, 6), (7, 7)]
shapes = pytest.mark.parametrize("shape", SHAPES)


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def ours(shape: tuple[int, ...], **options) -> Tensor:
    """The parameter after some steps."""
    param = nn.Parameter(draw(shape, 0))
    group = {"rule": "muon", "lr": LR, "weight_decay": DECAY, **options, "params": [param]}
    opt = samestep.MuonAdamW([group])
    for step in range(STEPS):
        param.grad = draw(shape, 1 + step)
        opt.step()
    return param.detach()


def newton_schulz(X: Tensor) -> Tensor:
    """Keller Jordan's five steps, of a matrix of any shape."""
    X = X / X.norm()
    for _ in range(5):
        A = X @ X.T
        X = 3.4445 * X - 4.7750 * A @ X + 2.0315 * A @ A @ X
    return X


def by_formula(shape: tuple[int, ...], direction, scale: float = 1.0, decay: float = LR * DECAY):
    """Momentum as an average without look-ahead; `direction` makes an update of it."""
    param, momentum, state = draw(shape, 0), torch.zeros(shape, dtype=torch.float64), {}
    for step in range(STEPS):
        momentum = 0.95 * momentum + 0.05 * draw(shape, 1 + step)
        param = param * (1 - decay) - LR * scale * direction(momentum, state)
    return param


PLAIN = {"orthogonalize": "newton-schulz", "nesterov": False, "eps": 0.0, "adjust_lr": None}


def close(found: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(found, wanted, rtol=0, atol=1e-13)


@shapes
def test_scales(shape):
    rows, cols = shape
    factors = {"unit_rms_norm": math.sqrt(rows / cols), "sqrt_max": math.sqrt(max(rows, cols))}
    for name, factor in factors.items():
        assert lr_factor(rows, cols, name, 3.0) == pytest.approx(3 * factor, rel=1e-15)
        found = ours(shape, **{**PLAIN, "adjust_lr": name, "update_scale": 0.3})
        wanted = by_formula(shape, lambda m, _: newton_schulz(m), scale=0.3 * factor)
        assert close(found, wanted)


@shapes
def test_independent_decay_of_muon(shape):
    found = ours(shape, **PLAIN, decay_form="independent")
    assert close(found, by_formula(shape, lambda m, _: newton_schulz(m), decay=DECAY))


@shapes
def test_normuon_per_row(shape):
    def direction(momentum: Tensor, state: dict[str, Tensor]) -> Tensor:
        u = newton_schulz(momentum)
        old = state.get("v", torch.zeros(shape[0], 1, dtype=torch.float64))
        state["v"] = 0.9 * old + 0.1 * u.square().mean(dim=1, keepdim=True)
        evened = u / (state["v"].sqrt() + 1e-3)
        return evened * u.norm() / evened.norm()

    options = {"variance_beta2": 0.9, "variance_eps": 1e-3, "variance_eps_form": "add"}
    found = ours(shape, **PLAIN, **options, variance_axis="rows")
    assert close(found, by_formula(shape, direction))
    per_column = shape[0] < shape[1]
    assert close(found, ours(shape, **PLAIN, **options)) is not per_column


@shapes
@pytest.mark.parametrize("paper", [True, False])
def test_adamuon(shape, paper):
    """That of the paper, and that of Emerging-Optimizers."""

    def direction(momentum: Tensor, state: dict[str, Tensor]) -> Tensor:
        u = newton_schulz(momentum.sign() if paper else momentum)
        state["v"] = 0.95 * state.get("v", torch.zeros_like(u)) + 0.05 * u.square()
        u = u / (state["v"].sqrt() + 1e-8)
        return u * math.sqrt(math.prod(shape)) / u.norm() if paper else u

    keys = {"rule": "adamuon", "momentum_form": "ema", "eps": 0.0}
    if paper:
        found = ours(shape, **keys)  # of RMS 0.2
        assert close(found, by_formula(shape, direction, scale=0.2))
    else:
        found = ours(shape, **keys, adjust_lr=None, sign=False, renormalize=False)
        assert close(found, by_formula(shape, direction))


@pytest.mark.parametrize(
    "options",
    [
        {"eps_hat": True}, {"cautious": True}, {"decay_form": "independent"}, {"decay_form": "l2"},
        {"cautious": True, "decay_form": "independent", "eps_hat": True, "amsgrad": True},
    ],
    ids=str,
)  # fmt: skip
def test_adamw(options):
    p, m, v, largest = draw((5, 4), 0), 0.0, 0.0, torch.zeros(5, 4, dtype=torch.float64)
    form, eps = options.get("decay_form", "decoupled"), 1e-3
    for step in range(1, STEPS + 1):
        g = draw((5, 4), step) + (DECAY * p if form == "l2" else 0)
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        largest = torch.maximum(largest, v) if options.get("amsgrad") else v
        one, two = 1 - 0.9**step, math.sqrt(1 - 0.99**step)
        root = (
            (largest.sqrt() + eps) / two if options.get("eps_hat") else largest.sqrt() / two + eps
        )
        u = m / one / root
        rate = {"decoupled": LR * DECAY, "independent": DECAY, "l2": 0.0}[form]
        where = torch.where(u * p >= 0, 1.0, 0.0) if options.get("cautious") else 1.0
        p = (
            p - rate * where.double() * p - LR * u
            if options.get("cautious")
            else p * (1 - rate) - LR * u
        )
    found = ours((5, 4), rule="adamw", betas=(0.9, 0.99), eps=eps, **options)
    assert close(found, p)


def test_the_norm_factor():
    """A block is divided by more than its norm."""
    by_norm = by_formula((6, 10), lambda m, _: newton_schulz(m))
    assert not close(ours((6, 10), **PLAIN, norm_factor=1.1), by_norm)

    def direction(momentum: Tensor, _: dict[str, Tensor]) -> Tensor:
        X = momentum / (1.1 * momentum.norm())
        for _ in range(5):
            A = X @ X.T
            X = 3.4445 * X - 4.7750 * A @ X + 2.0315 * A @ A @ X
        return X

    found = ours((6, 10), **PLAIN, norm_factor=1.1)
    assert close(found, by_formula((6, 10), direction))


def test_groups_of_megatrons_fused_qkv():
    """(groups, q + k + v) rows, four groups: all queries are one matrix, all keys, all values."""
    sizes = [4, 1, 1]

    def direction(momentum: Tensor, _: dict[str, Tensor]) -> Tensor:
        parts = torch.split(momentum.view(4, 6, 10), sizes, dim=1)
        done = [newton_schulz(part.reshape(-1, 10)).view(part.shape) for part in parts]
        return torch.cat(done, dim=1).view(24, 10)

    found = ours((24, 10), **PLAIN, split_sizes="interleaved:4+1+1x4")
    assert close(found, by_formula((24, 10), direction))


@pytest.mark.parametrize("kernel", [(3, 3), (4, 2), (1, 5)])
def test_convolutions_of_keller(kernel):
    shape = (12, 2, *kernel)
    keys = {**presets.keller(kernel=kernel), "nesterov": False, "eps": 0.0}
    found = ours(shape, **{**keys, "lr": LR, "weight_decay": DECAY})
    scale = math.sqrt(max(1.0, kernel[0] / kernel[1]))
    wanted = by_formula(shape, lambda m, _: newton_schulz(m.flatten(1)).view(shape), scale=scale)
    assert close(found, wanted)


def test_a_model_with_convolutions_is_told_of_kellers_scale():
    model = nn.Sequential(nn.Conv2d(3, 256, 3, bias=False))
    override = {"rule": "muon", "flatten": True}
    with pytest.warns(UserWarning, match=r"1 for 0\.weight \(256, 3, 3, 3\).*3\.08"):
        samestep.MuonAdamW(model, preset="keller", overrides={"*": override})
    with warnings.catch_warnings(action="error"):
        own = {**override, "adjust_lr": None, "update_scale": 1.0}
        samestep.MuonAdamW(model, preset="keller", overrides={"*": own})
        samestep.MuonAdamW(model, preset="moonlight", overrides={"*": override})


@pytest.mark.parametrize("name", presets.PRESETS)
def test_every_preset_makes_steps(name):
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    opt = samestep.MuonAdamW(model, preset=name, compute_dtype=torch.float32)
    before = [param.detach().clone() for param in model.parameters()]
    model(torch.ones(2, 6)).square().sum().backward()
    opt.step()
    assert not any(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize(
    ("rule", "options", "says"),
    [
        ("muon", {"adjust_lr": "spectral"}, "adjust_lr 'spectral' is not supported"),
        ("muon", {"norm_factor": 0.9}, "norm_factor value: 0.9; give a finite number >= 1"),
        ("muon", {"variance_axis": "cols"}, "variance_axis 'cols' is not supported"),
        ("muon", {"variance_eps": 0.0}, "variance_eps value: 0.0"),
        ("muon", {"update_scale": 0.0}, "update_scale value: 0.0"),
        ("muon", {"decay_form": "l2"}, "decay_form 'l2' is not supported"),
        ("adamw", {"decay_form": "palm"}, "decay_form 'palm' is not supported"),
        ("adamw", {"decay_form": "l2", "cautious": True}, "exclude each other"),
        ("adamw", {"fused": True, "cautious": True}, "leave fused out"),
        ("adamw", {"fused": True, "eps_hat": True}, "leave fused out"),
        ("adamuon", {"variance_beta2": None}, "use rule 'muon'"),
        ("adamuon", {"sign": 1}, "sign must be True or False"),
        ("adamuon", {"equilibrate": True}, "'equilibrate' is no option of rule 'adamuon'"),
    ],
)
def test_bad_values(rule, options, says):
    with pytest.raises((ValueError, TypeError), match=says):
        ours((4, 4), **options, rule=rule)


def test_the_axis_of_variance_belongs_to_the_state():
    def build(axis):
        param = nn.Parameter(draw((4, 6), 0))
        group = {"rule": "muon", "params": [param], "variance_beta2": 0.9, "variance_axis": axis}
        return samestep.MuonAdamW([group])

    rows, columns = build("rows"), build("long")
    sizes = [next(iter(opt.state.values()))["variance"].numel() for opt in (rows, columns)]
    assert sizes == [4, 6]
    rows.load_state_dict(build("rows").state_dict())
    with pytest.raises(ValueError, match="variance_axis: rows -> long"):
        rows.load_state_dict(columns.state_dict())
    rows.param_groups[0]["variance_axis"] = "long"
    rows.param_groups[0]["params"][0].grad = draw((4, 6), 1)
    with pytest.raises((ValueError, RuntimeError), match="variance_axis: rows -> long"):
        rows.step()


def test_kernels_leave_adamuon_to_plain_torch():
    rule = RULES["adamuon"]
    math_of = GroupMath(rule, {}, dict(rule.defaults), None, False, None, None)
    assert not can_run(math_of, torch.device("cuda"))


GROUPS = [
    {"params": ["0.weight"], "rule": "adamuon"},
    {"params": ["1.weight"], "rule": "muon", "variance_beta2": 0.9, "variance_axis": "rows"},
    {"params": ["*.bias"], "rule": "adamw", "cautious": True, "eps_hat": True},
]


def trained(steps: range, path: str, distribution: dict[str, str], *, load: bool) -> list[Tensor]:
    """Saves before the last steps, or begins there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 6), nn.Linear(6, 8))
    opt = samestep.MuonAdamW(model, lr=1e-2, groups=GROUPS, **distribution)
    if load:
        samestep.load(path, model, opt)
    for step in steps:
        if step == 3 and not load:
            samestep.save(path, model, opt)
        opt.zero_grad()
        model(draw((16, 12), step).float()).square().mean().backward()
        opt.step()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.skipif(not SOAK, reason="long: make soak")
def test_state_goes_on_elsewhere(tmp_path):
    """Saved by one process; on two ranks, whose gradients are equal, as if nothing had been."""
    path = str(tmp_path / "saved")
    expected = trained(range(6), path, {}, load=False)
    cases = [{"sharding": "zero2"}, {"sharding": "zero1", "buffers": "flat"}]
    for case, found in run_cases(
        2, cases, lambda _, options: trained(range(3, 6), path, options, load=True)
    ):
        for of_rank in found:
            assert all(map(torch.equal, of_rank, expected)), case
