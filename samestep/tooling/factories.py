"""A function that the user names: `package.module:name`, or `file.py:name`."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from samestep.tooling.request import BadRequestError


def named_function(path: str, what: str) -> Callable[[], Any]:
    """The function at `path`; raises BadRequestError, whose text begins with `what`."""
    where, _, name = path.rpartition(":")
    try:
        module = _from_file(Path(where)) if where.endswith(".py") else _imported(where)
    except (Exception, SystemExit) as error:
        raise BadRequestError(
            f"{what}: {where!r} cannot be imported: {in_one_line(error)}"
        ) from error
    make: Callable[[], Any] | None = getattr(module, name, None)
    if not callable(make):
        raise BadRequestError(f"{what}: {where!r} has no function {name!r}")
    return make


def _imported(name: str) -> ModuleType:
    if "" not in sys.path:  # as for `python -m`: the working folder counts
        sys.path.insert(0, "")
    return importlib.import_module(name)


def _from_file(path: Path) -> ModuleType:
    """As `python file.py` would: files beside it can be imported, and it is a known module."""
    name = path.stem if path.stem not in sys.modules else f"samestep_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.exists():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def in_one_line(error: BaseException) -> str:
    """An error of the user's code, with its kind."""
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
