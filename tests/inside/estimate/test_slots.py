"""Passes of a pipeline in slots: those of real ranks, and bubbles as the formula has them."""

from collections import Counter

import pytest
import torch

import samestep.parallel.pipeline as pipelines
from samestep.lab.estimate.fsdp import passes_1f1b
from samestep.lab.estimate.slots import Pass, bubble, most_in_flight, passes_of, play
from samestep.mesh import build
from samestep.models.gpt import GPT, GPTConfig, mean_loss
from samestep.parallel.pipeline import Pipeline, Stage
from tests.ranks import run_cases
from tests.soak import SOAK, twin_cases

SHAPES = [(2, 2, 1), (2, 5, 1), (4, 4, 1), (4, 16, 1), (2, 4, 2), (4, 8, 2), (4, 4, 3), (8, 8, 2)]


@pytest.mark.parametrize(("ranks", "micro_batches", "per_rank"), SHAPES)
def test_equal_stages_wait_as_long_as_the_formula_says(ranks, micro_batches, per_rank):
    stages = ranks * per_rank
    slots = play(ranks, micro_batches, [1.0] * stages, [2.0] * stages)
    end = max(of_rank[-1].end for of_rank in slots)
    for of_rank in slots:
        busy = sum(slot.end - slot.start for slot in of_rank)
        assert busy == 3 * micro_batches * per_rank
        assert 1 - busy / end == pytest.approx(float(bubble(ranks, micro_batches, per_rank)))
        # Every stage runs every micro-batch once, forward and then backward.
        runs = [slot.run for slot in of_rank]
        assert len(set(runs)) == len(runs) == 2 * micro_batches * per_rank
        assert all(runs.index(run._replace(kind="F")) < n for n, run in enumerate(runs)
                   if run.kind == "B")  # fmt: skip


def test_what_is_in_flight():
    assert [passes_1f1b(stage, 3, 4) for stage in range(3)] == ["FFFBFBBB", "FFBFBFBB", "FBFBFBFB"]
    in_flight = [most_in_flight(passes_of(rank, 4, 8)) for rank in range(4)]
    assert in_flight == [{0: 4}, {1: 3}, {2: 2}, {3: 1}]
    # Interleaved stages hold more: (v - 1) p + 2 (p - 1) + 1 on the first of four ranks.
    assert sum(most_in_flight(passes_of(0, 4, 8, 2)).values()) == 4 + 6 + 1


def test_the_slowest_stage_and_sends_make_others_wait():
    even = play(2, 4, [1.0, 1.0], [2.0, 2.0])
    slow = play(2, 4, [1.0, 3.0], [2.0, 6.0])
    assert slow[0][-1].end - even[0][-1].end > 4 * 6 - 1e-9
    assert play(2, 4, [1.0, 1.0], [2.0, 2.0], send=0.5)[0][-1].end > even[0][-1].end


def recorded(rank, case):
    """The passes that a rank really runs, in order."""
    ranks, micro_batches, per_rank = case
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = []

    class Recorded(Stage):
        def forward_one_chunk(self, chunk, *args, **kwargs):
            found.append(Pass("F", self.stage_index, chunk))
            return super().forward_one_chunk(chunk, *args, **kwargs)

        def backward_one_chunk(self, chunk, *args, **kwargs):
            found.append(Pass("B", self.stage_index, chunk))
            return super().backward_one_chunk(chunk, *args, **kwargs)

    pipelines.Stage = Recorded  # in this process alone
    config = GPTConfig(vocab_size=40, context=8, width=16, layers=ranks * per_rank, heads=2)
    pipeline = Pipeline(
        GPT(config), build(pp=ranks).axis("pipe"), loss=mean_loss, micro_batches=micro_batches,
        schedule="1f1b" if per_rank == 1 else "interleaved", stages_per_rank=per_rank,
    )  # fmt: skip
    tokens = torch.randint(40, (micro_batches, 8))
    pipeline.step(tokens, tokens)
    return found


PAIRS = [(2, 2, 1), (2, 5, 1), (2, 4, 2), *([(2, 2, 2), (2, 6, 3)] * SOAK)]
FOURS = [(4, 6, 1), *([(4, 4, 1), (4, 8, 2)] * SOAK)]


@twin_cases("cases1")
@pytest.mark.parametrize("cases", [PAIRS, FOURS])
def test_real_ranks_run_the_same_passes_in_the_same_order(cases):
    for (ranks, micro_batches, per_rank), found in run_cases(cases[0][0], cases, recorded):
        for rank, passes in enumerate(found):
            expected = passes_of(rank, ranks, micro_batches, per_rank)
            assert passes == expected, (ranks, micro_batches, per_rank, rank)
        # As many slots: each pass in the first one after those it waits for, counted.
        slots = play(ranks, micro_batches, *[[1.0] * ranks * per_rank] * 2)
        last = max(of_rank[-1].end for of_rank in slots)
        runs = Counter(run.kind for passes in found for run in passes)
        share = 1 - runs.total() / (ranks * last)
        assert share == pytest.approx(float(bubble(ranks, micro_batches, per_rank)))
