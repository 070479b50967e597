"""One model trained by several optimizers at once, step by step in turns.

Each contestant has a model of its own; all start from the same weights and see the same batches.
They take turns within every step, in an order that changes, so that the state of the machine is
alike for all.

Times are wall-clock times and include the host. Every second step synchronizes the device before
and after `optimizer.step()`, which gives the optimizer's time, and the host's until the call
returns. The other steps synchronize only at their ends, as a training might, which gives the time
of an iteration.
"""

import copy
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from samestep.lab.bench.gpu.measure import (
    Times,
    give_back_memory,
    in_turn,
    kernels,
    reason,
    settle,
    times_of,
)
from samestep.lab.bench.gpu.options import Contestant, SharedOptions, at_least, read
from samestep.tooling.request import BadRequestError, Flag
from samestep.train.corpus import Corpus, Order, load_corpus, load_file, validation_starts, windows

# What every client can be asked

Dtype = Literal["bfloat16", "float32"]
DTYPES: dict[Dtype, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass
class ClientOptions(SharedOptions):
    """The schedule and sizes of a client's training."""

    SECTIONS: ClassVar[Mapping[str, str]] = {
        "variants": "what is compared, and where",
        "layers": "the model and its training",
    }

    warmup: Annotated[int, "first steps, whose times are not counted"] = 10
    layers: Annotated[int, "transformer layers; the width is 64 channels per layer"] = 12
    steps: Annotated[int, "optimizer steps of each training"] = 500
    batch: Annotated[int, "sequences per step"] = 16
    sequence: Annotated[int, "bytes per sequence"] = 1024
    every: Annotated[int, "steps between losses on the screen"] = 50
    seeds: Annotated[
        tuple[int, ...], "one training for each; a seed decides initial weights and batches"
    ] = (0, 1, 2)
    dtype: Annotated[
        Dtype | None,
        Flag("dtype of forward and backward", default="bfloat16; float32 on a CPU"),
    ] = None
    compile: Annotated[
        bool | None, "run the model through torch.compile (default: on CUDA, not on a CPU)"
    ] = None
    data: Annotated[
        Path | None,
        Flag("file to train on, read as bytes", default="Python's standard library"),
    ] = None

    @property
    def pass_dtype(self) -> Dtype:
        """The dtype that was asked for, or that suits the device."""
        return self.dtype or ("bfloat16" if self.device == "cuda" else "float32")

    @property
    def compiled(self) -> bool:
        """Whether forward is compiled: as asked for, or on CUDA."""
        return self.device == "cuda" if self.compile is None else self.compile

    def corpus(self) -> Corpus:
        """The text, as bytes; BadRequestError where it is too short."""
        try:
            corpus = load_corpus() if self.data is None else load_file(self.data)
        except (OSError, ValueError) as error:
            raise BadRequestError(f"--data: no text to train on: {error}") from error
        shortest = min(len(corpus.train), len(corpus.validation))
        if shortest < self.sequence + 1:
            raise BadRequestError(
                f"--sequence {self.sequence} needs at least {self.sequence + 1} bytes "
                f"in the training and in the validation text, and one has {shortest}: "
                "give more --data or a smaller --sequence"
            )
        return corpus


ClientT = TypeVar("ClientT", bound=ClientOptions)


def read_client(
    kind: type[ClientT], contestants: Sequence[Contestant], words: Sequence[str], prog: str
) -> ClientT:
    """Parse the options of a client; raise BadRequestError for values that cannot run."""
    options = read(kind, contestants, words, prog)
    at_least(1, options, "layers", "steps", "batch", "every")
    at_least(2, options, "sequence")
    if options.warmup > options.steps - 2:
        raise BadRequestError(
            f"--warmup {options.warmup} leaves fewer than two of --steps "
            f"{options.steps} to time: give fewer --warmup or more --steps"
        )
    for seed in options.seeds:
        if seed < 0:
            raise BadRequestError(f"--seeds must be at least 0, got {seed}")
    if options.data is not None and not options.data.is_file():
        raise BadRequestError(f"--data {str(options.data)!r} is not a file")
    options.seeds = tuple(dict.fromkeys(options.seeds))
    return options


# The trainings

MEASURED = ("optimizer_ms", "host_ms", "iteration_ms")
LAST = 20  # steps whose mean is the final loss
VALIDATION_BATCHES = 8

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]  # of a model, bytes and the bytes after them
Schedule = Callable[[Any, int], None]  # sets what changes, in the optimizer's groups


