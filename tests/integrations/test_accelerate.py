"""accelerate: `prepare`, clipping, `save_state` and `load_state` on 1 and 2 ranks, and FSDP2."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import samestep
from tests.integrations.ranks import assert_same, pretend_fsdp, run_as_torchrun, values

accelerate = pytest.importorskip("accelerate", reason="make test-integrations installs it")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 32)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def new_accelerator(fsdp2=False, from_first=False, **options):
    accelerator = accelerate.Accelerator(cpu=True, **options)
    if fsdp2:
        pretend_fsdp(accelerator)
        accelerator.state.fsdp_plugin = plugin = accelerate.FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
            cpu_ram_efficient_loading=from_first,
            state_dict_type=fsdp2,
        )
        assert plugin.fsdp_version == 2
    return accelerator


def prepared(accelerator, **options):
    model = Net()
    optimizer = samestep.hf.optimizer(model, lr=1e-2, **options)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 8)
    return accelerator.prepare(model, optimizer, schedule)


def train(accelerator, model, optimizer, schedule, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + accelerator.process_index)
        tokens = torch.randint(0, 32, (4, 9), generator=generator)
        with accelerator.accumulate(model):
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


WAYS = {
    "one line": ({}, {}),
    "bf16": ({"mixed_precision": "bf16"}, {}),
    "accumulation": ({"gradient_accumulation_steps": 2}, {}),
    "zero2": ({}, {"sharding": "zero2", "crossover": 1}),
    "fsdp2 sharded": ({"fsdp2": "SHARDED_STATE_DICT"}, {}),
    "fsdp2 full": ({"fsdp2": "FULL_STATE_DICT"}, {}),
    "fsdp2 from rank 0": ({"fsdp2": "SHARDED_STATE_DICT", "from_first": True}, {}),
}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_run_is_the_run_without_a_break(world, way, tmp_path):
    of_accelerator, options = WAYS[way]
    if way.startswith("fsdp2") and world == 1:
        pytest.skip("accelerate shards over several ranks")

    def job(rank):
        def start():
            accelerator = new_accelerator(**of_accelerator)
            run = prepared(accelerator, **options)
            samestep.hf.save_whole(accelerator, run[1])
            return accelerator, run

        accelerator, straight = start()
        before = values(straight[0])
        train(accelerator, *straight, range(4))
        accelerator.save_state(str(tmp_path / "saved"))
        train(accelerator, *straight, range(4, 8))
        after = values(straight[0])

        accelerator.free_memory()
        accelerator, again = start()
        accelerator.load_state(str(tmp_path / "saved"))
        train(accelerator, *again, range(4, 8))
        assert_same(values(again[0]), after)
        assert all(not torch.equal(before[name], value) for name, value in after.items())
        return after, samestep.hf.unwrapped(again[1]).plan.distribution.grads

    results = run_as_torchrun(world, job)
    for found, grads in results:
        assert_same(found, results[0][0])
        assert grads == ("reduced" if world == 2 and "fsdp2" not in way else "local")


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_two_ranks_train_what_one_trains_with_all_data(way):
    """Gradients are averaged once, and clipped once, by their joint norm."""
    model = Net()
    alone = samestep.MuonAdamW(model, lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(alone, 1.0, 0.1, 8)
    for step in range(3):
        for rank in range(2):
            generator = torch.Generator().manual_seed(10 * step + rank)
            tokens = torch.randint(0, 32, (4, 9), generator=generator)
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            (loss / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        alone.step()
        schedule.step()
        alone.zero_grad()
    expected = values(model)

    def job(rank):
        accelerator = new_accelerator(**({"fsdp2": "SHARDED_STATE_DICT"} if way == "fsdp2" else {}))
        run = prepared(accelerator)
        # It steps a schedule once for every rank, as it does with everybody's optimizer.
        accelerator.step_scheduler_with_optimizer = False
        run[2].step_with_optimizer = False
        train(accelerator, *run, range(3))
        return values(run[0])

    for found in run_as_torchrun(2, job):
        for name, value in expected.items():
            assert torch.allclose(
                found[name.removeprefix("module.")] if name in found else found[f"module.{name}"],
                value,
                rtol=0,
                atol=2e-5,
            ), name


@pytest.mark.parametrize("sharding", ["auto", "none"])
def test_an_optimizer_that_was_built_as_usual(sharding, tmp_path):
    """Whoever builds before `prepare` and saves a part is told; whole state needs no word."""

    def job(rank):
        accelerator = new_accelerator()
        model = Net()
        optimizer = samestep.MuonAdamW(
            model, lr=1e-2, grads="reduced", sharding=sharding, crossover=1
        )
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 8)
        run = accelerator.prepare(model, optimizer, schedule)
        train(accelerator, *run, range(2))
        if sharding == "auto":
            with pytest.raises(RuntimeError, match=r"samestep\.hf\.save_whole\(accelerator"):
                accelerator.save_state(str(tmp_path / "saved"))
            samestep.hf.save_whole(accelerator, run[1])
        accelerator.save_state(str(tmp_path / "saved"))
        state = samestep.hf.unwrapped(run[1]).whole_state()
        train(accelerator, *run, range(2, 4))
        accelerator.load_state(str(tmp_path / "saved"))
        loaded = samestep.hf.unwrapped(run[1]).whole_state()
        return all(torch.equal(state[n][k], loaded[n][k]) for n in state for k in state[n])

    assert run_as_torchrun(2, job) == [True, True]
