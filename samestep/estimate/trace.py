"""A simulated timeline as a trace for chrome://tracing or ui.perfetto.dev."""

import gzip
import json
from collections.abc import Mapping
from typing import Any

from samestep.estimate.timeline import Timeline

ROWS = {"operations": 0, "waits": 1, "transfers": 2}


def chrome_trace(timelines: Mapping[str, Timeline]) -> bytes:
    """Gzipped JSON: a process per timeline and rank, with rows for host, waits and link."""
    events: list[dict[str, Any]] = []
    pid = 0
    for title, timeline in timelines.items():
        for rank, shown in timeline.shown.items():
            names = {"process_name": f"{title}: rank {rank}"}
            events += [_meta("process_name", pid, 0, name) for name in names.values()]
            for row, tid in ROWS.items():
                events.append(_meta("thread_name", pid, tid, row))
                for span in getattr(shown, row):
                    event = {
                        "name": span.name, "ph": "X", "pid": pid, "tid": tid,
                        "ts": round(1e6 * span.start, 3),
                        "dur": round(1e6 * (span.end - span.start), 3),
                    }  # fmt: skip
                    if span.launched is not None:
                        event["args"] = {"launched": round(1e6 * span.launched, 3)}
                    events.append(event)
            pid += 1
    content = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode()
    return gzip.compress(content, mtime=0)


def _meta(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
