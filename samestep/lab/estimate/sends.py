"""Traffic of a model itself: of layers under tensor and expert parallel, and of stages.

The traffic is that of `samestep.parallel` for one micro-batch (n tokens, C channels, K experts per
token):

    embedding    cut by channels: gathered, or with sequence parallel exchanged for positions
    a branch     an all-reduce of n C outputs in forward and of n C gradients in backward; with
                 sequence parallel an all-gather and a reduce-scatter each way
    the head     logits are gathered; backward adds up gradients of its input
    experts      tokens go to their experts and back, and their gradients the other way round: n K
                 rows each time, of which a rank keeps its part; how many go where is up to the
                 tokens, and counted as if all experts were chosen as often
    stages       the output of a layer, n C, to the next stage; its gradient back

Recomputation in backward repeats the collectives of forward, except the sum that ends a block:
torch stops when it has recomputed all that backward needs.
"""

from collections.abc import Iterator
from functools import partialmethod
from typing import NamedTuple

import torch

from samestep.lab.estimate.activations import LayerMemory, Recompute
from samestep.lab.estimate.cluster import stack_grid
from samestep.lab.estimate.collectives import Collective
from samestep.lab.estimate.grid import Peers
from samestep.plan.transfers import Traffic, Transfer, of_segments


class Sends(NamedTuple):
    """The collectives of one layer and micro-batch, in order.

    again: the collectives of forward that are repeated where backward recomputes a layer.
    opening: the number of collectives of backward that come before the repeated ones.
    """

    forward: tuple[Collective, ...] = ()
    backward: tuple[Collective, ...] = ()
    again: tuple[Collective, ...] = ()
    opening: int = 0

    def in_backward(self, recompute: Recompute) -> list[Collective]:
        again = self.again if recompute != "none" else ()
        return [*self.backward[: self.opening], *again, *self.backward[self.opening :]]


