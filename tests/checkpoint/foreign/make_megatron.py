"""Write files with Megatron itself (megatron-core), on two CPU ranks.

    PYTHONPATH=. python -m tests.checkpoint.foreign.make_megatron FOLDER

Its distributed data parallel, distributed optimizer and checkpoints are the real ones; where they
ask for the GPU of this process they are told of the CPU.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.multiprocessing as mp
from torch.overrides import TorchFunctionMode

from tests.checkpoint.foreign.net import ADAMW, AFTER, BEFORE, Net, tokens_of

WORLD = 2
FORMATS = ("fully_reshardable", "dp_reshardable")  # its other ones it writes no more


class OnCpu(TorchFunctionMode):
    """What is made for the GPU is made for the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def pretend():
    """The CPU in place of the GPU."""
    kind = torch.Tensor.type

    def type_of(tensor, *args, **kwargs):
        found = kind(tensor, *args, **kwargs)
        if not isinstance(found, str):
            return found
        return f"torch.cuda.{found.split('.')[-1]}"

    torch.Tensor.type = type_of
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *args: None
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor


def run(rank, folder, port):
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }  # fmt: skip
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=WORLD)
    pretend()
    with OnCpu():
        write(rank, folder)


def write(rank, folder):
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel(distributed_timeout_minutes=2)
    net = Net()
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=150)
    model = DistributedDataParallel(config, ddp, net, disable_bucketing=False)
    options = OptimizerConfig(
        optimizer="adam", lr=ADAMW["lr"], weight_decay=0.1, adam_beta1=ADAMW["betas"][0],
        adam_beta2=ADAMW["betas"][1], adam_eps=ADAMW["eps"], use_distributed_optimizer=True,
        clip_grad=0.0, min_lr=ADAMW["lr"],
    )  # fmt: skip
    optimizer = get_megatron_optimizer(options, [model])
    train(model, optimizer, range(BEFORE), rank)
    for form in FORMATS:
        shards = {
            name: ShardedTensor.from_rank_offsets(name, param, replica_id=(0, 0, rank))
            for name, param in net.state_dict(keep_vars=True).items()
        }
        target = folder / form / f"iter_{BEFORE:07d}"
        if rank == 0:
            target.mkdir(parents=True)
            (folder / form / "latest_checkpointed_iteration.txt").write_text(str(BEFORE))
        torch.distributed.barrier()
        metadata = {"distrib_optim_sharding_type": form}
        state = optimizer.sharded_state_dict(shards, metadata=metadata)
        content = {"model": shards, "optimizer": state, "iteration": BEFORE}
        dist_checkpointing.save(content, str(target))
    train(model, optimizer, range(BEFORE, BEFORE + AFTER), rank)
    if rank == 0:
        torch.save(net.state_dict(), folder / "expected.pt")
        names = [name for name, _ in net.named_parameters()]
        (folder / "names.json").write_text(json.dumps(names))
    torch.distributed.barrier()


def train(model, optimizer, steps, rank):
    for step in steps:
        model.zero_grad_buffer()
        model(tokens_of(step, rank, WORLD)).backward()
        model.finish_grad_sync()
        optimizer.step()


if __name__ == "__main__":
    mp.spawn(run, (Path(sys.argv[1]), 29544), nprocs=WORLD)
