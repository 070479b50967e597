"""The options of `samestep plan`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True)
class Options:
    """Memory, traffic and time of an optimizer step, for any model on any cluster."""

    model: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(
            metavar="MODEL", help="a preset, a Hugging Face config.json, or PACKAGE:FACTORY"
        ),
    ] = ""
    mesh: str = "dp=8"
    """Axes and sizes: dp=8,tp=2,pp=4,ep=8,replicate=2."""
    ranks: int | None = None
    """How many there are; the axes must make up that number."""
    sharding: Literal["none", "zero1", "zero2", "zero3"] = "zero2"
    """zero3 is FSDP2; the others hold whole parameters."""
    buffers: Literal["per_parameter", "flat"] = "per_parameter"
    """How gradients and parameters lie."""
    hardware: str = "h200x8"
    """A preset, or a file that --calibrate wrote."""
    rule: Literal["muon", "adamw"] = "muon"
    """For matrices; the rest is AdamW's."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of parameters and gradients; 16-bit parameters have 32-bit main copies."""
    overlap: bool = True
    """Reduce inside backward, and with flat buffers gather inside the next forward."""
    tokens: int = 0
    """Of one rank per iteration: simulate forward and backward too."""
    bucket_size: int = 25 * (1 << 18)
    """Elements that travel together."""
    reserve: float = 0.3
    """Share of the device's memory that activations shall have."""
    scaling: bool = False
    """Plot strong and weak scaling at 8, 64, 512 and 4096 ranks."""
    calibrate: bool = False
    """Measure collectives and kernels on this machine and write the hardware file instead."""
    world_size: int = 2
    """Ranks that --calibrate starts."""
    out: Path | None = None
    """Folder for plan.json, plan.html and the timeline; with --calibrate for hardware.json."""
