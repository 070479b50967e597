"""The harness's reference against numpy's, against samestep, and by hand."""

import ast
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import samestep
from samestep.lab.stress import reference
from samestep.lab.stress.reference import Reference
from samestep.rules import RULES
from samestep.rules.muon import LR_FACTORS
from samestep.rules.orthogonalize import POLYNOMIALS
from tests.reference import (
    POLAR_EXPRESS,
    QUINTIC,
    REFERENCES,
    ReferenceAdamW,
    relative_error,
    to_numpy,
)


def draw(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def everything(ref: Reference) -> dict[str, Tensor]:
    """Copies of all parameters and state, under one name each."""
    found = copies(ref.params)
    for name, state in ref.state.items():
        found.update({f"{name}.{key}": tensor.clone() for key, tensor in state.items()})
    return found


def assert_same_bits(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor.view(torch.int64), after[name].view(torch.int64)), name


# --- Against the numpy recipes ---------------------------------------------------------------


def test_coefficients_to_the_last_digit():
    tables = {"newton-schulz": QUINTIC, "polar-express": POLAR_EXPRESS}
    assert {name: reference.TABLES[name] for name in tables} == tables
    ours = {name: list(table.coefficients) for name, table in POLYNOMIALS.items()}
    assert ours == reference.TABLES  # which were typed separately


@pytest.mark.parametrize("recipe", REFERENCES)
@pytest.mark.parametrize(
    ("shape", "split_sizes"),
    [
        ((12, 8), None),
        ((8, 12), None),
        ((18, 6), (6, 6, 6)),
        ((16, 6), (10, 4, 2)),
        ((3, 9, 6), None),
        ((2, 16, 6), (10, 4, 2)),
    ],
)
def test_muon_recipes(recipe: str, shape: tuple[int, ...], split_sizes: tuple[int, ...] | None):
    options = {"lr": 0.02, "weight_decay": 0.3, "momentum": 0.9, "split_sizes": split_sizes}
    group = {**samestep.presets.preset_options(recipe, "muon"), **options, "rule": "muon"}
    start = draw(shape, 0)
    ref = Reference({"w": start}, [{**group, "param_names": ["w"]}])
    numpy = REFERENCES[recipe]([to_numpy(start)], **options)
    for step in range(4):
        grad = draw(shape, 1 + step) * 3.0**-step
        assert ref.step({"w": [grad]}, divisor=1)
        numpy.step([to_numpy(grad)])
    assert relative_error(ref.params["w"], numpy.params[0]) < 1e-12
    assert relative_error(ref.state["w"]["momentum_buffer"], numpy.momentum_buffers[0]) < 1e-12
    if recipe == "nanochat":
        flat = torch.cat([torch.from_numpy(s).ravel() for s in numpy.second_moments.values()])
        assert relative_error(ref.state["w"]["variance"], flat) < 1e-12


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
def test_adamw(amsgrad: bool, maximize: bool):
    options = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.2}
    options |= {"amsgrad": amsgrad, "maximize": maximize}
    starts = {"w": draw((5, 3), 0), "b": draw((4,), 1), "s": draw((), 2)}
    ref = Reference(starts, [{**options, "rule": "adamw", "param_names": list(starts)}])
    numpy = ReferenceAdamW([to_numpy(p) for p in starts.values()], **options)
    for step in range(5):
        grads = {n: draw(tuple(p.shape), 3 * step + 9) for n, p in starts.items()}
        grads = {n: None if n == "b" and step == 2 else g * 3.0**-step for n, g in grads.items()}
        ref.step({name: [grad] for name, grad in grads.items()}, divisor=1)
        numpy.step([None if grad is None else to_numpy(grad) for grad in grads.values()])
    for index, name in enumerate(starts):
        state = ref.state[name]
        assert relative_error(ref.params[name], numpy.params[index]) < 1e-12
        assert relative_error(state["exp_avg"], numpy.exp_avg[index]) < 1e-12
        assert relative_error(state["exp_avg_sq"], numpy.exp_avg_sq[index]) < 1e-12
        assert float(state["step"]) == numpy.steps[index]
        assert ("max_exp_avg_sq" in state) == amsgrad
        if amsgrad:
            assert relative_error(state["max_exp_avg_sq"], numpy.max_exp_avg_sq[index]) < 1e-12


