"""One rank's training in any layout: those where parameters are DTensors, and mistakes.

fsdp2, hsdp         the scenario's loss is the forward of a module that FSDP2 shards, so that it
                    finds whole parameters; ranks that have no loss or skip layers take part
tp_fsdp2, ep_fsdp2  scenarios have no parallel plan: parameters are placed as `fully_shard` after
                    `parallelize_module` does, gradients are averaged in rank order on a plain
                    twin, and each rank is given its part of them
hybrid              the model is cut over a mesh as its plan says, and its own forward runs; ranks
                    that share a batch (those of tensor parallel, of a pipeline) read what all of
                    them would read alone, so that every layout has gradients of the same mean
copies              DTensors whose copies the optimizer averages: see `dtensor_training`
fsdp2_alone         begins with a mistake, which has to be refused on every rank; then it goes on as
                    one does it right, and has to end like all others. If nobody refuses the
                    mistake, it goes on with it, and a check has to find what comes of it
spmd, spmd_hybrid   one XLA program for all devices: see `xla_training`
two_optimizers      begins with two optimizers on a copy of the model, which both want to reduce
                    inside of one backward; then one has all parameters
"""

import hashlib
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import samestep
from samestep.comm.diagnosis.recorder import FlightRecorder
from samestep.comm.groups import registry
from samestep.comm.messages import gather_everywhere
from samestep.fsdp import skip, take_part, use_ordered_reduction
from samestep.lab.stress.check import check
from samestep.lab.stress.dtensor_training import (
    CopiesTraining,
    DTensorTraining,
    GroupLogs,
    TwinTraining,
    device_mesh,
)
from samestep.lab.stress.layouts import Layout
from samestep.lab.stress.models import GPT, named_params
from samestep.lab.stress.scenario import Scenario
from samestep.lab.stress.scenarios.hybrid import ConditionalGPT, HybridGPT, by_first_plan
from samestep.lab.stress.training import Training
from samestep.lab.stress.xla_training import XlaHybridTraining, XlaTraining
from samestep.mesh import Mesh, build
from samestep.models.gpt import mean_loss
from samestep.optimizer.rule_optimizer import RuleOptimizer
from samestep.parallel.plan import Plan
from samestep.parallel.replicas import check_replicas
from samestep.parallel.stack import Stack


class HostsTraining(Training):
    """A training that sums in two levels, over process groups of some ranks each."""

    def _new_model(self) -> nn.Module:
        self._logs = getattr(self, "_logs", None) or GroupLogs()
        return super()._new_model()

    def log(self, recorder: FlightRecorder) -> tuple[int, str]:
        return self._logs.compared(recorder)


class FSDPTraining(DTensorTraining):
    """A training with real backward passes through a module that FSDP2 shards."""

    def _new_model(self) -> nn.Module:
        model = super()._new_model()
        ranks, copies = self.scenario.world, 1 if self.layout.parameters == "fsdp2" else 2
        mesh = device_mesh(self._device.type, (copies, ranks // copies), ("replicate", "shard"))
        if not self._averages_copies:
            mesh = mesh["shard"]
        self._root = Loss(self.scenario, model, self.rank)
        for layer in self._root.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self._root, mesh=mesh)
        if self._distribution["reduction"] == "ordered":
            use_ordered_reduction(self._root)
        assert isinstance(self._root, FSDPModule)
        if self._sums_every_time:  # dividing each sum would round once more than dividing them all
            for module in self._root.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
            self._root.set_gradient_divide_factor(1.0)
        take_part(self._root)
        return model

    @property
    def _averages_copies(self) -> bool:
        return self.layout.parameters == "hsdp"

    @property
    def _sums_every_time(self) -> bool:
        return self.scenario.accumulation == "synchronize"

    def _make_gradients(self, number: int) -> None:
        count = self.scenario.micro_batches(number)
        assert isinstance(self._root, FSDPModule)
        for micro in range(count):
            self._root.set_requires_gradient_sync(self._sums_every_time or micro == count - 1)
            torch.autograd.backward(self._scaler.scale(self._root(number, micro)))
        if self._sums_every_time:
            for param in self._named.values():
                if isinstance(param.grad, DTensor):
                    param.grad.to_local().div_(self.scenario.world)


class Loss(nn.Module):
    """A module with the scenario's model, and the scenario's loss as forward."""

    def __init__(self, scenario: Scenario, model: nn.Module, rank: int) -> None:
        super().__init__()
        self.model, self._scenario, self._rank = model, scenario, rank
        # Layers can be sharded apart if forward calls them: not where it multiplies parameters
        # with the gradients that they are to have.
        self.layers: Sequence[nn.Module] = ()
        if isinstance(model, GPT) and scenario.loop == "closed":
            self.layers = list(model.layers)
            model.leave_out = skip

    def forward(self, step: int, micro: int) -> Tensor:
        """Return the loss, (); on a rank without one a zero, whose backward reaches all layers."""
        loss = self._scenario.loss(self.model, step, self._rank, micro)
        if loss is not None:
            return loss
        nothing = torch.zeros((), requires_grad=True, device=next(self.parameters()).device)
        for layer in self.layers:
            nothing = skip(layer, nothing)
        return nothing * 1.0


# --- mistakes --------------------------------------------------------------------------------


class FSDPAlone(FSDPTraining):
    """FSDP2 on each half of the ranks, which have data of their own; done right, HSDP."""

    _alone = True

    def _new_model(self) -> nn.Module:
        if self._alone:
            self._logs = GroupLogs()  # halves begin in groups of their own
        return super()._new_model()

    @property
    def _averages_copies(self) -> bool:
        return not self._alone

    def _new_optimizer(self) -> RuleOptimizer:
        try:
            return super()._new_optimizer()
        except ValueError as error:
            if not self._alone or "nobody is known to average" not in str(error):
                raise
        self._alone = False
        self.model = self._new_model()
        return super()._new_optimizer()


class TwoOptimizers(Training):
    """Begins with two optimizers on a copy of the model, which both reduce in its backward.

    Both launch collectives in their steps, in one order, and all ranks end with the same values.
    Then one optimizer has all parameters.
    """

    STEPS = 8  # ranks lack gradients of all kinds meanwhile

    def _new_optimizer(self) -> RuleOptimizer:
        copy = self._new_model()
        params = list(named_params(copy).values())
        options = {key: self._distribution[key] for key in ("sharding", "overlap_grad_reduce")}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="parameters differ between ranks")
            both = [
                samestep.AdamW(own, bucket_size=200, crossover=1, **options)
                for own in (params[::2], params[1::2])
            ]
        for step in range(self.STEPS):
            loss = self.scenario.loss(copy, step, self.rank, 0)
            if loss is not None:
                torch.autograd.backward(loss)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="two optimizers have gradients")
                for optimizer in both:
                    optimizer.step()
            copy.zero_grad(set_to_none=True)
        for optimizer in both:
            check(copy, optimizer)
        return super()._new_optimizer()


