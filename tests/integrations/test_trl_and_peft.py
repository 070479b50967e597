"""LoRA by peft, alone and in trl's SFTTrainer: adapters are trained, on 1 and 2 ranks."""

from __future__ import annotations

import pytest
import torch

import samestep
from tests.integrations.ranks import Tokens, assert_same, run_as_torchrun, values

peft = pytest.importorskip("peft", reason="make test-integrations installs it")
transformers = pytest.importorskip("transformers", reason="make test-integrations installs it")
from tests.integrations.test_trainer import tiny_llama, trainer  # noqa: E402

MODULES = ["q_proj", "v_proj", "up_proj"]


def lora(**options):
    return peft.LoraConfig(r=4, lora_alpha=8, target_modules=MODULES, **options)


def trained(model):
    return {name: value for name, value in values(model).items() if "lora" in name}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("way", ["LoRA", "DoRA"])
def test_adapters_in_the_trainer(world, way, tmp_path):
    def job(rank):
        def run():
            torch.manual_seed(0)
            model = peft.get_peft_model(tiny_llama(), lora(use_dora=way == "DoRA"))
            return trainer(tmp_path, model=model)

        straight = run()
        before = values(straight.model)
        straight.train()
        again = run()
        again.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-3")
        assert_same(values(again.model), values(straight.model))
        after = values(straight.model)
        changed = {name for name in after if not torch.equal(before[name], after[name])}
        assert changed == {name for name, p in straight.model.named_parameters() if p.requires_grad}
        assert len(changed) >= 2 * 2 * len(MODULES)
        return after

    results = run_as_torchrun(world, job)
    for found in results:
        assert_same(found, results[0])


def sft(path, **options):
    trl = pytest.importorskip("trl", reason="make test-integrations installs it")
    datasets = pytest.importorskip("datasets", reason="make test-integrations installs it")
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {f"w{n}": n for n in range(62)} | {"<pad>": 62, "<eos>": 63}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")),
        pad_token="<pad>",
        eos_token="<eos>",
    )
    rows = [{"input_ids": row["input_ids"].tolist()} for row in (Tokens(16)[n] for n in range(16))]
    args = trl.SFTConfig(
        output_dir=str(path), max_steps=6, save_steps=3, per_device_train_batch_size=2,
        use_cpu=True, bf16=False, seed=0, report_to=[], disable_tqdm=True, logging_steps=1,
        gradient_checkpointing=False,
    )  # fmt: skip
    return trl.SFTTrainer(
        tiny_llama() if "model" not in options else options.pop("model"),
        args,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        **options,
    )


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("adapters", [False, True], ids=["full", "peft_config"])
def test_trl(world, adapters, tmp_path):
    def job(rank):
        def run():
            torch.manual_seed(0)
            return sft(
                tmp_path,
                optimizer_cls_and_kwargs=samestep.hf.factory(lr=1e-2),
                **({"peft_config": lora()} if adapters else {}),
            )

        straight = run()
        before = values(straight.model)
        straight.train()
        again = run()
        again.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-3")
        after = values(straight.model)
        assert_same(values(again.model), after)
        changed = {name for name in after if not torch.equal(before[name], after[name])}
        wanted = {name for name in after if "lora" in name or not adapters}
        assert changed == wanted
        return after

    results = run_as_torchrun(world, job)
    for found in results:
        assert_same(found, results[0])


def test_trl_with_an_optimizer_from_before_its_adapters(tmp_path):
    def job(rank):
        model = tiny_llama()
        opt = samestep.MuonAdamW(model, lr=1e-2)
        run = sft(tmp_path, model=model, optimizers=(opt, None), peft_config=lora())
        with pytest.raises(RuntimeError, match=r"are frozen, and .*samestep\.hf\.factory"):
            run.train()
        return True

    assert run_as_torchrun(1, job) == [True]
