"""Bytes of tensors on each rank: what stays, and the peak of what comes and goes.

Activations are not in it: they belong to the model, not to the optimizer.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from samestep.estimate.blueprint import Blueprint, Sharing, Spreading
from samestep.estimate.ledger import Then
from samestep.estimate.passing_memory import passing_memory
from samestep.groups.param_groups import rule_of
from samestep.placements.whole.piece_state import StateLayout
from samestep.rules.state import MASTER, needs_master, state_dtype


class RankMemory(NamedTuple):
    """Of one rank, in bytes.

    gradients: when backward is over.
    buffers, temporaries: beside gradients when most is alive; `gradients_then` are those.
    """

    parameters: int
    gradients: int
    main_parameters: int
    state: int
    gradients_then: int
    buffers: int
    temporaries: int

    @property
    def stays(self) -> int:
        """Between steps, gradients apart."""
        return self.parameters + self.main_parameters + self.state

    @property
    def in_flight(self) -> int:
        """What comes and goes, at its most."""
        return self.buffers + self.temporaries

    @property
    def peak(self) -> int:
        """All of it when most is alive."""
        return self.stays + self.gradients_then + self.in_flight

    def or_then(self, inside: Then) -> "RankMemory":
        """With another moment, of forward and backward, if more is alive then."""
        if inside.total <= self.gradients_then + self.in_flight:
            return self
        return self._replace(
            gradients_then=inside.gradients, buffers=inside.buffers, temporaries=inside.temporaries
        )


class Kept(NamedTuple):
    """What stays on a rank."""

    parameters: int
    main_parameters: int
    state: int


def rank_memory(blueprint: Blueprint, rank: int) -> RankMemory:
    """Everything of one rank."""
    kept = kept_memory(blueprint, rank)
    passing = passing_memory(blueprint, rank)
    return RankMemory(
        kept.parameters,
        passing.gradients,
        kept.main_parameters,
        kept.state,
        passing.then.gradients,
        passing.then.buffers,
        passing.then.temporaries,
    )


def kept_memory(blueprint: Blueprint, rank: int) -> Kept:
    """Parameters, main parameters and state of one rank."""
    params = main = state = 0
    master_weights = blueprint.optimizer._master_weights
    for sharing in blueprint.shared:
        place = blueprint.grid.place(rank, sharing.peers)
        params += _whole_parameters(sharing)
        for key, size in _shared_state(sharing, place, blueprint.groups, master_weights):
            main, state = (main + size, state) if key == MASTER else (main, state + size)
    for spreading in blueprint.spread:
        place = blueprint.grid.place(rank, spreading.peers)
        for index, (param, held) in enumerate(zip(spreading.params, spreading.held, strict=True)):
            elements = held.boxes[place].numel
            params += spreading.stored(index, place) * param.dtype.itemsize
            state += sum(_spread_state(spreading, index, elements, blueprint.groups))
            if needs_master(param, master_weights):
                main += elements * state_dtype(param, MASTER, {}).itemsize
    if not blueprint.placements:
        for group in blueprint.groups:
            for param in group["params"]:
                params += param.nbytes
                for key, tensor in blueprint.optimizer.state[param].items():
                    main, state = (
                        (main + tensor.nbytes, state)
                        if key == MASTER
                        else (main, state + tensor.nbytes)
                    )
    return Kept(params, main, state)


def _whole_parameters(sharing: Sharing) -> int:
    """With the gaps of flat buffers."""
    if sharing.distribution.buffers == "per_parameter":
        return sum(param.nbytes for param in sharing.params)
    width = {str(param.dtype): param.dtype.itemsize for param in sharing.params}
    return sum(bucket.size * width[bucket.dtype] for bucket in sharing.plan.buckets)


def _shared_state(
    sharing: Sharing, place: int, groups: Sequence[Mapping[str, Any]], master_weights: bool
) -> Iterator[tuple[str, int]]:
    keys = []
    for param, spec in zip(sharing.params, sharing.specs, strict=True):
        group = groups[spec.group]
        master = [MASTER] if needs_master(param, master_weights) else []
        keys.append([*rule_of(group).state_shapes((0, 0), group), *master])
    layout = StateLayout(sharing.plan, place, keys, list(map(dict, groups)))
    for param, spec, sizes in zip(sharing.params, sharing.specs, layout.sizes, strict=True):
        for key, size in sizes.items():
            yield key, size * state_dtype(param, key, groups[spec.group]).itemsize


def _spread_state(
    spreading: Spreading, index: int, elements: int, groups: Sequence[Mapping[str, Any]]
) -> Iterator[int]:
    """Bytes per key: of the parameter's shape as that is spread, all other on every rank."""
    param, spec = spreading.params[index], spreading.specs[index]
    group = groups[spec.group]
    rule = rule_of(group)
    shapes = rule.state_shapes((64, 48), group)
    for key, shape in shapes.items():
        width = state_dtype(param, key, group).itemsize
        if shape == (64, 48):
            yield elements * width
        elif spec.blocks is None:
            yield prod(rule.state_shapes(spec.shape, group)[key]) * width
        else:
            of_blocks = (rule.state_shapes(block.shape, group)[key] for block in spec.blocks)
            yield sum(map(prod, of_blocks)) * width
