"""torch's own optimizer battery, driven through samestep.AdamW, Muon and MuonAdamW.

torch tests its optimizers with a table of constructor arguments that must work and of arguments
that must be refused (`torch.testing._internal.common_optimizers.optim_db`). Whoever replaces
torch.optim.AdamW or torch.optim.Muon by ours relies on that table, so every line of it is run
here: what works must work, resume, follow schedules and give torch's bits; what is refused must
be refused with the same error. `EXCLUSIONS` lists the differences on purpose, with reasons.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import io
import os
import pickle
import subprocess
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import SWALR

import samestep
from tests.limits import HANG
from tests.soak import SOAK, some


def load_battery() -> types.ModuleType:
    """torch's table, without the test machinery that its module imports.

    That machinery freezes the flags of torch.backends and replaces the settings of hypothesis
    for the whole process, takes seconds to import and needs a package more. The table only uses
    it for decorators of torch's own tests.
    """

    class Machinery(types.ModuleType):
        _TestParametrizer = object  # a base class
        __getattr__ = staticmethod(lambda name: mock.MagicMock())

    package = "torch.testing._internal"
    names = ("common_device_type", "common_methods_invocations", "common_utils")
    stubs = {f"{package}.{name}": Machinery(name) for name in names}
    spec = importlib.util.find_spec(f"{package}.common_optimizers")
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, stubs):
        spec.loader.exec_module(module)
    return module


BATTERY = load_battery()
ENTRIES = {entry.name: entry for entry in BATTERY.optim_db if entry.name in ("AdamW", "Muon")}

# These choose an implementation of torch's, and here there is one.
IMPLEMENTATION_FLAGS = {"capturable", "foreach", "fused", "differentiable"}


class Exclusion(NamedTuple):
    """An error of torch's that we do not raise, why, and what happens instead."""

    reason: str
    instead: tuple[type[Exception], str] | None  # None: it works


NO_GRAPH = (ValueError, "differentiable=True is not supported")

EXCLUSIONS = {
    ("AdamW", "lr as Tensor doesn't work with foreach & not capturable"): Exclusion(
        "foreach asks for nothing here: a tensor lr works always.", None
    ),
    ("AdamW", r"betas\[0\] as a Tensor is not supported for capturable=False and foreach=True"): (
        Exclusion("foreach asks for nothing here: tensor betas work always.", None)
    ),
    ("AdamW", "`fused` and `foreach` cannot be `True` together"): Exclusion(
        "foreach asks for nothing here, so they cannot be in conflict.", None
    ),
    ("AdamW", "`fused` does not support `differentiable`"): Exclusion(
        "Refused as well, whatever `fused` is.", NO_GRAPH
    ),
    ("Muon", "only support 2D parameters"): Exclusion(
        "A 3-D parameter is a stack of matrices, one expert each: every one is orthogonalized "
        "on its own.",
        None,
    ),
    ("Muon", "does not support complex parameters"): Exclusion(
        "Refused as well, but at construction: an optimizer that can never step is not built.",
        (RuntimeError, "does not support complex parameters"),
    ),
}

# What the table held when this file was written. If torch adds a line, look at it here first.
KNOWN_INPUTS = {
    "AdamW": [
        "default",
        "non-default lr",
        "nonzero weight_decay",
        "maximize",
        "amsgrad",
        "capturable",
        "capturable, amsgrad",
        "Tensor lr with capturable and amsgrad",
        "Tensor lr, Tensor betas, with capturable and amsgrad",
        "Tensor lr, Tensor betas, with capturable",
        "Tensor lr",
    ],
    "Muon": [
        "default",
        "non-default lr",
        "Tensor lr",
        "non-default weight_decay",
        "non-default momentum",
        "passing alternative ns_steps",
        "passing alternative ns_coefficients",
    ],
}
KNOWN_ERRORS_OF_BOTH = [
    "invalid param type",
    "a param group cannot have duplicate parameters",
    "duplicate parameters should not occur across param groups either",
    "Tensor lr must be 1-element",
    "all optimizer params should be with/without names",
    "all optimizer param groups should be with/without names.",
]
KNOWN_ERRORS = {
    "AdamW": [
        *KNOWN_ERRORS_OF_BOTH,
        "beta1 should be between 0 and 1",
        "weight_decay should > 0",
        "lr as Tensor doesn't work with foreach & not capturable",
        "betas must be either both floats or both Tensors",
        "betas must be either both floats or both Tensors",
        r"betas\[0\] as a Tensor is not supported for capturable=False and foreach=True",
        "`fused` and `foreach` cannot be `True` together",
        "`fused` does not support `differentiable`",
    ],
    "Muon": [
        *KNOWN_ERRORS_OF_BOTH,
        "only support 2D parameters",
        "only support `original` and `match_rms_adamw`",
        "does not support complex parameters",
    ],
}

DEVICES = ("cpu", "cuda", "xpu", "mps")  # the table has configurations for some of them only


def inputs_of(entry: str) -> dict[str, dict[str, Any]]:
    """Description -> keywords, of all devices: their tensors are made on the CPU."""
    inputs = {}
    for device in DEVICES:
        for found in ENTRIES[entry].optim_inputs_func(device=device):
            inputs.setdefault(found.desc, without_flags(found.kwargs))
    return inputs


def errors_of(entry: str) -> list[Any]:
    """All error inputs, those of accelerators with their tensors on the CPU."""
    found: dict[tuple[str, str], Any] = {}
    for device in DEVICES:
        with mock.patch.object(BATTERY, "_get_device_type", lambda _, device=device: device):
            for error in ENTRIES[entry].optim_error_inputs_func(device="cpu", dtype=torch.float32):
                given = error.optimizer_error_input
                found.setdefault((given.desc, repr(given.kwargs)), error)
    return list(found.values())


def without_flags(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key not in IMPLEMENTATION_FLAGS}


INPUTS = {entry: inputs_of(entry) for entry in ENTRIES}
ERRORS = {entry: errors_of(entry) for entry in ENTRIES}


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_table_is_the_one_we_know(entry):
    """New lines run by themselves; this makes sure that someone reads them, too."""
    assert sorted(INPUTS[entry]) == sorted(KNOWN_INPUTS[entry])
    found = [error.optimizer_error_input.desc for error in ERRORS[entry]]
    assert sorted(found) == sorted(KNOWN_ERRORS[entry])
    assert all(desc in found for name, desc in EXCLUSIONS if name == entry)


# --- the inputs as optimizers ---------------------------------------------------------------


