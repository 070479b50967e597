"""Pipeline parallel, through torch.distributed.pipelining.

    pipeline = Pipeline(model, mesh.axis("pipe"), loss=cross_entropy, micro_batches=8)
    opt = samestep.MuonAdamW(
        pipeline.model, max_grad_norm=1.0,
        process_group=mesh.axis("data").get_group(), stage_group=pipeline.group,
    )
    loss = pipeline.step(tokens, targets); opt.step(); opt.zero_grad()

Every rank keeps the modules of its stages, under the names that they have in the whole model:
checkpoints load with any number of stages. Tensor parallel and FSDP2 are applied to
`pipeline.parts` before the first step.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    schedules,
)

from samestep.comm.collectives import total
from samestep.comm.diagnosis.flight import explained
from samestep.comm.groups import registry
from samestep.comm.integrity.agreement import require_same_lines
from samestep.parallel.router_losses import set_share
from samestep.parallel.stages import StagePlan, cut
from samestep.shards.replicated.inside_backward import more_to_come

ScheduleName = Literal["1f1b", "interleaved"]
Loss = Callable[[Any, Tensor], Tensor]


def _gpt_block(model: Any, block: nn.Module, x: Tensor, inputs: Tensor) -> Tensor:
    """Run one block as `GPT.forward` does."""
    length = inputs.shape[1]
    out: Tensor = block(x, model.cos[:length], model.sin[:length])
    return out


GPT_STAGES = StagePlan(block=_gpt_block)


class Stage(PipelineStage):
    """A pipeline stage that reports which micro-batch is the last of a step."""

    announces_last_backward = True  # see `samestep.groups.pipelines`

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> Any:
        unfinished = () if last_backward else self.submod.parameters()
        with more_to_come(unfinished):
            return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)


class Pipeline:
    """A model in pipeline stages, one or more per rank.

    Args:
        model: The same on every rank of the pipeline; what other stages have is taken out of it.
        group: The ranks of the pipeline, one per place: `mesh.axis("pipe")` or a process group.
        loss: (outputs, targets) of a micro-batch to the mean over it, ().
        micro_batches: Parts of a batch. At least as many as stages, and for "interleaved" a
            multiple of the number of ranks.
        plan: Which modules the stages have; the default is that of the example GPT.
        stages_per_rank: More than one only with "interleaved".
        schedule: "1f1b", or "interleaved", where a rank has several stages that lie apart.
        batched_sends: Send in batches (see `_in_batches`); False leaves it to torch.

    Attributes:
        model: What this rank has of the model, with the names of the whole, for the optimizer and
            for `samestep.save` and `load`.
        parts: The same, stage by stage, to be parallelized.
        group: The process group, for `stage_group` of the optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        group: DeviceMesh | dist.ProcessGroup,
        *,
        loss: Loss,
        micro_batches: int,
        plan: StagePlan = GPT_STAGES,
        schedule: ScheduleName = "1f1b",
        stages_per_rank: int | None = None,
        batched_sends: bool = True,
    ) -> None:
        handle = group.get_group() if isinstance(group, DeviceMesh) else group
        self._ranks = registry.of(handle)
        self.group = self._ranks.handle
        if stages_per_rank is None:
            stages_per_rank = 2 if schedule == "interleaved" else 1
        self.stages = stages_per_rank * self._ranks.size
        _check(schedule, stages_per_rank, micro_batches, self._ranks.size)
        self.micro_batches = micro_batches
        self._schedule_name = schedule
        self._batched = batched_sends
        self._loss = loss
        # Also the first collective of the group: NCCL wants all ranks in it before some send.
        lines = [f"schedule = {schedule}", f"stages = {self.stages}"]
        lines += [f"micro_batches = {micro_batches}", f"batched_sends = {batched_sends}"]
        lines += [f"{name} {tuple(param.shape)}" for name, param in model.named_parameters()]
        self._device = next(model.parameters()).device
        require_same_lines("pipeline", lines, self._ranks, self._device)
        self.my_stages = range(self._ranks.rank, self.stages, self._ranks.size)
        self.model = model
        self.parts = cut(model, plan, self.stages, self.my_stages, self._ranks.size)
        set_share(model, 1 / micro_batches)
        self._training: Any = None  # the schedules, made at the first step: parts may change
        self._evaluation: Any = None

    @property
    def is_first(self) -> bool:
        return self._ranks.rank == 0

    @property
    def is_last(self) -> bool:
        return self._ranks.rank == self._ranks.size - 1

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Forward and backward of a batch; the mean loss, (), on every rank of the pipeline.

        Every rank gives the same batch. Gradients are those of the mean loss, added to what is in
        `.grad`. An optimizer with `overlap_grad_reduce` reduces inside the last micro-batch of each
        stage, while other stages are still at work; inside its `no_sync()`, in its step.
        """
        self._check_batch(inputs, targets)
        if self._training is None:
            self._training = self._schedule()
            for part in self.parts:
                _forget_first_call(part)
        return self._run("pipeline step", self._training.step, inputs, targets)

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of a batch, (), on every rank of the pipeline, in evaluation mode."""
        self._check_batch(inputs, targets)
        if self._evaluation is None:
            self._evaluation = self._schedule()  # going to and fro, one would measure shapes anew
        with evaluating([self.model, *self.parts]):
            return self._run("pipeline evaluation", self._evaluation.eval, inputs, targets)

    def _run(self, name: str, run: Callable[..., Any], inputs: Tensor, targets: Tensor) -> Tensor:
        losses: list[Tensor] = []
        given = (inputs,) if self.is_first else ()
        # Only the last stage looks at targets.
        asked = {"target": targets, "losses": losses} if self.is_last else {}

        def act() -> None:
            with _in_batches() if self._batched else nullcontext():
                run(*given, inputs=inputs, return_outputs=False, **asked)

        explained(name, self._ranks, act)
        own = torch.zeros(1, dtype=torch.float32, device=self._device)
        if self.is_last:
            own[0] = torch.stack([loss.detach().float() for loss in losses]).sum()
        return total("loss of the pipeline", own, self._ranks).wait()[0]

    def _schedule(self) -> Any:
        stages: Any = [
            Stage(part, stage, self.stages, self._device, group=self.group)
            for stage, part in zip(self.my_stages, self.parts, strict=True)
        ]
        # Scaled here and not after backward: there hooks have seen gradients already.
        options: Any = {"loss_fn": self._scaled_loss, "scale_grads": False}
        if self._schedule_name == "1f1b":
            return Schedule1F1B(stages[0], self.micro_batches, **options)
        return ScheduleInterleaved1F1B(stages, self.micro_batches, **options)

    def _scaled_loss(self, outputs: Any, targets: Tensor) -> Tensor:
        return self._loss(outputs, targets) / self.micro_batches

    def _check_batch(self, inputs: Tensor, targets: Tensor) -> None:
        for what, value in (("inputs", inputs), ("targets", targets)):
            if value.shape[0] % self.micro_batches:
                raise ValueError(
                    f"{what} have {value.shape[0]} rows, which do not divide into "
                    f"{self.micro_batches} equal micro-batches, so that the mean of "
                    "their losses would not be that of the batch: change the batch "
                    "size or micro_batches"
                )


