"""Hugging Face's Trainer: one line, on 1 and 2 ranks; a resumed run is the run without a break."""

from __future__ import annotations

import pytest
import torch

import samestep
from tests.integrations.ranks import Tokens, assert_same, run_as_torchrun, values

transformers = pytest.importorskip("transformers", reason="make test-integrations installs it")


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
        output_dir=str(path), per_device_train_batch_size=2, use_cpu=True, seed=0, report_to=[],
        disable_tqdm=True, dataloader_num_workers=0, lr_scheduler_type="linear",
        **{"max_steps": 6, "save_steps": 3, "logging_steps": 1, **arguments},
    )  # fmt: skip
    options = {"lr": 1e-2} if options is None else options
    return transformers.Trainer(
        model or tiny_llama(),
        args,
        train_dataset=Tokens(),
        optimizer_cls_and_kwargs=samestep.hf.factory(**options),
        callbacks=list(callbacks),
    )


WAYS = {
    "one line": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "bf16": {"bf16": True},
    "no clipping": {"max_grad_norm": 0.0},
}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_run_is_the_run_without_a_break(world, way, tmp_path):
    def job(rank):
        straight = trainer(tmp_path, **WAYS[way])
        before = values(straight.model)
        straight.train()
        own = samestep.integrations.hf.unwrapped(straight.optimizer)
        again = trainer(tmp_path, **WAYS[way])
        again.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-3")
        assert_same(values(again.model), values(straight.model))
        assert all(not torch.equal(before[n], v) for n, v in values(straight.model).items())
        return values(straight.model), own._distribution.grads, len(own.state)

    results = run_as_torchrun(world, job)
    for found, grads, _ in results:
        assert_same(found, results[0][0])
        assert grads == ("reduced" if world == 2 else "local")