class Case(NamedTuple):
    """An optimizer of ours and the inputs of the table that it is made with."""

    optimizer: str
    adamw: str | None
    muon: str | None

    def kwargs(self, entry: str) -> dict[str, Any]:
        """A fresh copy: schedulers write into tensors."""
        desc = self.adamw if entry == "AdamW" else self.muon
        return copy.deepcopy(INPUTS[entry][desc])

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return MATRICES if self.adamw is None else {**MATRICES, **OTHERS}

    def entry_of(self, name: str) -> str:
        """Whose input the parameter of this name is updated with."""
        return "Muon" if name in MATRICES and self.muon is not None else "AdamW"

    def __str__(self) -> str:
        return "-".join(part for part in self if part)


def all_cases() -> Iterator[Case]:
    """Each input by itself; of those that are the same without torch's flags, the first."""
    for entry, inputs in INPUTS.items():
        known = []
        for desc, kwargs in inputs.items():
            if SOAK or repr(kwargs) not in known:
                yield Case(entry, *((desc, None) if entry == "AdamW" else (None, desc)))
            known.append(repr(kwargs))
    # Both at once: the shorter list is gone through again, so that each input of either occurs.
    # Here it is enough that every kind of option reaches its group.
    adamw, muon = list(INPUTS["AdamW"]), list(INPUTS["Muon"])
    for index in range(0, max(len(adamw), len(muon)), 1 if SOAK else 3):
        yield Case("MuonAdamW", adamw[index % len(adamw)], muon[index % len(muon)])


CASES = list(all_cases())
DEFAULT_CASES = [
    Case("AdamW", "default", None),
    Case("Muon", None, "default"),
    Case("MuonAdamW", "default", "default"),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
# Where options meet nothing but what they met above.
some_cases = pytest.mark.parametrize("case", some(CASES), ids=str)
default_cases = pytest.mark.parametrize("case", DEFAULT_CASES, ids=lambda case: case.optimizer)

DISTANCE = 8
# Large enough that the product of a stack and that of two matrices are one algorithm on CPU:
# below 400 multiplications torch's batched product adds in another order than torch.optim.Muon.
MATRICES = {"tall": (12, 8), "wide": (8, 12), "twin": (8, 12)}
OTHERS = {"scalar": (), "table": (5, 2)}


class Regression(nn.Module):
    """One small least-squares problem per parameter, from zero to a target, without noise.

    The targets are `DISTANCE` updates away, whatever the learning rate of the case. The
    problems are independent, so that parameters that descend and parameters that ascend can be
    told apart in one model.
    """

    def __init__(self, case: Case, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.targets = {}
        for index, (name, shape) in enumerate(case.shapes().items()):
            entry = case.entry_of(name)
            update = draw(shape, seed=index).sign()  # AdamW moves every element by lr
            if entry == "Muon":  # and Muon all singular values alike, to the same RMS times 0.2
                u, _, v = torch.linalg.svd(draw(shape, seed=index), full_matrices=False)
                update = 0.2 * max(shape) ** 0.5 * u @ v
            self.targets[name] = DISTANCE * float(case.kwargs(entry).get("lr", 1e-3)) * update
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, step: int) -> Tensor:
        """The loss with the weights of this step: each step sees other data."""
        errors = [
            weights(step, param.shape) * (param.float() - self.targets[name])
            for name, param in self.named_parameters()
        ]
        return torch.cat([error.reshape(-1) for error in errors]).square().sum()

    @torch.no_grad()
    def distances(self) -> dict[str, float]:
        """How far each parameter is from its target, squared, in units of the start."""
        return {
            name: float((param - self.targets[name]).norm() / self.targets[name].norm()) ** 2
            for name, param in self.named_parameters()
        }

    def matrices(self) -> list[tuple[str, Tensor]]:
        return [(name, param) for name, param in self.named_parameters() if name in MATRICES]

    def others(self) -> list[tuple[str, Tensor]]:
        return [(name, param) for name, param in self.named_parameters() if name in OTHERS]


def draw(shape: Iterable[int], seed: int) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


@cache
def weights(step: int, shape: torch.Size) -> Tensor:
    return draw(shape, seed=1000 + step).sigmoid() + 0.5


def build(
    case: Case,
    model: Regression,
    *,
    like_torch: bool = False,
    master_weights: bool = False,
    by_rule: Mapping[str, dict[str, Any]] | None = None,
    **changed: Any,
) -> Optimizer:
    """Our optimizer with the inputs of the case; `like_torch` with the numbers of torch.optim.

    Other options may replace those of the case, in every group or `by_rule`.
    """
    options = {}
    for rule, entry, desc in (("muon", "Muon", case.muon), ("adamw", "AdamW", case.adamw)):
        if desc is not None:
            preset = samestep.presets.torch(rule) if like_torch else {}
            replaced = {**changed, **(by_rule or {}).get(rule, {})}
            options[rule] = {**preset, **case.kwargs(entry), **replaced, "rule": rule}
    if case.optimizer == "MuonAdamW":
        params = {"muon": model.matrices(), "adamw": model.others()}
        groups = [{**options[rule], "params": params[rule]} for rule in params]
        return samestep.MuonAdamW(groups, master_weights=master_weights)
    rule = case.optimizer.lower()
    del options[rule]["rule"]
    optimizer_class = getattr(samestep, case.optimizer)
    return optimizer_class(model.parameters(), master_weights=master_weights, **options[rule])


def build_torch(case: Case, model: Regression, *, tensors: bool = False) -> list[Optimizer]:
    """torch's optimizers with the inputs of the case: one, or two for MuonAdamW.

    Tensors become plain numbers unless asked for. With a 32-bit tensor lr torch.optim computes
    step sizes in 32 bits, so that its parameters differ from those with the same number as a
    float. Ours do not.
    """
    convert = (lambda kwargs: kwargs) if tensors else plain_numbers
    optimizers: list[Optimizer] = []
    if case.muon is not None:
        matrices = [param for _, param in model.matrices()]
        optimizers.append(torch.optim.Muon(matrices, **convert(case.kwargs("Muon"))))
    if case.adamw is not None:
        params = model.parameters() if case.muon is None else [p for _, p in model.others()]
        kwargs = convert(case.kwargs("AdamW"))
        # foreach=False: the only one that takes tensor lr and betas on the CPU.
        optimizers.append(torch.optim.AdamW(params, foreach=False, **kwargs))
    return optimizers


def plain_numbers(options: dict[str, Any]) -> dict[str, Any]:
    plain = dict(options)
    if "lr" in options:
        plain["lr"] = float(options["lr"])
    if "betas" in options:
        plain["betas"] = tuple(float(beta) for beta in options["betas"])
    return plain


def train(model: Regression, optimizers: Optimizer | list[Optimizer], steps: Iterable[int]) -> None:
    if isinstance(optimizers, Optimizer):
        optimizers = [optimizers]
    for step in steps:
        model(step).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def snapshot(model: nn.Module, optimizers: Optimizer | list[Optimizer]) -> dict[str, Tensor]:
    """Copies of parameters and of their state, by name."""
    if isinstance(optimizers, Optimizer):
        optimizers = [optimizers]
    tensors = {}
    for name, param in model.named_parameters():
        tensors[name] = param.detach().clone()
        for optimizer in optimizers:
            for key, value in optimizer.state.get(param, {}).items():
                tensors[f"{name}.{key}"] = value.clone()
    return tensors


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        other = expected[name]
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), name
        assert torch.equal(bits(tensor), bits(other)), (
            f"{name} differs by up to {(tensor - other).abs().max().item():.3g}"
        )


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)  # tells -0.0 from 0.0


