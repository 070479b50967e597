"""Requests to a command: its flags, a function by its name, ranks, and the error.

Flags are read with what Python brings. The fields of a dataclass are the flags:
`Annotated[type, "help"]`, `Annotated[type, Flag("help", ...)]`, or a type alone. A field of type
`tuple[type, ...]` takes several values, at once or one by one. A field without a default has to be
given.

Every help has one form: the docstring of the dataclass, which is a sentence, an example and an
optional paragraph "Exit status: ..."; then the options, under the titles that the class attribute
`SECTIONS` gives by the name of the first field below each; then the exit status.
"""

import argparse
import importlib
import importlib.util
import inspect
import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from samestep.launch import TorchrunRank


class BadRequestError(Exception):
    """A request that cannot be done; the text names the value and is all that is shown."""


class Flag(NamedTuple):
    """Help on an option, and settings beyond its field's type and name."""

    help: str = ""
    name: str | None = None  # of the flag, if it is not the field's
    metavar: str | None = None
    default: str | None = None  # how the help tells of the default, if not by its value
    read: Callable[[str], Any] | None = None  # from a word, if it is not the type
    positional: bool = False
    one_by_one: bool = False  # of several: each is given with the flag again


T = TypeVar("T")
EXIT_STATUS = "Exit status: "
USUAL_STATUS = f"{EXIT_STATUS}0, done; 2, refused, and the error says why."


class Parser(argparse.ArgumentParser):
    """An argument parser that reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        raise BadRequestError(f"{message}; `{self.prog} --help` lists the options")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """A help formatter that keeps names such as ours-float16 on one line."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


def parse_flags(options: type[T], words: Sequence[str], prog: str, about: str | None = None) -> T:
    """Read flags; a bad one raises BadRequestError, --help ends the process.

    about: The help on all of them, if not the docstring of `options`.
    """
    story, status = _parted(about or options.__doc__ or "")
    parser = Parser(
        prog=prog,
        usage=f"{prog} [options]",
        description=_filled(story),
        epilog=_filled(status),
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    hints = get_type_hints(options, include_extras=True)
    sections: Mapping[str, str] = getattr(options, "SECTIONS", {})
    section: Any = parser
    for option in fields(options):  # type: ignore[arg-type]
        if option.name in sections:
            section = parser.add_argument_group(sections[option.name])
        hint, flag = hints[option.name], Flag()
        if get_origin(hint) is Annotated:
            hint, text = get_args(hint)[:2]
            flag = text if isinstance(text, Flag) else Flag(text)
        argument = _argument(hint, flag, option.default)
        if flag.positional:
            shown = parser.add_argument(option.name, **argument)
            parser.usage = f"{parser.usage} {_in_usage(shown)}"
        else:
            name = spelled(flag.name or option.name)
            section.add_argument(name, dest=option.name, **argument)
    given = vars(parser.parse_args(words)).items()
    return options(**{name: tuple(v) if isinstance(v, list) else v for name, v in given})


def _parted(text: str) -> tuple[str, str]:
    """Return the help before the options, and the exit status after them."""
    parts = inspect.cleandoc(text).split("\n\n")
    status = [part for part in parts if part.startswith(EXIT_STATUS)] or [USUAL_STATUS]
    return "\n\n".join(part for part in parts if part not in status), "\n\n".join(status)


def _in_usage(argument: argparse.Action) -> str:
    """Return a positional argument as the usage line shows it."""
    choices = argument.choices
    name = f"{{{','.join(choices)}}}" if choices is not None else argument.metavar
    return f"[{name}{' ...' * (argument.nargs == '*')}]" if argument.nargs else str(name)


def _filled(text: str) -> str:
    """Wrap paragraphs at the width of the terminal; keep indented ones unchanged."""
    width = shutil.get_terminal_size().columns - 2
    parts = text.split("\n\n")
    return "\n\n".join(p if p.startswith(" ") else textwrap.fill(p, width) for p in parts)


def spelled(name: str) -> str:
    """Return the flag that sets a field."""
    return "--" + name.replace("_", "-")


def _argument(hint: Any, flag: Flag, default: Any) -> dict[str, Any]:
    """Return the arguments of `add_argument` for a field."""
    if get_origin(hint) in (UnionType, Union):  # the latter of a Literal or None
        hint = next(one for one in get_args(hint) if one is not NoneType)
    if hint is bool:
        action = argparse.BooleanOptionalAction
        return {"action": action, "default": default, "help": flag.help}
    found: dict[str, Any] = {"default": default}
    if get_origin(hint) is tuple:
        hint, *others = get_args(hint)
        found["nargs"] = 1 + len(others)
        if others == [...]:  # those that are given do not come on top of the default
            found = {"nargs": "*" if flag.positional else "+", "default": argparse.SUPPRESS}
            if flag.one_by_one:
                found = {"default": argparse.SUPPRESS}
            if not flag.positional:
                found["action"] = "append" if flag.one_by_one else "extend"
        default = " ".join(map(str, default)) if default is not None else None
    elif flag.positional and default is not MISSING:
        found["nargs"] = "?"
    if default is MISSING:
        del found["default"]
    told = flag.default if default in (None, "", MISSING) else default
    found["help"] = flag.help if told is None else f"{flag.help} (default: {told})".lstrip()
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint), "metavar": flag.metavar, **found}
    return {"type": flag.read or hint, "metavar": flag.metavar or hint.__name__.upper(), **found}


def number_of_ranks(asked: int | None, torchrun: TorchrunRank | None, *, least: int) -> int:
    """Return torchrun's number of ranks, which `asked` must match; else `asked`, or 2 if None."""
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
    """Return the parsed JSON of a file; an error is a BadRequestError that begins with `about`."""
    try:
        return json.loads(path.read_text())
    except OSError as error:
        text = f"cannot read {str(path)!r}: {error.strerror or error}"
    except ValueError as error:
        text = f"{str(path)!r} is no JSON: {error}"
    raise BadRequestError(about + text)


def named_function(path: str, what: str) -> Callable[[], Any]:
    """Return the function at `package.module:name` or `file.py:name`, or raise BadRequestError.

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
    """Import a file as `python file.py` would, with files beside it, as a known module."""
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
    """Return an error of the user's code in one line, with its type."""
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
