"""The XLA runtime: its presence, its devices, counts of compilations and reads, shards."""

import os
import platform
import sys
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from samestep.xla.tiling import spec_of

# What its CPU client and partitioner write to the terminal at every program.
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}


def missing() -> str | None:
    """Return the reason why XLA is unavailable; None if it is available."""
    if find_spec("torch_xla") is not None:
        return None
    return (
        "torch_xla is not installed; it has wheels for CPython 3.11 on x86 with torch 2.9; this "
        f"is {sys.implementation.name} {platform.python_version()} on {platform.machine()} with "
        f"torch {torch.__version__} (docs/xla.md)"
    )


def start(devices: int) -> torch.device:
    """Start XLA on a number of devices in this process, which has not used XLA before.

    If PJRT_DEVICE is not set, the devices are virtual CPU devices. Two or more devices run one
    program (SPMD), in which tensors are global. Return the torch device.
    """
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    if os.environ["PJRT_DEVICE"] == "CPU":
        os.environ["CPU_NUM_DEVICES"] = str(devices)
    for key, value in QUIET.items():
        os.environ.setdefault(key, value)
    import torch_xla
    import torch_xla.runtime as xr

    if devices > 1:
        xr.use_spmd()
    found = xr.global_runtime_device_count()
    if found != devices:
        raise RuntimeError(f"{devices} XLA devices were requested, and the runtime has {found}")
    device: torch.device = torch_xla.device()
    return device


def spmd_devices() -> dict[int, str]:
    """Return the slice of each device of this SPMD program, by device id."""
    reason = missing()
    if reason is not None:
        raise RuntimeError(f"a mesh of XLA devices cannot be made: {reason}")
    import torch_xla.runtime as xr

    if not xr.is_spmd():
        raise RuntimeError(
            "a mesh of XLA devices needs SPMD mode: call torch_xla.runtime.use_spmd() "
            "before the first tensor is on XLA"
        )
    found = {}
    for attributes in xr.global_runtime_device_attributes():
        number = int(str(attributes["name"]).rpartition(":")[2])
        found[number] = f"slice{attributes.get('slice_index', 0)}"
    return dict(sorted(found.items()))


def sync() -> None:
    """Run all pending operations, as one program."""
    import torch_xla

    torch_xla.sync()


def programs() -> int:
    """Return the number of programs that this process has compiled."""
    return _count("CompileTime")


def host_reads() -> int:
    """Return the number of transfers from a device for which the host has waited."""
    return _count("TransferFromDeviceTime")


def _count(metric: str) -> int:
    import torch_xla.debug.metrics as metrics

    found = metrics.metric_data(metric)
    return 0 if found is None else int(found[0])


def held_by(tensor: Tensor) -> list[Tensor]:
    """Return each device's shard of a tensor, with its padding, on the host; or all of it."""
    return [shard.data for shard in _shards(tensor)] or [tensor.cpu()] * _devices()


def seen_by(tensor: Tensor) -> list[Tensor]:
    """Return the whole tensor as each device would assemble it, on the host.

    Elements come from the device's own shard, or else from the first device that holds them.
    """
    parts = []
    for shard in _shards(tensor):
        place = (...,) if shard.indices is Ellipsis else tuple(shard.indices)
        sizes = [slice(0, s.stop - s.start) for s in place if isinstance(s, slice)]
        parts.append((place, shard.data[tuple(sizes)]))  # without its padding
    if not parts:
        return [tensor.detach().cpu()] * _devices()
    first = torch.empty(tensor.shape, dtype=tensor.dtype)
    for place, part in reversed(parts):
        first[place] = part
    found = []
    for place, part in parts:
        own = first.clone()
        own[place] = part
        found.append(own)
    return found


def _devices() -> int:
    import torch_xla.runtime as xr

    return int(xr.global_runtime_device_count()) if xr.is_spmd() else 1


def _shards(tensor: Tensor) -> list[Any]:
    """Return a tensor's shards by device; none without a sharding annotation or SPMD."""
    import torch_xla
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    torch_xla.sync(wait=True)
    if not xr.is_spmd() or not spec_of(tensor):
        return []
    return list(xs.XLAShardedTensor(tensor.detach()).local_shards)
