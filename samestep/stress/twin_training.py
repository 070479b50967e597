"""Trainings whose parameters are DTensors: meshes, logs of groups, gradients of a plain twin."""

import copy
import hashlib
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from samestep.comm.collectives import gather_segments, sum_in_order
from samestep.comm.diagnosis import recorder
from samestep.comm.diagnosis.recorder import FlightRecorder, Record
from samestep.comm.groups import registry
from samestep.comm.meshes import held, mesh_group, whole_tensor
from samestep.comm.messages import gather_everywhere
from samestep.stress.models import named_params
from samestep.stress.training import (
    Training,
    mean_gradients,
    rank_gradients,
)


class DTensorTraining(Training):
    """Ranks hold parts of the parameters."""

    def parameters(self) -> dict[str, Tensor]:
        """Those that the optimizer has, whole; collective."""
        groups = self.optimizer.param_groups
        named = (pair for g in groups for pair in zip(g["param_names"], g["params"], strict=True))
        # Master copies are state: what ranks compute with is compared.
        return {
            name: self.optimizer.full_parameter(name).cpu()
            if param.dtype.itemsize > 2 or not isinstance(param, DTensor)
            else whole_tensor(cast("DTensor", param.detach())).cpu()
            for name, param in named
        }

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


class TwinTraining(DTensorTraining):
    """Gradients of a plain twin, averaged as one process does it."""

    def _new_model(self) -> nn.Module:
        self._twin = super()._new_model()
        # By rank, once needed: the parts of the twin that it holds, and how long they are.
        self._held_by: list[tuple[list[Tensor], list[int]]] = []
        model = super()._new_model()
        ranks = self.scenario.world
        inner = 2 if ranks > 2 and ranks % 2 == 0 else ranks
        mesh = device_mesh(self._device.type, (ranks // inner, inner), ("data", "inner"))
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


def device_mesh(kind: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Made once for the present default group: groups of ranks take a while."""
    key = (dist.group.WORLD, kind, shape, names)
    if key not in _meshes:
        for old in [other for other in _meshes if other[0] is not dist.group.WORLD]:
            del _meshes[old]
        _meshes[key] = init_device_mesh(kind, shape, mesh_dim_names=names)
    return _meshes[key]
