"""Files, functions and lines that a reader passes: on a gradient's way, and when a rank is silent.

    PYTHONPATH=. python tests/journeys.py            # PYTHONPATH=ANOTHER/CHECKOUT: of that one

Counted are the functions that run on rank 0 of two, their lines and their files: from backward to
the end of the fifth step, in which nothing is planned and no model is looked at anew; and, of a
step that rank 1 never comes to, those of `comm/`.
"""

import os
import sys
import threading
import time
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import samestep
from samestep.launch.forked import run_forked

ROOT = os.path.dirname(os.path.abspath(samestep.__file__)) + os.sep
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero2": {"sharding": "zero2"},
    "flat": {"sharding": "zero2", "buffers": "flat"},
    "FSDP2": {},
}
ROLL_CALL = os.path.join("comm", "diagnosis", "roll_call.py")  # where a rank waits for a late one
STEPS = 4  # plans and views are made by then; models are looked at before the 1st, 2nd, 4th, 8th


class Way(NamedTuple):
    """Code that was passed: its files, its functions, and all lines of these functions.

    longest: the lines of the longest function.
    """

    files: list[str]
    functions: int
    lines: int
    longest: int

    def __str__(self) -> str:
        counts = f"{len(self.files)} files, {self.functions} functions, {self.lines} lines"
        return f"{counts}: {' '.join(self.files)}"


class Passed:
    """The functions that have run; threads that are started meanwhile count too."""

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()

    def __enter__(self) -> "Passed":
        threading.setprofile(self.look)
        sys.setprofile(self.look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def look(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            self.codes.add(frame.f_code)

    def way(self, folder: str = "", without: str = "") -> Way:
        """The code that was passed in a folder. A comprehension belongs to its function."""
        codes = [(code.co_filename.removeprefix(ROOT), code) for code in self.codes]
        codes = [(file, code) for file, code in codes if file.startswith(folder)]
        codes = [(file, code) for file, code in codes if file != without]
        functions = [code for _, code in codes if not code.co_name.startswith("<")]
        lines = {(file, line) for file, code in codes for line in lines_of(code)}
        longest = max((len(lines_of(code)) for code in functions), default=0)
        return Way(sorted({file for file, _ in codes}), len(functions), len(lines), longest)


def lines_of(code: CodeType) -> range:
    """From a function's decorators to its last line."""
    last = max((line for *_, line in code.co_lines() if line), default=code.co_firstlineno)
    return range(code.co_firstlineno, last + 1)


def training(layout: str) -> tuple[nn.Module, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    if layout == "FSDP2":
        mesh = init_device_mesh("cpu", (2,))
        for part in (model[0], model[2], model):
            fully_shard(part, mesh=mesh)
    return model, samestep.MuonAdamW(model, lr=1e-3, **LAYOUTS[layout])


def way_of_a_gradient(rank: int, layout: str) -> Way:
    model, opt = training(layout)
    for _ in range(STEPS):
        model(torch.randn(4, 16) + rank).square().sum().backward()
        opt.step()
        opt.zero_grad()
    loss = model(torch.randn(4, 16) + rank).square().sum()
    with Passed() as passed:
        loss.backward()
        opt.step()
    return passed.way(without=ROLL_CALL)


def hang(rank: int) -> Way | None:
    passed = Passed()
    threading.setprofile(passed.look)  # of watchers that construction starts
    model, opt = training("zero2")
    model(torch.randn(4, 16)).square().sum().backward()
    if rank == 1:
        time.sleep(8)
        return None
    with passed:
        try:
            opt.step()
        except Exception as error:
            sys.stdout.write(f"told of a hang: {error}\n")
    return passed.way(f"comm{os.sep}")


def main() -> None:
    found = {
        layout: run_forked(2, way_of_a_gradient, layout, timeout=120.0)[0] for layout in LAYOUTS
    }
    found["hang"] = run_forked(2, hang, timeout=60.0, collective_timeout=3.0)[0]
    for journey, way in found.items():
        sys.stdout.write(f"{journey}: {way}\n")


if __name__ == "__main__":
    main()
