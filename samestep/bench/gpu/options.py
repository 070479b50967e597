"""What every benchmark of a GPU can be asked, and the peers that `--peer-path` leads to."""

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from samestep.tooling.request import BadRequestError, Parser


class SharedOptions(argparse.Namespace):
    """What every benchmark here can be asked; a parser fills it in."""

    variants: Sequence[str]
    warmup: int
    peer_path: Sequence[Path]
    out: Path
    device: str
    command: str  # as it was given


class Contestant(NamedTuple):
    """Who can take part; `build` makes what is measured."""

    name: str
    what: str
    build: Callable[..., Any]
    field: Literal["muon", "adamw"] = "muon"  # measured in turns with those of its field
    ours: bool = False
    kernels: bool = True
    clips: bool = False
    default: bool = True  # takes part unless others are named
    rival: str = ""  # of ours: whom its loss and times are compared with


def parser_for(
    prog: str,
    description: str | None,
    contestants: Sequence[Contestant],
    *,
    warmup: int,
    out: str,
    rounds: int | None = None,
) -> Parser:
    """With `--rounds` where contestants take turns."""
    parser = Parser(prog=prog, description=description, allow_abbrev=False)
    usual = [contestant.name for contestant in contestants if contestant.default]
    left_out = [contestant.name for contestant in contestants if not contestant.default]
    names = ", ".join(contestant.name for contestant in contestants)
    unless = f"all but {' and '.join(left_out)}" if left_out else "all"
    parser.add_argument(
        "--variants", nargs="+", default=usual, metavar="NAME",
        help=f"who takes part: {names} ({unless})",
    )  # fmt: skip
    parser.add_argument(
        "--warmup", type=int, default=warmup, help=f"turns that are not counted ({warmup})"
    )
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
    if rounds is not None:
        parser.add_argument(
            "--rounds", type=int, default=rounds, help=f"turns of each contestant ({rounds})"
        )
    return parser


def at_least(least: int, given: argparse.Namespace, *names: str) -> None:
    for name in names:
        value = getattr(given, name)
        if value < least:
            raise BadRequestError(f"--{name} must be at least {least}, got {value}")


def read(
    parser: Parser,
    options: SharedOptions,
    contestants: Sequence[Contestant],
    words: Sequence[str],
) -> None:
    """Fill in the options; refuses values that cannot run, before anything is made."""
    parser.parse_args(words, options)
    at_least(1, options, *(name for name in ("rounds", "warmup") if hasattr(options, name)))
    for path in options.peer_path:
        if not path.is_dir():
            raise BadRequestError(f"--peer-path {str(path)!r} is not a folder")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise BadRequestError("--device cuda needs a CUDA device, and there is none here")
    names = [contestant.name for contestant in contestants]
    options.variants = chosen("--variants", options.variants, names)
    options.command = shlex.join([*parser.prog.split(), *words])


def device_of(name: str) -> torch.device:
    """The device of this process, as its tensors will name it."""
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def chosen(option: str, asked: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """Names without repetitions, each of them known."""
    for name in asked:
        if name not in known:
            raise BadRequestError(f"{option}: {name!r} is not known; there is: {', '.join(known)}")
    return tuple(dict.fromkeys(asked))


# Other people's packages, from checkouts that the user names; none of their code is here

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
