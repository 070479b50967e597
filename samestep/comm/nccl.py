"""NCCL: its version, whether ranks may share a GPU, torch's own record of it, and the abort.

The private functions of torch that this needs are all here: there is no public way to ask which
collectives of torch itself, such as FSDP2's, are in flight.
"""

import ctypes
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress

import torch
import torch.distributed as dist


def operations_in_flight(seconds: float) -> Sequence[str]:
    """Return torch's collectives in flight for more than `seconds`, oldest first, as text.

    Torch records them by itself, as long as TORCH_NCCL_TRACE_BUFFER_SIZE is not 0.
    """
    with suppress(AttributeError, ImportError, ValueError, KeyError, TypeError):
        from torch._C._distributed_c10d import _dump_nccl_trace_json  # type: ignore[attr-defined]

        trace = json.loads(_dump_nccl_trace_json(includeCollectives=True, onlyActive=True))
        before = time.time_ns() - seconds * 1e9
        entries = [
            entry
            for entry in trace.get("entries", [])
            if entry["time_created_ns"] < before and entry["state"] != "completed"
        ]
        return [
            f"{entry['profiling_name']} of {entry['input_sizes']} in group "
            f"{entry['process_group'][1] or entry['process_group'][0]}"
            for entry in entries
        ]
    return ()


def abort() -> None:
    """Abort the communicators of all groups, so that the device stops waiting for other ranks."""
    from torch.distributed.distributed_c10d import _world

    for group in list(_world.pg_map):
        with suppress(Exception):
            group._get_backend(torch.device("cuda")).abort()


def library_version() -> tuple[int, int, int] | None:
    """Return the version of the NCCL that is loaded; None without NCCL.

    `torch.cuda.nccl.version()` is the version at torch's build, also where another was preloaded.
    """
    if not dist.is_nccl_available():
        return None
    for name in (None, "libnccl.so.2"):
        with suppress(OSError, AttributeError):
            number = ctypes.c_int()
            ctypes.CDLL(name).ncclGetVersion(ctypes.byref(number))
            major, rest = divmod(number.value, 10000)
            return major, *divmod(rest, 100)
    return None


# The first version in which several ranks may share a GPU, if the environment allows it.
SHARES_GPUS, ALLOWS_SHARING = (2, 30, 0), "NCCL_MULTI_RANK_GPU_ENABLE"


def sharing_problem() -> str | None:
    """Return why NCCL would refuse several ranks on one GPU, with a remedy, or None."""
    found = library_version()
    if found is None:
        return "this torch has no NCCL"
    if found < SHARES_GPUS:
        return (
            f"NCCL {'.'.join(map(str, found))} wants a GPU for every rank; from 2.30 on ranks may "
            "share one: pip install --target DIR nvidia-nccl-cu13==2.31.2, and start with "
            "LD_PRELOAD=DIR/nvidia/nccl/lib/libnccl.so.2"
        )
    if os.environ.get(ALLOWS_SHARING) != "1":
        return f"NCCL lets ranks share a GPU only with {ALLOWS_SHARING}=1 in the environment"
    return None
