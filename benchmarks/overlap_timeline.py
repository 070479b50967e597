"""The picture of a step without and with overlap."""

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.modelled_link import Transfer
from benchmarks.timeline import Trace
from benchmarks.timeline_picture import WAITING, Look, Panel
from benchmarks.timeline_picture import picture as draw

COLOURS = {
    "forward": "#7fb2e5",
    "backward": "#f2b872",
    "step": "#9bd19b",
    WAITING: "#c8243b",
    "reduction": "#7b5ea7",
    "gather": "#1f8a8a",
    "presence": "#333333",
}
LABELS = {
    "forward": "forward",
    "backward": "backward",
    "step": "optimizer step",
    WAITING: "waiting for the link",
    "reduction": "gradients reduced",
    "gather": "parameters gathered",
}


def kind(transfer: Transfer) -> str:
    """What a transfer is for."""
    return next((k for k in ("reduction", "gather") if transfer.name.startswith(k)), "presence")


def picture(title: str, shown: Mapping[str, Sequence[Trace]], step: int = 2) -> bytes:
    """One configuration above the other on one scale: a whole step and the start of the next."""
    panels = []
    for name, traces in shown.items():
        begin = min(trace.marks[3 * step][1] for trace in traces)
        end = max(trace.marks[3 * step + 3][1] for trace in traces)
        waited = statistics.mean(_waited(trace, begin, end) for trace in traces)
        about = f"{1e3 * (end - begin):.0f} ms per step, {1e3 * waited:.0f} of them waiting"
        panels.append(Panel(f"{name}: {about}", traces, begin, end))
    look = Look(COLOURS, LABELS, lambda name: (name, name), lambda transfer: (kind(transfer), ""))
    longest = 1.12 * max(panel.end - panel.begin for panel in panels)
    return draw(title, panels, look, longest=longest, since="the step began", rank_height=1.1)


def _waited(trace: Trace, begin: float, end: float) -> float:
    """Seconds between two times that the host was held up."""
    waits = [wait for transfer in trace.transfers for wait in transfer.waits]
    return sum(max(min(stop, end) - max(start, begin), 0.0) for start, stop in waits)
