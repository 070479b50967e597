"""The norm that is begun before a step: whose it is, when it is prepared, and what it keeps."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.nn import Parameter

pytest.importorskip("triton")

from samestep.kernels import norm
from samestep.optimizer import norm_ahead
from samestep.optimizer.norm_ahead import NormAhead

prepared = []


class PlainSum:
    """Stands for the kernel: reads what is at the addresses when it runs."""

    def __init__(self, tensors):
        prepared.append(len(tensors))
        self.views = [tensor.view(-1).detach() for tensor in tensors]

    def run(self):
        return torch.stack([view.double().square().sum() for view in self.views]).sum()


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    prepared.clear()
    monkeypatch.setattr(norm, "SquareSum", PlainSum)
    monkeypatch.setattr(norm_ahead, "missing_kernels", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def groups():
    torch.manual_seed(0)
    params = [Parameter(torch.zeros(4, 6)) for _ in range(5)]
    for param in params[:4]:
        param.grad = torch.randn(4, 6)
    return [{"params": params[:2]}, {"params": params[2:]}]


def grads_of(made):
    return [p.grad for group in made for p in group["params"] if p.grad is not None]


def plain_sum(grads):
    return torch.stack([grad.double().square().sum() for grad in grads]).sum()


def test_it_is_prepared_once_for_gradients_that_stay():
    ahead, made = NormAhead(), groups()
    for step in range(3):
        for grad in grads_of(made):
            grad.mul_(1 + step)
        with ahead.started(made, as_graph=False):
            assert torch.equal(ahead.sum_of(grads_of(made)), plain_sum(grads_of(made)))
    assert prepared == [4]
    address = ahead._square.data_ptr()
    made[0]["params"][0].grad = torch.randn(4, 6)  # elsewhere
    made[1]["params"][2].grad = torch.randn(4, 6)  # one more
    with ahead.started(made, as_graph=False):
        assert torch.equal(ahead.sum_of(grads_of(made)), plain_sum(grads_of(made)))
    assert prepared == [4, 5]
    assert ahead._square.data_ptr() == address  # where a recorded step reads it


def test_it_is_known_of_the_very_gradients_and_in_the_step_alone():
    ahead, made = NormAhead(), groups()
    assert ahead.sum_of(grads_of(made)) is None
    with ahead.started(made, as_graph=False):
        grads = grads_of(made)
        assert ahead.sum_of(grads) is not None
        assert ahead.sum_of(grads[:3]) is None
        assert ahead.sum_of([*grads[:3], grads[3].clone()]) is None
        assert ahead.sum_of([]) is None
    assert ahead.sum_of(grads) is None
    with pytest.raises(ZeroDivisionError), ahead.started(made, as_graph=False):
        raise ZeroDivisionError  # a step that was refused
    assert ahead.sum_of(grads) is None


def test_it_keeps_no_gradient(monkeypatch):
    monkeypatch.setattr(
        norm, "SquareSum", lambda tensors: SimpleNamespace(run=lambda: torch.ones(()))
    )
    ahead, made = NormAhead(), groups()
    with ahead.started(made, as_graph=False):
        pass
    grad = weakref.ref(made[0]["params"][0].grad)
    made[0]["params"][0].grad = None
    assert grad() is None


@pytest.mark.parametrize("kind", ["none", "sparse", "float64", "strided"])
def test_what_no_kernel_sums_is_left_to_the_step(kind):
    ahead, made = NormAhead(), groups()
    param = made[0]["params"][0]
    if kind == "sparse":
        param.grad = torch.eye(4, 6).to_sparse()
    elif kind == "float64":
        made[0]["params"][0] = Parameter(torch.zeros(4, 6, dtype=torch.float64))
        made[0]["params"][0].grad = torch.ones(4, 6, dtype=torch.float64)
    elif kind == "strided":
        param.grad = torch.ones(6, 4).mT
    else:
        for group in made:
            for each in group["params"]:
                each.grad = None
    with ahead.started(made, as_graph=False):
        assert ahead.sum_of(grads_of(made)) is None
    assert prepared == []
