"""Saving and loading: state survives to the bit, in its own dtype, and torch's files load too."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samestep
from tests.limits import HANG

STEPS_BEFORE, STEPS_AFTER = 3, 3


def draw(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


class Model(nn.Module):
    """Parameters of every kind: fused, stacked, plain, a vector, a scalar, and an unused one."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        shapes = {
            "fused": (12, 6), "stack": (2, 6, 4), "plain": (6, 4), "vector": (5,), "scalar": (),
            "unused": (6, 4),
        }  # fmt: skip
        for seed, (name, shape) in enumerate(shapes.items()):
            self.register_parameter(name, nn.Parameter(draw(shape, seed, dtype)))


def muon_adamw(model: nn.Module, **options: Any) -> samestep.MuonAdamW:
    """Every kind of state: momentum, variance of unequal blocks, moments with amsgrad, counts."""
    matrices = ["fused", "stack", "plain", "unused"]
    groups = [
        {
            "params": matrices, "rule": "muon", "split_sizes": {"fused": (8, 3, 1)},
            "variance_beta2": 0.9,
        },
        {"params": ["vector", "scalar"], "rule": "adamw", "amsgrad": True},
    ]  # fmt: skip
    return samestep.MuonAdamW(model, 0.02, groups=groups, **options)


def muon(model: nn.Module, **options: Any) -> samestep.Muon:
    return samestep.Muon([model.stack, model.plain, model.unused], lr=0.02, **options)


def adamw(model: nn.Module, **options: Any) -> samestep.AdamW:
    return samestep.AdamW(model, lr=0.02, **options)


MAKERS = {"MuonAdamW": muon_adamw, "Muon": muon, "AdamW": adamw}
makers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
before_or_after = pytest.mark.parametrize(
    "steps", [0, STEPS_BEFORE], ids=["before the first step", "after some steps"]
)


