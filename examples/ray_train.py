"""Ray Train: a worker is killed, Ray starts all of them anew, and the run ends with the same bits.

    pip install "ray[train]"
    python -m examples.ray_train

A local Ray of two workers trains a small GPT twice with `sharding="zero2"`: once without a break,
and once with a worker that kills itself in the middle of a step. Ray's `FailureConfig` starts the
workers again, they load the newest checkpoint, and at the end both runs are compared.

On a cluster `--out` is a folder that all hosts see, and `ray.init()` finds the cluster; the loop
stays as it is.
"""

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import samestep
from examples.gpt import GPT, GPTConfig

VOCABULARY, LENGTH = 64, 16


def train(config: dict[str, Any]) -> None:
    """What every worker runs; Ray has made the process group."""
    from ray import train as ray_train

    rank = ray_train.get_context().get_world_rank()
    folder = Path(config["folder"])
    model = new_model()
    opt = samestep.MuonAdamW(model, lr=1e-2, max_grad_norm=1.0, sharding=config["sharding"])
    schedule = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, config["steps"])
    first = 0
    if (folder / "LATEST").exists():
        loaded = samestep.load(folder, model, opt)  # written whole or not at all
        schedule.load_state_dict(loaded.extra["schedule"])
        first = loaded.extra["step"]
    (folder / f"began_at_{first}").touch()
    for step in range(first, config["steps"]):
        loss = loss_of(model, step, rank)
        loss.backward()
        if step == config["kill_at"] and rank == 1 and first == 0:
            os.kill(os.getpid(), signal.SIGKILL)  # the other one is about to wait for it
        opt.step()
        opt.zero_grad()
        schedule.step()
        done = step + 1
        if done % config["every"] == 0 or done == config["steps"]:
            extra = {"step": done, "schedule": schedule.state_dict()}
            samestep.save(folder / f"step_{done}", model, opt, extra=extra)
        ray_train.report({"step": done, "loss": loss.item()})


def new_model() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=VOCABULARY, context=LENGTH, width=32, heads=2, layers=2))


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Of tokens that depend on step and rank alone, so that a run that goes on sees the same."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, VOCABULARY, (4, LENGTH + 1), generator=generator)
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def run(folder: Path, asked: argparse.Namespace, kill_at: int | None) -> list[int]:
    """Train into a new folder; the steps at which workers began."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    folder.mkdir(parents=True)
    config = {
        "folder": str(folder), "sharding": asked.sharding, "steps": asked.steps,
        "every": asked.every, "kill_at": kill_at,
    }  # fmt: skip
    TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        run_config=RunConfig(
            name=folder.name,
            storage_path=str(folder.parent / "ray"),
            failure_config=FailureConfig(max_failures=1),
        ),
    ).fit()
    return sorted(int(path.name.removeprefix("began_at_")) for path in folder.glob("began_at_*"))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The parameters of the newest checkpoint, in one process."""
    model = new_model()
    samestep.load(folder, model)
    return {name: param.detach() for name, param in model.named_parameters()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--every", type=int, default=4, help="steps between checkpoints")
    parser.add_argument("--kill-at", type=int, default=6, help="the step in which a worker dies")
    parser.add_argument("--sharding", choices=("none", "zero1", "zero2"), default="zero2")
    parser.add_argument("--out", type=Path, default=Path("out/ray"))
    asked = parser.parse_args(arguments)
    if not asked.every <= asked.kill_at < asked.steps:
        parser.error("--kill-at is after the first checkpoint, --every, and before --steps")
    out = asked.out.resolve()
    if out.exists() and any(out.iterdir()):
        parser.error(f"--out: {out} is not empty: choose another, or remove it")
    try:
        import ray
    except ImportError:
        print('error: there is no Ray: pip install "ray[train]"', file=sys.stderr)
        return 2
    ray.init(
        num_cpus=3,  # a worker each, and one that watches them
        include_dashboard=False,
        object_store_memory=200 * 2**20,
        log_to_driver=False,
        logging_level="warning",
    )
    try:
        began = run(out / "straight", asked, kill_at=None)
        print(f"without a break: began at {began}")
        began = run(out / "killed", asked, kill_at=asked.kill_at)
        print(f"a worker killed in step {asked.kill_at}: began at {began}")
    finally:
        ray.shutdown()
    last = asked.kill_at // asked.every * asked.every
    if began != sorted({0, last}):
        print(f"error: Ray was to go on at step {last}", file=sys.stderr)
        return 1
    found, expected = weights(out / "killed"), weights(out / "straight")
    differ = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    print(f"{len(expected) - len(differ)} of {len(expected)} parameters have the same bits")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