# --- Against samestep in one process ---------------------------------------------------------

SHAPES = {
    "joint.weight": (12, 5),
    "up.weight": (8, 5),
    "down.weight": (5, 8),
    "row.weight": (1, 4),
    "experts": (2, 6, 3),
}


def maybe_tensor(value: float, as_tensor: bool) -> float | Tensor:
    """Its 32 bits count as they are: no arithmetic is done in them."""
    return torch.tensor(value, dtype=torch.float32) if as_tensor else value


def numbers(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False)


@st.composite
def muon_options(draw_: Any) -> dict[str, Any]:
    """Every option of the rule that matters on a CPU, at random."""
    triple = st.sampled_from([(1.875, -1.25, 0.375), (2, -1.5, 0.5), [1.5, -0.5, 0.0]])
    choices: dict[str, Any] = {
        "lr": st.builds(maybe_tensor, numbers(0, 0.1), st.booleans()),
        "weight_decay": numbers(0, 1),
        "momentum": st.just(0.0) | numbers(0.1, 0.99),  # with 1e-38, 1 - mu is rounded to 1
        "momentum_form": st.sampled_from(["ema", "sum"]),
        "orthogonalize": st.sampled_from(list(POLYNOMIALS)),
        "norm_factor": st.sampled_from([None, 1.0, 1.5]),
        "ns_steps": st.integers(1, 6),
        "ns_coefficients": st.none() | triple,
        "ns_start": st.sampled_from(["norm", "gram", "aol"]),
        "execution": st.sampled_from([None, "standard", "gram"]),
        "eps": st.sampled_from([0.0, 1e-7, 0.5, 5.0]),
        "eps_form": st.sampled_from(["clamp", "add"]),
        "variance_beta2": st.none() | numbers(0, 0.99),
        "variance_axis": st.sampled_from(["long", "rows"]),
        "variance_eps": st.sampled_from([1e-10, 1e-3]),
        "variance_eps_form": st.sampled_from(["clamp", "add"]),
        "adjust_lr": st.sampled_from(list(LR_FACTORS)),
        "update_scale": st.just(1.0) | numbers(0.1, 3),
        "decay_form": st.sampled_from(["decoupled", "independent"]),
        "split_sizes": st.sampled_from([None, {"joint.weight": (4, 4, 4), "exp*": [5, 1]}]),
    }
    flags = ("nesterov", "equilibrate", "renormalize", "cautious", "scale_decay", "maximize")
    choices.update({key: st.booleans() for key in flags})
    if draw_(st.booleans()):  # a triple per step, and at least as many steps
        choices["ns_coefficients"] = st.lists(triple, min_size=1, max_size=4)
        choices["ns_steps"] = st.none() | st.integers(4, 6)
    return {key: draw_(choice) for key, choice in choices.items()}


ADAMUON_SHAPES = {"ada.wide": (4, 6), "ada.stack": (2, 6, 3)}


@st.composite
def adamuon_options(draw_: Any) -> dict[str, Any]:
    """Those of Muon that it shares, and its own."""
    choices = {
        key: value
        for key, value in draw_(muon_options()).items()
        if key in RULES["adamuon"].defaults and key != "split_sizes"
    }
    own = {
        "sign": st.booleans(),
        "variance_beta2": numbers(0, 0.99),
        "variance_eps": st.sampled_from([1e-8, 1e-2]),
        "split_sizes": st.sampled_from([None, {"ada.stack": (4, 2)}]),
    }
    found = {**choices, **{key: draw_(choice) for key, choice in own.items()}}
    # Matrices of signs have directions with zeros in them, of which rounding makes a sign: what
    # caution says there depends on the number of threads.
    return {**found, "cautious": found["cautious"] and not found["sign"]}


