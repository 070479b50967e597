"""What a rank did when and what was on the link meanwhile: traces, and their pictures."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.modelled_link import Transfer
from samestep.tooling.output import Drawn, png_file, trace_file


@dataclass(frozen=True)
class Trace:
    """Some time of one rank."""

    marks: list[tuple[str, float, float]]  # phase, begin, end
    transfers: list[Transfer]


def chrome_trace(shown: Mapping[str, Sequence[Trace]]) -> bytes:
    """A process per configuration and rank; see `trace_file`."""

    def drawn(trace: Trace, origin: float) -> Iterator[Drawn]:
        for name, begin, end in trace.marks:
            yield Drawn(0, name, begin - origin, end - origin)
        for t in trace.transfers:
            about = {"launched": 1e6 * (t.launched - origin), "bytes": t.bytes, "kind": t.kind}
            yield Drawn(2, t.name, t.start - origin, t.end - origin, about)
            for begin, end in t.waits:
                yield Drawn(1, f"wait: {t.name}", begin - origin, end - origin)

    return trace_file(
        (f"{title}: rank {rank}", ("host", "waits", "link"), drawn(trace, begun))
        for title, traces in shown.items()
        for begun in [min(each.marks[0][1] for each in traces)]
        for rank, trace in enumerate(traces)
    )


# Pictures of traces: two rows per rank, what the host does and what is on the link

WAITING = "waiting"
SHORTEST_WAIT = 0.5e-3  # seconds; less is not drawn
CHARACTER = 0.008  # of the width of a picture


class Panel(NamedTuple):
    """The traces of all ranks between two times."""

    title: str
    traces: Sequence[Trace]
    begin: float
    end: float


class Look(NamedTuple):
    """How things are drawn: colour of each kind, and label in the legend, if it is there."""

    kinds: Mapping[str, tuple[str, str]]  # that of waits is `WAITING`
    of_mark: Callable[[str], tuple[str, str]]  # name -> kind, text
    of_transfer: Callable[[Transfer], tuple[str, str]]


def picture(
    title: str, panels: Sequence[Panel], look: Look, *, longest: float, rank_height: float
) -> bytes:
    """One panel above the other, all `longest` seconds wide; needs matplotlib."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    heights = [rank_height * len(panel.traces) + 0.9 for panel in panels]
    figure = Figure(figsize=(12, sum(heights)))
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)
    for ax, panel in zip(axes.flat, panels, strict=True):
        _draw(ax, panel, look, longest)
        ax.set_title(panel.title, loc="left", fontsize=11, weight="bold")
        ax.set_xlim(0, 1e3 * longest)
    axes[-1, 0].set_xlabel("ms since the step began")
    handles = [Patch(color=colour, label=text) for colour, text in look.kinds.values() if text]
    figure.legend(
        handles=handles, loc="lower center", ncol=len(handles), frameon=False, columnspacing=1.4
    )
    figure.suptitle(title, x=0.012, ha="left", fontsize=11)
    figure.tight_layout(rect=(0, 0.31 / sum(heights), 1, 1))
    return png_file(figure, dpi=130)


def _draw(ax: Any, panel: Panel, look: Look, longest: float) -> None:
    def bar(y: float, height: float, kind: str, start: float, stop: float, text: str = "") -> None:
        begin, width = 1e3 * (start - panel.begin), 1e3 * (stop - start)
        color, _ = look.kinds[kind]
        ax.barh(y, width, left=begin, height=height, color=color, edgecolor="white", linewidth=0.6)
        fits = stop - start > CHARACTER * len(text) * longest
        if text and fits and start >= panel.begin and stop <= panel.end + 1e-3:
            ax.text(begin + width / 2, y, text, ha="center", va="center", fontsize=8, clip_on=True)

    ticks = []
    for rank, trace in enumerate(panel.traces):
        host, link = -2.4 * rank, -2.4 * rank - 0.9
        ticks += [(host, f"rank {rank}: host"), (link, "link")]
        for name, start, stop in trace.marks:
            kind, text = look.of_mark(name)
            bar(host, 0.8, kind, start, stop, text)
        for transfer in trace.transfers:
            kind, text = look.of_transfer(transfer)
            bar(link, 0.6, kind, transfer.start, transfer.end, text)
            for start, stop in transfer.waits:
                if stop - start > SHORTEST_WAIT:
                    bar(host - 0.25, 0.3, WAITING, start, stop)
    ax.axvline(1e3 * (panel.end - panel.begin), color="black", linewidth=1, linestyle="--")
    ax.set_yticks([y for y, _ in ticks], [label for _, label in ticks])
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
