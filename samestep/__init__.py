"""samestep: optimizers that keep every rank in step."""

from samestep import presets
from samestep.comm.recorder import FlightRecorder
from samestep.grad_scaler import GradScaler
from samestep.optimizer import AdamW, Muon, MuonAdamW
from samestep.rules import Rule, Update, register_rule
from samestep.version import __version__

__all__ = [
    "AdamW",
    "FlightRecorder",
    "GradScaler",
    "Muon",
    "MuonAdamW",
    "Rule",
    "Update",
    "__version__",
    "presets",
    "register_rule",
]
