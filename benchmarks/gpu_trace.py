"""What a GPU did while something ran, by the profiler's timeline."""

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

T = TypeVar("T")

DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}  # categories; ranges of users are there too
PRODUCTS = ("gemm", "nvjet", "cutlass", "symmetric", "xmma", "cublas")
MOVES = ("HtoD", "DtoH", "nccl")  # between ranks: gloo goes through the host
SHOWN = 12


class Work(NamedTuple):
    """One thing that the device did, in microseconds."""

    name: str
    begin: float
    end: float


class Share(NamedTuple):
    """Milliseconds of some time."""

    wall: float
    products: float
    elementwise: float  # all other computing
    moved: float  # copies to and from the host, hidden or not
    longest: list[tuple[str, float]]  # names of kernels, and the sum of each

    @property
    def exposed(self) -> float:
        """In which nothing was computed: communication, and launches that came late."""
        return self.wall - self.products - self.elementwise

    @property
    def parts(self) -> tuple[float, float, float]:
        """That make up the whole."""
        return self.elementwise, self.products, self.exposed

    def per(self, count: int) -> "Share":
        """The mean of some repetitions."""
        return Share(
            self.wall / count,
            self.products / count,
            self.elementwise / count,
            self.moved / count,
            [(name, ms / count) for name, ms in self.longest],
        )


def device_work(call: Callable[[], T]) -> tuple[list[Work], T]:
    """All that the device did during a call, and what the call gave."""
    on_gpu = torch.cuda.is_available()
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU  # to try it
    with profile(activities=[activity]) as profiler:
        value = call()
    with tempfile.TemporaryDirectory(prefix="trace_") as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    work = [
        Work(event["name"], event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") in DEVICE
    ]
    return sorted(work, key=lambda each: each.begin), value


def share_of(work: Sequence[Work], wall: float) -> Share:
    """How a time of `wall` milliseconds was spent; what overlaps is counted once."""
    moves = [each for each in work if is_move(each.name)]
    computing = [each for each in work if not is_move(each.name)]
    products = [each for each in computing if is_product(each.name)]
    sums: dict[str, float] = {}
    for each in work:
        name = short(each.name)
        sums[name] = sums.get(name, 0.0) + (each.end - each.begin) / 1e3
    longest = sorted(sums.items(), key=lambda item: item[1], reverse=True)
    in_products = covered(products)
    return Share(
        wall,
        in_products,
        covered(computing) - in_products,
        covered(moves),
        longest[:SHOWN],
    )


def is_product(name: str) -> bool:
    """Whether a kernel multiplies matrices."""
    return any(word in name.lower() for word in PRODUCTS)


def is_move(name: str) -> bool:
    """Whether it carries something to another rank, or to the host on the way there."""
    return any(word in name for word in MOVES)


def short(name: str) -> str:
    """A kernel without its arguments."""
    return name.removeprefix("void ").split("(")[0][:100]


def covered(work: Iterable[Work]) -> float:
    """Milliseconds in which at least one was running."""
    total, reached = 0.0, float("-inf")
    for each in sorted(work, key=lambda each: each.begin):
        total += max(each.end - max(each.begin, reached), 0.0)
        reached = max(reached, each.end)
    return total / 1e3
