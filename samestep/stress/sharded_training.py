"""One rank's training where parameters are DTensors.

fsdp2, hsdp         the scenario's loss is the forward of a module that FSDP2 shards, so that it
                    finds whole parameters; ranks that have no loss or skip layers take part
tp_fsdp2, ep_fsdp2  scenarios have no parallel plan: parameters are placed as `fully_shard` after
                    `parallelize_module` does, gradients are averaged in rank order on a plain
                    twin, and each rank is given its part of them
"""

import copy
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from samestep.comm.collectives import gather_segments, sum_in_order
from samestep.comm.diagnosis import recorder
from samestep.comm.diagnosis.recorder import FlightRecorder, Record
from samestep.comm.groups import registry
from samestep.comm.meshes import held, mesh_group
from samestep.comm.messages import gather_everywhere
from samestep.fsdp import skip, take_part, use_ordered_reduction
from samestep.stress.layouts import Layout
from samestep.stress.models import GPT, named_params
from samestep.stress.scenario import Scenario
from samestep.stress.training import (
    Training,
    backward,
    mean_gradients,
    rank_gradients,
)

REFUSED = {"tp_alone": "TensorParallelAlone", "two_optimizers": "TwoOptimizers"}


def new_training(scenario: Scenario, layout: Layout, rank: int, **options: Any) -> Training:
    """What a layout needs."""
    if layout.parameters in ("fsdp2", "hsdp"):
        return FSDPTraining(scenario, layout, rank, **options)
    if layout.parameters == "hybrid":
        from samestep.stress.hybrid_training import HybridTraining  # it is built on this module

        return HybridTraining(scenario, layout, rank, **options)
    if layout.parameters in REFUSED:
        from samestep.stress import refused_training  # the same

        kind = getattr(refused_training, REFUSED[layout.parameters])
        training: Training = kind(scenario, layout, rank, **options)
        return training
    if layout.parameters in ("tp_fsdp2", "ep_fsdp2"):
        return TwinTraining(scenario, layout, rank, **options)
    return Training(scenario, layout, rank, **options)


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

    def _mesh(self, shape: Sequence[int], names: tuple[str, str]) -> DeviceMesh:
        kind = "cpu" if self._device is None else self._device.type
        return _meshes.get(kind, tuple(shape), names)


class FSDPTraining(DTensorTraining):
    """Real backward passes through a module that FSDP2 shards."""

    def _new_model(self) -> nn.Module:
        model = super()._new_model()
        ranks, copies = self.scenario.world, 2 if self.layout.parameters == "hsdp" else 1
        mesh = self._mesh((copies, ranks // copies), ("replicate", "shard"))
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
        mesh = self._mesh((ranks // inner, inner), ("data", "inner"))
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
        """Gradients of the twin, averaged over all ranks."""
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


class _Meshes:
    """Meshes of the present default group, each made once: groups of ranks take a while."""

    def __init__(self) -> None:
        self._world: dist.ProcessGroup | None = None
        self._known: dict[tuple[str, tuple[int, ...], tuple[str, str]], DeviceMesh] = {}

    def get(self, kind: str, shape: tuple[int, ...], names: tuple[str, str]) -> DeviceMesh:
        if dist.group.WORLD is not self._world:
            self._world = dist.group.WORLD
            self._known.clear()
        key = (kind, shape, names)
        if key not in self._known:
            self._known[key] = init_device_mesh(kind, shape, mesh_dim_names=names)
        return self._known[key]


_meshes = _Meshes()
