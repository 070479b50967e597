"""Receipts of the right form pass, damaged ones are refused with the place of the damage."""

import json
from copy import deepcopy
from importlib.resources import files

import pytest
from jsonschema import Draft202012Validator

from samestep.lab.stress.judge import CHECKS, PROGRAM_CHECKS
from samestep.lab.stress.receipt import check_receipt
from tests.soak import twin, twin_cases
from tests.stress.example_receipt import EXAMPLES, clean, failed, mutants, with_mutants
from tests.stress.example_receipt import receipt as made

LATER = {  # what receipts did not always have, or have on XLA alone
    "asked": ["delays", "device", "other_steps"],
    "mutant": ["delays"],
    "case": ["reason", "program"],
    "ran": ["code", "nccl", "shared_gpus", "stretches"],
    "sample": ["bits"],
}
SAMPLE = "cases[0].samples[0]"


def at(receipt, path):
    """The thing at a path like ("cases", 0, "samples")."""
    for part in path:
        receipt = receipt[part]
    return receipt


def damaged(receipt, path, value):
    """A copy with another value, or without any if that is `...`."""
    receipt = deepcopy(receipt)
    holder = at(receipt, path[:-1])
    if value is ...:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return receipt


@twin_cases("large")
@pytest.mark.parametrize("name", EXAMPLES)
def test_whole_receipts_pass(name):
    check_receipt(json.loads(json.dumps(EXAMPLES[name]())))


def test_what_json_writes_as_an_array_is_one():
    receipt = clean()
    receipt["ran"]["command"] = tuple(receipt["ran"]["command"])
    check_receipt(receipt)


def test_the_schema_is_one():
    schema = json.loads(files("samestep.lab.stress").joinpath("receipt.schema.json").read_bytes())
    Draft202012Validator.check_schema(schema)


def test_every_shape_that_is_fixed_is_closed_and_asks_for_all_it_names():
    schema = json.loads(files("samestep.lab.stress").joinpath("receipt.schema.json").read_bytes())
    open_ones = ("flight", "operation")  # the flight recorder may come to tell more
    shapes = {"": schema} | {k: v for k, v in schema["$defs"].items() if k not in open_ones}
    for name, shape in shapes.items():
        if "properties" in shape:
            assert shape["additionalProperties"] is False, name
            required = [key for key in shape["properties"] if key not in LATER.get(name, ())]
            assert required == shape["required"], name


def test_checks_are_those_of_the_judge():
    schema = json.loads(files("samestep.lab.stress").joinpath("receipt.schema.json").read_bytes())
    assert schema["$defs"]["check"]["enum"] == [*CHECKS, *PROGRAM_CHECKS]


