"""The stages of a rule, one after the other, where blocks are whole."""

from functools import cache
from typing import TypeGuard

from torch import Tensor

from samestep.rules.exact_sums import sums_of_blocks
from samestep.rules.rule import (
    Options,
    OwnedStateRule,
    Rule,
    Shape,
    StagedRule,
    SummingRule,
    Tensors,
    Update,
)


def staged_update(
    rule: StagedRule,
    param: Tensor,
    grad: Tensor,
    state: Tensors,
    scalars: Tensors,
    options: Options,
) -> Update:
    """The `update` of a rule with stages: one step on a stack of blocks, (B, rows, cols)."""
    prepared, kept = rule.prepare(grad, state, scalars, options)
    direction, of_blocks = rule.transform(prepared, state, scalars, options)
    new_param = finished(
        rule, param, direction, (param.shape[-2], param.shape[-1]), scalars, options
    )
    return Update(new_param, {**kept, **of_blocks}, lambda: direction)


def finished(
    rule: StagedRule,
    param: Tensor,
    direction: Tensor,
    block_shape: Shape,
    scalars: Tensors,
    options: Options,
) -> Tensor:
    """The last stage on a stack of whole blocks, with the sums that it needs."""
    if is_summing(rule):
        terms = rule.summands(param, direction, block_shape, scalars, options)
        scalars = {**scalars, **sums_of_blocks(terms)}
    return rule.finish(param, direction, block_shape, scalars, options)


@cache
def follows(kind: type, protocol: type) -> bool:
    """Whether a class has the members of a protocol: asking takes as long as a small update."""
    return issubclass(kind, protocol)


def is_staged(rule: Rule | StagedRule) -> TypeGuard[StagedRule]:
    """Whether a rule can be run on parts of a block, but for one stage."""
    return follows(type(rule), StagedRule)


def is_summing(rule: Rule | StagedRule) -> TypeGuard[SummingRule]:
    """Whether the last stage of a rule needs sums over whole blocks."""
    return hasattr(rule, "summands")  # as torch.compile can trace it, where a cache is warned of


def owned_state(rule: Rule, options: Options) -> frozenset[str]:
    """The state of a rule that the owner of a block alone has."""
    if follows(type(rule), OwnedStateRule):
        assert isinstance(rule, OwnedStateRule)
        return frozenset(rule.owned_state(options))
    return frozenset()
