"""The step runner."""

from __future__ import annotations

import torch
from torch import nn

import samestep
from samestep.optimizer.rule_runner import ClipDecision, RuleRunner
from samestep.optimizer.step import StepRunner


def test_each_device_is_told_of_the_step_where_it_is(monkeypatch):
    """A kernel reads the factor of clipping by its address, which another device cannot."""
    params = [nn.Parameter(torch.ones(6, 4, device=device)) for device in ("cpu", "meta")]
    optimizer = samestep.Muon(params, max_grad_norm=1.0)
    decision = ClipDecision(torch.tensor(0.5), only_if=torch.tensor(True))
    monkeypatch.setattr(StepRunner, "_clip", lambda self, _: self.rules.decide(decision))
    told = {}

    def look(self, device, index, members):
        told[device.type] = self.math(index, device)

    monkeypatch.setattr(RuleRunner, "_update_on", look)
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert list(told) == ["cpu", "meta"]
    for kind, math in told.items():
        read = [math.factor, math.only_if, *math.scalars.values()]
        assert {tensor.device.type for tensor in read} == {kind}
