"""The loop: step, evaluate, save, resume; and the command around it.

A run can be stopped at any moment and goes on from its last checkpoint as if nothing had happened
(Ctrl-C and SIGTERM save one first): what a step does follows from the checkpoint, the flags and the
number of the step. Batches are numbers of sequences (`corpus.Order`), schedules are functions of
the step, and the seed of every step is made anew. A batch belongs to all ranks together, which
divide it by index, so that their number may change from one start to the next.
"""

import os
import platform
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

import samestep
from samestep.checkpoint import folder as checkpoint_folder
from samestep.checkpoint.storage import read_index
from samestep.models.gpt import GPT, balance_experts
from samestep.parallel.experts import capacity_errors
from samestep.parallel.router_losses import collect, set_share
from samestep.tooling.output import check_folder
from samestep.tooling.request import BadRequestError, spelled
from samestep.train.corpus import (
    Corpus,
    Order,
    load_corpus,
    load_file,
    mixed,
    validation_starts,
    windows,
)
from samestep.train.journal import LOG, PICTURE, Display, Journal, display
from samestep.train.layouts import check_layout, no_sync, place
from samestep.train.options import Options
from samestep.train.options import parse as parse
from samestep.train.world import World, joined


class Interrupts:
    """Ctrl-C and SIGTERM ask a run to save and stop after a step; a second Ctrl-C ends it at once.

    torchrun and schedulers send SIGTERM, and SIGKILL half a minute later.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.asked = 0  # the first signal that came
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():  # others hear of no signals
            self._before = {each: signal.signal(each, self._ask) for each in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _ask(self, number: int, frame: object) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = self.asked or number


class Trainer:
    """One rank of a run."""

    def __init__(self, options: Options, world: World, journal: Journal, display: Display) -> None:
        check_layout(options, world)
        self.options, self.world, self.journal, self.display = options, world, journal, display
        self.corpus = _corpus(options)
        self.order = Order(len(self.corpus.train), options.context, options.seed)
        # What the numbers of sequences mean.
        self.data = {"sha256": self.corpus.sha256, "context": options.context, "seed": options.seed}
        _use_one_result_every_time(options, world)
        torch.manual_seed(options.seed)
        self.model = GPT(options.model).to(world.device)
        self.optimizer, self.stack, self.compiled = place(self.model, options, world)
        # The ranks that divide a batch, and this one's place among them. Ranks of tensor parallel
        # and of a pipeline have the same place.
        self.seat = World(self.stack.batch_place, self.stack.mesh.degrees.batch_ranks, world.device)
        self.copies = world.size // self.seat.size  # how many ranks have each place
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.step = 0  # steps that were done
        self.sequences = 0  # that were seen in them
        self._unwritten: list[dict[str, Any]] = []  # rows of steps, with tensors in them
        self._since = time.perf_counter()  # when they were written last
        # Waits for the signal that ranks told each other of in the last step.
        self._told: Callable[[], Tensor] | None = None
        self.saved: int | None = None  # the step of the newest checkpoint, if there is one

    def run(self, interrupts: Interrupts) -> int:
        """Train up to the last step.

        Returns:
            The signal that has stopped the run early, after a checkpoint; 0 at the last step.
        """
        options = self.options
        self._resume()
        self._since = time.perf_counter()
        while self.step < options.steps:
            self._train_step()
            last = self.step == options.steps
            evaluates = last or self.step % options.eval_every == 0
            saves = last or self.step % options.save_every == 0
            writes = evaluates or saves or self.step % options.log_every == 0
            stops = 0 if last else self._asked_to_stop(interrupts)
            if writes or stops:
                self._write_losses()
            if evaluates and not stops:
                self._evaluate()
            if saves or stops:
                self._save(bool(stops))
            if stops:
                return stops
            if not self._unwritten:  # neither validation nor saving counts as time of a step
                self._since = time.perf_counter()
        return 0

    def _asked_to_stop(self, interrupts: Interrupts) -> int:
        """The signal that a rank has received, or 0: the same on all ranks, which saving needs.

        Several ranks hear of it one step later, so that none waits for the step that is on.
        """
        if self.world.size == 1:
            return interrupts.asked
        told = self._told
        asked = torch.tensor([interrupts.asked], dtype=torch.int64, device=self.world.device)
        self._told = self.world.highest(asked)
        return 0 if told is None else int(told().item())

    def _train_step(self) -> None:
        options, world = self.options, self.world
        self._follow_schedules()
        place = self.stack.random_place
        torch.manual_seed(mixed(options.seed, "step", self.step, *place))  # for dropout
        numbers = torch.arange(self.sequences, self.sequences + options.batch_size)
        starts = self.order.starts(self.seat.share(numbers))
        self.model.train()
        loss = torch.zeros((), dtype=torch.float64, device=world.device)
        pipeline = self.stack.pipeline
        if pipeline is not None:
            with self._autocast():
                mean = pipeline.step(*self._batch(self.corpus.train, starts))
            loss += mean * len(starts) / options.batch_size
        parts = () if pipeline else self._micro_batches(starts, options.batch_size)
        for number, part in enumerate(parts):
            last = part is parts[-1]
            set_share(self.model, self._share(number, len(parts)))
            with nullcontext() if last else no_sync(self.model, self.optimizer):
                # Gradients are averaged over ranks; what counts is the mean over the batch.
                part_loss = self._summed_loss(self.corpus.train, part) / options.batch_size
                torch.autograd.backward(part_loss * self.seat.size)
            loss += part_loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._balance_experts()
        self.step += 1
        self.sequences += options.batch_size
        self._unwritten.append(
            {
                "step": self.step,
                "lr": self.rates[0] * options.lr_share(self.step - 1),
                "momentum": options.momentum_at(self.step - 1),
                "grad_norm": self.optimizer.metrics()["grad_norm"],
                "loss": loss,
                "router": collect(self.model),
            }
        )

    def _follow_schedules(self) -> None:
        for rate, group in zip(self.rates, self.optimizer.param_groups, strict=True):
            group["lr"] = rate * self.options.lr_share(self.step)
            if "momentum" in group:
                group["momentum"] = self.options.momentum_at(self.step)

    def _micro_batches(self, mine: Tensor, count: int) -> tuple[Tensor, ...]:
        """This rank's part of ``count`` sequences, in as many pieces as every other rank has."""
        largest = self.seat.largest_share(count)
        return mine.tensor_split(-(-largest // (self.options.micro_batch or largest)))

    def _share(self, number: int, parts: int) -> float:
        """The share of a batch that a micro-batch has, on all ranks together."""
        of_ranks = torch.arange(self.options.batch_size).tensor_split(self.seat.size)
        rows = sum(len(own.tensor_split(parts)[number]) for own in of_ranks)
        return rows / self.options.batch_size

    def _summed_loss(self, text: Tensor, starts: Tensor) -> Tensor:
        """The mean loss of every sequence, added up, (); there may be none."""
        inputs, targets = self._batch(text, starts)
        with self._autocast():
            logits = self.model(inputs)
        flat = logits.float().flatten(0, 1)
        return cross_entropy(flat, targets.flatten(), reduction="sum") / inputs.shape[1]

    def _batch(self, text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        inputs, targets = windows(text, starts, self.options.context)
        return inputs.to(self.world.device), targets.to(self.world.device)

    def _autocast(self) -> torch.autocast:
        enabled = self.options.dtype == "bf16"
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=enabled)

    def _balance_experts(self) -> None:
        balance_experts(self.model, self.options.layers, self.stack.token_copies)

    @torch.no_grad()
    def _evaluate(self) -> None:
        count, text = self.options.eval_sequences, self.corpus.validation
        starts = self.seat.share(validation_starts(text, self.options.context, count))
        self.model.eval()
        loss = torch.zeros((), dtype=torch.float64, device=self.world.device)
        pipeline = self.stack.pipeline
        if pipeline is not None:
            with self._autocast():
                loss += pipeline.evaluate(*self._batch(text, starts)) * len(starts)
        for part in () if pipeline else self._micro_batches(starts, count):
            loss += self._summed_loss(text, part)
        mean = self.world.total(loss).item() / count / self.copies
        row: dict[str, Any] = {"step": self.step, "val_loss": mean}
        said = f"step {self.step}: validation loss {mean:.4f}"
        if self.options.capacity:
            row["capacity_errors"] = errors = capacity_errors(self.model)
            said += f", {errors} tokens found no room since the start"
        self.journal.add(row)
        self.display.say(said)

    def _write_losses(self) -> None:
        """Tell of the steps since the last time; until here nobody has waited for a loss."""
        options, rows, self._unwritten = self.options, self._unwritten, []
        total = self.world.total(torch.stack([row["loss"] for row in rows]))
        losses = (total / self.copies).tolist()
        seconds = (time.perf_counter() - self._since) / len(rows)
        router = [row.pop("router") for row in rows]
        for row, loss in zip(rows, losses, strict=True):
            row |= {"grad_norm": float(row["grad_norm"]), "loss": loss, "seconds": seconds}
        if options.balance_loss or options.z_loss:
            means = self.world.total(torch.stack(router)) / self.stack.token_copies / options.layers
            for row, (balance, z) in zip(rows, means.tolist(), strict=True):
                row |= {"balance_loss": balance, "z_loss": z}
        self.journal.add(*rows)
        speed = options.batch_size * options.context / seconds
        text = f"loss {losses[-1]:.4f}  {speed:,.0f} bytes/s"
        self.display.show(self.step, options.steps, text)

    def _save(self, stops: bool) -> None:
        path = self.options.checkpoints / f"step_{self.step:08d}"
        extra = {
            "step": self.step, "sequences": self.sequences, "data": self.data,
            "state": self.options.state, "model": self.options.of_the_model,
        }  # fmt: skip
        try:
            samestep.save(path, self.model, self.optimizer, extra=extra, keep=self.options.keep)
        except samestep.CheckpointError as error:
            if self.step == self.options.steps:
                raise
            then = "training stops" if stops else "training goes on"
            self.display.say(f"step {self.step} was not saved, {then}: {error}")
            return
        self.saved = self.step
        self.journal.add({"step": self.step, "event": "saved"})

    def _resume(self) -> None:
        options = self.options
        source, converted = self._source(), ""
        if source is not None:
            try:
                loaded = samestep.load(source, self.model, self.optimizer)
            except samestep.CheckpointError as error:
                raise BadRequestError(self._why_not(source, error)) from error
            self._check_data(loaded.extra)
            self.step, self.sequences = loaded.extra["step"], loaded.extra["sequences"]
            if source == options.checkpoints:
                self.saved = self.step
            was = loaded.extra.get("state", options.state)  # earlier versions did not say
            if was != options.state:
                converted = f"; state was {was}, is {options.state} now: converted"
        self.journal.go_back_to(self.step)
        event = {
            "step": self.step,
            "event": "started" if source is None else "resumed",
            "layout": options.placed,
            "ranks": self.world.size,
            "device": str(self.world.device.type),
            **self.world.running._asdict(),
            "versions": {
                "samestep": samestep.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "machine": platform.machine(),
            "options": asdict(options),
        }
        self.journal.add(event)
        self._tell_mesh()
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.display.say(
            f"{parameters / 1e6:.2f} M parameters, layout {options.placed} on {self.world.size} "
            f"rank(s) of {self.world.device.type}, {event['event']} at step {self.step}"
            f"{converted}"
        )

    def _why_not(self, source: Path, error: Exception) -> str:
        """The reason why a checkpoint does not fit: the flags that make another model."""
        try:
            saved = checkpoint_folder.find(source)
            was = read_index(saved)["extra"].get("model", {})
        except (samestep.CheckpointError, OSError, AttributeError, KeyError, TypeError):
            was = {}  # there is none, or it is none of this trainer
        changed = [
            f"{spelled(name)} was {was[name]} and is {value} here"
            for name, value in self.options.of_the_model.items()
            if was.get(name, value) != value
        ]
        if changed:
            return f"cannot resume: {', '.join(changed)}, which makes another model"
        text = str(error).partition(" Pass partial=True")[0]
        return f"cannot resume: {text}"

    def _tell_mesh(self) -> None:
        """The facts of every rank's run, compared before the first step."""
        if self.options.meshed:
            facts = self.stack.trace(tell=self.display.say_on_every_rank)
            self.journal.add({"step": self.step, "event": "mesh", **facts})
        if self.options.compile:
            self.journal.add({"step": self.step, "event": "compile", **self.compiled.receipt()})
            told = f"asked to compile, runs {self.compiled.actual}: {self.compiled.why}"
            self.display.say(told)

    def _source(self) -> Path | None:
        """The checkpoint to go on from. The first rank looks: a slow disk may differ between ranks.

        A checkpoint of one's own comes before one that was named: a restart has the same flags.
        """
        asked, folder = self.options.resume, self.options.checkpoints
        own = torch.tensor([(folder / "LATEST").is_file()], dtype=torch.int64)
        own = own.to(self.world.device)
        dist.broadcast(own, src=0)
        if own.item() and asked == "never":
            raise BadRequestError(
                f"{folder} has checkpoints, and --resume is never: choose another "
                "--out, or delete them"
            )
        if own.item():
            return folder
        return None if asked in ("auto", "never") else Path(asked)

    def _check_data(self, extra: Any) -> None:
        saved = extra.get("data") if isinstance(extra, dict) else None
        if saved is None:
            raise BadRequestError(
                "cannot resume: that checkpoint was not written by samestep train"
            )
        for key, value in self.data.items():
            if saved[key] != value:
                raise BadRequestError(
                    f"cannot resume: the {key} of the data was {saved[key]} and is "
                    f"{value} here; the run would continue on other sequences: give the "
                    "same --data and --context"
                )


def _corpus(options: Options) -> Corpus:
    try:
        corpus = load_corpus() if options.data is None else load_file(options.data)
    except (OSError, ValueError) as error:
        raise BadRequestError(f"cannot read the data: {error}") from None
    for name, text in ("training", corpus.train), ("validation", corpus.validation):
        if len(text) <= options.context:
            raise BadRequestError(
                f"--context must be below the {len(text)} bytes of {name} text, "
                f"got {options.context}"
            )
    return corpus


def _use_one_result_every_time(options: Options, world: World) -> None:
    """Sums in rank order are for nothing if kernels of a GPU add up by chance."""
    if world.device.type == "cuda" and options.reduction == "ordered":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cuda.enable_mem_efficient_sdp(False)  # flash has an order, and so has math
        torch.backends.cuda.enable_cudnn_sdp(False)


def _stopped(step: int, saved: int | None) -> str:
    if saved is None:
        return f"stopped in step {step + 1}, and nothing is saved: the same command begins anew"
    if saved == step:
        return f"stopped after step {step}, which is saved: the same command goes on there"
    return f"stopped in step {step + 1}: the same command goes on after step {saved}, as saved"


def run(options: Options) -> int:
    check_folder(options.out)
    with joined(options.device) as world:
        speaks = world.rank == 0
        journal = Journal(options.out, active=speaks)
        with display(speaks) as shown:
            trainer = Trainer(options, world, journal, shown)
            with Interrupts() as interrupts:
                try:
                    stopped = trainer.run(interrupts)
                except KeyboardInterrupt:
                    stopped = signal.SIGINT
                if stopped:
                    shown.say(_stopped(trainer.step, trainer.saved))
                    return 128 + stopped
            files = [LOG, "checkpoints"] + [PICTURE] * journal.draw()
            shown.say(f"{options.out} has {', '.join(files)}")
    return 0
