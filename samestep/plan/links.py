"""Links between ranks: their speed, and the bucket size that it suggests.

A collective of N ranks has a latency that grows with the number of ranks, and then carries
bytes at the bandwidth of the slowest link. Few large buckets cost few latencies, many small
buckets overlap with computation:

    n buckets cost n latencies, and the last of them (1 / n of all bytes) is waited for
    n = sqrt(seconds that all bytes take / latency)

Where nothing is reduced inside backward, all gradients are available at once: neighbouring buckets
are merged into as many as there are waves.
"""

from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

LEAST_ELEMENTS = 25 * (1 << 18)  # of a bucket: 25 MiB in fp32, as DDP
MOST_ELEMENTS = 1 << 28  # half a GB in bfloat16; zero2 has two such buffers


@dataclass(frozen=True)
class Link:
    """A collective of N ranks takes latency + latency_per_rank (N - 1) + bytes / bandwidth.

    Bytes are those of the busier direction of the busiest rank.
    """

    latency: float  # seconds
    bandwidth: float  # bytes per second, each direction of one rank
    latency_per_rank: float = 0.0

    def seconds(self, ranks: int, carried: float) -> float:
        return self.latency + self.latency_per_rank * (ranks - 1) + carried / self.bandwidth


class Fabric(NamedTuple):
    """Links between the ranks of one group, with `per_host` ranks on each host."""

    inside: Link
    between: Link
    ranks: int
    per_host: int

    @property
    def hosts(self) -> int:
        return -(-self.ranks // self.per_host)

    @property
    def has_levels(self) -> bool:
        """Whether there are several hosts with several ranks each."""
        return self.hosts > 1 and self.per_host > 1

    def ring(self) -> Link:
        """Return the effective link of ring collectives, which pass data from rank to rank.

        Backends use several rings through the GPUs of a host, which share the traffic between
        hosts (NCCL defines its bus bandwidth so).
        """
        if self.hosts == 1:
            return self.inside
        together = self.between.bandwidth * self.per_host
        if self.per_host > 1:
            together = min(together, self.inside.bandwidth)
        return Link(self.between.latency, together, self.between.latency_per_rank)

    def exchange(self) -> Link:
        """Return the effective link of collectives in which each rank sends to all others.

        Ranks of the same host get their share over links inside the host.
        """
        if self.hosts == 1:
            return self.inside
        near = (self.per_host - 1) / (self.ranks - 1)
        per_byte = max(near / self.inside.bandwidth, (1 - near) / self.between.bandwidth)
        return Link(self.between.latency, 1 / per_byte, self.between.latency_per_rank)

    def pays_in_two(
        self, carried: float, *, exchanged: bool, block: float = 0.0, in_a_row: int = 1
    ) -> bool:
        """Whether `carried` bytes take less time in two levels, inside and across hosts.

        `exchanged`: segments are sent all-to-all, not in rings. `block`: bytes of the largest
        block, which one GPU sends between hosts. `in_a_row`: number of consecutive buckets.
        """
        if not self.has_levels:
            return False
        one = self.exchange() if exchanged else self.ring()
        return self.seconds_in_two(carried, block, in_a_row) < one.seconds(self.ranks, carried)

    def seconds_in_two(self, carried: float, block: float = 0.0, in_a_row: int = 1) -> float:
        """Return the seconds that `carried` bytes to or from all ranks take in two levels.

        One bucket is sent between hosts while the next is sent inside them. So the shorter leg
        counts for one bucket only, and is divided among the buckets in a row.
        """
        inside = self.inside.seconds(self.per_host, carried)
        across = self.between.seconds(self.hosts, max(carried / self.per_host, block))
        return max(inside, across) + min(inside, across) / in_a_row


# Where nobody has said what links can do. Of GPUs: `samestep plan`'s h200x8, which tells sources;
# of CPUs: two processes on one machine over gloo, and 1 Gbit/s per rank between machines, in round
# numbers.
GPU_LINKS = Link(2e-5, 3.6e11, 1e-6), Link(3e-5, 4.0e10, 1e-6)
CPU_LINKS = Link(2e-4, 1e9, 5e-5), Link(2e-4, 1.25e8, 5e-5)


def usual_links(device_type: str) -> tuple[Link, Link]:
    """Return assumed links inside a host and between hosts."""
    return CPU_LINKS if device_type == "cpu" else GPU_LINKS


def bucket_elements(
    elements: int, size: int, fabric: Fabric, *, most_buckets: int | None = None
) -> int:
    """Return the elements of a bucket for a plan of `elements` elements, `size` bytes."""
    link = fabric.ring()
    begin = max(link.seconds(fabric.ranks, 0), 1e-9)
    count = sqrt(size / link.bandwidth / begin)
    if most_buckets is not None:
        count = min(count, most_buckets)
    return round(min(max(elements / max(count, 1.0), LEAST_ELEMENTS), MOST_ELEMENTS))
