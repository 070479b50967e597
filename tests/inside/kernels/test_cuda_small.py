"""State in few bits on a GPU: kernels, and plain torch, which has the bits that it has on CPU."""

from __future__ import annotations

import pytest
import torch

from samestep.rules.noise import Noise
from samestep.rules.stored import decode, encode, round_bf16, split_remainder
from tests.gpu import needs_gpu

pytestmark = [needs_gpu, pytest.mark.own_process]

if torch.cuda.is_available():
    from tests.inside.kernels.small_cases import *  # noqa: F403
    from tests.inside.kernels.small_cases import hard_values


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("random", [True, False])
def test_plain_torch_has_the_bits_of_a_cpu(signed, random):
    value = hard_values(64, 256)
    value = value if signed else value.abs()
    found = []
    for device in ("cuda", "cpu"):
        step = torch.tensor(70_001.0, device=device)  # which is not read on a GPU
        noise = Noise(0x1FEDCBA98, step, 2**32 - 300, (300, 1)) if random else None
        own = value.to(device)
        codes, scale = encode(own, 64, signed=signed, noise=noise)
        results = [codes, scale, decode(codes, scale), *split_remainder(own)]
        results += [] if noise is None else [round_bf16(own, noise)]
        found.append([result.cpu() for result in results])
    for on_gpu, on_cpu in zip(*found, strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, rtol=0, atol=0, equal_nan=True)
