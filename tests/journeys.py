"""Which files of samestep a reader passes: on a gradient's way, and when a rank does not answer.

    PYTHONPATH=. python tests/journeys.py            # PYTHONPATH=ANOTHER/CHECKOUT: of that one

Counted are the files of which a function runs on rank 0 of two: from backward to the end of the
step, of a step after the first ones; and, of a step that rank 1 never comes to, those of `comm/`.
"""

import os
import sys
import threading
import time
from types import FrameType
from typing import Any

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
STEPS = 3  # after these plans and views are made


class Passed:
    """The files of which a function has run; threads that are started meanwhile count too."""

    def __init__(self) -> None:
        self.files: set[str] = set()

    def __enter__(self) -> "Passed":
        threading.setprofile(self._look)
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _look(self, frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(ROOT):
            self.files.add(path.removeprefix(ROOT))


def training(layout: str) -> tuple[nn.Module, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    if layout == "FSDP2":
        mesh = init_device_mesh("cpu", (2,))
        for part in (model[0], model[2], model):
            fully_shard(part, mesh=mesh)
    return model, samestep.MuonAdamW(model, lr=1e-3, **LAYOUTS[layout])


def way_of_a_gradient(rank: int, layout: str) -> set[str]:
    model, opt = training(layout)
    for _ in range(STEPS):
        model(torch.randn(4, 16) + rank).square().sum().backward()
        opt.step()
        opt.zero_grad()
    loss = model(torch.randn(4, 16) + rank).square().sum()
    with Passed() as passed:
        loss.backward()
        opt.step()
    return passed.files


def hang(rank: int) -> set[str]:
    passed = Passed()
    threading.setprofile(passed._look)  # of watchers that construction starts
    model, opt = training("zero2")
    model(torch.randn(4, 16)).square().sum().backward()
    if rank == 1:
        time.sleep(8)
        return set()
    with passed:
        try:
            opt.step()
        except Exception as error:
            sys.stdout.write(f"told of a hang: {error}\n")
    return {path for path in passed.files if path.startswith(f"comm{os.sep}")}


def main() -> None:
    found = {layout: run_forked(2, way_of_a_gradient, layout)[0] for layout in LAYOUTS}
    found["hang"] = run_forked(2, hang, timeout=60.0, collective_timeout=3.0)[0]
    for journey, files in found.items():
        sys.stdout.write(f"{journey}: {len(files)} files: {' '.join(sorted(files))}\n")


if __name__ == "__main__":
    main()
