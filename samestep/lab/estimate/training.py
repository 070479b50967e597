"""Forward and backward around a step, as the simulator runs them: passes, FLOPs and transfers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from torch import nn

from samestep.lab.estimate.activations import Batch
from samestep.lab.estimate.cluster import Job, guessed_shares, stack_grid
from samestep.lab.estimate.collectives import Counted, counted, seconds_of
from samestep.lab.estimate.fsdp import Unit
from samestep.lab.estimate.grid import Grid
from samestep.lab.estimate.hardware import Hardware
from samestep.lab.estimate.sends import LayerSends
from samestep.lab.estimate.slots import Slot, play
from samestep.plan.links import Fabric

FORWARD, BACKWARD = 2, 4  # FLOPs per parameter and token


class Busy(NamedTuple):
    """The traffic of a stage's layers in a pass, and its share of a rank's FLOPs."""

    share: float = 1.0
    forward: Counted = ()
    backward: Counted = ()


@dataclass(frozen=True)
class Training:
    """Forward and backward around the step: a token takes 6 FLOPs per parameter.

    units: the units that FSDP2 gathers and reduces meanwhile.
    stages: the pipeline stages of this rank, by number.
    slots: the passes of this rank in a pipeline, and their times if nothing else delays them.
    expert_tokens: tokens that come to a rank's experts, as a multiple of one rank's tokens.
    again: FLOPs that backward spends on recomputing layers, per parameter and token.
    """

    tokens: int  # of one rank, all micro-batches together
    units: tuple[Unit, ...] = ()
    micro_batches: int = 1
    stages: Mapping[int, Busy] = field(default_factory=lambda: {0: Busy()})
    slots: tuple[Slot, ...] = ()
    again: int = 0
    expert_tokens: float = 1.0

    @property
    def flops(self) -> dict[str, int]:
        return {"F": FORWARD, "B": BACKWARD + self.again}


def training_of(job: Job, stage: int = 0) -> Training | None:
    """Return the training of one pipeline rank, with all traffic; None without a batch."""
    batch, degrees = job.batch, job.degrees
    if batch is None:
        return None
    again = FORWARD if batch.recompute == "full" else 0
    sends = None if job.layers is None else LayerSends(job.layers)
    every = [] if sends is None else [sends.of_rank(rank) for rank in range(degrees.pp)]
    stages = degrees.pp * batch.stages_per_rank
    parts = [job.model.stage(number, stages) for number in range(stages)]
    elements = [_elements(part, job) for part in parts]
    busy = [Busy()] * stages
    for of_rank in every:
        for number, layers in of_rank.layers.items():
            forward = [each for layer in layers for each in layer.forward]
            back = [
                each for layer in reversed(layers) for each in layer.in_backward(batch.recompute)
            ]
            busy[number] = Busy(1.0, counted(forward), counted(back))
    mine = range(stage, stages, degrees.pp)
    whole = sum(elements[number] for number in mine)
    own = {number: busy[number]._replace(share=elements[number] / whole) for number in mine}
    slots: tuple[Slot, ...] = ()
    if degrees.pp > 1:
        carried = every[0].boundary if every else 0
        slots = tuple(_slots(job, batch, elements, busy, again, carried)[stage])
    units, comes = tuple(job.units(stage)), job.model.active_share * degrees.ep
    return Training(batch.all_tokens, units, batch.micro_batches, own, slots, again, comes)


def _slots(
    job: Job,
    batch: Batch,
    elements: Sequence[float],
    busy: Sequence[Busy],
    again: int,
    carried: int,
) -> list[list[Slot]]:
    """Return every pipeline rank's passes; stages send each other `carried` bytes."""
    grid, hardware = stack_grid(job.degrees), job.hardware
    flops = batch.tokens / hardware.model_rate
    forward = [FORWARD * flops * size for size in elements]
    backward = [(BACKWARD + again) * flops * size for size in elements]
    for number, each in enumerate(busy):
        forward[number] += _longest(each.forward, grid, hardware)
        backward[number] += _longest(each.backward, grid, hardware)
    on_host = 2 if job.degrees.world <= hardware.ranks_per_host else 1
    neighbours = Fabric(hardware.inside, hardware.between, 2, on_host)
    send = hardware.seconds("send", carried, neighbours)
    return play(job.degrees.pp, batch.micro_batches, forward, backward, send)


def _longest(collectives: Counted, grid: Grid, hardware: Hardware) -> float:
    """Return the seconds of collectives, run one after the other, on the slowest rank."""
    return sum(count * float(seconds_of(each, grid, hardware).max()) for each, count in collectives)


def _elements(module: nn.Module, job: Job) -> float:
    """Return the number of parameter elements on a rank that a token is multiplied with."""
    found, share_of = 0.0, guessed_shares(job.degrees)
    for name, param in module.named_parameters():
        share = share_of(name, param)
        size = prod(param.shape) / (1 if share.model_dim is None else job.degrees.tp)
        found += size * (job.model.active_share if share.is_expert else 1.0)
    return found
