"""Steps of Muon over FSDP2 on a modelled link, traced operation by operation."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import samestep
import samestep.optimizer.step
from benchmarks.modelled_link import ModelledLink, Speed, Transfer
from benchmarks.muon_exposure import Case, computed
from benchmarks.timeline import Trace
from examples.gpt import GPT, GPTConfig
from samestep.comm.diagnosis.recorder import Record
from samestep.comm.executor import Handlers, execute
from samestep.plan.schedule import Operation, Schedule, line_of

FREE = "free"  # the link that costs nothing
HEADS, KV_HEADS = 4, 1
ONE_TURN = 1  # elements of a chunk: as small as can be, one block per owner

CASES = (
    Case("gather", False),
    Case("gather", True),
    Case("parallel", False, "cyclic"),
    Case("parallel", True, "cyclic"),
    Case("parallel", False, "balanced"),
    Case("parallel", True, "balanced"),
)


@dataclass(frozen=True)
class Shape:
    """The model and its batch."""

    width: int = 256
    layers: int = 8
    vocabulary: int = 256
    sequences: int = 2
    tokens: int = 32


class Regime(NamedTuple):
    """Links by what all transfers of a step cost on them, as a share of its computing."""

    latency: float  # seconds per transfer
    ratios: dict[str, float]


class RankResult(NamedTuple):
    """What a rank has seen: a trace per round."""

    speeds: dict[str, Speed]
    traces: dict[tuple[Case, str], list[Trace]]
    parameters: int
    chunks: dict[Case, int]


class Marks(list[tuple[str, float, float]]):
    """Runs schedules as the executor does, and notes when each operation began and ended."""

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__()
        self._now = now

    def execute(self, schedule: Schedule, handlers: Handlers) -> None:
        """Run the operations one after the other."""
        execute(schedule, {kind: self._timed(handler) for kind, handler in handlers.items()})

    def _timed(self, handler: Callable[[Any], None]) -> Callable[[Any], None]:
        def run(operation: Operation) -> None:
            begin = self._now()
            handler(operation)
            self.append((line_of(operation), begin, self._now()))

        return run


class Training:
    """A GPT under FSDP2 with an optimizer of its own.

    The six matrices of a layer are blocks of unequal work: dealt out in turn they leave two of
    four ranks with all the large ones.
    """

    def __init__(self, case: Case, shape: Shape, link: ModelledLink, marks: Marks) -> None:
        self._shape, self._link, self._marks = shape, link, marks
        torch.manual_seed(0)
        config = GPTConfig(
            vocab_size=shape.vocabulary, context=shape.tokens, width=shape.width,
            layers=shape.layers, heads=HEADS, kv_heads=KV_HEADS,
        )  # fmt: skip
        self._model = GPT(config)
        self.parameters = sum(param.numel() for param in self._model.parameters())
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in self._model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self._model, mesh=mesh)
        self._optimizer = samestep.MuonAdamW(
            self._model,
            bucket_size=ONE_TURN,
            muon_schedule=case.schedule,
            chunks_ahead=int(case.pipelined),
            owners=case.owners or "balanced",
        )
        self._generator = torch.Generator().manual_seed(dist.get_rank())

    @property
    def chunks(self) -> int:
        """In how many chunks blocks move."""
        return sum(line.startswith("Transform") for line in self._optimizer.schedule_lines())

    def step(self, speed: Speed) -> Trace:
        """Forward and backward on a free link, then the traced step on the one that is asked for.

        All ranks begin it together, so that nobody waits for another's backward.
        """
        size = (2, self._shape.sequences, self._shape.tokens)
        tokens, targets = torch.randint(self._shape.vocabulary, size, generator=self._generator)
        self._optimizer.zero_grad()
        self._model.loss(tokens, targets).backward()  # type: ignore[no-untyped-call]
        dist.barrier()
        self._link.set_speed(*speed)
        transfers: list[Transfer] = []
        self._link.transfers = transfers
        self._marks.clear()
        self._optimizer.step()
        self._link.set_speed(0.0, float("inf"))
        self._link.transfers = []  # FSDP2's are not of interest
        return Trace(list(self._marks), transfers)


def calibrate(training: Training, regime: Regime) -> dict[str, Speed]:
    """Links on which communication is the wanted share of computing, the same on all ranks."""
    free = Speed(0.0, float("inf"))
    training.step(free)
    traces = [training.step(free) for _ in range(3)]
    carried = sum(transfer.bytes for transfer in traces[0].transfers)
    least = torch.tensor([statistics.median(map(computed, traces)), -carried], dtype=torch.float64)
    dist.all_reduce(least, dist.ReduceOp.MIN)  # the rank with the least noise, and the most bytes
    computing, most = float(least[0]), -float(least[1])
    latencies = regime.latency * len(traces[0].transfers)
    speeds = {FREE: free}
    for name, ratio in regime.ratios.items():
        speeds[name] = Speed(regime.latency, most / max(ratio * computing - latencies, 1e-3))
    return speeds


def on_rank(
    rank: int, shape: Shape, regime: Regime, rounds: int, link: ModelledLink, names: tuple[str, ...]
) -> RankResult:
    """Every case on every link, in turns, back and forth."""
    link.install()
    marks = Marks(link.now)
    recorder = samestep.FlightRecorder()
    recorder.on_launch.append(lambda record: _give_name(link, record))
    with patch.object(samestep.optimizer.step, "execute", marks.execute), recorder:
        trainings = {case: Training(case, shape, link, marks) for case in CASES}
        speeds = calibrate(trainings[CASES[-1]], regime)
        for training in trainings.values():
            training.step(speeds[FREE])
        traces: dict[tuple[Case, str], list[Trace]] = {
            (case, name): [] for case in CASES for name in (FREE, *names)
        }
        for number in range(rounds):
            turns = list(traces)
            for case, name in turns if number % 2 else reversed(turns):
                traces[case, name].append(trainings[case].step(speeds[name]))
            if rank == 0:
                print(f"round {number + 1} of {rounds}", flush=True)
    chunks = {case: training.chunks for case, training in trainings.items()}
    return RankResult(speeds, traces, trainings[CASES[0]].parameters, chunks)


def _give_name(link: ModelledLink, record: Record) -> None:
    link.transfers[-1].name = record.name