# --- descending -----------------------------------------------------------------------------

FACTOR = 20  # by which the squared distance to the target falls, or rises with maximize


@every_case
def test_descends(case):
    model = Regression(case)
    train(model, build(case, model), range(5 * DISTANCE))
    for name, distance in model.distances().items():
        if case.kwargs(case.entry_of(name)).get("maximize"):
            assert distance > FACTOR, name
        else:
            assert distance < 1 / FACTOR, name


@default_cases
def test_the_memory_format_of_parameters_does_not_matter(case):
    plain, transposed = Regression(case), Regression(case)
    for param in transposed.parameters():
        if param.ndim == 2:
            param.data = param.data.mT.contiguous().mT
    assert not transposed.tall.is_contiguous()
    optimizers = [build(case, model) for model in (plain, transposed)]
    for model, optimizer in zip((plain, transposed), optimizers, strict=True):
        train(model, optimizer, range(5))
    assert_same_bits(snapshot(transposed, optimizers[1]), snapshot(plain, optimizers[0]))


@every_case
def test_gradients_are_only_read(case):
    model = Regression(case)
    optimizer = build(case, model)
    model(0).backward()
    gradients = {name: param.grad.clone() for name, param in model.named_parameters()}
    optimizer.step()
    assert_same_bits({name: p.grad for name, p in model.named_parameters()}, gradients)


@every_case
def test_without_gradients_nothing_happens(case):
    model = Regression(case)
    optimizer = build(case, model)
    train(model, optimizer, range(2))  # zero_grad leaves None
    before = snapshot(model, optimizer)
    optimizer.step()
    assert_same_bits(snapshot(model, optimizer), before)


@every_case
def test_zero_gradients_move_nothing(case):
    model = Regression(case)
    optimizer = build(case, model, weight_decay=0.0)
    for param in model.parameters():
        param.data.fill_(0.5)
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert all(torch.equal(p, torch.full_like(p, 0.5)) for p in model.parameters())


# --- torch's bits ---------------------------------------------------------------------------


@every_case
def test_same_bits_as_torch(case):
    ours, theirs = Regression(case), Regression(case)
    optimizer, references = build(case, ours, like_torch=True), build_torch(case, theirs)
    for step in range(10):
        train(ours, optimizer, [step])
        train(theirs, references, [step])
        assert_same_bits(snapshot(ours, optimizer), snapshot(theirs, references))


@pytest.mark.parametrize("case", [c for c in CASES if "Tensor" in f"{c.adamw} {c.muon}"], ids=str)
def test_near_torch_with_tensors(case):
    """Not bit for bit, for the reason given at `build_torch`."""
    ours, theirs = Regression(case), Regression(case)
    optimizer = build(case, ours, like_torch=True)
    references = build_torch(case, theirs, tensors=True)
    train(ours, optimizer, range(3))
    train(theirs, references, range(3))
    # A few last bits of the parameter, or of 3 updates of its learning rate.
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    torch.testing.assert_close(
        dict(ours.named_parameters()),
        dict(theirs.named_parameters()),
        rtol=1e-6,
        atol=1e-6 * max(rates),
    )


@some_cases
def test_add_param_group_mid_run(case):
    """Against torch again: the newcomer starts afresh and takes the constructor's options."""
    ours, theirs = Regression(case), Regression(case)
    optimizer, references = build(case, ours, like_torch=True), build_torch(case, theirs)
    train(ours, optimizer, range(4))
    train(theirs, references, range(4))
    for model in (ours, theirs):
        model.late = nn.Parameter(0.1 * draw((8, 12), seed=9))
        model.targets["late"] = torch.zeros(8, 12)
    params = [ours.late]
    rule = {}
    if case.optimizer == "MuonAdamW":  # which has no options for all, so they are given again
        rule = {**samestep.presets.torch(), **case.kwargs("Muon")}
        params = [("late", ours.late)]
    optimizer.add_param_group({**rule, "params": params, "weight_decay": 0.3})
    references[0].add_param_group({"params": [theirs.late], "weight_decay": 0.3})
    train(ours, optimizer, range(4, 10))
    train(theirs, references, range(4, 10))
    assert_same_bits(snapshot(ours, optimizer), snapshot(theirs, references))
    if case.optimizer != "MuonAdamW":
        first, last = ({**group} for group in optimizer.param_groups)
        assert last.pop("weight_decay") == 0.3
        del first["weight_decay"], first["params"], last["params"]
        assert repr(last) == repr({key: first[key] for key in last})
        assert first.keys() == last.keys()


