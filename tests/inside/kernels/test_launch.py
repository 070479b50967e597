"""Kernels are compiled before they are launched, and nothing is launched meanwhile."""

from __future__ import annotations

import logging

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime import _async_compile

import samestep
from samestep.kernels import launch as launches
from samestep.kernels.launch import compile_ahead, is_compiling, launch
from samestep.optimizer import rule_runner

CPU = torch.device("cpu")


class Compiled:
    """What Triton makes of a kernel; `run` has the code that launches it made."""

    def __init__(self, seen):
        self.seen = seen

    @property
    def run(self):
        self.seen.append("loaded")


class Kernel:
    """A kernel as Triton has it: `warmup` only compiles, in threads where somebody offers them."""

    def __init__(self, seen, fails=False):
        self.seen, self.fails = seen, fails

    def warmup(self, *args, grid, **options):
        self.seen.append(("compiled", args, grid, options))
        mode = _async_compile.active_mode.get()
        mode.submit(id(self), self._compile, lambda kernel: self.seen.append("kept"))

    def _compile(self):
        if self.fails:
            raise RuntimeError("no room for such tiles")
        return Compiled(self.seen)

    def __getitem__(self, grid):
        return lambda *args, **options: self.seen.append(("launched", args, grid, options))


def test_a_kernel_is_compiled_and_loaded_ahead_and_launched_later():
    seen = []
    kernel = Kernel(seen)

    def step():
        assert launches.is_compiling() == (len(seen) < 3)
        launch(kernel, (3, 2), 1, size=4)

    compile_ahead(step, CPU)
    assert seen == [("compiled", (1,), (3, 2), {"size": 4}), "loaded", "kept"]
    assert not is_compiling()
    step()
    assert seen[3:] == [("launched", (1,), (3, 2), {"size": 4})]


def test_what_cannot_be_compiled_is_left_to_its_launch():
    seen = []
    compile_ahead(lambda: launch(Kernel(seen, fails=True), (1,)), CPU)
    assert seen == [("compiled", (), (1,), {})]


def test_an_error_of_the_step_ends_the_compilation():
    def step():
        raise MemoryError("of the step")

    with pytest.raises(MemoryError, match="of the step"):
        compile_ahead(step, CPU)
    assert not is_compiling()
    assert _async_compile.active_mode.get() is None


@pytest.mark.parametrize(("rank", "told"), [(None, True), ("0", True), ("1", False)])
def test_one_rank_of_a_host_tells_that_it_takes_long(caplog, monkeypatch, rank, told):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    compilers = launches._Compilers(CPU)
    with compilers, caplog.at_level(logging.WARNING, "samestep"):
        compilers.submit(lambda: Compiled([])).result()
        compilers._tell()
    said = "compiling kernels for the first step: 1 of 1 so far are ready"
    assert (said in caplog.text) == told


def test_all_groups_are_prepared_before_one_of_them_runs(monkeypatch):
    seen = []

    def prepare(groups, plans, most):
        seen.append(("prepare", sorted(index for _, index, _ in groups), most))

    def update(math, index, operands, plans, most):
        seen.append(("update", index, len(operands)))
        return []

    monkeypatch.setattr(rule_runner, "prepare_on", lambda device: prepare)
    monkeypatch.setattr(rule_runner, "executions_on", lambda device: (update, None))
    params = [torch.nn.Parameter(torch.ones(4, 4, device="meta")) for _ in range(3)]
    groups = [{"params": params[:2], "rule": "muon"}, {"params": params[2:], "rule": "adamw"}]
    opt = samestep.MuonAdamW(groups, lr=0.1, batch_elements=64)
    for absent in (None, None, params[0], None):
        for param in params:
            param.grad = None if param is absent else torch.ones(4, 4, device="meta")
        opt.step()
    both = [("update", 1, 1), ("update", 0, 2)]
    fewer = [("update", 1, 1), ("update", 0, 1)]
    prepared = ("prepare", [0, 1], 64)
    assert seen == [prepared, *both, *both, prepared, *fewer, *both]
