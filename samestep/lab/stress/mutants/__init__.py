"""Every known bug that the harness has to catch, by name."""

from samestep.lab.stress.mutants import (
    communication,
    copies,
    field,
    hybrid,
    mathematics,
    streams,
    xla,
)
from samestep.lab.stress.mutants.mutant import MUTANTS, STREAM_MUTANTS, XLA_MUTANTS, Mutant

__all__ = [
    "MUTANTS",
    "STREAM_MUTANTS",
    "XLA_MUTANTS",
    "Mutant",
    "communication",
    "copies",
    "field",
    "hybrid",
    "mathematics",
    "streams",
    "xla",
]
