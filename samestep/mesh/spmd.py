"""The mesh of one XLA SPMD program, with the same axes as on ranks.

A device stands for a rank: place r of the mesh has the coordinates that rank r has in a `Mesh` of
the same degrees. Where parts of a tensor are is a spec, for each of its dims the axes that cut it,
the outermost first: `(("model", "data"), ())` cuts rows over model, and each part again over data.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from samestep.mesh.build import require_local_groups
from samestep.mesh.degrees import Degrees, DegreesError
from samestep.xla import runtime
from samestep.xla.tiling import Tiling

if TYPE_CHECKING:
    from torch_xla.distributed.spmd import Mesh as XlaMesh

Spec = tuple[tuple[str, ...], ...]


class SpmdMeshError(ValueError):
    """Raised for devices or axes that do not fit the program and its degrees."""


@dataclass(frozen=True)
class SpmdMesh:
    """Devices of one XLA program by axis; made by `build_spmd`.

    devices: The id of the device at each place; the last axis varies fastest.
    slices: The name of the slice that each place is in; inside of one, devices have fast links.
    """

    degrees: Degrees
    devices: tuple[int, ...]
    slices: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.degrees.name

    def tiling(self, spec: Spec) -> Tiling:
        """The tiling of a tensor with this partition spec."""
        sizes = self.degrees.sizes
        cutting = [axis for axes in spec for axis in axes]
        unknown = [axis for axis in cutting if axis not in sizes]
        if unknown:
            raise SpmdMeshError(
                f"the mesh has no axis {unknown[0]!r}; its axes are {', '.join(sizes)}"
            )
        twice = [axis for axis, count in Counter(cutting).items() if count > 1]
        if twice:
            raise SpmdMeshError(
                f"the spec {spec} uses the axis {twice[0]!r} twice: an axis can shard only one dim"
            )
        order = [*cutting, *(axis for axis in sizes if axis not in cutting)]
        places = torch.tensor(self.devices).view(tuple(sizes.values()))
        moved = places.permute([list(sizes).index(axis) for axis in order])
        tiles = tuple(prod(sizes[axis] for axis in axes) for axes in spec)
        return Tiling(tiles, tuple(moved.flatten().tolist()))

    def spec_of(self, tiling: Tiling) -> Spec | None:
        """The partition spec of a tiling; None if it does not follow the axes."""
        sizes = self.degrees.sizes
        if sorted(tiling.devices) != sorted(self.devices):
            return None
        tile_of = tiling.tile_of
        here = tile_of[self.devices[0]]
        spec: list[list[tuple[int, str]]] = [[] for _ in tiling.tiles]
        for axis, size in sizes.items():
            there = tile_of[self.devices[self.degrees.rank({axis: 1})]] if size > 1 else here
            moves = [(dim, b - a) for dim, (a, b) in enumerate(zip(here, there, strict=True))]
            moved = [(dim, by) for dim, by in moves if by]
            if len(moved) > 1:
                return None
            for dim, by in moved:
                spec[dim].append((by, axis))
        # Of one dim, the axis that moves furthest is the outermost.
        found = tuple(tuple(axis for _, axis in sorted(of, reverse=True)) for of in spec)
        same = self.tiling(found)
        return found if (same.tiles, same.tile_of) == (tiling.tiles, tile_of) else None

    @property
    def xla(self) -> "XlaMesh":
        """This mesh as a torch_xla mesh, for `xs.mark_sharding`."""
        import torch_xla.distributed.spmd as xs

        sizes = self.degrees.axes
        return xs.Mesh(list(self.devices), tuple(sizes.values()), tuple(sizes))


def build_spmd(
    *,
    tp: int = 1,
    ep: int = 1,
    pp: int = 1,
    replicate: int = 1,
    sequence_parallel: bool = False,
    expert_tensor_parallel: int = 0,
    ep_carries_data: bool = True,
    across_slices: bool = False,
    mesh: "XlaMesh | None" = None,
) -> SpmdMesh:
    """Divide the devices of this program, after `torch_xla.runtime.use_spmd()`.

    The arguments are those of `samestep.mesh.build`, where a device stands for a rank.

    Args:
        tp, ep, replicate, sequence_parallel, expert_tensor_parallel, ep_carries_data: As there.
        pp: 1: a program has no stages.
        across_slices: Allow axes model and expert that span slices of devices.
        mesh: A mesh of torch_xla's whose order of devices is taken, such as an `xs.HybridMesh`.
            Its axes have the names of ours, and their sizes; those of one device may be left out.
    """
    known = runtime.spmd_devices()
    if pp != 1:
        raise DegreesError(
            f"pp is {pp}, and pipeline stages are not supported in one XLA program: "
            "leave pp out, and shard with tp, ep and the data axis"
        )
    degrees = Degrees(
        len(known), pp, replicate, ep, tp, sequence_parallel, expert_tensor_parallel,
        ep_carries_data,
    )  # fmt: skip
    devices = tuple(known) if mesh is None else devices_of(mesh, degrees, tuple(known))
    slices = tuple(known[device] for device in devices)
    if not across_slices:
        try:
            require_local_groups(degrees, slices)
        except DegreesError as error:
            raise DegreesError(_of_devices(str(error))) from None
    return SpmdMesh(degrees, devices, slices)


def devices_of(mesh: Any, degrees: Degrees, known: Sequence[int]) -> tuple[int, ...]:
    """Devices of a torch_xla mesh in the order of the axes; raises if they do not fit."""
    names, shape = mesh.axis_names, tuple(mesh.mesh_shape)
    sizes = {axis: size for axis, size in degrees.sizes.items() if axis != "pipe"}
    wanted = ", ".join(f"{axis} {size}" for axis, size in degrees.axes.items())
    if names is None:
        raise SpmdMeshError(
            f"the axes of the given mesh {shape} have no names: name them ({wanted})"
        )
    given = dict(zip(names, shape, strict=True))
    problems = [
        f"it has an axis {axis!r}, and ours are {', '.join(sizes)}"
        for axis in given
        if axis not in sizes
    ]
    problems += [
        f"its axis {axis!r} has {given.get(axis, 1)} devices, and it needs {size}"
        for axis, size in sizes.items()
        if given.get(axis, 1) != size
    ]
    ids = [int(device) for device in torch.as_tensor(mesh.device_ids).flatten()]
    if sorted(ids) != sorted(known):
        problems.append(
            f"it has the devices {sorted(ids)}, and the program has {sorted(known)}, of which a "
            "mesh has each once"
        )
    if problems:
        raise SpmdMeshError(
            f"the given mesh does not fit: {'; '.join(problems)}. Build one with the "
            f"axes {wanted}, or leave mesh= out"
        )
    order = [list(given).index(axis) for axis in sizes if axis in given]
    return tuple(torch.tensor(ids).view(shape).permute(order).flatten().tolist())


def _of_devices(text: str) -> str:
    """Rewrite an error about ranks for devices."""
    for old, new in (
        ("inside a host", "inside a slice"),
        ("ranks ", "devices "),
        ("across_hosts", "across_slices"),
    ):
        text = text.replace(old, new)
    return text
