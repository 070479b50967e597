"""`samestep plan --calibrate`: measure this machine, write the hardware file."""

import json
import math
from pathlib import Path

from rich.console import Console

from samestep.estimate.calibration import Measured, hardware, measure
from samestep.estimate.hardware import hardware_as_json
from samestep.estimate.options import Options
from samestep.launch import run_forked
from samestep.tooling.output import check_folder, write_files
from samestep.tooling.request import BadRequestError

FILE = "hardware.json"


def calibrate(options: Options) -> None:
    """On forked gloo ranks; a GPU's rates come from `samestep bench`."""
    if options.world_size < 2:
        raise BadRequestError(f"--world-size must be at least 2, got {options.world_size}")
    folder = options.out or Path()
    check_folder(folder)
    sizes = (*tuple(n for n in (2, 4, 8, 16) if n < options.world_size), options.world_size)
    console = Console(highlight=False)
    console.print(f"Measuring with {options.world_size} gloo ranks ...")
    found: list[Measured] = run_forked(
        options.world_size, measure, sizes, timeout=math.inf, collective_timeout=120.0
    )
    content = hardware_as_json(hardware(found[0], options.world_size))
    write_files(folder, {FILE: json.dumps(content, indent=1).encode() + b"\n"})
    rates = ", ".join(f"{side}: {rate / 1e9:.3g}" for side, rate in found[0].product_rates.items())
    console.print(f"GFLOP/s of orthogonalization by side of a block: {rates}", soft_wrap=True)
    console.print(
        f"Wrote {FILE} to {folder}: samestep plan MODEL --hardware {folder / FILE}", soft_wrap=True
    )
