"""A model of one's own on the hybrid stack: the losses of one process."""

import pytest
import torch

from examples.hybrid_model import Model, alone, on_ranks
from tests.ranks import run_forked


def test_ranks_have_the_losses_of_one_process(capfd):
    def job(rank):
        torch.manual_seed(0)
        return on_ranks(Model(), 3)

    torch.manual_seed(0)
    expected = alone(Model(), 3)
    assert expected[0] != pytest.approx(expected[2], abs=0.05)
    for losses in run_forked(4, job):
        assert losses == pytest.approx(expected, abs=1e-5)
    told = [line for line in capfd.readouterr().out.splitlines() if line.startswith("rank=")]
    assert sorted(line.split()[0] for line in told) == [f"rank={rank}" for rank in range(4)]
