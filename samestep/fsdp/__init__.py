"""For FSDP2 and HSDP: ranks that use different modules, and sums in rank order."""

from samestep.fsdp.ordered_reduction import OrderedReduceScatter, use_ordered_reduction
from samestep.fsdp.participation import take_part
from samestep.fsdp.skipping import skip

__all__ = ["OrderedReduceScatter", "skip", "take_part", "use_ordered_reduction"]
