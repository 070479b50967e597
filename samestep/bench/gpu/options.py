"""Reading the words of a command with what Python brings."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch

from samestep.command.request import BadRequestError


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Refuse the words."""
        raise BadRequestError(f"{message}; `{self.prog} --help` lists the options")


def parser_for(prog: str, description: str | None, *, rounds: int, out: str) -> Parser:
    """A parser with the options of every benchmark here."""
    parser = Parser(prog=prog, description=description, allow_abbrev=False)
    parser.add_argument(
        "--rounds", type=int, default=rounds, help=f"turns of each contestant ({rounds})"
    )
    parser.add_argument("--warmup", type=int, default=3, help="turns that are not counted (3)")
    parser.add_argument(
        "--peer-path", type=Path, action="append", default=[], metavar="PATH",
        help="a checkout of nanochat, dion or gram-newton-schulz; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=Path(out), help=f"folder for results; made if missing ({out})"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to try it (cuda)"
    )
    return parser


def check_shared(rounds: int, warmup: int, peer_paths: Sequence[Path], device: str) -> None:
    """Refuse values that cannot run, before anything is made."""
    for name, value in (("--rounds", rounds), ("--warmup", warmup)):
        if value < 1:
            raise BadRequestError(f"{name} must be at least 1, got {value}")
    for path in peer_paths:
        if not path.is_dir():
            raise BadRequestError(f"--peer-path {str(path)!r} is not a folder")
    if device == "cuda" and not torch.cuda.is_available():
        raise BadRequestError("--device cuda needs a CUDA device, and there is none here")


def device_of(name: str) -> torch.device:
    """The device of this process, as its tensors will name it."""
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def chosen(option: str, asked: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """Names without repetitions, each of them known."""
    for name in asked:
        if name not in known:
            raise BadRequestError(f"{option}: {name!r} is not known; there is: {', '.join(known)}")
    return tuple(dict.fromkeys(asked))
