"""What there is, area by area: each finding is fine, worth a note, or broken with its way out."""

import os
import platform
import re
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
from samestep.doctor.trials import CLOSE, step_on, step_on_two_ranks
from samestep.groups.distribution import Distribution
from samestep.kernels.choice import missing, missing_products
from samestep.launch import RanksFailed, torchrun_rank
from samestep.models.gpt import GPT, GPTConfig
from samestep.rules.orthogonalize import default_compute_dtype
from samestep.tooling.factories import in_one_line
from samestep.tooling.pages import INSTALL
from samestep.xla import runtime

State = Literal["ok", "note", "broken"]
LEAST_TORCH = (2, 9)
COMMANDS_NEED = ("rich", "tyro", "matplotlib", "jinja2", "jsonschema")
SHOWN = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME",
    "SAMESTEP_KERNELS", "SLURM_JOB_ID", "SLURM_NNODES", "SLURM_NTASKS", "SLURM_PROCID",
    "SLURM_LOCALID",
)  # fmt: skip


class Check(NamedTuple):
    """One thing that was looked at; what is not ok says in `way_out` what to do."""

    area: str
    name: str
    value: str
    state: State = "ok"
    way_out: str = ""


def versions() -> Iterator[Check]:
    area = "versions"
    yield Check(area, "python", f"{platform.python_version()} on {platform.platform()}")
    yield Check(area, "samestep", samestep.__version__)
    found = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    state: State = "ok" if found >= LEAST_TORCH else "broken"
    built = torch.version.cuda or torch.version.hip
    value = f"{torch.__version__}, built " + (f"for CUDA {built}" if built else "for CPU")
    yield Check(area, "torch", value, state, "" if state == "ok" else 'pip install "torch>=2.9"')
    triton = _version("triton")
    if triton is None and torch.cuda.device_count():
        yield Check(
            area, "triton", "not installed", "note",
            "pip install triton: without it steps on a GPU run in plain torch, and take longer",
        )  # fmt: skip
    else:
        yield Check(area, "triton", triton or "not installed; only kernels on a GPU need it")
    lacking = [name for name in COMMANDS_NEED if _version(name) is None]
    if lacking:
        value = f"without {', '.join(lacking)}, which some commands need"
        yield Check(area, "of commands", value, "note", INSTALL)
    else:
        shown = ", ".join(f"{name} {_version(name)}" for name in COMMANDS_NEED)
        yield Check(area, "of commands", shown)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def backends() -> Iterator[Check]:
    area = "backends"
    if not dist.is_available():
        yield Check(
            area, "torch.distributed", "not in this torch", "broken",
            "install a torch that was built with it, as the wheels for Linux are",
        )  # fmt: skip
        return
    gloo = dist.is_gloo_available()
    way_out = "" if gloo else "install a torch with gloo: ranks on CPU, and all checks, need it"
    yield Check(area, "gloo", "yes" if gloo else "no", "ok" if gloo else "broken", way_out)
    gpus = torch.cuda.device_count()
    if dist.is_nccl_available():
        yield Check(area, "nccl", ".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]
    elif gpus:
        yield Check(area, "nccl", "no", "note", "install a torch with NCCL to use several GPUs")
    else:
        yield Check(area, "nccl", "no, and no GPU that would need it")
    yield Check(area, "mpi", "yes" if dist.is_mpi_available() else "no, and nothing needs it")
    reason = runtime.missing()
    yield Check(area, "xla", "yes" if reason is None else f"no: {reason}")


def topology() -> Iterator[Check]:
    """What launchers say in the environment, and whether it can be true."""
    area = "topology"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Check(area, "cores", f"{cores} for this process")
    for name in SHOWN:
        if name in os.environ:
            yield Check(area, name, os.environ[name])
    half = {"RANK", "WORLD_SIZE"} & os.environ.keys()
    if len(half) == 1:
        (there,) = half
        (absent,) = {"RANK", "WORLD_SIZE"} - half
        yield Check(
            area, "ranks", f"{there} is set and {absent} is not", "broken",
            f"start ranks with torchrun, which sets both, or unset {there}",
        )  # fmt: skip
        return
    try:
        place = torchrun_rank()
    except ValueError as error:
        way_out = "start ranks with torchrun, or unset RANK and WORLD_SIZE"
        yield Check(area, "ranks", str(error), "broken", way_out)
        return
    if place is None:
        tasks = os.environ.get("SLURM_NTASKS", "1")
        if tasks not in ("", "1"):
            yield Check(
                area, "ranks", f"Slurm has {tasks} tasks, and no RANK is set: each is alone",
                "note",
                "torch does not read SLURM_*: have one task a host, and let srun start torchrun",
            )  # fmt: skip
        else:
            yield Check(area, "ranks", "one process: no launcher has set RANK")
        return
    local, gpus = place.local_world_size, torch.cuda.device_count()
    text = f"rank {place.rank} of {place.world_size}, {local} on this host"
    if gpus and local > gpus:
        way_out = f"--nproc-per-node {gpus}, or fewer: NCCL wants a GPU for every rank"
        yield Check(area, "ranks", f"{text}, and {gpus} GPUs", "broken", way_out)
    elif place.world_size % local:
        way_out = "give every host as many ranks: two levels of reduction need that"
        yield Check(area, "ranks", text, "note", way_out)
    else:
        yield Check(area, "ranks", text)
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and cores and int(threads) * local > cores:
        yield Check(
            area, "threads", f"{local} ranks of {threads} threads on {cores} cores", "note",
            f"OMP_NUM_THREADS={max(1, cores // local)}: ranks take the cores from each other",
        )  # fmt: skip


def ranks(timeout: float) -> Iterator[Check]:
    """Two ranks over gloo take a step, each with gradients of its own."""
    area, name = "ranks", "2 ranks over gloo"
    if not (dist.is_available() and dist.is_gloo_available()):
        return
    try:
        same = step_on_two_ranks(timeout)
    except RanksFailed as error:
        last = [report.strip().splitlines()[-1] for report in error.reports.values()]
        yield Check(
            area, name, f"{len(last)} failed: {last[0]}", "broken",
            "GLOO_SOCKET_IFNAME=lo (or another interface that is up); if they did not finish, try "
            "--timeout 120 on a busy machine",
        )  # fmt: skip
    except RuntimeError as error:  # not on Linux
        yield Check(area, name, f"not tried: {error}", "note", "torchrun starts ranks everywhere")
    else:
        wrong = "a step of MuonAdamW is not that of one process"
        text = "a step of MuonAdamW is that of one process, bit for bit"
        way_out = "" if same else "report it, with `samestep doctor --json`"
        yield Check(area, name, text if same else wrong, "ok" if same else "broken", way_out)


def gpus() -> Iterator[Check]:
    """What torch sees, how cards reach each other, and whether each computes a step."""
    area, count = "gpus", torch.cuda.device_count()
    if not count:
        driver = Path("/proc/driver/nvidia/version").exists()
        if not driver:
            yield Check(area, "gpus", "none")
        elif torch.version.cuda is None:
            way_out = "install a torch for CUDA to use it: https://pytorch.org/get-started/locally"
            yield Check(area, "gpus", "a driver, and this torch is for CPU", "note", way_out)
        else:
            hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
            way_out = "is the driver old for this CUDA? `nvidia-smi` tells its version"
            if hidden is not None:
                way_out = f"CUDA_VISIBLE_DEVICES={hidden!r} hides cards: unset it"
            yield Check(area, "gpus", "there is a driver, and torch sees no GPU", "note", way_out)
        return
    for number in range(count):
        yield from _gpu(area, number)
    for number in range(count):
        others = [other for other in range(count) if other != number]
        reached = [o for o in others if torch.cuda.can_device_access_peer(number, o)]
        if not others:
            break
        if reached == others:
            yield Check(area, f"{number} reaches", "all others directly")
            continue
        through = sorted(set(others) - set(reached))
        yield Check(
            area, f"{number} reaches",
            f"directly: {reached or 'none'}, through the host: {through}", "note",
            "`nvidia-smi topo -m` tells why; steps on these ranks take longer",
        )  # fmt: skip


def _gpu(area: str, number: int) -> Iterator[Check]:
    device = torch.device("cuda", number)
    try:
        facts = torch.cuda.get_device_properties(device)
        free, everything = torch.cuda.mem_get_info(device)
        away = step_on(device)
    except Exception as error:
        way_out = "`nvidia-smi` tells whether it is in use or has failed"
        yield Check(area, f"cuda:{number}", in_one_line(error), "broken", way_out)
        return
    memory = f"{free / 1e9:.0f} of {everything / 1e9:.0f} GB free"
    text = f"{facts.name}, {facts.major}.{facts.minor}, {memory}"
    if away < CLOSE:
        yield Check(area, f"cuda:{number}", f"{text}; a step is that of the CPU within {away:.1%}")
    else:
        yield Check(
            area, f"cuda:{number}", f"{text}; a step is {away:.1%} away from that of the CPU",
            "broken",
            "SAMESTEP_KERNELS=0 runs plain torch; report it, with `samestep doctor --json`",
        )  # fmt: skip


def kernels() -> Iterator[Check]:
    """Whether Triton kernels would run, and if not, why."""
    area = "kernels"
    devices = [torch.device("cuda", n) for n in range(torch.cuda.device_count())]
    for device in devices or [torch.device("cpu")]:
        for name, reason in (
            (f"step on {device}", missing(device)),
            (f"products on {device}", missing_products(device)),
        ):
            if reason is None:
                yield Check(area, name, "kernels")
            elif device.type == "cpu":
                yield Check(area, name, f"plain torch: {reason}")
            else:
                way_out = {"triton is not installed": "pip install triton"}.get(reason, "")
                if reason.startswith("SAMESTEP_KERNELS"):
                    way_out = "unset SAMESTEP_KERNELS"
                state: State = "note" if way_out else "ok"
                yield Check(area, name, f"plain torch: {reason}", state, way_out)


def default_run(make: Callable[[], object] | None, name: str) -> Iterator[Check]:
    """What `MuonAdamW(model, lr=...)` would do with a model, here."""
    area = "by default"
    model = GPT(GPTConfig()) if make is None else make()
    if not isinstance(model, nn.Module):
        way_out = "name a function that returns a torch.nn.Module"
        yield Check(area, "model", f"{name} gave a {type(model).__name__}", "broken", way_out)
        return
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        optimizer = samestep.MuonAdamW(model, lr=3e-4, deferred=True)
    params = list(model.parameters())
    count = sum(param.numel() for param in params)
    yield Check(area, "model", f"{name}: {len(params)} parameters, {count:,} elements")
    for line in optimizer.table().splitlines():
        if found := re.match(r"(\w+): (\d.*)", line):
            yield Check(area, found[1], found[2])
    for warning in said:
        text = " ".join(str(warning.message).split())
        way_out = "docs/routing.md; print(opt.table()) shows every parameter"
        yield Check(area, "warning", text, "note", way_out)
    device = torch.device("cuda" if torch.cuda.device_count() else "cpu")
    dtype = default_compute_dtype(torch.empty(0, device=device))
    yield Check(area, "Muon's products", f"{str(dtype).removeprefix('torch.')} on {device.type}")
    usual = Distribution()
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    shared = "one process: nothing is shared" if alone else "zero2, each rank a part of the state"
    text = f"{shared} (sharding={usual.sharding!r})"
    yield Check(area, "ranks", f"{text}, reduction={usual.reduction!r}, buffers={usual.buffers!r}")


def every(make: Callable[[], object] | None, model: str, timeout: float) -> Iterator[Check]:
    """All areas; ranks are forked before a GPU is touched."""
    areas: dict[str, Callable[[], Iterator[Check]]] = {
        "versions": versions,
        "backends": backends,
        "topology": topology,
        "ranks": lambda: ranks(timeout),
        "gpus": gpus,
        "kernels": kernels,
        "by default": lambda: default_run(make, model),
    }
    for area, look in areas.items():
        try:
            yield from look()
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            value = f"{in_one_line(error)} at {Path(last.filename).name}:{last.lineno}"
            yield Check(area, "raised", value, "broken", "report it, with `samestep doctor --json`")
