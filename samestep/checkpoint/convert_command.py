"""`samestep convert`: from torch's formats and back, on one process, a box at a time."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from samestep.checkpoint import folder, formats
from samestep.checkpoint.formats import format_named, open_checkpoint
from samestep.checkpoint.ranks import Ranks, plan_locally
from samestep.checkpoint.saving import Prepared, Request, Seen, facts_of, write
from samestep.checkpoint.sources import Source, boxes_of, read_file
from samestep.checkpoint.storage import CheckpointError
from samestep.checkpoint.torch_files import TorchFiles
from samestep.tooling.request import BadRequestError

# Under these names too.
ALIASES = {"samestep": "fully_reshardable", "torch": "fsdp_dtensor"} | formats.ALIASES


@dataclass(frozen=True)
class Options:
    """Convert a checkpoint on one process, without holding it in memory."""

    source: Annotated[
        tyro.conf.Positional[Path],
        tyro.conf.arg(help="a checkpoint of samestep, a folder of torch's, or a torch.save file"),
    ]
    target: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(help="a folder to be made")]
    to: Annotated[
        Literal[
            "fully_reshardable", "fully_sharded_model_space", "samestep", "fsdp_dtensor", "torch"
        ],
        tyro.conf.arg(
            help="fully_reshardable, fully_sharded_model_space or samestep: ours; fsdp_dtensor or "
            "torch: what torch.distributed.checkpoint reads"
        ),
    ]
    optimizer: Annotated[
        Path | None, tyro.conf.arg(help="a torch.save file with the optimizer's state dict")
    ] = None
    names: Annotated[
        Path | None,
        tyro.conf.arg(
            help="for files of nanochat: JSON with the parameters' names, group by group"
        ),
    ] = None
    verify: Annotated[bool, tyro.conf.arg(help="compare the checksums of ours first")] = True


def run(options: Options) -> int:
    console = Console()
    try:
        with ExitStack() as opened:
            source = _read(options, opened)
            _write(source, options.target, ALIASES.get(options.to, options.to))
    except CheckpointError as error:
        raise BadRequestError(str(error)) from error
    console.print(f"{len(source.tensors)} tensors: {options.target}")
    if source.left_out:
        some = ", ".join(source.left_out[:6]) + (" ..." if len(source.left_out) > 6 else "")
        console.print(f"left out: {some}")
    if not source.groups:
        console.print("there is no optimizer in it: load it with the model alone")
    return 0


def _read(options: Options, opened: ExitStack) -> Source:
    if options.source.is_file():
        return read_file(options.source, options.optimizer, options.names)
    stored = open_checkpoint(folder.find(options.source))
    if options.verify:
        stored.verify()
    content = stored.content
    source = Source(opened.enter_context(stored.reading()))
    source.groups, source.extra = content["groups"], content["extra"]
    source.world_size = content["world_size"]
    if isinstance(stored, TorchFiles):
        source.left_out = stored.left_out
    for name, entry in stored.tensors.items():
        source.add(name, entry.size, entry.properties.dtype, boxes_of(entry.chunks))
    return source


def _write(source: Source, path: Path, name: str) -> None:
    ranks = Ranks()
    if not source.tensors:
        raise CheckpointError("there are no tensors in it")
    facts = facts_of(name, source.world_size, source.groups, source.extra)
    target = format_named(name)
    planner = plan_locally(target.state_dict(source.tensors, facts), target.is_nested)
    ours = {id(tensor): key for key, tensor in source.tensors.items()}

    def read(item: WriteItem) -> Tensor:
        own = ours[id(planner.state_dict[item.index.fqn])]
        return source.read(MetadataIndex(own, item.index.offset))

    plan = target.plan(planner, {}, ranks)
    request = Request(path, None, None, source.extra, None, name)
    unfinished = folder.Unfinished(path)
    seen = Seen(planner, planner.state_dict, planner.plan.items, facts)
    write(Prepared(request, ranks, unfinished, seen, plan), read)