def train(optimizer: torch.optim.Optimizer, model: nn.Module, steps: range | int) -> None:
    """Steps with gradients that depend on the name and the number of the step alone."""
    for step in steps if isinstance(steps, range) else range(steps):
        for index, (name, param) in enumerate(sorted(model.named_parameters())):
            used = name != "unused"
            param.grad = draw(param.shape, 1000 + 50 * step + index, param.dtype) if used else None
        optimizer.step()


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def fingerprint(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Parameters and state, to the bit."""
    found = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            tensors = {"param": param, **optimizer.state[param]}
            found.append({key: (t.dtype, t.shape, bits(t)) for key, t in tensors.items()})
    return found


def through_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


ROUTES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "directly": lambda state_dict: state_dict,
    "torch.save and weights_only=True": through_file,
    "deepcopy": copy.deepcopy,
    "pickle": lambda state_dict: pickle.loads(pickle.dumps(state_dict)),
}


def twin(model: nn.Module) -> nn.Module:
    """Another model with the same weights."""
    return copy.deepcopy(model)


# --- Round trips ---------------------------------------------------------------------------


@makers
def test_state_exists_for_every_parameter_from_construction(make):
    """So that a file written before the first step is complete, also for unused parameters."""
    model = Model(torch.bfloat16)
    optimizer = make(model, master_weights=True)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    assert set(optimizer.state) == set(params)
    before = {p: dict(optimizer.state[p]) for p in params}
    assert all(before.values())
    assert sorted(optimizer.state_dict()["state"]) == list(range(len(params)))
    for param, state in before.items():
        for key, tensor in state.items():
            assert tensor.dtype == torch.float32
            expected = param.detach().float() if key == "master_weight" else tensor * 0
            assert torch.equal(tensor, expected)
    train(optimizer, model, 2)
    for param, state in before.items():  # updated in place: references stay good
        now = optimizer.state[param]
        assert list(now) == list(state)
        assert all(now[key] is tensor for key, tensor in state.items())


@makers
@before_or_after
@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
def test_round_trip_continues_bit_for_bit(make, steps, route):
    model = Model()
    optimizer = make(model)
    train(optimizer, model, steps)
    resumed_model = twin(model)
    resumed = make(resumed_model)
    resumed.load_state_dict(route(optimizer.state_dict()))
    assert fingerprint(resumed) == fingerprint(optimizer)
    assert resumed.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]

    after = range(steps, steps + STEPS_AFTER)
    train(optimizer, model, after)
    train(resumed, resumed_model, after)
    assert fingerprint(resumed) == fingerprint(optimizer)


@makers
def test_loading_replaces_state_that_is_there(make):
    """Including by the zeros of a file that was saved before the first step."""
    model = Model()
    optimizer = make(model)
    fresh, fresh_state = fingerprint(optimizer), through_file(optimizer.state_dict())
    weights = copy.deepcopy(model.state_dict())
    train(optimizer, model, 2)
    assert fingerprint(optimizer) != fresh
    optimizer.load_state_dict(fresh_state)
    model.load_state_dict(weights)
    assert fingerprint(optimizer) == fresh


IN_ANOTHER_PROCESS = """
import sys, torch
from tests.test_state_dict import Model, muon_adamw, train, STEPS_BEFORE, STEPS_AFTER
source, target, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
saved = torch.load(source, weights_only=True)
model = Model()
optimizer = muon_adamw(model)
model.load_state_dict(saved["model"])
optimizer.load_state_dict(saved["optimizer"])
train(optimizer, model, range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER))
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, target)
"""


def test_a_fresh_process_continues_bit_for_bit(tmp_path: Path):
    model = Model()
    optimizer = muon_adamw(model)
    train(optimizer, model, STEPS_BEFORE)
    source, target = tmp_path / "saved.pt", tmp_path / "continued.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, source)
    train(optimizer, model, range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER))
    subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS, source, target, str(torch.get_num_threads())],
        check=True,
        timeout=HANG,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    continued = torch.load(target, weights_only=True)
    other_model = Model()
    other = muon_adamw(other_model)
    other_model.load_state_dict(continued["model"])
    other.load_state_dict(continued["optimizer"])
    assert fingerprint(other) == fingerprint(optimizer)


@makers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("master_weights", [False, True])
def test_state_keeps_its_dtype_and_bits(make, dtype, master_weights):
    """torch's own loading would round the 32-bit state of 16-bit parameters to 16 bits."""
    model = Model(dtype)
    optimizer = make(model, master_weights=master_weights)
    train(optimizer, model, STEPS_BEFORE)
    resumed = make(twin(model), master_weights=master_weights)
    resumed.load_state_dict(through_file(optimizer.state_dict()))
    assert fingerprint(resumed) == fingerprint(optimizer)
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    tensors = [tensor for state in resumed.state.values() for tensor in state.values()]
    assert {tensor.dtype for tensor in tensors} == {state_dtype}
    if dtype.itemsize == 2:  # the rounding would have been seen
        assert any(not torch.equal(t, t.to(dtype).float()) for t in tensors)


@makers
def test_loaded_state_is_a_copy(make):
    model = Model()
    optimizer = make(model)
    train(optimizer, model, STEPS_BEFORE)
    other_model = twin(model)
    other = make(other_model)
    saved = optimizer.state_dict()
    other.load_state_dict(saved)
    before = fingerprint(optimizer)
    train(other, other_model, 2)
    assert fingerprint(optimizer) == before
    loaded = fingerprint(other)
    for state in saved["state"].values():
        for tensor in state.values():
            tensor.fill_(7)
    for group in saved["param_groups"]:
        group["lr"] = 7.0
    assert fingerprint(other) == loaded
    assert all(group["lr"] == 0.02 for group in other.param_groups)


def test_a_loaded_tensor_learning_rate_is_a_copy():
    model = Model()
    optimizer = samestep.AdamW(model, lr=torch.tensor(0.02))
    other = samestep.AdamW(twin(model), lr=torch.tensor(0.5))
    other.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["lr"].fill_(7)
    assert isinstance(other.param_groups[0]["lr"], Tensor)
    assert other.param_groups[0]["lr"] == torch.tensor(0.02)


@makers
def test_hyperparameters_come_from_the_file(make):
    model = Model()
    optimizer = make(model)
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"], group["note"] = 0.5, 0.3, "kept"
    other = make(twin(model))
    other.load_state_dict(through_file(optimizer.state_dict()))
    for group in other.param_groups:
        assert (group["lr"], group["weight_decay"], group["note"]) == (0.5, 0.3, "kept")