@pytest.mark.parametrize("desc", INPUTS["AdamW"])
def test_muon_adamw_gives_its_options_to_a_group_added_later(desc):
    kwargs = copy.deepcopy(INPUTS["AdamW"][desc])
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = samestep.MuonAdamW([{"params": [params[0]], "rule": "adamw"}], **kwargs)
    optimizer.add_param_group({"params": [params[1]], "rule": "adamw"})
    first, last = optimizer.param_groups
    assert all(repr(group[key]) == repr(kwargs[key]) for group in (first, last) for key in kwargs)
    assert first.keys() == last.keys()
    with pytest.raises(ValueError, match="no rule"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


@every_case
def test_a_tensor_is_as_good_as_the_number(case):
    """lr as a tensor of any one-element shape, and the tensor betas of the table as floats."""
    plain = Regression(case)
    optimizer = build(case, plain)
    for group in optimizer.param_groups:
        group.update(plain_numbers(group))
    train(plain, optimizer, range(3))
    for shape in ((), (1,), (1, 1)):
        model = Regression(case)
        with_tensors = build(case, model)
        for group in with_tensors.param_groups:
            # In 64 bits, for 1e-3 is not a number in 32; the table has 32-bit tensors as well.
            group["lr"] = torch.full(shape, float(group["lr"]), dtype=torch.float64)
        train(model, with_tensors, range(3))
        assert_same_bits(snapshot(model, with_tensors), snapshot(plain, optimizer))


# --- saving, loading, copying ---------------------------------------------------------------


def through_a_file(saved: Any) -> Any:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def saved_after(case: Case, steps: int, **options: Any) -> tuple[Regression, Optimizer, Any]:
    """A run of some steps, and what a checkpoint of it holds."""
    model = Regression(case, options.pop("dtype", torch.float32))
    optimizer = build(case, model, **options)
    train(model, optimizer, range(steps))
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    return model, optimizer, through_a_file(checkpoint)


def resumed(case: Case, checkpoint: Any, **options: Any) -> tuple[Regression, Optimizer]:
    model = Regression(case, options.pop("dtype", torch.float32))
    model.load_state_dict(checkpoint["model"])
    # Other hyperparameters than those saved: they, too, must come from the checkpoint.
    optimizer = build(case, model, **{**options, "lr": 0.5, "weight_decay": 0.5})
    optimizer.load_state_dict(checkpoint["optimizer"])
    return model, optimizer


@some_cases
@pytest.mark.parametrize("steps", some([5, 0]), ids=str)
def test_resumes_bit_for_bit(case, steps):
    model, optimizer, checkpoint = saved_after(case, steps)
    fresh, loaded = resumed(case, checkpoint)
    assert_same_bits(snapshot(fresh, loaded), snapshot(model, optimizer))
    train(model, optimizer, range(steps, steps + 4))
    train(fresh, loaded, range(steps, steps + 4))
    assert_same_bits(snapshot(fresh, loaded), snapshot(model, optimizer))


@default_cases
@pytest.mark.parametrize("master_weights", [False, True], ids=["bare", "master weights"])
def test_resumes_16_bit_parameters_bit_for_bit(case, master_weights):
    """Their state is in 32 bits, and torch's own loading would round it to 16."""
    options = {"dtype": torch.bfloat16, "master_weights": master_weights}
    model, optimizer, checkpoint = saved_after(case, 5, **options)
    fresh, loaded = resumed(case, checkpoint, **options)
    tensors = snapshot(fresh, loaded)
    assert {t.dtype for name, t in tensors.items() if "." in name} == {torch.float32}
    assert ("tall.master_weight" in tensors) == master_weights
    train(model, optimizer, range(5, 15))
    train(fresh, loaded, range(5, 15))
    assert_same_bits(snapshot(fresh, loaded), snapshot(model, optimizer))


@default_cases
def test_loading_a_start_into_a_run_starts_afresh(case):
    _, _, checkpoint = saved_after(case, 0)
    model, optimizer, _ = saved_after(case, 3)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    fresh = Regression(case)
    assert_same_bits(snapshot(model, optimizer), snapshot(fresh, build(case, fresh)))


PROCESS_CASE = CASES[-1]


def resume_in_this_process(folder: str) -> None:
    """What the fresh process of the next test does."""
    checkpoint = torch.load(Path(folder, "checkpoint.pt"), weights_only=True)
    model, optimizer = resumed(PROCESS_CASE, checkpoint)
    train(model, optimizer, range(5, 15))
    torch.save(snapshot(model, optimizer), Path(folder, "resumed.pt"))


@pytest.mark.skipif(not SOAK, reason="as in test_state_dict.py: make soak runs it")
def test_resumes_in_a_fresh_process_bit_for_bit(tmp_path):
    model, optimizer, checkpoint = saved_after(PROCESS_CASE, 5)
    torch.save(checkpoint, tmp_path / "checkpoint.pt")
    script = f"from {__name__} import *; resume_in_this_process({str(tmp_path)!r})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.returncode == 0, done.stderr
    train(model, optimizer, range(5, 15))
    there = torch.load(tmp_path / "resumed.pt", weights_only=True)
    assert_same_bits(there, snapshot(model, optimizer))


@some_cases
def test_state_dict_round_trip(case):
    _, optimizer, checkpoint = saved_after(case, 3)
    fresh, loaded = resumed(case, checkpoint)
    saved, again = optimizer.state_dict(), loaded.state_dict()
    assert again.keys() == saved.keys()
    for group, group_again in zip(saved["param_groups"], again["param_groups"], strict=True):
        assert repr(sorted(group_again.items())) == repr(sorted(group.items()))
    assert again["state"].keys() == saved["state"].keys()
    for index, state in saved["state"].items():
        assert_same_bits(again["state"][index], state)
    # What was loaded is a copy: the run does not write into the checkpoint.
    train(fresh, loaded, [3])
    for group in loaded.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(0.5)
    for index, state in saved["state"].items():
        assert_same_bits(checkpoint["optimizer"]["state"][index], state)
    assert repr(checkpoint["optimizer"]["param_groups"]) == repr(
        through_a_file(saved["param_groups"])
    )


def pickled(pair: Any) -> Any:
    return pickle.loads(pickle.dumps(pair))


@pytest.mark.parametrize(
    ("case", "clone"),
    [*((case, copy.deepcopy) for case in CASES), *((case, pickled) for case in DEFAULT_CASES)],
    ids=lambda value: str(value) if isinstance(value, Case) else value.__name__,
)
def test_a_copy_goes_its_own_way(case, clone):
    model = Regression(case)
    optimizer = build(case, model)
    train(model, optimizer, range(3))
    before = snapshot(model, optimizer)
    model_copy, optimizer_copy = clone((model, optimizer))
    train(model_copy, optimizer_copy, range(3, 6))
    assert_same_bits(snapshot(model, optimizer), before)
    train(model, optimizer, range(3, 6))
    assert_same_bits(snapshot(model_copy, optimizer_copy), snapshot(model, optimizer))


# --- closures and hooks ---------------------------------------------------------------------


@some_cases
def test_closure(case):
    """Called once, with gradients enabled, before the update; its loss is returned."""
    plain, model = Regression(case), Regression(case)
    expected, optimizer = build(case, plain), build(case, model)
    for step in range(4):
        losses = []

        def closure(step=step, losses=losses):
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            loss = model(step)
            loss.backward()
            losses.append(loss)
            return loss

        with torch.no_grad():
            returned = optimizer.step(closure)
        assert len(losses) == 1
        assert returned is losses[0]
        train(plain, expected, [step])
    assert_same_bits(snapshot(model, optimizer), snapshot(plain, expected))
    assert optimizer.step() is None


@some_cases
def test_step_hooks(case):
    """In torch's order, around the update; a pre-hook may change gradients and arguments."""
    plain, model = Regression(case), Regression(case)
    expected, optimizer = build(case, plain), build(case, model)
    calls = []

    def halve(*_):
        calls.append(("halve", bits(model.tall).tolist()))
        for param in model.parameters():
            param.grad.mul_(0.5)

    def insert_closure(_, args, kwargs):
        calls.append(("insert", None))
        return (*args, lambda: calls.append(("closure", None)) or 7.0), kwargs

    def after(hooked, args, kwargs):
        assert hooked is optimizer
        assert len(args) == 2  # with the closure that the pre-hook put there
        calls.append(("after", bits(model.tall).tolist()))

    handles = [
        optimizer.register_step_pre_hook(halve),
        optimizer.register_step_pre_hook(insert_closure),
        optimizer.register_step_post_hook(after),
        register_optimizer_step_post_hook(lambda *_: calls.append(("global", None))),
    ]
    before = bits(model.tall).tolist()
    try:
        model(0).backward()
        assert optimizer.step() == 7.0
    finally:
        for handle in handles:
            handle.remove()
    assert [name for name, _ in calls] == ["halve", "insert", "closure", "after", "global"]
    assert calls[0][1] == before
    assert calls[3][1] == bits(model.tall).tolist() != before

    plain(0).backward()
    for param in plain.parameters():
        param.grad.mul_(0.5)
    expected.step()
    assert_same_bits(snapshot(model, optimizer), snapshot(plain, expected))
    optimizer.step()
    assert len(calls) == 5  # removed


@some_cases
def test_state_dict_hooks(case):
    """Before saving the optimizer can still be changed, after it the dict, by either way."""
    model = Regression(case)
    optimizer = build(case, model)
    calls = []

    def before(hooked):
        calls.append("before")
        hooked.param_groups[0]["lr"] = 0.25

    def edit(hooked, saved):
        calls.append("edit")
        assert saved["param_groups"][0]["lr"] == 0.25
        saved["note"] = "edited"

    def replace(hooked, saved):
        calls.append("replace")
        return {**saved, "note": saved["note"] + " and replaced"}

    optimizer.register_state_dict_post_hook(replace)
    optimizer.register_state_dict_post_hook(edit, prepend=True)
    optimizer.register_state_dict_pre_hook(before)
    saved = optimizer.state_dict()
    assert calls == ["before", "edit", "replace"]
    assert saved["note"] == "edited and replaced"


@some_cases
def test_load_state_dict_hooks(case):
    """Pre-hooks may edit what is loaded, and post-hooks find it in place."""
    model, optimizer, checkpoint = saved_after(case, 3)
    fresh = Regression(case)
    fresh.load_state_dict(checkpoint["model"])
    loaded = build(case, fresh)
    key = "momentum_buffer" if case.muon is not None else "exp_avg"
    calls = []

    def edit(hooked, state_dict):
        assert hooked is loaded
        calls.append("edit")
        state_dict["param_groups"][0]["lr"] = 0.125

    def replace(_, state_dict):
        calls.append("replace")
        state = {index: dict(entry) for index, entry in state_dict["state"].items()}
        state[0][key] = state[0][key] * 2
        return {**state_dict, "state": state}

    def check(hooked):
        calls.append("check")
        assert hooked.param_groups[0]["lr"] == 0.125
        assert torch.equal(hooked.state[fresh.tall][key], optimizer.state[model.tall][key] * 2)

    def change(hooked):
        calls.append("change")
        hooked.param_groups[0]["lr"] = 0.0625

    loaded.register_load_state_dict_pre_hook(replace)
    loaded.register_load_state_dict_pre_hook(edit, prepend=True)
    loaded.register_load_state_dict_post_hook(change)
    loaded.register_load_state_dict_post_hook(check, prepend=True)
    for _ in range(2):  # twice: loading leaves no hooks of its own behind
        calls.clear()
        loaded.load_state_dict(checkpoint["optimizer"])
        assert calls == ["edit", "replace", "check", "change"]

    # The same by hand gives the same run.
    optimizer.param_groups[0]["lr"] = 0.0625
    optimizer.state[model.tall][key].mul_(2)
    train(model, optimizer, range(3, 6))
    train(fresh, loaded, range(3, 6))
    assert_same_bits(snapshot(fresh, loaded), snapshot(model, optimizer))


@default_cases
def test_a_failing_load_changes_nothing(case):
    model, optimizer, checkpoint = saved_after(case, 3)

    def lose_a_parameter(_, state_dict):
        groups = [dict(group) for group in state_dict["param_groups"]]
        groups[-1]["params"] = groups[-1]["params"][:-1]
        return {**state_dict, "param_groups": groups}

    handle = optimizer.register_load_state_dict_pre_hook(lose_a_parameter)
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
        optimizer.load_state_dict(checkpoint["optimizer"])
    handle.remove()
    assert_same_bits(snapshot(model, optimizer), before)
    optimizer.load_state_dict(checkpoint["optimizer"])
    assert_same_bits(snapshot(model, optimizer), before)


# --- schedules ------------------------------------------------------------------------------

SCHEDULE_STEPS = 8
S = lr_scheduler

# Each as a function of the optimizer; a dict {class: {what is special: function}}.
SCHEDULERS: dict[type, dict[str, Callable[[Optimizer], Any]]] = {
    S.LambdaLR: {
        "": lambda opt: S.LambdaLR(opt, lambda epoch: 0.9**epoch),
        # Each group its own way: their learning rates must be able to part.
        "per group": lambda opt: S.LambdaLR(
            opt,
            [lambda epoch, i=i: 1 / (1 + (i + 1) * epoch) for i in range(len(opt.param_groups))],
        ),
    },
    S.MultiplicativeLR: {"": lambda opt: S.MultiplicativeLR(opt, lambda epoch: 0.8)},
    S.StepLR: {"": lambda opt: S.StepLR(opt, step_size=3, gamma=0.5)},
    S.MultiStepLR: {"": lambda opt: S.MultiStepLR(opt, milestones=[2, 5], gamma=0.5)},
    S.ConstantLR: {"": lambda opt: S.ConstantLR(opt, factor=0.3, total_iters=4)},
    S.LinearLR: {"": lambda opt: S.LinearLR(opt, start_factor=0.1, total_iters=5)},
    S.ExponentialLR: {"": lambda opt: S.ExponentialLR(opt, gamma=0.7)},
    S.PolynomialLR: {"": lambda opt: S.PolynomialLR(opt, total_iters=6, power=2.0)},
    S.CosineAnnealingLR: {"": lambda opt: S.CosineAnnealingLR(opt, T_max=6, eta_min=1e-4)},
    S.CosineAnnealingWarmRestarts: {
        "": lambda opt: S.CosineAnnealingWarmRestarts(opt, T_0=3, T_mult=2)
    },
    S.SequentialLR: {
        "": lambda opt: S.SequentialLR(
            opt,
            [S.LinearLR(opt, start_factor=0.1, total_iters=4), S.ExponentialLR(opt, gamma=0.8)],
            milestones=[4],
        )
    },
    S.ChainedScheduler: {
        "": lambda opt: S.ChainedScheduler(
            [S.ConstantLR(opt, factor=0.1, total_iters=4), S.ExponentialLR(opt, gamma=0.9)], opt
        )
    },
    S.ReduceLROnPlateau: {"": lambda opt: S.ReduceLROnPlateau(opt, factor=0.5, patience=1)},
    S.CyclicLR: {
        # cycle_momentum is on by default: Muon's momentum, AdamW's beta1.
        "": lambda opt: S.CyclicLR(opt, base_lr=1e-3, max_lr=2e-2, step_size_up=3),
        "exp_range": lambda opt: S.CyclicLR(
            opt, 1e-3, 2e-2, step_size_up=3, mode="exp_range", gamma=0.9
        ),
        "no momentum": lambda opt: S.CyclicLR(
            opt, 1e-3, 2e-2, step_size_up=4, cycle_momentum=False
        ),
    },
    S.OneCycleLR: {
        "": lambda opt: S.OneCycleLR(opt, max_lr=2e-2, total_steps=SCHEDULE_STEPS + 1),
        "three phases": lambda opt: S.OneCycleLR(
            opt, 2e-2, total_steps=SCHEDULE_STEPS + 1, three_phase=True, anneal_strategy="linear"
        ),
        "no momentum": lambda opt: S.OneCycleLR(
            opt, 2e-2, total_steps=SCHEDULE_STEPS + 1, cycle_momentum=False
        ),
    },
    SWALR: {"": lambda opt: SWALR(opt, swa_lr=0.05, anneal_epochs=5)},
}
NAMED = {
    " ".join([scheduler.__name__, special]).strip(): function
    for scheduler, functions in SCHEDULERS.items()
    for special, function in functions.items()
}
every_schedule = pytest.mark.parametrize("schedule", NAMED.values(), ids=NAMED)


def test_every_scheduler_of_torch_is_here():
    found = {
        value
        for module in (lr_scheduler, torch.optim.swa_utils)
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, lr_scheduler.LRScheduler)
    }
    assert found - {lr_scheduler.LRScheduler, lr_scheduler._LRScheduler} == set(SCHEDULERS)


