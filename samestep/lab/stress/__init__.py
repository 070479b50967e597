"""The stress harness: proves on the user's machine that every rank takes the same step.

`check` is its smallest part, for use inside a training loop as `samestep.stress.check`.
"""
