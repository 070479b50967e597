"""`samestep stress --faults`: a rank is killed, stopped or led astray, and the others must name it.

A case is a fault in a layout. Its ranks are processes of this machine that train a small model, in
a store that this process hosts, as torchrun does; torchrun itself would end the other ranks before
they can speak. In step `FAULT_STEP` the last rank goes wrong. Every other rank has to end by itself
with an error status, within the time-out and ten seconds, and one of its lines has to name the rank
that went wrong.
"""

import atexit
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from itertools import product
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import samestep
from samestep.comm.collectives import maximum, total
from samestep.comm.diagnosis.ending import WHERE
from samestep.comm.groups import registry
from samestep.launch.forked import end_with
from samestep.mesh import build

STEPS, FAULT_STEP = 8, 3
NO_FAULT = "none"
BY_POSITION = ("order", "foreign")  # faults of ranks that are all there, in other collectives
FAULT = "fault"  # a file that the rank leaves that goes wrong
WITHIN_S = 10.0  # of the time-out
START_S = 120.0  # for ranks to come to the fault
POLL_S = 0.05

# --- what goes wrong -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A way in which the last rank can go wrong in a step.

    ends: whether its process ends by itself; one that is stopped or sleeps is ended from outside.
    """

    name: str
    story: str
    ends: bool = True


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("kill", "killed by the system, before its step"),
        Fault("kill_first", "the same of rank 0"),
        Fault("stop", "stopped by a signal", ends=False),
        Fault("sleep", "busy with something else for ever", ends=False),
        Fault("skip", "leaves out a step, and ends one step before the others"),
        Fault("extra", "takes a step more than the others"),
        Fault("exception", "raises between backward and step"),
        Fault("in_backward", "raises inside backward"),
        Fault("in_step", "cannot take the step: an option has no valid value"),
        Fault("shape", "sends another number of elements"),
        Fault("order", "sends something else first"),
        Fault("foreign", "runs a collective of torch that no other rank runs"),
    )
}


class Loss(nn.Module):
    """The identity function, whose backward raises on request."""

    def __init__(self) -> None:
        super().__init__()
        self.armed = False

    def forward(self, value: Tensor) -> Tensor:
        if self.armed:
            value.register_hook(self._raise)  # type: ignore[no-untyped-call]
        return value

    @staticmethod
    def _raise(_: Tensor) -> NoReturn:
        raise RuntimeError("a fault inside backward")


@contextmanager
def _goes_wrong(fault: str, optimizer: samestep.MuonAdamW, loss: Loss) -> Iterator[None]:
    """Run the step in which this rank goes wrong."""
    match fault:
        case "kill" | "kill_first":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            time.sleep(1000)
        case "in_backward":
            loss.armed = True
        case "in_step":
            optimizer.param_groups[0]["weight_decay"] = "none"
        case "order":
            whole, device = registry.of(), next(iter(optimizer.param_groups[0]["params"])).device
            total("something else", torch.ones(3, device=device), whole).wait()
        case "foreign":
            device = next(iter(optimizer.param_groups[0]["params"])).device
            dist.all_reduce(torch.ones(1000, device=device))  # noqa: TID251 - a user's mistake
        case "shape":

            def longer(name: str, values: Tensor, group: Any) -> Any:
                return maximum(name, torch.cat([values, values]), group)

            with mock.patch("samestep.comm.presence.maximum", longer):
                yield
            return
    yield


# --- a rank --------------------------------------------------------------------------------------


def _model(layout: str, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.LayerNorm(16))
    model.to(device)
    if layout in ("fsdp2", "tp_fsdp2"):
        tp = 2 if layout == "tp_fsdp2" else 1
        # Not torch's init_device_mesh: its groups have the backend's time-out, up to 30 minutes.
        mesh = build(tp=tp, device_type=device.type).device_mesh
        if tp > 1:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(model, mesh["model"], plan)
        fully_shard(model, mesh=mesh["data"])
    return model


LAYOUTS: dict[str, dict[str, Any]] = {
    "zero2": {"sharding": "zero2"},
    "flat_overlap": {
        "sharding": "zero2", "buffers": "flat",
        "overlap_grad_reduce": True, "overlap_param_gather": True,
    },
    "fsdp2": {},
    "tp_fsdp2": {},
}  # fmt: skip


class Asked(NamedTuple):
    """One case that was asked for: a fault in a layout, on a number of ranks."""

    fault: str
    layout: str
    world: int
    backend: str
    timeout: float

    @property
    def astray(self) -> int:
        """Return the rank that goes wrong."""
        return 0 if self.fault == "kill_first" else self.world - 1

    @property
    def to_tell(self) -> list[int]:
        """Return the ranks that must notice a fault; a step too many only its own rank notices."""
        others = [rank for rank in range(self.world) if rank != self.astray]
        return [self.astray] if self.fault == "extra" else others

    @property
    def to_name(self) -> int:
        """Return the rank that the messages of the others must name."""
        return 0 if self.fault == "extra" else self.astray


def _train(asked: Asked, rank: int, device: torch.device, fault_file: Path) -> None:
    """Train a few steps; the rank that goes wrong does so in step `FAULT_STEP`."""
    model = _model(asked.layout, device)
    loss_of = Loss()
    optimizer = samestep.MuonAdamW(model, lr=1e-3, **LAYOUTS[asked.layout])
    astray = rank == asked.astray
    steps = STEPS + (astray and asked.fault == "extra")
    goes_wrong_in = STEPS if asked.fault == "extra" else FAULT_STEP
    for step in range(steps):
        wrong = astray and step == goes_wrong_in
        if wrong:
            fault_file.touch()
        if wrong and asked.fault == "skip":
            continue
        torch.manual_seed(100 * step + (0 if asked.layout == "tp_fsdp2" else rank))
        data = torch.randn(4, 16).to(device)
        fault = asked.fault if wrong else ""
        with _goes_wrong(fault, optimizer, loss_of):
            loss_of(model(data).square().mean()).backward()
            if fault == "exception":
                raise RuntimeError("a fault between backward and step")
            optimizer.step()
        optimizer.zero_grad()
    # A script reads something in the end; until then a device may be behind its host.
    if device.type == "cuda":
        torch.cuda.synchronize()


def _be_rank(asked: Asked, rank: int, port: int, folder: Path) -> NoReturn:
    """Run one rank as a script would, and end the process."""
    end_with(os.getppid())
    output = os.open(folder / f"rank_{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = torch.device("cpu")
    if asked.backend == "nccl":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    limit = timedelta(seconds=asked.timeout)
    # Until all ranks are there nothing counts: their start is as slow as the machine is busy.
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=START_S))
    store.set(f"here_{rank}", "")
    store.wait([f"here_{other}" for other in range(asked.world)])
    store.set_timeout(limit)
    status = 0
    try:
        backend = "cpu:gloo,cuda:nccl" if asked.backend == "nccl" else "gloo"
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=asked.world, timeout=limit
        )
        warnings.simplefilter("ignore")
        _train(asked, rank, device, folder / FAULT)
    except BaseException as error:
        status = 1
        sys.excepthook(type(error), error, error.__traceback__)
    # As at the end of a script, which a process of multiprocessing leaves out.
    with suppress(BaseException):
        atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(status)


# --- a case --------------------------------------------------------------------------------------


@dataclass
class Report:
    """The end of a rank that did nothing wrong.

    named: The rank's messages named the one that went wrong.
    aborted: Gloo aborted the process, as Gloo does where sizes do not match, without a message.
    """

    rank: int
    status: int | None  # of its process; negative: by a signal; None: it had to be killed
    seconds: float | None  # from the fault
    named: bool
    message: str
    aborted: bool = False

    def good(self, limit: float) -> bool:
        return (
            self.status not in (None, 0)
            and self.named
            and self.seconds is not None
            and self.seconds <= limit
        )


@dataclass
class FaultResult:
    """The result of a case."""

    fault: str
    layout: str
    world_size: int
    backend: str
    timeout: float
    passed: bool
    reports: list[Report] = field(default_factory=list)


def _processes() -> ForkServerContext:
    """Return the context that forks ranks from a process without threads that has imported all."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


