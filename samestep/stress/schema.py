"""Whether a receipt of `samestep stress` has the form that readers of it may rely on."""

import json
import math
import re
import reprlib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from jsonschema import Draft202012Validator, ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import extend

from samestep.stress.report.distances import number
from samestep.version import __version__


def check_receipt(receipt: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the place of the first problem, unless it is a whole receipt."""
    error = next(_validator().iter_errors(receipt), None)
    if error is not None:
        raise ValueError(_at(error.absolute_path, _in_words(error)))
    for problem in _contradictions(receipt):
        raise ValueError(problem)


@cache
def _validator() -> Validator:
    """Numbers are finite, as in JSON; a tuple is an array, since it is written as one."""
    schema = json.loads(files("samestep.stress").joinpath("receipt.schema.json").read_bytes())
    types = Draft202012Validator.TYPE_CHECKER.redefine_many(
        {
            "object": lambda _, value: isinstance(value, Mapping),
            "array": lambda _, value: isinstance(value, list | tuple),
            "number": lambda _, value: _is_number(value) and math.isfinite(value),
        }
    )
    made: Validator = extend(Draft202012Validator, type_checker=types)(schema)  # type: ignore[no-untyped-call]
    return made


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _contradictions(receipt: Mapping[str, Any]) -> Iterator[str]:
    """What the form allows and no run can have left."""
    world = receipt["ran"]["world_size"]
    for name, scenario in receipt["scenarios"].items():
        place = ["scenarios", name, "presence"]
        params, rows = (scenario["presence"][key] for key in ("params", "ranks_with_gradient"))
        if len(params) != len(rows):
            yield _at(place, f"there are {len(params)} params, but {len(rows)} rows for them")
        if (most := max(map(max, filter(None, rows)), default=0)) > world:
            yield _at(place, f"{most} ranks have a gradient, but there are only {world}")
    for index, case in enumerate(receipt["cases"]):
        for part in ("scenario", "layout"):
            if case[part] not in receipt[f"{part}s"]:
                yield _at(["cases", index, part], f"{case[part]!r} is not among the {part}s")
        for turn, sample in enumerate(case["samples"]):
            families = [sample[f"max_{family}_abs_diff"] for family in ("adam", "mu_a", "mu_b")]
            largest = max((number(d) for d in families if d is not None), default=0.0)
            if number(sample["max_abs_param_diff"]) != largest:
                where = ["cases", index, "samples", turn, "max_abs_param_diff"]
                yield _at(where, "it is not the largest of adam's, mu_a's and mu_b's")
        if case["status"] == "failed" and receipt["verdict"] == "clean":
            yield _at(["verdict"], f"it is 'clean', but cases[{index}] failed")


def _at(path: Any, problem: str) -> str:
    """A place like cases[3].samples[0].step, and what is wrong there."""
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return f"{place.removeprefix('.') or 'the receipt'}: {problem}"


def _in_words(error: ValidationError) -> str:
    found: Any = error.instance
    wanted: Any = error.validator_value
    value = reprlib.repr(found)
    schema: Mapping[str, Any] = error.schema if isinstance(error.schema, Mapping) else {}
    match error.validator:
        case "type" | "minimum" | "pattern" if "description" in schema:
            return f"it is {value}, not {schema['description']}"
        case "required":
            missing = [key for key in wanted if key not in found]
            return f"{missing[0]!r} is missing"
        case "additionalProperties":
            known, patterns = (schema.get(key, {}) for key in ("properties", "patternProperties"))
            unknown = [key for key in found if key not in known]
            unknown = [key for key in unknown if not any(re.search(p, key) for p in patterns)]
            return f"{unknown[0]!r} is not known here"
        case "const":
            note = f" (samestep {__version__} reads no other)" if error.path[-1] == "format" else ""
            return f"it is {value}, not {wanted!r}{note}"
        case "enum":
            return f"it is {value}, not one of {', '.join(map(repr, wanted))}"
        case "type":
            kinds = [wanted] if isinstance(wanted, str) else wanted
            return f"it is {value}, not of type {' or '.join(kinds)}"
        case "minimum":
            return f"it is {value}, below {wanted}"
        case "exclusiveMinimum":
            return f"it is {value}, not above {wanted}"
        case _:
            return error.message