@st.composite
def adamw_options(draw_: Any) -> dict[str, Any]:
    tensors = draw_(st.booleans())
    betas = draw_(st.tuples(numbers(0, 0.95), numbers(0, 0.999)))
    decay_form = draw_(st.sampled_from(["decoupled", "independent", "l2"]))
    return {
        "lr": maybe_tensor(draw_(numbers(0, 0.1)), tensors),
        "betas": tuple(maybe_tensor(beta, tensors) for beta in betas),
        "eps": maybe_tensor(draw_(st.sampled_from([1e-8, 1e-3, 1.0])), tensors),
        "weight_decay": maybe_tensor(draw_(numbers(0, 1)), tensors),
        "amsgrad": draw_(st.booleans()),
        "eps_hat": draw_(st.booleans()),
        "cautious": decay_form != "l2" and draw_(st.booleans()),
        "decay_form": decay_form,
        "maximize": draw_(st.booleans()),
    }


class Pair:
    """A samestep optimizer of one process and its reference, given the same gradients."""

    def __init__(self, params: dict[str, Tensor], groups: list[dict[str, Any]], **options: Any):
        self.named = {name: nn.Parameter(param.clone()) for name, param in params.items()}
        groups = [self.with_tensors(group) for group in groups]
        self.opt = samestep.MuonAdamW(groups, **options)
        self.ref = Reference(self.named, self.opt.param_groups)
        self.max_grad_norm = options.get("max_grad_norm")

    def with_tensors(self, group: dict[str, Any]) -> dict[str, Any]:
        return {**group, "params": [(name, self.named[name]) for name in group["param_names"]]}

    def step(self, grads: dict[str, Tensor | None]) -> bool:
        for name, param in self.named.items():
            param.grad = None if grads.get(name) is None else grads[name].clone()
        self.opt.step()
        by_rank = {name: [grad] for name, grad in grads.items()}
        return self.ref.step(by_rank, divisor=1, max_grad_norm=self.max_grad_norm)

    def assert_close(self, tolerance: float = 1e-9) -> None:
        assert self.ref.params.keys() == self.named.keys()
        for name, param in self.named.items():
            found = {"value": self.ref.params[name], **self.ref.state.get(name, {})}
            expected = {"value": param.detach(), **self.opt.state.get(param, {})}
            assert found.keys() == expected.keys()
            for key, tensor in expected.items():
                message = f"{name} {key}: {{}}".format
                torch.testing.assert_close(
                    found[key], tensor, rtol=tolerance, atol=tolerance, equal_nan=True, msg=message
                )


@st.composite
def gradients(draw_: Any) -> list[dict[str, Tensor | None]]:
    """Of several steps; absent, zero and partly zero ones among them."""
    kinds = st.sampled_from(["full", "full", "absent", "zero", "zero row", "zero column"])
    seed = draw_(st.integers(0, 1000))
    steps: list[dict[str, Tensor | None]] = []
    for step in range(4):
        grads: dict[str, Tensor | None] = {}
        shapes = {**SHAPES, **ADAMUON_SHAPES, "bias": (7,), "scale": ()}
        for index, (name, shape) in enumerate(shapes.items()):
            kind = draw_(kinds)
            grad = draw(shape, 100 * seed + 10 * step + index) * 3.0**-step
            if kind == "zero":
                grad.zero_()
            if kind.startswith("zero ") and grad.ndim > 1:
                grad.select(-2 if kind == "zero row" else -1, 0).zero_()
            grads[name] = None if kind == "absent" else grad
        steps.append(grads)
    return steps


