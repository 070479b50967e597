"""Both curves as a picture."""

import io
from collections.abc import Sequence

from matplotlib.figure import Figure

from samestep.groups.crossover import Measurement


def draw(measurements: Sequence[Measurement], crossover: int, conditions: str) -> bytes:
    """Milliseconds per step over the parameter's size, both logarithmic; a PNG."""
    sizes = [each.size for each in measurements]
    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for label, color, values in (
        ("all-reduce, update all", "#c2571a", [each.all_reduce_ms for each in measurements]),
        ("shard, update a slice", "#1f5fa8", [each.shard_ms for each in measurements]),
    ):
        axes.plot(sizes, values, color=color, linewidth=2, marker="o", markersize=4, label=label)
    if crossover <= sizes[-1]:
        axes.axvline(crossover, color="#444444", linestyle="dotted", linewidth=1.2)
        right = crossover**2 > sizes[0] * sizes[-1]
        axes.annotate(
            f" crossover {crossover:,} ", (crossover, 0.02), xycoords=axes.get_xaxis_transform(),
            ha="right" if right else "left", color="#444444",
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    # Plain numbers: powers need mathematical fonts, which not every installation has.
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.tick_params(axis="x", rotation=30)
    axes.set_xlabel("elements of the parameter")
    axes.set_ylabel("ms per step (median)")
    figure.suptitle("From which size is sharding faster?", fontweight="bold")
    axes.set_title(conditions, fontsize=9, color="#555555")
    axes.legend(frameon=False)
    axes.grid(alpha=0.25, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()
