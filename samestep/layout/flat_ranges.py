"""Flat buffers as data: parameters end to end, divided into buckets and shards.

    buffer   | A A A A | B B B B B B | . | C C C | . . |        . is padding
    bucket   |---------- 0 --------------|----- 1 -----|
    shard    |  rank 0   |   rank 1      | r0   | r1   |

Every rank owns one shard of each bucket. For elementwise rules shards are equal, whatever they cut;
for matrix rules they are as long as the whole blocks that the rank owns. What a rank owns of a
parameter is a fragment, and has four coordinates: where it lies in the buffer, in its bucket, in
the rank's shard, and in the parameter itself.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import lcm
from typing import NamedTuple, TypeVar

from samestep.layout.owners import balanced_owners, dealt

T = TypeVar("T")

# Elements. Parameters begin where vector loads can, and so do shards where that costs little.
START_ALIGNMENT = 64
SHARD_ALIGNMENT = 32
# Of a bucket: padding for aligned shards may be this much, or as much as Megatron's, whose bucket
# ends are multiples of lcm(ranks, 128). On 64 ranks a bucket of 16,000 would be 6% of padding.
LITTLE = 1 / 1024


class Range(NamedTuple):
    """A half-open range [start, stop) of elements."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def normalize(self, start: int = 0) -> "Range":
        """Return a range of the same size from `start` on."""
        return Range(start, start + self.size)

    def within(self, outer: "Range") -> "Range":
        """Return this range relative to the start of `outer`."""
        return self.normalize(self.start - outer.start)

    def overlap(self, other: "Range") -> "Range":
        """Return the intersection of two ranges."""
        start = max(self.start, other.start)
        return Range(start, max(start, min(self.stop, other.stop)))


class Fragment(NamedTuple):
    """Elements of one parameter that one rank owns in one bucket."""

    param: int
    bucket: int
    rank: int
    in_buffer: Range
    in_bucket: Range
    in_shard: Range
    in_param: Range


class FlatBucket(NamedTuple):
    """A range of the buffer sent in one collective; each rank owns `shards[rank]`."""

    in_buffer: Range
    params: tuple[int, ...]  # in the order in which they lie
    shards: tuple[Range, ...]  # in the buffer, one after the other, covering the bucket


class FlatLayout(NamedTuple):
    """Places of parameters in one flat buffer, and its buckets."""

    params: tuple[Range, ...]  # in the buffer, by index of the parameter
    buckets: tuple[FlatBucket, ...]

    @property
    def size(self) -> int:
        """Return the number of elements of the buffer, padding included."""
        return self.buckets[-1].in_buffer.stop if self.buckets else 0

    @property
    def padding(self) -> int:
        """Return the number of elements that belong to no parameter."""
        return self.size - sum(param.size for param in self.params)

    def fragments(self, number: int) -> Iterator[Fragment]:
        """Yield the fragments of a bucket that ranks own, in the order of the buffer."""
        bucket = self.buckets[number]
        rank = 0
        for index in bucket.params:
            place = self.params[index]
            while place.size and bucket.shards[rank].stop <= place.start:
                rank += 1
            while (owned := place.overlap(bucket.shards[rank])).size:
                yield Fragment(
                    param=index,
                    bucket=number,
                    rank=rank,
                    in_buffer=owned,
                    in_bucket=owned.within(bucket.in_buffer),
                    in_shard=owned.within(bucket.shards[rank]),
                    in_param=owned.within(place),
                )
                if owned.stop == place.stop:
                    break
                while bucket.shards[rank].stop <= owned.stop:
                    rank += 1


def equal_shards(
    sizes: Sequence[int],
    ranks: int,
    bucket_elements: int,
    *,
    start_alignment: int = START_ALIGNMENT,
    shard_alignment: int = SHARD_ALIGNMENT,
    together: int = 1,
) -> FlatLayout:
    """Place parameters in the given order, with shards of equal size.

    `together`: shards cut parameters only at multiples of this power of two.

    A bucket is closed once it has `bucket_elements`, so a parameter is never cut by a bucket, and
    is padded until all ranks own the same number of aligned elements. These shards are for
    elementwise rules.
    """
    places: list[Range] = []
    buckets: list[FlatBucket] = []
    start, members = 0, list[int]()
    cursor = 0
    start_alignment = max(start_alignment, together)
    for index, size in enumerate(sizes):
        cursor = rounded_up(cursor, start_alignment)
        places.append(Range(cursor, cursor + size))
        cursor += size
        members.append(index)
        if cursor - start >= bucket_elements or index == len(sizes) - 1:
            cursor = start + _shared_size(cursor - start, ranks, shard_alignment, together)
            whole = Range(start, cursor)
            share = whole.size // ranks
            shards = tuple(Range(start + r * share, start + (r + 1) * share) for r in range(ranks))
            buckets.append(FlatBucket(whole, tuple(members), shards))
            start, members = cursor, []
    return FlatLayout(tuple(places), tuple(buckets))


