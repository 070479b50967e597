"""The sharding of a tensor over the devices of one XLA program: tiles, and copies of tiles.

With SPMD a process has one program for all devices, in which tensors are global. An annotation on
the tensor, `xs.mark_sharding`, assigns its tiles to devices, and the partitioner obeys it. A
parameter and its state are annotated before a step, and again after the step.
"""

import math
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samestep.rules.state import State


class Tiling(NamedTuple):
    """The tiles of a tensor, and the devices that hold copies of each tile.

    tiles: the number of parts of each dim; the last parts of a dim may be short, or empty.
    devices: device ids, tile after tile (the last dim's fastest), the copies of a tile together.
    """

    tiles: tuple[int, ...]
    devices: tuple[int, ...]

    @property
    def copies(self) -> int:
        """Return the number of devices that hold each tile."""
        return len(self.devices) // math.prod(self.tiles)

    @property
    def tile_of(self) -> dict[int, tuple[int, ...]]:
        """Return the tile of each device: its index along each dim, by device id."""
        found = {}
        for place, device in enumerate(self.devices):
            number, tile = place // self.copies, []
            for parts in reversed(self.tiles):
                number, index = divmod(number, parts)
                tile.append(index)
            found[device] = tuple(reversed(tile))
        return found

    def of_first_dim(self, dims: int) -> "Tiling":
        """Return a tiling of these devices that shards dim 0 of a tensor of `dims` dims."""
        return Tiling((len(self.devices), *(1,) * (dims - 1)), tuple(sorted(self.devices)))

    def whole(self, dims: int) -> "Tiling":
        """Return a tiling that replicates a tensor of `dims` dims on these devices."""
        return Tiling((1,) * dims, tuple(sorted(self.devices)))

    def without_copies(self, shape: Sequence[int]) -> "Tiling":
        """Return a tiling that shards each tile over its copies, along the dim with least padding.

        With two tiles of rows in two copies each (0 and 1, 2 and 3), device 0 has the first
        quarter, 1 the second, 2 the third and 3 the last.
        """
        if self.copies == 1 or not shape:
            return self
        dim = min(range(len(shape)), key=lambda d: _padding(shape[d], self.tiles[d] * self.copies))
        ids = torch.tensor(self.devices).reshape(*self.tiles, self.copies)
        tiles = [*self.tiles]
        tiles[dim] *= self.copies
        return Tiling(tuple(tiles), tuple(ids.movedim(-1, dim + 1).flatten().tolist()))


def _padding(size: int, parts: int) -> float:
    """Return the padded size of a dim in `parts` equal parts, relative to its size."""
    return math.ceil(size / parts) * parts / max(size, 1)


def whole_on_all() -> Tiling | None:
    """Return the tiling of a scalar on all devices of the SPMD program; None without SPMD."""
    import torch_xla.runtime as xr

    if not xr.is_spmd():
        return None
    return Tiling((), tuple(range(xr.global_runtime_device_count())))


def tiling_of(tensor: Tensor) -> Tiling | None:
    """Return the tiling of a tensor; None if it is not annotated, or is replicated."""
    return parse(spec_of(tensor), tensor.ndim)


def spec_of(tensor: Tensor) -> str:
    """Return XLA's text for the sharding of a tensor; "" without an annotation."""
    import torch_xla.distributed.spmd as xs

    return str(xs.XLAShardedTensor(tensor.detach()).sharding_spec)


