"""Trains in one program for several XLA devices, and counts what that program does.

Every device stands for a rank: it is given the gradients that this rank would have, the program
averages them, and devices hold parameters as the layout says (data: whole, with state in parts;
fsdp: in parts; model: as tensor parallel leaves them; hybrid: by the plan of a model, whose own
forward runs).
"""

from dataclasses import dataclass, field
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor, nn

from samestep.lab.stress.models import named_params
from samestep.lab.stress.scenario import Edit, Event
from samestep.lab.stress.scenarios.hybrid import HybridGPT, by_first_plan
from samestep.lab.stress.training import Training, rank_gradients
from samestep.mesh import build_spmd
from samestep.models.gpt import mean_loss
from samestep.optimizer.rule_optimizer import RuleOptimizer
from samestep.parallel.plan import Plan
from samestep.parallel.spmd import SpmdStack
from samestep.xla import runtime
from samestep.xla.tiling import Tiling, annotate, lay


@dataclass
class ProgramLog:
    """The counts of programs and reads that a run has caused inside its steps.

    kinds: steps that may differ: in which layout, which parameters are present in which groups, and
        which of them for the first time: counts begin, and equal zeros are one input to XLA.
    """

    programs: int = 0
    host_reads: int = 0
    kinds: set[object] = field(default_factory=set)


class XlaTraining(Training):
    """A model and its optimizer on the devices of one program."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.log_of_program = ProgramLog()
        super().__init__(*args, **options)

    def take_over(self, other: Training) -> None:
        """Take over the counts of a run whose checkpoint was loaded."""
        assert isinstance(other, XlaTraining)
        self.log_of_program = other.log_of_program

    def _new_model(self) -> nn.Module:
        self._twin = self.scenario.model()  # on the host: says which gradients there are
        model = super()._new_model()
        for place, param in enumerate(named_params(model).values()):
            tiling = self._tiling(place, param)
            if tiling is not None:
                lay(param, tiling)
        runtime.sync()
        return model

    def _tiling(self, place: int, param: Tensor) -> Tiling | None:
        """Return the cut of a parameter; None if it is not cut."""
        devices = tuple(range(self.scenario.world))
        if self.layout.mesh.get("fsdp"):
            return Tiling((1,) * param.ndim, devices).of_first_dim(param.ndim)
        if self.layout.mesh.get("model") and param.ndim > 1:
            dim = place % 2  # rows and columns in turn; pairs of devices hold the parts
            tiles = [2 if d == dim else 1 for d in range(param.ndim)]
            return Tiling(tuple(tiles), (*devices[::2], *devices[1::2]))
        return None

    def _new_optimizer(self) -> RuleOptimizer:
        self._updated: set[str] = set()  # parameters, by this optimizer
        optimizer = super()._new_optimizer()
        runtime.sync()
        return optimizer

    def step(self, number: int) -> None:
        """Take one step of the scenario; programs and reads of its events are not counted."""
        for event in self.scenario.events(number):
            self._apply(event)
        runtime.sync()
        log = self.log_of_program
        before = runtime.programs(), runtime.host_reads()
        self._make_gradients(number)
        log.kinds.add(self._kind())
        self.optimizer.step()
        self.optimizer.zero_grad()
        runtime.sync()
        log.programs += runtime.programs() - before[0]
        log.host_reads += runtime.host_reads() - before[1]
        if self.scenario.churns:
            self._churn()

    def _churn(self) -> None:
        """Fill memory that the step has given back with garbage, while it may still run."""
        for param in self._named.values():
            torch.full((param.numel(),), float("nan"), device=self._device)
        runtime.sync()

    def _kind(self) -> object:
        """Return the facts that can change the program of a step."""
        present = []
        for group in self.optimizer.param_groups:
            pairs = zip(group["param_names"], group["params"], strict=True)
            names = [name for name, param in pairs if param.grad is not None]
            present.append(tuple((name, name in self._updated) for name in names))
        self._updated.update(name for names in present for name, _ in names)
        return (self.layout.name, tuple(present))

    def _make_gradients(self, number: int) -> None:
        """Give each device its rank's gradients, of which the program takes the mean.

        A rank without a gradient that another one has gives zeros.
        """
        ranks = range(self.scenario.world)
        rounds = [rank_gradients(self.scenario, self._twin, number, rank) for rank in ranks]
        by_rank = [grads for (grads,) in rounds]
        for name, param in self._named.items():
            if any(name in grads for grads in by_rank):
                zeros = torch.zeros(param.shape)
                stack = torch.stack([grads.get(name, zeros) for grads in by_rank])
                on_devices = stack.detach().to(self._device)
                if len(ranks) > 1:
                    whole = Tiling((1,), tuple(ranks))
                    annotate(on_devices, whole.of_first_dim(on_devices.ndim))
                param.grad = on_devices.sum(0) / len(ranks)

    def _apply(self, event: Event) -> None:
        super()._apply(event)
        if isinstance(event, Edit):
            runtime.sync()

    def _edit(self, param: Tensor, value: Tensor) -> None:
        param.copy_(value.to(self._device))

    def _resume(self) -> None:
        """Save to the host, and load into a new model and a new optimizer."""
        model, state = _on_host(self.model.state_dict()), _on_host(self.optimizer.state_dict())
        self._start_anew()
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(state)

    def parameters(self) -> dict[str, Tensor]:
        """Return all parameters by name, (devices, ...): as each device sees them."""
        runtime.sync()
        return {name: torch.stack(runtime.seen_by(p)) for name, p in self._named.items()}

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return all optimizer state by name, (devices, ...)."""
        return {
            name: {
                key: torch.stack(runtime.seen_by(tensor))
                for key, tensor in self.optimizer.state[param].items()
            }
            for group in self.optimizer.param_groups
            for name, param in zip(group["param_names"], group["params"], strict=True)
        }

    def program(self) -> dict[str, int]:
        """Return counts of the run, and bytes of state: of the fullest device, and an even part.

        Even is what every device has if nothing is padded: a part of all state that is shared, and
        all of what is not: small parameters', and what belongs to whole blocks.
        """
        runtime.sync()
        crossover = self.scenario.options().get("crossover", 1)
        held, even = [0] * self.scenario.world, 0.0
        for param, entries in self.optimizer.state.items():
            for tensor in entries.values():
                for place, part in enumerate(runtime.held_by(tensor)):
                    held[place] += part.numel() * part.element_size()
                shared = tensor.shape == param.shape and param.numel() >= crossover
                elements = self._even_elements(param) if shared else tensor.numel()
                even += elements * tensor.element_size()
        log = self.log_of_program
        return {
            "programs": log.programs,
            "kinds_of_step": len(log.kinds),
            "host_reads": log.host_reads,
            "state_bytes": max(held),
            "even_state_bytes": round(even),
        }

    def _even_elements(self, param: Tensor) -> float:
        """Return how many elements of a parameter a device has state of, if nothing is padded."""
        return param.numel() / self.scenario.world


