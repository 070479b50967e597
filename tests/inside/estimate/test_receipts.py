"""The step on one H200: rates of one receipt predict the other."""

import json
from pathlib import Path

import pytest

from samestep.lab.estimate.calibration import hardware_of, measured_ms, one_process
from samestep.lab.estimate.memory import rank_memory
from samestep.lab.estimate.timeline import simulate
from samestep.update.lanes import Batch, dealt, temporary_bytes

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def receipt(name):
    return json.loads((RESULTS / f"step_{name}.json").read_text())


@pytest.mark.parametrize(("known", "asked"), [("gpt-1280", "gpt-2048"), ("gpt-2048", "gpt-1280")])
def test_a_step_is_predicted_from_another_size(known, asked):
    device = hardware_of(receipt(known))
    same = simulate(one_process(known), device).seconds
    assert 1e3 * same == pytest.approx(measured_ms(receipt(known)), rel=1e-6)
    predicted = 1e3 * simulate(one_process(asked), device).seconds
    assert predicted == pytest.approx(measured_ms(receipt(asked)), rel=0.15)


@pytest.mark.parametrize("name", ["gpt-1280", "gpt-2048"])
def test_memory_of_a_step_on_a_gpu(name):
    found = receipt(name)["sets"][0]["contestants"][0]
    memory = rank_memory(one_process(name), 0)
    assert memory.state == found["state_bytes"]
    width, layers = {"gpt-1280": (1280, 20), "gpt-2048": (2048, 24)}[name]
    batches = [Batch(4 * layers, width, width), Batch(2 * layers, width, 4 * width)]
    lanes = dealt(batches)
    assert len(lanes) == (2 if name == "gpt-1280" else 1)
    assert memory.temporaries == temporary_bytes(batches, lanes)
    # torch counts what the host has asked for, one lane after the other: the larger of two.
    largest = max(batch.temporary_bytes for batch in batches)
    assert largest == pytest.approx(found["extra_bytes"], rel=1e-5)
