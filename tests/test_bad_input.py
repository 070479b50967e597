"""Bad input: an error that names it and says what to do, and nothing has changed, bit for bit.

Where an optimizer existed before, it must go on as if nothing had happened: it is compared
with a twin that never saw the bad input, before and after another step.
"""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samestep

NAN, INF = math.nan, math.inf
ONE_RULE = [samestep.Muon, samestep.AdamW]
EVERY = [samestep.MuonAdamW, *ONE_RULE]
by_class = pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)


class Net(nn.Module):
    """Two parameters for each rule. The matrices come first, so they would be updated first."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator).to(dtype))

        self.first, self.second, self.bias = normal(6, 4), normal(4, 6), normal(4)
        self.embed = nn.Embedding(5, 4, dtype=dtype, _weight=normal(5, 4).detach())


def bits(value: Any) -> Any:
    """A tensor as bytes, so that NaN equals NaN and 0 differs from -0; containers recursively."""
    if isinstance(value, Tensor):
        value = value.detach()
        if value.is_sparse:
            return ("sparse", bits(value._indices()), bits(value._values()))
        data = value.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        return (str(value.dtype), tuple(value.shape), data)
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [bits(item) for item in value]
    return repr(value)  # NaN again, and True is not 1


class Training:
    """A model and its optimizer after two steps."""

    def __init__(self, model: nn.Module | None = None, **options: Any) -> None:
        self.model = model or Net()
        self.opt = samestep.MuonAdamW(self.model, lr=0.01, **options)
        self.time = 0
        for _ in range(2):
            self.step()

    def set_gradients(self) -> None:
        generator = torch.Generator().manual_seed(100 + self.time)
        for param in self.model.parameters():
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)

    def step(self) -> None:
        self.set_gradients()
        self.opt.step()
        self.time += 1

    def group(self, rule: str) -> dict[str, Any]:
        """The last group of a rule: whatever comes before it would already be updated."""
        return [group for group in self.opt.param_groups if group["rule"] == rule][-1]

    def bits(self) -> Any:
        names = {param: name for name, param in self.model.named_parameters()}
        return {
            "params": bits(dict(self.model.named_parameters())),
            "grads": {name: bits(p.grad) for name, p in self.model.named_parameters()},
            "state": {names.get(p, p): bits(state) for p, state in self.opt.state.items()},
            "groups": [
                {k: [id(p) for p in v] if k == "params" else bits(v) for k, v in group.items()}
                for group in self.opt.param_groups
            ],
            "defaults": bits(self.opt.defaults),
        }


def assert_same_numbers(one: Training, other: Training) -> None:
    """Everything but the identity of the parameters, which is their own."""
    mine, theirs = one.bits(), other.bits()
    for group in [*mine["groups"], *theirs["groups"]]:
        group["params"] = len(group["params"])
    assert mine == theirs
    assert one.opt.table() == other.opt.table()


def assert_names(error: BaseException, fragments: tuple[str, ...]) -> None:
    """The message holds each fragment, a regular expression, and fits on a screen."""
    message = str(error)
    for fragment in fragments:
        assert re.search(fragment, message, re.IGNORECASE), f"{fragment!r} is not in {message!r}"
    assert len(message) < 1000, f"too long to be read: {message}"


@contextmanager
def refused(
    training: Training, error: type[Exception] | tuple[type[Exception], ...], *fragments: str
) -> Iterator[None]:
    """The body raises, the message holds the fragments, and nothing has changed."""
    before = training.bits()
    with pytest.raises(error) as caught:
        yield
    assert_names(caught.value, fragments)
    assert training.bits() == before


def assert_goes_on_like(training: Training, twin: Training) -> None:
    for _ in range(2):
        assert_same_numbers(training, twin)
        training.step()
        twin.step()
    assert_same_numbers(training, twin)


def refused_at_construction(
    build: Callable[[nn.Module], Any],
    error: type[Exception] | tuple[type[Exception], ...],
    *fragments: str,
    model: nn.Module | None = None,
) -> None:
    """`build(model)` raises, and neither the parameters nor their gradients have changed."""
    model = Net() if model is None else model  # an empty Sequential is false
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    before = [
        (id(p), p.requires_grad, bits(p), id(p.grad), bits(p.grad)) for p in model.parameters()
    ]
    with pytest.raises(error) as caught:
        build(model)
    assert_names(caught.value, fragments)
    after = [
        (id(p), p.requires_grad, bits(p), id(p.grad), bits(p.grad)) for p in model.parameters()
    ]
    assert after == before


def of_every_kind(kind: type, model: nn.Module) -> Any:
    """Parameters that any of the optimizers takes: Muon wants matrices."""
    return [p for p in model.parameters() if p.ndim == 2] if kind is samestep.Muon else model


# --- values of options ----------------------------------------------------------------------------

BAD_RATES: list[tuple[Any, type[Exception], str]] = [
    (NAN, ValueError, "nan"),
    (INF, ValueError, "inf"),
    (-INF, ValueError, "-inf"),
    (-1e-3, ValueError, r"-0\.001"),
    ("1e-3", TypeError, "'1e-3' of type str"),  # what YAML makes of 1e-3
    (True, TypeError, "True of type bool"),
    ([1e-3], TypeError, r"\[0\.001\] of type list"),
    (torch.tensor(NAN), ValueError, "nan"),
    (torch.tensor(-1.0), ValueError, r"-1"),
    (torch.tensor([1.0, 2.0]), ValueError, r"1-element.*\(2,\)"),
]


def rates(*more: tuple[Any, type[Exception], str]) -> pytest.MarkDecorator:
    cases = [*BAD_RATES, *more]
    ids = [f"lr={lr!r}" for lr, _, _ in cases]
    return pytest.mark.parametrize(("lr", "error", "shown"), cases, ids=ids)


bad_rates = rates()


@by_class
@bad_rates
def test_a_bad_learning_rate(kind, lr, error, shown):
    refused_at_construction(
        lambda m: kind(of_every_kind(kind, m), lr=lr), error, "lr|learning rate", shown
    )


@pytest.mark.parametrize("kind", ONE_RULE, ids=lambda kind: kind.__name__)
def test_no_learning_rate(kind):
    refused_at_construction(
        lambda m: kind(of_every_kind(kind, m), lr=None), TypeError, "lr must be a number.*None"
    )


@pytest.mark.parametrize("role", ["matrix", "embedding", "scalar"])
@bad_rates
def test_a_bad_learning_rate_of_a_role(role, lr, error, shown):
    refused_at_construction(
        lambda m: samestep.MuonAdamW(m, **{f"{role}_lr": lr}), error, "lr|learning rate", shown
    )


@pytest.mark.parametrize("rule", ["muon", "adamw"])
@rates((None, TypeError, "None"))
def test_a_bad_learning_rate_set_before_a_step(rule, lr, error, shown):
    """Every group is checked before the first is updated, whichever one is bad."""
    training, twin = Training(), Training()
    training.set_gradients()
    twin.set_gradients()
    training.group(rule)["lr"] = lr
    with refused(training, error, "lr|learning rate", shown):
        training.opt.step()
    training.group(rule)["lr"] = 0.01
    assert_goes_on_like(training, twin)


def test_a_tensor_learning_rate_that_becomes_nan():
    """A scheduler computes in place; the number is looked at every time."""
    training, twin = (Training(matrix_lr=torch.tensor(0.01)) for _ in range(2))
    lr = training.group("muon")["lr"]
    lr.fill_(NAN)
    with refused(training, ValueError, "learning rate", "nan"):
        training.opt.step()
    lr.fill_(0.01)
    assert_goes_on_like(training, twin)


BAD_OPTIONS: list[tuple[str, dict[str, Any], type[Exception], tuple[str, ...]]] = [
    # rule, options, error, what the message holds
    ("adamw", {"betas": (-0.1, 0.9)}, ValueError, ("beta.*0", r"-0\.1", r"\[0, 1\)")),
    ("adamw", {"betas": (0.9, 1.0)}, ValueError, ("beta.*1", r"1\.0", r"\[0, 1\)")),
    ("adamw", {"betas": (0.9, NAN)}, ValueError, ("beta", "nan")),
    ("adamw", {"betas": (0.9,)}, TypeError, ("betas", "two", r"\(0\.9,\)")),
    ("adamw", {"betas": (0.9, 0.9, 0.9)}, TypeError, ("betas", "two")),
    ("adamw", {"betas": 0.9}, TypeError, ("betas", "two", r"0\.9")),
    ("adamw", {"betas": None}, TypeError, ("betas", "two", "None")),
    ("adamw", {"betas": ("0.9", "0.95")}, TypeError, ("betas", "'0.9'")),
    ("adamw", {"betas": (0.9, torch.tensor(0.9))}, ValueError, ("betas", "both")),
    ("adamw", {"eps": -1e-8}, ValueError, ("eps", "-1e-08", ">= 0")),
    ("adamw", {"eps": None}, TypeError, ("eps", "None")),
    ("adamw", {"amsgrad": 1}, TypeError, ("amsgrad", "True or False", "1")),
    ("both", {"weight_decay": -0.1}, ValueError, ("weight_decay", r"-0\.1", ">= 0")),
    ("both", {"weight_decay": NAN}, ValueError, ("weight_decay", "nan")),
    ("both", {"weight_decay": INF}, ValueError, ("weight_decay", "inf")),
    ("both", {"weight_decay": "0.1"}, TypeError, ("weight_decay", "'0.1'")),
    ("both", {"weight_decay": None}, TypeError, ("weight_decay", "None")),
    ("both", {"maximize": "yes"}, TypeError, ("maximize", "'yes'")),
    ("muon", {"momentum": -0.1}, ValueError, ("momentum", r"-0\.1", r"\[0, 1\)")),
    ("muon", {"momentum": 1.0}, ValueError, ("momentum", r"1\.0", r"\[0, 1\)")),
    ("muon", {"momentum": NAN}, ValueError, ("momentum", "nan")),
    ("muon", {"momentum": "0.9"}, TypeError, ("momentum", "'0.9'")),
    ("muon", {"momentum": None}, TypeError, ("momentum", "None")),
    ("muon", {"momentum_form": "heavy"}, ValueError, ("momentum_form", "heavy", "ema", "sum")),
    ("muon", {"nesterov": 1}, TypeError, ("nesterov", "True or False")),
    ("muon", {"ns_steps": 0}, ValueError, ("ns_steps", "0", "1 to 99")),
    ("muon", {"ns_steps": 100}, ValueError, ("ns_steps", "100", "1 to 99")),
    ("muon", {"ns_steps": -5}, ValueError, ("ns_steps", "-5")),
    ("muon", {"ns_steps": 2.5}, TypeError, ("ns_steps", r"2\.5", "whole number")),
    ("muon", {"ns_steps": True}, TypeError, ("ns_steps", "True")),
    ("muon", {"ns_steps": "5"}, TypeError, ("ns_steps", "'5'")),
    ("muon", {"ns_coefficients": (4.5, -4.7750, 2.0315)}, ValueError,
     ("ns_coefficients", "float32", "singular values to", "at step 2", "docs/rules.md")),
    ("muon", {"orthogonalize": "svd"}, ValueError, ("svd", "newton-schulz", "polar-express")),
    ("muon", {"orthogonalize": None}, ValueError, ("orthogonalize", "None", "polar-express")),
    ("muon", {"adjust_lr": "spectral"}, ValueError, ("spectral", "match_rms_adamw", "original")),
    ("muon", {"ns_start": "rows"}, ValueError, ("ns_start", "rows", "norm", "gram", "aol")),
    ("muon", {"execution": "fast"}, ValueError, ("execution", "fast", "standard", "gram")),
    ("muon", {"eps_form": "max"}, ValueError, ("eps_form", "max", "clamp", "add")),
    ("muon", {"variance_beta2": 1.0}, ValueError, ("variance_beta2", r"1\.0")),
    ("muon", {"variance_beta2": "0.9"}, TypeError, ("variance_beta2", "'0.9'")),
    ("muon", {"flatten": "no"}, TypeError, ("flatten", "'no'")),
    ("muon", {"compute_dtype": "bfloat16"}, TypeError, ("compute_dtype", "'bfloat16'", "torch")),
    ("muon", {"compute_dtype": torch.int8}, TypeError, ("compute_dtype", "torch.int8")),
    ("muon", {"compute_dtype": float}, TypeError, ("compute_dtype", "float")),
    # Matrix products of 8-bit floats do not exist: better said before a step than in one.
    (
        "muon", {"compute_dtype": torch.float8_e4m3fn}, (TypeError, ValueError),
        ("compute_dtype", "float8_e4m3fn"),
    ),
    ("muon", {"ns_coefficients": ()}, ValueError, ("ns_coefficients", r"\(a, b, c\)")),
    ("muon", {"ns_coefficients": (1.0, 2.0)}, ValueError, ("ns_coefficients", r"\(1\.0, 2\.0\)")),
    ("muon", {"ns_coefficients": 3.4}, ValueError, ("ns_coefficients", r"3\.4")),
    ("muon", {"ns_coefficients": "abc"}, ValueError, ("ns_coefficients", "abc")),
    ("muon", {"ns_coefficients": (1.0, NAN, 2.0)}, ValueError, ("ns_coefficients", "nan")),
    ("muon", {"ns_coefficients": [(1, 2, 3), (1, 2)]}, ValueError, ("ns_coefficients",)),
    ("muon", {"ns_coefficients": (1, "2", 3)}, (TypeError, ValueError), ("ns_coefficients", "'2'")),
    ("muon", {"ns_coefficients": [(1, 2, None)]}, (TypeError, ValueError), ("ns_coefficients",)),
]  # fmt: skip
bad_options = pytest.mark.parametrize(
    ("rule", "options", "error", "fragments"),
    BAD_OPTIONS,
    ids=[
        f"{rule} {key}={value}"
        for rule, options, *_ in BAD_OPTIONS
        for key, value in options.items()
    ],
)


def takers(rule: str) -> list[type]:
    return [samestep.MuonAdamW, *{"muon": ONE_RULE[:1], "adamw": ONE_RULE[1:]}.get(rule, ONE_RULE)]


@bad_options
def test_a_bad_option(rule, options, error, fragments):
    for kind in takers(rule):
        refused_at_construction(
            lambda m, kind=kind: kind(of_every_kind(kind, m), **options), error, *fragments
        )


@bad_options
def test_a_bad_option_in_an_override(rule, options, error, fragments):
    pattern = {"muon": "second", "adamw": "bias", "both": "bias"}[rule]
    refused_at_construction(
        lambda m: samestep.MuonAdamW(m, overrides={pattern: options}), error, *fragments
    )


@bad_options
def test_a_bad_option_set_before_a_step(rule, options, error, fragments):
    training, twin = Training(), Training()
    training.set_gradients()
    twin.set_gradients()
    group = training.group("adamw" if rule == "both" else rule)
    before = {key: group[key] for key in options}
    group.update(options)
    with refused(training, error, *fragments):
        training.opt.step()
    group.update(before)
    assert_goes_on_like(training, twin)


@pytest.mark.parametrize("kind", [samestep.MuonAdamW, samestep.Muon], ids=lambda k: k.__name__)
def test_torchs_spelling_of_adjust_lr(kind):
    def build(**options: Any) -> Callable[[nn.Module], Any]:
        return lambda m: kind(of_every_kind(kind, m), **options)

    refused_at_construction(build(adjust_lr_fn="spectral"), ValueError, "spectral", "original")
    both = {"adjust_lr": "original", "adjust_lr_fn": "original"}
    refused_at_construction(build(**both), ValueError, "adjust_lr", "adjust_lr_fn", "only one")


# --- names of things ------------------------------------------------------------------------------


def test_an_unknown_preset():
    refused_at_construction(
        lambda m: samestep.MuonAdamW(m, preset="kellar"), ValueError, "'kellar'", "keller", "torch"
    )


@pytest.mark.parametrize(
    "build",
    [
        lambda m: samestep.MuonAdamW(m, overrides={"second": {"rule": "lion"}}),
        lambda m: samestep.MuonAdamW(m, groups=[{"params": "*", "rule": "lion"}]),
        lambda m: samestep.MuonAdamW([{"params": list(m.parameters()), "rule": "lion"}]),
        lambda m: samestep.AdamW([{"params": list(m.parameters()), "rule": "lion"}]),
    ],
    ids=["override", "groups=", "group dict", "AdamW"],
)
def test_an_unknown_rule(build):
    refused_at_construction(build, ValueError, "'lion'", "adamw", "muon")


@pytest.mark.parametrize(
    ("kind", "misspelled", "meant"),
    [
        (samestep.MuonAdamW, "momentun", "momentum"),
        (samestep.MuonAdamW, "beta", "betas"),
        (samestep.MuonAdamW, "weigth_decay", "weight_decay"),
        (samestep.MuonAdamW, "embeding_lr", "embedding_lr"),
        (samestep.MuonAdamW, "nesterow", "nesterov"),
        (samestep.MuonAdamW, "override", "overrides"),
        (samestep.MuonAdamW, "presets", "preset"),
        (samestep.MuonAdamW, "master_weight", "master_weights"),
        (samestep.Muon, "momentun", "momentum"),
        (samestep.Muon, "splitsizes", "split_sizes"),
        (samestep.Muon, "weightdecay", "weight_decay"),
    ],
)
def test_a_misspelled_keyword(kind, misspelled, meant):
    refused_at_construction(
        lambda m: kind(of_every_kind(kind, m), **{misspelled: 0.5}),
        TypeError,
        f"'{misspelled}'",
        f"did you mean '{meant}'",
    )


@by_class
def test_a_keyword_like_no_other(kind):
    refused_at_construction(
        lambda m: kind(of_every_kind(kind, m), xyzzy=1), TypeError, "unexpected keyword", "'xyzzy'"
    )


# --- parameters -----------------------------------------------------------------------------------


@by_class
@pytest.mark.parametrize(
    ("dtype", "word"),
    [(torch.complex64, "complex"), (torch.int64, "integer"), (torch.uint8, "integer")],
)
def test_parameters_that_are_no_real_numbers(kind, dtype, word):
    param = torch.ones(2, 2, dtype=dtype)
    refused_at_construction(
        lambda m: kind([("fine", m.first), ("odd.weight", param)]),
        RuntimeError if dtype.is_complex else ValueError,  # as torch.optim.Muon says it
        "'odd.weight'", str(dtype), word,
    )  # fmt: skip
    assert (param == 1).all()


def test_a_complex_parameter_in_a_model():
    model = Net()
    model.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    refused_at_construction(samestep.MuonAdamW, RuntimeError, "'phase'", "complex", model=model)


@pytest.mark.parametrize("named", [False, True])
def test_a_parameter_twice_in_a_group_is_updated_once(named):
    """torch warns as well, and updates it twice."""
    expected, twice = Net(), Net()
    params = {"first": twice.first, "second": twice.second}
    listed = [*params.items(), ("again", twice.first)] if named else [*params.values(), twice.first]
    name = "'again' is there already, as 'first'" if named else r"param_groups\[0\]\[2\]"
    with pytest.warns(UserWarning, match=rf"a parameter group with duplicate.*{name}"):
        opt = samestep.Muon(listed)
    plain = samestep.Muon([expected.first, expected.second])
    for model, one in ((expected, plain), (twice, opt)):
        assert len(one.param_groups[0]["params"]) == 2
        for param in (model.first, model.second):
            param.grad = torch.ones_like(param).tril()
        one.step()
    assert bits(dict(expected.named_parameters())) == bits(dict(twice.named_parameters()))
    opt.load_state_dict(opt.state_dict())


@pytest.mark.parametrize(
    ("build", "name"),
    [
        # What named_parameters(remove_duplicate=False) gives for a tied head.
        (lambda m: [*m.named_parameters(), ("lm_head.weight", m.first)], "first|lm_head"),
        (
            lambda m: [
                {"params": [("first", m.first)], "rule": "muon"},
                {"params": [("again", m.first)], "rule": "adamw"},
            ],
            "first|again",
        ),
        (
            lambda m: [
                {"params": [m.second, m.first], "rule": "muon"},
                {"params": [m.first], "rule": "adamw"},
            ],
            r"param_groups\[0\]\[1\]|param_groups\[1\]\[0\]",
        ),
    ],
    ids=["tied", "group dicts", "without names"],
)
def test_a_parameter_in_two_groups(build, name):
    refused_at_construction(
        lambda m: samestep.MuonAdamW(build(m)), ValueError, "more than one|twice", name
    )


def test_two_parameters_of_one_name():
    """Two models in one optimizer: their state may not be mixed up when it is loaded by name."""
    models = [Net(), Net()]
    try:
        opt = samestep.MuonAdamW([pair for model in models for pair in model.named_parameters()])
    except ValueError as error:
        assert_names(error, ("'first'",))  # refusing is an answer too
        return
    for seed, model in enumerate(models):
        for param in model.parameters():
            param.grad = torch.full_like(param, seed + 1.0)
    opt.step()
    before = [bits(opt.state[param]) for model in models for param in model.parameters()]
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert [bits(opt.state[p]) for model in models for p in model.parameters()] == before


@by_class
@pytest.mark.parametrize("params", [[], (), iter(())], ids=["list", "tuple", "iterator"])
def test_no_parameters(kind, params):
    with pytest.raises(ValueError, match="empty parameter list"):
        kind(params)


@by_class
def test_an_empty_group(kind):
    refused_at_construction(
        lambda m: kind([{"params": [m.first], "rule": "adamw"}, {"params": [], "rule": "adamw"}]),
        ValueError, r"param_groups\[1\]", "no parameters",
    )  # fmt: skip


@by_class
@pytest.mark.parametrize(
    "build", [nn.Sequential, lambda: Net().requires_grad_(False)], ids=["empty", "frozen"]
)
def test_a_model_with_nothing_to_train(kind, build):
    refused_at_construction(
        kind, ValueError, "no trainable parameters", "requires_grad", model=build()
    )


def test_plain_parameters_have_no_rule():
    refused_at_construction(
        lambda m: samestep.MuonAdamW(m.parameters()),
        ValueError, "no rule", '"rule": "muon"', "only a whole model",
    )  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"lr": 0.1}])
def test_a_group_without_a_rule(options):
    refused_at_construction(
        lambda m: samestep.MuonAdamW([{"params": [m.first], **options}]),
        ValueError, "no rule", '"rule": "muon"',
    )  # fmt: skip


@by_class
def test_a_bare_tensor(kind):
    refused_at_construction(lambda m: kind(m.first), TypeError, "iterable of Tensors")


@pytest.mark.parametrize("kind", ONE_RULE, ids=lambda k: k.__name__)
def test_what_is_no_tensor_or_no_leaf(kind):
    refused_at_construction(lambda m: kind([m.first, "second"]), TypeError, "str")
    refused_at_construction(lambda m: kind([m.first * 2]), ValueError, "non-leaf")
    # Two lists of parameters that were meant to be joined.
    refused_at_construction(
        lambda m: kind([[m.first], [m.second]]), TypeError, "can only optimize Tensors", "list"
    )


@pytest.mark.parametrize(
    "pair",
    [lambda p: (p,), lambda p: ("first", p, 1), lambda p: (p, "first"), lambda p: ("first", None)],
    ids=["one", "three", "swapped", "no tensor"],
)
def test_pairs_that_are_no_name_and_parameter(pair):
    refused_at_construction(
        lambda m: samestep.MuonAdamW([pair(m.first)]), (TypeError, ValueError), "name|Tensors"
    )


# --- patterns, overrides and explicit groups ------------------------------------------------------


@pytest.mark.parametrize("matcher", ["blocks.*", "First", "first.*", lambda name, param: False])
def test_a_pattern_that_matches_nothing(matcher):
    """A typo would otherwise leave a parameter with the default rule, unnoticed."""
    shown = re.escape(matcher) if isinstance(matcher, str) else "lambda"
    for where, build in {
        "overrides": lambda m: samestep.MuonAdamW(m, overrides={matcher: {"lr": 0.1}}),
        "groups": lambda m: samestep.MuonAdamW(m, groups=[{"params": [matcher], "rule": "adamw"}]),
    }.items():
        refused_at_construction(
            build, ValueError, where, shown, "matches no", "first", "embed.weight"
        )


def test_a_pattern_of_split_sizes_that_matches_nothing():
    refused_at_construction(
        lambda m: samestep.MuonAdamW(m, split_sizes={"third": (2, 2)}),
        ValueError, "split_sizes", "'third'", "first", "second",
    )  # fmt: skip


def test_two_patterns_of_split_sizes_for_one_parameter():
    refused_at_construction(
        lambda m: samestep.Muon(
            [("first", m.first), ("second", m.second)],
            split_sizes={"f*": (3, 3), "*": None},
        ),
        ValueError, "split_sizes", "'first'", "2 patterns",
    )  # fmt: skip


def test_the_names_shown_for_unnamed_parameters_can_be_used():
    """The error lists them as the parameters of the group, so they are what a user will try."""
    opt = samestep.Muon([Net().first], split_sizes={"param_groups[0][0]": (3, 3)})
    assert "2 of 3 x 4" in opt.table()


def test_two_overrides_that_disagree():
    refused_at_construction(
        lambda m: samestep.MuonAdamW(m, overrides={"f*": {"lr": 0.1}, "*t": {"lr": 0.2}}),
        ValueError, "'first'", r"'f\*'", r"'\*t'", "'lr'", "only one",
    )  # fmt: skip


@pytest.mark.parametrize("options", ["adamw", None, 0.1, ("rule", "adamw")], ids=str)
def test_an_override_that_is_no_dict(options):
    """`{"lm_head.*": "adamw"}` is how one would say it at first."""
    refused_at_construction(
        lambda m: samestep.MuonAdamW(m, overrides={"first": options}),
        (TypeError, ValueError), "overrides|'first'", re.escape(repr(options)),
    )  # fmt: skip


@pytest.mark.parametrize("matcher", [0, None, ("first", "second")], ids=str)
def test_a_matcher_that_is_none(matcher):
    refused_at_construction(
        lambda m: samestep.MuonAdamW(m, overrides={matcher: {"lr": 0.1}}),
        TypeError, "overrides", "pattern", re.escape(repr(matcher)),
    )  # fmt: skip


def test_a_parameter_that_two_groups_cover():
    groups = [{"params": "*", "rule": "adamw"}, {"params": "first", "rule": "muon"}]
    refused_at_construction(
        lambda m: samestep.MuonAdamW(m, groups=groups),
        ValueError, "'first'", "matched by two entries", r"'\*'", "only one",
    )  # fmt: skip


def test_a_parameter_that_no_group_covers():
    refused_at_construction(
        lambda m: samestep.MuonAdamW(m, groups=[{"params": "first", "rule": "muon"}]),
        ValueError, "3 trainable", "second", "bias", r"embed\.weight", "add a group", "freeze",
    )  # fmt: skip
    refused_at_construction(lambda m: samestep.MuonAdamW(m, groups=[]), ValueError, "4 trainable")


@pytest.mark.parametrize(
    ("groups", "fragments"),
    [
        ([{"params": "*"}], ("no rule",)),
        ([{"rule": "adamw"}], ("params",)),
        ({"params": "*", "rule": "adamw"}, ("groups",)),
        ([{"params": [torch.ones(50, 50)], "rule": "adamw"}], ("groups", "pattern")),
    ],
    ids=["no rule", "no params", "a dict", "tensors"],
)
def test_explicit_groups_of_another_form(groups, fragments):
    refused_at_construction(
        lambda m: samestep.MuonAdamW(m, groups=groups), (TypeError, ValueError), *fragments
    )


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"overrides": {"*": {"lr": 0.1}}}, "overrides"),
        ({"groups": [{"params": "*", "rule": "adamw"}]}, "groups"),
        ({"matrix_lr": 0.1}, "per-role learning rates"),
    ],
    ids=["overrides", "groups", "rates"],
)
def test_routing_options_without_names(options, word):
    for params in (
        lambda m: [{"params": [m.first], "rule": "muon"}],
        lambda m: list(m.parameters()),
    ):
        refused_at_construction(
            lambda m, params=params: samestep.MuonAdamW(params(m), **options),
            ValueError, word, "need a model or named parameters", "in the groups",
        )  # fmt: skip


@pytest.mark.parametrize("options", [{"overrides": {"*": {"lr": 0.1}}}, {"scalar_lr": 0.1}])
def test_explicit_groups_and_automatic_routing(options):
    refused_at_construction(
        lambda m: samestep.MuonAdamW(m, groups=[{"params": "*", "rule": "adamw"}], **options),
        ValueError, "groups=", "cannot be combined with overrides=",
    )  # fmt: skip


# --- blocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("split", "error", "fragments"),
    [
        ((3, 4), ValueError, (r"\(3, 4\)", "add up to 7", "6 rows")),
        ((6, 0), ValueError, (r"\(6, 0\)", "above 0")),
        ((8, -2), ValueError, (r"\(8, -2\)", "above 0")),
        ((3.0, 3.0), ValueError, (r"\(3\.0, 3\.0\)", "whole numbers")),
        ((), ValueError, (r"\(\)", "whole numbers")),
        (3, (TypeError, ValueError), ("split_sizes", "3")),
    ],
    ids=["sum", "zero", "negative", "floats", "none", "a number"],
)
def test_bad_split_sizes(split, error, fragments):
    for build in (
        lambda m: samestep.MuonAdamW(m, overrides={"first": {"split_sizes": split}}),
        lambda m: samestep.MuonAdamW(m, split_sizes={"first": split}),
        lambda m: samestep.Muon([("first", m.first)], split_sizes=split),
    ):
        refused_at_construction(build, error, "'first'", r"\(6, 4\)", *fragments)


def test_split_sizes_of_a_vector():
    refused_at_construction(
        lambda m: samestep.Muon([("bias", m.bias)], split_sizes=(2, 2)),
        ValueError, "'bias'", "1-D", "'adamw'",
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(), (4,)], ids=str)
def test_less_than_a_matrix_for_muon(shape):
    param = nn.Parameter(torch.ones(shape))
    for build in (
        lambda m: samestep.Muon([("norm.weight", param)]),
        lambda m: samestep.MuonAdamW([("norm.weight", param)], overrides={"*": {"rule": "muon"}}),
    ):
        refused_at_construction(
            build, ValueError, "'norm.weight'", f"{len(shape)}-D", re.escape(str(shape)), "'adamw'"
        )


def test_a_whole_model_for_muon():
    refused_at_construction(samestep.Muon, ValueError, "'bias'", "1-D", "'adamw'")


@pytest.mark.parametrize(
    ("dims", "as_matrix"), [((3, 2, 3, 3), "3, 18"), ((3, 2, 1, 1, 1), "3, 2")]
)
def test_a_convolution_for_muon(dims, as_matrix):
    param = nn.Parameter(torch.ones(dims))
    refused_at_construction(
        lambda m: samestep.Muon([("conv.weight", param)]),
        ValueError, "'conv.weight'", f"{len(dims)}-D", "flatten=True", as_matrix, "'adamw'",
    )  # fmt: skip


# --- in a step ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["embed.weight", "second", "bias"])
def test_a_sparse_gradient(name):
    """The check comes before the first update, so the other parameters have not moved either."""
    training, twin = Training(), Training()
    training.set_gradients()
    twin.set_gradients()
    param = training.model.get_parameter(name)
    dense = param.grad
    param.grad = dense.to_sparse()
    with refused(training, RuntimeError, f"'{name}'", "sparse gradient", "sparse=False"):
        training.opt.step()
    param.grad = dense
    assert_goes_on_like(training, twin)


def test_the_sparse_gradient_of_an_embedding():
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 3))
    opt = samestep.MuonAdamW(model)
    model(torch.tensor([1, 2])).sum().backward()
    before = bits(list(model.parameters()))
    with pytest.raises(RuntimeError, match=r"'0\.weight'.*sparse=False"):
        opt.step()
    assert bits(list(model.parameters())) == before


@pytest.mark.parametrize(
    ("options", "rule", "key", "value"),
    [
        ({}, "muon", "split_sizes", (2, 2)),
        ({"split_sizes": {"second": (2, 2)}}, "muon", "split_sizes", None),
        ({"split_sizes": {"second": (2, 2)}}, "muon", "split_sizes", {"second": (1, 3)}),
        ({}, "muon", "flatten", True),
        ({}, "muon", "variance_beta2", 0.9),
        ({"variance_beta2": 0.9}, "muon", "variance_beta2", None),
        ({}, "adamw", "amsgrad", True),
        ({"amsgrad": True}, "adamw", "amsgrad", False),
        ({}, "muon", "rule", "adamw"),
        ({}, "adamw", "rule", "muon"),
    ],
)
def test_an_option_that_may_not_change_after_construction(options, rule, key, value):
    """State was made for the old value; going on would read or write it wrongly."""
    training, twin = Training(**options), Training(**options)
    training.set_gradients()
    twin.set_gradients()
    group = training.group(rule)
    before = group[key]
    group[key] = value
    with refused(training, RuntimeError, r"param_groups\[\d\]", key, "new optimizer"):
        training.opt.step()
    group[key] = before
    assert_goes_on_like(training, twin)


def test_an_error_in_the_closure():
    training, twin = Training(), Training()

    def closure() -> float:
        raise ArithmeticError("in the model")

    with refused(training, ArithmeticError, "in the model"):
        training.opt.step(closure)
    assert_goes_on_like(training, twin)


# --- adding groups --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "error", "fragments"),
    [
        (lambda m, new: {"params": [("new", new)]}, ValueError, ("no rule",)),
        (lambda m, new: {"params": [("new", new)], "rule": "lion"}, ValueError, ("'lion'",)),
        (lambda m, new: {"params": [], "rule": "muon"}, ValueError, ("no parameters",)),
        (lambda m, new: {"rule": "muon"}, (KeyError, TypeError, ValueError), ("params",)),
        (lambda m, new: [new], TypeError, ("dict", "list")),
        (lambda m, new: {"params": [new], "rule": "muon"}, ValueError, ("names",)),
        (lambda m, new: {"params": {("new", new)}, "rule": "muon"}, TypeError, ("ordered",)),
        (lambda m, new: {"params": [("new", "text")], "rule": "muon"}, TypeError, ("str",)),
        (lambda m, new: {"params": [("w", m.first)], "rule": "muon"}, ValueError, ("'(w|first)'",)),
        (
            lambda m, new: {"params": [("new", new), ("w", m.first)], "rule": "muon"},
            ValueError, ("'(w|first)'",),
        ),
        (
            lambda m, new: {"params": [("new", new), ("norm", torch.ones(4))], "rule": "muon"},
            ValueError, ("'norm'", "1-D", "'adamw'"),
        ),
        (
            lambda m, new: {"params": [("new", new)], "rule": "muon", "split_sizes": (1, 2)},
            ValueError, ("'new'", r"\(1, 2\)", "4 rows"),
        ),
        (
            lambda m, new: {"params": [("new", new), ("c", new * 1j)], "rule": "adamw"},
            RuntimeError, ("'c'", "complex"),
        ),
        (
            lambda m, new: {"params": [("new", new), ("n", new.long())], "rule": "adamw"},
            ValueError, ("'n'", "integer"),
        ),
        (
            lambda m, new: {"params": [("new", new)], "rule": "adamw", "lr": NAN},
            ValueError, ("learning rate", "nan"),
        ),
        (
            lambda m, new: {"params": [("new", new)], "rule": "muon", "ns_steps": 0},
            ValueError, ("ns_steps", "0"),
        ),
        (
            lambda m, new: {
                "params": [("new", new)], "rule": "muon", "adjust_lr": None, "adjust_lr_fn": None,
            },
            ValueError, ("adjust_lr_fn",),
        ),
    ],
    ids=[
        "no rule", "unknown rule", "empty", "no params", "no dict", "no names", "a set",
        "no tensor", "known parameter", "known parameter second", "vector", "split",
        "complex", "integer", "lr", "ns_steps", "adjust_lr",
    ],
)  # fmt: skip
def test_a_group_that_cannot_be_added(group, error, fragments):
    training, twin = Training(), Training()
    new = torch.ones(4, 4)
    new.grad = torch.ones_like(new)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of duplicates itself
        with refused(training, error, *fragments):
            training.opt.add_param_group(group(training.model, new))
    assert new not in training.opt.state
    assert (new == 1).all()
    assert (new.grad == 1).all()
    assert_goes_on_like(training, twin)
    # What was wrong can be put right.
    for one in (training, twin):
        one.model.new = nn.Parameter(new.clone())
        one.opt.add_param_group({"params": [("new", one.model.new)], "rule": "muon"})
    assert_goes_on_like(training, twin)
    assert not torch.equal(training.model.new, new)


# --- loading --------------------------------------------------------------------------------------

SavedDict = dict[str, Any]


def saved_by(**options: Any) -> SavedDict:
    return copy.deepcopy(Training(**options).opt.state_dict())


def edited(change: Callable[[SavedDict], Any]) -> SavedDict:
    saved = saved_by()
    change(saved)
    return saved


def renamed(saved: SavedDict) -> None:
    saved["param_groups"][0]["param_names"] = ["first", "third"]


def other_shapes() -> SavedDict:
    saved = saved_by()
    momentum = saved["state"][1]["momentum_buffer"]
    saved["state"][1]["momentum_buffer"] = momentum.t().contiguous()
    return saved


def one_group_less() -> SavedDict:
    return edited(lambda s: s["param_groups"].pop())


def one_parameter_less() -> SavedDict:
    def change(saved: SavedDict) -> None:
        saved["param_groups"][0]["params"].pop()
        saved["param_groups"][0]["param_names"].pop()

    return edited(change)


def of_sgd() -> SavedDict:
    """Grouped in the same way, but another algorithm."""
    model = Net()
    groups = [
        {"params": [model.first, model.second]}, {"params": [model.bias]},
        {"params": [model.embed.weight]},
    ]  # fmt: skip
    opt = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    opt.step()
    return opt.state_dict()


BAD_FILES: dict[str, tuple[Callable[[], Any], Any, tuple[str, ...]]] = {
    "group count": (one_group_less, ValueError, ("number of parameter groups", "2", "3")),
    "group size": (one_parameter_less, ValueError, (r"param_groups\[0\]", "'second' is not in")),
    "names": (lambda: edited(renamed), ValueError, (r"param_groups\[0\]", "'second'", "'third'")),
    "rule": (
        lambda: edited(lambda s: s["param_groups"][2].update(rule="muon")),
        ValueError, (r"param_groups\[2\]", "'muon'", "'adamw'"),
    ),
    "shape": (other_shapes, ValueError, ("momentum_buffer", "'second'", r"\(6, 4\)", r"\(4, 6\)")),
    "missing key": (
        lambda: edited(lambda s: s["state"][3].pop("exp_avg")),
        ValueError, (r"'embed\.weight'", "exp_avg_sq", "'exp_avg'"),
    ),
    "extra key": (
        lambda: edited(lambda s: s["state"][3].update(extra=torch.ones(()))),
        ValueError, (r"'embed\.weight'", "'extra'"),
    ),
    "master weights": (
        lambda: edited(lambda s: s["state"][3].update(master_weight=torch.ones(5, 4))),
        ValueError, (r"'embed\.weight'", "master_weight", "master_weights=True"),
    ),
    "amsgrad": (
        lambda: saved_by(amsgrad=True),
        ValueError, (r"param_groups\[1\]", "amsgrad|max_exp_avg_sq"),
    ),
    "variance": (
        lambda: saved_by(variance_beta2=0.9), ValueError, (r"param_groups\[0\]", "variance"),
    ),
    "split": (
        lambda: saved_by(split_sizes={"first": (3, 3)}),
        ValueError, (r"param_groups\[0\]", "split_sizes", r"\(3, 3\)"),
    ),
    "bad rate": (
        lambda: edited(lambda s: s["param_groups"][2].update(lr=NAN)),
        ValueError, ("learning rate", "nan"),
    ),
    "bad option": (
        lambda: edited(lambda s: s["param_groups"][0].update(orthogonalize="later-version")),
        ValueError, ("orthogonalize", "later-version"),
    ),
    # JSON makes strings of the numbers; the state would start afresh without a word.
    "other ids": (
        lambda: edited(lambda s: s.update(state={str(k): v for k, v in s["state"].items()})),
        ValueError, ("state", "'0'"),
    ),
    "another algorithm": (of_sgd, ValueError, ("momentum_buffer", "exp_avg")),
    # Passing the model's state dict is the common slip of a resume script.
    "a model's": (lambda: Net().state_dict(), (ValueError, TypeError), ("param_groups", "optim")),
    "empty": (dict, (ValueError, TypeError), ("param_groups", "optim")),
    "none": (lambda: None, (ValueError, TypeError), ("state", "None")),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_state_that_does_not_fit(case):
    make, error, fragments = BAD_FILES[case]
    training, twin = Training(), Training()
    saved = make()
    saved_bits = bits(saved)
    with refused(training, error, *fragments):
        training.opt.load_state_dict(saved)
    assert bits(saved) == saved_bits
    assert_goes_on_like(training, twin)
    # Nothing of the failed attempt is left in the way of a good one.
    good = saved_by()
    for one in (training, twin):
        one.opt.load_state_dict(copy.deepcopy(good))
    assert bits(training.opt.state_dict()) == bits(good)
    assert_goes_on_like(training, twin)


def test_a_state_with_master_weights_for_an_optimizer_without():
    def build(master_weights: bool) -> Training:
        return Training(Net(torch.bfloat16), master_weights=master_weights)

    training, twin = build(False), build(False)
    saved = build(True).opt.state_dict()
    with refused(training, ValueError, "'first'", "master_weight", "master_weights=True"):
        training.opt.load_state_dict(saved)
    assert_goes_on_like(training, twin)


@pytest.mark.parametrize("groups", [0, 1, 2])
def test_the_last_thing_that_does_not_fit_is_found_before_the_first_is_loaded(groups):
    """A wrong shape in any group: those before it have not been loaded yet."""
    training, twin = Training(), Training()
    saved = saved_by(betas=(0.5, 0.5), momentum=0.5, weight_decay=0.0)
    last = saved["param_groups"][groups]["params"][-1]
    key = "exp_avg" if "exp_avg" in saved["state"][last] else "momentum_buffer"
    saved["state"][last][key] = torch.ones(7)
    with refused(training, ValueError, key, r"\(7,\)"):
        training.opt.load_state_dict(saved)
    assert_goes_on_like(training, twin)


def test_a_lazy_module_is_called_first():
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(2))
    for build in (samestep.MuonAdamW, lambda m: samestep.AdamW(m.named_parameters())):
        with pytest.raises(ValueError, match=r"'1.weight' of a lazy module .* call the"):
            build(model)
    model(torch.ones(1, 4))
    samestep.MuonAdamW(model)
