"""What is asked of a command: its flags, a function by its name, ranks; the error if it cannot be.

Flags are read with what Python brings, for commands that need no extras. The fields of a dataclass
are the flags: `Annotated[type, "help"]`, or a type alone, with a default. Of a `tuple[type, ...]`
several values may be given, at once or one by one. What reads a value, if not its type, is a third
word of the annotation.
"""

import argparse
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NoReturn,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from samestep.launch import TorchrunRank


class BadRequestError(Exception):
    """What was asked cannot be done; the text names the value and is all that is shown."""


T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        raise BadRequestError(f"{message}; `{self.prog} --help` lists the options")


def parse_flags(options: type[T], words: Sequence[str], prog: str) -> T:
    """Read flags; a bad one raises BadRequestError, --help ends the process."""
    parser = Parser(prog=prog, description=options.__doc__, allow_abbrev=False)
    hints = get_type_hints(options, include_extras=True)
    for option in fields(options):  # type: ignore[arg-type]
        hint, text, read = hints[option.name], "", None
        if get_origin(hint) is Annotated:
            hint, text, read, *_ = *get_args(hint), None
        parser.add_argument(spelled(option.name), **_argument(hint, text, option.default, read))
    given = vars(parser.parse_args(words)).items()
    return options(**{name: tuple(v) if isinstance(v, list) else v for name, v in given})


def spelled(name: str) -> str:
    """A field as the flag that sets it."""
    return "--" + name.replace("_", "-")


def _argument(hint: Any, text: str, default: Any, read: Any) -> dict[str, Any]:
    """What argparse is told of a field."""
    if get_origin(hint) in (UnionType, Union):  # the latter of a Literal or None
        hint = next(one for one in get_args(hint) if one is not NoneType)
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction, "default": default, "help": text}
    several: dict[str, Any] = {"default": default}
    if get_origin(hint) is tuple:
        hint, *others = get_args(hint)
        several["nargs"] = 1 + len(others)
        if others == [...]:  # those that are given do not come on top of the default
            several = {"nargs": "+", "action": "extend", "default": argparse.SUPPRESS}
        default = " ".join(map(str, default))
    if default not in (None, ""):
        text = f"{text} ({default})".lstrip()
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint), "help": text, **several}
    kind = read or hint
    return {"type": kind, "metavar": hint.__name__.upper(), "help": text, **several}


def number_of_ranks(asked: int | None, torchrun: TorchrunRank | None, *, least: int) -> int:
    """Those that were asked for, 2 if none were, or torchrun's, which must agree with that."""
    if torchrun is None:
        ranks, source = 2 if asked is None else asked, "--world-size"
    else:
        ranks, source = torchrun.world_size, "torchrun's WORLD_SIZE"
        if asked not in (None, ranks):
            raise BadRequestError(
                f"--world-size is {asked}, but torchrun has started {ranks} ranks"
            )
    if ranks < least:
        raise BadRequestError(f"{source} must be at least {least}, got {ranks}")
    return ranks


def read_json(path: Path, about: str = "") -> Any:
    """What a file has; raises BadRequestError, whose text begins with `about`."""
    try:
        return json.loads(path.read_text())
    except OSError as error:
        text = f"cannot read {str(path)!r}: {error.strerror or error}"
    except ValueError as error:
        text = f"{str(path)!r} is no JSON: {error}"
    raise BadRequestError(about + text)


def named_function(path: str, what: str) -> Callable[[], Any]:
    """The function at `package.module:name` or `file.py:name`; raises BadRequestError.

    The text of the error begins with `what`.
    """
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
