"""LoRA on top of pipeline, tensor and sequence parallel and FSDP2 at once."""

from dataclasses import replace

import pytest
import torch

import samestep
from samestep.mesh import build
from samestep.models.gpt import gpt_plan
from samestep.parallel.lora import adapters, add_lora
from samestep.parallel.stack import Stack
from tests.parallel.pipelines import CONFIG, OPTIONS, batch, gpt, mean_loss
from tests.parallel.test_lora import fill
from tests.ranks import run_forked
from tests.soak import SOAK

SHAPE = replace(CONFIG, layers=2, kv_heads=2)
PATTERNS = ["*.attention.q", "*.mlp.*", "head"]  # the first stage has no head
STEPS = 3 if SOAK else 2


def train(rank, degrees, path):
    mesh = build(**degrees)
    stack = Stack(
        gpt(SHAPE),
        gpt_plan(SHAPE),
        mesh,
        loss=mean_loss,
        micro_batches=4,
        adapt=lambda part: add_lora(part, PATTERNS, rank=4, mesh=mesh),
    )
    opt = stack.optimizer(**OPTIONS | {"max_grad_norm": 0.03})
    fill(opt)
    names = [name for name, _ in adapters(stack.model).named_parameters()]
    grads = None
    for step in range(STEPS):
        stack.backward(*batch(step, stack.batch_place))
        grads = grads or {name: opt.full_gradient(name) for name in names}
        opt.step()
        opt.zero_grad()
    samestep.save(path, adapters(stack.model), opt)
    return grads, opt.metrics()["grad_norm"].item()


LAYOUTS = {"PP x TP x SP": {"pp": 2, "tp": 2, "sequence_parallel": True}, "PP x FSDP2": {"pp": 2}}


@pytest.mark.parametrize("layout", list(LAYOUTS) if SOAK else ["PP x TP x SP"])
def test_factors_are_those_of_one_process(layout, tmp_path):
    degrees = LAYOUTS[layout]
    dp = 4 // (degrees["pp"] * degrees.get("tp", 1))
    model = gpt(SHAPE)
    add_lora(model, PATTERNS, rank=4)
    opt = samestep.MuonAdamW(model, **OPTIONS | {"max_grad_norm": 0.03})
    fill(opt)
    wanted, norm = None, 0.0
    for step in range(STEPS):
        batches = [batch(step, place) for place in range(dp)]
        logits = model(torch.cat([inputs for inputs, _ in batches]))
        mean_loss(logits, torch.cat([targets for _, targets in batches])).backward()
        wanted = wanted or {n: p.grad.clone() for n, p in adapters(model).named_parameters()}
        opt.step()
        opt.zero_grad()
        norm = opt.metrics()["grad_norm"].item()
    assert norm > 2 * 0.03
    found = run_forked(4, train, degrees, tmp_path / "a")
    seen = set()
    for grads, own_norm in found:
        assert own_norm == pytest.approx(norm, rel=1e-4)
        seen |= grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(grad, wanted[name], rtol=0, atol=1e-6, msg=name)
    assert seen == wanted.keys()
    loaded = gpt(SHAPE)
    add_lora(loaded, PATTERNS, rank=4)
    samestep.load(tmp_path / "a", adapters(loaded), samestep.MuonAdamW(loaded))
    for name, param in adapters(loaded).named_parameters():
        trained = model.get_parameter(name)
        torch.testing.assert_close(param, trained, rtol=0, atol=2e-5, msg=name)
