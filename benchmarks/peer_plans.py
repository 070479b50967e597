"""How others would share a step of Muon and AdamW among ranks, on the clocks of `samestep plan`.

Two designs, retold from their code (nanochat/optim.py; megatron/core/optimizer/
layer_wise_optimizer.py, as public in 2026) and nothing else of them:

    nanochat      matrices of one shape as a stack, padded with zeros to a multiple of ranks; one
                  reduce-scatter and one all-gather per shape, each rank has as many matrices. Other
                  parameters one by one, cut along their first dim. Nothing overlaps with the model
    layer-wise    (Megatron) buckets in the order of backward, closed at max(40 M, 1 M x ranks)
                  elements or 0.9 x ranks x the largest parameter; whole parameters go to the least
                  full of as many shards as ranks, all padded to the longest: equal reduce-scatters
                  in backward, equal all-gathers in the next forward
    layer-wise,   its other layout: buckets without padding, all-reduced in backward; parameters by
    all-reduce    size to ranks in turns, there and back; unequal gathers in the next forward

What is taken as ours, so that plans differ in nothing else: rates of the hardware file, FLOPs of an
orthogonalization, bytes of an update and of its state (32-bit momentum and main copies), 16-bit
gradients, a ring model of collectives. In favour of the others: nothing is lost between kernels but
`call` per matrix, norms' weights (which nanochat does not have) are left out, a first dim that
ranks do not divide is padded (nanochat refuses it).
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from samestep.groups.param_groups import rule_of
from samestep.lab.estimate.collectives import Collective, seconds_of
from samestep.lab.estimate.grid import Grid, Peers, per_peer
from samestep.lab.estimate.grid_plan import GridPlan
from samestep.lab.estimate.hardware import Hardware
from samestep.lab.estimate.model import Model, is_expert
from samestep.lab.estimate.scaling import Point
from samestep.lab.estimate.training import Training
from samestep.lab.estimate.work import piece_cost
from samestep.plan.transfers import Traffic, Transfer, of_segments

DTYPE = torch.bfloat16
MUON_STATE, ADAMW_STATE = 8, 12  # bytes per element: momentum or moments, and a main copy
DDP_ELEMENTS, DDP_PER_RANK, PADDING_FLOOR = 40_000_000, 1_000_000, 0.9
Shape = tuple[int, ...]


class Param(NamedTuple):
    """Of the model as one rank has it; `matrix`: Muon's."""

    shape: Shape
    matrix: bool
    peers: Peers
    tokens: float = 1.0  # that come to it, in those of one rank

    @property
    def elements(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Share:
    """Parameters that travel together, as (parameter, peer, elements of it that it owns).

    padded: elements of the whole as it travels.
    sizes: of each peer's segment; None: equal ones.
    """

    peers: Peers
    owned: tuple[tuple[Param, int, int], ...]
    params: tuple[Param, ...]
    padded: int
    reduces: Traffic = Traffic.REDUCE_SCATTER
    sizes: tuple[int, ...] | None = None

    def transfers(self) -> tuple[Collective, Collective] | None:
        """Of gradients, and of updated parameters."""
        ranks = self.peers.size
        if ranks == 1:
            return None
        equal = (self.padded // ranks,) * ranks
        reduce = of_segments(self.reduces, "reduction", DTYPE, equal)
        if self.reduces is Traffic.ALL_REDUCE:
            reduce = Transfer(self.reduces, "reduction", DTYPE, self.padded)
        gather = of_segments(Traffic.ALL_GATHER, "gather", DTYPE, equal)
        if self.sizes is not None:
            gather = of_segments(Traffic.UNEVEN_GATHER, "gather", DTYPE, self.sizes)
        return Collective((reduce,), self.peers), Collective((gather,), self.peers)

    def work(self, hardware: Hardware) -> tuple[Tensor, Tensor, Tensor]:
        """Of each peer: seconds of its updates, FLOPs of its products, bytes of its state."""
        columns = [[0.0] * self.peers.size for _ in range(3)]
        for param, peer, elements in self.owned:
            rows, cols = param.shape[0], param.shape[-1]
            shape = (rows, cols) if param.matrix else None
            products, flops, moved, pieces = piece_cost(shape, elements, 2, hardware)
            columns[0][peer] += products + moved / hardware.bytes_rate + pieces * hardware.call
            columns[1][peer] += flops
            columns[2][peer] += elements * (MUON_STATE if param.matrix else ADAMW_STATE)
        seconds, flops_of, state = map(per_peer, columns)
        return seconds, flops_of, state


def params_of(plan: GridPlan, model: Model, training: Training) -> list[Param]:
    """Of the model on a grid of data and expert ranks, in order of use; norms left out."""
    grid = plan.grid
    dense, experts = grid.peers("data", "expert"), grid.peers("data")
    of_muon = [group for group in plan.groups if rule_of(group).kind != "elementwise"]
    matrices = {name for group in of_muon for name in group["param_names"]}
    found = []
    for name, param in model.module.named_parameters():
        if param.ndim < 2:
            continue
        matrix = name in matrices
        if is_expert(name, param):
            one = Param(tuple(param.shape[1:]), matrix, experts, training.expert_tokens)
            found += [one] * (param.shape[0] // grid.sizes["expert"])
        else:
            found.append(Param(tuple(param.shape), matrix, dense))
    return found


# --- the plans -------------------------------------------------------------------------------


def nanochat(params: Sequence[Param]) -> list[Share]:
    """Others first, one by one; then matrices, shape by shape."""
    shares = []
    alike: dict[tuple[Shape, Peers], list[Param]] = defaultdict(list)
    for param in params:
        if param.matrix:
            alike[param.shape, param.peers].append(param)
        else:
            ranks = param.peers.size
            padded = ceil(param.shape[0] / ranks) * ranks * param.elements // param.shape[0]
            shares.append(Share(param.peers, _slices(param, ranks), (param,), padded))
    for (_, peers), stack in alike.items():
        chunk = ceil(len(stack) / peers.size)
        owned = tuple((p, number // chunk, p.elements) for number, p in enumerate(stack))
        padded = chunk * peers.size * stack[0].elements
        shares.append(Share(peers, owned, tuple(stack), padded))
    return shares


def layer_wise(params: Sequence[Param], *, padded: bool) -> list[Share]:
    """`padded`: equal shards; else all-reduced, and gathered in unequal ones."""
    shares: list[tuple[int, Share]] = []  # by the first parameter that backward reaches
    order = list(enumerate(reversed(params)))
    for peers in dict.fromkeys(param.peers for param in params):
        own = [(place, param) for place, param in order if param.peers == peers]
        limit = max(DDP_ELEMENTS, DDP_PER_RANK * peers.size)
        others = [(place, param) for place, param in own if not param.matrix]
        for members in _filled(others, limit, 0.0):
            together = tuple(param for _, param in members)
            owned = tuple(piece for param in together for piece in _slices(param, peers.size))
            size = sum(param.elements for param in together)
            shares.append((members[0][0], Share(peers, owned, together, size)))
        matrices = [(place, param) for place, param in own if param.matrix]
        turns = _in_turns([param for _, param in matrices], peers.size)
        owner_of = {place: turn for (place, _), turn in zip(matrices, turns, strict=True)}
        floor = PADDING_FLOOR * peers.size if padded else 0.0
        for members in _filled(matrices, limit, floor):
            together = tuple(param for _, param in members)
            if padded:
                owned = tuple(_least_full(together, peers.size))
            else:
                owned = tuple((param, owner_of[place], param.elements) for place, param in members)
            sizes = [0] * peers.size
            for _, peer, elements in owned:
                sizes[peer] += elements
            whole = max(sizes) * peers.size if padded else sum(sizes)
            reduces = Traffic.REDUCE_SCATTER if padded else Traffic.ALL_REDUCE
            share = Share(peers, owned, together, whole, reduces, None if padded else tuple(sizes))
            shares.append((members[-1][0], share))  # complete with the last one
    return [share for _, share in sorted(shares, key=lambda each: each[0])]


def _slices(param: Param, ranks: int) -> tuple[tuple[Param, int, int], ...]:
    return tuple((param, peer, param.elements // ranks) for peer in range(ranks))


def _filled(
    params: Iterable[tuple[int, Param]], limit: int, per_largest: float
) -> Iterator[list[tuple[int, Param]]]:
    """Buckets in order, closed at the limit or at so many times the largest parameter."""
    bucket: list[tuple[int, Param]] = []
    for place, param in params:
        bucket.append((place, param))
        sizes = [own.elements for _, own in bucket]
        if sum(sizes) >= max(limit, per_largest * max(sizes)):
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def _least_full(params: Sequence[Param], ranks: int) -> Iterator[tuple[Param, int, int]]:
    """The largest first, each to the rank that has the fewest elements."""
    heap = [(0, rank) for rank in range(ranks)]
    for param in sorted(params, key=lambda each: -each.elements):
        size, rank = heapq.heappop(heap)
        yield param, rank, param.elements
        heapq.heappush(heap, (size + param.elements, rank))


def _in_turns(params: Sequence[Param], ranks: int) -> list[int]:
    """The smallest first, over the ranks and back."""
    loop = [*range(ranks), *reversed(range(ranks))]
    owners = [0] * len(params)
    by_size = sorted(range(len(params)), key=lambda place: params[place].elements)
    for number, place in enumerate(by_size):
        owners[place] = loop[number % len(loop)]
    return owners


# --- their time ------------------------------------------------------------------------------


class Design(NamedTuple):
    """How somebody shares a step among the ranks of a grid.

    overlaps: reductions with backward and gathers with the next forward, where there is a training;
        gradients and parameters then lie in buffers, and nothing is put together. Those who do so
        also clip.
    """

    shares: Sequence[Share]
    grid: Grid
    hardware: Hardware
    overlaps: bool

    def seconds(self, training: Training | None) -> tuple[float, float]:
        """Of a step, or of the second of two iterations; and what of it is exposed, on average."""
        clocks = _Clocks(self)
        if training is not None:
            clocks.iterate(training)
        begun, exposed = clocks.now, clocks.exposed
        clocks.iterate(training)
        for number in [*clocks.gathers] if training is None else ():
            clocks.wait_for_gather(number)
        seconds = float(clocks.now.max()) - float(begun.min())
        return seconds, float((clocks.exposed - exposed).mean())

    def point(self, trainings: tuple[Training, Training], beside: int) -> Point:
        """beside: bytes per rank of parameters, whole gradients, and what is gathered apart."""
        sent, flops, state = (self.grid.zeros() for _ in range(3))
        for share in self.shares:
            for each in share.transfers() or ():
                sent += each.spread(each.sent_by_all(), self.grid)
            _, of_products, of_state = share.work(self.hardware)
            flops += self.grid.spread(of_products, share.peers)
            state += self.grid.spread(of_state, share.peers)
        step, same, less = map(self.seconds, (None, *trainings))
        return Point(
            self.grid.ranks, *step, *same, less[0], float(sent.mean()), float(sent.max()),
            float(flops.max() / flops.mean()), int((flops == 0).sum()),
            round(float(state.max())) + beside, len(self.shares), 1,
        )  # fmt: skip


class _Clocks:
    """Hosts and links of all ranks, as in `estimate.timeline`, while shares are iterated over."""

    def __init__(self, design: Design) -> None:
        self._shares, self._grid, self._hardware, self._overlaps = design
        self.now, self._link, self.exposed = (self._grid.zeros() for _ in range(3))
        self._sends = [share.transfers() or (None, None) for share in self._shares]
        work = [(share.work(self._hardware)[0], share.peers) for share in self._shares]
        self._updates = [self._grid.spread(*of_share) for of_share in work]
        # Bytes of putting together what travels, or of putting it back.
        moved = [2 * share.padded * DTYPE.itemsize for share in self._shares]
        self._copies = [0 if self._overlaps else size / self._hardware.bytes_rate for size in moved]
        self.gathers: dict[int, tuple[Tensor, Tensor]] = {}  # on their way

    def iterate(self, training: Training | None) -> None:
        order = range(len(self._shares))
        reductions: list[tuple[Tensor, Tensor]] = []

        def reduce(number: int) -> None:
            self.now = self.now + self._copies[number]
            reductions.append(self._send(self._sends[number][0]))

        def gather(number: int) -> None:
            self.gathers[number] = self._send(self._sends[number][1])

        if training is not None:
            for number in reversed(order):
                self.wait_for_gather(number)
                self._compute(number, training, "F")
            self._layers(training, "forward")
            for number in order:
                self._compute(number, training, "B")
                if self._overlaps:
                    reduce(number)
            self._layers(training, "backward")
        for number in order[len(reductions) :]:
            reduce(number)
        if self._overlaps:
            for times in reductions:
                self._wait(times)
            everyone = self._grid.peers(*self._grid.sizes)
            if everyone.size > 1:
                norm = Transfer(Traffic.ALL_REDUCE, "norm", torch.float64, 1)
                self._wait(self._send(Collective((norm,), everyone)))
        for number in order:
            self._wait(reductions[number])
            self.now = self.now + self._updates[number]
            if not self._overlaps:
                gather(number)
        if self._overlaps:
            for number in reversed(order):  # what forward needs first
                gather(number)
            return
        for number in order:
            self.wait_for_gather(number)
            self.now = self.now + self._copies[number]

    def wait_for_gather(self, number: int) -> None:
        if number in self.gathers:
            self._wait(self.gathers.pop(number))

    def _send(self, each: Collective | None) -> tuple[Tensor, Tensor]:
        """When it may begin, and when it is over."""
        if each is None:
            return self.now, self.now
        ready = self._grid.maximum(self.now, each.peers)
        start = torch.maximum(ready, self._grid.maximum(self._link, each.peers))
        self._link = start + seconds_of(each, self._grid, self._hardware)
        return ready, self._link

    def _wait(self, times: tuple[Tensor, Tensor]) -> None:
        ready, end = times
        until = torch.maximum(self.now, end)
        others = torch.minimum(torch.maximum(self.now, ready), until)
        self.exposed = self.exposed + (until - others)
        self.now = until

    def _compute(self, number: int, training: Training, kind: str) -> None:
        met = sum(param.elements * param.tokens for param in self._shares[number].params)
        work = met * training.flops[kind] * training.tokens
        self.now = self.now + work / self._hardware.model_rate

    def _layers(self, training: Training, way: str) -> None:
        """What layers send each other under expert parallel."""
        for busy in training.stages.values():
            for each, count in getattr(busy, way):
                seconds = float(count * seconds_of(each, self._grid, self._hardware).max())
                self.now, self.exposed = self.now + seconds, self.exposed + seconds


def all_peers(
    plan: GridPlan, model: Model, hardware: Hardware, trainings: tuple[Training, Training]
) -> dict[str, Point]:
    params = params_of(plan, model, trainings[0])
    whole = DTYPE.itemsize * sum(param.elements for param in params)
    plans = {
        "nanochat": nanochat(params),
        "layer-wise": layer_wise(params, padded=True),
        "layer-wise, all-reduce": layer_wise(params, padded=False),
    }
    found = {}
    for name, shares in plans.items():
        overlaps, buffers = name != "nanochat", DTYPE.itemsize * sum(s.padded for s in shares)
        beside = 2 * buffers if overlaps else 2 * whole + buffers
        found[name] = Design(shares, plan.grid, hardware, overlaps).point(trainings, beside)
    return found
