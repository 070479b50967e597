"""Every keyword and group key, from the signatures: a wrong type or value is an error that says so.

A keyword that is new, and that nobody checks, fails here.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import nn

import samestep
from samestep.groups.group_keys import OF_EVERY_GROUP, WAYS_OF_TORCH, options_of_rule
from samestep.rules import RULES
from tests.soak import twin_cases

KINDS = [samestep.MuonAdamW, samestep.Muon, samestep.AdamW]
EVERY_KIND = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
# Taken by nothing, and how a message may show it.
NEVER: dict[str, tuple[Any, str]] = {
    "object": (object(), "object"),
    "word": ("nonsense", "nonsense"),
    "nan": (float("nan"), "nan"),
    "negative": (-1, "-1"),
    "complex": (1j, "1j"),
    "bytes": (b"nonsense", "b'nonsense'"),
    "function": (len, "len"),
    "list": ([object()], "object"),
    "mapping": ({"nonsense": object()}, "nonsense"),
    "list of words": (["torch"], "torch"),
    "matrix": (torch.ones(2, 3), "shape (2, 3)"),
    "meta": (torch.empty((), device="meta"), "meta"),
    "large": (list(range(10**5)), "0"),  # whose first item may be told alone
}
BOOLEANS = (0, 1, 1.0, "false", "True", torch.tensor(True))  # what looks like one


OF_CONSTRUCTION = ("adjust_lr_fn", "qkv_split_sizes", "param_names", "process_group", "divisor")


def keywords(kind: Callable[..., Any]) -> dict[str, Any]:
    """Name and annotation of all keywords but the parameters."""
    found = get_type_hints(kind.__init__)
    options = get_args(found.pop("options"))[0]
    found |= get_type_hints(options)
    names = [*list(inspect.signature(kind.__init__).parameters)[2:-1], *options.__annotations__]
    return {name: found[name] for name in names}


def matrices() -> list[tuple[str, nn.Parameter]]:
    return [("a.weight", nn.Parameter(torch.ones(4, 4))), ("b", nn.Parameter(torch.eye(4)))]


def refused(build: Callable[[], Any], keyword: str, value: Any, shown: str) -> None:
    """`build` raises an error that names this keyword and shows the value, on a screen."""

    def attempt() -> None:
        build()
        pytest.fail(f"{keyword}={value!r} was taken"[:1000])

    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        attempt()
    text = str(caught.value)
    # Of what decides state, any other value is refused later on.
    assert caught.type is not RuntimeError or "state does not fit" in text
    assert keyword.removeprefix("qkv_") in text, text[:1000]  # blocks know our name alone
    assert shown in text, f"{keyword}: {shown} is not in {text[:1000]}"
    assert len(text) < 1000, f"{keyword}: too long to be read: {text[:2000]}"


@EVERY_KIND
@pytest.mark.parametrize("probe", NEVER)
def test_nonsense_is_refused_by_every_keyword(kind: Any, probe: str):
    value, shown = NEVER[probe]
    for keyword in keywords(kind):

        def build(keyword: str = keyword) -> None:
            kind(matrices(), **{keyword: value})

        refused(build, keyword, value, shown)


@EVERY_KIND
def test_what_looks_like_a_boolean_is_none(kind: Any):
    flags = {key for key, hint in keywords(kind).items() if bool in (hint, *get_args(hint))}
    assert flags >= {"master_weights", "update_rms", "compile", "foreach", "strict", "maximize"}
    for keyword in flags:
        for value in BOOLEANS:
            if not (keyword == "compile" and isinstance(value, str)):  # the name of a backend
                with pytest.raises((TypeError, ValueError), match=rf"{keyword} must be True"):
                    kind(matrices(), **{keyword: value})
    with pytest.raises(ValueError, match=r"compile='false': torch\.compile has no such backend"):
        kind(matrices(), compile="false")


@EVERY_KIND
def test_defaults_are_taken_when_they_are_given(kind: Any):
    """So nothing above is refused because its keyword is."""
    signature = inspect.signature(kind.__init__).parameters
    given = {name: p.default for name, p in signature.items() if p.default is not p.empty}
    opt = kind(matrices(), **given)
    for keyword in keywords(kind):
        if keyword in opt.param_groups[0] and keyword not in given:
            kind(matrices(), **{keyword: opt.param_groups[0][keyword]})


def group_keys(rule: str) -> list[str]:
    """What a group of a rule takes; "params" are tried elsewhere."""
    keys = {*options_of_rule(RULES[rule]), *OF_EVERY_GROUP, *WAYS_OF_TORCH, "adjust_lr_fn"}
    no_option = {"fused"} if rule != "adamw" else {"adjust_lr_fn"}
    return sorted(keys - {"params"} - (no_option if rule != "adamuon" else {"fused"}))


def group(rule: str, **keys: Any) -> dict[str, Any]:
    return {"params": [nn.Parameter(torch.ones(4, 4))], "rule": rule, **keys}


@pytest.mark.parametrize("rule", ["muon", "adamw", "adamuon"])
@pytest.mark.parametrize("probe", NEVER)
def test_nonsense_is_refused_by_every_group_key(rule: str, probe: str):
    value, shown = NEVER[probe]
    for key in group_keys(rule):
        if "word" in probe and key in ("role", "param_names"):  # which are words
            continue

        def build(key: str = key) -> None:
            samestep.MuonAdamW([group("adamw"), group(rule) | {key: value}])

        refused(build, key, value, shown)


@pytest.mark.parametrize("rule", ["muon", "adamw"])
@pytest.mark.parametrize("probe", NEVER)
def test_nonsense_that_is_set_later_is_refused_by_the_next_step(rule: str, probe: str):
    value, shown = NEVER[probe]
    opt = samestep.MuonAdamW([group("adamw"), group(rule)])
    for one in opt.param_groups:
        one["params"][0].grad = torch.ones(4, 4)
    before = [one["params"][0].clone() for one in opt.param_groups]
    for key in group_keys(rule):
        if key in OF_CONSTRUCTION:
            continue
        if "word" in probe and key == "role":
            continue
        absent = object()
        kept = opt.param_groups[1].get(key, absent)
        opt.param_groups[1][key] = value
        refused(opt.step, key, value, shown)
        if kept is absent:
            del opt.param_groups[1][key]
        else:
            opt.param_groups[1][key] = kept
    for one, param in zip(opt.param_groups, before, strict=True):
        assert torch.equal(one["params"][0], param)
    opt.step()


@twin_cases("large")
@pytest.mark.parametrize("probe", NEVER)
def test_nonsense_is_refused_in_overrides(probe: str):
    value, shown = NEVER[probe]
    for rule in ("muon", "adamw"):
        for key in {*RULES[rule].defaults, "maximize"}:

            def build(key: str = key, rule: str = rule) -> None:
                samestep.MuonAdamW(matrices(), overrides={"b": {"rule": rule, key: value}})

            refused(build, key, value, shown)


def test_parameters_of_the_wrong_kind():
    for params in (None, 1, object(), "nonsense", {}, [], [1], [None], [("a", 1)], [{}], [[]]):
        for kind in KINDS:
            with pytest.raises((TypeError, ValueError)) as caught:
                kind(params)
            assert re.search("param|Tensor", str(caught.value)), f"{params}: {caught.value}"


def test_a_recipe_without_a_model_is_told():
    with pytest.raises(ValueError, match=r"recipe='mixtral' needs a model.*recipes\.overrides"):
        samestep.MuonAdamW(matrices(), recipe="mixtral")
