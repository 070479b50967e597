"""A step over the devices of one XLA program: state is sharded, each block whole on one device.

This module calls no collectives. Tensors get sharding annotations (`tiling.py`), and XLA's
partitioner inserts the collectives: gradients are global before the step, state stays sharded, the
momentum of Muon's blocks is gathered block by block, and updates follow the parameters' sharding.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from samestep.rules.rule import Rule, finished, is_staged
from samestep.rules.state import State
from samestep.update.plain import Result, Scalars, direction_squares, run_rule
from samestep.xla.tiling import Tiling, annotate, tiling_of, whole_on_all


def run_spmd_rule(
    rule: Rule,
    param: Tensor,
    grad: Tensor,
    state: State,
    scalars: Scalars,
    options: Mapping[str, Any],
    measure: bool = False,
) -> Result:
    """Run a rule like `run_rule`, in a program for several devices.

    An elementwise rule runs on shards, as its state is sharded. A stack of blocks, (B, rows, cols),
    is sharded by whole blocks; a single block is computed by all devices.
    """
    everywhere = whole_on_all()
    if everywhere is None:
        return run_rule(rule, param, grad, state, scalars, options, measure)
    if rule.kind == "elementwise":
        new = run_rule(rule, param, grad, state, scalars, options, measure)
        parts = [tiling_of(t) for t in state.values() if t.shape == param.shape]
        if parts and parts[0] is not None:  # so that what travels is the new parameter alone
            annotate(new.param, parts[0])
        return new
    of_blocks = everywhere.of_first_dim(3) if len(param) > 1 else everywhere.whole(3)
    if not is_staged(rule):
        whole = {
            key: annotate(value.clone(), _along(of_blocks, value)) for key, value in state.items()
        }
        param, grad = annotate(param.clone(), of_blocks), annotate(grad.clone(), of_blocks)
        return run_rule(rule, param, grad, whole, scalars, options, measure)
    prepared, kept = rule.prepare(grad, state, scalars, options)
    if any(prepared is tensor for tensor in kept.values()):
        prepared = prepared.clone()  # that one stays in parts
    direction, new_state = rule.transform(annotate(prepared, of_blocks), state, scalars, options)
    annotate(direction, of_blocks)
    shape = (param.shape[-2], param.shape[-1])
    new_param = finished(rule, param, direction, shape, scalars, options)
    squares = direction_squares(direction) if measure else None
    return Result(new_param, {**kept, **new_state}, squares)


def _along(of_blocks: Tiling, tensor: Tensor) -> Tiling:
    """Return the tiling of another tensor of these blocks, (B, ...)."""
    one = of_blocks.tiles[0] == 1
    return of_blocks.whole(tensor.ndim) if one else of_blocks.of_first_dim(tensor.ndim)
