"""The laboratory around the optimizers: the stress harness, plans of runs, and measurements.

It may import anything of samestep; nothing but the command line, and the door `samestep.stress`,
imports it.
"""
