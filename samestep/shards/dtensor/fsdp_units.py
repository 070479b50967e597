"""Units of FSDP2: the parameters of one `fully_shard` call, gathered and reduced at once.

What torch does not tell in public is asked here: which units a parameter is in, how gradients lie
in what a unit sends, and which reduce-scatter it has.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


class ParameterSlot(NamedTuple):
    """A module attribute in which FSDP2 swaps shard and gathered parameter."""

    owner: nn.Module
    name: str

    @property
    def now(self) -> Tensor:
        """The tensor in the attribute at present."""
        found: Tensor = getattr(self.owner, self.name)
        return found


def fsdp_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every FSDP2 module of a model by name, outer ones first.

    Raises:
        ValueError: There is none.
    """
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            found[name] = module  # type: ignore[assignment]  # torch types it as no module
    if not found:
        raise ValueError("the model has no FSDP2 module: call fully_shard first")
    return found


def called(name: str) -> str:
    """The name of a module in messages."""
    return f"FSDP module {name!r}" if name else "the outermost FSDP module"


def own_places(module: nn.Module) -> Iterator[ParameterSlot]:
    """Parameter attributes of a module that no nested FSDP2 module manages."""
    for name, _ in module.named_parameters(recurse=False):
        yield ParameterSlot(module, name)
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from own_places(child)


def nested_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The FSDP2 modules inside a module, in order of registration; not those inside them."""
    for child in module.children():
        if isinstance(child, FSDPModule):
            yield child
        else:
            yield from nested_modules(child)


def grid(module: nn.Module) -> list[list[int]]:
    """Ranks of a module's mesh: one row per copy of the model, one column per shard.

    Empty if all parameters belong to FSDP modules inside it. FSDP's axes are the first of a mesh,
    others are of tensor parallel, where this rank stays in its place.
    """
    own = (place.now for place in own_places(module))
    param = next((p for p in own if isinstance(p, DTensor)), None)
    if param is None:
        return []
    mesh = param.device_mesh
    here = mesh.get_coordinate()
    assert here is not None
    # The module of torch's `replicate` is known by its name alone: its class is private.
    is_sharded = all(base.__name__ != "ReplicateModule" for base in type(module).__mro__)
    has_copies = param.placements[0].is_replicate()
    axes = int(is_sharded) + int(has_copies)
    ranks = mesh.mesh[(slice(None),) * axes + tuple(here[axes:])]
    for axis in range(axes):  # shards are in the order of ranks, however these lie in the mesh
        ranks = ranks.sort(dim=axis).values
    found: list[list[int]] = ranks.reshape(len(ranks) if has_copies else 1, -1).tolist()
    return found


def managed_beside(params: Iterable[Tensor]) -> list[DTensor]:
    """Further parameters in the FSDP2 or `replicate` units of some parameters.

    A parameter does not tell, and an optimizer may have no model to look at. What FSDP2 was told
    to ignore is not among them.
    """
    return [param for unit in units_beside(params) for param in unit.params]


def units_beside(params: Iterable[Tensor]) -> list["ReducedUnit"]:
    """Units that hold some of these parameters; torch has no public API for that."""
    from torch.distributed import _composable_state

    known = getattr(_composable_state, "_module_state_mapping", {})
    wanted = set(map(id, params))
    groups = {
        id(group): group
        for module, state in list(known.items())
        if isinstance(module, FSDPModule)
        and any(id(param) in wanted for param in module.parameters())  # type: ignore[attr-defined]
        for group in _groups_of(state())
    }
    return [ReducedUnit(group) for group in groups.values()]


def units_of(module: FSDPModule) -> list["ReducedUnit"]:
    """The units of a module that was given to `fully_shard`."""
    return [ReducedUnit(group) for group in _groups_of(module._get_fsdp_state())]


class ReducedUnit:
    """Parameters whose gradients FSDP2 packs and reduces together.

    In the packed gradients there is a row for every rank that has a shard, and in a row the shards
    of all parameters that have a gradient, each as long as the longest one of that parameter.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    @property
    def params(self) -> list[DTensor]:
        """Sharded parameters in packing order."""
        return [fsdp_param.sharded_param for fsdp_param in self._group.fsdp_params]

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules that were given to one `fully_shard` call."""
        modules: tuple[nn.Module, ...] = self._group.modules
        return modules

    def name(self, index: int) -> str:
        """Name of a parameter in the outermost FSDP2 module, known after its first forward."""
        fsdp_param = self._group.fsdp_params[index]
        return str(fsdp_param._param_fqn or fsdp_param._module_info.param_name)

    def elements(self, index: int) -> int:
        """Length of a parameter's shard in each row of the packed gradients."""
        size: torch.Size = self._group.fsdp_params[index].padded_sharded_param_size
        return size.numel()

    def gathered(self, index: int) -> Tensor | None:
        """The unsharded tensor that forward uses, the same object in every step."""
        return getattr(self._group.fsdp_params[index], "_unsharded_param", None)

    @property
    def is_cut_otherwise(self) -> bool:
        """Whether unsharded parameters are DTensors, as with tensor parallel."""
        return any(fsdp_param.is_dtensor for fsdp_param in self._group.fsdp_params)

    @property
    def scatters(self) -> bool:
        """Whether the unit is sharded over several ranks."""
        return getattr(self._group.mesh_info, "shard_mesh_size", 1) > 1

    # `set_custom_reduce_scatter` writes this; torch has no public way to read it.

    @property
    def reduce_scatter(self) -> object:
        found: object = self._group._reduce_scatter_comm
        return found

    @reduce_scatter.setter
    def reduce_scatter(self, comm: object) -> None:
        self._group._reduce_scatter_comm = comm


def _groups_of(state: Any) -> list[Any]:
    """Parameter groups of an FSDP state: several from torch 2.13 on."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = getattr(state, "_fsdp_param_group", None)
    return [] if group is None else [group]
