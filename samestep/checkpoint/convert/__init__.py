"""Checkpoints of others into ours and back, on one process and a box at a time."""