# --- the hybrid stack ------------------------------------------------------------------------


class HybridTraining(DTensorTraining):
    """A training with real backward passes through a model cut over every axis asked for."""

    def _new_model(self) -> nn.Module:
        self._logs = GroupLogs()
        assert isinstance(self.scenario, HybridGPT)
        self._slices = {}
        mesh = build(device_type=self._device.type, **self.layout.mesh)
        self._stack = self._cut(self.scenario, mesh)
        model = self._stack.model
        self.scenario.adapt(model, mesh)
        if isinstance(model, ConditionalGPT):
            take_part(model)
            model.leave_out = skip
        self._stack.trace(tell=lambda line: None)  # raises if ranks do not run the same code
        return model

    def _cut(self, scenario: HybridGPT, mesh: Mesh) -> Stack:
        ordered = self._distribution["reduction"] == "ordered"

        def cut(plan: Plan) -> Stack:
            model = scenario.model_to_cut().to(self._device)
            return Stack(model, plan, mesh, loss=mean_loss, ordered=ordered)

        return by_first_plan(scenario, cut)

    def _new_optimizer(self) -> RuleOptimizer:
        options = {**self.scenario.options(), **self._distribution, **self._products()}
        optimizer = self._stack.optimizer(**options)
        plans = gather_everywhere(optimizer.fingerprint(), registry.of().handle)
        self._fingerprint = hashlib.sha256(" ".join(plans).encode()).hexdigest()
        return optimizer

    def _make_gradients(self, number: int) -> None:
        assert isinstance(self.scenario, HybridGPT)
        share = self.scenario.world // self._stack.mesh.degrees.batch_ranks
        first = share * self._stack.batch_place
        parts = [self.scenario.tokens(number, rank) for rank in range(first, first + share)]
        tokens = torch.cat(parts).to(self._device)
        self.scenario.before_forward(self.model, number, first)
        self._stack.backward(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def parameters(self) -> dict[str, Tensor]:
        """Return the values of all stages; raises if copies differ."""
        check_replicas(self.model)
        return self._of_all_stages(super().parameters())

    def state(self) -> dict[str, dict[str, Tensor]]:
        return self._of_all_stages(super().state())

    def fingerprint(self) -> str:
        """Return a digest of all ranks' plans: optimizers compare each with those who share it."""
        return self._fingerprint

    def _of_all_stages(self, own: dict[str, Any]) -> dict[str, Any]:
        pipe = self._stack.mesh.axis("pipe")
        if pipe is None:
            return own
        of_stages = gather_everywhere(own, pipe.get_group())
        return {name: value for stage in of_stages for name, value in stage.items()}


TRAININGS: dict[str, type[Training]] = {
    "plain": Training,
    "fsdp2": FSDPTraining,
    "hsdp": FSDPTraining,
    "tp_fsdp2": TwinTraining,
    "ep_fsdp2": TwinTraining,
    "hybrid": HybridTraining,
    "copies": CopiesTraining,
    "fsdp2_alone": FSDPAlone,
    "two_optimizers": TwoOptimizers,
    "spmd": XlaTraining,
    "spmd_hybrid": XlaHybridTraining,
}


def new_training(scenario: Scenario, layout: Layout, rank: int, **options: Any) -> Training:
    kind = HostsTraining if layout.options.get("two_levels") else TRAININGS[layout.parameters]
    return kind(scenario, layout, rank, **options)