@given(
    muon_options(), adamuon_options(), adamw_options(), gradients(),
    st.sampled_from([None, 0.3, math.inf]),
)  # fmt: skip
def test_any_options(
    muon: dict[str, Any],
    adamuon: dict[str, Any],
    adamw: dict[str, Any],
    steps: list[dict[str, Tensor | None]],
    max_grad_norm: float | None,
):
    """Parameters and state of samestep and the reference, also where gradients are absent."""
    shapes = {**SHAPES, **ADAMUON_SHAPES, "bias": (7,), "scale": ()}
    params = {name: draw(shape, index) for index, (name, shape) in enumerate(shapes.items())}
    groups = [
        {**adamuon, "rule": "adamuon", "param_names": list(ADAMUON_SHAPES)},
        {**muon, "rule": "muon", "param_names": list(SHAPES)},
        {**adamw, "rule": "adamw", "param_names": ["bias", "scale"]},
    ]
    pair = Pair(params, groups, max_grad_norm=max_grad_norm)
    pair.assert_close(0.0)
    for grads in steps:
        assert pair.step(grads)
    pair.assert_close()


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((4, 3, 2, 2), {"flatten": True}),
        ((4, 3, 2), {"flatten": True, "split_sizes": [3, 1]}),
        ((4, 2, 2, 1), {"flatten": True}),
        ((5, 3), {"flatten": True}),
        ((6, 3), {"split_sizes": {"[vw]": (4, 2)}}),
        ((6, 3), {"split_sizes": {"other*": (4, 2), "w": (1, 5)}}),
        ((6, 3), {"split_sizes": "halves"}),
        ((6, 3), {"split_sizes": "heads:3"}),
        ((12, 5), {"split_sizes": "interleaved:2x3"}),
        ((2, 10, 4), {"split_sizes": "interleaved:3+1+1x2"}),
        ((3, 5), {"transposed": True}),
        ((2, 3, 8), {"transposed": True, "split_sizes": "interleaved:2x4"}),
        ((4, 7), {"transposed": True, "split_sizes": (4, 3)}),
        # The variance has as many numbers as the parameter, and is in a row as always.
        ((3, 1), {}),
        ((1, 3), {}),
        ((4, 1, 1), {"flatten": True}),
        ((3, 4), {"split_sizes": (1, 1, 1)}),
        ((3, 4), {"split_sizes": (2, 1)}),
        ((2, 0, 3), {}),
        ((0, 3), {}),
    ],
)
def test_cuts(shape: tuple[int, ...], options: dict[str, Any]):
    group = {"lr": 0.1, "variance_beta2": 0.9, "adjust_lr": "original", **options}
    names = ["w", "other"] if "other*" in str(options) else ["w"]
    params = {name: draw(shape, index) for index, name in enumerate(names)}
    pair = Pair(params, [{**group, "rule": "muon", "param_names": names}])
    pair.assert_close(0.0)
    for step in range(3):
        pair.step({name: draw(shape, 10 * step + len(name)) for name in names})
    pair.assert_close()


def test_zero_rows_decay_under_caution():
    """Rounding in the decomposition must not look like a sign: 0 p >= 0, so p decays."""
    params = {"w": draw((9, 7), 0), "v": draw((7, 9), 1)}
    group = {"lr": 0.1, "weight_decay": 0.5, "cautious": True, "renormalize": True}
    pair = Pair(params, [{**group, "rule": "muon", "param_names": ["w", "v"]}])
    for step in range(5):
        grads = {name: draw(tuple(param.shape), step + 2) for name, param in params.items()}
        for grad in grads.values():
            grad[3:5] = 0
            grad[:, 2] = 0
        pair.step(grads)
    pair.assert_close()
    assert not torch.equal(pair.ref.params["w"][3], params["w"][3])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_not_finite_gradients_without_a_limit(bad: float):
    """Nothing is checked then: the blocks that see them become NaN, the others do not."""
    params = {"w": draw((6, 3), 0), "b": draw((4,), 1)}
    muon = {"rule": "muon", "param_names": ["w"], "split_sizes": (3, 3), "equilibrate": True}
    pair = Pair(params, [muon, {"rule": "adamw", "param_names": ["b"]}])
    grads = {"w": draw((6, 3), 2), "b": draw((4,), 3)}
    grads["w"][1, 1] = grads["b"][2] = bad
    with pytest.warns(UserWarning, match="was not finite"):
        assert pair.step(grads)
    pair.assert_close()
    assert pair.ref.params["w"][:3].isnan().all()
    assert pair.ref.params["w"][3:].isfinite().all()


