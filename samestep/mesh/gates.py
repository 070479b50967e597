"""Gates: combinations that torch.compile handles badly run eager unless opened."""

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from samestep.mesh.degrees import Degrees

PREFIX = "SAMESTEP_COMPILE_"


class CompileFacts(NamedTuple):
    """Facts that gates look at, beside the degrees."""

    experts: bool = False
    capacity: bool = False  # a fixed number of places per expert, padded
    fsdp: bool = True


class Gate(NamedTuple):
    """A combination that is not compiled unless the gate is opened."""

    name: str
    closes: Callable[[Degrees, CompileFacts], bool]
    why: str

    @property
    def variable(self) -> str:
        """The environment variable that opens (1) or closes (0) it."""
        return PREFIX + self.name.upper()


GATES = (
    Gate(
        "padded_experts",
        lambda degrees, facts: facts.experts and facts.capacity,
        "padded expert permutation",
    ),
    Gate(
        "moe_fsdp",
        lambda degrees, facts: facts.experts and facts.fsdp and degrees.batch_ranks > 1,
        "experts with FSDP2",
    ),
    Gate(
        "ep",
        lambda degrees, facts: facts.experts and degrees.ep > 1,
        "expert parallel: its exchanges have sizes that depend on data",
    ),
)


@dataclass(frozen=True)
class Decision:
    """Whether blocks are compiled: request, result and reason."""

    requested: str
    actual: str
    why: str
    closed: tuple[str, ...] = ()
    opened: tuple[str, ...] = ()

    @property
    def compile(self) -> bool:
        return self.actual == "compiled"

    def receipt(self) -> dict[str, Any]:
        return {
            "requested_backend": self.requested,
            "actual_backend": self.actual,
            "fallback_reason": self.why if self.requested != self.actual else None,
            "gates_closed": list(self.closed),
            "gates_opened": list(self.opened),
        }


def decide(
    requested: bool,
    degrees: Degrees,
    facts: CompileFacts,
    *,
    open_gates: Collection[str] = (),
    environment: Mapping[str, str] = os.environ,
) -> Decision:
    """Decide whether to compile, with the reason.

    Args:
        requested: Whether compilation was asked for.
        degrees: Of the mesh.
        facts: About the model.
        open_gates: Names of gates that do not count. The environment counts more.
        environment: SAMESTEP_COMPILE_<NAME>=1 opens a gate, 0 keeps it closed.
    """
    names = {gate.name for gate in GATES}
    unknown = sorted(set(open_gates) - names)
    if unknown:
        raise ValueError(f"unknown gate {unknown[0]!r}; the gates are {', '.join(sorted(names))}")
    known = {gate.variable for gate in GATES}
    for variable in environment:
        if variable.startswith(PREFIX) and variable not in known:
            raise ValueError(
                f"{variable} is no environment variable of a gate; the gates are "
                f"{', '.join(sorted(known))}"
            )
    if not requested:
        return Decision("eager", "eager", "not asked for")
    concerned = [gate for gate in GATES if gate.closes(degrees, facts)]
    opened = tuple(g.name for g in concerned if _open(g, open_gates, environment))
    closed = [gate for gate in concerned if gate.name not in opened]
    if not closed:
        why = f"gates opened: {', '.join(opened)}" if opened else "no gate is closed"
        return Decision("compiled", "compiled", why, (), opened)
    reasons = "; ".join(f"{gate.name} ({gate.why}; {gate.variable}=1 opens it)" for gate in closed)
    names_closed = tuple(gate.name for gate in closed)
    return Decision("compiled", "eager", f"closed: {reasons}", names_closed, opened)


def _open(gate: Gate, open_gates: Collection[str], environment: Mapping[str, str]) -> bool:
    value = environment.get(gate.variable)
    if value is None:
        return gate.name in open_gates
    if value not in ("0", "1"):
        raise ValueError(f"{gate.variable} must be 0 or 1, got {value!r}")
    return value == "1"
