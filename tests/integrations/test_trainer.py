"""Hugging Face's Trainer: one line, on 1 and 2 ranks; a resumed run is the run without a break."""

from __future__ import annotations

import pytest
import torch

import samestep
from tests.integrations.ranks import Tokens, assert_same, pretend_fsdp, run_as_torchrun, values
from tests.ranks import RanksFailed

transformers = pytest.importorskip("transformers", reason="make test-integrations installs it")
accelerate = pytest.importorskip("accelerate", reason="make test-integrations installs it")

transformers.Trainer, transformers.LlamaForCausalLM  # noqa: B018 - imported here, once for all ranks


def tiny_llama(**options):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False, **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def trainer(path, model=None, callbacks=(), options=None, **arguments):
    """A Trainer of 6 steps that saves after 3."""
    args = transformers.TrainingArguments(
        output_dir=str(path), use_cpu=True, seed=0, report_to=[],
        disable_tqdm=True, dataloader_num_workers=0, lr_scheduler_type="linear",
        **{"max_steps": 6, "save_steps": 3, "logging_steps": 1, "per_device_train_batch_size": 2,
           **arguments},
    )  # fmt: skip
    options = {"lr": 1e-2} if options is None else options
    return transformers.Trainer(
        model or tiny_llama(),
        args,
        train_dataset=Tokens(16),
        eval_dataset=Tokens(4),
        optimizer_cls_and_kwargs=samestep.hf.factory(**options),
        callbacks=list(callbacks),
    )


def own_optimizer(run):
    return samestep.hf.unwrapped(run.optimizer)


WAYS = {
    "one line": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "bf16": {"bf16": True},
    "no clipping": {"max_grad_norm": 0.0},
    "AdamW": {"options": {"lr": 1e-2, "kind": samestep.AdamW}},
    "zero2": {"options": {"lr": 1e-2, "sharding": "zero2", "crossover": 1}},
    "zero2, the best": {
        "options": {"lr": 1e-2, "sharding": "zero2", "crossover": 1},
        "save_strategy": "best",
        "eval_strategy": "steps",
        "eval_steps": 3,
        "metric_for_best_model": "loss",
    },
    "zero2, every epoch": {
        "options": {"lr": 1e-2, "sharding": "zero2", "crossover": 1},
        "save_strategy": "epoch",
        "num_train_epochs": 2,
        "max_steps": -1,
    },
}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_run_is_the_run_without_a_break(world, way, tmp_path):
    def job(rank):
        def run():
            callbacks = [samestep.hf.SaveWhole()] if "zero2" in way else []
            return trainer(tmp_path, callbacks=callbacks, **WAYS[way])

        straight = run()
        before = values(straight.model)
        straight.train()
        again = run()
        saved = sorted(tmp_path.glob("checkpoint-*"), key=lambda path: path.stat().st_mtime)
        again.train(resume_from_checkpoint=str(saved[0]))
        assert_same(values(again.model), values(straight.model))
        assert all(not torch.equal(before[n], v) for n, v in values(straight.model).items())
        return values(straight.model), own_optimizer(straight).plan.distribution.grads

    results = run_as_torchrun(world, job)
    for found, grads in results:
        assert_same(found, results[0][0])
        assert grads == ("reduced" if world == 2 else "local")  # nothing is averaged twice


@pytest.mark.parametrize("form", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_fsdp2(form, tmp_path):
    """It puts DTensors in the places of the optimizer's parameters, and saves through torch."""

    def job(rank):
        def run(path, fsdp2=True):
            made = trainer(path, max_steps=6)
            if fsdp2:
                made.accelerator.state.fsdp_plugin = fsdp2_plugin(form)
                made.is_fsdp_enabled = True
                pretend_fsdp(made.accelerator)
            return made

        straight = run(tmp_path)
        straight.train()
        assert {type(p).__name__ for p in straight.model.parameters()} == {"DTensor"}
        again = run(tmp_path)
        again.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-3")
        assert_same(values(again.model), values(straight.model))
        return values(straight.model)

    here, there = run_as_torchrun(2, job)
    assert_same(here, there)
    (expected,) = run_as_torchrun(1, lambda _: trained(tmp_path / "1", batch=4))
    for name, value in expected.items():
        assert torch.allclose(here[name], value, rtol=0, atol=2e-5), name


def fsdp2_plugin(form):
    return accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
        state_dict_type=form,
    )


def test_two_ranks_train_what_one_trains_with_all_data(tmp_path):
    (expected,) = run_as_torchrun(1, lambda _: trained(tmp_path / "1", batch=4))
    for found in run_as_torchrun(2, lambda _: trained(tmp_path / "2", batch=2)):
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=0, atol=2e-5), name
    (alone,) = run_as_torchrun(1, lambda _: trained(tmp_path / "3", batch=2))
    assert not torch.allclose(alone["lm_head.weight"], expected["lm_head.weight"], atol=1e-3)


def trained(path, batch):
    run = trainer(path, per_device_train_batch_size=batch)
    run.train()
    return values(run.model)


def test_what_two_ranks_have_saved_goes_on_in_one(tmp_path):
    options = {"lr": 1e-2, "sharding": "zero2", "crossover": 1}

    def save(rank):
        run = trainer(tmp_path, options=options, callbacks=[samestep.hf.SaveWhole()], max_steps=3)
        run.train()
        return own_optimizer(run).whole_state()

    saved, _ = run_as_torchrun(2, save)
    alone = samestep.MuonAdamW(tiny_llama(), lr=1e-2)
    alone.load_state_dict(torch.load(tmp_path / "checkpoint-3/optimizer.pt", weights_only=True))
    loaded = alone.whole_state()
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[n][k], loaded[n][k]) for n in saved for k in saved[n])


def test_a_part_is_not_saved_as_if_it_were_all(tmp_path):
    """Without the callback: loud at the first save, with the way out."""

    def job(rank):
        trainer(tmp_path, options={"lr": 1e-2, "sharding": "zero2"}, max_steps=3).train()

    with pytest.raises(RanksFailed, match=r"callbacks=\[samestep\.hf\.SaveWhole\(\)\]"):
        run_as_torchrun(2, job)


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"TrainingArguments\(max_grad_norm=\.\.\.\)"):
        samestep.hf.factory(lr=1e-2, max_grad_norm=1.0)

    def job(rank):
        run = trainer(tmp_path)
        run.optimizer_cls_and_kwargs = (samestep.MuonAdamW, {"lr": 1e-2})
        with pytest.raises(ValueError, match=r"optimizer_cls_and_kwargs=samestep\.hf\.factory"):
            run.train()
        return True

    assert run_as_torchrun(1, job) == [True]
