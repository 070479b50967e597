"""Checksums of tensors: 64 bits for the bits of each and their places, computed where they live."""

import hashlib
from collections.abc import Sequence
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor

from samestep.layout.flat_ranges import in_runs

BLOCK = 1 << 13  # words of 64 bits that are summed with one table of weights


def text_checksum(text: str) -> int:
    """Return a checksum of a text, in the range of an int64."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def checksum(tensor: Tensor) -> Tensor:
    return checksums([tensor])[0]


@torch.no_grad()
def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """Return the checksum of each tensor on one device, (n,); the host waits for no GPU.

    Each 32-bit half of a 64-bit word is multiplied with an odd random number of its place in a
    block, modulo 2^64, and added up; then blocks are mixed with their places and added, and
    mixed with the number of bytes. So a difference in one half always changes the sum of its
    block, and any fixed difference in several goes unseen by at most one choice of random
    numbers in 2^33 (the worst case: only sign bits).

    Tensors of up to one block are summed in one batch, since there are many of them.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.int64)
    if tensors[0].device.type == "xla":  # whose bits are nowhere to be seen there
        tensors = [tensor.cpu() for tensor in tensors]
    device = tensors[0].device
    data = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    small = [index for index, own in enumerate(data) if own.numel() <= 8 * BLOCK]
    large = [index for index, own in enumerate(data) if own.numel() > 8 * BLOCK]
    # How much is read at once does not show in the result. A CPU's cache shall hold it; for
    # others launches count.
    at_once = 1 << (21 if device.type == "cpu" else 25)
    sums = [_sums(few) for few in in_runs((data[i] for i in small), Tensor.numel, at_once)]
    blocks = [_block_sums(data[index], at_once) for index in large]
    counts = [1] * len(small) + [own.numel() for own in blocks]
    places = torch.arange(max(counts), device=device)
    mixed = _mixed(torch.cat([*sums, *blocks]) + _heads(places, counts) * _GOLDEN)
    order = small + large
    lengths = _on(device, [data[index].numel() for index in order])
    found = _mixed(_segment_sums(mixed, counts) + lengths)
    return found[_on(device, sorted(range(len(order)), key=order.__getitem__))]


def sum_of_words(words: Tensor) -> Tensor:
    """Return an additive checksum, 0-D, of a few int64 words, (n,), in few GPU launches."""
    return (words * _weights(words.device)[0][: len(words)]).sum()


_GOLDEN = 0x1E3779B97F4A7C15


def _sums(data: Sequence[Tensor]) -> Tensor:
    """Return the sum of each tensor, none of which is longer than a block."""
    low, high, zeros = _weights(data[0].device)
    parts = [part for own in data for part in (own, zeros[: -own.numel() % 8])]
    words = torch.cat(parts).view(torch.int64)
    sizes = [-(-own.numel() // 8) for own in data]
    products = (words * _heads(low, sizes)).add_((words >> 32).mul_(_heads(high, sizes)))
    return _segment_sums(products, sizes)


def _block_sums(data: Tensor, at_once: int) -> Tensor:
    """Return the sum of each block of a tensor."""
    low, high, _ = _weights(data.device)
    sums = []
    for part in torch.split(data, at_once):
        whole = part.numel() // (8 * BLOCK) * 8 * BLOCK
        if whole:
            # In the middle of a word torch does not read words.
            aligned = part[:whole] if part.storage_offset() % 8 == 0 else part[:whole].clone()
            words = aligned.view(torch.int64).view(-1, BLOCK)
            sums.append((words * low).sum(1).add_((words >> 32).mul_(high).sum(1)))
        if whole < part.numel():
            sums.append(_sums([part[whole:]]))
    return torch.cat(sums)


def _heads(values: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return, for each size, the first `size` values, concatenated."""
    return torch.cat([values[:size] for size in sizes])


def _segment_sums(values: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the sums of consecutive segments of given sizes, modulo 2^64."""
    running = torch.cat([values.new_zeros(1), values.cumsum(0)])
    at_ends = running[_on(values.device, list(accumulate(sizes, initial=0)))]
    return at_ends[1:] - at_ends[:-1]


def _on(device: torch.device, numbers: Sequence[int]) -> Tensor:
    tensor = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)


@cache
def _weights(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return odd random numbers for both halves of each word of a block, and 7 zeros."""
    numbers = _mixed(torch.arange(1, 2 * BLOCK + 1, device=device) * _GOLDEN) | 1
    return numbers[:BLOCK], numbers[BLOCK:], torch.zeros(7, dtype=torch.uint8, device=device)


def _mixed(numbers: Tensor) -> Tensor:
    """Spread each bit over all 64, as splitmix64 does; products wrap around."""
    numbers = (numbers ^ (numbers >> 30)).mul_(0x3F58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> 27)).mul_(0x14D049BB133111EB)
    return numbers ^ (numbers >> 31)
