"""Builds and checks the receipt of a run: request, code, measurements and verdict."""

import json
import math
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from typing import Any

from jsonschema import Draft202012Validator, ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import extend

from samestep.lab.stress.campaign import CaseResult, MutantResult
from samestep.lab.stress.judge import LIMITS, STATE_LIMIT, Distance, SampleVerdict
from samestep.lab.stress.layouts import EVERY_LAYOUT
from samestep.lab.stress.rank import Ending
from samestep.lab.stress.report.numbers import number
from samestep.lab.stress.scenarios import EVERY_SCENARIO
from samestep.version import __version__

KIND = "samestep stress"
FORMAT = 1


def receipt(
    asked: Mapping[str, Any],
    ran: Mapping[str, Any],
    cases: Sequence[Mapping[str, Any]],
    mutants: Sequence[MutantResult],
    presence: Mapping[str, Mapping[str, Sequence[int]]],
    *,
    interrupted: bool,
) -> dict[str, Any]:
    """The receipt as JSON by `receipt.schema.json`; `cases` come from `case_entry`."""
    failed = any(case["status"] == "failed" for case in cases)
    failed = failed or any(not result.caught for result in mutants)
    names = dict.fromkeys(case["scenario"] for case in cases)
    layouts = dict.fromkeys(case["layout"] for case in cases)
    return {
        "kind": KIND,
        "format": FORMAT,
        # Clean only if everything that was asked for ran and passed.
        "verdict": "failed" if failed else "interrupted" if interrupted else "clean",
        "asked": dict(asked),
        "ran": dict(ran),
        "thresholds": {**LIMITS, "state": STATE_LIMIT},
        "scenarios": {name: _scenario(name, presence.get(name, {})) for name in names},
        "layouts": {name: {"story": EVERY_LAYOUT[name].story} for name in layouts},
        "cases": list(cases),
        "mutants": [_mutant(result) for result in mutants],
    }


def _scenario(name: str, presence: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    kind = EVERY_SCENARIO[name]
    rows = [list(row) for row in presence.values()]
    shown = {"params": list(presence), "ranks_with_gradient": rows}
    return {"story": kind.story, "loop": kind.loop, "presence": shown}


def case_entry(result: CaseResult) -> dict[str, Any]:
    case, first = result.case, result.endings.get(0) or Ending(0)
    failed = result.status == "failed"
    totals, steps = first.totals, max(1, first.step)
    return {
        "scenario": case.scenario,
        "layout": case.layout,
        "world_size": case.world,
        "reduction": case.reduction,
        "seed": case.seed,
        "steps": case.steps,
        "sample_every": case.sample_every,
        "steps_taken": min((end.step for end in result.endings.values()), default=0),
        "status": result.status,
        "reason": result.reason,
        "findings": [asdict(finding) for finding in result.findings],
        "samples": [_sample(sample) for sample in result.samples],
        "fingerprint": first.fingerprint,
        "schedule": list(first.schedule),
        "collectives": totals,
        "collectives_per_step": sum(total["calls"] for total in totals.values()) / steps,
        "bytes_per_step": sum(total["sent"] for total in totals.values()) / steps,
        "seconds": result.seconds,
        "positions": {str(r): op for r, op in result.positions.items()} if failed else {},
        "flights": {str(r): e.flights for r, e in result.endings.items()} if failed else {},
        **({"program": first.program} if first.program else {}),
    }


def _sample(sample: SampleVerdict) -> dict[str, Any]:
    replicas = sample.replicas
    return {
        "step": sample.step,
        **{f"max_{family}_abs_diff": _number(getattr(replicas, family)) for family in LIMITS},
        "max_abs_param_diff": _number(replicas.params),
        "max_abs_state_diff": _number(replicas.state),
        "reference": _distance(sample.reference),
        "layouts": _distance(sample.layouts),
        "collectives": sample.collectives,
        "same_collectives": sample.same_collectives,
        "bits": sample.bits,
    }


def _distance(distance: Distance | None) -> dict[str, Any] | None:
    return None if distance is None else {k: _number(v) for k, v in asdict(distance).items()}


def _number(value: float | None) -> float | str | None:
    """A number for JSON, which has no infinity."""
    return "infinite" if value is not None and math.isinf(value) else value


def _mutant(result: MutantResult) -> dict[str, Any]:
    mutant, first = result.mutant, result.first
    return {
        "name": mutant.name,
        "story": mutant.story,
        "scenario": mutant.scenario,
        "layout": mutant.layout,
        "world_size": mutant.world,
        "expected": mutant.expected,
        "caught": result.caught,
        "by": result.checks,
        "step": None if first is None else first.step,
        "message": "" if first is None else first.message,
        "unpatched": result.unpatched,
        **({} if mutant.delays is None else {"delays": list(mutant.delays.where)}),
        "seconds": result.seconds,
    }


# --- whether one has the form that readers may rely on -------------------------------------------


def check_receipt(receipt: Mapping[str, Any]) -> None:
    """Raise ValueError with the place of the first problem if a receipt is invalid."""
    error = next(_validator().iter_errors(receipt), None)
    if error is not None:
        raise ValueError(_at(error.absolute_path, _in_words(error)))
    for problem in _contradictions(receipt):
        raise ValueError(problem)


@cache
def _validator() -> Validator:
    """A validator of the schema, in which numbers are finite and tuples are arrays."""
    schema = json.loads(files("samestep.lab.stress").joinpath("receipt.schema.json").read_bytes())
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
    """Problems that the schema allows and no run can produce."""
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
    """A message with a place such as cases[3].samples[0].step."""
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
