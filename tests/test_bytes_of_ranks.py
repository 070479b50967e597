"""What each of 2 to 16 ranks sends in a step of zero2, counted: as much as the others, and little.

The least that all of them must send is 2 P (N - 1): every gradient to where it is added up, and
every parameter to everyone else.
"""

from fractions import Fraction

import pytest
import torch
from torch import nn

import samestep
from tests.counting_group import counted
from tests.ranks import run_forked
from tests.soak import SOAK, twin_cases


class Model(nn.Module):
    """A GPT by its shapes: more ranks than there are large blocks, and a table."""

    def __init__(self, layers):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(512, 32)
        self.attention = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(4 * layers))
        self.up = nn.ModuleList(nn.Linear(32, 128, bias=False) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(128, 32, bias=False) for _ in range(layers))
        self.head = nn.Linear(32, 512, bias=False)


@twin_cases("3-per_parameter")
@pytest.mark.parametrize("buffers", ["per_parameter", "flat"])
@pytest.mark.parametrize("world", [3, *([2, 4, 5, 7, 8, 12, 16] if SOAK else [])])
def test_the_busiest_rank_sends_what_the_mean_sends(world, buffers):
    def job(rank):
        with counted() as log:
            model = Model(layers=5)
            opt = samestep.MuonAdamW(model, lr=1e-2, crossover=1, buffers=buffers)
            for param in model.parameters():
                param.grad = torch.full_like(param, rank + 1.0)
            del log[:]
            opt.step()
            sent = log.sent
        return sent, sum(param.numel() * param.element_size() for param in model.parameters())

    found = run_forked(world, job)
    sent, size = [sent for sent, _ in found], found[0][1]
    mean, least = sum(sent) / world, Fraction(2 * size * (world - 1), world)
    assert mean <= least * Fraction(105, 100)
    assert max(sent) <= mean * Fraction(110, 100)
    assert max(sent) <= least * Fraction(105, 100), float(max(sent) / least)
