"""Whether kernels run, or why not."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

import pytest
import torch
from torch import nn

import samestep
from samestep.comm.groups import rank_group
from samestep.comm.integrity.agreement import RanksDisagreeError
from samestep.groups.param_groups import LAYOUT_KEYS
from samestep.kernels import choice
from samestep.rules.adamw import AdamWRule
from samestep.rules.muon import MuonRule
from samestep.update import measure
from samestep.update.plain import GroupMath
from tests.ranks import run_forked


def test_there_are_none_for_cpu():
    assert choice.missing(torch.device("cpu")) == "kernels are for CUDA, and the device is cpu"
    assert choice.describe_kernels(torch.device("cpu")).startswith(
        "without kernels: kernels are for CUDA"
    )


def test_ranks_with_and_without_kernels_are_refused(monkeypatch):
    def build(rank):
        if rank == 1:
            without = "without kernels: triton is not installed"
            monkeypatch.setattr(
                samestep.shards.replicated.planning, "describe_kernels", lambda device: without
            )
        with pytest.raises(RanksDisagreeError, match="triton is not installed"):
            samestep.AdamW(nn.Linear(3, 2))
        return True

    assert run_forked(2, build) == [True, True]


@pytest.mark.skipif(find_spec("triton") is None, reason="without triton every graph is refused")
def test_a_graph_of_the_step_is_refused_where_there_cannot_be_one():
    param = torch.nn.Parameter(torch.ones(4, 4))
    with pytest.raises(ValueError, match="cuda_graph=True and compile cannot be combined"):
        samestep.Muon([param], cuda_graph=True, compile="eager")
    with pytest.raises(TypeError, match="cuda_graph"):
        samestep.Muon([param], cuda_graph="yes")
    optimizer = samestep.AdamW([param], cuda_graph=True)
    param.grad = torch.ones(4, 4)
    with pytest.raises(RuntimeError, match=r"param_groups\[0\]: kernels are for CUDA"):
        optimizer.step()
    assert torch.equal(param, torch.ones(4, 4))


@pytest.fixture
def _unsettled(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measure, "settled", {})
    monkeypatch.setattr(choice, "settled", measure.settled)


CPU = torch.device("cpu")


def test_a_graph_is_refused_without_kernels(monkeypatch):
    monkeypatch.setattr(samestep.optimizer.step, "missing_kernels", lambda device: "no triton")
    with pytest.raises(
        ValueError,
        match="cuda_graph=True needs samestep's Triton kernels, which cannot run: no tri",
    ):
        samestep.AdamW([nn.Parameter(torch.ones(4, 4))], cuda_graph=True)


@pytest.mark.usefixtures("_unsettled")
def test_the_fastest_way_is_taken_measured_once_and_kept(tmp_path):
    times = {(64, 64): (9, 5, 4), (64, 128): (9, 5, 4.9), (2048, 2048): (1, 5, 9)}
    asked = []

    def milliseconds(shape, device):
        asked.append(shape)
        return dict(zip(choice.WAYS, times[shape], strict=True))

    measure.settle([(60, 64), (128, 64), (2048, 2048)], CPU, None, milliseconds)
    # What is hardly faster than the usual could be noise.
    assert choice.settled == {(64, 64): "torch", (64, 128): "small", (2048, 2048): "large"}
    assert choice.way_of(64, 64) == "torch"
    assert choice.settled_line() == "products 64x64 torch, 64x128 small, 2048x2048 large"
    assert len(asked) == 3
    choice.settled.clear()
    measure.settle([(64, 128)], CPU, None, milliseconds)  # another process
    assert len(asked) == 3
    assert choice.settled == {(64, 64): "torch", (64, 128): "small"}
    (tmp_path / "samestep" / "products.json").write_text("{")  # cut short
    choice.settled.clear()
    measure.settle([(64, 128)], CPU, None, milliseconds)
    assert len(asked) == 5


@pytest.mark.usefixtures("_unsettled")
def test_ranks_take_the_way_of_the_first():
    def job(rank):
        def milliseconds(shape, device):
            assert rank == 0
            return {"large": 1.0, "small": 5.0, "torch": 6.0}

        measure.settle([(64, 64)], CPU, rank_group(), milliseconds)
        return dict(choice.settled)

    assert run_forked(3, job) == [{(64, 64): "large"}] * 3


def test_options_that_kernels_do_not_know_are_plain_torchs(monkeypatch):
    pytest.importorskip("triton")
    update = importlib.import_module("samestep.update.triton")
    monkeypatch.setattr(update, "kernels_run", lambda table, dtype, device: True)
    cpu = torch.device("cpu")
    for rule in (MuonRule(), AdamWRule()):
        read = {k: v for k, v in rule.defaults.items() if k not in rule.schedulable | LAYOUT_KEYS}
        math = GroupMath(rule, {}, read, None, False, None, None)
        assert update.can_run(math, cpu)
        assert not update.can_run(math._replace(options={**read, "new_option": False}), cpu)
    math = GroupMath(MuonRule(), {}, {**MuonRule.defaults}, None, False, None, None)
    unknown = {**math.options, "momentum_form": "heavy ball"}
    assert not update.can_run(math._replace(options=unknown), cpu)


@pytest.mark.parametrize("start", ["gram", "aol"])
def test_starts_are_plain_torchs(monkeypatch, start):
    pytest.importorskip("triton")
    update = importlib.import_module("samestep.update.triton")
    monkeypatch.setattr(update, "kernels_run", lambda table, dtype, device: True)
    rule, cpu = MuonRule(), torch.device("cpu")
    read = {k: v for k, v in rule.defaults.items() if k not in rule.schedulable | LAYOUT_KEYS}
    math = GroupMath(rule, {}, read, None, False, None, None)
    assert update.can_run(math, cpu)
    assert not update.can_run(math._replace(options={**read, "ns_start": start}), cpu)


@pytest.mark.parametrize(("name", "measured"), [("NVIDIA H200", []), ("NVIDIA B200", [2048])])
@pytest.mark.usefixtures("_unsettled")
def test_nothing_is_measured_where_the_rule_is_known_to_be_right(monkeypatch, name, measured):
    asked = []

    def milliseconds(shape, device):
        asked.append(shape[0])
        return {"large": 1.0, "small": 5.0, "torch": 0.1}

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    measure.settle([(768, 768), (2048, 2048)], torch.device("cuda"), None, milliseconds)
    assert asked == [768, *measured]
    assert choice.settled[768, 768] == "torch"
    assert choice.settled[2048, 2048] == ("torch" if measured else "small")