def test_a_group_added_mid_run_is_saved_and_loaded():
    def add_late_group(optimizer: samestep.MuonAdamW, model: nn.Module) -> None:
        group = {"rule": "muon", "split_sizes": (4, 2), "variance_beta2": 0.8, "lr": 0.05}
        optimizer.add_param_group({"params": [("late", model.late)], **group})

    def with_late_parameter(dtype: torch.dtype = torch.float32) -> nn.Module:
        model = Model(dtype)
        model.late = nn.Parameter(draw((6, 5), 77))
        return model

    def early_optimizer(model: nn.Module) -> samestep.MuonAdamW:
        early = [(n, p) for n, p in model.named_parameters() if n != "late"]
        return samestep.MuonAdamW(
            [
                {"params": [pair for pair in early if pair[1].ndim > 1], "rule": "muon"},
                {"params": [pair for pair in early if pair[1].ndim < 2], "rule": "adamw"},
            ]
        )

    model = with_late_parameter()
    optimizer = early_optimizer(model)
    train(optimizer, model, 2)
    assert torch.equal(model.late, draw((6, 5), 77))
    add_late_group(optimizer, model)
    train(optimizer, model, range(2, 4))
    assert not torch.equal(model.late, draw((6, 5), 77))

    resumed_model = twin(model)
    resumed = early_optimizer(resumed_model)
    with pytest.raises(ValueError, match="number of parameter groups"):
        resumed.load_state_dict(optimizer.state_dict())
    add_late_group(resumed, resumed_model)
    resumed.load_state_dict(through_file(optimizer.state_dict()))
    assert fingerprint(resumed) == fingerprint(optimizer)
    train(optimizer, model, range(4, 6))
    train(resumed, resumed_model, range(4, 6))
    assert fingerprint(resumed) == fingerprint(optimizer)


# --- Copies of the optimizer ---------------------------------------------------------------

COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
}


@makers
@before_or_after
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_with_its_model_continues_by_itself(make, steps, copied):
    model = Model(torch.bfloat16)
    optimizer = make(model, master_weights=True)
    train(optimizer, model, steps)
    other_model, other = copied((model, optimizer))
    assert type(other) is type(optimizer)
    assert fingerprint(other) == fingerprint(optimizer)
    assert other.table() == optimizer.table()

    after = range(steps, steps + STEPS_AFTER)
    before = fingerprint(optimizer)
    train(other, other_model, after)
    assert fingerprint(other) != before
    assert fingerprint(optimizer) == before  # nothing is shared
    train(optimizer, model, after)
    assert fingerprint(other) == fingerprint(optimizer)

    other.load_state_dict(optimizer.state_dict())
    new = nn.Parameter(draw((4, 4), 5))
    has_names = "param_names" in other.param_groups[0]
    other.add_param_group({"params": [("new", new) if has_names else new], "rule": "muon"})
    assert len(other.param_groups) == len(optimizer.param_groups) + 1


# --- Names ---------------------------------------------------------------------------------


def named(params: dict[str, nn.Parameter], order: Sequence[str]) -> list[tuple[str, nn.Parameter]]:
    return [(name, params[name]) for name in order]


def draw_named() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(draw((6, 4), seed)) for seed, name in enumerate("abc")}


@pytest.mark.parametrize("optimizer_type", [samestep.Muon, samestep.AdamW])
def test_names_decide_when_the_order_differs(optimizer_type):
    """Equal shapes, so that loading by position would go unnoticed and be wrong."""
    params = draw_named()
    optimizer = optimizer_type(named(params, "abc"))
    for name, param in params.items():
        param.grad = draw((6, 4), 10 + ord(name))
    optimizer.step()
    others = draw_named()
    reordered = optimizer_type(named(others, "cab"))
    reordered.load_state_dict(through_file(optimizer.state_dict()))
    for name, param in params.items():
        state, loaded = optimizer.state[param], reordered.state[others[name]]
        assert {k: bits(t) for k, t in loaded.items()} == {k: bits(t) for k, t in state.items()}
    assert reordered.param_groups[0]["param_names"] == ["c", "a", "b"]
    assert reordered.param_groups[0]["params"] == [others[name] for name in "cab"]