@lru_cache(maxsize=1024)
def parse(spec: str, dims: int) -> Tiling | None:
    """Parse XLA's text for a sharding: {devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}.

    Devices are listed, or given as an order of axes: <=[2,2]T(1,0).
    """
    if spec in ("", "{replicated}", "{unknown}"):
        return None
    found = re.fullmatch(
        r"\{devices=\[([\d,]+)\](?:([\d,]+)|<=\[([\d,]+)\](?:T\(([\d,]+)\))?)"
        r"( last_tile_dim_replicate)?\}",
        spec,
    )
    if found is None:
        raise NotImplementedError(
            f"a tensor has an XLA sharding that samestep does not support: {spec}"
        )
    tiles, listed, order, axes, has_copies = found.groups()
    if listed is not None:
        devices = _numbers(listed)
    else:
        ids = torch.arange(math.prod(_numbers(order))).reshape(_numbers(order))
        ids = ids if axes is None else ids.permute(_numbers(axes))
        devices = tuple(ids.flatten().tolist())
    shape = _numbers(tiles)
    return Tiling(shape[:dims] if has_copies else shape, devices)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def lay(tensor: Tensor, tiling: Tiling) -> None:
    """Annotate a tensor with a tiling, which reshards it if its tiling is another one."""
    if not _says_so(tensor, tiling):
        clear(tensor)
        annotate(tensor, tiling)


def _says_so(tensor: Tensor, tiling: Tiling) -> bool:
    spec = spec_of(tensor)
    if math.prod(tiling.tiles) == 1:
        return bool(spec == "{replicated}")
    return parse(spec, tensor.ndim) == tiling


def clear(tensor: Tensor) -> None:
    """Remove the annotation of a tensor."""
    import torch_xla.distributed.spmd as xs

    xs.clear_sharding(tensor)


def annotate(tensor: Tensor, tiling: Tiling) -> Tensor:
    """Annotate a value inside a step and return it; the partitioner reshards it."""
    import torch_xla.distributed.spmd as xs

    mesh = _mesh(tiling.tiles, tiling.devices, tiling.copies)
    cut = tuple(dim if parts > 1 else None for dim, parts in enumerate(tiling.tiles))
    xs.mark_sharding(tensor, mesh, cut)
    return tensor


def laid(x: Tensor, tiling: Tiling) -> Tensor:
    """Return a copy of `x` with a tiling, also for its gradient; `x` keeps its own tiling."""
    moved: Tensor = _Laid.apply(x, tiling)  # type: ignore[no-untyped-call]
    return moved


class _Laid(torch.autograd.Function):
    """A function that annotates clones in forward and backward: a tensor has one annotation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tiling: Tiling) -> Tensor:
        ctx.tiling = tiling
        return annotate(x.clone(), tiling)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return annotate(grads[0].clone(), ctx.tiling), None


@lru_cache(maxsize=1024)
def _mesh(tiles: tuple[int, ...], devices: tuple[int, ...], copies: int) -> Any:
    import torch_xla.distributed.spmd as xs

    return xs.Mesh(list(devices), (*tiles, copies))


Lying = list[tuple[Tensor, Tiling]]  # a parameter and its state


def lay_out(param: Tensor, state: State, *, shares: bool, crossover: int) -> Lying:
    """Annotate a parameter and its state, and return their tilings; none without SPMD.

    A parameter keeps its tiling; without one it is annotated as replicated, or the partitioner
    might shard it from some step on. State of the parameter's shape is tiled like the parameter,
    and sharded over the copies of a tile if the optimizer `shares`; the state of fewer than
    `crossover` elements stays in copies. All other state is replicated.
    """
    everywhere = whole_on_all()
    if everywhere is None:
        return []
    own = tiling_of(param) or everywhere.whole(param.ndim)
    parts = own
    if shares and param.numel() >= crossover:
        parts = own.without_copies(param.shape)
    found = [(param, own)]
    for tensor in state.values():
        whole = everywhere.whole(tensor.ndim)
        found.append((tensor, parts if tensor.shape == param.shape else whole))
    for tensor, tiling in found:
        lay(tensor, tiling)
    return found


def stay(found: Iterable[tuple[Tensor, Tiling]]) -> None:
    """Annotate values again that a step has written, or the partitioner chooses their tiling."""
    for tensor, tiling in found:
        clear(tensor)
        annotate(tensor, tiling)