def advance(scheduler: Any) -> None:
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(1.0)
    else:
        scheduler.step()


def settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What schedulers change in each group, as plain numbers."""
    found = []
    for group in optimizer.param_groups:
        numbers = {key: group[key] for key in ("lr", "momentum", "betas") if key in group}
        found.append(plain_numbers(numbers))
    return found


def run_schedule(
    model: Regression, optimizer: Optimizer, scheduler: Any, steps: Iterable[int]
) -> list[list[dict[str, Any]]]:
    history = []
    for step in steps:
        history.append(settings(optimizer))
        train(model, optimizer, [step])
        advance(scheduler)
    return history


def run_by_hand(case: Case, history: list[Any]) -> tuple[Regression, Optimizer]:
    """The same without a scheduler: each step has an optimizer of its own, made for it.

    An optimizer that overlooks what changes after its construction would otherwise overlook it
    in both runs.
    """
    model, optimizer = Regression(case), None
    keys = {"muon": ("lr", "momentum"), "adamw": ("lr", "betas")}
    if case.optimizer != "MuonAdamW":
        keys = {case.optimizer.lower(): keys[case.optimizer.lower()]}
    for step, groups in enumerate(history):
        by_rule = {
            rule: {key: numbers[key] for key in keys[rule]}
            for rule, numbers in zip(keys, groups, strict=True)
        }
        next_optimizer = build(case, model, by_rule=by_rule)
        if optimizer is not None:
            for param, state in optimizer.state.items():
                for key, tensor in state.items():
                    next_optimizer.state[param][key].copy_(tensor)
        optimizer = next_optimizer
        train(model, optimizer, [step])
    return model, optimizer


def with_lr(case: Case, model: Regression, lr: float | Tensor) -> Optimizer:
    """One learning rate for the whole optimizer, as its constructor takes it."""
    if case.optimizer == "MuonAdamW":
        groups = [
            {"params": model.matrices(), "rule": "muon"},
            {"params": model.others(), "rule": "adamw"},
        ]
        return samestep.MuonAdamW(groups, lr=lr)
    return build(case, model, lr=lr)


def torch_counterpart(optimizer: Optimizer, lr: float | Tensor) -> Optimizer:
    """A torch optimizer of as many groups, with the same number to cycle: betas or momentum.

    Each group has its own tensor: in torch, too, one that is shared is scheduled twice.
    """
    groups = [
        {"params": [nn.Parameter(torch.ones(1))], "lr": copy.deepcopy(lr)}
        for _ in optimizer.param_groups
    ]
    if isinstance(optimizer, samestep.AdamW):
        return torch.optim.AdamW(groups, foreach=False)
    return torch.optim.SGD(groups, momentum=0.95)  # 0.95 is Muon's default


def scheduled(place: int, name: str, case: Case, kind: str) -> bool:
    """All with tensors, the harder ones, and both rules; the others take turns.

    Momenta are cycled in other ways by each optimizer.
    """
    if SOAK or (case.optimizer, kind) == ("MuonAdamW", "tensor"):
        return True
    turns = [("AdamW", "tensor"), ("Muon", "tensor"), ("MuonAdamW", "float")]
    cycles = kind == "tensor" and name in ("CyclicLR", "OneCycleLR")
    return cycles or turns[place % 3] == (case.optimizer, kind)


SCHEDULED = [
    pytest.param(NAMED[name], case, kind, id=f"{kind}-{case.optimizer}-{name}")
    for place, name in enumerate(NAMED)
    for case in DEFAULT_CASES
    for kind in ("float", "tensor")
    if scheduled(place, name, case, kind)
]


@pytest.mark.parametrize(("schedule", "case", "kind"), some(SCHEDULED))
def test_schedules(case, schedule, kind):
    lr: float | Tensor = 0.01 if kind == "float" else torch.tensor(0.01)
    model = Regression(case)
    optimizer = with_lr(case, model, copy.deepcopy(lr))
    history = run_schedule(model, optimizer, schedule(optimizer), range(SCHEDULE_STEPS))
    assert len({str(groups) for groups in history}) > 1  # the schedule does something

    reference = torch_counterpart(optimizer, lr)
    scheduler = schedule(reference)
    for groups in history:
        for numbers, expected in zip(groups, settings(reference), strict=True):
            # A group of AdamW beside Muon has no momentum, unless a scheduler writes one there.
            assert numbers["lr"] == expected["lr"]
            assert all(numbers[key] == expected[key] for key in numbers if key in expected)
        reference.step()
        advance(scheduler)

    assert_same_bits(snapshot(model, optimizer), snapshot(*run_by_hand(case, history)))


@default_cases
def test_a_cycled_momentum_is_used(case):
    """test_schedules writes momenta by hand; here they make a difference, and only they."""
    moved = []
    for cycle_momentum in (True, False):
        model = Regression(case)
        optimizer = build(case, model)
        scheduler = S.CyclicLR(optimizer, 1e-3, 1e-2, 3, cycle_momentum=cycle_momentum)
        run_schedule(model, optimizer, scheduler, range(6))
        moved.append(snapshot(model, optimizer))
    changed = {name for name in MATRICES if not torch.equal(moved[0][name], moved[1][name])}
    assert changed == set(MATRICES)
    if case.optimizer != "Muon":
        assert all(not torch.equal(moved[0][name], moved[1][name]) for name in OTHERS)


@every_case
def test_every_input_follows_the_schedules_of_the_table(case):
    entry = ENTRIES["AdamW" if case.muon is None else "Muon"]
    for schedules in entry.scheduler_inputs:
        model = Regression(case)
        optimizer = build(case, model)
        schedulers = [schedule(optimizer) for schedule in schedules]
        history = []
        for step in range(12):
            history.append(settings(optimizer))
            train(model, optimizer, [step])
            for scheduler in schedulers:
                advance(scheduler)
        rates = [groups[0]["lr"] for groups in history]
        assert rates[-1] < rates[0]
        assert_same_bits(snapshot(model, optimizer), snapshot(*run_by_hand(case, history)))


@every_schedule
def test_resumes_with_its_schedule(schedule):
    """What schedulers keep in the groups (initial_lr, max_momentum, ...) is saved with them."""
    case = Case("MuonAdamW", "default", "default")
    half = SCHEDULE_STEPS // 2
    model = Regression(case)
    optimizer = with_lr(case, model, 0.01)
    scheduler = schedule(optimizer)
    run_schedule(model, optimizer, scheduler, range(half))
    model_state = copy.deepcopy(model.state_dict())
    state = through_a_file(optimizer.state_dict())
    scheduler_state = copy.deepcopy(scheduler.state_dict())
    expected = run_schedule(model, optimizer, scheduler, range(half, SCHEDULE_STEPS))

    fresh = Regression(case)
    fresh.load_state_dict(model_state)
    loaded = with_lr(case, fresh, 0.01)
    again = schedule(loaded)
    again.load_state_dict(scheduler_state)
    loaded.load_state_dict(state)  # last, since making a scheduler writes into the groups
    assert run_schedule(fresh, loaded, again, range(half, SCHEDULE_STEPS)) == expected
    assert_same_bits(snapshot(fresh, loaded), snapshot(model, optimizer))


# --- errors ---------------------------------------------------------------------------------


class Wrong(NamedTuple):
    """An error input of the table, and the optimizer of ours that it is given to."""

    optimizer: str
    entry: str
    index: int

    @property
    def error(self) -> Any:
        """Made afresh: the parameters in it are shared between errors."""
        return errors_of(self.entry)[self.index]

    @property
    def key(self) -> tuple[str, str]:
        return self.entry, ERRORS[self.entry][self.index].optimizer_error_input.desc

    def __str__(self) -> str:
        return f"{self.optimizer}-{self.entry}-{self.key[1]}"


WRONG = [
    Wrong(optimizer, entry, index)
    for entry in ENTRIES
    for optimizer in (entry, "MuonAdamW")
    for index in range(len(ERRORS[entry]))
]
REFUSED = [wrong for wrong in WRONG if wrong.key not in EXCLUSIONS]
EXCLUDED = [wrong for wrong in WRONG if wrong.key in EXCLUSIONS]


def one_parameter() -> nn.Parameter:
    param = nn.Parameter(draw((2, 3), seed=0))
    param.grad = draw((2, 3), seed=1)
    return param


def tensors_in(params: Any) -> list[Tensor]:
    if isinstance(params, Tensor):
        return [params]
    if isinstance(params, dict):
        return tensors_in(params["params"])
    return [t for item in params if not isinstance(item, str) for t in tensors_in(item)]


def construct(optimizer: str, entry: str, params: Any, kwargs: dict[str, Any]) -> Optimizer:
    """MuonAdamW gets the same as groups, whose rule is that of the entry."""
    rule = entry.lower()
    if optimizer == "MuonAdamW" and not isinstance(params, Tensor):
        if not all(isinstance(item, dict) for item in params):
            params = [{"params": params}]
        params = [{**group, "rule": rule} for group in params]
    return getattr(samestep, optimizer)(params, **kwargs)


def as_torch_says(error: Any, make: Callable[[Any, dict[str, Any]], Optimizer]) -> None:
    """Fails unless the error is raised, or the warning given, where the table says."""
    given = error.optimizer_error_input
    params = [one_parameter()] if given.params is None else given.params
    kwargs = copy.deepcopy(given.kwargs)
    before = {str(i): t.detach().clone() for i, t in enumerate(tensors_in(params))}
    is_warning = issubclass(error.error_type, Warning)
    expect = (pytest.warns if is_warning else pytest.raises)(
        error.error_type, match=error.error_regex
    )
    try:
        if error.error_on is BATTERY.OptimizerErrorEnum.STEP_ERROR:
            optimizer = make(params, kwargs)
            with expect:
                optimizer.step()
        else:
            with expect:
                make(params, kwargs)
    finally:
        assert_same_bits({str(i): t.detach() for i, t in enumerate(tensors_in(params))}, before)


@pytest.mark.parametrize("wrong", REFUSED, ids=str)
def test_errors(wrong):
    """The same exception and message as torch's; the parameters are as before."""
    as_torch_says(wrong.error, lambda p, k: construct(wrong.optimizer, wrong.entry, p, k))


