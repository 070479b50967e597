"""Ranks on this machine: started here, or joined where torchrun has started them."""

from samestep.launch.forked import RanksFailed, run_forked
from samestep.launch.torchrun import TorchrunRank, torchrun_rank

__all__ = ["RanksFailed", "TorchrunRank", "run_forked", "torchrun_rank"]
