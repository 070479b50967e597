"""What `samestep bench orthogonalize` can be asked."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from samestep.bench.gpu.options import SharedOptions, add_rounds, at_least, parser_for, shared
from samestep.bench.orthogonalize.contestants import CONTESTANTS
from samestep.bench.orthogonalize.measure import Shape
from samestep.tooling.request import BadRequestError

SHAPES = (
    "12x768x768", "12x768x3072", "16x1280x1280", "16x1280x5120", "96x2048x2048", "48x2048x8192",
    "8x2048x2048", "8x2048x8192", "4x4096x4096", "4x4096x11008",
)  # fmt: skip
MOST_ON_CPU = 1 << 16  # elements


@dataclass(frozen=True, kw_only=True)
class Options(SharedOptions):
    """Time the orthogonalization of 16-bit batches on this GPU: ours, torch's, and peers'."""

    shapes: tuple[Shape, ...]
    rounds: int


def parse(words: Sequence[str], prog: str) -> Options:
    """Read flags; a bad one raises BadRequestError, --help ends the process."""
    parser = parser_for(prog, Options.__doc__, CONTESTANTS, warmup=3, out="out/bench-orthogonalize")
    add_rounds(parser, 10)
    parser.add_argument(
        "--shape", nargs="+", default=SHAPES, metavar="BxMxN",
        help=f"batches to orthogonalize ({' '.join(SHAPES)})",
    )  # fmt: skip
    given = parser.parse_args(words)
    at_least(1, given, "rounds")
    common = shared(given, CONTESTANTS, prog, words)
    shapes = tuple(dict.fromkeys(map(shape_of, given.shape)))
    if given.device == "cpu" and any(b * m * n > MOST_ON_CPU for b, m, n in shapes):
        raise BadRequestError(f"--device cpu is for --shape of at most {MOST_ON_CPU} elements")
    return Options(shapes=shapes, rounds=given.rounds, **common)


def shape_of(text: str) -> Shape:
    """Read "12x768x3072"."""
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", text):
        raise BadRequestError(f"--shape must be like 12x768x3072, got {text!r}")
    count, rows, cols = map(int, text.split("x"))
    return count, rows, cols