class Client(NamedTuple):
    """A client: its model, loss and schedule, as its authors train it."""

    name: str
    make_model: Callable[[int], nn.Module]  # from a seed
    loss: Loss
    schedule: Schedule
    described: dict[str, Any]  # for the receipt: which model, whose, in which precision


class NotFinite(NamedTuple):
    """The step after which the loss or a parameter of a training was not finite."""

    step: int
    parameters: list[str]  # not finite after this step, in the model's order; none: the loss alone


@dataclass
class Training:
    """The record of one contestant from one seed; `failed` is the error that ended it."""

    contestant: Contestant
    failed: str | None = None
    not_finite: NotFinite | None = None
    losses: list[float] = field(default_factory=list)
    validation_loss: float | None = None
    optimizer_ms: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)
    iteration_ms: list[float] = field(default_factory=list)
    steps: int = 0  # that were asked for

    @property
    def running(self) -> bool:
        return self.failed is None and self.not_finite is None

    @property
    def final_loss(self) -> float | None:
        """Return the mean of the last losses, or None if the training ended early."""
        if not self.running or len(self.losses) < self.steps:
            return None
        return statistics.mean(self.losses[-LAST:])

    def as_json(self) -> dict[str, Any]:
        found = self.not_finite
        return {
            "name": self.contestant.name,
            "failed": self.failed,
            "not_finite": None if found is None else found._asdict(),
            "steps_done": len(self.losses),
            "final_loss": self.final_loss,
            "validation_loss": self.validation_loss,
            **{which: as_times([self], which) for which in MEASURED},
            "losses": [round(loss, 6) if math.isfinite(loss) else None for loss in self.losses],
        }


