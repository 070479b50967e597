"""Ranks on this machine: started here, or joined where torchrun has started them."""

from typing import TYPE_CHECKING, Any

from samestep.launch.failure import RanksFailed
from samestep.launch.torchrun import TorchrunRank, torchrun_rank

if TYPE_CHECKING:
    from samestep.launch.forked import run_forked

__all__ = ["RanksFailed", "TorchrunRank", "run_forked", "torchrun_rank"]


def __getattr__(name: str) -> Any:
    """What needs torch, when it is asked for."""
    if name == "run_forked":
        from samestep.launch.forked import run_forked

        return run_forked
    raise AttributeError(f"module 'samestep.launch' has no attribute {name!r}")
