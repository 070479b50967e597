"""Checks, area by area: each finding is fine, worth a note, or broken with its way out."""

import os
import platform
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import samestep
from samestep.comm.nccl import library_version, sharing_problem
from samestep.doctor.trials import CLOSE, step_on, step_on_two_ranks
from samestep.groups.distribution import Distribution
from samestep.kernels.choice import missing, missing_products
from samestep.launch import RanksFailed, torchrun_rank
from samestep.models.gpt import GPT, GPTConfig
from samestep.rules.orthogonalize import default_compute_dtype
from samestep.tooling.pages import INSTALL
from samestep.tooling.request import in_one_line
from samestep.version import PYTHON, TORCH
from samestep.xla import runtime

State = Literal["ok", "note", "broken"]
REPORT = "report it as a bug, with the output of `samestep doctor --json`"
COMMANDS_NEED = ("rich", "matplotlib", "jinja2", "jsonschema")
SHOWN = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME",
    "SAMESTEP_KERNELS", "SLURM_JOB_ID", "SLURM_NNODES", "SLURM_NTASKS", "SLURM_PROCID",
    "SLURM_LOCALID",
)  # fmt: skip


class Check(NamedTuple):
    """One finding; `way_out` says what to do about one that is not ok."""

    name: str
    value: str
    state: State = "ok"
    way_out: str = ""
    area: str = ""  # as `every` names it


def note(name: str, value: str, way_out: str) -> Check:
    return Check(name, value, "note", way_out)


def broken(name: str, value: str, way_out: str) -> Check:
    return Check(name, value, "broken", way_out)


def versions() -> Iterator[Check]:
    running = f"{platform.python_version()} on {platform.platform()}"
    yield _supported("python", running, sys.version_info[:2], PYTHON)
    yield Check("samestep", samestep.__version__)
    found = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    built = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    platforms = [f"{name} {version}" for name, version in built.items() if version]
    value = f"{torch.__version__}, built for {platforms[0] if platforms else 'CPU'}"
    yield _supported("torch", value, found, TORCH)
    triton = _version("triton")
    if triton is None and torch.cuda.device_count():
        way_out = (
            "pip install triton: without it steps on a GPU run in plain torch, and take longer"
        )
        yield note("triton", "not installed", way_out)
    else:
        yield Check("triton", triton or "not installed; only kernels on a GPU need it")
    lacking = [name for name in COMMANDS_NEED if _version(name) is None]
    if lacking:
        value = f"without {', '.join(lacking)}, which some commands need"
        yield note("command packages", value, INSTALL)
    else:
        shown = ", ".join(f"{name} {_version(name)}" for name in COMMANDS_NEED)
        yield Check("command packages", shown)


def _supported(
    name: str,
    value: str,
    found: tuple[int, ...],
    supported: tuple[tuple[int, int], tuple[int, int]],
) -> Check:
    """Too old a version is broken, and one that the tests have not met is worth a note."""
    oldest, newest = (".".join(map(str, version)) for version in supported)
    if found < supported[0]:
        return broken(name, value, f"install {name} {oldest} or newer, at most {newest}")
    if found > supported[1]:
        return note(name, value, f"not tested with this version; {oldest} to {newest} are")
    return Check(name, value)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def backends() -> Iterator[Check]:
    if not dist.is_available():
        way_out = "install a torch that has torch.distributed, as the wheels for Linux do"
        yield broken("torch.distributed", "not in this torch", way_out)
        return
    if dist.is_gloo_available():
        yield Check("gloo", "available")
    else:
        way_out = "install a torch with gloo: ranks on CPU, and all checks, need it"
        yield broken("gloo", "not available", way_out)
    loaded = library_version()
    if loaded is not None:
        yield Check("nccl", ".".join(map(str, loaded)))
        problem = sharing_problem()
        if problem is None:
            yield Check(
                "nccl, shared GPUs", "available: samestep stress --backend nccl --share-gpus"
            )
        elif torch.cuda.device_count():
            yield Check("nccl, shared GPUs", f"not available: {problem}")
    elif torch.cuda.device_count():
        yield note("nccl", "not available", "install a torch with NCCL to use several GPUs")
    else:
        yield Check("nccl", "not available; there is no GPU that needs it")
    mpi = "available" if dist.is_mpi_available() else "not available; samestep does not use it"
    yield Check("mpi", mpi)
    reason = runtime.missing()
    yield Check("xla", "available" if reason is None else f"not available: {reason}")