@pytest.mark.parametrize("named_side", ["saved", "loading"])
def test_without_names_on_one_side_the_order_decides(named_side):
    params, others = draw_named(), draw_named()
    in_order = list(params.values()), list(others.values())
    saved_params = named(params, "abc") if named_side == "saved" else in_order[0]
    loading_params = named(others, "abc") if named_side == "loading" else in_order[1]
    optimizer = samestep.Muon(saved_params)
    for name, param in params.items():
        param.grad = draw((6, 4), 10 + ord(name))
    optimizer.step()
    loading = samestep.Muon(loading_params)
    loading.load_state_dict(optimizer.state_dict())
    for a, b in zip(*in_order, strict=True):
        assert torch.equal(
            loading.state[b]["momentum_buffer"], optimizer.state[a]["momentum_buffer"]
        )


def test_a_list_and_a_tuple_are_the_same_split():
    """One comes from a config file, the other from code."""
    [saved], [loading] = ([nn.Parameter(draw((6, 4), 0))] for _ in range(2))
    optimizer = samestep.Muon([saved], split_sizes=(4, 2))
    other = samestep.Muon([loading], split_sizes=[4, 2])
    other.load_state_dict(optimizer.state_dict())


# --- Refusals ------------------------------------------------------------------------------


def _other_names(saved: dict[str, Any]) -> None:
    saved["param_groups"][0]["param_names"][0] = "somewhere.else"


def _other_shape(saved: dict[str, Any]) -> None:
    # In the last parameter, so that the others would be loaded by a check on the way.
    saved["state"][5]["exp_avg"] = torch.zeros(3)


def _missing_key(saved: dict[str, Any]) -> None:
    del saved["state"][5]["exp_avg"]


def _unknown_key(saved: dict[str, Any]) -> None:
    saved["state"][5]["surprise"] = torch.zeros(())


def _other_rule(saved: dict[str, Any]) -> None:
    saved["param_groups"][1]["rule"] = "muon"


def _other_structure(saved: dict[str, Any]) -> None:
    saved["param_groups"][0]["split_sizes"] = {"fused": (6, 6)}


def _fewer_groups(saved: dict[str, Any]) -> None:
    saved["param_groups"].pop()


def _fewer_params(saved: dict[str, Any]) -> None:
    saved["param_groups"][1]["params"].pop()


def _bad_value(saved: dict[str, Any]) -> None:
    saved["param_groups"][1]["lr"] = -1.0


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_other_names, "'fused' is not in the loaded group, which has 'somewhere.else'"),
        (_other_shape, r"'exp_avg' of 'scalar' was saved with shape \(3,\)"),
        (_missing_key, "'scalar'.*'exp_avg'.*needed"),
        (_unknown_key, "'scalar'.*'surprise'"),
        (_other_rule, "saved with rule 'muon' and has 'adamw'"),
        (_other_structure, "split_sizes"),
        (_fewer_groups, "different number of parameter groups"),
        (_fewer_params, "doesn't match the size"),
        (_bad_value, "-1.0"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(damage, message):
    model = Model()
    optimizer = muon_adamw(model)
    train(optimizer, model, 2)
    before, groups = fingerprint(optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])
    other_model = Model()
    other = muon_adamw(other_model, weight_decay=0.3)
    train(other, other_model, 1)
    saved = copy.deepcopy(other.state_dict())
    damage(saved)
    for _ in range(2):  # the hooks that do the work must be gone again after an error
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(saved)
    assert fingerprint(optimizer) == before
    assert optimizer.state_dict()["param_groups"] == groups
    optimizer.load_state_dict(other.state_dict())
    train(optimizer, model, range(2, 3))


