"""What every client can be asked."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from samestep.bench.gpu.options import Named, Parser, SharedOptions, at_least, parser_for, shared
from samestep.tooling.request import BadRequestError
from samestep.train.corpus import Corpus, load_corpus, load_file

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class ClientOptions(SharedOptions):
    """How a client is trained."""

    layers: int
    steps: int
    seeds: tuple[int, ...]
    batch: int
    sequence: int
    dtype: str
    compile: bool
    every: int
    data: Path | None

    def corpus(self) -> Corpus:
        """The text, as bytes; BadRequestError where it is too short."""
        try:
            corpus = load_corpus() if self.data is None else load_file(self.data)
        except (OSError, ValueError) as error:
            raise BadRequestError(f"there is no text to train on: {error}") from error
        shortest = min(len(corpus.train), len(corpus.validation))
        if shortest < self.sequence + 1:
            raise BadRequestError(
                f"--sequence {self.sequence} needs texts of {self.sequence + 1} bytes or more, and "
                f"one of training and validation has {shortest}"
            )
        return corpus


def client_parser(
    prog: str,
    description: str | None,
    contestants: Sequence[Named],
    *,
    layers: int,
    out: str,
    cpu_dtype: str,
) -> Parser:
    """A parser with the options of every client."""
    parser = parser_for(prog, description, contestants, warmup=10, out=out)
    for name, default, text in (
        ("--layers", layers, "of the model; the width follows"),
        ("--steps", 500, "of each training"),
        ("--batch", 16, "sequences of a step"),
        ("--sequence", 1024, "bytes of a sequence"),
        ("--every", 50, "steps between losses on the screen"),
    ):
        parser.add_argument(name, type=int, default=default, help=f"{text} ({default})")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="SEED",
        help="each decides the initial weights and the batches of one training (0 1 2)",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), default=None,
        help=f"of the passes (bfloat16; {cpu_dtype} on a CPU)",
    )  # fmt: skip
    parser.set_defaults(cpu_dtype=cpu_dtype)
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=None,
        help="compile the model (on CUDA; not on a CPU)",
    )  # fmt: skip
    parser.add_argument(
        "--data", type=Path, default=None,
        help="a file to train on (the sources of Python's standard library)",
    )  # fmt: skip
    return parser


def client_options(
    given: argparse.Namespace, contestants: Sequence[Named], prog: str, words: Sequence[str]
) -> dict[str, Any]:
    """The fields of ClientOptions; refuses values that cannot run, before anything is made."""
    at_least(1, given, "layers", "steps", "batch", "every")
    at_least(2, given, "sequence")
    common = shared(given, contestants, prog, words)
    if given.warmup > given.steps - 2:
        raise BadRequestError(
            f"--warmup {given.warmup} leaves fewer than two of --steps {given.steps} to be timed"
        )
    for seed in given.seeds:
        if seed < 0:
            raise BadRequestError(f"--seeds must be at least 0, got {seed}")
    if given.data is not None and not given.data.is_file():
        raise BadRequestError(f"--data {str(given.data)!r} is not a file")
    on_gpu = given.device == "cuda"
    return {
        **common,
        "layers": given.layers,
        "steps": given.steps,
        "seeds": tuple(dict.fromkeys(given.seeds)),
        "batch": given.batch,
        "sequence": given.sequence,
        "dtype": given.dtype or ("bfloat16" if on_gpu else given.cpu_dtype),
        "compile": on_gpu if given.compile is None else given.compile,
        "every": given.every,
        "data": given.data,
    }
