"""One rank's training in any layout: those where parameters are DTensors, and mistakes.

fsdp2, hsdp         the scenario's loss is the forward of a module that FSDP2 shards, so that it
                    finds whole parameters; ranks that have no loss or skip layers take part
tp_fsdp2, ep_fsdp2  scenarios have no parallel plan: parameters are placed as `fully_shard` after
                    `parallelize_module` does, gradients are averaged in rank order on a plain
                    twin, and each rank is given its part of them
hybrid              the model is cut over a mesh as its plan says, and its own forward runs; ranks
                    that share a batch (those of tensor parallel, of a pipeline) read what all of
                    them would read alone, so that every layout has gradients of the same mean
tp_alone,           begin with a mistake, which has to be refused on every rank; then they go on as
two_optimizers      one does it right, and have to end like all others. If nobody refuses the
                    mistake, they go on with it, and a check has to find what comes of it
"""

import copy
import hashlib
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import samestep
from samestep.comm.collectives import gather_segments, sum_in_order
from samestep.comm.diagnosis import recorder
from samestep.comm.diagnosis.recorder import FlightRecorder, Record
from samestep.comm.groups import registry
from samestep.comm.meshes import held, mesh_group
from samestep.comm.messages import gather_everywhere
from samestep.comm.presence import RankProblemError
from samestep.fsdp import skip, take_part, use_ordered_reduction
from samestep.mesh import Mesh, build
from samestep.mesh.replicate_list import ReplicateListError
from samestep.models.gpt import mean_loss
from samestep.optimizer.rule_optimizer import RuleOptimizer
from samestep.parallel.replicas import check_replicas
from samestep.parallel.stack import Stack
from samestep.stress.layouts import Layout
from samestep.stress.models import GPT, named_params
from samestep.stress.scenario import Scenario
from samestep.stress.scenarios.hybrid import HybridGPT
from samestep.stress.training import (
    Training,
    backward,
    mean_gradients,
    mean_over_ranks,
    rank_gradients,
)


class DTensorTraining(Training):
    """Ranks hold parts of the parameters."""

    def parameters(self) -> dict[str, Tensor]:
        """Those that the optimizer has, whole; collective."""
        names = [name for group in self.optimizer.param_groups for name in group["param_names"]]
        return {name: self.optimizer.full_parameter(name).cpu() for name in names}

    def _edit(self, param: Tensor, value: Tensor) -> None:
        assert isinstance(param, DTensor)
        param.to_local().copy_(self._part(param, value))

    def _part(self, param: DTensor, whole: Tensor) -> Tensor:
        """What this rank holds of a tensor that is placed as a parameter is."""
        if param not in self._slices:
            group = mesh_group(param.device_mesh)
            self._slices[param] = held(param, group).boxes[group.rank].slices
        return whole[self._slices[param]]

    def _new_model(self) -> nn.Module:
        self._slices: dict[Tensor, tuple[slice, ...]] = {}
        return super()._new_model()

    def _resume(self) -> None:
        """Through torch's own state dicts, into a new model and a new optimizer."""
        saved = copy.deepcopy(get_state_dict(self.model, self.optimizer))
        self._start_anew()
        set_state_dict(
            self.model, self.optimizer, model_state_dict=saved[0], optim_state_dict=saved[1]
        )


class FSDPTraining(DTensorTraining):
    """Real backward passes through a module that FSDP2 shards."""

    def _new_model(self) -> nn.Module:
        model = super()._new_model()
        ranks, copies = self.scenario.world, 2 if self.layout.parameters == "hsdp" else 1
        shape = copies, ranks // copies
        mesh = _mesh(self._device.type, shape, ("replicate", "shard"))
        if self.layout.parameters == "fsdp2":
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
    def _sums_every_time(self) -> bool:
        return self.scenario.accumulation == "synchronize"

    def _make_gradients(self, number: int) -> None:
        count = self.scenario.micro_batches(number)
        assert isinstance(self._root, FSDPModule)
        for micro in range(count):
            self._root.set_requires_gradient_sync(self._sums_every_time or micro == count - 1)
            backward(self._scaled(self._root(number, micro)))
        if self._sums_every_time:
            for param in self._named.values():
                if isinstance(param.grad, DTensor):
                    param.grad.to_local().div_(self.scenario.world)


class Loss(nn.Module):
    """The scenario's model, with the scenario's loss as forward."""

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
        """(). Of a rank without a loss a zero, whose backward reaches all layers."""
        loss = self._scenario.loss(self.model, step, self._rank, micro)
        if loss is not None:
            return loss
        nothing = torch.zeros((), requires_grad=True, device=next(self.parameters()).device)
        for layer in self.layers:
            nothing = skip(layer, nothing)
        return nothing * 1.0


