"""What a checksum must not depend on, and what it must see beyond one block of words."""

from __future__ import annotations

import pytest
import torch

from samestep.comm.integrity import checksum as module
from samestep.comm.integrity.checksum import BLOCK, checksum, checksums, text_checksum

SIZES = [0, 1, 7, 8, 8 * BLOCK - 1, 8 * BLOCK, 8 * BLOCK + 1, 8 * BLOCK + 8, 5 * 8 * BLOCK + 13]


def random_bytes(size):
    generator = torch.Generator().manual_seed(size)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def by_definition(data):
    """In Python's integers, from the docstring."""
    low, high, _ = (weights.tolist() for weights in module._weights(torch.device("cpu")))
    data = bytes(data.tolist())
    words = [
        int.from_bytes(data[start : start + 8].ljust(8, b"\0"), "little", signed=True)
        for start in range(0, len(data), 8)
    ]
    sums = []
    for start in range(0, len(words), BLOCK):
        block = words[start : start + BLOCK]
        sums.append(sum(w * low[i] + (w >> 32) * high[i] for i, w in enumerate(block)))
    total = sum(mixed(number + place * 0x1E3779B97F4A7C15) for place, number in enumerate(sums))
    return mixed(total + len(data))


def mixed(number):
    number = signed(number)
    number = signed((number ^ (number >> 30)) * 0x3F58476D1CE4E5B9)
    number = signed((number ^ (number >> 27)) * 0x14D049BB133111EB)
    return number ^ (number >> 31)


def signed(number):
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


@pytest.mark.parametrize("size", SIZES)
def test_it_is_what_it_is_defined_to_be(size):
    """So products and sums wrap around, and how much is read at once does not show."""
    data = random_bytes(size)
    assert int(checksum(data)) == by_definition(data)


def test_long_tensors_are_read_in_parts():
    data = random_bytes((1 << 21) + 8 * BLOCK + 3)
    assert int(checksum(data)) == by_definition(data)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool], ids=str
)
@pytest.mark.parametrize("start", range(9))
def test_where_it_lies_in_memory_does_not_show(dtype, start):
    whole = (random_bytes(80_000) % 2).to(dtype)
    part = whole[start : start + 70_001]
    assert checksum(part) == checksum(part.clone())
    assert checksum(whole.view(100, 800).t()) == checksum(whole.view(100, 800).t().contiguous())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1024, 33_000])
def test_signs_alone_show(dtype, size):
    """A plain sum of 64-bit products would not see an even number of flipped top bits."""
    base = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    seen = {int(checksum(base)), int(checksum(-base))}
    for count in range(1, 200):
        other = base.clone()
        other[1 : 2 * count + 1 : 2] *= -1
        seen.add(int(checksum(other)))
    assert len(seen) == 201


def test_blocks_have_their_places():
    first, second = random_bytes(8 * BLOCK), random_bytes(8 * BLOCK + 1)[1:]
    assert checksum(torch.cat([first, second])) != checksum(torch.cat([second, first]))


def test_zeros_at_the_end_show():
    sums = {int(checksum(torch.zeros(size))) for size in (*range(20), BLOCK, 2 * BLOCK, 3 * BLOCK)}
    assert len(sums) == 23


def test_of_many_at_once():
    """Short and long ones in turns, more than are read at once; each as if it were alone."""
    sizes = [*SIZES, *([8 * BLOCK - 5, 3, 0] * 40), (1 << 21) + 77, 8, *reversed(SIZES)]
    tensors = [random_bytes(size) for size in sizes]
    assert sum(sizes) > 2 << 21
    assert checksums(tensors).tolist() == [int(checksum(tensor)) for tensor in tensors]
    assert checksums([]).tolist() == []


def test_of_a_text():
    assert text_checksum("a") != text_checksum("b")
    assert -(1 << 63) <= text_checksum("plan") < 1 << 63
