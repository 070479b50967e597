"""The layouts under test. A new layout adds itself here and inherits every scenario."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Layout:
    """Where parameters, gradients and state live: keywords of the optimizer.

    one_process: all ranks' gradients are averaged and applied by a single process.
    """

    name: str
    story: str
    options: Mapping[str, Any] = field(default_factory=dict)
    one_process: bool = False


LAYOUTS: dict[str, Layout] = {}


def register(layout: Layout) -> None:
    """Put a layout under test."""
    if layout.name in LAYOUTS:
        raise ValueError(f"there is a layout {layout.name!r} already")
    LAYOUTS[layout.name] = layout


for _layout in (
    Layout("one_process", "no other rank: gradients averaged by hand", one_process=True),
    Layout("none", "everything on every rank", {"sharding": "none"}),
    Layout("zero1", "state and update sharded", {"sharding": "zero1"}),
    Layout("zero2", "gradients freed once reduced", {"sharding": "zero2"}),
    Layout(
        "zero1_overlap",
        "zero1, reduced inside backward",
        {"sharding": "zero1", "overlap_grad_reduce": True},
    ),
    Layout(
        "zero2_overlap",
        "zero2, reduced inside backward",
        {"sharding": "zero2", "overlap_grad_reduce": True},
    ),
    Layout(
        "flat_zero1",
        "flat buffers, gradients kept whole",
        {"buffers": "flat", "sharding": "zero1"},
    ),
    Layout(
        "flat_zero2",
        "flat buffers, gradients given back once reduced",
        {"buffers": "flat", "sharding": "zero2"},
    ),
    Layout(
        "flat_zero1_overlap",
        "flat_zero1, reduced inside backward",
        {"buffers": "flat", "sharding": "zero1", "overlap_grad_reduce": True},
    ),
    Layout(
        "flat_zero2_overlap",
        "flat_zero2, reduced inside backward",
        {"buffers": "flat", "sharding": "zero2", "overlap_grad_reduce": True},
    ),
    Layout(
        "flat_gather_overlap",
        "flat_zero2_overlap, gathered while the next forward runs, NaN until waited for",
        {
            "buffers": "flat",
            "sharding": "zero2",
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
            "poison_early_reads": True,
        },
    ),
):
    register(_layout)
