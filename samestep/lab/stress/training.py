"""One rank's training under a scenario, in a layout."""

import io
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import samestep
from samestep.comm.diagnosis.recorder import FlightRecorder
from samestep.lab.stress.layouts import Layout
from samestep.lab.stress.models import named_params
from samestep.lab.stress.scenario import (
    AddGroup,
    Edit,
    Event,
    Gradients,
    Resume,
    Scenario,
    SetOptions,
    Train,
)
from samestep.optimizer.rule_optimizer import RuleOptimizer
from samestep.shards.registry import kind_of

SCALER = "GradScaler"  # its scale is state, too
# Powers of two: scaling and unscaling changes no bit.
SCALING: dict[str, Any] = {
    "init_scale": 2.0**10, "growth_interval": 5, "growth_factor": 2.0, "backoff_factor": 0.5
}  # fmt: skip


class Training:
    """A model and its optimizer, made anew; `step` is one step of the scenario on this rank."""

    def __init__(
        self,
        scenario: Scenario,
        layout: Layout,
        rank: int,
        *,
        reduction: str = "ordered",
        device: torch.device | None = None,
    ) -> None:
        self.scenario, self.layout, self.rank = scenario, layout, rank
        self._device = device or torch.device("cpu")
        self._distribution: dict[str, Any] = {**layout.options, "reduction": reduction}
        if layout.one_process:  # which averages by hand, also where torchrun has started more
            self._distribution = {"grads": "reduced"}
        self._added: list[AddGroup] = []
        self.model = self._new_model()
        if scenario.starts_differ:
            with torch.no_grad():
                for param in self.model.parameters():
                    param.add_(0.01 * rank)
        self.optimizer = self._new_optimizer()
        kinds = {kind_of(param).name for param in self._named.values()}
        # A layout that would try something else than it says; a pipeline alone cuts no parameter.
        if layout.kind not in kinds and set(layout.mesh) != {"pp"}:
            raise AssertionError(f"{layout.name} has parameters of {kinds}, not {layout.kind!r}")
        # In one process it does what torch's own does.
        self._scaler = samestep.GradScaler(self._device.type, **SCALING, enabled=scenario.scales)

    @property
    def _named(self) -> dict[str, nn.Parameter]:
        return named_params(self.model)

    def _new_model(self) -> nn.Module:
        return self.scenario.model().to(self._device)

    def _new_optimizer(self) -> RuleOptimizer:
        # A rank goes on from what it has saved itself.
        options = {"state_dict_form": "part", **self.scenario.options(), **self._distribution}
        options |= self._products()
        with warnings.catch_warnings():
            if self.scenario.starts_differ:
                warnings.filterwarnings("ignore", message="parameters differ between ranks")
            return samestep.MuonAdamW(self.model, **options)

    def _products(self) -> dict[str, Any]:
        """Return options for a GPU, on which Muon's usual 16 bits are far from any reference."""
        if self._device.type != "cuda":
            return {}
        of_blocks = {} if self.layout.parameters == "plain" else {"block_dtype": torch.float32}
        return {"compute_dtype": torch.float32, **of_blocks}

    def step(self, number: int) -> None:
        for event in self.scenario.events(number):
            self._apply(event)
        self._make_gradients(number)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.optimizer.zero_grad()

    def parameters(self) -> dict[str, Tensor]:
        """Return all parameters by name, on the host. Collective where ranks hold parts."""
        self.optimizer.wait_for_parameters()
        return {name: param.detach().cpu().clone() for name, param in self._named.items()}

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return all optimizer state by name, whole, with the scale of a GradScaler. Collective."""
        found = self.optimizer.whole_state()
        if self.scenario.scales:
            scale = self._scaler.get_scale()
            found[SCALER] = {"scale": torch.tensor(scale, dtype=torch.float64)}
        return found

    def program(self) -> dict[str, int]:
        """Return the counts of XLA's program, if there is one."""
        return {}

    def take_over(self, other: "Training") -> None:
        """Take over the counts of a run whose checkpoint was loaded."""

    def log(self, recorder: FlightRecorder) -> tuple[int, str]:
        """Return the number of collectives, and a digest that all ranks must share. Collective."""
        return recorder.count, recorder.digest

    def fingerprint(self) -> str:
        """Return a digest of the plan, which all ranks must share."""
        return self.optimizer.fingerprint()

    def _make_gradients(self, number: int) -> None:
        if self.layout.one_process:
            named = self._named
            for name, grad in mean_gradients(self.scenario, self.model, number).items():
                named[name].grad = self._scaler.scale(grad)
            return
        count = self.scenario.micro_batches(number)
        for micro in range(count):
            waits = micro < count - 1 and self.scenario.accumulation == "no_sync"
            with self.optimizer.no_sync() if waits else nullcontext():
                loss = self.scenario.loss(self.model, number, self.rank, micro)
                if loss is not None:
                    torch.autograd.backward(self._scaler.scale(loss))
            if micro < count - 1 and self.scenario.accumulation == "synchronize":
                self.optimizer.synchronize()

    def _apply(self, event: Event) -> None:
        match event:
            case SetOptions(rule, options):
                for group in self.optimizer.param_groups:
                    if group["rule"] == rule:
                        group.update(options)
            case Train(names, wanted):
                self._train(dict.fromkeys(names, wanted))
            case AddGroup():
                self._added.append(event)
                self._add(event)
            case Edit(name, value):
                self.optimizer.wait_for_parameters()  # or what is on its way would undo it
                with torch.no_grad():
                    self._edit(self._named[name], value)
            case Resume():
                self._resume()

    def _train(self, wanted: Mapping[str, bool]) -> None:
        """Set requires_grad by name, also in the twin model where there is one."""
        for model in (self.model, getattr(self, "_twin", self.model)):
            for name, trained in wanted.items():
                named_params(model)[name].requires_grad_(trained)

    def _edit(self, param: Tensor, value: Tensor) -> None:
        param.copy_(value)

    def _add(self, event: AddGroup) -> None:
        self._train(dict.fromkeys(event.names, True))
        named = self._named
        members = [(name, named[name]) for name in event.names]
        self.optimizer.add_param_group({"params": members, **event.options})

    @torch.no_grad()
    def _resume(self) -> None:
        """Save to bytes, as to a file, and load into a new model and a new optimizer."""
        self.optimizer.wait_for_parameters()
        values = {name: local_part(param) for name, param in self._named.items()}
        file = io.BytesIO()
        torch.save({"model": values, "opt": self.optimizer.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        self._start_anew()
        for name, param in self._named.items():
            local_part(param).copy_(saved["model"][name])
        self.optimizer.load_state_dict(saved["opt"])

    def _start_anew(self) -> None:
        """Make a new model, and a new optimizer with the groups of the old one."""
        trained = {name: param.requires_grad for name, param in self._named.items()}
        self.model = self._new_model()
        self.optimizer = self._new_optimizer()
        for event in self._added:
            self._add(event)
        self._train(trained)


def local_part(param: Tensor) -> Tensor:
    """Return the local part of a parameter, to read and write."""
    local: Tensor = param.to_local() if isinstance(param, DTensor) else param
    return local.detach()


def rank_gradients(scenario: Scenario, model: nn.Module, step: int, rank: int) -> list[Gradients]:
    """Return the gradients of a rank, one entry for each time that they are reduced."""
    rounds = []
    count = scenario.micro_batches(step)
    sums: Gradients = {}
    for micro in range(count):
        sums = added(sums, _gradients(scenario, model, step, rank, micro))
        if scenario.accumulation == "synchronize" or micro == count - 1:
            rounds.append(sums)
            sums = {}
    return rounds


def added(sums: Gradients, grads: Gradients) -> Gradients:
    return sums | {n: sums[n] + grad if n in sums else grad for n, grad in grads.items()}


def _gradients(scenario: Scenario, model: nn.Module, step: int, rank: int, micro: int) -> Gradients:
    """Make the gradients of one micro-batch; without backward where that changes nothing."""
    known = scenario.known_gradients(model, step, rank, micro)
    if known is not None:
        return known
    loss = scenario.loss(model, step, rank, micro)
    if loss is not None:
        torch.autograd.backward(loss)
    found = {n: p.grad for n, p in named_params(model).items() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def mean_gradients(scenario: Scenario, model: nn.Module, step: int) -> Gradients:
    """Return the mean over all ranks, added in rank order in fp32; only what any rank has."""
    by_rank = [rank_gradients(scenario, model, step, rank) for rank in range(scenario.world)]
    params, sums = named_params(model), Gradients()
    present = sorted({name for rounds in by_rank for grads in rounds for name in grads})
    for contributions in zip(*by_rank, strict=True):
        parts = {}
        for name in present:
            zeros = torch.zeros_like(params[name])
            # What was recorded is on the host.
            grads = [each.get(name, zeros).to(zeros.device) for each in contributions]
            parts[name] = reduce(torch.add, grads).detach()
        sums = added(sums, parts)
    return {name: total / len(by_rank) for name, total in sums.items()}


@contextmanager
def without_onednn() -> Iterator[None]:
    """Disable oneDNN, which on aarch64 takes 0.6 ms for a small linear layer instead of 0.02."""
    before, *_ = torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(before)  # type: ignore[no-untyped-call]
