"""What tests of pipelines share: a small GPT, its batches, and one process that trains on all."""

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import samestep
from samestep.models.gpt import GPT, GPTConfig
from samestep.parallel.pipeline import Pipeline

ROWS = 8  # of a data-parallel rank
CONFIG = GPTConfig(vocab_size=24, context=8, width=16, layers=4, heads=2, kv_heads=1, mlp_ratio=2)
OPTIONS = {"lr": 1e-2, "max_grad_norm": 0.1, "crossover": 20}


def gpt(config=CONFIG):
    torch.manual_seed(0)
    return GPT(config)


def mean_loss(logits, targets):
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(step, dp_rank=0):
    """Different tokens in every row, step and data-parallel rank."""
    generator = torch.Generator().manual_seed(1000 * step + dp_rank)
    tokens = torch.randint(24, (ROWS, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def axes(stages):
    """Ranks of this rank's stage and of its pipeline: the stage varies slowest."""
    world, rank = dist.get_world_size(), dist.get_rank()
    data = world // stages
    of_stages = [dist.new_group(list(range(s * data, (s + 1) * data))) for s in range(stages)]
    pipes = [dist.new_group(list(range(d, world, data))) for d in range(data)]
    return of_stages[rank // data], pipes[rank % data], rank % data


def pipeline_of(model, pipe, **options):
    return Pipeline(model, pipe, loss=mean_loss, **{"micro_batches": 4} | options)


def optimizer_of(pipeline, stage, **options):
    return samestep.MuonAdamW(
        pipeline.model, **OPTIONS | options, process_group=stage, stage_group=pipeline.group
    )


def gradients_alone(dp=1, step=0, model=None):
    """By name, of the mean loss over all data-parallel ranks' batches."""
    model = model or gpt()
    batches = [batch(step, rank) for rank in range(dp)]
    logits = model(torch.cat([inputs for inputs, _ in batches]))
    loss = mean_loss(logits, torch.cat([targets for _, targets in batches]))
    loss.backward()
    return loss.item(), {name: param.grad.clone() for name, param in model.named_parameters()}


def train_alone(steps, dp=1, model=None, first=0, **options):
    model = model or gpt()
    opt = samestep.MuonAdamW(model, **OPTIONS | options)
    losses, norms = [], []
    for step in range(first, first + steps):
        losses.append(gradients_alone(dp, step, model)[0])
        opt.step()
        opt.zero_grad()
        norms.append(opt.metrics()["grad_norm"].item())
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}