class TwinTraining(DTensorTraining):
    """Gradients of a plain twin, averaged as one process does it."""

    def _new_model(self) -> nn.Module:
        self._twin = super()._new_model()
        # By rank, once needed: the parts of the twin that it holds, and how long they are.
        self._held_by: list[tuple[list[Tensor], list[int]]] = []
        model = super()._new_model()
        ranks = self.scenario.world
        inner = 2 if ranks > 2 and ranks % 2 == 0 else ranks
        mesh = _mesh(self._device.type, (ranks // inner, inner), ("data", "inner"))
        for place, (name, param) in enumerate(list(model.named_parameters())):
            placement = self._inner_placement(place, param)
            spread = distribute_tensor(param.detach(), mesh["inner"], [placement])
            owner, _, last = name.rpartition(".")
            new = nn.Parameter(spread, requires_grad=param.requires_grad)
            model.get_submodule(owner).register_parameter(last, new)
        self._over_data(model, mesh)
        return model

    def _over_data(self, model: nn.Module, mesh: DeviceMesh) -> None:
        fully_shard(model, mesh=mesh["data"])

    def _inner_placement(self, place: int, param: Tensor) -> Shard | Replicate:
        """Stacks by expert; or matrices by rows and columns in turn, vectors in copies."""
        if self.layout.parameters == "ep_fsdp2":
            return Shard(0) if param.dim() == 3 else Replicate()
        return Shard(place % 2) if param.dim() > 1 else Replicate()

    def _train(self, wanted: Mapping[str, bool]) -> None:
        super()._train(wanted)
        twins = named_params(self._twin)
        for name, trained in wanted.items():
            twins[name].requires_grad_(trained)

    def _make_gradients(self, number: int) -> None:
        twins, mine = named_params(self._twin), self._named
        means = self._means(number)
        for name, twin in twins.items():
            if twin in means:
                param = mine[name]
                assert isinstance(param, DTensor)
                grad = torch.empty_like(param, requires_grad=False)
                assert isinstance(grad, DTensor)
                grad.to_local().copy_(self._part(param, self._scaled(means[twin])))
                param.grad = grad

    def _means(self, number: int) -> dict[Tensor, Tensor]:
        if self.scenario.loop == "closed":
            self._follow()
            return self._mean_over_ranks(number)
        return mean_gradients(self.scenario, self._twin, number)

    def _mean_over_ranks(self, number: int) -> dict[Tensor, Tensor]:
        """As `mean_gradients`; each rank computes its own, and they travel in one collective."""
        twins = named_params(self._twin)
        (mine,) = rank_gradients(self.scenario, self._twin, number, self.rank)  # in one round
        present = torch.tensor([float(name in mine) for name in twins])
        values = [mine.get(name, torch.zeros_like(twin)) for name, twin in twins.items()]
        segment = torch.cat([present.to(values[0]), *(value.reshape(-1) for value in values)])
        sizes = [len(present), *(value.numel() for value in values)]
        ranks = [sum(sizes)] * self._group.size
        of_ranks = gather_segments("gradients of twins", segment, ranks, self._group).wait()
        flags, *means = torch.split(sum_in_order(of_ranks) / len(ranks), sizes)
        known = zip(flags.tolist(), twins.values(), means, strict=True)
        return {twin: mean.view(twin.shape) for flag, twin, mean in known if flag}

    @torch.no_grad()
    def _follow(self) -> None:
        """Give the twin the values of the parameters, in one collective."""
        params = [param for param in self._named.values() if isinstance(param, DTensor)]
        if not self._held_by:
            self._group = mesh_group(params[0].device_mesh)
            boxes = [held(param, self._group).boxes for param in params]
            twins = [twin.detach() for twin in self._twin.parameters()]
            for of_rank in zip(*boxes, strict=True):
                parts = [twin[box.slices] for twin, box in zip(twins, of_rank, strict=True)]
                self._held_by.append((parts, [part.numel() for part in parts]))
        mine = torch.cat([param.to_local().reshape(-1) for param in params])
        sizes = [sum(of_parts) for _, of_parts in self._held_by]
        of_ranks = gather_segments("values for the twin", mine, sizes, self._group).wait()
        for (parts, of_parts), values in zip(self._held_by, of_ranks, strict=True):
            for part, value in zip(parts, torch.split(values, of_parts), strict=True):
                part.copy_(value.view(part.shape))


class GroupLogs:
    """Logs of collectives by group, for ranks that are in different groups."""

    def __init__(self) -> None:
        self._logs: dict[tuple[int, ...], hashlib._Hash] = {}
        if recorder.current is not None:
            recorder.current.on_launch.append(self._note)

    def _note(self, record: Record) -> None:
        line = f"{record.kind} {record.name} {record.elements} {record.dtype}\n"
        self._logs.setdefault(record.ranks, hashlib.sha256()).update(line.encode())

    def compared(self, flights: FlightRecorder) -> tuple[int, str]:
        """The same on all ranks if in every group all members have launched the same."""
        mine = {members: log.hexdigest() for members, log in self._logs.items()}
        of_ranks = gather_everywhere((flights.count, mine), registry.of().handle)
        known = {(members, digest) for _, logs in of_ranks for members, digest in logs.items()}
        if len(known) > len({members for members, _ in known}):  # members have different logs
            return flights.count, f"of rank {dist.get_rank()}: {flights.digest}"
        count = max(count for count, _ in of_ranks)
        return count, hashlib.sha256(repr(sorted(known)).encode()).hexdigest()


_meshes: dict[tuple[Any, ...], DeviceMesh] = {}


def _mesh(kind: str, shape: tuple[int, int], names: tuple[str, str]) -> DeviceMesh:
    """Made once for the present default group: groups of ranks take a while."""
    key = (dist.group.WORLD, kind, shape, names)
    if key not in _meshes:
        for old in [other for other in _meshes if other[0] is not dist.group.WORLD]:
            del _meshes[old]
        _meshes[key] = init_device_mesh(kind, shape, mesh_dim_names=names)
    return _meshes[key]


# --- mistakes --------------------------------------------------------------------------------


class TensorParallelAlone(TwinTraining):
    """Tensor parallel on pairs of ranks that have data of their own, and no FSDP2 over the pairs.

    Each pair has the gradients of its own data. Done right, FSDP2 averages over the pairs.
    """

    _alone = True

    def _new_model(self) -> nn.Module:
        if self._alone:
            self._logs = GroupLogs()  # pairs begin in groups of their own
        return super()._new_model()

    def log(self, recorder: FlightRecorder) -> tuple[int, str]:
        return self._logs.compared(recorder)

    def _over_data(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self._pair = mesh["inner"].mesh.flatten().tolist()
        if not self._alone:
            super()._over_data(model, mesh)

    def _new_optimizer(self) -> RuleOptimizer:
        try:
            return super()._new_optimizer()
        except ValueError as error:
            if not self._alone or "nobody is known to average" not in str(error):
                raise
        self._alone = False
        self.model = self._new_model()
        return super()._new_optimizer()

    def _means(self, number: int) -> dict[Tensor, Tensor]:
        if not self._alone:
            return super()._means(number)
        ranks = [rank_gradients(self.scenario, self._twin, number, rank) for rank in self._pair]
        return mean_over_ranks(self._twin, ranks)


class TwoOptimizers(Training):
    """Two optimizers on one model, which both reduce inside its backward, tried on a copy of it.

    Done right, one optimizer has all parameters.
    """

    STEPS = 8  # ranks lack gradients of all kinds meanwhile

    def _new_optimizer(self) -> RuleOptimizer:
        copy = self._new_model()
        params = list(named_params(copy).values())
        options = {key: self._distribution[key] for key in ("sharding", "overlap_grad_reduce")}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="replicas differ")
            both = [
                samestep.AdamW(own, bucket_size=200, crossover=1, **options)
                for own in (params[::2], params[1::2])
            ]
        for step in range(self.STEPS):
            loss = self.scenario.loss(copy, step, self.rank, 0)
            if loss is not None:
                backward(loss)
            if any(_refuses(optimizer) for optimizer in both):
                break
            copy.zero_grad(set_to_none=True)
        return super()._new_optimizer()


def _refuses(optimizer: torch.optim.Optimizer) -> bool:
    try:
        optimizer.step()
    except RuntimeError as error:
        if not isinstance(error, RankProblemError) and "two optimizers reduce" not in str(error):
            raise
        return True
    return False


# --- the hybrid stack ------------------------------------------------------------------------


class HybridTraining(DTensorTraining):
    """Real backward passes through a model that is cut over every axis that was asked for."""

    def _new_model(self) -> nn.Module:
        self._logs = GroupLogs()
        assert isinstance(self.scenario, HybridGPT)
        self._slices = {}
        mesh = build(device_type=self._device.type, **self.layout.mesh)
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
            model = scenario.model_to_cut().to(self._device)
            with suppress(ReplicateListError):
                return Stack(model, plan, mesh, loss=mean_loss, ordered=ordered)
        model = scenario.model_to_cut().to(self._device)
        return Stack(model, right, mesh, loss=mean_loss, ordered=ordered)

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
        tokens = torch.cat(parts).to(self._device)
        self._stack.backward(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def parameters(self) -> dict[str, Tensor]:
        """Of all stages; raises if copies differ."""
        check_replicas(self.model)
        return self._of_all_stages(super().parameters())

    def state(self) -> dict[str, dict[str, Tensor]]:
        return self._of_all_stages(super().state())

    def log(self, flights: FlightRecorder) -> tuple[int, str]:
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


TRAININGS: dict[str, type[Training]] = {
    "plain": Training,
    "fsdp2": FSDPTraining,
    "hsdp": FSDPTraining,
    "tp_fsdp2": TwinTraining,
    "ep_fsdp2": TwinTraining,
    "hybrid": HybridTraining,
    "tp_alone": TensorParallelAlone,
    "two_optimizers": TwoOptimizers,
}


def new_training(scenario: Scenario, layout: Layout, rank: int, **options: Any) -> Training:
    return TRAININGS[layout.parameters](scenario, layout, rank, **options)
