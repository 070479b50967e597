"""The four timelines of Muon over shards, from the traces of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.modelled_link import Transfer
from benchmarks.muon_exposure import measure
from benchmarks.timeline import Trace
from benchmarks.timeline_picture import Look, Panel, picture

EXPOSED, IDLE = "exposed", "idle"

COLOURS = {
    "collect": "#9bd19b",
    "transform": "#7fb2e5",
    "apply": "#f2b872",
    "other": "#bbbbbb",
    EXPOSED: "#c8243b",
    IDLE: "#f4c6cb",
    "collection": "#7b5ea7",
    "return": "#1f8a8a",
}
LABELS = {
    "collect": "momentum",
    "transform": "orthogonalization",
    "apply": "update",
    "other": "AdamW and more",
    EXPOSED: "waiting for the link",
    IDLE: "for another rank",
    "collection": "to owners",
    "return": "back",
}


def of_mark(name: str) -> tuple[str, str]:
    """Kind and text of an operation such as "Transform 0.3": the chunk, if it is a long one."""
    word = name.split()[0].lower()
    kind = word if word in COLOURS else "other"
    return kind, name.split(".")[-1] if kind == "transform" else ""


def of_transfer(transfer: Transfer) -> tuple[str, str]:
    """Kind and text of a transfer: the chunk that is on its way."""
    kind = transfer.name.split()[0] if transfer.name else ""
    if kind in ("collection", "return"):
        return kind, transfer.name.split()[-1]
    return "other", ""


def waits_apart(trace: Trace) -> Trace:
    """Operations cut where they wait, and waits among them, by what is waited for."""
    marks: list[tuple[str, float, float]] = []
    waits = sorted((*span, t.ready) for t in trace.transfers for span in t.waits)
    for name, begin, end in trace.marks:
        for start, stop, ready in waits:
            if begin <= start and stop <= end:
                others = min(max(start, ready), stop)
                pieces = (name, begin, start), (IDLE, start, others), (EXPOSED, others, stop)
                marks += [piece for piece in pieces if piece[2] > piece[1]]
                begin = stop
        marks.append((name, begin, end))
    return Trace(marks, [replace(transfer, waits=()) for transfer in trace.transfers])


def pictures(shown: Mapping[str, tuple[str, Sequence[Trace]]], about: str) -> dict[str, bytes]:
    """A picture per file name, from its title and traces; neighbours of similar length align."""
    steps = {name: measure(traces) for name, (_, traces) in shown.items()}
    shortest = min(step.whole for step in steps.values())
    alike = [step.whole for step in steps.values() if step.whole < 2.5 * shortest]
    made = {}
    for name, (title, traces) in shown.items():
        step = steps[name]
        begin = min(trace.marks[0][1] for trace in traces)
        ms = f"{1e3 * step.whole:.0f} ms, exposed communication {1e3 * step.exposed:.0f} ms"
        panel = Panel(f"{title}: {ms}", [*map(waits_apart, traces)], begin, begin + step.whole)
        made[name] = picture(
            about,
            [panel],
            Look(COLOURS, LABELS, of_mark, of_transfer),
            longest=1.02 * (max(alike) if step.whole in alike else step.whole),
            since="the step began",
            rank_height=0.75,
        )
    return made
