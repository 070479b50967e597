"""Bugs that change what is computed: blocks, decay, state, the joint norm, skipped steps."""

from typing import Any

import torch
from torch import Tensor

import samestep
from samestep.checkpoint import state_conversion
from samestep.comm.collectives import Pending
from samestep.groups import param_groups
from samestep.lab.stress.mutants.mutant import RANDOM, mutant
from samestep.lab.stress.scenarios.recipes import SMALL_TOO
from samestep.optimizer import rule_runner, saved_state, step
from samestep.optimizer.grad_scaler import GradScaler
from samestep.optimizer.rule_runner import ClipDecision, RuleRunner
from samestep.rules import muon
from samestep.rules.muon import MuonRule
from samestep.rules.state import GlobalElementIndex
from samestep.shards.replicated.reduction import BucketReductions
from samestep.update import plain as apply


@mutant("promise", "fused_qkv_gqa", replaces=(param_groups, "blocks_of"))
def fused_as_one_matrix(original: Any, shape: Any, sizes: Any, *how: bool) -> Any:
    """fused QKV is orthogonalized as one matrix, which mixes queries, keys and values"""
    return original(shape, None, *how)


@mutant("promise", "fused_qkv_mqa", replaces=(param_groups, "blocks_of"))
def proportional_split_sizes(original: Any, shape: Any, sizes: Any, *how: bool) -> Any:
    """split sizes are rescaled in proportion instead of being cut where Q, K and V are"""
    return original(shape, None if sizes is None else (shape[0] // 3,) * 3, *how)


@mutant("promise", "fused_qkv_groups", replaces=(param_groups, "blocks_of"))
def groups_cut_as_if_row_after_row(original: Any, shape: Any, sizes: Any, *how: bool) -> Any:
    """rows of every group in turn are cut as if all of a part were together, across heads"""
    return original(shape, (18, 6, 6) if isinstance(sizes, str) else sizes, *how)


@mutant("promise", "fused_qkv_gqa")
def scale_of_the_fused_matrix() -> list[Any]:
    """the scale of a fused matrix is used for each of its blocks"""
    # The learning rate of a block depends on its own shape.
    fused_rows: list[int] = []

    def math(original: Any, self: Any, index: int, device: Any) -> Any:
        fused_rows[:] = [sum(self._groups[index].get("split_sizes") or ())]
        return original(self, index, device)

    def factor(original: Any, rows: int, cols: int, *asked: Any) -> float:
        return float(original(fused_rows[0] or rows, cols, *asked))

    return [
        (RuleRunner, "math", math),
        (muon, "lr_factor", factor),
    ]


@mutant("reference", "fixed_capacity", replaces=(param_groups, "blocks_of"))
def experts_flattened(original: Any, shape: Any, sizes: Any, flatten: bool, *how: bool) -> Any:
    """a stack of experts is flattened into one matrix"""
    # (3, 10, 8) as (3, 80).
    return original(shape, sizes, True, *how)


@mutant("reference", RANDOM, replaces=(param_groups, "blocks_of"))
def local_shards_orthogonalized(original: Any, shape: Any, sizes: Any, *how: bool) -> Any:
    """each rank orthogonalizes the rows it would hold of a matrix, instead of the whole"""
    return original(shape, (shape[0] // 2,) * 2, *how)


@mutant("reference", "normuon_cautious", replaces=(muon, "reduce_variance"))
def variance_per_shard(
    original: Any, direction: Tensor, variance: Tensor, beta2: Tensor, **options: Any
) -> Any:
    """variance reduction takes its norms per shard, so that it drifts with the world size"""
    # Halves of the rows of tall blocks keep a norm of their own.
    rows, cols = direction.shape[-2:]
    if rows < cols:
        return original(direction, variance, beta2, **options)
    halves = zip(direction.chunk(2, -2), variance.chunk(2, -2), strict=True)
    parts = [original(half, part, beta2, **options) for half, part in halves]
    return tuple(torch.cat(each, -2) for each in zip(*parts, strict=True))


@mutant("reference", "normuon_cautious")
def gate_on_raw_gradient() -> list[Any]:
    """the cautious gate reads the sign of the raw gradient instead of the parameter's"""
    # Told to end in NaN in deep runs; in 36 small trainings of 24 layers none was seen.
    grads: list[Tensor] = []

    def update(original: Any, self: MuonRule, param: Tensor, grad: Tensor, *args: Any) -> Any:
        grads[:] = [grad]
        return original(self, param, grad, *args)

    def decay(original: Any, param: Tensor, direction: Tensor, rate: Any, *, cautious: bool) -> Any:
        return param - param * rate * (direction * grads[0] >= 0)

    return [(MuonRule, "update", update), (muon, "decay_weights", decay)]


@mutant("reference", "megatron_conditional", layout="none", replaces=(rule_runner, "stacks"))
def stacked_by_size(original: Any, blocks: Any, *_: Any) -> Any:
    """blocks are stacked by their number of elements, which mixes a matrix with its transpose"""
    # (32, 16) and (16, 32) go together.
    by_size: dict[int, list[Any]] = {}
    for block in blocks:
        alike = by_size.setdefault(block.param.numel(), [])
        shape = alike[0].param.shape if alike else block.param.shape
        state = {key: tensor.view(shape) for key, tensor in block.state.items()}
        param, grad = block.param.view(shape), block.grad.view(shape)
        alike.append(block._replace(param=param, grad=grad, state=state))
    return list(by_size.values())


@mutant("reference", "schedules", replaces=(apply.StepScalars, "refill"))
def schedule_not_seen(
    original: Any, self: apply.StepScalars, group: int, device: Any, values: Any
) -> Any:
    """learning rate and momentum stay what they were in the first step"""
    known = self._tensors.get((group, device))
    return known if known else original(self, group, device, values)


@mutant("state", "resume", steps=14, replaces=(saved_state, "load_state"))
def momentum_lost_at_resume(original: Any, optimizer: Any, *args: Any) -> None:
    """momentum is lost when a run is resumed"""
    # Loading keeps the zeros of the new optimizer.
    original(optimizer, *args)
    _forget_momentum(optimizer)


def _forget_momentum(optimizer: Any) -> None:
    for state in optimizer.state.values():
        for key in ("momentum_buffer", "exp_avg"):
            if key in state:
                state[key].zero_()


@mutant("state", "resume_midrun", steps=10, replaces=(samestep, "load"))
def momentum_lost_at_load(original: Any, path: Any, model: Any, optimizer: Any) -> Any:
    """a checkpoint is loaded without its momentum"""
    loaded = original(path, model, optimizer)
    _forget_momentum(optimizer)
    return loaded


@mutant("reference", "resume", replaces=(saved_state, "load_state"))
def options_lost_at_resume(original: Any, optimizer: Any, *args: Any) -> None:
    """options that were set while training are lost when a run is resumed"""
    # Learning rate and momentum are again those that the optimizer was built with.
    built = [dict(group) for group in optimizer.param_groups]
    original(optimizer, *args)
    for group, before in zip(optimizer.param_groups, built, strict=True):
        group.update({key: before[key] for key in ("lr", "momentum", "betas") if key in before})


@mutant("state", "clipped", replaces=(BucketReductions, "end_round"))
def clipped_before_averaging(original: Any, self: BucketReductions, problem: Any) -> None:
    """each rank clips by the norm of its own gradients, before they are averaged"""
    # Ranks with large gradients count for less.
    torch.nn.utils.clip_grad_norm_(self.local.params, 1.0)
    original(self, problem)


@mutant("state", "not_finite", replaces=(step, "total"))
def overflow_not_shared(original: Any, name: str, values: Tensor, group: Any) -> Pending[Tensor]:
    """each rank decides by itself whether a step has overflowed"""
    # Owners of the bad values skip, the others do not.
    return Pending(None, (values,), lambda: values)


@mutant("reference", "not_finite", replaces=(step.StepRunner, "_clip"))
def overflow_taken(original: Any, self: Any, operation: Any) -> None:
    """a step with inf or NaN is taken, and momentum never recovers"""
    original(self, operation)
    self.rules.decide(ClipDecision())


@mutant("state", "clipped", replaces=(step, "square_sum"))
def small_left_out_of_the_norm(original: Any, grads: Any) -> Any:
    """small parameters, which every rank updates, are left out of the joint norm"""
    # Counted by all they would count several times, so they are counted by none.
    return original([g for g in grads if g.numel() >= SMALL_TOO])


@mutant("state", "overflow_scaler", replaces=(GradScaler, "step"))
def scale_never_backs_off(
    original: Any, self: GradScaler, optimizer: Any, *args: Any, **kwargs: Any
) -> None:
    """the scale of a GradScaler grows, and is never reduced after an overflow"""
    # The step is skipped, but the scaler does not hear of it.
    original(self, optimizer, *args, **kwargs)
    found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    for device in found:
        found[device] = torch.zeros_like(found[device])


# --- state in fewer bits: bits that belong to no element, halves that are lost -----------------


@mutant("layouts", "small_state_8bit", steps=3, replaces=(GlobalElementIndex, "origin"))
def random_bits_of_the_place_on_a_rank(original: Any, self: GlobalElementIndex) -> Any:
    """moments are rounded by bits of an element's place on its rank, so that layouts differ"""
    here = torch.empty(self.elements.shape, device="meta")
    return original(self)._replace(offset=0, strides=here.stride())


@mutant("layouts", "small_state_remainder", steps=6, replaces=(state_conversion, "_rest"))
def remainders_lost_at_load(original: Any, remainder: Any) -> Any:
    """a checkpoint is loaded without what master copies have beyond their parameters"""
    return remainder.rest.zero_