class Batches:
    """The batches of a seed: inputs and targets on the device, each (batch, sequence)."""

    def __init__(
        self, corpus: Corpus, options: ClientOptions, device: torch.device, seed: int
    ) -> None:
        self._corpus, self._options, self._device = corpus, options, device
        self._order = Order(len(corpus.train), options.sequence, seed)

    def training(self, number: int) -> tuple[Tensor, Tensor]:
        size = self._options.batch
        starts = self._order.starts(torch.arange(number * size, (number + 1) * size))
        return self._windows(self._corpus.train, starts)

    def validation(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over validation batches, which are alike in every training."""
        size, text = self._options.batch, self._corpus.validation
        starts = validation_starts(text, self._options.sequence, VALIDATION_BATCHES * size)
        return (self._windows(text, part) for part in torch.split(starts, size))

    def _windows(self, text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        inputs, targets = windows(text, starts, self._options.sequence)
        return inputs.contiguous().to(self._device), targets.contiguous().to(self._device)


class Entry(NamedTuple):
    """A contestant's model and optimizer; `forward` is the model, compiled if asked for."""

    model: nn.Module
    forward: nn.Module
    optimizer: Any


class Race:
    """The trainings of all contestants from one seed, in turns."""

    def __init__(
        self,
        client: Client,
        contestants: Sequence[Contestant],
        options: ClientOptions,
        device: torch.device,
        batches: Batches,
        seed: int,
    ) -> None:
        self._client, self._options = client, options
        self._device, self._batches = device, batches
        self._entries: dict[str, Entry] = {}
        self.trainings = [Training(each, steps=options.steps) for each in contestants]
        model = client.make_model(seed)
        for training in self.trainings:
            self._guarded(training, lambda training: self._build(training, model))

    def run(self, report: Callable[[int], None]) -> list[Training]:
        """Train all, telling `report` the number of steps done at times; return the trainings."""
        with collection_off():
            for number in range(self._options.steps):
                step = partial(self._step, number, self._batches.training(number))
                for training in in_turn(self.trainings, number):
                    if training.running:
                        self._guarded(training, step)
                done = number + 1
                over = not any(training.running for training in self.trainings)
                if over or done % self._options.every == 0 or done == self._options.steps:
                    report(done)
                if over:
                    break
        for training in self.trainings:
            if training.running:
                self._guarded(training, self._validate)
        self._entries.clear()
        gc.collect()
        give_back_memory(self._device)
        return self.trainings

    def _guarded(self, training: Training, action: Callable[[Training], None]) -> None:
        """Run an action for one training; an error ends that training, not the run."""
        try:
            with kernels(training.contestant.kernels, self._device):
                action(training)
        except Exception as error:
            training.failed = reason(error)
        if not training.running:
            self._entries.pop(training.contestant.name, None)
            give_back_memory(self._device)

    def _build(self, training: Training, model: nn.Module) -> None:
        own = copy.deepcopy(model)
        forward: Any = torch.compile(own, dynamic=False) if self._options.compiled else own
        entry = Entry(own, forward, training.contestant.build(own))
        self._entries[training.contestant.name] = entry

    def _step(self, number: int, batch: tuple[Tensor, Tensor], training: Training) -> None:
        entry = self._entries[training.contestant.name]
        awaited = number % 2 == 0
        self._client.schedule(entry.optimizer, number)
        settle(self._device)
        begin = time.perf_counter()
        loss = self._client.loss(entry.forward, *batch)
        loss.backward()  # type: ignore[no-untyped-call]
        if awaited:
            settle(self._device)
        before = time.perf_counter()
        entry.optimizer.step()
        returned = time.perf_counter()
        if awaited:
            settle(self._device)
        after = time.perf_counter()
        entry.model.zero_grad()
        settle(self._device)
        end = time.perf_counter()
        if number >= self._options.warmup:
            if awaited:
                training.optimizer_ms.append(1e3 * (after - before))
                training.host_ms.append(1e3 * (returned - before))
            else:
                training.iteration_ms.append(1e3 * (end - begin))
        training.losses.append(float(loss.detach()))
        training.not_finite = self._look(entry, number, training.losses[-1])

    @torch.no_grad()
    def _look(self, entry: Entry, number: int, loss: float) -> NotFinite | None:
        """Return a NotFinite if the loss or a parameter is not finite after a step."""
        named = dict(entry.model.named_parameters())
        norms = torch.stack([norm.float() for norm in torch._foreach_norm(list(named.values()))])
        finite = norms.isfinite().tolist()
        if all(finite) and math.isfinite(loss):
            return None
        return NotFinite(number, [n for n, fine in zip(named, finite, strict=True) if not fine])

    @torch.no_grad()
    def _validate(self, training: Training) -> None:
        model = self._entries[training.contestant.name].model
        losses = [float(self._client.loss(model, *batch)) for batch in self._batches.validation()]
        training.validation_loss = statistics.mean(losses)


@contextmanager
def collection_off() -> Iterator[None]:
    """Disable garbage collection inside, whose pauses would hit single contestants."""
    gc.collect()
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def median_of(trainings: Sequence[Training], which: str) -> Times | None:
    """Return statistics of the times `which` over counted steps of all seeds, in ms."""
    values = [value for training in trainings for value in getattr(training, which)]
    return times_of(values) if values else None


def as_times(trainings: Sequence[Training], which: str) -> dict[str, float] | None:
    found = median_of(trainings, which)
    return None if found is None else found._asdict()
