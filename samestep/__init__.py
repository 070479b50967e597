"""samestep: optimizers that keep every rank in step.

Public names are imported when they are first asked for: torch takes seconds to import, and what
needs none of it (`samestep --help`, completion in a shell) does not wait for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from samestep.version import __version__

if TYPE_CHECKING:
    from samestep import mesh, presets, recipes
    from samestep.checkpoint import CheckpointError, async_save, load, save
    from samestep.comm.diagnosis.recorder import FlightRecorder
    from samestep.integrations import hf, torchtitan
    from samestep.optimizer import AdamW, Muon, MuonAdamW
    from samestep.optimizer.grad_scaler import GradScaler
    from samestep.qk_clip import QKClip, QKHeads
    from samestep.rules import Rule, Update, register_rule

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
    "torchtitan",
]
_HOMES = {
    "samestep.checkpoint": ("CheckpointError", "async_save", "load", "save"),
    "samestep.comm.diagnosis.recorder": ("FlightRecorder",),
    "samestep.optimizer": ("AdamW", "Muon", "MuonAdamW"),
    "samestep.optimizer.grad_scaler": ("GradScaler",),
    "samestep.qk_clip": ("QKClip", "QKHeads"),
    "samestep.rules": ("Rule", "Update", "register_rule"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
# By another name than their own.
_MODULES = {"hf": "samestep.integrations.hf", "torchtitan": "samestep.integrations.torchtitan"}


def __getattr__(name: str) -> Any:
    """A public name from its home, or a module of the package."""
    if name in _HOME:
        found = getattr(import_module(_HOME[name]), name)
        globals()[name] = found  # the next time it is simply there
        return found
    module = _MODULES.get(name, f"samestep.{name}")
    try:
        if not name.startswith("_"):
            return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise  # it is there, and something that it needs is not
    raise AttributeError(f"module 'samestep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
