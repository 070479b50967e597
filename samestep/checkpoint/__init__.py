"""Checkpoints that any layout writes and any other loads."""

from samestep.checkpoint.converting import Converted, convert
from samestep.checkpoint.doors import Writer, reader
from samestep.checkpoint.loading import Loaded, load
from samestep.checkpoint.saving import SaveHandle, async_save, save
from samestep.checkpoint.storage import CheckpointError

__all__ = [
    "CheckpointError",
    "Converted",
    "Loaded",
    "SaveHandle",
    "Writer",
    "async_save",
    "convert",
    "load",
    "reader",
    "save",
]
