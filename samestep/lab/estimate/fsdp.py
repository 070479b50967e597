"""FSDP2 in a training step: the collectives it launches, and its memory beside the shards.

A unit holds the parameters of one `fully_shard` call. Shards have as many rows on every rank: the
last ones are padded. Units are gathered for forward and, if resharded after it, for backward again.

Memory follows FSDP2 of torch 2.13, unit by unit. A gather arrives in one flat buffer and is copied
into parameters; forward keeps that buffer until the next unit is there, backward gathers one unit
ahead. Gradients are packed for their sum when the unit's backward is over, and that buffer lives
until the next one is packed. Stages of a pipeline keep units and gradients whole from their first
backward pass on, and reduce after the last one. Activations are not included.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from samestep.lab.estimate.collectives import Collective
from samestep.lab.estimate.grid import Peers
from samestep.lab.estimate.ledger import Ledger, Then
from samestep.lab.estimate.slots import passes_of
from samestep.plan.memory import BUFFERS, GRADIENTS
from samestep.plan.transfers import Traffic, Transfer, of_segments

ALONE = Peers((), 1)


class Unit(NamedTuple):
    """The parameters of one `fully_shard` call, as a rank of tensor and expert parallel has them.

    reshards: whether gathered parameters are freed after forward.
    shard, replicate: the ranks that shard the unit, and the ranks with copies of a shard.
    summands: parameters of whose gradients the tensor parallel ranks, `model`, have summands, which
        are added up before FSDP2 reduces them.
    early: parameters whose gradients come before those of the units inside.
    brings_tokens: tokens that come to the unit (of experts), as a multiple of one rank's tokens.
    """

    name: str
    params: tuple[Tensor, ...]
    reshards: bool = True
    shard: Peers = ALONE
    replicate: Peers = ALONE
    model: Peers = ALONE
    summands: tuple[Tensor, ...] = ()
    early: tuple[Tensor, ...] = ()
    brings_tokens: float = 1

    @property
    def trained(self) -> list[Tensor]:
        return [param for param in self.params if param.requires_grad]


def padded_shard(params: Sequence[Tensor], ranks: int) -> int:
    """Return the elements of a rank's shard of all these parameters, padding included."""
    return sum(-(-param.shape[0] // ranks) * param[0].numel() for param in params)


def passes_1f1b(stage: int, stages: int, micro_batches: int) -> str:
    """Return the forward and backward passes of a stage in order, such as "FFBFBB"."""
    return "".join(each.kind for each in passes_of(stage, stages, micro_batches))


def fsdp_collectives(units: Sequence[Unit], *, passes: str = "FB") -> list[Collective]:
    """Return the collectives of a step, by unit; gradients are reduced after the last pass."""
    found = []
    for unit in units:
        found += gather_of(unit) * _count_of_gathers(unit, passes)
        found += reductions_of(unit)
    return found


def _count_of_gathers(unit: Unit, passes: str) -> int:
    """Return how often a unit is gathered: after a backward pass it stays for the next pass."""
    count, is_whole = 0, False
    for each in passes:
        count += not is_whole
        is_whole = each == "B" or not unit.reshards
    return count


def gather_of(unit: Unit) -> list[Collective]:
    """Return the all-gather of a unit; [] where one rank has the whole unit."""
    ranks = unit.shard.size
    if ranks == 1:
        return []
    name, sizes = f"gather of {unit.name}", (padded_shard(unit.params, ranks),) * ranks
    gathered = of_segments(Traffic.ALL_GATHER, name, unit.params[0].dtype, sizes)
    return [Collective((gathered,), unit.shard)]


def reductions_of(unit: Unit) -> list[Collective]:
    """Return the collectives that sum a unit's gradients over ranks, in order."""
    found = []
    trained, dtype = unit.trained, unit.params[0].dtype
    for param in unit.summands if unit.model.size > 1 else ():
        name = f"sum of a gradient of {unit.name}"
        summed = Transfer(Traffic.ALL_REDUCE, name, param.dtype, param.numel())
        found.append(Collective((summed,), unit.model))
    size, ranks = padded_shard(trained, unit.shard.size), unit.shard.size
    if trained and ranks > 1:
        name, sizes = f"reduction of {unit.name}", (size,) * ranks
        scattered = of_segments(Traffic.REDUCE_SCATTER, name, dtype, sizes)
        found.append(Collective((scattered,), unit.shard))
    if trained and unit.replicate.size > 1:
        summed = Transfer(Traffic.ALL_REDUCE, f"outer sum of {unit.name}", dtype, size)
        found.append(Collective((summed,), unit.replicate))
    return found


def fsdp_peak(units: Sequence[Unit], passes: str = "FB") -> Then:
    """Return the most bytes of gradients and buffers alive in these passes, without shards.

    Units are in the order in which forward enters them; a unit inside another has a longer name.
    """
    walk = _Walk(units)
    pipelined = len(passes) > 2
    for each in passes:
        walk.forward() if each == "F" else walk.backward(reduces=not pipelined)
    if pipelined:
        walk.reduce_all()
    return walk.ledger.most


class _Walk:
    def __init__(self, units: Sequence[Unit]) -> None:
        self.ledger = Ledger()
        self._units = units
        self._inside: list[list[int]] = [[] for _ in units]  # units right inside each
        self._outermost: list[int] = []
        for number, unit in enumerate(units):
            around = [n for n, other in enumerate(units) if _is_inside(unit, other)]
            nearest = max(
                around, key=lambda n: len(units[n].name) * units[n].reshards, default=None
            )
            (self._outermost if nearest is None else self._inside[nearest]).append(number)
        self._left: list[int] = []  # in the order in which forward leaves them
        self._whole: set[int] = set()

    # --- passes ------------------------------------------------------------------------------

    def forward(self) -> None:
        """Replay a forward pass: every unit is gathered when forward enters it."""
        self._left = []
        for number in self._outermost:
            self._forward_through(number)
        self.ledger.drop("kept")

    def backward(self, *, reduces: bool) -> None:
        """Replay a backward pass, gathering one unit ahead; `reduces`: reduce-scatter gradients."""
        for number in reversed(self._outermost):
            self._backward_through(number, reduces)
        self.ledger.drop("packed")

    def reduce_all(self) -> None:
        for number in range(len(self._units)):
            self._free(number)
            self._reduce(number)
        self.ledger.drop("packed")

    def _forward_through(self, number: int) -> None:
        if number not in self._whole:
            self._gather(number)
            self._copy_out(number)
            self.ledger.drop("kept")
            self.ledger.drop(("flat", number))
            self.ledger.add("kept", self._room(number))
        for inner in self._inside[number]:
            self._forward_through(inner)
        self._left.append(number)
        if self._units[number].reshards:
            self._free(number)

    def _backward_through(self, number: int, reduces: bool) -> None:
        unit = self._units[number]
        if number not in self._whole:
            self._gather(number)  # nothing, if that was done ahead
            self._copy_out(number)
            self.ledger.drop(("flat", number))
        place = self._left.index(number)
        if place and self._left[place - 1] not in self._whole:
            self._gather(self._left[place - 1])
        early = {id(param) for param in unit.early}
        first = [param for param in unit.trained if id(param) in early]
        self._add_gradients(("whole gradients", number, 0), first)
        for inner in reversed(self._inside[number]):
            self._backward_through(inner, reduces)
        rest = [param for param in unit.trained if id(param) not in early]
        self._add_gradients(("whole gradients", number, 1), rest)
        if reduces:
            self._free(number)
            self._reduce(number)

    # --- memory ------------------------------------------------------------------------------

    def _room(self, number: int) -> int:
        unit = self._units[number]
        shard = padded_shard(unit.params, unit.shard.size)
        return shard * unit.shard.size * unit.params[0].dtype.itemsize

    def _add_gradients(self, key: object, params: Sequence[Tensor]) -> None:
        if self.ledger.size(key) is None:
            self.ledger.add(key, sum(param.nbytes for param in params), GRADIENTS)
        else:  # added to those of the micro-batch before, one by one
            self.ledger.passing(max((param.nbytes for param in params), default=0))

    def _gather(self, number: int) -> None:
        if self.ledger.size(("flat", number)) is None:
            self.ledger.add(("flat", number), self._room(number))

    def _copy_out(self, number: int) -> None:
        self.ledger.add(("whole", number), self._room(number), BUFFERS)
        self._whole.add(number)

    def _free(self, number: int) -> None:
        self.ledger.drop(("whole", number))
        self._whole.discard(number)

    def _reduce(self, number: int) -> None:
        unit = self._units[number]
        trained = unit.trained
        if not trained:
            return
        shard = padded_shard(trained, unit.shard.size) * trained[0].dtype.itemsize
        self.ledger.drop("packed")
        self.ledger.add("packed", shard * unit.shard.size)
        self.ledger.add(("shard", number), shard, GRADIENTS)
        for part in (0, 1):
            self.ledger.drop(("whole gradients", number, part))


def _is_inside(unit: Unit, other: Unit) -> bool:
    return unit is not other and (not other.reshards or unit.name.startswith(f"{other.name}."))