def test_hooks_of_the_user_run():
    model = Model()
    optimizer = adamw(model)
    train(optimizer, model, 1)
    saved = optimizer.state_dict()
    seen = []

    def double(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        state = {
            key: {**entry, "exp_avg": entry["exp_avg"] * 2}
            for key, entry in state_dict["state"].items()
        }
        return {**state_dict, "state": state}

    def look(loaded: torch.optim.Optimizer) -> None:
        seen.append(loaded.state[other_model.plain]["exp_avg"].clone())

    other_model = twin(model)
    other = adamw(other_model)
    other.register_load_state_dict_pre_hook(double)
    other.register_load_state_dict_post_hook(look)
    other.load_state_dict(saved)
    assert len(seen) == 1
    assert torch.equal(seen[0], optimizer.state[model.plain]["exp_avg"] * 2)


# --- torch's files -------------------------------------------------------------------------


def torch_muon_options() -> dict[str, Any]:
    return {key: value for key, value in samestep.presets.torch().items() if key != "rule"}


# torch's optimizer, ours with the same numbers, and shapes they take.
TORCH = {
    "AdamW": (
        lambda params: torch.optim.AdamW(params, lr=0.02, betas=(0.8, 0.95), weight_decay=0.1),
        lambda params: samestep.AdamW(params, lr=0.5),
        [(6, 4), (5,), (), (2, 3, 4)],
    ),
    "AdamW amsgrad": (
        lambda params: torch.optim.AdamW(params, lr=0.02, amsgrad=True),
        lambda params: samestep.AdamW(params, lr=0.5, amsgrad=True),
        [(6, 4), (5,)],
    ),
    "Muon": (
        lambda params: torch.optim.Muon(params, lr=0.02, momentum=0.9),
        lambda params: samestep.Muon(params, **{**torch_muon_options(), "lr": 0.5}),
        [(6, 4), (4, 6), (4, 4)],
    ),
    "Muon match_rms_adamw": (
        lambda params: torch.optim.Muon(params, lr=0.02, adjust_lr_fn="match_rms_adamw"),
        lambda params: samestep.Muon(params, **torch_muon_options()),
        [(6, 4), (4, 6)],
    ),
}
torchs = pytest.mark.parametrize(("theirs", "ours", "shapes"), TORCH.values(), ids=TORCH)


def step_with(
    optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter], steps: range
) -> None:
    for step in steps:
        for index, param in enumerate(params):
            param.grad = draw(param.shape, 1000 + 50 * step + index)
        optimizer.step()


@torchs
@pytest.mark.parametrize("before", [0, 3], ids=["before the first step", "after some steps"])
def test_torch_files_load_and_continue_as_in_torch(theirs, ours, shapes, before):
    """Before its first step torch saves no state at all; ours starts from zeros then."""
    params = [nn.Parameter(draw(shape, seed)) for seed, shape in enumerate(shapes)]
    reference = theirs(params)
    step_with(reference, params, range(before))
    saved = through_file(reference.state_dict())
    assert bool(saved["state"]) == (before > 0)
    own_params = [nn.Parameter(param.detach().clone()) for param in params]
    optimizer = ours(own_params)
    step_with(optimizer, own_params, range(90, 91))  # leaves state that loading has to replace
    with torch.no_grad():
        for param, own in zip(params, own_params, strict=True):
            own.copy_(param)
    optimizer.load_state_dict(saved)
    step_with(reference, params, range(before, before + 4))
    step_with(optimizer, own_params, range(before, before + 4))
    for param, own in zip(params, own_params, strict=True):
        assert torch.equal(own, param)
        for key, tensor in reference.state[param].items():
            assert torch.equal(optimizer.state[own][key], tensor), key


@pytest.mark.parametrize("before", [0, 3], ids=["before the first step", "after some steps"])
@pytest.mark.parametrize("implementation", ["foreach", "single", "fused"])
def test_our_files_load_into_torch_adamw(before, implementation):
    shapes = [(6, 4), (5,), (2, 3, 4)]
    params = [nn.Parameter(draw(shape, seed)) for seed, shape in enumerate(shapes)]
    optimizer = samestep.AdamW(params, lr=0.02, betas=(0.8, 0.95), weight_decay=0.1)
    step_with(optimizer, params, range(before))
    their_params = [nn.Parameter(param.detach().clone()) for param in params]
    reference = torch.optim.AdamW(their_params, lr=0.5)
    reference.load_state_dict(through_file(optimizer.state_dict()))
    for group in reference.param_groups:
        group["foreach"] = implementation == "foreach"
        group["fused"] = implementation == "fused"
    step_with(optimizer, params, range(before, before + 4))
    step_with(reference, their_params, range(before, before + 4))
    for param, theirs in zip(params, their_params, strict=True):
        if implementation == "fused":  # other roundings
            torch.testing.assert_close(theirs, param)
        else:
            assert torch.equal(theirs, param)
        assert reference.state[theirs]["step"] == before + 4