@pytest.mark.parametrize("wrong", [w for w in WRONG if w.optimizer != "MuonAdamW"], ids=str)
def test_torch_raises_these_errors(wrong):
    """Else the table, or the way it is driven here, is not what the other tests believe."""
    as_torch_says(wrong.error, lambda p, k: getattr(torch.optim, wrong.entry)(p, **k))


@pytest.mark.parametrize("wrong", EXCLUDED, ids=str)
def test_exclusions_are_needed(wrong):
    errors = (AssertionError, pytest.fail.Exception, ValueError, TypeError, RuntimeError)
    with pytest.raises(errors):
        as_torch_says(wrong.error, lambda p, k: construct(wrong.optimizer, wrong.entry, p, k))


@pytest.mark.parametrize("wrong", EXCLUDED, ids=str)
def test_what_happens_instead(wrong):
    given = wrong.error.optimizer_error_input
    params = [one_parameter()] if given.params is None else given.params
    instead = EXCLUSIONS[wrong.key].instead
    for tensor in tensors_in(params) if instead is None else ():
        if tensor.grad is None:  # and whatever was in memory
            tensor.detach().fill_(1)
            tensor.grad = torch.ones_like(tensor)
    before = [tensor.detach().clone() for tensor in tensors_in(params)]
    if instead is None:
        construct(wrong.optimizer, wrong.entry, params, given.kwargs).step()
        for tensor, old in zip(tensors_in(params), before, strict=True):
            assert not torch.equal(tensor, old)
        return
    with pytest.raises(instead[0], match=instead[1]):
        construct(wrong.optimizer, wrong.entry, params, given.kwargs)
    for tensor, old in zip(tensors_in(params), before, strict=True):
        # torch gives memory as it found it, which may be NaN
        torch.testing.assert_close(tensor.detach(), old, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "wrong", [w for w in EXCLUDED if EXCLUSIONS[w.key].instead == NO_GRAPH], ids=str
)
def test_without_implementation_flags_the_same_input_works(wrong):
    param = one_parameter()
    before = param.detach().clone()
    kwargs = without_flags(wrong.error.optimizer_error_input.kwargs)
    construct(wrong.optimizer, wrong.entry, [param], kwargs).step()
    assert not torch.equal(param, before)


