"""Where a step of Muon over FSDP2 spends its time on a GPU: elementwise work, products, the rest.

python -m benchmarks.gpu_breakdown --out DIR   # needs one GPU, and torch alone

The table that the authors of Parallel Muon give for theirs. One rank on NCCL, with DTensors over
a mesh of one, shows the computing; two ranks on gloo share the GPU and really exchange blocks.
Gradients are given, so that only steps are seen.
"""

import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

import samestep
from benchmarks import gpt_config, run_script
from samestep.comm.integrity.checksum import checksum
from samestep.groups.distribution import FILLS_A_GPU
from samestep.lab.bench.gpu.measure import measure_ceilings, settle
from samestep.lab.bench.gpu.report import Screen, heading, leave, number
from samestep.models.gpt import GPT
from samestep.models.parameter_sets import gpt
from samestep.plan.links import LEAST_ELEMENTS
from samestep.rules.basin import gram_segments
from samestep.rules.orthogonalize import USUAL_TABLE, cheaper_execution, orthogonalize_flops
from samestep.tooling.output import check_folder

# What a GPU did while something ran, by the profiler's timeline

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

    @property
    def is_move(self) -> bool:
        """Whether it carries something to another rank, or to the host on the way there."""
        return any(word in self.name for word in MOVES)

    @property
    def is_product(self) -> bool:
        return any(word in self.name.lower() for word in PRODUCTS)


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
    return work, value


def share_of(work: Sequence[Work], walls: Sequence[float]) -> dict[str, Any]:
    """How steps of `walls` milliseconds were spent, per step; what overlaps is counted once.

    Elementwise is all computing but products. Exposed is when nothing was computed: communication,
    and launches that came late. Copies count whether they are hidden or not.
    """
    computing = [each for each in work if not each.is_move]
    wall = statistics.mean(walls)
    products = covered(each for each in computing if each.is_product) / len(walls)
    busy = covered(computing) / len(walls)
    sums: defaultdict[str, float] = defaultdict(float)
    for each in work:
        name = each.name.removeprefix("void ").split("(")[0][:100]
        sums[name] += (each.end - each.begin) / 1e3 / len(walls)
    return {
        "profiled_ms": wall,
        "elementwise_ms": busy - products,
        "products_ms": products,
        "exposed_ms": wall - busy,
        "copies_to_and_from_host_ms": covered(each for each in work if each.is_move) / len(walls),
        "longest": sorted(sums.items(), key=lambda item: item[1], reverse=True)[:SHOWN],
    }


def covered(work: Iterable[Work]) -> float:
    """Milliseconds in which at least one was running."""
    total, reached = 0.0, float("-inf")
    for each in sorted(work, key=lambda each: each.begin):
        total += max(each.end - max(each.begin, reached), 0.0)
        reached = max(reached, each.end)
    return total / 1e3


# The benchmark

WARM_UP, PLAIN, PROFILED = 3, 5, 3
SMALL = LEAST_ELEMENTS  # elements of a chunk: a block or four
PUBLISHED = (
    "Parallel Muon, 10B parameters on 4 MI250 cards: 7% elementwise, 78% products, 15% exposed"
)


class Case(NamedTuple):
    """A way to run it."""

    ranks: int
    backend: str
    chunks_ahead: int = 1
    chunk_size: int = FILLS_A_GPU

    @property
    def title(self) -> str:
        pipeline = ", pipelined" if self.chunks_ahead else ", no pipeline"
        size = f", chunks of {self.chunk_size / 1e6:.1f}M"
        return f"{self.ranks} on {self.backend}{pipeline if self.ranks > 1 else ''}{size}"


CASES = (
    Case(1, "nccl"),
    Case(1, "nccl", chunk_size=SMALL),
    Case(2, "gloo", chunks_ahead=0),
    Case(2, "gloo"),
    Case(2, "gloo", chunk_size=SMALL),
)


class Report(NamedTuple):
    """What one rank tells."""

    head: dict[str, Any]  # of the receipt
    steps: dict[Case, dict[str, Any]]  # as the receipt has them
    checksums: dict[Case, int]  # of all this rank holds in the end


@dataclass(frozen=True)
class Options:
    """Of which model, and where."""

    width: int = 1280
    layers: int = 20
    vocabulary: int = 32768
    out: Path = Path("out/gpu-breakdown")
    device: Annotated[Literal["cuda", "cpu"], "cpu: to try it"] = "cuda"


def on_ranks(options: Options, ranks: int, backend: str) -> list[Report]:
    """What each rank of these cases tells.

    Ranks are started afresh: the profiler sees no GPU from a process that was forked by a thread.
    """
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        torch.multiprocessing.spawn(  # type: ignore[no-untyped-call]
            on_rank, (options, ranks, backend, folder), nprocs=ranks
        )
        reports = (Path(folder) / str(rank) for rank in range(ranks))
        return [torch.load(report, weights_only=False) for report in reports]


