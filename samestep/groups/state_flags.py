"""Command line flags for the format and place of state, as options of the optimizer.

Commands have the types as those of their flags, and give what is read to the optimizer.
"""

from typing import Any, Literal

import torch

from samestep.groups.distribution import Offload
from samestep.rules.checks import MOMENTS
from samestep.rules.state import MASTER
from samestep.rules.stored import REMAINDER

StateWord = Literal[
    "float32", "bfloat16", "bf16_stochastic", "8bit", "8bit/256", "8bit/128", "8bit/64", "8bit/32"
]
OffloadWord = Literal["none", "state"]


def state_dtypes_of(word: StateWord, *, remainders: bool = False) -> dict[str, Any] | None:
    """The option `state_dtypes` for a word of --state."""
    kept: dict[str, Any] = {}
    if word != "float32":
        chosen = torch.bfloat16 if word == "bfloat16" else word
        kept = dict.fromkeys((key for key in MOMENTS if key != MASTER), chosen)
    return kept | ({MASTER: REMAINDER} if remainders else {}) or None


def offload_of(word: OffloadWord) -> Offload | None:
    """The option `offload` for a word of --offload."""
    return None if word == "none" else word
