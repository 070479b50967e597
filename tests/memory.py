"""The peak of live tensor bytes in a block of code, exactly.

    with peak_bytes() as peak:
        loss.backward()
    peak.value

torch's profiler reports every allocation and release of torch's CPU allocator: storages and
the workspaces inside operations, in backward and in hooks too. Unlike the resident size of the
process this does not depend on what malloc keeps, and unlike a dispatch mode it sees what a
kernel allocates for itself.

Not seen: memory that is not the CPU allocator's (shared, mapped or numpy's), and what other
threads than this one and autograd's do. Gloo's threads allocate for themselves, and are often
the last to let go of a buffer they have sent: then it counts as live until its address is given
out again. With `tests.counting_group` as the process group they let go before `wait` returns;
`peak.live` at the end of a block shows whether something was missed.
"""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from torch.profiler import ProfilerActivity, profile

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces its start and stop


class Allocation(NamedTuple):
    """One report of the allocator: bytes taken, or given back if negative."""

    address: int
    size: int


class Peak:
    """What a block allocated, known once the block has ended."""

    value: int  # bytes: the largest sum of live blocks, of those allocated inside
    live: int  # bytes that are still live at the end of the block
    blocks: list[int]  # the sizes that were live at the peak, largest first: what to look for
    total: int  # bytes of all allocations, whether or not they overlap


@contextmanager
def peak_bytes() -> Iterator[Peak]:
    """Measure the peak of the tensor bytes allocated in this block, less those freed again.

    What existed before counts neither while it lives nor when it is freed.
    """
    peak = Peak()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield peak
    _replay(_allocations(profiler), peak)


def _allocations(profiler: profile) -> list[Allocation]:
    """In the order in which they happened."""
    with tempfile.TemporaryDirectory(prefix="memory_") as directory:
        path = Path(directory, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    reports = [event for event in events if event["name"] == "[memory]"]
    reports.sort(key=lambda event: event["ts"])  # stable: the trace keeps the order of ties
    return [Allocation(report["args"]["Addr"], report["args"]["Bytes"]) for report in reports]


def _replay(allocations: list[Allocation], peak: Peak) -> None:
    live: dict[int, int] = {}
    now = peak.value = peak.total = 0
    peak.blocks = []
    for address, size in allocations:
        # Also when it is given out again: then another thread has freed it, unseen.
        now -= live.pop(address, 0)
        if size > 0:
            live[address] = size
            now += size
            peak.total += size
        if now > peak.value:
            peak.value, peak.blocks = now, sorted(live.values(), reverse=True)
    peak.live = now