def test_long_run():
    """No drift apart, with options changed, a group added and weights edited on the way."""
    params = {"w": draw((8, 6), 0), "v": draw((6, 8), 1), "b": draw((5,), 2)}
    muon = {"rule": "muon", "lr": 0.02, "param_names": ["w"], "variance_beta2": 0.9}
    pair = Pair(params, [muon, {"rule": "adamw", "lr": 0.02, "param_names": ["b"]}])
    for step in range(60):
        if step == 20:
            late = {"rule": "muon", "lr": 0.05, "param_names": ["v"]}
            pair.opt.add_param_group(pair.with_tensors(late))
            pair.ref.add_group(pair.opt.param_groups[-1])
        if step == 30:
            for groups in (pair.opt.param_groups, pair.ref.groups):
                groups[0].update(lr=0.01, momentum=0.5, weight_decay=0.3, variance_beta2=0.5)
                groups[1].update(lr=0.01, betas=(0.5, 0.6), weight_decay=0.3)
        if step == 40:
            pair.named["w"].data.copy_(draw((8, 6), 7))
            pair.ref.set_param("w", draw((8, 6), 7))
        pair.step(
            {
                name: draw(tuple(param.shape), 100 + 3 * step + index)
                for index, (name, param) in enumerate(params.items())
                if (step + index) % 3
            }
        )
    pair.assert_close(1e-8)
    assert {len(state) for state in pair.ref.state.values()} == {1, 2, 3}


def test_defaults_and_options_are_those_of_the_rules():
    """An option that the package gains must get a meaning here too."""
    assert reference.DEFAULTS.keys() == RULES.keys() & {"muon", "adamw", "adamuon"}
    for name, defaults in reference.DEFAULTS.items():
        no_matter = {"execution", "compute_dtype", "fused", "state_dtypes"}
        known = {key: v for key, v in RULES[name].defaults.items() if key not in no_matter}
        assert defaults == {**known, "maximize": False}


# --- Ranks, presence, clipping ---------------------------------------------------------------

ADAMW = {"rule": "adamw", "lr": 0.1, "weight_decay": 0.1, "param_names": ["a", "b"]}
MUON = {"rule": "muon", "lr": 0.1, "weight_decay": 0.1, "param_names": ["m", "n"]}
MATRICES = {"m": (4, 3), "n": (3, 5)}
ALL = {"a": (3,), "b": (2, 2), **MATRICES, "free": (3,)}


def started() -> Reference:
    """One step behind it, so that no state is zero."""
    ref = Reference({n: draw(s, i) for i, (n, s) in enumerate(ALL.items())}, [ADAMW, MUON])
    ref.step({n: [draw(s, 10 + i)] for i, (n, s) in enumerate(ALL.items())}, divisor=1)
    return ref


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradient_is_sum_over_ranks_by_divisor(dtype: torch.dtype):
    """Also with fewer ranks than the divisor has, and other ones absent."""
    many, one = started(), started()
    grads = {
        n: [draw(s, 20, dtype), None, draw(s, 21, dtype), draw(s, 22, dtype)]
        for n, s in ALL.items()
    }
    sums = {n: sum(g.double() for g in of if g is not None) / 6 for n, of in grads.items()}
    many.step(grads, divisor=6)
    one.step({name: [grad] for name, grad in sums.items()}, divisor=1)
    for name, tensor in everything(one).items():
        torch.testing.assert_close(everything(many)[name], tensor, rtol=1e-12, atol=1e-12)


def test_seed_pattern_of_absent_gradients():
    """The averages of the contract: 0.5, -0.25, 0.5, and skip."""
    grads: list[list[float | None]] = [[1.0, None], [None, -0.5], [0.25, 0.75], [None, None]]
    ref = Reference({"w": torch.zeros(2)}, [{**ADAMW, "betas": (0.0, 0.0), "param_names": ["w"]}])
    seen = []
    for of_ranks in grads:
        tensors = [None if g is None else torch.full((2,), g) for g in of_ranks]
        ref.step({"w": tensors}, divisor=2)
        seen.append(float(ref.state["w"]["exp_avg"][0]))
    assert seen == [0.5, -0.25, 0.5, 0.5]
    assert float(ref.state["w"]["step"]) == 3


