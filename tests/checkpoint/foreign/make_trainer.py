"""Write a checkpoint with Hugging Face's Trainer, of a tiny GPT-2.

    PYTHONPATH=. python -m tests.checkpoint.foreign.make_trainer FOLDER

Beside it are the names of its groups in order, and the state that each parameter has.
"""

import json
import sys
from pathlib import Path

import torch
import transformers

SIZES = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 16, "n_positions": 8}


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, place):
        generator = torch.Generator().manual_seed(place)
        tokens = torch.randint(0, 16, (8,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def write(folder):
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES))
    options = transformers.TrainingArguments(
        folder / "run", max_steps=3, save_steps=3, per_device_train_batch_size=4, use_cpu=True,
        weight_decay=0.1, learning_rate=1e-2, report_to=[], disable_tqdm=True, save_total_limit=1,
    )  # fmt: skip
    trainer = transformers.Trainer(model, options, train_dataset=Tokens())
    trainer.train()
    decayed = trainer.get_decay_parameter_names(model)
    names = [name for name, _ in model.named_parameters()]
    groups = [[n for n in names if n in decayed], [n for n in names if n not in decayed]]
    optimizer = trainer.optimizer
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
    state = {name: dict(optimizer.state[param]) for name, param in model.named_parameters()}
    torch.save(state, folder / "expected.pt")
    (folder / "names.json").write_text(json.dumps(groups))
    for name in ("training_args.bin", "rng_state.pth", "scheduler.pt", "generation_config.json"):
        (folder / "run" / "checkpoint-3" / name).unlink(missing_ok=True)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
