"""`samestep plan`: what a model will need on a cluster, before it is rented."""
