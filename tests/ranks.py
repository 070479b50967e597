"""Run a function on several ranks and collect its values.

``run_forked`` has real processes and gloo; ``run_threaded`` takes a few milliseconds.
"""

from samestep.launch import RanksFailed, run_forked
from tests.ranks_threaded import run_threaded

__all__ = ["RanksFailed", "run_forked", "run_threaded"]