def topology() -> Iterator[Check]:
    """Checks the environment variables of launchers for contradictions."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Check("cores", f"{cores} for this process")
    for name in SHOWN:
        if name in os.environ:
            yield Check(name, os.environ[name])
    half = {"RANK", "WORLD_SIZE"} & os.environ.keys()
    if len(half) == 1:
        (there,) = half
        (absent,) = {"RANK", "WORLD_SIZE"} - half
        way_out = f"start ranks with torchrun, which sets both, or unset {there}"
        yield broken("ranks", f"{there} is set and {absent} is not", way_out)
        return
    try:
        place = torchrun_rank()
    except ValueError as error:
        way_out = "start ranks with torchrun, or unset RANK and WORLD_SIZE"
        yield broken("ranks", str(error), way_out)
        return
    if place is None:
        tasks = os.environ.get("SLURM_NTASKS", "1")
        if tasks not in ("", "1"):
            value = f"Slurm has {tasks} tasks and RANK is not set: each task trains alone"
            way_out = (
                "torch does not read SLURM_*: start one task per host, and let srun start torchrun "
                "there"
            )
            yield note("ranks", value, way_out)
        else:
            yield Check("ranks", "one process: RANK is not set")
        return
    local, gpus = place.local_world_size, torch.cuda.device_count()
    text = f"rank {place.rank} of {place.world_size}, {local} on this host"
    if gpus and local > gpus:
        way_out = f"torchrun --nproc-per-node {gpus}, or fewer: NCCL needs a GPU for every rank"
        yield broken("ranks", f"{text}, and {gpus} GPUs", way_out)
    elif place.world_size % local:
        way_out = "start the same number of ranks on every host: two_levels=True needs that"
        yield note("ranks", text, way_out)
    else:
        yield Check("ranks", text)
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and cores and int(threads) * local > cores:
        way_out = f"set OMP_NUM_THREADS={max(1, cores // local)}: there are more threads than cores"
        yield note(
            "threads", f"{local} ranks with {threads} threads each on {cores} cores", way_out
        )


def ranks(timeout: float) -> Iterator[Check]:
    """Two ranks over gloo take a step, each with gradients of its own."""
    name = "2 ranks over gloo"
    if not (dist.is_available() and dist.is_gloo_available()):
        return
    try:
        same = step_on_two_ranks(timeout)
    except RanksFailed as error:
        last = [report.strip().splitlines()[-1] for report in error.reports.values()]
        way_out = (
            "set GLOO_SOCKET_IFNAME=lo (or another network interface that is up); if ranks did not "
            "finish in time on a busy machine, give --timeout 120"
        )
        yield broken(name, f"{len(last)} of 2 ranks failed: {last[0]}", way_out)
    except RuntimeError as error:  # not on Linux
        yield note(name, f"not tried: {error}", "start ranks with torchrun, which works everywhere")
    else:
        if same:
            yield Check(name, "MuonAdamW steps as one process does, bit for bit")
        else:
            yield broken(name, "MuonAdamW steps otherwise than one process does", REPORT)


def gpus() -> Iterator[Check]:
    """Checks the GPUs that torch sees, the links between them, and a step on each."""
    count = torch.cuda.device_count()
    if not count:
        if not Path("/proc/driver/nvidia/version").exists():
            yield Check("gpus", "none")
        elif torch.version.cuda is None:
            way_out = "install a torch for CUDA to use it: https://pytorch.org/get-started/locally"
            yield note("gpus", "there is an NVIDIA driver, and this torch is for CPU only", way_out)
        else:
            hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
            way_out = "compare the driver's CUDA version (`nvidia-smi`) with torch.version.cuda"
            if hidden is not None:
                way_out = f"unset CUDA_VISIBLE_DEVICES, which is {hidden!r} and hides GPUs"
            yield note("gpus", "there is an NVIDIA driver, and torch sees no GPU", way_out)
        return
    for number in range(count):
        yield _gpu(number)
    for number in range(count) if count > 1 else ():
        others = [other for other in range(count) if other != number]
        reached = [o for o in others if torch.cuda.can_device_access_peer(number, o)]
        if reached == others:
            yield Check(f"peers of cuda:{number}", "all other GPUs directly")
            continue
        through = sorted(set(others) - set(reached))
        value = f"directly: {reached or 'none'}; through the host: {through}"
        topology = "nvidia-smi topo -m" if torch.version.hip is None else "rocm-smi --showtopo"
        way_out = f"`{topology}` shows the links; collectives between these GPUs are slower"
        yield note(f"peers of cuda:{number}", value, way_out)


def _gpu(number: int) -> Check:
    device, name = torch.device("cuda", number), f"cuda:{number}"
    try:
        facts = torch.cuda.get_device_properties(device)
        free, everything = torch.cuda.mem_get_info(device)
        away = step_on(device)
    except Exception as error:
        tool = "nvidia-smi" if torch.version.hip is None else "rocm-smi"
        way_out = f"`{tool}` shows whether the GPU is in use or has failed"
        return broken(name, in_one_line(error), way_out)
    memory = f"{free / 1e9:.0f} of {everything / 1e9:.0f} GB free"
    text = f"{facts.name}, sm_{facts.major}{facts.minor}, {memory}; a step is"
    if away < CLOSE:
        return Check(name, f"{text} that of the CPU within {away:.1%}")
    way_out = f"set SAMESTEP_KERNELS=0, which runs plain torch, and {REPORT}"
    return broken(name, f"{text} {away:.1%} away from that of the CPU", way_out)


def kernels() -> Iterator[Check]:
    """Checks whether Triton kernels would run, and gives the reason where not."""
    devices = [torch.device("cuda", n) for n in range(torch.cuda.device_count())]
    for device in devices or [torch.device("cpu")]:
        reasons = {"step": missing(device), "matmul": missing_products(device)}
        for what, reason in reasons.items():
            name = f"{what} on {device}"
            if reason is None:
                yield Check(name, "Triton kernels")
            elif device.type == "cuda" and reason == "triton is not installed":
                yield note(name, f"plain torch: {reason}", "pip install triton")
            elif device.type == "cuda" and reason.startswith("SAMESTEP_KERNELS"):
                yield note(name, f"plain torch: {reason}", "unset SAMESTEP_KERNELS")
            else:
                yield Check(name, f"plain torch: {reason}")


def default_run(make: Callable[[], object] | None, name: str) -> Iterator[Check]:
    """Shows how `MuonAdamW(model, lr=...)` would treat a model on this machine."""
    model = GPT(GPTConfig()) if make is None else make()
    if not isinstance(model, nn.Module):
        way_out = "give a function that returns a torch.nn.Module"
        yield broken("model", f"{name} gave a {type(model).__name__}", way_out)
        return
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        optimizer = samestep.MuonAdamW(model, lr=3e-4, deferred=True)
    params = list(model.parameters())
    count = sum(param.numel() for param in params)
    yield Check("model", f"{name}: {len(params)} parameters, {count:,} elements")
    for line in optimizer.table().splitlines():
        if found := re.match(r"(\w+): (\d.*)", line):
            yield Check(found[1], found[2])
    for warning in said:
        text = " ".join(str(warning.message).split())
        way_out = "print(opt.table()) shows the rule of every parameter; docs/rules.md explains"
        yield note("warning", text, way_out)
    device = torch.device("cuda" if torch.cuda.device_count() else "cpu")
    dtype = default_compute_dtype(torch.float32, device.type)
    yield Check("Muon computes in", f"{str(dtype).removeprefix('torch.')} on {device.type}")
    usual = Distribution()
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    shared = "one process, nothing is sharded" if alone else "zero2, state is sharded over ranks"
    text = f"sharding={usual.sharding!r} ({shared})"
    yield Check("options", f"{text}, reduction={usual.reduction!r}, buffers={usual.buffers!r}")


def every(make: Callable[[], object] | None, model: str, timeout: float) -> Iterator[Check]:
    """Yields the checks of all areas; ranks are forked before a GPU is touched."""
    areas: dict[str, Callable[[], Iterator[Check]]] = {
        "versions": versions,
        "backends": backends,
        "topology": topology,
        "ranks": lambda: ranks(timeout),
        "gpus": gpus,
        "kernels": kernels,
        "MuonAdamW(model) by default": lambda: default_run(make, model),
    }
    for area, look in areas.items():
        try:
            for check in look():
                yield check._replace(area=area)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            value = f"{in_one_line(error)} at {Path(last.filename).name}:{last.lineno}"
            yield broken("the check raised", value, REPORT)._replace(area=area)
