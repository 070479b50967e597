"""Bugs that leave the collectives alone and change what is computed."""

from typing import Any

import torch
from torch import Tensor

import samestep
from samestep.groups import param_groups
from samestep.optimizer import group_optimizer
from samestep.optimizer import step as rule_optimizer
from samestep.rules import muon
from samestep.rules.muon import MuonRule
from samestep.stress.mutants.mutant import RANDOM, mutant
from samestep.update import plain as apply


@mutant(
    "fused QKV is orthogonalized as one matrix, which mixes queries, keys and values",
    expected="promise",
    scenario="fused_qkv_gqa",
)
def fused_as_one_matrix() -> list[Any]:
    """`split_sizes` is ignored."""

    def blocks(original: Any, shape: Any, split_sizes: Any = None, flatten: bool = False) -> Any:
        return original(shape, None, flatten)

    return [(param_groups, "blocks_of", blocks)]


@mutant(
    "split sizes are rescaled in proportion instead of being cut where Q, K and V are",
    expected="promise",
    scenario="fused_qkv_mqa",
)
def proportional_split_sizes() -> list[Any]:
    """Thirds."""

    def blocks(original: Any, shape: Any, split_sizes: Any = None, flatten: bool = False) -> Any:
        if split_sizes is not None:
            split_sizes = (shape[0] // 3,) * 3
        return original(shape, split_sizes, flatten)

    return [(param_groups, "blocks_of", blocks)]


@mutant(
    "the scale of a fused matrix is used for each of its blocks",
    expected="promise",
    scenario="fused_qkv_gqa",
)
def scale_of_the_fused_matrix() -> list[Any]:
    """The learning rate of a block depends on its own shape."""
    fused_rows: list[int] = []

    def update_group(original: Any, self: Any, index: int, operands: Any) -> None:
        fused_rows[:] = [sum(self.param_groups[index].get("split_sizes") or ())]
        original(self, index, operands)

    def factor(original: Any, rows: int, cols: int, adjust_lr: Any) -> float:
        return float(original(fused_rows[0] or rows, cols, adjust_lr))

    return [
        (rule_optimizer.RuleOptimizer, "_update_group", update_group),
        (muon, "lr_factor", factor),
    ]


@mutant(
    "a stack of experts is flattened into one matrix",
    expected="reference",
    scenario="fixed_capacity",
)
def experts_flattened() -> list[Any]:
    """(3, 10, 8) as (3, 80)."""

    def blocks(original: Any, shape: Any, split_sizes: Any = None, flatten: bool = False) -> Any:
        return original(shape, split_sizes, True)

    return [(param_groups, "blocks_of", blocks)]


@mutant(
    "each rank orthogonalizes the rows it would hold of a matrix, instead of the whole",
    expected="reference",
    scenario=RANDOM,
)
def local_shards_orthogonalized() -> list[Any]:
    """Halves of rows are blocks."""

    def blocks(original: Any, shape: Any, split_sizes: Any = None, flatten: bool = False) -> Any:
        return original(shape, (shape[0] // 2,) * 2, flatten)

    return [(param_groups, "blocks_of", blocks)]


@mutant(
    "variance reduction takes its norms per shard, so that it drifts with the world size",
    expected="reference",
    scenario="normuon_cautious",
)
def variance_per_shard() -> list[Any]:
    """Halves of the rows of tall blocks keep a norm of their own."""

    def reduce(original: Any, direction: Tensor, variance: Tensor, beta2: Tensor) -> Any:
        rows, cols = direction.shape[-2:]
        if rows < cols:
            return original(direction, variance, beta2)
        halves = zip(direction.chunk(2, -2), variance.chunk(2, -2), strict=True)
        parts = [original(half, part, beta2) for half, part in halves]
        return tuple(torch.cat(each, -2) for each in zip(*parts, strict=True))

    return [(muon, "reduce_variance", reduce)]


@mutant(
    "the cautious gate reads the sign of the raw gradient instead of the parameter's",
    expected="reference",
    scenario="normuon_cautious",
)
def gate_on_raw_gradient() -> list[Any]:
    """Known to end in NaN in deep runs."""
    grads: list[Tensor] = []

    def update(original: Any, self: MuonRule, param: Tensor, grad: Tensor, *args: Any) -> Any:
        grads[:] = [grad]
        return original(self, param, grad, *args)

    def decay(original: Any, param: Tensor, direction: Tensor, rate: Any, *, cautious: bool) -> Any:
        return param - param * rate * (direction * grads[0] >= 0)

    return [(MuonRule, "update", update), (muon, "decay_weights", decay)]


@mutant(
    "blocks are stacked by their number of elements, which mixes a matrix with its transpose",
    expected="reference",
    scenario="megatron_conditional",
    layout="none",
)
def stacked_by_size() -> list[Any]:
    """(32, 16) and (16, 32) go together."""

    def stacks(original: Any, blocks: Any, *_: Any) -> Any:
        by_size: dict[int, list[Any]] = {}
        for block in blocks:
            alike = by_size.setdefault(block.param.numel(), [])
            shape = alike[0].param.shape if alike else block.param.shape
            state = {key: tensor.view(shape) for key, tensor in block.state.items()}
            param, grad = block.param.view(shape), block.grad.view(shape)
            alike.append(block._replace(param=param, grad=grad, state=state))
        return list(by_size.values())

    return [(rule_optimizer, "stacks", stacks)]


@mutant(
    "learning rate and momentum stay what they were in the first step",
    expected="reference",
    scenario="schedules",
)
def schedule_not_seen() -> list[Any]:
    """Cached scalars are not refilled."""

    def refill(original: Any, self: apply.StepScalars, group: int, device: Any, values: Any) -> Any:
        known = self._tensors.get((group, device))
        return known if known else original(self, group, device, values)

    return [(apply.StepScalars, "refill", refill)]


@mutant(
    "momentum is lost when a run is resumed",
    expected="state",
    scenario="resume",
    steps=14,
)
def momentum_lost_at_resume() -> list[Any]:
    """Loading keeps the zeros of the new optimizer."""

    def load(original: Any, optimizer: Any, *args: Any) -> None:
        original(optimizer, *args)
        _forget_momentum(optimizer)

    return [(group_optimizer, "load_state", load)]


def _forget_momentum(optimizer: Any) -> None:
    for state in optimizer.state.values():
        for key in ("momentum_buffer", "exp_avg"):
            if key in state:
                state[key].zero_()


@mutant(
    "a checkpoint is loaded without its momentum",
    expected="state",
    scenario="resume_midrun",
    steps=10,
)
def momentum_lost_at_load() -> list[Any]:
    """The same bug on the way of `samestep.load`."""

    def load(original: Any, path: Any, model: Any, optimizer: Any) -> Any:
        loaded = original(path, model, optimizer)
        _forget_momentum(optimizer)
        return loaded

    return [(samestep, "load", load)]


@mutant(
    "options that were set while training are lost when a run is resumed",
    expected="reference",
    scenario="resume",
)
def options_lost_at_resume() -> list[Any]:
    """Learning rate and momentum are again those that the optimizer was built with."""

    def load(original: Any, optimizer: Any, *args: Any) -> None:
        built = [dict(group) for group in optimizer.param_groups]
        original(optimizer, *args)
        for group, before in zip(optimizer.param_groups, built, strict=True):
            group.update({key: before[key] for key in ("lr", "momentum", "betas") if key in before})

    return [(group_optimizer, "load_state", load)]
