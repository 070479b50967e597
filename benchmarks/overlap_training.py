"""Trainings whose communication may be hidden, run step after step on a modelled link."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import samestep
from benchmarks import batch, gpt_config
from benchmarks.modelled_link import ModelledLink, Speed, Transfer
from benchmarks.timeline import Trace
from examples.gpt import GPT, GPTConfig


class RecomputedGPT(GPT):
    """Embedding and head are one weight; every layer runs again inside backward."""

    skipped: int | None = None  # the layer that the next forward leaves out

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        nn.init.normal_(self.embedding.weight, std=0.1 * config.width**-0.5)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, T, V) of the token after each one in ``tokens`` (B, T)."""
        length = tokens.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            if number != self.skipped:
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
        logits: Tensor = self.head(self.norm(x))
        return logits


@dataclass(frozen=True)
class Shape:
    """The model and its batch."""

    width: int = 128
    layers: int = 12
    vocabulary: int = 512
    sequences: int = 8
    tokens: int = 64


@dataclass(frozen=True)
class Case:
    """An optimizer and what it overlaps."""

    sharding: str
    grad: bool
    gather: bool
    parts: int = 16  # a bucket has 1/parts of the parameters
    rule: str = "MuonAdamW"

    @property
    def overlap(self) -> str:
        if self.grad:
            return "both" if self.gather else "gradients"
        return "parameters" if self.gather else "none"

    @property
    def without(self) -> "Case":
        return Case(self.sharding, False, False, self.parts, self.rule)


class Sample(NamedTuple):
    """One step of one rank, in seconds."""

    whole: float  # to the start of the next step
    forward: float
    backward: float
    update: float
    link: float  # that the modelled link is busy with it
    waited: float  # that the host was held up by transfers, whatever for
    skips: bool  # one rank left out a layer


class Training:
    """A model of its own with an optimizer."""

    def __init__(self, case: Case, shape: Shape, link: ModelledLink) -> None:
        self._shape, self._link = shape, link
        torch.manual_seed(0)
        sizes = {"vocab_size": shape.vocabulary, "context": shape.tokens}
        self.model = RecomputedGPT(gpt_config(shape.width, shape.layers, **sizes))
        self.parameters = sum(param.numel() for param in self.model.parameters())
        rule: Any = getattr(samestep, case.rule)
        self.optimizer = rule(
            self.model,
            buffers="flat",
            sharding=case.sharding,
            overlap_grad_reduce=case.grad,
            overlap_param_gather=case.gather,
            bucket_size=self.parameters // case.parts,
        )

    def run(self, speed: Speed, steps: int, skip_at: int) -> tuple[list[Sample], Trace]:
        """Steps on a link, after one that fills the pipeline; `skip_at` leaves a layer out."""
        batches = [batch(self._shape, step) for step in range(steps + 1)]
        dist.barrier()
        self._link.set_speed(*speed)
        transfers: list[Transfer] = []
        self._link.transfers = transfers
        now = self._link.now
        last = dist.get_rank() == dist.get_world_size() - 1
        marks: list[tuple[str, float, float]] = []
        firsts = []  # of each step: how many transfers were launched before it
        for step, (tokens, targets) in enumerate(batches):
            firsts.append(len(transfers))
            self.model.skipped = self._shape.layers // 2 if last and step == skip_at else None
            times = [now()]
            loss = self.model.loss(tokens, targets)
            times.append(now())
            loss.backward()  # type: ignore[no-untyped-call]
            times.append(now())
            self.optimizer.step()
            self.optimizer.zero_grad()
            times.append(now())
            marks += zip(("forward", "backward", "step"), times, times[1:], strict=False)
        ended = now()
        self.optimizer.wait_for_parameters()
        self._link.set_speed(0.0, float("inf"))
        samples = []
        for step in range(1, steps + 1):
            phases = marks[3 * step : 3 * step + 3]
            begin = phases[0][1]
            end = marks[3 * step + 3][1] if step < steps else ended
            own = transfers[firsts[step] : firsts[step + 1] if step < steps else None]
            waits = [wait for transfer in transfers for wait in transfer.waits]
            forward, backward, update = (stop - start for _, start, stop in phases)
            busy = sum(transfer.seconds for transfer in own)
            waited = sum(stop - start for start, stop in waits if begin <= start < end)
            samples.append(
                Sample(end - begin, forward, backward, update, busy, waited, step == skip_at)
            )
        return samples, Trace(marks, transfers)


def slowest(per_rank: list[list[Sample]]) -> list[Sample]:
    """Steps as long as those of the slowest rank."""
    return [Sample(*map(max, zip(*step, strict=True))) for step in zip(*per_rank, strict=True)]
