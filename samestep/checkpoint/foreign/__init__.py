"""Checkpoints of other packages, each read into a `Source` of ours; none of them is imported."""
