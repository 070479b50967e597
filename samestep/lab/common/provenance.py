"""The code, the versions and the machine that a receipt records."""

import hashlib
import os
import platform
import subprocess
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

import samestep
from samestep.version import __version__

PACKAGE = Path(samestep.__file__).parent
SUFFIXES = (".py", ".json")
FOLDERS = ("_DIRECTORY", "_DIR", "_HOME", "_PATH")  # of a machine, which decide no result
ENVIRONMENT = (
    "CUDA_", "GLOO_", "MKL_", "NCCL_", "OMP_", "PJRT_", "PYTORCH_", "SAMESTEP_",
    "TORCH_", "XLA_",
)  # fmt: skip


def versions() -> dict[str, str]:
    numbers = __version__, torch.__version__, platform.python_version()
    return dict(zip(("samestep", "torch", "python"), numbers, strict=True))


def machine() -> dict[str, Any]:
    relevant = {
        key: value
        for key, value in sorted(os.environ.items())
        if key.startswith(ENVIRONMENT) and not key.endswith(FOLDERS)
    }
    xla = {"torch_xla": version("torch_xla")} if find_spec("torch_xla") else {}
    return {
        "versions": versions() | xla,
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "environment": relevant,
    }


def code_digest(make_model: Callable[[], nn.Module] | None = None, folder: Path = PACKAGE) -> str:
    """Return a digest of a package's files, and of a user's model before training."""
    digest = _of_files(folder).copy()
    if make_model is not None:
        for name, param in make_model().named_parameters():
            digest.update(f"{name} {tuple(param.shape)}\n".encode())
            digest.update(param.detach().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


@cache  # what has been imported does not change with its file
def _of_files(folder: Path) -> "hashlib._Hash":
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(content)}\n".encode() + content)
    return digest


def commit(folder: Path = PACKAGE) -> str | None:
    """Return the commit of the code, with a + if files were changed since; None outside of git."""
    try:
        _git(folder, "ls-files", "--error-unmatch", "__init__.py")  # not just inside a repository
        changed = _git(folder, "status", "--porcelain", "--", ".")
        return _git(folder, "rev-parse", "HEAD") + "+" * bool(changed)
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), *words]
    return subprocess.run(
        command, capture_output=True, check=True, text=True, timeout=10
    ).stdout.strip()