class Running:
    """The processes of one case while it runs."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self._folder = Path(tempfile.mkdtemp(prefix="fault_"))  # no rank may remove it at its exit
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context, place = _processes(), (self._store.port, self._folder)
        self._ranks = [
            context.Process(target=_be_rank, args=(asked, rank, *place))
            for rank in range(asked.world)
        ]
        for process in self._ranks:
            process.start()
        self._ended: dict[int, float] = {}
        self._begun = time.monotonic()
        self._fault: float | None = None

    def look(self) -> bool:
        """Record which processes have ended, and return whether the case is over."""
        now = time.monotonic()
        if self._fault is None and (self._folder / FAULT).exists():
            self._fault = now
        for rank, process in enumerate(self._ranks):
            if process.exitcode is not None:
                self._ended.setdefault(rank, now)
        since = self._begun if self._fault is None else self._fault
        limit = START_S if self._fault is None else self.asked.timeout + WITHIN_S
        return set(self.asked.to_tell) <= self._ended.keys() or now - since > limit + 2.0

    @property
    def reached_fault(self) -> bool:
        """Whether the faulty rank has reached its fault."""
        return self._fault is not None

    def result(self) -> FaultResult:
        """End the remaining processes, and judge the case."""
        for process in self._ranks:
            process.kill()
            process.join()
        limit = self.asked.timeout + WITHIN_S
        reports = [self._report(rank) for rank in self.asked.to_tell]
        good = [report.good(limit) for report in reports]
        passed = any(good) and all(
            is_good or report.aborted for is_good, report in zip(good, reports, strict=True)
        )
        shutil.rmtree(self._folder)
        asked = self.asked
        return FaultResult(
            asked.fault, asked.layout, asked.world, asked.backend, asked.timeout, passed, reports
        )

    def _report(self, rank: int) -> Report:
        path = self._folder / f"rank_{rank}.txt"
        text = path.read_text(errors="replace") if path.exists() else ""
        lines = _lines_of_samestep(text)
        name = re.compile(rf"\branks? (\d+(, | and ))*{self.asked.to_name}\b")
        # Positions name every rank; they tell who is at fault only if that is all that differs.
        heads = [
            line if self.asked.fault in BY_POSITION else line.split(WHERE)[0] for line in lines
        ]
        named = any(name.search(head) for head in heads)
        seconds = None
        if rank in self._ended and self._fault is not None:
            seconds = round(self._ended[rank] - self._fault, 2)
        message = next((line for line in lines if name.search(line)), "")
        # Folders are those of one machine, and no part of a receipt.
        message = re.sub(r"(/[\w.~-]+)*/(?=[\w-]+\.\w+:)", "", message or text.strip()[-1500:])
        status = self._ranks[rank].exitcode if rank in self._ended else None
        aborted = status == -signal.SIGABRT and "gloo::EnforceNotMet" in text
        return Report(rank, status, seconds, named, message, aborted)


def _lines_of_samestep(text: str) -> list[str]:
    """Return the lines of samestep's own errors in a log, the last ones first."""
    kinds = ("CollectiveError", "RankProblemError", " ends, in ", "failed: ")
    return [line for line in reversed(text.splitlines()) if any(kind in line for kind in kinds)]


