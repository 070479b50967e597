"""Readers of checkpoints of other packages, each into a `Source`; none of them is imported."""
