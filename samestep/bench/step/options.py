"""What `samestep bench step` can be asked."""

from collections.abc import Sequence
from dataclasses import dataclass

from samestep.bench.gpu.options import (
    SharedOptions,
    add_rounds,
    at_least,
    chosen,
    parser_for,
    shared,
)
from samestep.bench.step.contestants import CONTESTANTS
from samestep.models.parameter_sets import SETS
from samestep.tooling.request import BadRequestError


@dataclass(frozen=True, kw_only=True)
class Options(SharedOptions):
    """Time one optimizer step on this GPU: ours, in several forms, and peers in the same rounds."""

    sets: tuple[str, ...]
    rounds: int


def parse(words: Sequence[str], prog: str) -> Options:
    """Read flags; a bad one raises BadRequestError, --help ends the process."""
    parser = parser_for(prog, Options.__doc__, CONTESTANTS, warmup=3, out="out/bench-step")
    add_rounds(parser, 20)
    parser.add_argument(
        "--set", nargs="+", default=["gpt-1280", "gpt-2048"], metavar="NAME",
        help=f"parameters to step: {', '.join(SETS)} (gpt-1280 gpt-2048)",
    )  # fmt: skip
    given = parser.parse_args(words)
    at_least(1, given, "rounds")
    common = shared(given, CONTESTANTS, prog, words)
    sets = chosen("--set", given.set, list(SETS))
    options = Options(sets=sets, rounds=given.rounds, **common)
    if options.device == "cpu" and options.sets != ("tiny",):
        raise BadRequestError("--device cpu is slow, and only for --set tiny")
    return options
