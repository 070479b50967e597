"""Estimates of a step before there are ranks: memory, traffic, work, time, a timeline.

Everything is read from the plans and the schedule that the optimizer itself would run.
`samestep plan` tells it of any model on any cluster, before that is rented.
"""
