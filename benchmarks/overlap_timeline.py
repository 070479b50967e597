"""Timelines of real steps: a Chrome trace, and a picture of what runs while data travels."""

import gzip
import io
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

from benchmarks.modelled_link import Transfer
from benchmarks.overlap_training import Trace

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

COLOURS = {
    "forward": "#7fb2e5",
    "backward": "#f2b872",
    "step": "#9bd19b",
    "waiting": "#c8243b",
    "reduction": "#7b5ea7",
    "gather": "#1f8a8a",
    "presence": "#333333",
}
LABELS = {
    "step": "optimizer step",
    "waiting": "waiting for the link",
    "reduction": "gradients reduced",
    "gather": "parameters gathered",
}
SHORTEST_WAIT = 0.5e-3  # seconds; less is not drawn


def kind(transfer: Transfer) -> str:
    """What a transfer is for."""
    return next((k for k in ("reduction", "gather") if transfer.name.startswith(k)), "presence")


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
                about = {"launched": launched, "bytes": transfer.bytes, "kind": transfer.kind}
                add(pid, 2, transfer.name, transfer.start, transfer.end, **about)
                for begin, end in transfer.waits:
                    add(pid, 1, f"wait: {transfer.name}", begin, end)
    content = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode()
    return gzip.compress(content, mtime=0)


def picture(title: str, shown: Mapping[str, Sequence[Trace]], step: int = 2) -> bytes:
    """One configuration above the other on one scale: a whole step and the start of the next."""
    figure, axes = plt.subplots(len(shown), 1, figsize=(12, 3.1 * len(shown)), sharex=True)
    longest = 0.0
    for ax, (name, traces) in zip(axes, shown.items(), strict=True):
        begin = min(trace.marks[3 * step][1] for trace in traces)
        end = max(trace.marks[3 * step + 3][1] for trace in traces)
        longest = max(longest, end - begin)
        _panel(ax, traces, begin, end)
        waited = statistics.mean(_waited(trace, begin, end) for trace in traces)
        about = f"{1e3 * (end - begin):.0f} ms per step, {1e3 * waited:.0f} of them waiting"
        ax.set_title(f"{name}: {about}", loc="left", fontsize=11, weight="bold")
    for ax in axes:
        ax.set_xlim(0, 1.12e3 * longest)
    axes[-1].set_xlabel("ms since the step began")
    handles = [
        Patch(color=c, label=LABELS.get(k, k)) for k, c in COLOURS.items() if k != "presence"
    ]
    figure.legend(handles=handles, loc="lower center", ncol=len(handles), frameon=False)
    figure.suptitle(title, x=0.012, ha="left", fontsize=11)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=130)
    plt.close(figure)
    return target.getvalue()


def _waited(trace: Trace, begin: float, end: float) -> float:
    """Seconds between two times that the host was held up."""
    waits = [wait for transfer in trace.transfers for wait in transfer.waits]
    return sum(max(min(stop, end) - max(start, begin), 0.0) for start, stop in waits)


def _panel(ax: Axes, traces: Sequence[Trace], begin: float, end: float) -> None:
    """Two rows per rank: what the host does, and what is on the link."""

    def bar(y: float, height: float, name: str, start: float, stop: float) -> None:
        edge = "white" if name in ("reduction", "gather") else "none"
        ax.barh(
            y,
            1e3 * (stop - start),
            left=1e3 * (start - begin),
            height=height,
            color=COLOURS[name],
            edgecolor=edge,
            linewidth=0.6,
        )

    ticks = []
    for rank, trace in enumerate(traces):
        host, link = -2.4 * rank, -2.4 * rank - 0.9
        ticks += [(host, f"rank {rank}: host"), (link, "link")]
        for name, start, stop in trace.marks:
            bar(host, 0.8, name, start, stop)
            middle = 1e3 * ((start + stop) / 2 - begin)
            if begin <= start and stop <= end + 1e-3:
                ax.text(middle, host, name, ha="center", va="center", fontsize=9)
        for transfer in trace.transfers:
            bar(link, 0.6, kind(transfer), transfer.start, transfer.end)
            for start, stop in transfer.waits:
                if stop - start > SHORTEST_WAIT:
                    bar(host - 0.25, 0.3, "waiting", start, stop)
    ax.axvline(1e3 * (end - begin), color="black", linewidth=1, linestyle="--")
    ax.set_yticks([y for y, _ in ticks], [label for _, label in ticks])
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