class XlaHybridTraining(XlaTraining):
    """A training of a model that a plan has laid over the axes of a mesh, by its own forward.

    The program is given what all ranks would read, and takes the mean over all of it.
    """

    def _new_model(self) -> nn.Module:
        assert isinstance(self.scenario, HybridGPT)
        scenario, mesh = self.scenario, build_spmd(**self.layout.mesh)

        def cut(plan: Plan) -> SpmdStack:
            model = scenario.model().to(self._device)
            return SpmdStack(model, plan, mesh, loss=mean_loss)

        self._stack = by_first_plan(scenario, cut)
        named = self._stack.model.named_parameters()
        self._names: dict[Tensor, str] = {param: name for name, param in named}
        self._stack.trace(tell=lambda line: None)  # raises if parameters lie otherwise
        runtime.sync()
        return self._stack.model

    def _make_gradients(self, number: int) -> None:
        assert isinstance(self.scenario, HybridGPT)
        ranks = range(self.scenario.world)
        tokens = torch.cat([self.scenario.tokens(number, rank) for rank in ranks])
        self._stack.backward(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def _even_elements(self, param: Tensor) -> float:
        """Return the elements by the plan's tiling: there can be fewer experts than devices."""
        tiling = self._stack.mesh.tiling(self._stack.specs[self._names[param]])
        parts = tiling.without_copies(param.shape).tiles
        return prod(ceil(size / cuts) for size, cuts in zip(param.shape, parts, strict=True))

    def parameters(self) -> dict[str, Tensor]:
        """Return the parts as each device sees them; raises if one lies otherwise than planned."""
        self._stack.check()
        return super().parameters()


def _on_host(value: Any) -> Any:
    """Return a nested value with its tensors on the host."""
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _on_host(each) for key, each in value.items()}
    return [_on_host(each) for each in value] if isinstance(value, list) else value
