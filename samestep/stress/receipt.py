"""The record of a run: what was asked, what ran, what was measured, and the verdict."""

import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from samestep.stress.campaign import CaseResult
from samestep.stress.judge import LIMITS, STATE_LIMIT, Distance, SampleVerdict
from samestep.stress.layouts import layout_named
from samestep.stress.mutation import MutantResult
from samestep.stress.scenarios import scenario_named
from samestep.version import __version__

KIND = "samestep stress"
FORMAT = 1
ENVIRONMENT = ("CUDA_", "GLOO_", "MKL_", "NCCL_", "OMP_", "PYTORCH_", "SAMESTEP_", "TORCH_")


def receipt(
    *,
    asked: Mapping[str, Any],
    ran: Mapping[str, Any],
    cases: Sequence[Mapping[str, Any]],
    mutants: Sequence[MutantResult],
    presence: Mapping[str, Mapping[str, Sequence[int]]],
    interrupted: bool,
) -> dict[str, Any]:
    """Everything, for JSON; `receipt.schema.json` describes it. `cases` are from `case_entry`."""
    names = dict.fromkeys(case["scenario"] for case in cases)
    layouts = dict.fromkeys(case["layout"] for case in cases)
    return {
        "kind": KIND,
        "format": FORMAT,
        "verdict": verdict_of(cases, mutants, interrupted),
        "asked": dict(asked),
        "ran": dict(ran),
        "thresholds": {**LIMITS, "state": STATE_LIMIT},
        "scenarios": {name: _scenario(name, presence.get(name, {})) for name in names},
        "layouts": {name: {"story": layout_named(name).story} for name in layouts},
        "cases": list(cases),
        "mutants": [_mutant(result) for result in mutants],
    }


def verdict_of(
    cases: Sequence[Mapping[str, Any]], mutants: Sequence[MutantResult], interrupted: bool
) -> str:
    """`clean` only if everything that was asked for ran and passed."""
    failed = any(case["status"] == "failed" for case in cases)
    if failed or any(not result.caught for result in mutants):
        return "failed"
    return "interrupted" if interrupted else "clean"


def machine() -> dict[str, Any]:
    """Where it ran, and with what."""
    relevant = {k: v for k, v in sorted(os.environ.items()) if k.startswith(ENVIRONMENT)}
    return {
        "versions": {
            "samestep": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "environment": relevant,
    }


def _scenario(name: str, presence: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    kind = scenario_named(name)
    rows = [list(row) for row in presence.values()]
    shown = {"params": list(presence), "ranks_with_gradient": rows}
    return {"story": kind.story, "loop": kind.loop, "presence": shown}


def case_entry(result: CaseResult) -> dict[str, Any]:
    """What the receipt has of a case."""
    case, first = result.case, result.endings.get(0)
    failed = result.status == "failed"
    totals = {} if first is None else first.totals
    steps = max(1, 0 if first is None else first.step)
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
        "fingerprint": "" if first is None else first.fingerprint,
        "schedule": [] if first is None else list(first.schedule),
        "collectives": totals,
        "collectives_per_step": sum(total["calls"] for total in totals.values()) / steps,
        "bytes_per_step": sum(total["sent"] for total in totals.values()) / steps,
        "seconds": result.seconds,
        "positions": {str(r): op for r, op in result.positions.items()} if failed else {},
        "flights": {str(r): e.flights for r, e in result.endings.items()} if failed else {},
    }


def _sample(sample: SampleVerdict) -> dict[str, Any]:
    replicas = sample.replicas
    return {
        "step": sample.step,
        "max_adam_abs_diff": _number(replicas.adam),
        "max_mu_a_abs_diff": _number(replicas.mu_a),
        "max_mu_b_abs_diff": _number(replicas.mu_b),
        "max_abs_param_diff": _number(replicas.params),
        "max_abs_state_diff": _number(replicas.state),
        "reference": _distance(sample.reference),
        "layouts": _distance(sample.layouts),
        "collectives": sample.collectives,
        "same_collectives": sample.same_collectives,
    }


def _distance(distance: Distance | None) -> dict[str, Any] | None:
    return None if distance is None else {k: _number(v) for k, v in asdict(distance).items()}


def _number(value: float | None) -> float | str | None:
    """JSON has no infinity."""
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
        "seconds": result.seconds,
    }
