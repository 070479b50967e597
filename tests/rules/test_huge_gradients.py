"""Finite gradients of any size, and eps of any size, leave parameters and state finite."""

from __future__ import annotations

import pytest
import torch

from samestep.rules import RULES

SHAPE = (6, 8)
MUON = [
    {},
    {"momentum_form": "sum"},
    {"momentum_form": "sum", "nesterov": False},
    {"equilibrate": True},
    {"equilibrate": True, "eps": 0.0, "renormalize": True, "variance_beta2": 0.9},
    {"variance_beta2": 0.9, "variance_eps": 1e-20, "variance_eps_form": "add"},
    {"variance_beta2": 0.9, "variance_eps": 1e-40, "variance_axis": "rows"},
    {"eps": 0.0, "eps_form": "add", "orthogonalize": "newton-schulz"},
    {"compute_dtype": torch.bfloat16, "orthogonalize": "newton-schulz"},
    {"compute_dtype": torch.float16, "cautious": True},
]
CASES = [
    *(("muon", own) for own in MUON),
    *(("adamuon", own) for own in [{}, {"sign": False}, {"sign": False, "renormalize": False}]),
    *(
        ("adamw", own)
        for own in [
            {}, {"eps": 0.0}, {"amsgrad": True}, {"eps_hat": True, "eps": 0.0}, {"cautious": True},
            {"decay_form": "l2"}, {"betas": (0.0, 0.0)}, {"fused": True},
        ]
    ),
]  # fmt: skip
SIZES = [0.0, 1e-45, 1e-30, 1e19, 1e25, 2e30, 2e38, 3.4e38]


def gradients(size):
    """Of one size, with a single large element, and with rows of zeros; signs that change."""
    noise = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
    one = torch.zeros(SHAPE)
    one[1, 2] = 1.0
    beside = one * size + 1e-3
    half = noise.clone()
    half[3:] = 0.0
    for grad in (noise * size, one * size, beside, half * size):
        yield [grad, -grad, grad]


def steps(name, own, grads, run=None):
    """The parameter and its state after some steps, as a stack of one block for matrix rules."""
    rule = RULES[name]
    options = {**rule.defaults, **own}
    rule.check(options)
    scalars = {
        key: torch.tensor(value, dtype=torch.float64)
        for key, value in rule.scalars(options).items()
    }
    lead = (1,) if rule.kind == "matrix" else ()
    param = torch.ones(*lead, *SHAPE)
    state = {
        key: torch.zeros(shape if shape == () else (*lead, *shape))
        for key, shape in rule.state_shapes(SHAPE, options).items()
    }
    constant = {key: value for key, value in options.items() if key not in rule.schedulable}
    for grad in grads:
        new = (run or rule.update)(param, grad.view(param.shape), state, scalars, constant)
        param, state = new.param, dict(new.state)
    return param, state


@pytest.mark.parametrize(("name", "own"), CASES)
def test_finite_gradients_leave_all_finite(name, own):
    for size in SIZES:
        for grads in gradients(size):
            param, state = steps(name, own, grads)
            for key, tensor in {"parameter": param, **state}.items():
                assert tensor.isfinite().all(), (size, key)


@pytest.mark.parametrize("name", ["muon", "adamuon", "adamw"])
def test_compiled_updates_bound_gradients_likewise(name):
    rule = RULES[name]
    own = {"adamw": {"eps": 0.0}, "adamuon": {"sign": False}, "muon": {"equilibrate": True}}[name]
    run = torch.compile(rule.update, backend="eager", fullgraph=True, dynamic=False)
    for size in (0.0, 1.0, 1e19, 3.4e38):
        for grads in gradients(size):
            param, state = steps(name, own, grads, run)
            wanted, wanted_state = steps(name, own, grads)
            torch.testing.assert_close(param, wanted, rtol=1e-4, atol=1e-4)
            for key, tensor in state.items():
                assert tensor.isfinite().all(), (size, key)
                torch.testing.assert_close(tensor, wanted_state[key], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_broken_gradients_still_show(name, bad):
    """Also beside elements that are too large: what is infinite is not taken for a large number."""
    grad = torch.full(SHAPE, 3e38)
    grad[0, 0] = bad
    param, state = steps(name, {}, [grad])
    assert not param.isfinite().all()
    assert not state["momentum_buffer" if name == "muon" else "exp_avg"].isfinite().all()


def test_slices_of_a_huge_gradient_get_the_bits_of_the_whole():
    rule = RULES["adamw"]
    scalars = {
        key: torch.tensor(value, dtype=torch.float64)
        for key, value in rule.scalars(rule.defaults).items()
    }
    grad = torch.tensor([1.0, 3e38, -1e25, 1e-3, torch.inf, 2.0, 1e19, 5.0])

    def update(grad):
        state = {key: torch.zeros(grad.shape) for key in ("exp_avg", "exp_avg_sq")}
        state["step"] = torch.zeros(())
        return rule.update(torch.ones(grad.shape), grad, state, scalars, rule.defaults).param

    parts = torch.cat([update(part) for part in grad.split([1, 2, 1, 4])])
    whole = update(grad)
    assert torch.equal(parts.nan_to_num(7.0), whole.nan_to_num(7.0))


def test_the_fused_kernel_wants_an_eps():
    with pytest.raises(ValueError, match="fused=True is torch's kernel, which with eps=0 divides"):
        RULES["adamw"].check({**RULES["adamw"].defaults, "fused": True, "eps": 0.0})
