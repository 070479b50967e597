"""Trainings whose parameters are DTensors, with gradients computed by a plain copy of the model.

`TwinTraining` averages them as one process does. In `CopiesTraining` DTensors have copies on other
meshes, which the optimizer averages, as `parallelize_module` leaves a model whose data parallel
ranks nobody has told FSDP2 of: each mesh of tensor or expert parallel has the parts of some
parameters, and the ranks along the data axis have copies of these parts. Beside them are plain
parameters, which every rank has.

Scenarios say what gradient each rank has, and all layouts must have the same mean, to the bit. So
a mesh is given sums of the gradients of several ranks: see `share_out`. Backward passes are real,
through `to_local` as in tensor parallel layers, so that gradients arrive one by one, as parts or as
summands, in another order on every rank, or not at all.
"""

import copy
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import reduce
from math import prod
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

import samestep
from samestep.comm.collectives import gather_segments, sum_in_order
from samestep.comm.diagnosis import recorder
from samestep.comm.diagnosis.recorder import FlightRecorder, Record
from samestep.comm.groups import registry
from samestep.comm.meshes import held, mesh_group, own_box, whole_tensor
from samestep.comm.messages import gather_everywhere
from samestep.lab.stress.models import named_params
from samestep.lab.stress.scenario import Gradients, loss_giving
from samestep.lab.stress.training import Training, local_part, mean_gradients, rank_gradients


class DTensorTraining(Training):
    """A training whose ranks hold shards of the parameters as DTensors."""

    _logs: "GroupLogs | None" = None  # where ranks are in groups of their own

    def log(self, recorder: FlightRecorder) -> tuple[int, str]:
        return super().log(recorder) if self._logs is None else self._logs.compared(recorder)

    def parameters(self) -> dict[str, Tensor]:
        """The optimizer's parameters as whole tensors; collective."""
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
        own = self._part(param, value) if isinstance(param, DTensor) else value
        local_part(param).copy_(own)

    def _part(self, param: DTensor, whole: Tensor) -> Tensor:
        """The local shard of a tensor, cut as its parameter is."""
        if param not in self._slices:
            self._slices[param] = own_box(param).slices
        return whole[self._slices[param]]

    def _new_model(self) -> nn.Module:
        self._slices: dict[Tensor, tuple[slice, ...]] = {}
        return super()._new_model()

    def _resume(self) -> None:
        """Save through torch's state dicts, and load into a new model and optimizer."""
        saved = copy.deepcopy(get_state_dict(self.model, self.optimizer))
        self._start_anew()
        set_state_dict(
            self.model, self.optimizer, model_state_dict=saved[0], optim_state_dict=saved[1]
        )


