"""samestep: optimizers that keep every rank in step."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from samestep import presets, recipes
from samestep.comm.diagnosis.recorder import FlightRecorder
from samestep.optimizer import AdamW, Muon, MuonAdamW
from samestep.optimizer.grad_scaler import GradScaler
from samestep.rules import Rule, Update, register_rule
from samestep.version import __version__

if TYPE_CHECKING:
    from samestep import mesh
    from samestep.checkpoint import CheckpointError, async_save, load, save
    from samestep.integrations import hf
    from samestep.qk_clip import QKClip, QKHeads

__all__ = [
    "AdamW",
    "CheckpointError",
    "FlightRecorder",
    "GradScaler",
    "Muon",
    "MuonAdamW",
    "QKClip",
    "QKHeads",
    "Rule",
    "Update",
    "__version__",
    "async_save",
    "hf",
    "load",
    "mesh",
    "presets",
    "recipes",
    "register_rule",
    "save",
]


def __getattr__(name: str) -> Any:
    """Only when asked for: what these need takes torch a second to import."""
    if name in ("CheckpointError", "async_save", "load", "save"):
        from samestep import checkpoint

        return getattr(checkpoint, name)
    if name in ("QKClip", "QKHeads"):
        from samestep import qk_clip

        return getattr(qk_clip, name)
    if name == "mesh":
        return import_module("samestep.mesh")
    if name == "hf":
        return import_module("samestep.integrations.hf")
    raise AttributeError(f"module 'samestep' has no attribute {name!r}")
