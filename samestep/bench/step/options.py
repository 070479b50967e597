"""What `samestep bench step` can be asked."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from samestep.bench.gpu.options import check_shared, chosen, parser_for
from samestep.bench.step.contestants import CONTESTANTS
from samestep.bench.step.sets import SETS
from samestep.command.request import BadRequestError


@dataclass(frozen=True)
class Options:
    """Time one optimizer step on this GPU: ours, in several forms, and peers in the same rounds."""

    sets: tuple[str, ...]
    variants: tuple[str, ...]
    rounds: int
    warmup: int
    peer_path: tuple[Path, ...]
    out: Path
    device: str
    command: str  # as it was given


def parse(words: Sequence[str], prog: str) -> Options:
    """Read flags; a bad one raises BadRequestError, --help ends the process."""
    names = [contestant.name for contestant in CONTESTANTS]
    usual = [contestant.name for contestant in CONTESTANTS if contestant.default]
    parser = parser_for(prog, Options.__doc__, rounds=20, out="out/bench-step")
    parser.add_argument(
        "--set", nargs="+", default=["gpt-1280", "gpt-2048"], metavar="NAME",
        help=f"parameters to step: {', '.join(SETS)} (gpt-1280 gpt-2048)",
    )  # fmt: skip
    parser.add_argument(
        "--variants", nargs="+", default=usual, metavar="NAME",
        help=f"who takes part: {', '.join(names)} (all but "
        f"{' and '.join(name for name in names if name not in usual)}, which compiles for long)",
    )  # fmt: skip
    given = parser.parse_args(words)
    check_shared(given.rounds, given.warmup, given.peer_path, given.device)
    options = Options(
        chosen("--set", given.set, list(SETS)),
        chosen("--variants", given.variants, names),
        given.rounds,
        given.warmup,
        tuple(given.peer_path),
        given.out,
        given.device,
        shlex.join([*prog.split(), *words]),
    )
    if options.device == "cpu" and options.sets != ("tiny",):
        raise BadRequestError("--device cpu is slow, and only for --set tiny")
    return options
