"""torch's own pipeline schedules beside an optimizer of stages: every schedule, every layout."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import samestep
from tests.ranks import run_cases, run_forked
from tests.soak import SOAK, some, twin_cases

STEPS = 2
MICRO_BATCHES = 4
OPTIONS = {"lr": 1e-2, "max_grad_norm": 0.01, "crossover": 4}
# By name: the schedule, and the stages of both places of a pipeline.
SCHEDULES = {
    "gpipe": (ScheduleGPipe, ([0], [1])),
    "1f1b": (Schedule1F1B, ([0], [1])),
    "interleaved": (ScheduleInterleaved1F1B, ([0, 2], [1, 3])),
    "zero bubble": (ScheduleInterleavedZeroBubble, ([0, 2], [1, 3])),
    "zbv": (ScheduleZBVZeroBubble, ([0, 3], [1, 2])),
}
LAYOUTS = {
    "none": {"sharding": "none"},
    "zero1": {"sharding": "zero1"},
    "zero2": {"sharding": "zero2"},
    "flat zero1": {"buffers": "flat", "sharding": "zero1"},
    "flat zero2": {"buffers": "flat", "sharding": "zero2"},
}


class Layers(nn.Module):
    """Some layers of the model, under the names that they have in the whole."""

    def __init__(self, numbers):
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
        self.layers = nn.ModuleDict({str(number): layers[number] for number in numbers})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


def mean_loss(outputs, targets):
    return (outputs - targets).square().mean()


def batch(step, data):
    generator = torch.Generator().manual_seed(10 * step + data)
    return torch.randn(2, 8, 8, generator=generator).unbind()


def alone():
    """Norms and parameters of one process with all layers and the batches of both data ranks."""
    model = Layers(range(4))
    opt = samestep.MuonAdamW(model, **OPTIONS)
    norms = []
    for step in range(STEPS):
        inputs, targets = (
            torch.cat(pair) for pair in zip(batch(step, 0), batch(step, 1), strict=True)
        )
        mean_loss(model(inputs), targets).backward()
        opt.step()
        opt.zero_grad()
        norms.append(opt.metrics()["grad_norm"].item())
    return norms, {name: param.detach() for name, param in model.named_parameters()}


def groups(rank):
    """Ranks 0, 1 are one place of a pipeline, 2, 3 the other; 0, 2 and 1, 3 are pipelines."""
    if groups.made is None:
        groups.made = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    return groups.made[rank // 2], groups.made[2 + rank % 2]


groups.made = None


def train(rank, name, options, clips_by_hand=False):
    """Norms, parameters and warnings of a training with a schedule of torch."""
    beside, pipe = groups(rank)
    kind, places = SCHEDULES[name]
    mine = places[rank // 2]
    stages = len(places) * len(mine)
    each = 4 // stages
    parts = {stage: Layers(range(stage * each, (stage + 1) * each)) for stage in mine}
    own = nn.ModuleDict({str(stage): part for stage, part in parts.items()})
    named = [(param_name.partition(".")[2], param) for param_name, param in own.named_parameters()]
    opt = samestep.MuonAdamW(named, **OPTIONS, **options, process_group=beside, stage_group=pipe)
    of_torch = [
        PipelineStage(part, stage, stages, torch.device("cpu"), group=pipe)
        for stage, part in parts.items()
    ]
    schedule = kind(of_torch[0] if each == 2 else of_torch, MICRO_BATCHES, loss_fn=mean_loss)
    norms = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(STEPS):
            inputs, targets = batch(step, rank % 2)
            given = (inputs,) if 0 in mine else ()
            asked = {"target": targets} if stages - 1 in mine else {}
            schedule.step(*given, **asked)
            if clips_by_hand:
                nn.utils.clip_grad_norm_(own.parameters(), 1e-3)
            opt.step()
            opt.zero_grad()
            norms.append(opt.metrics()["grad_norm"].item())
    params = {param_name: param.detach() for param_name, param in named}
    return norms, params, [str(warning.message) for warning in caught]


def cases():
    """Every schedule in the usual layout, and 1F1B in all; with overlap or without, in turns."""
    layouts = {"1f1b": list(LAYOUTS), "zbv": ["zero2", "flat zero2"]}
    pairs = [(name, own) for name in SCHEDULES for own in layouts.get(name, ["zero2"])]
    for place, pair in enumerate(pairs):
        for overlap in (False, True) if SOAK else (place % 2 == 1,):
            yield *pair, overlap


def test_schedules_scale_gradients_in_every_layout_and_nobody_is_blamed():
    norms, wanted = alone()
    assert min(norms) > 2 * OPTIONS["max_grad_norm"]

    def job(rank, case):
        name, layout, overlap = case
        return train(rank, name, {**LAYOUTS[layout], "overlap_grad_reduce": overlap})

    for (name, layout, overlap), found in run_cases(4, cases(), job):
        for own_norms, params, said in found:
            assert own_norms == pytest.approx(norms, rel=1e-5), (name, layout, overlap)
            for param_name, param in params.items():
                torch.testing.assert_close(param, wanted[param_name], rtol=0, atol=2e-6)
            assert len(said) == overlap, (name, layout, said)
            assert all("without saying which is the last" in text for text in said)


@twin_cases("interleaved")
@pytest.mark.parametrize("name", some(["gpipe", "1f1b", "interleaved"]))
def test_clipping_by_hand_beside_a_schedule_is_told_all_the_same(name):
    for _, _, said in run_forked(4, train, name, {}, True):
        (message,) = said
        assert "every rank has clipped by the norm of its own gradients" in message
