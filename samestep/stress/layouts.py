"""Another name of `samestep.lab.stress.layouts`, for layouts of one's own."""

from samestep.lab.stress.layouts import Layout, register

__all__ = ["Layout", "register"]