def cases(
    faults: Sequence[str], layouts: Sequence[str], world: int, backend: str, timeout: float
) -> list[Asked]:
    """Return all pairs of fault and layout; a mesh of two axes gets four ranks."""

    def ranks(layout: str, fault: str) -> int:
        aborts = backend == "gloo" and fault in ("shape", "foreign")
        return max(world, 4 if layout == "tp_fsdp2" else 3 if aborts else 2)

    return [
        Asked(fault, layout, ranks(layout, fault), backend, timeout)
        for layout, fault in product(layouts, faults)
    ]


def run_faults(
    asked: Sequence[Asked], lanes: int, on_result: Callable[[FaultResult], None]
) -> None:
    """Run all cases, several at the same time.

    On a GPU kernels are compiled first, by ranks that do nothing wrong: in a case it would count
    towards the time-out. A case whose ranks did not come as far as the fault, since their start
    took longer than the time-out, shows nothing of it, and is run once more after the others.
    """
    if asked and asked[0].backend == "nccl":
        first = Running(Asked(NO_FAULT, "zero2", 2, "nccl", START_S))
        while not first.look():
            time.sleep(POLL_S)
        first.result()
    left, running, again = list(asked), list[Running](), set[Asked]()
    try:
        while left or running:
            while left and len(running) < lanes:
                running.append(Running(left.pop(0)))
            for case in list(running):
                if case.look():
                    running.remove(case)
                    result = case.result()
                    if case.reached_fault or case.asked in again:
                        on_result(result)
                    else:
                        again.add(case.asked)
                        left.append(case.asked)
            time.sleep(POLL_S)
    finally:
        for case in running:
            case.result()


def receipt_of(results: Sequence[FaultResult], ran: dict[str, Any]) -> bytes:
    """Return the record of a run, as JSON."""
    content = {
        "kind": "samestep stress --faults",
        "format": 1,
        "verdict": "clean" if results and all(each.passed for each in results) else "failed",
        "ran": ran,
        "faults": {name: fault.story for name, fault in FAULTS.items()},
        "cases": [asdict(each) for each in results],
    }
    return json.dumps(content, indent=1).encode() + b"\n"
