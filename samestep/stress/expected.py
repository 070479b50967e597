"""What every layout is held against: the reference's run of a scenario, with its samples."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import samestep
from samestep.stress.models import named_params
from samestep.stress.rank import SCALER, Sample
from samestep.stress.reference import Reference
from samestep.stress.scenario import (
    CLOSED_LOOP_STEPS,
    AddGroup,
    Edit,
    Gradients,
    Scenario,
    SetOptions,
    Train,
)
from samestep.stress.training import rank_gradients, without_onednn

PRESENCE_STEPS = 64  # how many the presence map shows


@dataclass
class Expected:
    """The reference's run.

    samples: by number of steps taken.
    families: per parameter "adam", "mu_a" (the first group of Muon's) or "mu_b" (all others).
    presence: per parameter and step the number of ranks that have a gradient.
    gradients: [step][rank], where the scenario is to be replayed.
    """

    samples: dict[int, Sample] = field(default_factory=dict)
    families: dict[str, str] = field(default_factory=dict)
    presence: dict[str, list[int]] = field(default_factory=dict)
    gradients: list[list[Gradients]] = field(default_factory=list)


def sampled_steps(steps: int, every: int) -> list[int]:
    """Numbers of steps taken at which samples are due: every so many, and at the end."""
    return sorted({*range(every, steps + 1, every), steps})


def due_steps(scenario: Scenario, steps: int, every: int) -> set[int]:
    """When samples are due; of a closed loop also where it is last held against the reference."""
    last = {min(steps, CLOSED_LOOP_STEPS)} if scenario.loop == "closed" else set()
    return last | set(sampled_steps(steps, every))


def expected_run(
    scenario: Scenario, due: Collection[int], progress: Callable[[int], None] = lambda step: None
) -> Expected:
    """Run a scenario in float64, with the gradients of all ranks at the reference's parameters.

    It goes on until the last step after which a sample is due.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in ranks; more would only slow down what is so small
    try:
        with without_onednn():
            return _run(scenario, due, progress)
    finally:
        torch.set_num_threads(threads)


def _run(scenario: Scenario, due: Collection[int], progress: Callable[[int], None]) -> Expected:
    model = scenario.model()
    options = scenario.options()
    # Alone on purpose, also where torchrun has started more: gradients are averaged by hand.
    optimizer = samestep.MuonAdamW(scenario.model(), grads="reduced", **options)
    reference = Reference(named_params(model), optimizer.param_groups)
    limit = float("inf") if scenario.scales else options.get("max_grad_norm")
    expected = Expected()
    scale = _Scale()
    for step in range(max(due)):
        _apply_events(scenario, step, model, reference)
        by_rank = _gradients(scenario, model, step)
        if scenario.loop == "recorded":
            expected.gradients.append(by_rank)
        names = [name for group in reference.groups for name in group["param_names"]]
        grads = {name: [rank.get(name) for rank in by_rank] for name in names}
        if step < PRESENCE_STEPS:
            for name, of_ranks in grads.items():
                row = expected.presence.setdefault(name, [0] * step)
                row.append(sum(grad is not None for grad in of_ranks))
        taken = reference.step(grads, divisor=scenario.world, max_grad_norm=limit)
        scale.update(taken)
        _copy_into(model, reference)
        if step + 1 in due:
            state = {name: dict(entries) for name, entries in reference.state.items()}
            if scenario.scales:
                state[SCALER] = {"scale": torch.tensor(scale.value, dtype=torch.float64)}
            expected.samples[step + 1] = Sample(step + 1, dict(reference.params), state)
        if (step + 1) % 10 == 0 or step + 1 in due:
            progress(step + 1)
    expected.families = _families(reference.groups)
    return expected


class _Scale:
    """What a GradScaler is to do: halved by every step that was skipped, doubled by five taken."""

    def __init__(self) -> None:
        self.value, self._taken = 2.0**10, 0

    def update(self, taken: bool) -> None:
        self._taken = self._taken + 1 if taken else 0
        if not taken:
            self.value /= 2
        elif self._taken == 5:
            self.value, self._taken = self.value * 2, 0


def _gradients(scenario: Scenario, model: nn.Module, step: int) -> list[Gradients]:
    """Per rank the sum of its micro-batches' gradients."""
    by_rank = []
    for rank in range(scenario.world):
        total: Gradients = {}
        for grads in rank_gradients(scenario, model, step, rank):
            for name, grad in grads.items():
                total[name] = total[name] + grad if name in total else grad
        by_rank.append(total)
    return by_rank


def _apply_events(scenario: Scenario, step: int, model: nn.Module, reference: Reference) -> None:
    """Resuming changes nothing here."""
    params = named_params(model)
    for event in scenario.events(step):
        match event:
            case SetOptions(rule, options):
                for group in reference.groups:
                    if group["rule"] == rule:
                        group.update(options)
            case Train(names, wanted):
                for name in names:
                    params[name].requires_grad_(wanted)
            case AddGroup(names, options):
                for name in names:
                    params[name].requires_grad_(True)
                given = scenario.options()
                shared: dict[str, Any] = {
                    key: given[key] for key in ("lr", "weight_decay") if key in given
                }
                adamw = {"betas": (0.9, 0.95)}  # MuonAdamW's own default, and its decay of 0.1
                group = {"weight_decay": 0.1, **adamw, **shared, **options}
                reference.add_group({**group, "param_names": names})
            case Edit(name, value):
                reference.set_param(name, value)
    _copy_into(model, reference)


def _copy_into(model: nn.Module, reference: Reference) -> None:
    with torch.no_grad():
        for name, param in named_params(model).items():
            param.copy_(reference.params[name])


def _families(groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    families = {}
    first_muon = next((g for g in groups if g["rule"] == "muon"), None)
    for group in groups:
        family = "adam" if group["rule"] == "adamw" else "mu_a" if group is first_muon else "mu_b"
        families.update(dict.fromkeys(group["param_names"], family))
    return families