class LayerSends:
    """The collectives of a decoder's layers for one micro-batch."""

    def __init__(self, memory: LayerMemory) -> None:
        self._memory, self._shape, self._degrees = memory, memory.shape, memory.degrees
        self._tokens, self._dtype = memory.tokens, memory.dtype
        grid = stack_grid(memory.degrees)
        self._model, self._expert = grid.peers("model"), grid.peers("expert")

    def embedding(self) -> Sends:
        if self._model.size == 1:
            return Sends()
        moved = self._gather("embedding")
        if not self._degrees.sequence_parallel:
            return Sends((moved,))
        if not self._memory.on_cpu:  # DTensors have no exchange on gloo, and gather there
            own = self._tokens * self._shape.width // self._model.size
            moved = self._exchange("embedding", self._model, own)
        return Sends((moved,), (moved,))

    def block(self, number: int) -> Sends:
        shape = self._shape
        parts = [self._branch("attention")]
        if not self._memory.is_sparse(number):
            parts.append(self._branch("mlp"))
        else:
            if shape.shared_experts:
                parts.append(self._branch("shared expert"))
            parts.append(self._experts())
        forward = tuple(each for part in parts for each in part.forward)
        backward = tuple(each for part in reversed(parts) for each in part.backward)
        again = (*(each for part in parts[:-1] for each in part.forward), *parts[-1].again)
        return Sends(forward, backward, again, parts[-1].opening)

    def head(self) -> Sends:
        if self._model.size == 1:
            return Sends()
        whole = self._tokens * self._shape.vocabulary
        into, out = self._enter("head"), self._enter_backward("head")
        return Sends((*into, self._gather("logits", whole)), out)

    def of_rank(self, stage: int) -> "StageSends":
        """Return the traffic of one pipeline rank's layers, and from its stages to others."""
        ranks, stages = self._degrees.pp, self._memory.stages
        layers: dict[int, list[Sends]] = {}
        for number in range(stage, stages, ranks):
            own = [self.block(layer) for layer in self._memory.stage_layers()[number]]
            if number == 0:
                own.insert(0, self.embedding())
            if number == stages - 1:
                own.append(self.head())
            layers[number] = own
        others = sum((number > 0) + (number < stages - 1) for number in layers)
        return StageSends(layers, round(self._memory.boundary), others if ranks > 1 else 0)

    # --- parts -------------------------------------------------------------------------------

    def _branch(self, name: str) -> Sends:
        """Return the collectives of a tensor parallel branch, such as attention or an MLP."""
        if self._model.size == 1:
            return Sends()
        into, out = self._enter(name), self._enter_backward(name)
        if not self._degrees.sequence_parallel:
            return Sends((*into, self._sum(name, self._model)), out, into)
        return Sends((*into, self._scatter(name)), (self._gather(name), *out), into, opening=1)

    def _enter(self, name: str) -> tuple[Collective, ...]:
        return (self._gather(name),) if self._degrees.sequence_parallel else ()

    def _enter_backward(self, name: str) -> tuple[Collective, ...]:
        if self._degrees.sequence_parallel:
            return (self._scatter(name),)
        return (self._sum(name, self._model),)

    def _experts(self) -> Sends:
        """Return the collectives of experts: over tensor parallel ranks, and over expert ranks."""
        into, out, out_backward, into_backward = self._on_model()
        inside = self._between_experts()
        return Sends(
            (*into, *inside.forward, *out),
            (*out_backward, *inside.backward, *into_backward),
            (*into, *inside.again),
            len(out_backward),
        )

    def _on_model(self) -> tuple[tuple[Collective, ...], ...]:
        """Return tensor parallel collectives: into, out of experts; backward of out, of into."""
        whole_experts, in_sequence = self._degrees.expert_tp == 1, self._degrees.sequence_parallel
        if self._model.size == 1 or (whole_experts and in_sequence):
            return (), (), (), ()
        active, wide = self._tokens * self._shape.active_experts, torch.float32
        mixed = self._gather("experts", dtype=wide)
        if whole_experts:
            back = self._gather("shares of experts", active, wide), self._gather("experts")
            return (), (mixed,), (), back
        if not in_sequence:
            summed = self._summed("experts", self._model, self._tokens)
            return (), summed.forward, (), summed.backward
        into = (
            self._gather("experts"),
            self._gather("shares of experts", active, wide),
            self._gather("choice of experts", active, torch.int64),
        )
        back = self._scatter("shares of experts", active, wide), self._scatter("experts")
        return into, (self._scatter("experts", dtype=wide),), (mixed,), back

    def _between_experts(self) -> Sends:
        """Return the collectives between the ranks that have different experts."""
        if self._expert.size == 1:
            return Sends()
        if self._degrees.ep_carries_data:
            forward, backward = tuple(self._exchanges(True)), tuple(self._exchanges(False))
            return Sends(forward, backward, forward)
        rows, _, _ = self._memory.rows()  # all have the tokens, and make a part
        return self._summed("same tokens", self._expert, round(rows) // self._shape.active_experts)

    def _summed(self, name: str, peers: Peers, tokens: int) -> Sends:
        """Return the sums over ranks that have the same tokens and each compute a summand."""
        active, whole = tokens * self._shape.active_experts, tokens * self._shape.width
        shares = self._sum(f"shares of {name}", peers, active, torch.float32)
        mixed = self._sum(name, peers, whole, torch.float32)
        return Sends((mixed,), (shares, self._sum(name, peers, whole)))

    def _exchanges(self, forward: bool) -> Iterator[Collective]:
        _, held, _ = self._memory.rows()
        if forward and not self._shape.capacity:
            yield self._exchange("counts", self._expert, self._shape.experts, torch.int64)
        for name in ("to experts", "from experts"):
            yield self._exchange(name, self._expert, round(held) * self._shape.width)

    # --- collectives -------------------------------------------------------------------------

    def _sum(
        self, name: str, peers: Peers, elements: int = 0, dtype: torch.dtype | None = None
    ) -> Collective:
        elements = elements or self._tokens * self._shape.width
        transfer = Transfer(Traffic.ALL_REDUCE, f"{name}: sum", dtype or self._dtype, elements)
        return Collective((transfer,), peers)

    def _segments(
        self, traffic: Traffic, name: str, elements: int = 0, dtype: torch.dtype | None = None
    ) -> Collective:
        """Return a collective of equal segments between tensor parallel ranks."""
        ranks = self._model.size
        sizes = ((elements or self._tokens * self._shape.width) // ranks,) * ranks
        return Collective((of_segments(traffic, name, dtype or self._dtype, sizes),), self._model)

    _gather = partialmethod(_segments, Traffic.ALL_GATHER)
    _scatter = partialmethod(_segments, Traffic.REDUCE_SCATTER)

    def _exchange(
        self, name: str, peers: Peers, own: int, dtype: torch.dtype | None = None
    ) -> Collective:
        """Return an all-to-all in which every rank sends equal parts of `own` elements."""
        sizes = (own - own // peers.size,) * peers.size
        parts = of_segments(Traffic.PARTS, name, dtype or self._dtype, sizes)
        return Collective((parts._replace(incoming=sizes),), peers)


class StageSends(NamedTuple):
    """The traffic of a pipeline rank for one micro-batch: of layers, and between stages."""

    layers: dict[int, list[Sends]]
    boundary: int  # bytes that go from stage to stage
    neighbours: int  # stages elsewhere, before and after those of this rank: each is sent to

    def collectives(self, recompute: Recompute) -> list[Collective]:
        """Return all collectives that the layers of the rank launch."""
        return [
            each
            for layers in self.layers.values()
            for layer in layers
            for each in (*layer.forward, *layer.in_backward(recompute))
        ]