def test_absent_everywhere_is_untouched():
    """Named with None, or not named: the same. Parameters of no group never change."""
    ref = started()
    before = everything(ref)
    grads = {n: [draw(s, 30), None] for n, s in ALL.items() if n not in ("a", "m")}
    assert ref.step({**grads, "a": [None, None]}, divisor=2)
    untouched = ("a", "m", "free")
    kept = {key: t for key, t in before.items() if key.split(".")[0] in untouched}
    assert_same_bits(kept, {key: everything(ref)[key] for key in kept})
    assert all(not torch.equal(before[name], ref.params[name]) for name in ("b", "n"))
    assert "free" not in ref.state


def test_zeros_are_present():
    ref = started()
    before = everything(ref)
    ref.step({name: [torch.zeros(shape)] for name, shape in ALL.items()}, divisor=1)
    changed = {
        key for key, tensor in everything(ref).items() if not torch.equal(tensor, before[key])
    }
    assert changed == before.keys() - {"free"}


def test_nothing_present_is_a_step_that_changes_nothing():
    ref = started()
    before = everything(ref)
    assert ref.step({}, divisor=2, max_grad_norm=1.0)
    assert_same_bits(before, everything(ref))


def test_clips_the_joint_norm_of_averages():
    """The gradient of a parameter without a group does not count."""
    clipped, plain = started(), started()
    grads = {n: [draw(s, 40), draw(s, 41)] for n, s in ALL.items()}
    averages = {n: (left + right) / 2 for n, (left, right) in grads.items()}
    trained = torch.cat([averages[name].ravel() for name in ALL if name != "free"])
    factor = 0.7 / (float(trained.norm()) + 1e-6)
    assert factor < 1
    clipped.step(grads, divisor=2, max_grad_norm=0.7)
    plain.step({name: [grad * factor] for name, grad in averages.items()}, divisor=1)
    for name, tensor in everything(plain).items():
        torch.testing.assert_close(everything(clipped)[name], tensor, rtol=1e-12, atol=1e-12)


def test_clips_what_it_maximizes():
    params = {name: draw(shape, 0) for name, shape in ALL.items()}
    groups = [{**group, "maximize": True} for group in (ADAMW, {**MUON, "eps": 5.0})]
    pair = Pair(params, groups, max_grad_norm=0.5)
    for step in range(3):
        pair.step({name: draw(shape, 1 + step) for name, shape in ALL.items()})
    pair.assert_close()


@pytest.mark.parametrize("limit", [1e6, math.inf])
def test_norms_below_the_limit_change_no_bit(limit: float):
    clipped, plain = started(), started()
    grads = {n: [draw(s, 40)] for n, s in ALL.items()}
    clipped.step(grads, divisor=2, max_grad_norm=limit)
    plain.step(grads, divisor=2)
    assert_same_bits(everything(plain), everything(clipped))


@pytest.mark.parametrize("limit", [1.0, math.inf])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["a", "n"])
def test_not_finite_norm_skips_the_whole_step(name: str, bad: float, limit: float):
    ref = started()
    before = everything(ref)
    grads: dict[str, list[Tensor | None]] = {n: [draw(s, 40), None] for n, s in ALL.items()}
    spoiled = draw(ALL[name], 40)
    spoiled.view(-1)[1] = bad
    assert not ref.step({**grads, name: [None, spoiled]}, divisor=2, max_grad_norm=limit)
    assert_same_bits(before, everything(ref))
    assert ref.step(grads, divisor=2, max_grad_norm=limit)


# --- Groups, edits, errors -------------------------------------------------------------------


def test_add_group_starts_from_zero():
    ref = started()
    before = everything(ref)
    ref.add_group({"rule": "adamw", "amsgrad": True, "param_names": ["free"], "role": "scalar"})
    assert_same_bits(before, {key: everything(ref)[key] for key in before})
    assert all(not tensor.any() for tensor in ref.state["free"].values())
    ref.step({"free": [torch.ones(3)]}, divisor=1)
    assert float(ref.state["free"]["step"]) == 1
    expected = before["free"] * (1 - 1e-3 * 0.01) - 1e-3 / (1 + 1e-8)
    torch.testing.assert_close(ref.params["free"], expected, rtol=1e-14, atol=0)


