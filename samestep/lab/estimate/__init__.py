"""Estimates of a step before there are ranks: memory, traffic, work, time, a timeline.

All estimates are read from the plans and the schedule that the optimizer itself would run.
`samestep plan` prints the estimates for any model on any cluster, before the cluster is rented.
"""
