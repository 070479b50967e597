"""A model laid out over a mesh: tensor, sequence, expert, data and pipeline parallel."""
