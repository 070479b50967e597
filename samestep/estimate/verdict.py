"""Which stage to choose, and why."""

from collections.abc import Mapping
from dataclasses import dataclass

from samestep.estimate.cluster import STAGES, Stage

# From "when to use each" of Megatron's documentation: shares of the device's memory.
USE = {
    "none": "nothing is sharded: the fewest bytes travel",
    "zero1": "state is sharded; gradients stay whole",
    "zero2": "state and gradients are sharded; parameters stay whole",
    "zero3": "parameters are sharded too, and gathered layer by layer in forward and backward",
}


@dataclass(frozen=True)
class Verdict:
    """The stage that was asked for, and the one to choose; None: none fits."""

    asked: Stage
    fits: bool
    choose: Stage | None
    text: str


def judge(asked: Stage, peaks: Mapping[Stage, int], device_memory: int, reserve: float) -> Verdict:
    """The least sharding whose worst rank leaves the reserve for activations."""
    room = (1 - reserve) * device_memory
    fits = peaks[asked] <= device_memory
    choose = next((stage for stage in STAGES if stage in peaks and peaks[stage] <= room), None)
    share = f"{peaks[asked] / 1e9:,.1f} of {device_memory / 1e9:,.1f} GB"
    percent = f"{peaks[asked] / device_memory:.0%}"
    lines = [f"{asked}: the worst rank peaks at {share} ({percent})"]
    lines.append("it fits, activations apart" if fits else "it does not fit")
    if choose is None:
        least = min(peaks, key=lambda stage: peaks[stage])
        lines.append(
            f"no stage leaves {reserve:.0%} for activations: {least} needs the least, "
            f"{peaks[least] / 1e9:,.1f} GB; take more ranks, tensor or pipeline parallel"
        )
    else:
        why = f"{USE[choose]}, at {peaks[choose] / device_memory:.0%} of the memory"
        before = [stage for stage in STAGES[: STAGES.index(choose)] if stage in peaks]
        if before:
            too_much = ", ".join(f"{s} {peaks[s] / device_memory:.0%}" for s in before)
            why += f"; less sharding takes more than {1 - reserve:.0%} ({too_much})"
        lines.append(f"choose {choose}: {why}")
    return Verdict(asked, fits, choose, "; ".join(lines))
