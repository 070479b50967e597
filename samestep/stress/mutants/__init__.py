"""Every known bug that the harness has to catch, by name."""

from samestep.stress.mutants import (
    clipping,
    communication,
    flat,
    hybrid,
    mathematics,
    presence,
    refused,
    sharded,
)
from samestep.stress.mutants.mutant import MUTANTS, Mutant

__all__ = [
    "MUTANTS", "Mutant", "clipping", "communication", "flat", "hybrid", "mathematics", "presence",
    "refused", "sharded",
]  # fmt: skip