class BlockSizes(NamedTuple):
    """Elements and FLOPs of each block of one parameter."""

    elements: tuple[int, ...]
    flops: tuple[int, ...]


def owner_shards(
    params: Sequence[BlockSizes],
    ranks: int,
    bucket_elements: int,
    *,
    start_alignment: int = START_ALIGNMENT,
    columns: int = 1,
) -> FlatLayout:
    """Place parameters so that every block lies in the shard of one rank.

    Parameters are given in the order in which they should become complete. A parameter lies end to
    end, so all its blocks have one owner, and owners are balanced by FLOPs; inside a bucket
    parameters lie in the order of their owners. A parameter of several blocks that is too much for
    one rank has a bucket for itself, and is cut between blocks.
    """
    total = sum(sum(param.flops) for param in params)
    largest = max((max(param.flops, default=0) for param in params), default=0)
    limit = max(total / ranks, largest)
    wide = {i for i, param in enumerate(params) if sum(param.flops) > limit}
    loads = [0] * ranks
    cuts: dict[int, list[int]] = {}
    for index in sorted(wide):
        cuts[index] = _cut_between_blocks(params[index].flops, loads)
    narrow = [i for i in range(len(params)) if i not in wide]
    owners = balanced_owners(
        [sum(params[i].flops) for i in narrow],
        [sum(params[i].elements) for i in narrow],
        ranks,
        loads=[loads[dealt(owner, ranks, columns)] for owner in range(ranks)],
    )
    owner_of = {i: dealt(own, ranks, columns) for i, own in zip(narrow, owners, strict=True)}
    places: dict[int, Range] = {}
    buckets: list[FlatBucket] = []
    cursor = 0
    for members in _bucket_members(params, wide, bucket_elements):
        start = cursor
        order = sorted(members, key=lambda i: owner_of.get(i, 0))  # keeps order among equals
        ends = [start] * ranks  # of each rank's shard
        for index in order:
            if params[index].elements:
                cursor = rounded_up(cursor, start_alignment)
            places[index] = Range(cursor, cursor + sum(params[index].elements))
            owned = cuts.get(index, [owner_of.get(index, 0)] * len(params[index].elements))
            for owner, size in zip(owned, params[index].elements, strict=True):
                cursor += size
                ends[owner] = cursor
        shards = []
        end = start
        for rank in range(ranks):
            shards.append(Range(end, max(end, ends[rank])))
            end = shards[-1].stop
        buckets.append(FlatBucket(Range(start, cursor), tuple(order), tuple(shards)))
    return FlatLayout(tuple(places[i] for i in range(len(params))), tuple(buckets))


def _cut_between_blocks(flops: Sequence[int], loads: list[int]) -> list[int]:
    """Assign consecutive blocks to ranks in order, with about equal work.

    `loads` are the FLOPs that ranks have already; the new work is added to them in place.
    """
    target = (sum(loads) + sum(flops)) / len(loads)
    owners = []
    rank = 0
    for block in flops:
        while rank < len(loads) - 1 and loads[rank] + block / 2 > target:
            rank += 1
        loads[rank] += block
        owners.append(rank)
    return owners


def _bucket_members(
    params: Sequence[BlockSizes], wide: set[int], bucket_elements: int
) -> Iterator[list[int]]:
    """Group neighbouring parameters into buckets; a very large parameter has its own."""
    members: list[int] = []
    size = 0
    for index, param in enumerate(params):
        if index in wide:
            if members:
                yield members
            yield [index]
            members, size = [], 0
            continue
        members.append(index)
        size += sum(param.elements)
        if size >= bucket_elements:
            yield members
            members, size = [], 0
    if members:
        yield members


def in_runs(items: Iterable[T], size_of: Callable[[T], int], most: float) -> list[list[T]]:
    """Group neighbours into runs of at most `most` elements, or of one member."""
    runs: list[list[T]] = []
    room = 0.0
    for item in items:
        size = size_of(item)
        if not runs or size > room:
            runs.append([])
            room = most
        runs[-1].append(item)
        room -= size
    return runs


def _shared_size(size: int, ranks: int, alignment: int, least: int) -> int:
    """Return the elements of an equally divided bucket, aligned where that is cheap."""
    alignment = max(alignment, least)
    most = max(rounded_up(size, lcm(ranks, 128)), size + int(size * LITTLE))
    while rounded_up(size, ranks * alignment) > most and alignment > least:
        alignment //= 2
    return rounded_up(size, ranks * alignment)


def rounded_up(number: int, divisor: int) -> int:
    """Return the smallest multiple of `divisor` that is not below a number."""
    return -(-number // divisor) * divisor
