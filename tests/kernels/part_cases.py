"""Kernels on parts of blocks: against plain torch, and against kernels on whole blocks, bit for bit.

`test_interpreted.py` runs this file through Triton's interpreter on CPU.
"""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import samestep
import samestep.kernels.muon
import samestep.kernels.parts
import samestep.kernels.spread_blocks
import samestep.kernels.symmetric
import samestep.kernels.update
import samestep.rule_optimizer
import samestep.sharded_blocks
from samestep.kernels.spread_chunk import KernelStages
from samestep.rules.orthogonalize import _standard
from tests.ranks import run_forked


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    torch.manual_seed(0)
    for module in (samestep.kernels.muon, samestep.kernels.parts):
        monkeypatch.setattr(module, "TILE", 16)


# --- on several ranks ------------------------------------------------------------------------

TENSORS = {  # shape, the dim that is sharded, options
    "tall": ((37, 17), 0, {}),
    "tall_columns": ((37, 17), 1, {}),
    "wide": ((17, 37), 1, {}),
    "square": ((24, 24), 0, {}),
    "split": ((24, 9), 0, {"split_sizes": (7, 9, 8)}),
    "row": ((1, 9), 0, {}),
    "two": ((2, 20), 0, {}),
    "experts": ((3, 10, 6), 0, {"rule": "muon"}),
    "expert_rows": ((3, 10, 6), 1, {"rule": "muon"}),
    "expert_columns": ((3, 10, 6), 2, {"rule": "muon"}),
    "kernels": ((10, 3, 3, 2), 0, {"rule": "muon", "flatten": True}),
    "kernel_channels": ((10, 3, 3, 2), 1, {"rule": "muon", "flatten": True}),
    "copies": ((6, 11), None, {}),
}
STEPS = 3


def noise(name, step):
    seed = 1000 * list(TENSORS).index(name) + step
    return torch.randn(TENSORS[name][0], generator=torch.Generator().manual_seed(seed))


def one_by_one(X, scales, table, execution, *, overwrite):
    """Products in torch, block by block: on CPU they would depend on how many there are."""
    blocks = X.float() * scales[:, None, None]
    found = [_standard(block[None], table) for block in blocks]
    return torch.cat(found).to(X.dtype)


@pytest.fixture
def kernels(monkeypatch):
    """Kernels on CPU, all but the products."""
    made = []

    class Noticed(KernelStages):
        def __init__(self, *args):
            made.append(self)
            super().__init__(*args)

    monkeypatch.setattr(samestep.sharded_blocks, "missing", lambda device: None)
    monkeypatch.setattr(samestep.rule_optimizer, "missing_kernels", lambda device: None)
    monkeypatch.setattr(
        samestep.kernels.update, "kernels_run", lambda table, dtype, device: dtype.itemsize == 2
    )
    monkeypatch.setattr(samestep.kernels.muon, "orthogonalize_wide", one_by_one)
    monkeypatch.setattr(samestep.kernels.spread_blocks, "KernelStages", Noticed)
    return made


def trained(place, absent=(), dtype=torch.float32, **options):
    """Parameters and state by name after some steps; `place` puts a whole tensor on ranks."""
    params = {name: torch.nn.Parameter(place(name, noise(name, 99).to(dtype))) for name in TENSORS}
    overrides = {name: own for name, (_, _, own) in TENSORS.items() if own}
    opt = samestep.MuonAdamW(
        list(params.items()), lr=0.02, weight_decay=0.3, overrides=overrides, **options
    )
    for step in range(STEPS):
        for name, param in params.items():
            grad = place(name, noise(name, step).to(dtype))
            param.grad = None if name in absent and step == 1 else grad
        opt.step()
    found = {name: opt.full_parameter(name) for name in params}
    for name, state in opt.whole_state().items():
        found |= {f"{name}.{key}": tensor for key, tensor in state.items()}
    return found


def on_ranks(made, ranks, shape=None, **options):
    def job(rank):
        mesh = init_device_mesh("cpu", shape or (ranks,))

        def place(name, whole):
            dim = TENSORS[name][1]
            last = Replicate() if dim is None else Shard(dim)
            return distribute_tensor(whole, mesh, [Replicate()] * (mesh.ndim - 1) + [last])

        ended = trained(place, **options)
        assert len(made) >= STEPS  # and kernels were used
        return ended

    first, *others = run_forked(ranks, job, timeout=100, collective_timeout=60)
    for other in others:
        assert different(other, first) == []
    return first


def different(found, expected):
    assert found.keys() == expected.keys()
    return [name for name in found if not torch.equal(found[name], expected[name])]


def test_parts_have_the_bits_of_whole_blocks(kernels):
    expected = trained(lambda name, whole: whole)
    found = on_ranks(kernels, 3, block_dtype=torch.bfloat16)
    assert different(found, expected) == []
