"""Hardware files: read as they were written, refused in one line."""

import json

import pytest
import torch

from samestep.lab.estimate.collectives import seconds_in_two
from samestep.lab.estimate.hardware import PRESETS, find_hardware, hardware_as_json
from samestep.plan.links import Fabric, Link
from samestep.plan.transfers import Traffic, of_segments
from samestep.tooling.request import BadRequestError


def test_a_file_gives_the_same_hardware(tmp_path):
    for preset in PRESETS.values():
        path = tmp_path / "hardware.json"
        path.write_text(json.dumps(hardware_as_json(preset)))
        assert find_hardware(str(path)) == preset
        assert len(preset.source) > 30


def test_rates_are_interpolated_by_the_short_side():
    preset = PRESETS["h200x8"]
    sides = sorted(preset.product_rates)
    assert preset.product_rate(1) == preset.product_rates[sides[0]]
    assert preset.product_rate(10**6) == preset.product_rates[sides[-1]]
    middle = preset.product_rate((sides[0] + sides[1]) // 2)
    low, high = preset.product_rates[sides[0]], preset.product_rates[sides[1]]
    assert low < middle < high


def test_a_collective_takes_latency_and_bytes_over_bandwidth():
    assert Link(1e-5, 1e9, 1e-6).seconds(5, 1e6) == pytest.approx(1e-5 + 4e-6 + 1e-3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "is no hardware file"),
        ('{"kind": "samestep hardware", "format": 9}', "has format 9, not 1"),
        ('{"kind": "samestep hardware", "format": 1}', "lacks 'inside'"),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    path = tmp_path / "hardware.json"
    path.write_text(content)
    with pytest.raises(BadRequestError, match=message):
        find_hardware(str(path))


def test_rates_must_be_above_zero(tmp_path):
    content = hardware_as_json(PRESETS["h200x8"]) | {"bytes_rate": 0}
    path = tmp_path / "hardware.json"
    path.write_text(json.dumps(content))
    with pytest.raises(BadRequestError, match="above 0"):
        find_hardware(str(path))


def test_two_levels_take_as_long_as_the_busiest_column():
    """Two hosts of three ranks; segments of 1 byte each, but the first column has 5 and 3."""
    sizes = (5, 3, 1, 1, 1, 1)
    fabric = Fabric(Link(0.0, 1.0), Link(0.0, 1.0), 6, 3)

    def seconds(traffic):
        inside, across = seconds_in_two(of_segments(traffic, "", torch.int8, sizes), fabric)
        return inside, across.tolist()

    # In rings all 12 bytes pass by, but those of a rank itself; across, those of the column.
    in_rings = 8.0, [4.0, 1.0, 1.0]
    assert seconds(Traffic.REDUCE_SCATTER) == seconds(Traffic.UNEVEN_GATHER) == in_rings
    # Exchanged: the first column's 8 bytes go to both others; the first segment's 5 to the other.
    assert seconds(Traffic.EXCHANGE) == seconds(Traffic.COPIES) == (16.0, [5.0, 1.0, 1.0])
