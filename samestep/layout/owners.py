"""Assign blocks to owners, the ranks that run the matrix rule on them."""

import heapq
from collections.abc import Sequence
from typing import NamedTuple


class Balance(NamedTuple):
    """The largest work and the largest state of a rank, each over the mean; 1.0 is even."""

    busiest: float  # FLOPs of the busiest rank over the mean
    bound: float  # what no assignment can beat
    fullest: float  # bytes of the fullest rank over the mean


def balanced_owners(
    flops: Sequence[int],
    sizes: Sequence[int],
    ranks: int,
    *,
    max_size_ratio: float | None = None,
    loads: Sequence[int] | None = None,
) -> list[int]:
    """Assign each block to the least busy rank, largest first.

    `flops` and `sizes` are per block. With `max_size_ratio` a rank takes no block that lifts
    its total size above that multiple of the mean, as long as another rank has room: work
    is then less even, and state more. `loads` are FLOPs that each rank has to do anyway.
    """
    room = float("inf")
    if max_size_ratio is not None:
        room = max_size_ratio * sum(sizes) / ranks
    owners = [0] * len(flops)
    heap = [(0 if loads is None else loads[rank], 0, rank) for rank in range(ranks)]
    heapq.heapify(heap)  # (flops, size, rank)
    for block in sorted(range(len(flops)), key=lambda i: (-flops[i], -sizes[i], i)):
        full = []
        while len(heap) > 1 and heap[0][1] + sizes[block] > room:
            full.append(heapq.heappop(heap))
        if full and heap[0][1] + sizes[block] > room:  # no rank has room: the emptiest takes it
            full.append(heapq.heappop(heap))
            heap, full = sorted(full, key=lambda entry: (entry[1], entry[0], entry[2])), []
        work, size, rank = heap[0]
        owners[block] = rank
        heap[0] = (work + flops[block], size + sizes[block], rank)
        heap.extend(full)
        heapq.heapify(heap)
    return owners


def dealt(owner: int, ranks: int, columns: int) -> int:
    """Reorder owners so that neighbours are on different hosts.

    Consecutive owners are in different columns, so that all ranks of a host share the traffic
    between hosts.
    """
    return owner % columns * (ranks // columns) + owner // columns


def cyclic_owners(count: int, ranks: int) -> list[int]:
    """Assign block i to rank i mod ranks."""
    return [block % ranks for block in range(count)]


def busiest_lower_bound(flops: Sequence[int], ranks: int) -> float:
    """Return a lower bound of the busiest rank's FLOPs under any assignment.

    The bound is the largest of: the mean; the largest block; with more blocks than ranks, the N-th
    plus the (N+1)-th largest, since two of the N+1 largest must share a rank.
    """
    largest = sorted(flops, reverse=True)
    if not largest:
        return 0.0
    pair = largest[ranks - 1] + largest[ranks] if len(largest) > ranks else 0
    return max(sum(largest) / ranks, float(largest[0]), float(pair))


def balance(
    owners: Sequence[int], flops: Sequence[int], sizes: Sequence[int], ranks: int
) -> Balance:
    work, size = [0] * ranks, [0] * ranks
    for owner, block_flops, block_size in zip(owners, flops, sizes, strict=True):
        work[owner] += block_flops
        size[owner] += block_size
    mean_work, mean_size = sum(work) / ranks or 1.0, sum(size) / ranks or 1.0
    bound = busiest_lower_bound(flops, ranks) / mean_work
    return Balance(max(work) / mean_work, bound, max(size) / mean_size)
