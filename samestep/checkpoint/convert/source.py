"""What is taken out of another format, before anything is written."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from samestep.checkpoint.logical import MODEL, Tensors, state_key
from samestep.checkpoint.options import GroupFacts, plain_options
from samestep.checkpoint.pieces import Pieces
from samestep.groups.param_groups import own_spelling
from samestep.layout.dtensor_shards import Box
from samestep.layout.held_state import HeldBox, whole_box
from samestep.rules import RULES

# How a rule is known by the state that it leaves, in torch's words, which are ours.
LEAVES = {"momentum_buffer": "muon", "exp_avg": "adamw"}
META = torch.device("meta")


@dataclass
class Source:
    """Tensors under our names, of which `read` gets the values; and what is left out."""

    read: Callable[[MetadataIndex], Tensor]
    tensors: Tensors = field(default_factory=dict)
    groups: list[GroupFacts] = field(default_factory=list)
    extra: Any = None
    world_size: int = 1
    left_out: list[str] = field(default_factory=list)

    def add_whole(self, name: str, tensor: Tensor) -> None:
        """A tensor in one box."""
        self.add(name, tensor.shape, tensor.dtype, [whole_box(tensor.to(META))])

    def add(self, name: str, shape: torch.Size, dtype: torch.dtype, boxes: list[HeldBox]) -> None:
        """A tensor in boxes that are without values."""
        self.tensors[name] = Pieces(shape, dtype, META, boxes)

    def add_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Options of torch's optimizers; "params" are names."""
        for group in groups:
            by_rule: dict[str, list[str]] = {}
            for name in group["params"]:
                rule = next(
                    (LEAVES[key] for key in LEAVES if state_key(name, key) in self.tensors), None
                )
                if rule is not None:
                    by_rule.setdefault(rule, []).append(name)
            for rule, names in by_rule.items():
                options = {"rule": rule, **own_spelling(dict(group))}
                if rule == "muon" and "rule" not in group:  # from torch.optim.Muon
                    options.setdefault("orthogonalize", "newton-schulz")
                known = ("rule", "maximize", "initial_lr", *RULES[rule].defaults)
                kept = {key: options[key] for key in known if key in options}
                self.groups.append({"params": names, "options": plain_options(kept)})


def model_name(name: str) -> str:
    """Our name of a parameter or buffer."""
    return f"{MODEL}.{name}"


def boxes_of(chunks: list[Any]) -> list[HeldBox]:
    """Chunks of torch.distributed.checkpoint, without values."""
    return [
        HeldBox(
            Box(tuple(chunk.offsets), tuple(chunk.sizes)), torch.empty(chunk.sizes, device=META)
        )
        for chunk in chunks
    ]
