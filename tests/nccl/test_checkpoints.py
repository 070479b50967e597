"""Checkpoints of ranks over NCCL: written beside training, and read on other numbers of ranks."""

from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import samestep
from samestep.checkpoint.saving import HostCopies
from samestep.comm.nccl import sharing_problem
from samestep.lab.stress.delays import Delays
from samestep.launch.forked import NCCL, run_forked
from tests.limits import HANG

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nccl_ranks")]
LAYOUTS = {"zero2": {}, "flat": {"buffers": "flat"}, "offload": {"offload": "state"}}
SLOW = Delays(("compute",), often=1.0, most_ms=8.0)


@pytest.fixture
def nccl_ranks() -> None:
    reason = sharing_problem()
    if torch.cuda.device_count() < 4 and reason is not None:
        pytest.skip(reason)


def start(rank: int, layout: str) -> tuple[nn.Module, samestep.MuonAdamW]:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.manual_seed(0)
    sizes = (24, 40, 24, 10)
    layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    model = nn.Sequential(*layers).cuda()
    return model, samestep.MuonAdamW(
        model, lr=0.01, crossover=64, bucket_size=600, compute_dtype=torch.float32,
        reduction="ordered", **LAYOUTS[layout],
    )  # fmt: skip


def steps(model: nn.Module, optimizer: samestep.MuonAdamW, rank: int, numbers: range) -> None:
    for number in numbers:
        torch.manual_seed(100 * number + rank)
        model(torch.randn(4, 24, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def everything(model: nn.Module, optimizer: samestep.MuonAdamW) -> dict[str, torch.Tensor]:
    found = {name: param.detach().cpu().clone() for name, param in model.named_parameters()}
    for name, entries in optimizer.whole_state().items():
        found |= {f"{name}.{key}": value.cpu().clone() for key, value in entries.items()}
    return found


def written(rank: int, folder: Path, layout: str, waits: bool) -> dict[str, torch.Tensor]:
    """What was there when it was saved; training goes on meanwhile, on a device that is late."""
    model, optimizer = start(rank, layout)
    steps(model, optimizer, rank, range(3))
    expected = everything(model, optimizer)
    # Once before: buffers of the host are there then, and a copy is as fast as it gets.
    samestep.async_save(folder / "before", model, optimizer).wait()
    steps(model, optimizer, rank, range(3, 4))
    copied = HostCopies._copy

    def late(self: HostCopies, *args: Any) -> None:
        torch.cuda._sleep(400_000_000)  # what is copied is not computed yet
        copied(self, *args)

    nothing = mock.patch.object(torch.cuda.Stream, "synchronize", return_value=None)
    with SLOW.applied():
        steps(model, optimizer, rank, range(4, 5))
        with mock.patch.object(HostCopies, "_copy", late), nullcontext() if waits else nothing:
            handle = samestep.async_save(folder / "beside", model, optimizer)
        # The copies that were taken must be of this moment, whatever comes next.
        steps(model, optimizer, rank, range(5, 7))
    handle.wait()
    dist.barrier()
    again, other = start(rank, layout)
    samestep.load(folder / "before", again, other)
    differing = compared(everything(again, other), expected)
    assert not differing, differing
    steps(again, other, rank, range(3, 5))
    return everything(again, other)


def read(rank: int, folder: Path, layout: str) -> dict[str, torch.Tensor]:
    model, optimizer = start(rank, layout)
    samestep.load(folder / "beside", model, optimizer)
    return everything(model, optimizer)


def compared(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name in expected if not torch.equal(found[name], expected[name])]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_saved_beside_training_is_read_on_any_number_of_ranks(
    tmp_path: Path, layout: str
) -> None:
    limits = {"timeout": HANG, "collective_timeout": 60.0}
    of_ranks = run_forked(4, written, tmp_path, layout, True, backend=NCCL, **limits)
    for ranks in (4, 2, 3, 1):
        other = layout if ranks != 3 else "flat"
        backend = NCCL if ranks > 1 else "gloo"
        for found in run_forked(ranks, read, tmp_path, other, backend=backend, **limits):
            assert compared(found, of_ranks[0]) == []


def test_a_copy_that_is_not_waited_for_is_seen(tmp_path: Path) -> None:
    limits = {"timeout": HANG, "collective_timeout": 60.0}
    of_ranks = run_forked(2, written, tmp_path, "zero2", False, backend=NCCL, **limits)
    found = run_forked(2, read, tmp_path, "zero2", backend=NCCL, **limits)
    assert compared(found[0], of_ranks[0])
