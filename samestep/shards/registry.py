"""Registry of the kinds of parameters and their placements.

Rooms above that need more of a kind than its `Placement` keep a table by the names of kinds, and
ask for an entry by `require_kind`: what they do not know is an error, and never left out.
"""

from collections.abc import Callable, Container
from pkgutil import resolve_name
from typing import Any, NamedTuple

from torch import Tensor

from samestep.layout.boxes import mesh_of


class Kind(NamedTuple):
    """A kind of parameters, and its placement.

    about: in words.
    takes: whether a parameter is held so; the first kind that says yes has it.
    engine: the `Placement`, as "module:class". It is imported with the first parameter of its kind:
        DTensors take long to import.
    """

    name: str
    about: str
    takes: Callable[[Tensor], bool]
    engine: str

    def load(self) -> Any:
        """Import the placement class."""
        return resolve_name(self.engine)


KINDS = [
    Kind(
        "replicated",
        "plain tensors, of which every rank has a copy",
        lambda param: mesh_of(param) is None,
        "samestep.shards.replicated.replicated:ReplicatedShards",
    ),
    Kind(
        "dtensor",
        "DTensors, of which every rank of a mesh has a part",
        lambda param: mesh_of(param) is not None,
        "samestep.shards.dtensor.sharded:ShardedParameters",
    ),
]


def kind_of(param: Tensor) -> Kind:
    """Kind of a parameter."""
    return next(kind for kind in KINDS if kind.takes(param))


def require_kind(name: str, known: Container[str], what: str, where: str) -> None:
    """Raise if a table lacks an entry for a kind."""
    if name not in known:
        about = next(kind.about for kind in KINDS if kind.name == name)
        raise ValueError(
            f"parameters of the kind {name!r} ({about}) have no {what}: add one to {where}"
        )