class TwinTraining(DTensorTraining):
    """A training whose gradients come from a plain twin model, averaged as on one process."""

    def _new_model(self) -> nn.Module:
        self._twin = super()._new_model()
        # By rank, once needed: the parts of the twin that it holds, and how long they are.
        self._held_by: list[tuple[list[Tensor], list[int]]] = []
        model = super()._new_model()
        ranks = self.scenario.world
        inner = 2 if ranks > 2 and ranks % 2 == 0 else ranks
        mesh = device_mesh(self._device.type, (ranks // inner, inner), ("data", "inner"))
        for place, (name, param) in enumerate(list(model.named_parameters())):
            _spread(model, name, param, mesh["inner"], [self._inner_placement(place, param)])
        fully_shard(model, mesh=mesh["data"])
        return model

    def _inner_placement(self, place: int, param: Tensor) -> Shard | Replicate:
        """Return a placement: stacks by expert, matrices by rows or columns, vectors replicated."""
        if self.layout.parameters == "ep_fsdp2":
            return Shard(0) if param.dim() == 3 else Replicate()
        return Shard(place % 2) if param.dim() > 1 else Replicate()

    def _make_gradients(self, number: int) -> None:
        if self.scenario.loop == "closed":
            self._follow()
            means = self._mean_over_ranks(number)
        else:
            means = mean_gradients(self.scenario, self._twin, number)
        mine = self._named
        for name, mean in means.items():
            param = mine[name]
            assert isinstance(param, DTensor)
            grad = torch.empty_like(param, requires_grad=False)
            assert isinstance(grad, DTensor)
            grad.to_local().copy_(self._part(param, self._scaler.scale(mean)))
            param.grad = grad

    def _mean_over_ranks(self, number: int) -> Gradients:
        """Average each rank's gradients, sent in one collective, as `mean_gradients` does."""
        twins = named_params(self._twin)
        (mine,) = rank_gradients(self.scenario, self._twin, number, self.rank)  # in one round
        present = torch.tensor([float(name in mine) for name in twins])
        values = [mine.get(name, torch.zeros_like(twin)) for name, twin in twins.items()]
        segment = torch.cat([present.to(values[0]), *(value.reshape(-1) for value in values)])
        sizes = [len(present), *(value.numel() for value in values)]
        ranks = [sum(sizes)] * self._group.size
        of_ranks = gather_segments("gradients of twins", segment, ranks, self._group).wait()
        flags, *means = torch.split(sum_in_order(of_ranks) / len(ranks), sizes)
        known = zip(flags.tolist(), twins.items(), means, strict=True)
        return {name: mean.view(twin.shape) for flag, (name, twin), mean in known if flag}

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
    """Digests of the collectives of each process group, for ranks in several groups."""

    def __init__(self) -> None:
        self._logs: dict[tuple[int, ...], hashlib._Hash] = {}
        if recorder.current is not None:
            recorder.current.on_launch.append(self._note)

    def _note(self, record: Record) -> None:
        line = f"{record.kind} {record.name} {record.elements} {record.dtype}\n"
        self._logs.setdefault(record.ranks, hashlib.sha256()).update(line.encode())

    def compared(self, flights: FlightRecorder) -> tuple[int, str]:
        """A digest that is equal on all ranks if the members of every group launched the same."""
        mine = {members: log.hexdigest() for members, log in self._logs.items()}
        of_ranks = gather_everywhere((flights.count, mine), registry.of().handle)
        known = {(members, digest) for _, logs in of_ranks for members, digest in logs.items()}
        if len(known) > len({members for members, _ in known}):  # members have different logs
            return flights.count, f"of rank {dist.get_rank()}: {flights.digest}"
        count = max(count for count, _ in of_ranks)
        return count, hashlib.sha256(repr(sorted(known)).encode()).hexdigest()


_meshes: dict[tuple[Any, ...], DeviceMesh] = {}


def device_mesh(kind: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return the DeviceMesh of the default group; cached because making groups is slow."""
    key = (dist.group.WORLD, kind, shape, names)
    if key not in _meshes:
        for old in [other for other in _meshes if other[0] is not dist.group.WORLD]:
            del _meshes[old]
        _meshes[key] = init_device_mesh(kind, shape, mesh_dim_names=names)
    return _meshes[key]


# What parameters are, one after the other. Where only experts are cut, the last three.
KINDS = ("rows", "columns", "summands", "plain", "whole")


class Cut(NamedTuple):
    """The mesh axes that shard and that replicate a parameter; no axes: a plain tensor."""

    axes: tuple[str, ...] = ()
    placements: tuple[Placement, ...] = ()
    summands: bool = False  # gradients are added up over the axis

    @property
    def is_cut(self) -> bool:
        return any(isinstance(placement, Shard) for placement in self.placements)


class CopiesTraining(DTensorTraining):
    """Gives a twin's gradients to DTensors and plain parameters through real backward passes."""

    def _new_model(self) -> nn.Module:
        self._logs = self._logs or GroupLogs()
        self._twin, model = super()._new_model(), super()._new_model()
        self._sizes = self.layout.mesh_sizes(self.scenario.world)
        mesh = device_mesh(self._device.type, tuple(self._sizes.values()), tuple(self._sizes))
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        self._here = dict(zip(self._sizes, coordinate, strict=True))
        self._cuts: dict[str, Cut] = {}
        fused = self._fused()
        for place, (name, param) in enumerate(named_params(model).items()):
            cut = self._cuts[name] = self._cut(place, param, name in fused)
            if cut.axes:
                _spread(model, name, param, mesh[cut.axes], cut.placements)
        return model

    def _fused(self) -> set[str]:
        """Return the parameters that consist of several blocks of rows."""
        alone = samestep.MuonAdamW(self._twin, grads="reduced", **self.scenario.options())
        groups = [group for group in alone.param_groups if group.get("split_sizes")]
        return {name for group in groups for name in group["param_names"]}

    def _cut(self, place: int, param: Tensor, fused: bool) -> Cut:
        """Choose shardings in turn; stacks are sharded by expert where there is such an axis."""
        if param.dim() == 3 and "expert" in self._sizes:
            along: dict[str, Placement] = {"expert": Shard(0)}
            if "model" in self._sizes:
                along["model"] = Shard(1 + place % 2)
            if all(self._may_cut(param, axis, how, False) for axis, how in along.items()):
                return Cut(tuple(along), tuple(along.values()))
        axis = "model" if "model" in self._sizes else "expert"
        kinds = KINDS if axis == "model" else KINDS[2:]
        kind = kinds[(place + self.layout.turn) % len(kinds)]
        if kind in ("rows", "columns"):
            how = Shard(0 if kind == "rows" else param.dim() - 1)
            if self._may_cut(param, axis, how, fused and kind == "rows"):
                return Cut((axis,), (how,))
            kind = "summands"
        return Cut() if kind == "plain" else Cut((axis,), (Replicate(),), kind == "summands")

    def _may_cut(self, param: Tensor, axis: str, how: Placement, fused: bool) -> bool:
        """Whether a sharding has equal parts of every block, which flat buffers need."""
        if self.layout.options.get("buffers") != "flat":
            return True
        assert isinstance(how, Shard)
        return not fused and param.shape[how.dim] % self._sizes[axis] == 0

    # --- gradients -----------------------------------------------------------------------

    def _make_gradients(self, number: int) -> None:
        if self.scenario.loop == "closed":
            self._follow()
        world, count = range(self.scenario.world), self.scenario.micro_batches(number)
        by_rank = [rank_gradients(self.scenario, self._twin, number, rank) for rank in world]
        rounds = [self._shares(number, grads) for grads in zip(*by_rank, strict=True)]
        places = {name: place for place, name in enumerate(self._cuts)}
        for micro in range(count):
            last = micro == count - 1
            if self.scenario.accumulation == "synchronize":
                self._backward(number, rounds[micro])
                if not last:
                    self.optimizer.synchronize()
                continue
            (shares,) = rounds
            # Each parameter's in one of the micro-batches: sums of sums would be rounded otherwise.
            now = {n: share for n, share in shares.items() if (places[n] + number) % count == micro}
            with nullcontext() if last else self.optimizer.no_sync():
                self._backward(number, now)

    @torch.no_grad()
    def _shares(self, number: int, by_rank: Sequence[Gradients]) -> Gradients:
        """Return this rank's share of each mean gradient, for the part that the rank holds."""
        found = {}
        for place, (name, cut) in enumerate(self._cuts.items()):
            mine = by_rank[self.rank].get(name)
            if cut.axes:
                given = [grads[name] for grads in by_rank if name in grads]
                others = [axis for axis in self._sizes if axis not in cut.axes]
                copies, here = prod(self._sizes[axis] for axis in others), 0
                for axis in others:
                    here = here * self._sizes[axis] + self._here[axis]
                whole = share_out(given, copies, number + place)[here]
                # The mean is over copies, and each stands for as many ranks as its mesh has.
                size = self.scenario.world // copies
                mine = None if whole is None else self._held_of(name, whole / size, number + place)
            if mine is not None:
                found[name] = mine
        return found

    def _held_of(self, name: str, whole: Tensor, turn: int) -> Tensor | None:
        """Return this rank's shard or summand of a gradient; None where other ranks hold it all."""
        cut, param = self._cuts[name], self._named[name]
        assert isinstance(param, DTensor)
        if cut.summands:
            (axis,) = cut.axes
            size, here = self._sizes[axis], self._here[axis]
            if turn // 2 % 3 == 0:
                return whole if turn % size == here else None
            numbers = torch.arange(whole.numel(), device=whole.device).view(whole.shape)
            return torch.where((numbers + turn) % size == here, whole, 0.0)
        part = self._part(param, whole)
        # An expert without tokens, of which another rank of the mesh has some.
        return None if cut.is_cut and turn % 2 and whole.any() and not part.any() else part

    def _backward(self, number: int, grads: Mapping[str, Tensor]) -> None:
        names = list(grads)
        if not names:
            return
        turn = (7 * self.rank + number) % len(names)  # an order that ranks do not share
        named, members = self._named, {}
        for name in names[turn:] + names[:turn]:
            param, cut = named[name], self._cuts[name]
            if isinstance(param, DTensor):
                placements = [Partial()] if cut.summands else cut.placements
                members[name] = param.to_local(grad_placements=placements)
            else:
                members[name] = param.view_as(param)
        loss = loss_giving([grads[name] for name in members], list(members.values()))
        torch.autograd.backward(self._scaler.scale(loss))

    @torch.no_grad()
    def _follow(self) -> None:
        """Give the twin the values of the parameters."""
        twins = named_params(self._twin)
        for name, value in self.parameters().items():
            twins[name].copy_(value)

    # --- values --------------------------------------------------------------------------

    def parameters(self) -> dict[str, Tensor]:
        """Return whole values; replicated parameters as held by this rank, to compare copies."""
        found = super().parameters()
        for name in found:
            if not self._cuts[name].is_cut:
                found[name] = local_part(self._named[name]).cpu().clone()
        return found

    # Through the optimizer's own state dict: pieces of ranks, which torch's cannot take.
    _resume = Training._resume


def share_out(given: Sequence[Tensor], copies: int, turn: int) -> list[Tensor | None]:
    """Split a gradient into shares whose ordered sum has the bits of sum(given).

    A sum in floating point has an order: whoever comes first gives the sum of several, those that
    follow one each. By `turn` these are more or fewer, and others give nothing.
    """
    if not given:
        return [None] * copies
    alone = turn % min(len(given), copies)
    several = len(given) - alone
    parts = [reduce(torch.add, given[:several]), *given[several:]]
    idle = copies - len(parts)
    before = turn // 2 % (idle + 1)
    return [*[None] * before, *parts, *[None] * (idle - before)]


def _spread(
    model: nn.Module, name: str, param: nn.Parameter, mesh: DeviceMesh, how: Sequence[Placement]
) -> None:
    spread = distribute_tensor(param.detach(), mesh, how)
    owner, _, last = name.rpartition(".")
    new = nn.Parameter(spread, requires_grad=param.requires_grad)
    model.get_submodule(owner).register_parameter(last, new)