def test_a_stack_is_its_matrices():
    """What the exclusion of 3-D parameters promises."""
    stack = nn.Parameter(draw((2, 3, 4), seed=0))
    matrices = [nn.Parameter(matrix.detach().clone()) for matrix in stack]
    optimizers = [samestep.Muon([stack]), samestep.Muon(matrices)]
    for step in range(3):
        stack.grad = draw(stack.shape, seed=step + 1)
        for matrix, grad in zip(matrices, stack.grad, strict=True):
            matrix.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(stack, torch.stack(matrices))
    with pytest.raises(ValueError, match=r"shape \(5,\) is 1-D, not a matrix"):
        samestep.Muon([nn.Parameter(torch.ones(5))])


BAD_VALUES = [
    wrong
    for wrong in REFUSED
    if ERRORS[wrong.entry][wrong.index].optimizer_error_input.params is None
]


@pytest.mark.parametrize("wrong", BAD_VALUES, ids=str)
def test_a_bad_value_set_later_stops_the_step_before_it_changes_anything(wrong):
    """Schedulers and users write into groups: what the constructor refuses, so does the step.

    The bad group is the last one, so the first must not have been updated when it is found.
    """
    params = [one_parameter(), one_parameter()]
    groups = [{"params": [param]} for param in params]
    optimizer = construct(wrong.optimizer, wrong.entry, groups, {})
    optimizer.step()
    model = nn.ParameterList(params)
    before = snapshot(model, optimizer)
    good = dict(optimizer.param_groups[-1])
    optimizer.param_groups[-1].update(wrong.error.optimizer_error_input.kwargs)
    with pytest.raises(wrong.error.error_type, match=wrong.error.error_regex):
        optimizer.step()
    assert_same_bits(snapshot(model, optimizer), before)
    optimizer.param_groups[-1].update(good)
    optimizer.step()
    assert not torch.equal(params[0], before["0"])


