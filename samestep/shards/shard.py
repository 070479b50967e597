"""A shard: a part of a parameter that this rank updates, with its state.

A step is short beside the making of views, so shards are made once and kept until a parameter or
a state tensor was replaced by another object.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from samestep.rules.state import MatrixView, State, Whereabouts


@dataclass(eq=False)
class Shard:
    """A part of a parameter on this rank.

    value: (size,), or (rows, cols) of a block; a view of the parameter if `is_view`, else a copy.
    state: by key, in the shapes that the rule declares; where the state stays between steps.
    where: which elements of the whole parameter these are, if any state is rounded at random.
    matrices: what the rule sees, with state that stays on the device; empty until it is asked for.
    """

    value: Tensor
    is_view: bool
    state: State
    where: Whereabouts | None
    matrices: list[MatrixView] = field(default_factory=list)


def same_objects(found: Sequence[object], known: Sequence[object]) -> bool:
    """Whether both have the same objects in the same order; equal values are not enough."""
    return len(found) == len(known) and all(map(operator.is_, found, known))
