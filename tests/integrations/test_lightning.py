"""Lightning: `configure_optimizers` as with any optimizer, on 1 and 2 ranks, with checkpoints."""

from __future__ import annotations

import logging
import os

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler

import samestep
from tests.integrations.ranks import Tokens, assert_same, run_as_torchrun, values

lightning = pytest.importorskip("lightning", reason="make test-integrations installs it")
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)


class Net(lightning.LightningModule):
    def __init__(self, **options) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.options = options
        self.embedding, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.hidden = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16))

    def training_step(self, batch):
        x = self.embedding(batch["input_ids"][:, :-1])
        logits = self.head(x + self.hidden(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())

    def configure_optimizers(self):
        opt = samestep.MuonAdamW(self, lr=1e-2, **self.options)
        schedule = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, 8)
        return [opt], [{"scheduler": schedule, "interval": "step"}]


def fit(path, world, steps, resume=None, batch=2, options=None, kind=None, **arguments):
    """The module after so many steps, and the trainer; a checkpoint after an epoch of 4."""
    saving = lightning.pytorch.callbacks.ModelCheckpoint(
        dirpath=path, filename="{step}", every_n_train_steps=4, save_top_k=-1
    )
    trainer = lightning.Trainer(
        accelerator="cpu", devices=world, max_steps=steps, callbacks=[saving], logger=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        **{"strategy": "ddp" if world > 1 else "auto", **arguments},
    )  # fmt: skip
    module = (kind or Net)(**(options or {}))
    count = 4 * batch * world * arguments.get("accumulate_grad_batches", 1)
    rank = int(os.environ.get("RANK", 0))
    rows = DistributedSampler(Tokens(count), world, rank, shuffle=False)  # Lightning's own shuffles
    loader = DataLoader(Tokens(count), batch_size=batch, sampler=rows)
    trainer.fit(module, loader, ckpt_path=resume)
    return module, trainer


class Sharded(Net):
    """With FSDP2, as ModelParallelStrategy wants it."""

    def configure_model(self):
        if not isinstance(self.head.weight, DTensor):
            mesh = self.device_mesh["data_parallel"]
            for part in (self.embedding, self.hidden, self.head):
                fully_shard(part, mesh=mesh)


WAYS = {
    "one line": {},
    "bf16-mixed, clipped": {"precision": "bf16-mixed", "gradient_clip_val": 0.5},
    "accumulation": {"accumulate_grad_batches": 2},
    "zero2": {"options": {"sharding": "zero2", "crossover": 1}},
    "none": {"options": {"sharding": "none"}},
    "deferred": {
        "options": {"deferred": True, "crossover": 1},
        "precision": "bf16-mixed",
        "gradient_clip_val": 0.5,
    },
}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_run_is_the_run_without_a_break(world, way, tmp_path):
    def job(rank):
        module, trainer = fit(tmp_path, world, 8, **WAYS[way])
        again, _ = fit(tmp_path, world, 8, resume=tmp_path / "step=4.ckpt", **WAYS[way])
        assert_same(values(again), values(module))
        assert all(not torch.equal(v, values(Net())[n]) for n, v in values(module).items())
        return values(module), trainer.optimizers[0].plan.distribution.grads

    results = run_as_torchrun(world, job)
    for found, grads in results:
        assert_same(found, results[0][0])
        assert grads == ("reduced" if world == 2 else "local")


@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_model_that_is_sharded(clip, tmp_path):
    """ModelParallelStrategy with FSDP2; what it saves is whole or sharded."""

    def job(rank):
        for whole in (False, True):
            path = tmp_path / str(whole)

            def run(path=path, whole=whole, **more):
                strategy = lightning.pytorch.strategies.ModelParallelStrategy(
                    data_parallel_size=2,
                    tensor_parallel_size=1,
                    save_distributed_checkpoint=not whole,
                )
                return fit(
                    path, 2, 8, kind=Sharded, strategy=strategy, gradient_clip_val=clip, **more
                )

            module, _ = run()
            again, _ = run(resume=path / "step=4.ckpt")
            assert_same(values(again), values(module))
        ddp, _ = fit(tmp_path / "ddp", 2, 8, gradient_clip_val=clip)
        for name, value in values(ddp).items():
            assert torch.allclose(values(module)[name], value, rtol=0, atol=2e-5), name
        return values(module)

    here, there = run_as_torchrun(2, job)
    assert_same(here, there)


def test_what_two_ranks_have_saved_goes_on_in_one(tmp_path):
    options = {"options": {"sharding": "zero2", "crossover": 1}}

    def save(rank):
        _, trainer = fit(tmp_path, 2, 4, **options)
        return trainer.optimizers[0].whole_state()

    saved, _ = run_as_torchrun(2, save)
    alone = samestep.MuonAdamW(Net(), lr=1e-2)
    content = torch.load(tmp_path / "step=4.ckpt", weights_only=False)
    alone.load_state_dict(content["optimizer_states"][0])
    loaded = alone.whole_state()
    assert all(torch.equal(saved[n][k], loaded[n][k]) for n in saved for k in saved[n])


def test_two_ranks_train_what_one_trains_with_all_data(tmp_path):
    """Gradients are averaged once, and clipped once, by their joint norm."""

    def trained(world, batch, clip=0.5):
        path = tmp_path / f"{world}-{batch}-{clip}"
        return run_as_torchrun(
            world, lambda _: values(fit(path, world, 4, batch=batch, gradient_clip_val=clip)[0])
        )

    (expected,) = trained(1, 4)
    for found in trained(2, 2):
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=0, atol=2e-5), name
    for (other,) in trained(1, 2), trained(1, 4, clip=1e9):
        assert not torch.allclose(other["head.weight"], expected["head.weight"], atol=1e-4)
