"""Every known bug that the harness has to catch, by name."""

from samestep.stress.mutants import communication, copies, hybrid, mathematics
from samestep.stress.mutants.mutant import MUTANTS, Mutant

__all__ = ["MUTANTS", "Mutant", "communication", "copies", "hybrid", "mathematics"]
