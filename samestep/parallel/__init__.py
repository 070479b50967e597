"""Tensor, sequence, expert, data and pipeline parallel for a model on a mesh."""
