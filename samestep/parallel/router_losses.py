"""Losses of routers: balanced use of experts, and small logits.

Balance, of Switch Transformers (arXiv 2101.03961, equations 4 to 6; GShard, arXiv 2006.16668, has
the same product): E sum_i f_i P_i, where f_i is the share of all choices that fell on expert i, and
P_i the mean of its probability. It is 1 when both are even. Probabilities are the scores of a
token divided by their sum, as DeepSeek-V3 does with sigmoids (arXiv 2412.19437, equation 19); those
of a softmax are what they were.

z, of ST-MoE (arXiv 2202.08906, equation 5): the mean of logsumexp(logits) squared.

Both are those of all tokens of a micro-batch, on all ranks together: only f has to be known of
others (arXiv 2501.11873 tells why it should be), and with it both are sums over tokens, which any
rank may have. So the losses of N ranks are those of one process with all of their tokens.
Micro-batches have an f each, by choice: that of later ones is not known yet.
"""

from typing import Any

import torch
from torch import Tensor, nn

from samestep.comm.collectives import total
from samestep.comm.groups import RankGroup, registry
from samestep.mesh import Mesh
from samestep.parallel.experts import load_of
from samestep.parallel.recompute import once


class RouterLosses(nn.Module):
    """Adds a router's losses to the gradients, without changing the loss value.

        self.losses = RouterLosses(balance=0.01, z=1e-3)
        weights = self.losses(weights, logits, scores, chosen)

    The value goes through unchanged; in backward, the gradient of the losses is added to that of
    logits and scores, as if they had been added to the loss. So they need no way out of a model,
    which in a pipeline there is none of.

    Args:
        balance: Coefficient of the balance loss, per layer.
        z: Coefficient of the z loss, per layer.

    Attributes:
        ranks: Those that have tokens of their own; None: this one alone.
        divisor: Of the sum of gradients over ranks: the number of those whose losses are averaged.
        share: Of a step's tokens, what one call has on all ranks together.
        scale: What the loss is multiplied by before backward, as by a GradScaler.
        added: (2,) both losses since they were last collected, this rank's part, without
            coefficients.
    """

    added: Tensor

    def __init__(self, balance: float = 0.0, z: float = 0.0) -> None:
        super().__init__()
        self.balance, self.z = balance, z
        self.ranks: RankGroup | None = None
        self.divisor = 1
        self.share = 1.0
        self.scale: float | Tensor = 1.0
        self.register_buffer("added", torch.zeros(2, dtype=torch.float64), persistent=False)

    def forward(self, value: Tensor, logits: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """Attach the losses to a value that the loss depends on.

        Args:
            value: Of any shape: the weights of the mix, for example.
            logits: (N, E), of this rank's tokens.
            scores: (N, E), at least 0: what experts are chosen and weighted by.
            chosen: (N, K), which experts.
        """
        if not (self.balance or self.z) or not (self.training and torch.is_grad_enabled()):
            return value
        load = once(lambda: self._load(chosen, scores.shape[1]))  # (E,)
        choices = load.sum().clamp(min=1)
        tokens = choices / chosen.shape[1]
        probabilities = (scores / scores.sum(dim=1, keepdim=True)).sum(dim=0)
        balance = len(load) * (load / choices * probabilities).sum() / tokens
        z = logits.logsumexp(dim=1).square().sum() / tokens
        once(lambda: self.added.add_(self.share * torch.stack([balance, z])))
        both = self.balance * balance + self.z * z
        attached: Tensor = _Attached.apply(value, both * (self.share * self.divisor * self.scale))  # type: ignore[no-untyped-call]
        return attached

    # A message: no part of a graph.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _load(self, chosen: Tensor, experts: int) -> Tensor:
        """How often each expert was chosen on all ranks, (E,), integers."""
        counts = load_of(chosen, experts)
        if self.ranks is not None:
            counts = total("load of experts", counts, self.ranks).wait()
        return counts


class _Attached(torch.autograd.Function):
    """Autograd function that returns a value and adds the gradient of a loss."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, loss: Tensor) -> Tensor:
        ctx.loss = loss.dtype, loss.device
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        dtype, device = ctx.loss
        return grads[0], torch.ones((), dtype=dtype, device=device)


def router_losses(model: nn.Module) -> list[RouterLosses]:
    return [module for module in model.modules() if isinstance(module, RouterLosses)]


def place_on(model: nn.Module, mesh: Mesh) -> None:
    """Set from a mesh which ranks have different tokens, for all router losses."""
    if not router_losses(model):
        return
    degrees = mesh.degrees
    axes = ["replicate", "data"]
    axes += ["expert"] * degrees.ep_carries_data + ["model"] * degrees.sequence_parallel
    ranks = registry.of_ranks(degrees.peers(mesh.rank, *axes))
    place(model, ranks, degrees.batch_ranks)


def place(model: nn.Module, ranks: RankGroup | None, divisor: int) -> None:
    """Set where tokens are, and the divisor of gradients, for all router losses."""
    for losses in router_losses(model):
        losses.ranks, losses.divisor = ranks, divisor


def set_share(model: nn.Module, share: float) -> None:
    """Set the share of a step's tokens in the next calls."""
    for losses in router_losses(model):
        losses.share = share


def collect(model: nn.Module) -> Tensor | None:
    """Return this rank's balance and z losses, (2,), and reset them.

    The sum over ranks with tokens of their own is that of one process. None if there are none.
    """
    found = router_losses(model)
    if not found:
        return None
    both = torch.stack([losses.added for losses in found]).sum(dim=0)
    for losses in found:
        losses.added.zero_()
    return both
