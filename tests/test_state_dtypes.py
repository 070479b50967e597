"""Moments kept in 16 bits: computed in 32, rounded once per step, the same in every layout."""

from __future__ import annotations

import pytest
import torch

import samestep
from samestep.rules.state import MASTER
from tests.ranks import run_forked
from tests.soak import some, twin
from tests.test_full_values import LAYOUTS, Net, backward, build

CHOICE = {"exp_avg": torch.bfloat16, "momentum_buffer": torch.bfloat16}


def trained(rank, ranks, layout, **options):
    model = Net()
    opt = build(model, state_dtypes=CHOICE, **layout, **options)
    for step in range(4):
        backward(model, rank, step)
        opt.step()
        opt.zero_grad()
    opt.wait_for_parameters()
    dtypes = {key: t.dtype for state in opt.state.values() for key, t in state.items()}
    return dict(model.named_parameters()), opt.whole_state(), dtypes


@twin
def test_layouts_agree_and_bytes_are_saved():
    def job(rank):
        return {name: trained(rank, 2, layout) for name, layout in LAYOUTS.items()}

    for found in run_forked(2, job):
        values, state, _ = found["none"]
        for other, other_state, dtypes in found.values():
            assert dtypes == {
                "step": torch.float32,
                "exp_avg": torch.bfloat16,
                "exp_avg_sq": torch.float32,
                "momentum_buffer": torch.bfloat16,
                "variance": torch.float32,
            }
            assert all(torch.equal(other[name], values[name]) for name in values)
            for name, entries in state.items():
                for key, value in entries.items():
                    assert other_state[name][key].dtype == value.dtype
                    assert torch.equal(other_state[name][key], value), (name, key)


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"update_rms": True}], ids=str)
def test_one_rounding_per_step(options):
    """Against moments rounded by hand between the steps of an optimizer in 32 bits."""
    ours, plain = Net(), Net()
    opt, other = build(ours, state_dtypes=CHOICE, **options), build(plain, **options)
    for step in range(4):
        for model, optimizer in ((ours, opt), (plain, other)):
            backward(model, 0, step)
            optimizer.step()
            optimizer.zero_grad()
        for state in other.state.values():
            for key in CHOICE.keys() & state.keys():
                state[key].copy_(state[key].bfloat16())
    for one, two in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, two)


def test_states_of_another_precision_are_rounded_when_loaded():
    model = Net()
    wide, narrow = build(model), build(model, state_dtypes=CHOICE)
    backward(model, 0, 0)
    wide.step()
    narrow.load_state_dict(wide.state_dict())
    name = "head.weight"
    assert torch.equal(
        narrow.full_state(name, "exp_avg"), wide.full_state(name, "exp_avg").bfloat16()
    )
    assert narrow.param_groups[0]["state_dtypes"] == CHOICE


@pytest.mark.parametrize(
    ("choice", "error", "text"),
    [
        ({"step": torch.bfloat16}, ValueError, "'step'; choose from"),
        ({"exp_avg": torch.int8}, TypeError, r"state_dtypes\['exp_avg'\] must be a floating"),
        ({MASTER: torch.float16}, ValueError, r"float16 is too narrow.*\"remainder\" keeps all 32"),
        ({MASTER: torch.bfloat16}, ValueError, r"bfloat16 is too narrow for main parameters"),
        (
            {MASTER: torch.float8_e4m3fn},
            ValueError,
            r"e4m3fn is too narrow for main parameters, which keep",
        ),
        ({MASTER: "fp32"}, ValueError, r"'fp32' is .*\['remainder'\], or a .* torch\.float32"),
        ({"exp_avg": "bf16"}, ValueError, r"\['exp_avg'\] 'bf16' is not .* torch\.bfloat16$"),
        (torch.bfloat16, TypeError, "a mapping of moments to these or to dtypes"),
    ],
)
def test_refused(choice, error, text):
    with pytest.raises(error, match=text):
        samestep.AdamW(Net().bfloat16(), state_dtypes=choice, master_weights=True)


def test_not_changed_afterwards():
    model = Net()
    opt = samestep.AdamW(model)
    opt.param_groups[0]["state_dtypes"] = CHOICE
    backward(model, 0, 0)
    with pytest.raises(RuntimeError, match="state_dtypes: None ->"):
        opt.step()


MASTERS = [torch.float64, torch.float32]


@twin
@pytest.mark.parametrize("dtype", some(MASTERS), ids=str)
def test_master_weights_in_a_dtype_of_choice(dtype):
    """Kept so in every layout, with the same bits; computed in 32 bits, and better than none."""

    def job(rank):
        found = []
        for layout in LAYOUTS.values():
            model = Net().bfloat16()
            opt = build(model, master_weights=True, state_dtypes={"master_weight": dtype}, **layout)
            for step in range(6):
                backward(model, rank, step)
                opt.step()
                opt.zero_grad()
            opt.wait_for_parameters()
            kept = {t.dtype for s in opt.state.values() for k, t in s.items() if k == MASTER}
            names = [name for group in opt.param_groups for name in group["param_names"]]
            whole = {name: opt.full_parameter(name) for name in names}
            assert all(value.dtype == torch.float32 for value in whole.values())
            found.append((kept, whole))
        return found

    for found in run_forked(2, job):
        for kept, whole in found:
            assert kept == {dtype}
            for name, value in whole.items():
                assert torch.equal(value, found[0][1][name]), name


def test_a_master_weight_of_float32_is_the_usual_one():
    models = []
    for options in ({}, {"state_dtypes": {"master_weight": torch.float32}}):
        model = Net().bfloat16()
        opt = build(model, master_weights=True, **options)
        for step in range(3):
            backward(model, 0, step)
            opt.step()
            opt.zero_grad()
        models.append(opt.whole_state())
    for name, state in models[0].items():
        assert torch.equal(state[MASTER], models[1][name][MASTER])
