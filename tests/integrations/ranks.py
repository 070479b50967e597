"""Ranks and models for the trainers of others: they find a process group as torchrun makes it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.ranks import free_port, run_forked


def run_as_torchrun(world: int, job: Callable[[int], Any]) -> list[Any]:
    """`job(rank)` on each rank, with the environment that torchrun would make; alone without any.

    What other packages warn of is theirs; what samestep warns of is an error.
    """
    port = free_port()

    def on_rank(rank: int) -> Any:
        if world == 1:
            dist.destroy_process_group()
        else:
            os.environ |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "localhost",
                "MASTER_PORT": str(port),
            }  # fmt: skip
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", module=r"samestep\.|tests\.")
        torch.manual_seed(0)
        return job(rank)

    return run_forked(world, on_rank)


class Tokens(Dataset):
    """Sequences of 12 random tokens, the same ones every time."""

    def __init__(self, count: int = 64, vocabulary: int = 64) -> None:
        self.count, self.vocabulary = count, vocabulary

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, self.vocabulary, (12,), generator=generator)
        return {"input_ids": ids, "labels": ids}


def values(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by name, whole."""
    return {
        name: getattr(param, "full_tensor", param.clone)().detach().clone()
        for name, param in model.named_parameters()
    }


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    differ = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    assert not differ, f"{differ[:3]} and {len(differ)} in all of {len(expected)} differ"


def pretend_fsdp(accelerator: Any) -> None:
    """Let accelerate shard on CPU, which it does on accelerators only: the same code."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.distributed_type = DistributedType.FSDP
