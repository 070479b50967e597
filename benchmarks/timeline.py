"""What a rank did when and what was on the link meanwhile: traces, and their form for Chrome."""

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.modelled_link import Transfer


@dataclass(frozen=True)
class Trace:
    """Some time of one rank."""

    marks: list[tuple[str, float, float]]  # phase, begin, end
    transfers: list[Transfer]


def chrome_trace(shown: Mapping[str, Sequence[Trace]]) -> bytes:
    """For chrome://tracing or ui.perfetto.dev, gzipped: a process per configuration and rank."""
    events: list[dict[str, Any]] = []
    for title, traces in shown.items():
        origin = min(trace.marks[0][1] for trace in traces)

        def add(
            pid: int,
            tid: int,
            name: str,
            begin: float,
            end: float,
            zero: float = origin,
            **args: Any,
        ) -> None:
            times = {"ts": round(1e6 * (begin - zero), 1), "dur": round(1e6 * (end - begin), 1)}
            events.append({"name": name, "ph": "X", "pid": pid, "tid": tid, **times, "args": args})

        for rank, trace in enumerate(traces):
            pid = len({event["pid"] for event in events})
            for tid, row in (None, f"{title}: rank {rank}"), (0, "host"), (1, "waits"), (2, "link"):
                what = "process_name" if tid is None else "thread_name"
                events.append(
                    {"name": what, "ph": "M", "pid": pid, "tid": tid or 0, "args": {"name": row}}
                )
            for name, begin, end in trace.marks:
                add(pid, 0, name, begin, end)
            for transfer in trace.transfers:
                launched = round(1e6 * (transfer.launched - origin), 1)
                about: dict[str, Any] = {
                    "launched": launched,
                    "bytes": transfer.bytes,
                    "kind": transfer.kind,
                }
                add(pid, 2, transfer.name, transfer.start, transfer.end, **about)
                for begin, end in transfer.waits:
                    add(pid, 1, f"wait: {transfer.name}", begin, end)
    content = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode()
    return gzip.compress(content, mtime=0)
