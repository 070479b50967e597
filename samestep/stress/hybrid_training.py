"""One rank's training on a mesh: the model is cut as its plan says, and its own forward runs.

Ranks that share a batch (those of tensor parallel, of a pipeline) read what all of them would
read alone, so that every layout has the gradients of the same mean.
"""

import hashlib
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from samestep.comm.diagnosis.recorder import FlightRecorder
from samestep.comm.groups import registry
from samestep.comm.messages import gather_everywhere
from samestep.mesh import Mesh, build
from samestep.mesh.replicate_list import ReplicateListError
from samestep.optimizer.step import RuleOptimizer
from samestep.parallel.replicas import check_replicas
from samestep.parallel.stack import Stack
from samestep.stress.scenarios.hybrid import HybridGPT
from samestep.stress.sharded_training import DTensorTraining, GroupLogs


class HybridTraining(DTensorTraining):
    """Real backward passes through a model that is cut over every axis that was asked for."""

    def _new_model(self) -> nn.Module:
        self._logs = GroupLogs()
        assert isinstance(self.scenario, HybridGPT)
        self._slices = {}
        kind = None if self._device is None else self._device.type
        mesh = build(device_type=kind, **self.layout.mesh)
        self._stack = self._cut(self.scenario, mesh)
        model = self._stack.model
        self.scenario.adapt(model, mesh)
        self._stack.trace(tell=lambda line: None)  # raises if ranks do not run the same code
        return model

    def _cut(self, scenario: HybridGPT, mesh: Mesh) -> Stack:
        """By the first plan that is not refused: the last has to be right."""
        ordered = self._distribution["reduction"] == "ordered"
        *refused, right = scenario.plans()
        for plan in refused:
            model = scenario.model_to_cut().to(self._device or "cpu")
            with suppress(ReplicateListError):
                return Stack(model, plan, mesh, loss=_mean_loss, ordered=ordered)
        model = scenario.model_to_cut().to(self._device or "cpu")
        return Stack(model, right, mesh, loss=_mean_loss, ordered=ordered)

    def _new_optimizer(self) -> RuleOptimizer:
        optimizer = self._stack.optimizer(**self.scenario.options(), **self._distribution)
        plans = gather_everywhere(optimizer.fingerprint(), registry.of().handle)
        self._fingerprint = hashlib.sha256(" ".join(plans).encode()).hexdigest()
        return optimizer

    def _make_gradients(self, number: int) -> None:
        assert isinstance(self.scenario, HybridGPT)
        share = self.scenario.world // self._stack.mesh.degrees.batch_ranks
        first = share * self._stack.batch_place
        parts = [self.scenario.tokens(number, rank) for rank in range(first, first + share)]
        tokens = torch.cat(parts).to(self._device or "cpu")
        self._stack.backward(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def parameters(self) -> dict[str, Tensor]:
        """Of all stages; raises if copies differ."""
        check_replicas(self.model)
        return self._of_all_stages(super().parameters())

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Of all stages."""
        return self._of_all_stages(super().state())

    def log(self, flights: FlightRecorder) -> tuple[int, str]:
        """The same on all ranks if in every group all members have launched the same."""
        return self._logs.compared(flights)

    def fingerprint(self) -> str:
        """Of all ranks' plans: optimizers compare each with those who share it."""
        return self._fingerprint

    def _of_all_stages(self, own: dict[str, Any]) -> dict[str, Any]:
        pipe = self._stack.mesh.axis("pipe")
        if pipe is None:
            return own
        of_stages = gather_everywhere(own, pipe.get_group())
        return {name: value for stage in of_stages for name, value in stage.items()}


def _mean_loss(logits: Any, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())
