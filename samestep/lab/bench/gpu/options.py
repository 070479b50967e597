"""Options of every benchmark of a GPU, and the peers that `--peer-path` leads to."""

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

import torch

from samestep.tooling.request import BadRequestError, parse_flags


class Contestant(NamedTuple):
    """A contestant; `build` makes what is measured."""

    name: str
    what: str
    build: Callable[..., Any]
    field: Literal["muon", "bfloat16", "adamw"] = (
        "muon"  # measured in turns with those of its field
    )
    ours: bool = False
    kernels: bool = True
    clips: bool = False
    default: bool = True  # takes part unless others are named
    rival: str = ""  # of ours: whom its loss and times are compared with


def who(contestants: Sequence[Contestant]) -> str:
    """Can take part: the help of `--variants`."""
    left_out = [contestant.name for contestant in contestants if not contestant.default]
    names = ", ".join(contestant.name for contestant in contestants)
    unless = f"all but {' and '.join(left_out)}" if left_out else "all"
    return f"the optimizers or functions to compare: {names} (default: {unless})"


FOLDER = "folder for the receipt, the picture and the page; made if missing"  # the help of `--out`


@dataclass
class SharedOptions:
    """The options of every benchmark here."""

    command = ""  # as it was given; no flag, since it has no type

    SECTIONS: ClassVar[Mapping[str, str]] = {"variants": "what is measured, and where"}

    variants: Annotated[tuple[str, ...], who(())] = ()
    warmup: Annotated[int, "first rounds, which are not counted"] = 3
    peer_path: Annotated[
        tuple[Path, ...],
        "checkouts of nanochat, dion, gram-newton-schulz or modded-nanogpt; without them these "
        "are left out",
    ] = ()
    out: Annotated[Path, FOLDER] = Path("out")
    device: Annotated[
        Literal["cuda", "cpu"], "cpu only tries the command; its times mean nothing"
    ] = "cuda"


OptionsT = TypeVar("OptionsT", bound=SharedOptions)


def at_least(least: int, given: object, *names: str) -> None:
    for name in names:
        value = getattr(given, name)
        if value < least:
            raise BadRequestError(f"--{name} must be at least {least}, got {value}")


def read(
    kind: type[OptionsT], contestants: Sequence[Contestant], words: Sequence[str], prog: str
) -> OptionsT:
    """Refuses values that cannot run, before anything is made."""
    options = parse_flags(kind, words, prog)
    at_least(1, options, *(name for name in ("rounds", "warmup") if hasattr(options, name)))
    for path in options.peer_path:
        if not path.is_dir():
            raise BadRequestError(f"--peer-path {str(path)!r} is not a folder")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise BadRequestError("--device cuda needs a CUDA device, and there is none here")
    usual = [contestant.name for contestant in contestants if contestant.default]
    names = [contestant.name for contestant in contestants]
    options.variants = chosen("--variants", options.variants or usual, names)
    options.command = shlex.join([*prog.split(), *words])
    return options


def device_of(name: str) -> torch.device:
    """The device of this process, as its tensors will name it."""
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def chosen(option: str, asked: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """Names without repetitions, each of them known."""
    for name in asked:
        if name not in known:
            raise BadRequestError(f"{option}: {name!r} is unknown; choose from {', '.join(known)}")
    return tuple(dict.fromkeys(asked))


# Other people's packages, from checkouts that the user names; none of their code is here

PACKAGES = ("nanochat", "dion", "gram_newton_schulz", "triton_kernels")
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
