"""Shards of parameters and state: how gradients are found, and how a rank keeps its shards."""
