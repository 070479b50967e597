"""How an optimizer spreads its work over ranks: what the user asked for, as one value."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch.distributed as dist

from samestep.plan.sharding import OwnerStrategy

Sharding = Literal["auto", "none", "zero1", "zero2"]
Reduction = Literal["fast", "ordered"]
Grads = Literal["local", "reduced"]


@dataclass(frozen=True)
class Distribution:
    """The keywords of an optimizer that concern ranks.

    sharding: "zero2" and "zero1" give each rank a part of the state and of the update; zero2
        frees a full gradient once it is reduced. "none" keeps all on every rank. "auto" is
        zero2 where there are ranks to share with.
    reduction: "ordered" adds gradients in rank order in fp32, so that the result does not
        depend on the layout; "fast" leaves the order to the backend.
    grads: "local" gradients are averaged here; "reduced" ones already were, by DDP.
    process_group: the ranks that hold a replica; default: all.
    crossover: parameters with fewer elements are updated by every rank.
    bucket_size: elements that travel together.
    owners: how Muon's blocks are given to ranks.
    strict: replicas that differ at construction are an error instead of being mended.
    """

    sharding: Sharding = "auto"
    reduction: Reduction = "fast"
    grads: Grads = "local"
    process_group: dist.ProcessGroup | None = None
    crossover: int = 1024
    bucket_size: int = 1 << 24
    owners: OwnerStrategy = "balanced"
    strict: bool = False

    def __post_init__(self) -> None:
        for key, allowed in (
            ("sharding", get_args(Sharding)),
            ("reduction", get_args(Reduction)),
            ("grads", get_args(Grads)),
            ("owners", get_args(OwnerStrategy)),
        ):
            value = getattr(self, key)
            if value not in allowed:
                raise ValueError(f"{key} {value!r} is not supported; choose one of {list(allowed)}")
        for key in ("crossover", "bucket_size"):
            value = getattr(self, key)
            if type(value) is not int or value < 1:
                raise ValueError(f"{key} must be a whole number above 0, got {value!r}")
