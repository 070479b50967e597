"""Another name of `samestep.lab.stress.scenarios`, for scenarios of one's own."""

from samestep.lab.stress.scenarios import SCENARIOS

__all__ = ["SCENARIOS"]