def test_a_torch_file_with_other_state_is_refused():
    params = [nn.Parameter(draw((6, 4), 0))]
    reference = torch.optim.AdamW(params, amsgrad=True)
    step_with(reference, params, range(1))
    for optimizer in (samestep.AdamW(params), samestep.Muon(params)):
        before = fingerprint(optimizer)
        with pytest.raises(ValueError, match=r"param_groups\[0\]|param_groups\[0\]\[0\]"):
            optimizer.load_state_dict(reference.state_dict())
        assert fingerprint(optimizer) == before


# --- into torch's own Muon -------------------------------------------------------------------


def matrices_for_muon() -> list[tuple[str, nn.Parameter]]:
    """Of sizes whose products torch and ours add up in one order."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"tall": (24, 16), "wide": (16, 24)}
    return [
        (name, nn.Parameter(torch.randn(shape, generator=generator)))
        for name, shape in shapes.items()
    ]


def train_muon(opt: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step + 1)
        for group in opt.param_groups:
            for param in group["params"]:
                param.grad = torch.randn(param.shape, generator=generator)
        opt.step()


def torchs_muon_after(ours: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """torch.optim.Muon with the parameters and the state of ours, built with other options."""
    theirs = torch.optim.Muon(matrices_for_muon(), lr=0.5, momentum=0.1, ns_steps=2)
    for group, other in zip(theirs.param_groups, ours.param_groups, strict=True):
        for param, mine in zip(group["params"], other["params"], strict=True):
            param.data.copy_(mine.data)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))  # torch shares tensors
    return theirs


@pytest.mark.parametrize("adjust_lr", ["original", "match_rms_adamw"])
def test_torchs_muon_goes_on_with_state_of_ours_and_back(adjust_lr):
    options = {**samestep.presets.torch(), "adjust_lr": adjust_lr, "lr": 0.02}
    del options["rule"]
    ours = samestep.Muon(matrices_for_muon(), **options)
    train_muon(ours, range(3))
    theirs = torchs_muon_after(ours)
    for opt in (ours, theirs):
        train_muon(opt, range(3, 6))
    again = samestep.Muon(matrices_for_muon(), **options)
    for mine, other, back in zip(
        ours.param_groups[0]["params"],
        theirs.param_groups[0]["params"],
        again.param_groups[0]["params"],
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)
        back.data.copy_(other.data)
    again.load_state_dict(theirs.state_dict())
    for opt in (ours, again):
        train_muon(opt, range(6, 8))
        assert opt.param_groups[0]["ns_steps"] is None  # nothing of what was for torch stays
        assert not opt.param_groups[0].keys() & {"for_torch", "adjust_lr_fn"}
    for mine, back in zip(*(opt.param_groups[0]["params"] for opt in (ours, again)), strict=True):
        torch.testing.assert_close(mine, back, rtol=0, atol=1e-5)


def test_torchs_muon_has_one_polynomial():
    """With the state of another it goes on with its own; the file still says what ours is."""
    ours = samestep.Muon(matrices_for_muon(), lr=0.02)
    train_muon(ours, range(2))
    theirs = torchs_muon_after(ours)
    train_muon(theirs, range(2, 3))
    assert theirs.param_groups[0]["ns_steps"] == 5
    again = samestep.Muon(matrices_for_muon(), lr=0.5)
    again.load_state_dict(theirs.state_dict())
    (group,) = again.param_groups
    assert (group["orthogonalize"], group["ns_coefficients"]) == ("polar-express", None)
    custom = samestep.Muon(matrices_for_muon(), ns_coefficients=(3.0, -3.2, 1.2), ns_steps=6)
    saved = custom.state_dict()
    assert saved["param_groups"][0]["ns_coefficients"] == (3.0, -3.2, 1.2)
    custom.load_state_dict(saved)
    assert custom.param_groups[0]["ns_steps"] == 6


@pytest.mark.parametrize(
    "options", [{"momentum_form": "sum"}, {"adjust_lr": "sqrt_max"}, {"variance_beta2": 0.9}]
)
def test_what_torchs_muon_does_not_have_is_not_gone_on_with(options):
    ours = samestep.Muon(matrices_for_muon(), **options)
    train_muon(ours, range(1))
    with pytest.raises(KeyError, match="adjust_lr_fn"):
        train_muon(torchs_muon_after(ours), range(1))
