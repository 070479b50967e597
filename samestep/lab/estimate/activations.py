"""Estimate the bytes of activations that forward keeps on a rank, and that backward adds.

After Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models"
(arXiv 2205.05198), who count s b h (34 + 5 a s / h) bytes in a 16-bit layer: 4 s b h in norms, 11
in attention, 19 in the MLP, and 5 a s^2 b in the matrix of scores. The estimate differs:

    attention    is fused: it keeps queries, keys, values, what it gives and a number per head and
                 token, and no scores; what it gives is copied for the projection after it, but for
                 the kernel that a GPU has for 32 bit
    dropout      there is none: no masks
    norms        RMSNorm keeps its input and a number per token, where torch has a kernel for it; on
                 a CPU it is made of several operations, which keep 32-bit copies
    MLP          a gate keeps four tensors of the hidden width in place of two
    QK-norms     keep queries and keys as they were before
    sequence     parallel ranks keep the whole input of a branch, as gathered, not their part
    loss         is of whole logits in 32 bit, on every rank of tensor parallel

Recomputation `full` keeps only the input of every block; `selective` keeps the input and the
results of matrix products and attention (torch's `create_selective_checkpoint_contexts`). The
paper's selective recomputation, which drops the scores, is implied by fused attention.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal, NamedTuple

import torch

from samestep.lab.estimate.decoder import Shape
from samestep.lab.estimate.slots import most_in_flight, passes_of
from samestep.mesh.degrees import Degrees
from samestep.parallel.stages import spread

Recompute = Literal["none", "selective", "full"]
Parts = dict[str, float]  # bytes by what they are for


@dataclass(frozen=True)
class Batch:
    """The batch of a rank per step; all tensor and pipeline parallel ranks have the same batch.

    tokens: the tokens of one micro-batch.
    """

    tokens: int
    micro_batches: int = 1
    recompute: Recompute = "none"
    stages_per_rank: int = 1

    @property
    def all_tokens(self) -> int:
        return self.tokens * self.micro_batches


class Activations(NamedTuple):
    """The activations of one rank, in bytes.

    kept: bytes by purpose, when most micro-batches wait for their backward pass.
    passing: bytes that the costliest moment of backward adds to `kept`.
    """

    kept: Mapping[str, int]
    passing: int
    in_flight: int  # micro-batches, of all stages of the rank

    @property
    def peak(self) -> int:
        return sum(self.kept.values()) + self.passing


class LayerMemory:
    """The bytes of activations that a decoder's layers keep on a rank for one micro-batch."""

    def __init__(
        self,
        shape: Shape,
        degrees: Degrees,
        batch: Batch,
        dtype: torch.dtype = torch.bfloat16,
        *,
        on_cpu: bool = False,
    ) -> None:
        self.shape, self.degrees, self.on_cpu = shape, degrees, on_cpu
        self.batch, self.tokens, self.dtype = batch, batch.tokens, dtype
        self.width = dtype.itemsize
        self.stream = self.tokens / degrees.tp if degrees.sequence_parallel else self.tokens

    @property
    def boundary(self) -> float:
        """Return the bytes of the hidden states that go from layer to layer on a rank."""
        return self.stream * self.shape.width * self.width

    def is_sparse(self, number: int) -> bool:
        """Whether the layer of this number has experts."""
        return self.shape.experts > 0 and number >= self.shape.dense_layers

    def block(self, number: int, recompute: Recompute = "none") -> Parts:
        """Return the bytes that one layer keeps for backward, its input included, by part."""
        if recompute == "full":
            return {"inputs of blocks": self.boundary}
        if recompute == "selective":
            parts = {"inputs of blocks": self.boundary, "attention": self._products_of_attention()}
        else:
            norms = 2 * self._norm(self.stream, self.shape.width)
            parts = {"norms": norms, "attention": self._attention()}
        if self.is_sparse(number):
            parts["experts"] = self._experts(recompute)
            if self.shape.shared_experts:
                hidden = self.shape.shared_experts * self.shape.expert_hidden
                parts["experts"] += self._mlp(hidden, recompute)
        else:
            parts["mlp"] = self._mlp(self.shape.hidden, recompute)
        return parts

    def head(self) -> Parts:
        """Return the bytes kept by the last norm, the head and the loss (log-probabilities)."""
        inputs = self.tokens * self.shape.width * self.width
        norms = self._norm(self.stream, self.shape.width) + inputs
        return {"norms": norms, "loss": 4 * self.tokens * self.shape.vocabulary + 4}

    def logits(self) -> float:
        return self.tokens * self.shape.vocabulary * self.width

    def loss_passes(self) -> float:
        """Return the bytes of the gradients of log-probabilities and logits, in 32 bit."""
        return 8 * self.tokens * self.shape.vocabulary

    def block_passes(self, number: int, recompute: Recompute) -> float:
        """Return the bytes that a layer's backward adds: gradients and recomputed activations."""
        shape, degrees = self.shape, self.degrees
        hidden, stream = 3 * shape.hidden / degrees.tp, 2.0 * shape.width * self.width
        if self.is_sparse(number):  # all experts of a rank, on what they were sent
            rows, held, _ = self.rows()
            hidden = 2 * held / self.tokens * shape.expert_hidden / degrees.expert_tp
            stream += rows / self.tokens * shape.width * (4 + self.width)
        heads = shape.heads * (shape.head + shape.rope) / degrees.tp
        gradients = self.tokens * (max(hidden, 3 * heads) * self.width + stream)
        again = sum(self.block(number).values()) - sum(self.block(number, recompute).values())
        return gradients + again

    # --- parts of a layer --------------------------------------------------------------------

    def _norm(self, rows: float, width: float) -> float:
        if self.shape.biases:  # LayerNorm: mean and deviation of every row
            return rows * (self.width * width + 8)
        kept = 8 if self.on_cpu else self.width
        return rows * (kept * width + 4)

    def _attention(self) -> float:
        shape, tp, tokens = self.shape, self.degrees.tp, self.tokens
        queries = shape.heads * (shape.head + shape.rope) / tp
        keys = shape.kv_heads * (shape.head + shape.rope) / tp
        values, given = shape.kv_heads * shape.head / tp, shape.heads * shape.head / tp
        copies = 1 if self.width == 4 and not self.on_cpu else 2  # as the kernel lays it down
        inside = shape.width + queries + keys + values + copies * given
        found = tokens * (inside * self.width + 4 * shape.heads / tp)
        if shape.qk_norms:
            heads = (shape.heads + shape.kv_heads) / tp
            found += self._norm(tokens * heads, shape.head)
        for rank in filter(None, (shape.q_rank, shape.kv_rank)):  # whole on every rank
            found += self._norm(tokens, rank) + tokens * rank * self.width
        return found + tokens * (shape.rope if shape.kv_rank else 0) * self.width

    def _products_of_attention(self) -> float:
        """Return the bytes of queries, keys, values, and the outputs of attention and `o_proj`."""
        shape, tp = self.shape, self.degrees.tp
        heads = (shape.heads + shape.kv_heads) * (2 * shape.head + shape.rope) / tp
        ranks = shape.q_rank + shape.kv_rank + (shape.rope if shape.kv_rank else 0)
        found = (heads + ranks + shape.width) * self.width + 4 * shape.heads / tp
        return self.tokens * found

    def _mlp(self, hidden: int, recompute: Recompute) -> float:
        """Return the bytes that an MLP keeps: its input, and hidden channels around activation."""
        width, gates = self.shape.width, 2 if self.shape.gated else 1
        times = 1 if recompute == "selective" else 2
        return self.tokens * self.width * (times * gates * hidden / self.degrees.tp + width)

    def _experts(self, recompute: Recompute) -> float:
        shape, degrees = self.shape, self.degrees
        rows, held, computed = self.rows()
        hidden = (2 if shape.gated else 1) * shape.expert_hidden / degrees.expert_tp
        if recompute == "selective":
            products = computed * (hidden + shape.width)
            return self.width * (self.stream * shape.experts + products)
        # The router: its input, scores, whom it chose, the sum and the shares of these.
        router = self.width * shape.width + 4 * shape.experts + 12 * shape.active_experts + 4
        found = self.stream * router
        # What comes to the experts and what they make of it; and the mix, in 32 bit.
        found += self.width * (held * shape.width + 2 * computed * hidden)
        found += rows * (4 * shape.width + 4)
        # Who stands where.
        if shape.capacity:
            return found + 8 * (held + 1) + 8 * rows
        exchanged = degrees.ep > 1 and degrees.ep_carries_data
        return found + 16 * rows + 16 * held * exchanged

    def rows(self) -> tuple[float, float, float]:
        """Return rows (tokens times chosen experts): of this rank, held for experts, computed here.

        With a capacity every expert has room for as many rows; without, experts are assumed to be
        chosen equally often.
        """
        shape, degrees = self.shape, self.degrees
        tokens = self.tokens if degrees.expert_tp > 1 else self.tokens / degrees.tp
        rows = held = tokens * shape.active_experts
        if shape.capacity:
            held = ceil(shape.capacity * rows / shape.experts) * shape.experts
        return rows, held, held if degrees.ep_carries_data else held / degrees.ep

    # --- of a rank -----------------------------------------------------------------------------

    @property
    def stages(self) -> int:
        """Return the number of stages of the whole pipeline."""
        return self.degrees.pp * self.batch.stages_per_rank

    def stage_layers(self) -> list[range]:
        """Return the numbers of the layers of each pipeline stage."""
        return spread(self.shape.layers, self.stages)

    def of_rank(self, stage: int) -> Activations:
        """Return the activations of a pipeline rank at the moment when most bytes are alive."""
        batch, degrees, layers = self.batch, self.degrees, self.stage_layers()
        passes = passes_of(stage, degrees.pp, batch.micro_batches, batch.stages_per_rank)
        in_flight = most_in_flight(passes)
        kept: list[Parts] = []
        passing = 0.0
        for number, count in in_flight.items():
            blocks = [self.block(layer, batch.recompute) for layer in layers[number]]
            costs = [self.block_passes(layer, batch.recompute) for layer in layers[number]]
            kept += blocks * count
            if number == self.stages - 1:
                head = self.head()
                kept += [head] * count
                # Beside the layers' own: the loss is over, and its part gone, when theirs begin.
                passing = max(passing, self.loss_passes())
                costs = [cost - sum(head.values()) for cost in costs]
            passing = max(passing, *costs)
        if degrees.pp > 1:
            kept.append({"stages": self._of_stages(in_flight)})
        total = {name: round(size) for name, size in _sum(kept).items()}
        return Activations(total, max(0, round(passing)), sum(in_flight.values()))

    def _of_stages(self, in_flight: Mapping[int, int]) -> float:
        """Return the bytes of torch's `PipelineStage`: outputs until backward, and receive buffers.

        Receive buffers exist for every micro-batch all the time. For micro-batches in flight they
        are the input of the first layer, and counted there.
        """
        found, micro_batches = 0.0, self.batch.micro_batches
        for stage, count in in_flight.items():
            if stage > 0:
                found += (micro_batches - count) * self.boundary
            if stage < self.stages - 1:
                found += (micro_batches + count) * self.boundary
            else:
                found += count * self.logits()
        return found


def _sum(parts: Sequence[Mapping[str, float]]) -> Parts:
    total = Counter[str]()
    for each in parts:
        for name, size in each.items():
            total[name] += size  # type: ignore[assignment]
    return dict(total)