DAMAGE = {
    "another kind": (["kind"], "samestep crossover", "kind: it is 'samestep crossover', not"),
    "another format": (["format"], 2, "format: it is 2, not 1 (samestep "),
    "a verdict of its own": (["verdict"], "fine", "verdict: it is 'fine', not one of 'clean'"),
    "no cases": (["cases"], ..., "the receipt: 'cases' is missing"),
    "something more": (["notes"], "", "the receipt: 'notes' is not known here"),
    "text for a number": (["asked", "steps"], "10", "asked.steps: it is '10', not of type integer"),
    "true for a number": (["asked", "seed"], True, "asked.seed: it is True, not of type integer"),
    "no ranks": (["ran", "world_size"], 0, "ran.world_size: it is 0, below 1"),
    "a limit of zero": (["thresholds", "adam"], 0, "thresholds.adam: it is 0, not above 0"),
    "local time": (["ran", "started"], "today", "ran.started: it is 'today', not a time like 20"),
    "a status of its own": (["cases", 2, "status"], "ok", "cases[2].status: it is 'ok', not one"),
    "a negative distance": (
        ["cases", 0, "samples", 0, "max_abs_state_diff"],
        -1e-9,
        f"{SAMPLE}.max_abs_state_diff: it is -1e-09, not a number not below 0, or ",
    ),
    "NaN": (
        ["cases", 0, "samples", 0, "reference", "adam"],
        float("nan"),
        f'{SAMPLE}.reference.adam: it is nan, not a number not below 0, "infinite", or null',
    ),
    "an infinite number": (
        ["cases", 0, "seconds"],
        float("inf"),
        "cases[0].seconds: it is inf, not of type number",
    ),
    "another word for infinite": (
        ["cases", 0, "samples", 0, "max_abs_param_diff"],
        "inf",
        f"{SAMPLE}.max_abs_param_diff: it is 'inf', not a number not below 0, or ",
    ),
    "a family too few": (
        ["cases", 0, "samples", 0, "reference", "mu_b"],
        ...,
        f"{SAMPLE}.reference: 'mu_b' is missing",
    ),
    "a rank that is no number": (
        ["cases", 0, "positions"],
        {"0": "here", "first": "there"},
        "cases[0].positions: 'first' is not known here",
    ),
    "too many steps of presence": (
        ["scenarios", "dist_adamw_muon", "presence", "ranks_with_gradient", 0],
        [0] * 65,
        "scenarios.dist_adamw_muon.presence.ranks_with_gradient[0]: ",
    ),
    "a list in place of all": ([], [], "the receipt: it is [], not of type object"),
    # What no run can have left:
    "more ranks than there are": (
        ["scenarios", "dist_adamw_muon", "presence", "ranks_with_gradient", 1, 5],
        3,
        "scenarios.dist_adamw_muon.presence: 3 ranks have a gradient, but there are only 2",
    ),
    "a row too few": (
        ["scenarios", "dist_adamw_muon", "presence", "ranks_with_gradient", 4],
        ...,
        "scenarios.dist_adamw_muon.presence: there are 5 params, but 4 rows for them",
    ),
    "a case of nothing known": (
        ["cases", 3, "scenario"],
        "else",
        "cases[3].scenario: 'else' is not among the scenarios",
    ),
    "clean with a failure": (["cases", 1, "status"], "failed", "verdict: it is 'clean', but case"),
    "parameters apart, but none of them": (
        ["cases", 1, "samples", 4, "max_abs_param_diff"],
        1e-9,
        "cases[1].samples[4].max_abs_param_diff: it is not the largest of",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_refused_with_its_place(kind):
    path, value, problem = DAMAGE[kind]
    receipt = damaged(clean(), path, value) if path else value
    with pytest.raises(ValueError) as caught:
        check_receipt(receipt)
    assert str(caught.value).startswith(problem)


def test_damage_to_mutants_and_flights_is_refused():
    with pytest.raises(ValueError, match=r"mutants\[0\].expected: it is 'luck', not one of"):
        check_receipt(damaged(with_mutants(), ["mutants", 0, "expected"], "luck"))
    receipt = failed()
    number = next(n for n, case in enumerate(receipt["cases"]) if case["flights"])
    path = ["cases", number, "flights", "1", "records", 0]
    with pytest.raises(ValueError, match=r"flights\.1\.records\[0\]: 'name' is missing"):
        check_receipt(damaged(receipt, [*path, "name"], ...))
    check_receipt(damaged(receipt, [*path, "stream"], 7))


def test_what_may_be_null_is_nothing_else():
    for key in ("world_size", "backend"):
        check_receipt(damaged(clean(), ["asked", key], None))
    for key in ("steps", "seed", "model", "watchdog", "mutants"):
        with pytest.raises(ValueError, match=f"asked.{key}: it is None"):
            check_receipt(damaged(clean(), ["asked", key], None))


@twin
def test_every_part_of_a_receipt_is_asked_for():
    """Whatever key is taken away, somebody notices; but for the names of things."""
    receipt = made(["dist_adamw_muon"], ["zero2"], steps=100) | {"mutants": mutants()[:1]}
    free = {"scenarios", "layouts", "collectives", "environment", "positions", "flights"}
    tried = 0

    def walk(part, path):
        nonlocal tried
        for key in part if isinstance(part, dict) else range(min(len(part), 1)):
            if key in LATER.get(".".join(map(str, path)), ()):
                continue
            if isinstance(part, dict) and path[-1:] not in [[name] for name in free]:
                tried += 1
                with pytest.raises(ValueError):
                    check_receipt(damaged(receipt, [*path, key], ...))
            if isinstance(part[key], dict | list):
                walk(part[key], [*path, key])

    walk(receipt, [])
    assert tried > 80
