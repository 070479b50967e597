"""The command `samestep`: finds the command that was asked for and runs it.

Exit status: 0, it worked; 1, a rank failed or drift was found; 2, it was asked for what cannot be
done; 130, Ctrl-C; 143, SIGTERM; 141, whoever read the output has gone
(`samestep --help | head -1`).

Nothing here imports torch until a command runs: help comes from stored pages.
"""

import os
import select
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from importlib import import_module
from io import StringIO, UnsupportedOperation
from types import ModuleType
from typing import NamedTuple, TextIO

from samestep.launch import RanksFailed, torchrun_rank
from samestep.tooling.pages import INSTALL, Page, broken_lines, flags_in, stored_pages
from samestep.tooling.request import BadRequestError, parse_flags
from samestep.version import __version__


class Command(NamedTuple):
    """A command: what it is for, and the module with its `Options` and `run(options)`."""

    help: str
    module: str  # imported when the command runs, since it may need the packages of samestep[cli]


GROUPS = {
    "": "samestep: distributed AdamW and Muon for PyTorch, with a harness to test them.",
    "bench": "Measure optimizers on this machine.",
    "bench client": "Train another package's model with its own optimizer and with samestep's.",
}
COMMANDS = {
    "stress": Command(
        "prove that all ranks take the same step in every layout, and that drift would be found",
        "samestep.lab.stress.command",
    ),
    "train": Command(
        "train a small GPT in any layout, with checkpoints that any other layout can resume",
        "samestep.train.trainer",
    ),
    "doctor": Command(
        "check this machine, and say what is broken and how to repair it",
        "samestep.doctor.command",
    ),
    "mesh": Command(
        "show the place of each rank on the mesh axes, and whether a model's sizes divide",
        "samestep.mesh.command",
    ),
    "plan": Command(
        "tell whether a model fits on a cluster, and simulate time and traffic of a step",
        "samestep.lab.estimate.command",
    ),
    "recipes": Command(
        "show which weights of known architectures are fused, stacked or gates",
        "samestep.recipes.command",
    ),
    "bench crossover": Command(
        "measure from which size on sharding a parameter beats an all-reduce of its gradient",
        "samestep.lab.bench.crossover",
    ),
    "bench step": Command(
        "time an optimizer step on this GPU, against other packages and the least possible",
        "samestep.lab.bench.step",
    ),
    "bench orthogonalize": Command(
        "time the orthogonalization alone on this GPU, by shape of the matrices",
        "samestep.lab.bench.orthogonalize",
    ),
    "bench client nanochat": Command(
        "train nanochat's model with its own optimizer and with samestep's",
        "samestep.lab.bench.client.nanochat",
    ),
    "bench client llama": Command(
        "train a Llama with samestep's optimizers, torch's AdamW and dion's Muon",
        "samestep.lab.bench.client.llama",
    ),
    "inspect": Command(
        "show the contents of a checkpoint, and compare its checksums",
        "samestep.checkpoint.inspect_command",
    ),
    "convert": Command(
        "convert checkpoints of torch, Megatron, DeepSpeed, dion, ..., and into torch's format",
        "samestep.checkpoint.convert_command",
    ),
    "completion": Command(
        "print a script with which a shell completes commands and options",
        "samestep.tooling.completion",
    ),
}
# Torchrun ends all ranks as soon as one has ended: the first has to have said why by then.
LET_SPEAK_S = 2.0
# What samestep[cli] brings and a command may import.
EXTRAS = ("jinja2", "jsonschema", "matplotlib", "rich")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status."""
    try:
        status = _main(arguments)
        sys.stdout.flush()  # here, where it may fail in peace
    except BrokenPipeError:
        if not _reader_is_gone():
            raise  # another pipe than the output
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # for what is flushed at exit
        return 141
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # rich has noticed it
            return 141
        raise
    return status


def _reader_is_gone() -> bool:
    """Whether standard output is a pipe that nobody reads any more."""
    try:
        output = sys.stdout.fileno()
    except UnsupportedOperation:  # of a test
        return False
    if not hasattr(select, "poll"):  # Windows
        return False
    watcher = select.poll()
    watcher.register(output, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in watcher.poll(0))


def _main(arguments: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    asked: list[str] = []
    while words and not words[0].startswith("-") and " ".join(asked) not in COMMANDS:
        asked.append(words.pop(0))
    name = " ".join(asked)
    try:
        if name in COMMANDS:
            return _run(name, words)
        return _describe(name, words)
    except ImportError as error:
        if error.name == "torch":
            return _fail(2, f'"samestep {name}" needs torch: pip install torch')
        if error.name is None or error.name.partition(".")[0] not in EXTRAS:
            raise
        return _fail(2, f'"samestep {name}" needs {error.name}: {INSTALL}')
    except BadRequestError as error:
        if _speaks():
            return _fail(2, str(error))
        time.sleep(LET_SPEAK_S)
        return 2
    except RanksFailed as error:
        return _fail(1, str(error))
    except KeyboardInterrupt:
        return _fail(130, "stopped; nothing was written")


def _run(name: str, words: list[str]) -> int:
    if {"--help", "-h"} & set(words) and (page := stored_pages().get(name)) is not None:
        return _say(0, page.help if _speaks() else "", sys.stdout)
    module = import_module(COMMANDS[name].module)
    run: Callable[[object], int | None] = module.run
    try:
        torchrun_rank()
    except ValueError as error:
        if name != "doctor":  # which tells what to do about it
            raise BadRequestError(str(error)) from error
    try:
        options = _parse(module, f"samestep {name}", words)
    except SystemExit as shown:  # help
        return shown.code if isinstance(shown.code, int) else 2
    return run(options) or 0


def live_page(name: str) -> Page:
    """The options of a command as it describes them, for the pages that are stored."""
    module = import_module(COMMANDS[name].module)
    shown = {}
    before = os.environ.get("COLUMNS", "")
    try:
        for width in ("80", "1000"):  # for people; for `flags_in`
            os.environ["COLUMNS"] = width
            text = StringIO()
            with redirect_stdout(text), suppress(SystemExit):
                _parse(module, f"samestep {name}", ["--help"])
            shown[width] = text.getvalue()
    finally:
        os.environ["COLUMNS"] = before  # empty is as good as none
    return Page(COMMANDS[name].help, broken_lines(shown["80"]), flags_in(shown["1000"]))


def _parse(module: ModuleType, prog: str, words: list[str]) -> object:
    if hasattr(module, "parse"):  # a command that judges its options while it reads them
        return module.parse(words, prog)
    return parse_flags(module.Options, words, prog)


def _describe(name: str, words: list[str]) -> int:
    """Help on a group of commands; an error if it was not help that was asked for."""
    if name == "" and words == ["--version"]:
        return _say(0, f"samestep {__version__}\n", sys.stdout)
    if name not in GROUPS:
        known = ", ".join(COMMANDS)
        return _fail(2, f"there is no command {name!r}; choose one of: {known}")
    lines = [GROUPS[name], "", f"usage: samestep {name}{' ' * bool(name)}COMMAND ...", ""]
    inside = {key: command for key, command in COMMANDS.items() if key.startswith(name)}
    width = max(map(len, inside))
    below = " " * (width + 13)
    for key, command in inside.items():
        line = f"  samestep {key:{width}}  {command.help}"
        lines += textwrap.wrap(line, 80, subsequent_indent=below)
    lines += [
        "",
        f"`samestep {name}{' ' * bool(name)}COMMAND --help` lists the options of a command.",
        "",
    ]
    if words in (["--help"], ["-h"]):
        return _say(0, "\n".join(lines), sys.stdout)
    if words:
        return _fail(2, f"unknown option {words[0]!r}; `samestep --help` lists the commands")
    return _say(2, "\n".join(lines), sys.stderr)


def _speaks() -> bool:
    """Under torchrun one process says for all what is wrong."""
    try:
        place = torchrun_rank()
    except ValueError:
        return True
    return place is None or place.rank == 0


def _fail(status: int, message: str) -> int:
    return _say(status, f"error: {message}\n", sys.stderr)


def _say(status: int, text: str, stream: TextIO) -> int:
    stream.write(text)
    return status
