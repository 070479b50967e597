"""Bugs of state in fewer bits: bits that belong to no element, halves that are lost."""

from typing import Any

import torch

from samestep.checkpoint import kept_otherwise
from samestep.rules.state import Whereabouts
from samestep.stress.mutants.mutant import mutant


@mutant("layouts", "small_state_8bit", steps=3, replaces=(Whereabouts, "origin"))
def random_bits_of_the_place_on_a_rank(original: Any, self: Whereabouts) -> Any:
    """moments are rounded by bits of an element's place on its rank, so that layouts differ"""
    here = torch.empty(self.elements.shape, device="meta")
    return original(self)._replace(offset=0, strides=here.stride())


@mutant("layouts", "small_state_remainder", steps=6, replaces=(kept_otherwise, "_rest"))
def remainders_lost_at_load(original: Any, remainder: Any) -> Any:
    """a checkpoint is loaded without what master copies have beyond their parameters"""
    return remainder.rest.zero_
