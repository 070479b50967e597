"""Checkpoints that any layout writes and any other loads."""

from samestep.checkpoint.errors import CheckpointError
from samestep.checkpoint.save_load import Loaded, load, save

__all__ = ["CheckpointError", "Loaded", "load", "save"]
