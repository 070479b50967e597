"""Random bits that depend on parameter, state key, place in the whole tensor and step alone.

Rounding at random needs bits that every layout draws alike. So they come from no generator, whose
numbers follow the order of calls, but from a hash: the seed is that of the parameter's name, the
place is the flat index in the whole tensor, the count that of the parameter's steps. A hash has 32
bits: the upper half is for state with signs, the lower one for second moments, so that a kernel
that has both needs one hash. `samestep.kernels.small` has the same.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samestep.rules.rule import on_host

CHUNK = 1 << 15  # elements that are drawn at once on CPU: what stays in its cache

WORD = 0xFFFFFFFF
# lowbias32 of Chris Wellons (nullprogram.com/blog/2018/07/31), with a sum in its middle.
FIRST, SECOND = 0x7FEB352D, 0x846CA68B
GOLDEN = 0x9E3779B1  # 2^32 over the golden ratio: spreads what differs in few bits
SECOND_MOMENTS = frozenset({"exp_avg_sq", "max_exp_avg_sq", "second_moment", "variance"})
LOWER = 1 << 32  # in a seed: takes the lower half of the bits


def seed_of(name: str, key: str) -> int:
    """Return 32 bits of a parameter's name, of which one says the half of a hash this key takes."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    return seed | (LOWER if key in SECOND_MOMENTS else 0)


class Origin(NamedTuple):
    """The place of a local tensor's elements in the whole parameter, and the seeds of its state."""

    offset: int  # the flat index of the first element
    strides: tuple[int, ...]  # from one element to the next of each dim, there
    seeds: Mapping[str, int]  # by key, of the state that is rounded at random
    # Of some that follow each other in what is itself cut out of the whole: offset and strides are
    # those of a tensor of shape `frame`, and they begin at `start` of it. Kernels know none.
    frame: tuple[int, ...] = ()
    start: int = 0

    def noise(self, key: str, step: "int | Tensor") -> "Noise":
        """Return the bits of one state tensor in the step that makes the count `step`."""
        return Noise(self.seeds[key], step, self.offset, self.strides, self.frame, self.start)


class Noise(NamedTuple):
    """Random bits for the elements of one tensor."""

    seed: int
    step: int | Tensor  # a 0-D tensor is not read, but on CPU
    offset: int
    strides: tuple[int, ...]
    frame: tuple[int, ...] = ()
    start: int = 0

    def chunks(self, tensor: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """Yield (begin, end, bits) of a tensor's flat elements; bits are int32 from 0 to 65535.

        Every begin is a multiple of each number that divides both `CHUNK` and the last dim.
        """
        if self.frame:
            yield 0, tensor.numel(), self._stretch(tensor)
            return
        device = tensor.device
        starts, run = runs(tensor.shape, self.strides, device)
        starts += self.offset
        last = self.offset + sum(
            (n - 1) * s for n, s in zip(tensor.shape, self.strides, strict=True)
        )
        keys = self._keys(tensor)
        most = CHUNK if device.type == "cpu" else max(1, tensor.numel())
        rows, width = max(1, most // run), min(run, most)
        # Sums of int32 wrap around: they are the lower words of those of int64.
        dtype = torch.int32 if last <= WORD else torch.int64
        starts = starts.to(dtype)
        within = torch.arange(width, dtype=dtype, device=device)[None, :]
        for row in range(0, len(starts), rows):
            for first in range(0, run, width):
                index = (starts[row : row + rows, None] + first) + within[:, : run - first]
                if last > WORD:
                    index = index ^ (index >> 32) * GOLDEN
                bits = hashed(index.to(torch.int32).view(-1), *keys)
                if not self.seed & LOWER:
                    bits >>= 16
                bits &= 0xFFFF
                begin = row * run + first
                yield begin, begin + len(bits), bits

    def bits(self, tensor: Tensor) -> Tensor:
        """Return random bits for all elements of a tensor, int32 from 0 to 65535."""
        found = [bits for _, _, bits in self.chunks(tensor)]
        joined = torch.cat(found) if found else tensor.new_empty(0, dtype=torch.int32)
        return joined.view(tensor.shape)

    def _stretch(self, tensor: Tensor) -> Tensor:
        """Return the bits of consecutive elements of the frame, from all rows they touch."""
        inner = prod(self.frame[1:])
        first, stop = self.start // inner, -(-(self.start + tensor.numel()) // inner)
        rows = tensor.new_empty((stop - first, *self.frame[1:]))
        offset = self.offset + first * self.strides[0]
        bits = self._replace(offset=offset, frame=(), start=0).bits(rows).view(-1)
        return bits[self.start - first * inner :][: tensor.numel()]

    def _keys(self, tensor: Tensor) -> tuple[Any, Any]:
        """Return two words of seed and step: numbers, or 0-D int32 where the step is not read."""
        step: Any = self.step
        if isinstance(step, Tensor):
            step = int(step.item()) if on_host(tensor) else step.to(tensor.device, torch.int64)
        first = mixed(mixed(step & WORD) ^ (self.seed & WORD))
        second = mixed(first ^ GOLDEN)
        if isinstance(first, Tensor):
            return first.to(torch.int32), second.to(torch.int32)
        return signed(first), signed(second)


def mixed(word: Any) -> Any:
    """Mix the bits of a 32-bit word, a Python number or an int64 tensor."""
    word = word ^ (word >> 16)
    word = word * FIRST & WORD
    word = word ^ (word >> 15)
    word = word * SECOND & WORD
    return word ^ (word >> 16)


def hashed(words: Tensor, first: Any, second: Any) -> Tensor:
    """Hash int32 words in place with two keys; products and sums wrap around."""
    words += first
    words ^= (words >> 16) & 0xFFFF
    words *= FIRST
    words += second
    words ^= (words >> 15) & 0x1FFFF
    words *= signed(SECOND)
    words ^= (words >> 16) & 0xFFFF
    return words


def signed(word: int) -> int:
    """Return 32 bits as the signed number that an int32 with these bits is."""
    return word - (1 << 32) if word >> 31 else word


def runs(shape: Sequence[int], strides: Sequence[int], device: torch.device) -> tuple[Tensor, int]:
    """Return a tensor's runs of neighbours in order: begins, (runs,) int64, and their length."""
    dims, run = levels(shape, strides)
    starts = torch.zeros(1 if prod(shape) else 0, dtype=torch.int64, device=device)
    for size, stride in dims:
        starts = (starts[:, None] + torch.arange(size, device=device) * stride).view(-1)
    return starts, run


def levels(shape: Sequence[int], strides: Sequence[int]) -> tuple[list[tuple[int, int]], int]:
    """Return sizes and strides of as few dims as describe a tensor, and the length of its runs.

    `strides` are those of the whole tensor, and elements next to each other there form a run.
    """
    dims: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = dims[-1][0] * size, stride
        else:
            dims.append((size, stride))
    run = dims.pop()[0] if dims and dims[-1][1] == 1 else 1
    return dims, max(run, 1)