def test_edits_keep_state():
    ref = started()
    before = everything(ref)
    ref.set_param("m", torch.ones(4, 3))
    assert torch.equal(ref.params["m"], torch.ones(4, 3, dtype=torch.float64))
    rest = before.keys() - {"m"}
    assert_same_bits({k: before[k] for k in rest}, {k: everything(ref)[k] for k in rest})


def test_owns_its_tensors():
    """Nothing given or handed out changes with a step, and no option that the caller edits."""
    start, edit = draw((3, 4), 0), draw((3, 4), 1)
    lr = torch.tensor(0.1)
    group = {"rule": "muon", "lr": lr, "variance_beta2": 0.9, "param_names": ["w"]}
    ref = Reference({"w": nn.Parameter(start)}, [group])
    ref.set_param("w", edit)
    handed_out = {"value": ref.params["w"], **ref.state["w"]}
    before = copies(handed_out)
    lr.zero_()
    start.zero_()
    edit.zero_()
    group["param_names"].append("other")
    ref.step({"w": [draw((3, 4), 2)]}, divisor=1)
    assert_same_bits(before, handed_out)
    assert not start.any()
    assert not edit.any()
    assert not torch.equal(ref.params["w"], before["value"])
    assert float(ref.groups[0]["lr"]) == float(torch.tensor(0.1))


def test_is_float64_whatever_it_is_given():
    transposed = draw((4, 6), 0, torch.bfloat16).mT
    ref = Reference({"w": nn.Parameter(transposed)}, [{"rule": "muon", "param_names": ["w"]}])
    assert torch.equal(ref.params["w"], transposed.double())
    ref.step({"w": [draw((4, 6), 1, torch.bfloat16).mT]}, divisor=2)
    for tensor in everything(ref).values():
        assert tensor.dtype == torch.float64
        assert tensor.is_contiguous()
        assert not tensor.requires_grad


def test_errors_change_nothing():
    ref = started()
    before, groups = everything(ref), list(ref.groups)
    grads = {"a": [torch.ones(3)]}
    with pytest.raises(ValueError, match="rule 'sgd' has no reference"):
        ref.add_group({"rule": "sgd", "param_names": ["free"]})
    with pytest.raises(ValueError, match="rule None has no reference"):
        ref.add_group({"param_names": ["free"]})
    with pytest.raises(ValueError, match="'a' is in more than one group"):
        ref.add_group({"rule": "adamw", "param_names": ["free", "a"]})
    with pytest.raises(ValueError, match="'free' is in more than one group, or twice"):
        ref.add_group({"rule": "adamw", "param_names": ["free", "free"]})
    with pytest.raises(ValueError, match="no parameter named 'x'"):
        ref.add_group({"rule": "adamw", "param_names": ["free", "x"]})
    with pytest.raises(ValueError, match=r"'free' of shape \(3,\) is no matrix"):
        ref.add_group({"rule": "muon", "param_names": ["free"]})
    with pytest.raises(ValueError, match="no parameter named 'x'"):
        ref.set_param("x", torch.ones(1))
    with pytest.raises(ValueError, match=r"'a' has shape \(3,\), got \(1,\)"):
        ref.set_param("a", torch.ones(1))
    with pytest.raises(ValueError, match=r"'b' has shape \(2, 2\), got \(2,\)"):
        ref.step({**grads, "b": [None, torch.ones(2)]}, divisor=1)
    with pytest.raises(ValueError, match="no parameter named 'x'"):
        ref.step({**grads, "x": [torch.ones(1)]}, divisor=1)
    assert_same_bits(before, everything(ref))
    assert ref.groups == groups
    with pytest.raises(ValueError, match="'w' is matched by 2 patterns"):
        Reference(
            {"w": torch.ones(4, 2)},
            [{"rule": "muon", "param_names": ["w"], "split_sizes": {"w": [4], "*": [2, 2]}}],
        )


def test_shares_no_code_with_the_package():
    """Imports torch and the standard library, nothing else."""
    tree = ast.parse(Path(reference.__file__).read_text())
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(str(node.module).split(".")[0])
    assert "torch" in imported
    assert imported <= {"torch", *sys.stdlib_module_names} - {"importlib"}
