"""A model of one's own on the hybrid stack: the losses of one process."""

from contextlib import redirect_stdout
from io import StringIO

import pytest
import torch

from examples.hybrid_model import Model, alone, on_ranks
from tests.ranks import run_forked


def test_ranks_have_the_losses_of_one_process():
    def job(rank):
        torch.manual_seed(0)
        with redirect_stdout(StringIO()) as told:
            return on_ranks(Model(), 3), told.getvalue()

    torch.manual_seed(0)
    expected = alone(Model(), 3)
    assert expected[0] != pytest.approx(expected[2], abs=0.05)
    for rank, (losses, told) in enumerate(run_forked(4, job)):
        assert losses == pytest.approx(expected, abs=1e-5)
        assert [line.split()[0] for line in told.splitlines()] == [f"rank={rank}"]
