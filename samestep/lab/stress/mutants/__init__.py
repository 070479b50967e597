"""Every known bug that the harness has to catch, by name."""

from samestep.lab.stress.mutants import communication, copies, field, hybrid, mathematics, xla
from samestep.lab.stress.mutants.mutant import MUTANTS, XLA_MUTANTS, Mutant

__all__ = [
    "MUTANTS",
    "XLA_MUTANTS",
    "Mutant",
    "communication",
    "copies",
    "field",
    "hybrid",
    "mathematics",
    "xla",
]
