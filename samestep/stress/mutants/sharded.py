"""Bugs of DTensors: who holds what, and what zeros stand for."""

from typing import Any

import torch
from torch import Tensor

from samestep.fsdp.participation import Unit
from samestep.placements.parts import sharded
from samestep.placements.parts.gradients import Mark
from samestep.placements.parts.sharded import ShardedParameters
from samestep.rules.muon import MuonRule
from samestep.stress.mutants.mutant import RANDOM, mutant


@mutant(
    "zeros that FSDP2 was given for an unused parameter count as its gradient",
    expected="reference",
    scenario=RANDOM,
    layout="fsdp2_parallel",
)
def filled_zeros_are_used() -> list[Any]:
    """Whatever FSDP2 hands over is present."""

    def has_gradient(original: Any, param: Tensor) -> bool:
        return param.grad is not None

    return [(sharded, "has_gradient", has_gradient)]


@mutant(
    "FSDP2 reduces only the gradients that a rank has, which are others on each rank",
    expected="hang",
    scenario="conditional_compute",
    layout="fsdp2_parallel",
)
def unused_are_left_out() -> list[Any]:
    """No zeros for what a rank has not used."""

    def fill(original: Any, self: Unit) -> None:
        self.waits = False

    return [(Unit, "fill", fill)]


@mutant(
    "of several micro-batches only the last one tells which parameters were used",
    expected="reference",
    scenario="uneven_accumulation",
    layout="fsdp2_parallel",
)
def use_in_the_last_micro_batch_only() -> list[Any]:
    """Every forward starts afresh."""

    def renew(original: Any, self: Mark) -> None:
        self.used = False

    return [(Mark, "renew", renew)]


@mutant(
    "each rank orthogonalizes the rows that it holds of a DTensor, instead of the whole",
    expected="reference",
    scenario=RANDOM,
    layout="fsdp2_gather",
)
def shards_orthogonalized() -> list[Any]:
    """Cut as FSDP2 cuts for two ranks."""

    def transform(original: Any, self: MuonRule, direction: Tensor, *rest: Any) -> Any:
        parts = [original(self, rows, *rest) for rows in direction.chunk(2, -2)]
        return torch.cat([part for part, _ in parts], -2), parts[0][1]

    return [(MuonRule, "transform", transform)]


@mutant(
    "gradients of DTensors, which come averaged, are divided by the number of ranks again",
    expected="state",
    scenario=RANDOM,
    layout="fsdp2_parallel",
)
def reduced_gradients_divided_again() -> list[Any]:
    """Invisible in Muon's parameters, not in its momentum."""

    def grad(original: Any, self: ShardedParameters, index: int) -> Any:
        return original(self, index) / self.group.size

    return [(ShardedParameters, "_grad", grad)]


@mutant(
    "copies of a DTensor are all counted in the joint norm",
    expected="state",
    scenario="clipped",
    layout="ep_fsdp2",
)
def copies_counted_in_the_norm() -> list[Any]:
    """Every rank answers for what it holds."""

    def answers_for(original: Any, self: ShardedParameters, index: int) -> bool:
        return True

    return [(ShardedParameters, "_answers_for", answers_for)]