def _check(schedule: str, stages_per_rank: int, micro_batches: int, ranks: int) -> None:
    if schedule not in ("1f1b", "interleaved"):
        raise ValueError(f"schedule {schedule!r} is not supported; choose 1f1b or interleaved")
    if stages_per_rank < 1 or (stages_per_rank > 1) != (schedule == "interleaved"):
        raise ValueError(
            f"stages_per_rank is {stages_per_rank} with schedule {schedule!r}: 1f1b has one stage "
            "on each rank, interleaved two or more"
        )
    if schedule == "1f1b" and micro_batches < ranks:
        raise ValueError(
            f"{micro_batches} micro-batches are fewer than the {ranks} pipeline stages: "
            f"use at least {ranks}"
        )
    if schedule == "interleaved" and (micro_batches < 1 or micro_batches % ranks):
        raise ValueError(
            f"{micro_batches} micro-batches are no multiple of {ranks} ranks, which the "
            "interleaved schedule requires: change micro_batches"
        )


@contextmanager
def _in_batches() -> Iterator[None]:
    """Make torch's schedules use batched sends and receives.

    Newer versions of torch (2.13 does) send alone what goes in one direction only, so that nothing
    waits in line (pytorch issue 175225). On NCCL each such pair of ranks then opens a communicator
    of its own when it first meets, in whatever order ranks come by, which takes memory, warns, and
    has been seen to deadlock; a batch travels on the communicator of the whole group. There is no
    switch for it, so the one function that decides is replaced. Gloo sends one by one.
    """
    original = schedules._batch_p2p
    schedules._batch_p2p = lambda p2p_ops, desc=None: (
        dist.batch_isend_irecv(p2p_ops) if p2p_ops else []
    )
    try:
        yield
    finally:
        schedules._batch_p2p = original


def _forget_first_call(part: nn.Module) -> None:
    """Restore buffers after torch's first call, which only learns shapes."""
    kept = {name: buffer.detach().clone() for name, buffer in part.named_buffers()}
    calls = 0

    def restore(called: nn.Module, *_: Any) -> None:
        nonlocal calls
        calls += called is part  # stages of one rank are views, which share their hooks
        if calls == 2:
            handle.remove()
            with torch.no_grad():
                for name, buffer in part.named_buffers():
                    if not torch.equal(buffer, kept[name]):  # others may wait for their backward
                        buffer.copy_(kept[name])

    handle = part.register_forward_pre_hook(restore)


@contextmanager
def evaluating(modules: list[nn.Module]) -> Iterator[None]:
    """Context in which modules are in evaluation mode."""
    before = {member: member.training for module in modules for member in module.modules()}
    try:
        for module in modules:
            module.eval()
        yield
    finally:
        for member, training in before.items():
            member.training = training
