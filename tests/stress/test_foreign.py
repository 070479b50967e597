"""Optimizers of others in the harness: those that keep ranks in step hold, broken ones are told."""

import json
import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from samestep.cli import main
from samestep.lab.stress.foreign import FOREIGN, ForeignCase, run_case
from tests.limits import limit
from tests.soak import some

RATE = 2**-6


class Averaging(torch.optim.SGD):
    """Averages the gradients that any rank has, then steps: right, if slow."""

    def __init__(self, params, momentum=0.9):
        super().__init__(params, lr=RATE, momentum=momentum)

    def each(self):
        return [param for group in self.param_groups for param in group["params"]]

    def average(self, param):
        here = torch.tensor([param.grad is not None], dtype=torch.int32)
        dist.all_reduce(here, dist.ReduceOp.MAX)
        if here:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()

    def step(self, closure=None):
        for param in self.each():
            self.average(param)
        super().step()


class NoAverage(Averaging):
    def average(self, param):
        pass


class SumForMean(Averaging):
    def average(self, param):
        super().average(param)
        if param.grad is not None:
            param.grad *= dist.get_world_size()


class ZerosForNone(Averaging):
    def average(self, param):
        param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        super().average(param)


class LeavesOutCollectives(Averaging):
    def average(self, param):
        if dist.get_rank() != 1:
            super().average(param)


class ForgetsMomentum(Averaging):
    def load_state_dict(self, state_dict):
        super().load_state_dict({**state_dict, "state": {}})


class LosesMomentumLater(Averaging):
    """One whose state dict is right, and which goes on from other numbers all the same."""

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.fresh = True

    def step(self, closure=None):
        if getattr(self, "fresh", False):
            for state in self.state.values():
                state["momentum_buffer"].zero_()
            self.fresh = False
        super().step()


class Raises(Averaging):
    def step(self, closure=None):
        if dist.get_rank() == 1:
            raise ValueError("a matrix of 3 rows")
        super().step()


class Dies(Averaging):
    def step(self, closure=None):
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        super().step()


def of(kind):
    return lambda model: kind(model.parameters())


def run(kind, scenario, world=2, grads="local"):
    return run_case(ForeignCase(scenario, world, grads), of(kind), watchdog=limit(2.0))


@pytest.mark.parametrize("scenario", FOREIGN)
def test_a_right_one_holds(scenario):
    result = run(Averaging, scenario, world=3 if scenario == "odd_shapes" else 2)
    assert (result.status, result.message) == ("held", "")
    assert result.replicas
    assert result.alone < 1e-5
    assert result.untouched is (True if scenario == "absent_everywhere" else None)
    assert result.state_dict is (True if scenario == "resume" else None)


BROKEN = [
    (NoAverage, "dense", "replicas", "ranks differ in adam after step 1"),
    (SumForMean, "dense", "alone", "of its way from the single process"),
    (ZerosForNone, "absent_everywhere", "untouched", "without a gradient"),
    (ForgetsMomentum, "resume", "state_dict", "other keys"),
    (LosesMomentumLater, "resume", "alone", "of its way from the single process"),
]


@pytest.mark.parametrize(("kind", "scenario", "question", "message"), BROKEN)
def test_a_broken_one_is_told(kind, scenario, question, message):
    result = run(kind, scenario)
    assert result.status == "differs"
    assert message in result.message
    assert result.alone > 0.1 if question == "alone" else getattr(result, question) is False


@pytest.mark.parametrize(
    ("kind", "scenario", "status", "message"),
    [
        (LeavesOutCollectives, "dense", "hang", "no answer: rank 0 in step 1, rank 1 in step 8"),
        (Raises, "dense", "raised", "rank 1 in step 1: ValueError: a matrix of 3 rows"),
        (Dies, "dense", "died", "rank 1 in step 1: died of SIGKILL"),
    ],
)
def test_ranks_that_do_not_come_to_their_end_are_a_row(kind, scenario, status, message):
    result = run(kind, scenario)
    assert result.status == status
    assert message in result.message
    assert result.replicas is None


def zero(model):
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=RATE)


def sharded(model):
    fully_shard(model)
    return torch.optim.AdamW(model.parameters(), lr=RATE)


@pytest.mark.parametrize(
    ("factory", "scenario", "grads"),
    some([
        (zero, "resume", "ddp"),
        (zero, "absent_somewhere", "ddp"),
        (sharded, "odd_shapes", "reduced"),
        (sharded, "resume", "reduced"),
    ]),
)  # fmt: skip
def test_those_of_torch_hold(factory, scenario, grads):
    result = run_case(ForeignCase(scenario, 4, grads), factory)
    assert (result.status, result.message) == ("held", "")


def test_what_ranks_cannot_tell_apart_is_not_asked():
    for scenario in ("absent_somewhere", "accumulation"):
        result = run(Averaging, scenario, grads="reduced")
        assert result.status == "does_not_apply"
    own = ForeignCase("odd_shapes", 2)
    assert own.reason_against(lambda: nn.Linear(2, 2)) == "it has a model of its own"


SOURCE = """
import torch

def good(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)

def bad(model):
    return torch.optim.AdamW([{"params": [p], "lr": 0.01} for p in model.parameters()], foo=1)
"""


def test_the_command(tmp_path, capsys):
    path = tmp_path / "theirs.py"
    path.write_text(SOURCE)
    words = ["stress", "--optimizer", f"{path}:good", "--world-size", "2", "--out", str(tmp_path)]
    assert main([*words, "--scenario", "absent_everywhere"]) == 0
    assert "All 1 cases held." in capsys.readouterr().out
    receipt = json.loads((tmp_path / "foreign.json").read_text())
    assert (receipt["verdict"], receipt["asked"]["grads"]) == ("held", "reduced")
    (case,) = receipt["cases"]
    assert (case["scenario"], case["untouched"], case["alone"]) == ("absent_everywhere", True, 0.0)

    assert main([*words, "--scenario", "dense", "--grads", "local"]) == 1
    shown = capsys.readouterr().out
    assert "ranks differ in adam after step 1" in " ".join(shown.split())
    assert json.loads((tmp_path / "foreign.json").read_text())["verdict"] == "failed"


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--lanes", "2"], "leave out --lanes"),
        (["--layout", "zero2"], "leave out --layout"),
        (["--scenario", "clipped"], "'clipped' is unknown; choose from all, dense"),
        (["--tolerance", "0"], "--tolerance must be above 0, got 0.0"),
        (["--world-size", "1"], "--world-size is too small"),
    ],
)
def test_what_cannot_be_asked_is_told(tmp_path, capsys, extra, said):
    path = tmp_path / "theirs.py"
    path.write_text(SOURCE)
    assert main(["stress", "--optimizer", f"{path}:good", *extra]) == 2
    assert said in capsys.readouterr().err


def test_a_factory_that_raises_is_told_at_once(tmp_path, capsys):
    path = tmp_path / "theirs.py"
    path.write_text(SOURCE)
    assert main(["stress", "--optimizer", f"{path}:bad", "--out", str(tmp_path / "none")]) == 2
    assert "unexpected keyword argument 'foo'" in capsys.readouterr().err
    assert main(["stress", "--optimizer", "theirs"]) == 2
    assert "is not PATH:FACTORY" in capsys.readouterr().err
    assert main(["stress", "--grads", "local"]) == 2
    assert "--grads only works with --optimizer" in capsys.readouterr().err