def on_rank(rank: int, options: Options, ranks: int, backend: str, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
    used = backend if device.type == "cuda" else "gloo"
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group(
        used, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    head = heading(
        "samestep breakdown",
        "python -m benchmarks.gpu_breakdown",
        device,
        measure_ceilings(device),
        (),
    )
    report = Report(head, {}, {})
    for case in CASES:
        if case.ranks == ranks:
            report.steps[case], report.checksums[case] = measured(case, options, device)
    torch.save(report, f"{folder}/{rank}")
    dist.barrier()
    dist.destroy_process_group()


def measured(case: Case, options: Options, device: torch.device) -> tuple[dict[str, Any], int]:
    """What the receipt has of this rank's steps, and the checksum of its parameters."""
    torch.manual_seed(0)
    config = gpt_config(options.width, options.layers, vocab_size=options.vocabulary)
    model = GPT(config).to(device)
    mesh = init_device_mesh(device.type, (case.ranks,))
    for layer in model.blocks:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = samestep.MuonAdamW(
        model,
        max_grad_norm=1.0,
        muon_schedule="parallel",
        chunks_ahead=case.chunks_ahead,
        chunk_size=case.chunk_size,
    )
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    params = [param for param in model.parameters() if isinstance(param, DTensor)]
    for param in params:
        grad: Any = torch.empty_like(param)  # a DTensor
        grad.to_local().normal_(generator=generator)
        param.grad = grad

    def step() -> float:
        """Milliseconds, from an idle device to an idle device; all ranks begin together."""
        settle(device)
        dist.barrier()
        begin = time.perf_counter()
        optimizer.step()
        settle(device)
        return 1e3 * (time.perf_counter() - begin)

    for _ in range(WARM_UP):
        step()
    plain = [step() for _ in range(PLAIN)]
    work, walls = device_work(lambda: [step() for _ in range(PROFILED)])
    if device.type == "cuda" and not work:
        raise RuntimeError("the profiler saw no kernel on this GPU")
    chunks = sum(line.startswith("Transform") for line in optimizer.schedule_lines())
    steps = {"ms": statistics.median(plain), "chunks": chunks, **share_of(work, walls)}
    return steps, sum(int(checksum(param.to_local())) for param in params)


def computed_flops(rows: int, cols: int) -> int:
    """Of a block as our kernels compute it: a symmetric product is half of one."""
    m, n = min(rows, cols), max(rows, cols)
    if cheaper_execution(rows, cols) == "standard":
        return len(USUAL_TABLE) * (3 * m * m * n + m**3)
    counts = [stop - start for start, stop in gram_segments(USUAL_TABLE, torch.float16, m)]
    # X X^T and Q X; per step A A, and between steps P Q, P A, (P A) P.
    # The last P A of several steps is half of one too.
    squares = [count + 4 * (count - 1) - (count > 1) for count in counts]
    return sum(3 * m * m * n + square * m**3 for square in squares)


def main(options: Options) -> None:
    check_folder(options.out)
    screen = Screen()
    reports = {
        ranks: on_ranks(options, ranks, backend)
        for ranks, backend in dict.fromkeys((case.ranks, case.backend) for case in CASES)
    }
    content = reports[1][0].head
    # Plain: step by step with whole products, as the published figure counts.
    matrices = gpt(options.width, options.layers, options.vocabulary).matrices
    computed = sum(computed_flops(*sizes) for sizes in matrices)
    plain = sum(orthogonalize_flops(m, n, execution="standard") for m, n in matrices)
    flops = {"computed": computed / 1e12, "plain": plain / 1e12}
    content |= {
        "width": options.width, "layers": options.layers, "vocabulary": options.vocabulary,
        "teraflop": flops, "published": PUBLISHED, "cases": [],
    }  # fmt: skip
    rows = []
    checksums: dict[int, list[int]] = {}
    for case in CASES:
        found = [report.checksums[case] for report in reports[case.ranks]]
        if case.ranks > 1 and checksums.setdefault(case.chunk_size, found) != found:
            raise RuntimeError(f"{case.title}: other parameters than without a pipeline")
        ranks = [report.steps[case] for report in reports[case.ranks]]
        content["cases"].append({"title": case.title, **case._asdict(), "ranks": ranks})
        for rank, steps in enumerate(ranks):
            rates = {f"tflops_{name}": 1e3 * count / steps["ms"] for name, count in flops.items()}
            steps.update(rates)
            parts = [steps[f"{part}_ms"] for part in ("elementwise", "products", "exposed")]
            rows.append(
                [
                    case.title if rank == 0 else "",
                    str(rank),
                    number(steps["ms"]),
                    number(steps["profiled_ms"]),
                    *(f"{part:.2f} ({part / steps['profiled_ms']:.0%})" for part in parts),
                    number(steps["copies_to_and_from_host_ms"]),
                    *(number(rate, 0) for rate in rates.values()),
                ]
            )
    leave(options.out, "breakdown", content, None)
    columns = [
        "", "rank", "ms", "profiled", "elementwise", "products", "exposed", "host copies",
        "TFLOP/s", "as published",
    ]  # fmt: skip
    screen.table(f"A step, milliseconds; {flops['plain']:.1f} TFLOP in plain form", columns, rows)
    screen.say(PUBLISHED + "; 151 TFLOP/s per card")
    screen.say(f"Wrote breakdown.json to {options.out}.")


if __name__ == "__main__":
    run_script(main, Options)
