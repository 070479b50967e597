"""Other people's packages, from checkouts that the user names; none of their code is here."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("nanochat", "dion", "gram_newton_schulz")
GRAPHS = 256  # one set of parameters has many shapes, and each may be a graph of its own


def make_importable(paths: Sequence[Path]) -> None:
    """Let peers be found, and be compiled for as many shapes as there are."""
    for path in paths:
        if str(path.resolve()) not in sys.path:
            sys.path.append(str(path.resolve()))
    if paths:
        config: Any = import_module("torch._dynamo.config")
        config.recompile_limit = GRAPHS
        config.accumulated_recompile_limit = 8 * GRAPHS


def forget_compiled() -> None:
    """Compile peers afresh: shapes met before would make the next ones symbols, and slower."""
    import_module("torch._dynamo").reset()


def peer(module: str) -> Any:
    """A peer's module; ImportError says how to get it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.partition(".")[0] in PACKAGES:
            raise ImportError(f"no {error.name} here; --peer-path names a checkout") from error
        raise


def revisions(paths: Sequence[Path]) -> dict[str, str | None]:
    """The commit of each checkout, from a file COMMIT in it; None where nobody left one."""
    files = {str(path): path / "COMMIT" for path in paths}
    return {name: f.read_text().strip() if f.is_file() else None for name, f in files.items()}


def reason(error: BaseException) -> str:
    """Why a contestant is out, in one line."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip()[:200]}" if lines else type(error).__name__


def give_back_memory(device: torch.device) -> None:
    """After a failure: what it left behind."""
    if device.type == "cuda":
        with suppress(RuntimeError):  # a device that is lost says so to everybody
            torch.cuda.empty_cache()
