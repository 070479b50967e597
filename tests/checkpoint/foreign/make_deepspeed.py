"""Write files with DeepSpeed itself, on two CPU ranks.

    PYTHONPATH=. DS_ACCELERATOR=cpu python -m tests.checkpoint.foreign.make_deepspeed FOLDER

Per stage a checkpoint after some steps, and the parameters of the run that went on from there.
"""

import os
import sys
from pathlib import Path

import torch
import torch.multiprocessing as mp

from tests.checkpoint.foreign.net import ADAMW, AFTER, BEFORE, Net, adamw_groups, tokens_of

WORLD = 2
CASES = {"zero1": (1, False), "zero2": (2, False), "zero3": (3, False), "zero2_bf16": (2, True)}


def run(rank, folder, port):
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu",
    }  # fmt: skip
    import deepspeed

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    for name, (stage, bf16) in CASES.items():
        model = Net()
        optimizer = torch.optim.AdamW(adamw_groups(model), **ADAMW)
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": bf16},
            "gradient_clipping": 0.0,
        }
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        train(engine, range(BEFORE), rank)
        engine.save_checkpoint(folder / name, tag="step5", client_state={"step": BEFORE})
        train(engine, range(BEFORE, BEFORE + AFTER), rank)
        engine.save_checkpoint(folder / name, tag="later")
        if rank == 0:
            from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

            later = get_fp32_state_dict_from_zero_checkpoint(folder / name, tag="later")
            later = {key: value.clone() for key, value in later.items()}
            torch.save(later, folder / name / "expected.pt")
    torch.distributed.barrier()


def train(engine, steps, rank):
    for step in steps:
        engine.backward(engine(tokens_of(step, rank, WORLD)))
        engine.step()


if __name__ == "__main__":
    mp.spawn(run, (Path(sys.argv[1]), 29533), nprocs=WORLD)
