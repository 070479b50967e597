"""What the keywords of an optimizer mean together."""

from __future__ import annotations

import pytest
import torch

from samestep.groups.distribution import FILLS_A_GPU, Distribution
from samestep.plan.links import LEAST_ELEMENTS

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_a_chunk_fills_a_gpu_unless_its_size_was_chosen():
    assert Distribution().chunk_elements(CPU) == LEAST_ELEMENTS
    assert Distribution().chunk_elements(CUDA) == FILLS_A_GPU
    for device in (CPU, CUDA):
        assert Distribution(bucket_size=600).chunk_elements(device) == 600
        assert Distribution(bucket_size=600, chunk_size=7).chunk_elements(device) == 7


@pytest.mark.parametrize("size", [0, -3, 2.5, True, "many"])
def test_a_chunk_of_no_size_is_refused(size):
    with pytest.raises(
        ValueError, match="chunk_size must be a whole number of at least 1, or None"
    ):
        Distribution(chunk_size=size)
