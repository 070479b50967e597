"""Flags read with what Python brings, for commands that need no extras.

The fields of a dataclass are the flags: `Annotated[type, "help"]`, with a default.
"""

import argparse
from collections.abc import Sequence
from dataclasses import fields
from types import NoneType
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from samestep.tooling.request import BadRequestError

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
        hint, text = get_args(hints[option.name])
        parser.add_argument(
            spelled(option.name), default=option.default, **_argument(hint, text, option.default)
        )
    return options(**vars(parser.parse_args(words)))


def spelled(name: str) -> str:
    """A field as the flag that sets it."""
    return "--" + name.replace("_", "-")


def _argument(hint: Any, text: str, default: object) -> dict[str, Any]:
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction, "help": text}
    text = text if default is None else f"{text} ({default})"
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint), "help": text}
    kind = next(one for one in get_args(hint) or (hint,) if one is not NoneType)
    return {"type": kind, "metavar": kind.__name__.upper(), "help": text}
