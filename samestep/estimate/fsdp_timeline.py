"""When FSDP2 gathers and reduces while a model runs, on the clocks of the simulator.

The next unit is gathered while one computes, in forward and in backward; a reduction goes on while
the next unit computes, and has to be over before the one after it begins.
"""

from collections.abc import Sequence
from typing import Protocol

from samestep.estimate.collectives import Collective
from samestep.estimate.fsdp import Unit, gather_of, reductions_of

FORWARD, BACKWARD = 2, 4  # FLOPs per parameter and token


class Clocks(Protocol):
    """What the simulator offers."""

    def send(self, kind: str, about: object, collectives: Sequence[Collective]) -> None:
        """Launch transfers."""

    def wait(self, kind: str, about: object) -> None:
        """Until they are over."""

    def compute(self, name: str, flops: float) -> None:
        """On every rank."""


def run_units(units: Sequence[Unit], tokens: int, clocks: Clocks) -> None:
    """One forward and backward pass of so many tokens per rank, without the optimizer's step."""
    for place, unit in enumerate(units):
        if place == 0:
            clocks.send("unit", unit.name, gather_of(unit))
        clocks.wait("unit", unit.name)
        for later in units[place + 1 : place + 2]:
            clocks.send("unit", later.name, gather_of(later))
        clocks.compute(f"forward {unit.name}", FORWARD * tokens * _elements(unit))
    order = [unit for unit in reversed(units) if unit.reshards]
    order += [unit for unit in units if not unit.reshards]  # whole still; reduced at the end
    for unit in order[:1] if order[0].reshards else ():
        clocks.send("unit", unit.name, gather_of(unit))
    before: str | None = None
    for place, unit in enumerate(order):
        clocks.wait("unit", unit.name)
        for later in order[place + 1 : place + 2]:
            clocks.send("unit", later.name, gather_of(later) if later.reshards else ())
        clocks.compute(f"backward {unit.name}", BACKWARD * tokens * _elements(unit))
        clocks.wait("reduce", before)
        clocks.send("reduce", unit.name, reductions_of(unit))
        before = unit.name
    clocks.wait("reduce", before)


def _elements(unit: Unit) -> int:
    """Of what a token meets here: a rank's experts see the tokens of all that share the others."""
    return sum(param.numel() for param in unit.params) * unit.brings_tokens
