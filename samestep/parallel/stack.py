"""A model on a mesh with one interface for training, whatever the axes."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import samestep
from samestep.comm.diagnosis.flight import explained
from samestep.comm.groups import registry
from samestep.groups.tied import names_of_tied
from samestep.mesh import Mesh
from samestep.mesh.predicates import predicates, trace
from samestep.parallel.apply import apply
from samestep.parallel.pipeline import GPT_STAGES, Loss, Pipeline, evaluating
from samestep.parallel.plan import Plan
from samestep.parallel.recompute import What
from samestep.parallel.stages import StagePlan, StagePlanError
from samestep.parallel.tensor import check_positions


class Stack:
    """A model laid out on a mesh.

        stack = Stack(model, plan, mesh, loss=cross_entropy)
        opt = stack.optimizer(lr=3e-4, max_grad_norm=1.0)
        loss = stack.backward(tokens, targets); opt.step(); opt.zero_grad()

    Ranks with the same `batch_place` are given the same rows; each place has an equal part of the
    batch. Gradients are those of the mean over the whole batch.

    Args:
        model: The same on all ranks.
        plan: What is cut, and what stays whole.
        mesh: From `samestep.mesh.build`.
        loss: (outputs, targets) to their mean, ().
        micro_batches: Of a pipeline: parts of what a rank is given.
        stages: Which modules the stages of a pipeline have.
        schedule: Of a pipeline, "1f1b" or "interleaved".
        ordered, adapt, compile, recompute, fsdp: As in `apply`.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        mesh: Mesh,
        *,
        loss: Loss,
        micro_batches: int = 0,
        stages: StagePlan = GPT_STAGES,
        schedule: Any = "1f1b",
        ordered: bool = False,
        adapt: Callable[[nn.Module], object] | None = None,
        compile: bool | str = False,
        recompute: bool | What = False,
        fsdp: bool = True,
    ) -> None:
        self.model, self.mesh, self.plan, self.loss = model, mesh, plan, loss
        self.fsdp = fsdp
        self.pipeline: Pipeline | None = None
        parts = [model]
        pipe = mesh.axis("pipe")
        if pipe is not None:
            self.pipeline = Pipeline(
                model,
                pipe,
                loss=loss,
                micro_batches=micro_batches or pipe.size(),
                plan=stages,
                schedule=schedule,
            )
            parts = self.pipeline.parts
            self._refuse_cutting_tied()
        options: Any = {"ordered": ordered, "adapt": adapt, "fsdp": fsdp}
        options |= {"compile": compile, "recompute": recompute}
        self.applied = [apply(part, plan, mesh, **options) for part in parts]

    def _refuse_cutting_tied(self) -> None:
        """Raise if a parameter tied over stages would be sharded."""
        cut = [f"tp={self.mesh.degrees.tp}"] if self.mesh.degrees.tp > 1 else []
        cut += ["FSDP2"] if self.fsdp and self.mesh.dense.size() > 1 else []
        names = names_of_tied(self.model)
        if cut and names:
            raise StagePlanError(
                f"{names[0]!r} is tied over pipeline stages, which have whole copies of "
                f"it, and {' and '.join(cut)} would shard it: use tp=1 and fsdp=False "
                "(the optimizer shards state and updates over the copies), or untie it"
            )

    @property
    def batch_place(self) -> int:
        """Index of this rank's part of the batch, below `mesh.degrees.batch_ranks`."""
        degrees, here = self.mesh.degrees, self.mesh.coordinates
        place = here["replicate"] * degrees.data + here["data"]
        return place * degrees.ep + here["expert"] if degrees.ep_carries_data else place

    @property
    def random_place(self) -> tuple[int, ...]:
        """Seed offset of random masks, equal on ranks with the same positions."""
        here = self.mesh.coordinates["model"]
        return (
            (self.batch_place, here) if self.mesh.degrees.sequence_parallel else (self.batch_place,)
        )

    @property
    def token_copies(self) -> int:
        """Number of ranks that see the same tokens at the router."""
        degrees = self.mesh.degrees
        by_model = 1 if degrees.sequence_parallel else degrees.tp
        return by_model * (1 if degrees.ep_carries_data else degrees.ep)

    def optimizer(self, **keywords: Any) -> samestep.MuonAdamW:
        """An optimizer of this rank's parameters, with the groups that the axes need."""
        if self.pipeline is not None:
            keywords["stage_group"] = self.pipeline.group
            keywords["process_group"] = self._beside()
        if self.plan.fused:
            keywords.setdefault("split_sizes", self.plan.split_sizes(self.model) or None)
        return samestep.MuonAdamW(self.model, **keywords)

    def backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Forward and backward of this rank's rows; their mean loss, ()."""
        if self.pipeline is not None:
            self._check_positions(inputs)
            return self.pipeline.step(inputs, targets)
        return explained("forward and backward", registry.of(), lambda: self._both(inputs, targets))

    def _check_positions(self, inputs: Tensor) -> None:
        """Check the sequence length on every stage, so that all raise together."""
        degrees = self.mesh.degrees
        if degrees.sequence_parallel and self.plan.embedding and inputs.dim() > 1:
            check_positions(inputs.shape[1], degrees.tp, "the pipeline")

    def _both(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = self.loss(self.model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of this rank's rows, (), in evaluation mode."""
        if self.pipeline is not None:
            self._check_positions(inputs)
            return self.pipeline.evaluate(inputs, targets)
        with evaluating([self.model]):
            return self.loss(self.model(inputs), targets)

    def trace(self, tell: Callable[[str], None] = print) -> dict[str, Any]:
        """Print and compare what runs, and return the receipt's entry."""
        facts = predicates(self.mesh.degrees, experts=bool(self.plan.experts), fsdp=self.fsdp)
        return trace(self.mesh, facts, observed=self.applied[0], tell=tell)

    def _beside(self) -> dist.ProcessGroup:
        """Ranks of this stage with the same plain parameters, if there are any.

        Without FSDP2 all of them: the optimizer finds out who has copies of what.
        """
        if not self.fsdp:
            axes = [axis for axis in self.mesh.degrees.sizes if axis != "pipe"]
            return registry.of_members(self.mesh.degrees.peers(self.mesh.rank, *axes)).handle
        expert = self.mesh.axis("expert")
        axis = expert if expert is not None and not self.mesh.degrees.ep_carries_data else None
        return (axis or self.mesh.device_mesh["data"]).get_group()
