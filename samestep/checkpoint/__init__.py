"""Checkpoints that any layout writes and any other loads."""

from samestep.checkpoint.async_saving import async_save
from samestep.checkpoint.background import SaveHandle
from samestep.checkpoint.errors import CheckpointError
from samestep.checkpoint.loading import Loaded, load
from samestep.checkpoint.saving import save

__all__ = ["CheckpointError", "Loaded", "SaveHandle", "async_save", "load", "save"]
