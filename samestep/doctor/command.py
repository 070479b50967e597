"""`samestep doctor`: versions, backends, GPUs, kernels, topology, and what would run here."""

import json
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from samestep.doctor.checks import Check, every
from samestep.launch import torchrun_rank
from samestep.tooling.request import BadRequestError, Flag, named_function, parse_flags

MARKS = {"ok": " ", "note": "!", "broken": "X"}
WIDTH, NAMES = 80, 20


@dataclass(frozen=True)
class Options:
    """Check this machine for what samestep needs, and say what is broken and how to repair it.

        samestep doctor
        samestep doctor --model mypackage.models:make    # routing of your own model
        samestep doctor --json                           # to go with a bug report

    Lines marked X are broken, lines marked ! are worth a look.

    Exit status: 0, nothing is broken; 1, something is, and its line says what to do; 2, refused.
    """

    SECTIONS: ClassVar[Mapping[str, str]] = {"json": "what is checked and shown"}

    json: Annotated[bool, "print all findings as JSON"] = False
    model: Annotated[
        str | None,
        Flag(
            "function that returns a model, to show what MuonAdamW would do with it",
            metavar="PATH:FACTORY",
            default="a small GPT",
        ),
    ] = None
    timeout: Annotated[float, "seconds that the trial step of two gloo ranks may take"] = 30.0


def parse(words: Sequence[str], prog: str) -> Options:
    options = parse_flags(Options, words, prog)
    if not 0 < options.timeout < float("inf"):
        raise BadRequestError(f"--timeout must be above 0 seconds, got {options.timeout}")
    return options


def run(options: Options) -> int:
    """Run all checks and print them; return 1 if something is broken."""
    try:
        place = torchrun_rank()
    except ValueError:
        place = None  # is one of the findings
    if place is not None and place.rank > 0:
        return 0  # one speaks for all
    make: Callable[[], object] | None = None
    if options.model is not None:
        if ":" not in options.model:
            raise BadRequestError(
                f"--model {options.model!r} is not PATH:FACTORY, such as mypackage.models:make"
            )
        make = named_function(options.model, "--model")
    found: list[Check] = []
    for check in every(make, options.model or "a GPT of 4 layers", options.timeout):
        if not options.json:
            _show(check, new_area=not found or found[-1].area != check.area)
        found.append(check)
    broken = sum(check.state == "broken" for check in found)
    if options.json:
        content = {
            "kind": "samestep doctor",
            "format": 1,
            "broken": broken,
            "checks": [check._asdict() for check in found],
        }
        sys.stdout.write(json.dumps(content, indent=1) + "\n")
    else:
        notes = sum(check.state == "note" for check in found)
        marked = f"{broken} broken (marked X), {notes} worth a look (marked !)."
        sys.stdout.write(f"\n{marked if broken or notes else 'Nothing is broken.'}\n")
    return int(broken > 0)


def _show(check: Check, *, new_area: bool) -> None:
    """Print one check, broken into lines of the table."""
    if new_area:
        sys.stdout.write(f"{check.area}\n")
    head = f"{MARKS[check.state]} {check.name:{NAMES}} "
    below = " " * (NAMES + 3)
    lines = textwrap.wrap(check.value, WIDTH, initial_indent=head, subsequent_indent=below)
    if check.way_out:
        lines += textwrap.wrap(
            check.way_out, WIDTH, initial_indent=f"{below}-> ", subsequent_indent=f"{below}   "
        )
    sys.stdout.write("\n".join(lines or [head]) + "\n")
    sys.stdout.flush()
