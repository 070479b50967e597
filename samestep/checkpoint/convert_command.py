"""`samestep convert`: checkpoints of other packages into samestep's, and those into torch's."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn

from samestep.checkpoint.converting import Converted, Kind, convert
from samestep.checkpoint.foreign.naming import rename_rule
from samestep.checkpoint.sources import Part
from samestep.checkpoint.storage import CheckpointError
from samestep.tooling.request import BadRequestError, Flag, in_one_line, named_function


@dataclass(frozen=True)
class Options:
    """Convert a checkpoint of another package, or into another format, on one process.

        samestep convert run.pt out/converted --optimizer run_optimizer.pt
        samestep convert megatron/iter_0001000 out/converted --preset megatron
        samestep convert out/gpt/checkpoints out/dcp --to torch

    Tensors are read and written one by one, so that the checkpoint need not fit in memory.

    Exit status: 0, converted and written; 2, refused: nothing was written, and the error says why.
    """

    SECTIONS: ClassVar[Mapping[str, str]] = {
        "kind": "source and target",
        "optimizer": "where the source lacks names or counts",
        "preset": "what is converted",
        "verify": "checks and reports",
    }

    source: Annotated[
        Path,
        Flag(
            "the checkpoint to read: a folder, or a file of torch.save",
            metavar="SOURCE",
            positional=True,
        ),
    ]
    target: Annotated[
        Path, Flag("the folder to write, which must not exist", metavar="TARGET", positional=True)
    ]

    kind: Annotated[
        Kind | None,
        Flag("package that wrote the source", name="from", default="found by its files"),
    ] = None
    to: Annotated[
        Literal[
            "fully_reshardable", "fully_sharded_model_space", "samestep", "fsdp_dtensor", "torch"
        ],
        "format to write; the first three are samestep's own, the others are read by "
        "torch.distributed.checkpoint",
    ] = "fully_reshardable"

    optimizer: Annotated[
        tuple[Path, ...],
        "files of torch.save with the state dicts of optimizers, where SOURCE has only the model",
    ] = ()
    names: Annotated[
        Path | None,
        "JSON file with the names of the parameters in the order of the optimizer: a list, or a "
        "list per group",
    ] = None
    model: Annotated[
        str | None,
        Flag(
            "function that returns the model, for the names of its parameters and their order",
            metavar="PATH:FACTORY",
        ),
    ] = None
    rename: Annotated[
        tuple[str, ...],
        Flag(
            "replace a part of every name; may be repeated",
            metavar="REGEX=REPLACEMENT",
            one_by_one=True,
        ),
    ] = ()
    step: Annotated[int | None, "AdamW's step count, where the files have none"] = None

    preset: Annotated[
        str | None,
        "preset of the optimizer that will load the result; momentum is rescaled to its form",
    ] = None
    only: Annotated[Part | None, "convert only the model, or only the optimizer state"] = None

    verify: Annotated[bool, "compare checksums of the source first, where it has them"] = True
    dry_run: Annotated[bool, "read and check everything, write nothing"] = False
    json: Annotated[bool, "print as JSON what each tensor became"] = False


def run(options: Options) -> int:
    try:
        done = convert(
            options.source,
            options.target,
            kind=options.kind,
            to=options.to,
            optimizers=options.optimizer,
            names=options.names,
            model=None if options.model is None else _built(options.model),
            rename=[rename_rule(text) for text in options.rename],
            preset=options.preset,
            step=options.step,
            only=options.only,
            verify=options.verify,
            dry_run=options.dry_run,
        )
    except CheckpointError as error:
        raise BadRequestError(str(error)) from error
    if options.json:
        sys.stdout.write(f"{json.dumps(done.as_json(), indent=1)}\n")
    else:
        _show(done, Console())
    return 0


def _built(path: str) -> nn.Module:
    make = named_function(path, "--model")
    try:
        model = make()
    except Exception as error:
        raise BadRequestError(f"--model: {path} raised {in_one_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise BadRequestError(f"--model: {path} gave a {type(model).__name__}, and no module")
    return model


def _show(done: Converted, console: Console) -> None:
    table = Table("tensor", "from", "shape", "dtype", "to", box=None)
    for column in table.columns:
        column.overflow = "fold"  # a name that is cut is none
    for row in done.rows:
        shape = " x ".join(map(str, row.shape)) or "()"
        table.add_row(*map(escape, (row.tensor, row.origin, shape, row.dtype, row.to)))
    console.print(table)
    where = done.target if done.written else "nothing written (--dry-run)"
    console.print(escape(f"{len(done.rows)} tensors of {done.kind}: {where}"))
    if done.left_out:
        some = ", ".join(done.left_out[:6]) + (" ..." if len(done.left_out) > 6 else "")
        console.print(escape(f"left out: {some}"))
    if not done.groups:
        console.print("there is no optimizer in it: load it with the model alone")
