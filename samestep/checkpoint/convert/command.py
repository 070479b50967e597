"""`samestep convert`: from torch's formats and back, on one process, a box at a time."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from rich.console import Console

from samestep.checkpoint import folder
from samestep.checkpoint.convert.from_dcp import METADATA, read_dcp
from samestep.checkpoint.convert.from_file import read_file
from samestep.checkpoint.convert.source import Source
from samestep.checkpoint.convert.to_torch import write_dcp
from samestep.checkpoint.errors import CheckpointError
from samestep.checkpoint.plan import plan_locally, plan_together
from samestep.checkpoint.ranks import Ranks
from samestep.checkpoint.saving import Prepared, Request, write
from samestep.checkpoint.storage import Index
from samestep.command.request import BadRequestError
from samestep.version import __version__


@dataclass(frozen=True)
class Options:
    """Convert a checkpoint on one process, without holding it in memory."""

    source: Annotated[
        tyro.conf.Positional[Path],
        tyro.conf.arg(help="a checkpoint of samestep, a folder of torch's, or a torch.save file"),
    ]
    target: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(help="a folder to be made")]
    to: Annotated[
        Literal["torch", "samestep"], tyro.conf.arg(help="torch: torch.distributed.checkpoint")
    ]
    optimizer: Annotated[
        Path | None, tyro.conf.arg(help="a torch.save file with the optimizer's state dict")
    ] = None
    verify: Annotated[bool, tyro.conf.arg(help="compare the checksums of ours first")] = True


def run(options: Options) -> int:
    """Convert; say what was left out."""
    console = Console()
    try:
        if options.to == "torch":
            index = Index(folder.find(options.source))
            if options.verify:
                index.verify()
            write_dcp(index, options.target)
            console.print(f"{len(index.tensors)} tensors, in torch's format: {options.target}")
            return 0
        source = _read(options)
        _write(source, options.target)
    except CheckpointError as error:
        raise BadRequestError(str(error)) from error
    console.print(f"{len(source.tensors)} tensors: {options.target}")
    if source.left_out:
        some = ", ".join(source.left_out[:6]) + (" ..." if len(source.left_out) > 6 else "")
        console.print(f"left out: {some}")
    if not source.groups:
        console.print("there is no optimizer in it: load it with the model alone")
    return 0


def _read(options: Options) -> Source:
    path = options.source
    if (path / METADATA).is_file():
        return read_dcp(path)
    if path.is_file():
        return read_file(path, options.optimizer)
    what = "is neither a torch.save file nor a folder of torch.distributed.checkpoint"
    raise CheckpointError(f"{path} {what if path.exists() else 'does not exist'}")


def _write(source: Source, path: Path) -> None:
    ranks = Ranks(None, 0, 1)
    if not source.tensors:
        raise CheckpointError("there are no tensors in it")
    facts = {
        "samestep": __version__,
        "torch": torch.__version__,
        "world_size": source.world_size,
        "fingerprint": "",
        "layout": [],
        "groups": source.groups,
        "extra": source.extra,
    }
    plan = plan_together(plan_locally(source.tensors), {}, ranks)
    unfinished = folder.Unfinished(path)
    request = Request(path, None, None, source.extra, None)
    prepared = Prepared(request, ranks, unfinished, source.tensors, plan, facts)
    write(prepared, lambda item: source.read(item.index))
