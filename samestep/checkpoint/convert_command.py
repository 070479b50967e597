"""`samestep convert`: checkpoints of other packages into ours, and of ours into torch's."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

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
    """Convert a checkpoint on one process, without holding it in memory."""

    source: Annotated[
        Path,
        Flag("a folder, or a file of torch.save", metavar="SOURCE", positional=True),
    ]
    target: Annotated[Path, Flag("a folder to be made", metavar="TARGET", positional=True)]
    kind: Annotated[
        Kind | None,
        Flag("whose checkpoint it is; found out if left out", name="from"),
    ] = None
    to: Annotated[
        Literal[
            "fully_reshardable", "fully_sharded_model_space", "samestep", "fsdp_dtensor", "torch"
        ],
        "fully_reshardable, fully_sharded_model_space or samestep: ours; fsdp_dtensor or "
        "torch: what torch.distributed.checkpoint reads",
    ] = "fully_reshardable"
    optimizer: Annotated[
        tuple[Path, ...],
        "torch.save files with state dicts of optimizers, beside the model's",
    ] = ()
    names: Annotated[
        Path | None,
        "JSON: names of parameters in the optimizer's order, or per group",
    ] = None
    model: Annotated[
        str | None,
        "file.py:function that builds the model, for its names and their order",
    ] = None
    rename: Annotated[
        tuple[str, ...],
        Flag("regex=replacement, applied to names; may be repeated", one_by_one=True),
    ] = ()
    preset: Annotated[
        str | None,
        "the preset of the optimizer that will load it: momentum is rescaled",
    ] = None
    only: Annotated[Part | None, "take one part alone"] = None
    step: Annotated[int | None, "AdamW's count of steps, if the files have none"] = None
    verify: Annotated[bool, "compare the checksums of ours first"] = True
    dry_run: Annotated[bool, "read and check everything, write nothing"] = False
    json: Annotated[bool, "say as JSON what became what"] = False


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
