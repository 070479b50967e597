"""The check of a training loop that every rank has the same: `samestep.stress.check`.

The harness, its command and everything else of it are in `samestep.lab.stress`.
"""

from samestep.lab.stress.check import Drift, DriftError, check

__all__ = ["Drift", "DriftError", "check"]
