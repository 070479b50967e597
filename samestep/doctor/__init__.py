"""`samestep doctor`: what there is on this machine, what would run, and what is broken.

    checks.py    one function for each area; each finding with its way out
    trials.py    what is tried rather than asked: two ranks over gloo, a step on each GPU
    command.py   the command: a table, or JSON

It needs torch alone.
"""
