"""What is promised for replicated parameters, shown in one configuration."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from tests.acceptance.replicated import (
    ADAMW_TOLERANCE,
    GPT,
    MUON_TOLERANCE,
    backward,
    build,
    single_process,
    trainable,
    values,
)
from tests.counting_group import counted
from tests.memory import peak_bytes
from tests.ranks import run_forked
from tests.soak import SOAK, twin

STEPS, WIDTH, LAYERS = 50 if SOAK else 8, 16, 1  # more than the seven of a pattern
MODES = [("zero2", "ordered"), ("zero1", "ordered"), ("none", "ordered"), ("zero2", "fast")]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 7, 8] if SOAK else [2])
def test_a_run_against_one_process(world):
    """Replicas to the bit, one process within the tolerances, ordered layouts to the bit."""
    expected, rules = single_process(WIDTH, LAYERS, world, STEPS)

    def job(rank):
        found = {}
        for sharding, reduction in MODES:
            model = GPT(WIDTH, LAYERS)
            overlap = sharding == "zero2" and reduction == "ordered"
            opt = build(
                model, WIDTH, sharding=sharding, reduction=reduction, overlap_grad_reduce=overlap
            )
            for step in range(STEPS):
                backward(model, rank, step)
                opt.step()
                opt.zero_grad()
            found[sharding, reduction] = values(model)
        return found

    results = run_forked(world, job)
    start = values(GPT(WIDTH, LAYERS))
    assert all(torch.equal(start[name], expected[name]) != (name in rules) for name in start)
    for mode in MODES:
        for name, value in results[0][mode].items():
            assert all(torch.equal(result[mode][name], value) for result in results), name
            if name in rules:
                limit = ADAMW_TOLERANCE if rules[name] == "adamw" else MUON_TOLERANCE
                assert (value - expected[name]).abs().max() <= limit, (mode, name)
        if mode[1] == "ordered":
            first = results[0]["zero2", "ordered"]
            assert all(torch.equal(results[0][mode][name], first[name]) for name in first), mode
            assert all(torch.equal(first[name], expected[name]) for name in first), mode


# --- sizes: a GPT of 12 layers ------------------------------------------------------------------

WIDE = {"width": 512 if SOAK else 128, "layers": 12}
CHEAP = {"orthogonalize": "newton-schulz", "ns_steps": 1, "variance_beta2": None}


class Measured(NamedTuple):
    """What one rank measured; bytes."""

    params: int
    bucket: int  # the largest
    state: int
    peaks: dict[str, int]
    sent: dict[str, float]
    calls: dict[str, int]


def train_and_measure(rank, reduction, tied, accumulate):
    """Steps with everything present, with a rank that lacks gradients, and with accumulation."""
    peaks, sent, calls = {}, {}, {}
    with counted() as log:
        model = GPT(**WIDE, tied=tied)
        opt = build(model, WIDE["width"], reduction=reduction, **CHEAP)

        def measure(name, run):
            first = len(log)
            with peak_bytes() as peak:
                run()
            opt.step()
            peaks[name], calls[name] = peak.value, len(log) - first
            sent[name] = float(sum(call.sent for call in log[first:]))

        def micro_batch(skip=False):
            out = model(torch.tensor([rank]), headless=skip)  # hardly any activations
            out.square().mean().backward()

        measure("all present", micro_batch)
        measure("asymmetric", lambda: micro_batch(skip=rank == 1))
        if accumulate:

            def kept():
                with opt.no_sync():
                    micro_batch()
                micro_batch(skip=rank == 1)

            def sharded():
                micro_batch()
                opt.synchronize()
                micro_batch(skip=rank == 1)

            measure("no_sync", kept)
            measure("synchronize", sharded)
    bytes_of = lambda tensors: sum(t.numel() * t.element_size() for t in tensors)  # noqa: E731
    return Measured(
        bytes_of(trainable(model).values()),
        4 * max(bucket.size for bucket in opt.shared_parameters[0].plan.buckets),
        bytes_of(t for state in opt.state.values() for t in state.values()),
        peaks,
        sent,
        calls,
    )


def presence_mask(world):
    params = len(trainable(GPT(16, WIDE["layers"], tied=False)))
    return 2 * 8 * (params + 1) * (world - 1) / world


@twin
@pytest.mark.parametrize("world", [2, 3] if SOAK else [3])
def test_bytes_collectives_and_gradient_memory(world):
    """Counted by a process group in between, and by the allocator."""
    results = run_forked(world, train_and_measure, "fast", False, True)
    for rank, found in enumerate(results):
        least = 2 * found.params * (world - 1) / world
        mask = presence_mask(world)
        for name in ("all present", "asymmetric", "no_sync"):
            assert found.sent[name] <= 1.02 * least + mask, (rank, name)
        # One more reduction, without its gather.
        assert found.sent["synchronize"] <= 1.02 * 1.5 * least + mask
        assert found.bucket <= found.params / 16
        assert found.calls["all present"] <= 2 * 22 + 1
        # Gradients: this rank's part, one bucket on its way and one growing.
        part = found.params / world
        assert found.peaks["all present"] <= part + 2 * found.bucket
        assert found.peaks["all present"] < 0.8 * found.params
        # A rank that lacks the first bucket's gradient holds all others until the step.
        late = found.params + found.bucket if rank == 1 else part + 2 * found.bucket
        assert found.peaks["asymmetric"] <= late
        # Kept gradients are whole; shards are not.
        assert found.peaks["no_sync"] <= found.params + part + 2 * found.bucket
        late = found.params + part + found.bucket if rank == 1 else 2 * part + 2 * found.bucket
        assert found.peaks["synchronize"] <= late


@twin
def test_gradient_memory_of_ordered_reduction_and_of_tied_parameters():
    """Ordered: also what was received, a third bucket. Tied: autograd holds two gradients."""
    for rank, found in enumerate(run_forked(2, train_and_measure, "ordered", False, False)):
        part = found.params / 2
        assert found.peaks["all present"] <= part + 3 * found.bucket
        late = found.params + found.bucket if rank == 1 else part + 3 * found.bucket
        assert found.peaks["asymmetric"] <= late
    for found in run_forked(2, train_and_measure, "fast", True, False):
        assert found.peaks["all present"] <= found.params / 2 + 3 * found.bucket


@twin
def test_state_is_spread_evenly_over_many_ranks():
    """Live bytes of the state tensors; the whole is what one process keeps."""
    world = 8 if SOAK else 5
    opt = build(GPT(**WIDE, tied=False), WIDE["width"], **CHEAP)
    whole = sum(t.numel() * t.element_size() for s in opt.state.values() for t in s.values())
    results = run_forked(world, train_and_measure, "fast", False, False)
    for found in results:
        assert 0.98 * whole / world <= found.state <= 1.02 * whole / world
        least = 2 * found.params * (world - 1) / world
        for sent in found.sent.values():
            assert sent <= 1.02 * least + presence_mask(world)
        assert found.peaks["all present"] <= found.params / world + 2 * found.bucket
