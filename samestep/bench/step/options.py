"""What `samestep bench step` can be asked."""

from collections.abc import Sequence
from dataclasses import dataclass

from samestep.bench.gpu.options import SharedOptions, chosen, parser_for, shared
from samestep.bench.step.contestants import CONTESTANTS
from samestep.bench.step.sets import SETS
from samestep.command.request import BadRequestError


@dataclass(frozen=True, kw_only=True)
class Options(SharedOptions):
    """Time one optimizer step on this GPU: ours, in several forms, and peers in the same rounds."""

    sets: tuple[str, ...]


def parse(words: Sequence[str], prog: str) -> Options:
    """Read flags; a bad one raises BadRequestError, --help ends the process."""
    parser = parser_for(prog, Options.__doc__, CONTESTANTS, rounds=20, out="out/bench-step")
    parser.add_argument(
        "--set", nargs="+", default=["gpt-1280", "gpt-2048"], metavar="NAME",
        help=f"parameters to step: {', '.join(SETS)} (gpt-1280 gpt-2048)",
    )  # fmt: skip
    given = parser.parse_args(words)
    common = shared(given, CONTESTANTS, prog, words)
    options = Options(sets=chosen("--set", given.set, list(SETS)), **common)
    if options.device == "cpu" and options.sets != ("tiny",):
        raise BadRequestError("--device cpu is slow, and only for --set tiny")
    return options
