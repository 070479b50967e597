"""Windows of offloaded state and the copies that fill them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import samestep
from samestep.plan import windows
from samestep.plan.windows import GRAIN, TensorSize, UnitSize
from samestep.shards.windows import state_device
from samestep.update.offload import LateCopies
from tests.test_offload import _small_windows, assert_same, build, train  # noqa: F401


def test_a_missing_wait_shows(monkeypatch):
    """The stand-in for streams copies late: whoever does not wait computes with something else."""

    def missed(name, stub):
        with monkeypatch.context() as patch:
            patch.setattr(LateCopies, name, stub)
            # What lies in a buffer that was not filled may not even be a number that counts.
            with pytest.raises((AssertionError, ArithmeticError, ValueError, RuntimeError)):
                assert_same(plain, train(*build("state"), 0))

    plain = train(*build(None), 0)
    assert_same(plain, train(*build("state"), 0))
    bring = LateCopies.bring
    missed("wait", lambda self, event: None)
    missed("bring", lambda self, copies, after: bring(self, copies, None))
    missed("finish", lambda self: None)


def test_a_window_comes_once_and_returns_once(monkeypatch):
    """What is absent does not travel; of a range, numbers such as the count of steps wait."""
    moved = []
    for name in ("bring", "take_back"):
        copied = getattr(LateCopies, name)

        def counted(self, copies, *rest, name=name, copied=copied):
            moved.append((name, sum(into.nbytes for into, _ in copies)))
            return copied(self, copies, *rest)

        monkeypatch.setattr(LateCopies, name, counted)
    model, opt = build("state")
    model.embedding.weight.grad = torch.randn(model.embedding.weight.shape)
    opt.step()
    state = opt.state[model.embedding.weight]
    found = {name: sum(n for each, n in moved if each == name) for name, _ in moved}
    ranges = len([line for line in opt.schedule_lines() if line.startswith("Fetch")])
    step = state["step"].nbytes
    assert found["take_back"] == sum(tensor.nbytes for tensor in state.values())
    assert found["take_back"] < found["bring"] < found["take_back"] + ranges * step
    assert float(state["step"]) == 1.0


def test_cut_units_cover_every_element_once():
    moments = TensorSize(10 * GRAIN + 5, 4)
    unit = UnitSize(10 * GRAIN + 5, (moments, moments, TensorSize(1, 4)), may_be_cut=True)
    small = UnitSize(7, (TensorSize(7, 4),), may_be_cut=True)
    block = UnitSize(8 * GRAIN, (TensorSize(8 * GRAIN, 4),), may_be_cut=False)
    units = [small, unit, block, small]
    most = 1 << 16
    cut = windows.windows(units, most)
    assert windows.window_bytes(cut[-1], units) <= most
    for number, own in enumerate(units):
        cuts = [c for window in cut for c in window if c.unit == number]
        assert [c.start for c in cuts] == [0, *(c.stop for c in cuts[:-1])]
        assert cuts[-1].stop == own.elements
        assert [c.is_last for c in cuts] == [False] * (len(cuts) - 1) + [True]
        assert all(c.start % GRAIN == 0 for c in cuts)
    assert all(windows.window_bytes(window, units) <= most for window in cut if window[0].unit != 2)
    scaled = UnitSize(2 * GRAIN, (TensorSize(2 * GRAIN, 1), TensorSize(2 * GRAIN // 256, 4)), True)
    assert scaled.nbytes(GRAIN) == GRAIN + windows.ALIGNMENT  # 16 scales


def test_what_cannot_run_is_refused():
    param = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(ValueError, match="offload 'all' is not supported"):
        samestep.AdamW([param], offload="all")
    with pytest.raises(ValueError, match=r"offload='state' and compile cannot be combined"):
        samestep.AdamW([param], offload="state", compile=True)
    with pytest.raises(ValueError, match=r"offload='state' and cuda_graph cannot be combined"):
        samestep.AdamW([param], offload="state", cuda_graph=True)
    with pytest.raises(
        ValueError, match="is for parameters on a CUDA GPU, and there is one on xla"
    ):
        state_device(torch.device("xla"), "state")
