"""Forward and backward around a step, as the simulator runs them: passes, FLOPs and transfers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from torch import nn

from samestep.estimate.activations import Batch
from samestep.estimate.blueprint import Grid
from samestep.estimate.cluster import Settings, fsdp_units, guessed_shares, stack_grid
from samestep.estimate.collectives import Collective
from samestep.estimate.fsdp import Unit
from samestep.estimate.hardware import Hardware
from samestep.estimate.links import Counted, counted, seconds_of
from samestep.estimate.model import Model, stage_of
from samestep.estimate.sends import StageSends, stage_sends
from samestep.estimate.slots import Slot, play
from samestep.mesh.degrees import Degrees
from samestep.plan.links import Fabric

FORWARD, BACKWARD = 2, 4  # FLOPs per parameter and token


class Busy(NamedTuple):
    """What the layers of a stage send in a pass, and its share of a rank's FLOPs."""

    share: float = 1.0
    forward: Counted = ()
    backward: Counted = ()


@dataclass(frozen=True)
class Training:
    """Forward and backward around the step: FLOPs of a token are 6 per parameter.

    units: what FSDP2 gathers and reduces meanwhile.
    stages: those of this rank, by number.
    slots: of a pipeline: the passes of this rank, and when they begin if nothing else delays them.
    expert_tokens: that come to the experts of a rank, in those of one rank.
    again: FLOPs that backward spends to compute layers once more, per parameter and token.
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


def training_of(
    batch: Batch | None,
    model: Model,
    degrees: Degrees,
    settings: Settings,
    hardware: Hardware,
    stage: int = 0,
) -> Training | None:
    """Of one rank of the pipeline, with what FSDP2, layers and stages send; None for no tokens."""
    if batch is None:
        return None
    again = FORWARD if batch.recompute == "full" else 0
    module = stage_of(model.module, stage, degrees.pp, batch.stages_per_rank)
    units: list[Unit] = []
    if settings.sharding == "zero3":
        units = fsdp_units(module, degrees, model.shape)
    every = [
        stage_traffic(model, degrees, batch, rank, on_cpu=hardware.on_cpu)
        for rank in range(degrees.pp)
    ]
    stages = degrees.pp * batch.stages_per_rank
    parts = [stage_of(model.module, number, stages) for number in range(stages)]
    elements = [_elements(part, model, degrees) for part in parts]
    busy = [Busy()] * stages
    for sends in filter(None, every):
        for number, layers in sends.layers.items():
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
        slots = _slots(batch, degrees, hardware, elements, busy, every[0], again, stage)
    comes = active_share(model) * degrees.ep
    return Training(batch.all_tokens, tuple(units), batch.micro_batches, own, slots, again, comes)


def stage_traffic(
    model: Model, degrees: Degrees, batch: Batch, stage: int, *, on_cpu: bool
) -> StageSends | None:
    """What layers and stages send; None where nobody knows the shape of the model."""
    if model.shape is None:
        return None
    dtype = next(model.module.parameters()).dtype
    grid = stack_grid(degrees, stage)
    return stage_sends(model.shape, degrees, grid, batch, stage, dtype, on_cpu=on_cpu)


def _slots(
    batch: Batch,
    degrees: Degrees,
    hardware: Hardware,
    elements: Sequence[float],
    busy: Sequence[Busy],
    sends: StageSends | None,
    again: int,
    stage: int,
) -> tuple[Slot, ...]:
    grid = stack_grid(degrees)
    flops = batch.tokens / hardware.model_rate
    forward = [FORWARD * flops * size for size in elements]
    backward = [(BACKWARD + again) * flops * size for size in elements]
    for number, each in enumerate(busy):
        forward[number] += _longest(each.forward, grid, hardware)
        backward[number] += _longest(each.backward, grid, hardware)
    carried = 0 if sends is None else sends.boundary
    on_host = 2 if degrees.world <= hardware.ranks_per_host else 1
    neighbours = Fabric(hardware.inside, hardware.between, 2, on_host)
    send = hardware.seconds("send", carried, neighbours)
    return tuple(play(degrees.pp, batch.micro_batches, forward, backward, send)[stage])


def _longest(collectives: Counted, grid: Grid, hardware: Hardware) -> float:
    """One after the other, on the slowest rank."""
    return sum(count * float(seconds_of(each, grid, hardware).max()) for each, count in collectives)


def _elements(module: nn.Module, model: Model, degrees: Degrees) -> float:
    """Of what a token meets on a rank."""
    found, share_of = 0.0, guessed_shares(degrees)
    for name, param in module.named_parameters():
        share = share_of(name, param)
        size = prod(param.shape) / (1 if share.model_dim is None else degrees.tp)
        found += size * (active_share(model) if share.is_expert else 1.0)
    return found


def active_share(model: Model) -> float:
    """Of the experts those that a token chooses; all, where nobody knows."""
    shape = model.shape
    if shape is None or not shape.experts or not shape.active_experts:
        return 1.0
    return shape.active_experts / shape.experts


def layer_traffic(sends: StageSends, batch: Batch) -> list[Collective]:
    """All that the layers of a rank launch for one micro-batch."""
    return [
        each
        for layers in sends.layers.values()
        for layer in layers
        for each in (*layer.forward, *layer.in_backward(batch.recompute))
    ]