def can_be_a_bad_group(wrong: Wrong) -> bool:
    if wrong.key in EXCLUSIONS:  # as torch does, a group may have keys that nobody reads
        return EXCLUSIONS[wrong.key].instead is not None
    return wrong.key[1] != "invalid param type"  # a tensor for "params" is a group of one


@pytest.mark.parametrize("wrong", [w for w in WRONG if can_be_a_bad_group(w)], ids=str)
def test_a_bad_group_is_not_added(wrong):
    """The same errors from add_param_group, after which the optimizer is as it was."""
    given = wrong.error.optimizer_error_input
    group: dict[str, Any] = {"params": [one_parameter()]}
    first: Any = [one_parameter()]
    if given.params is not None:
        group["params"] = given.params
        if isinstance(given.params[0], dict):
            *first, group = given.params
    group = {**group, **given.kwargs}
    if wrong.optimizer == "MuonAdamW":
        group["rule"] = wrong.entry.lower()
    optimizer = construct(wrong.optimizer, wrong.entry, first, {})
    model = nn.ParameterList(tensors_in(first))
    for param in model:
        param.grad = torch.ones_like(param)
    optimizer.step()
    before, groups = snapshot(model, optimizer), repr(optimizer.param_groups)
    tracked = set(optimizer.state)
    expected = (wrong.error.error_type, wrong.error.error_regex)
    if wrong.key in EXCLUSIONS:
        expected = EXCLUSIONS[wrong.key].instead
    with pytest.raises(expected[0], match=expected[1]):
        optimizer.add_param_group(group)
    assert_same_bits(snapshot(model, optimizer), before)
    assert repr(optimizer.param_groups) == groups
    assert set(optimizer.state) == tracked
    optimizer.step()
    assert all(not torch.equal(param, before[str(i)]) for i, param in enumerate(model))
