"""`convert`: turns a checkpoint of any known format into one of samestep, on one process.

A box at a time is in memory: files are mapped, and what is written is read from them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from samestep.checkpoint import folder, formats
from samestep.checkpoint.foreign import deepspeed, megatron, naming, torch_save, trainer
from samestep.checkpoint.foreign.conventions import checked, with_preset, with_step
from samestep.checkpoint.formats import FORMATS, open_checkpoint, own_name
from samestep.checkpoint.logical import MODEL, Pieces, empty_pieces, name_and_key
from samestep.checkpoint.ranks import Ranks, plan_locally
from samestep.checkpoint.saving import Prepared, SaveRequest, Seen, facts_of, write
from samestep.checkpoint.sources import Names, Part, Source, SourceOptions
from samestep.checkpoint.storage import INDEX, CheckpointError, claims_of
from samestep.checkpoint.torch_files import TorchFiles
from samestep.layout.boxes import Box

Kind = Literal["samestep", "torch", "dcp", "megatron", "deepspeed", "dion", "nanochat", "trainer"]
OF_FILES: tuple[Kind, ...] = ("dion", "nanochat")  # which are torch's but for what groups have
READERS: dict[str, Callable[[Path, SourceOptions], Source]] = {
    "megatron": megatron.read,
    "deepspeed": deepspeed.read,
    "trainer": trainer.read,
}
# Under these names too.
ALIASES = {"samestep": "fully_reshardable", "torch": "fsdp_dtensor"} | formats.ALIASES


@dataclass(frozen=True)
class Row:
    """A tensor of the new checkpoint and where it comes from."""

    tensor: str  # its name there
    origin: str
    shape: tuple[int, ...]
    dtype: str
    to: str


@dataclass(frozen=True)
class Converted:
    """The report of what `convert` has written, or would write."""

    source: Path
    target: Path
    kind: Kind
    rows: list[Row]
    groups: int
    left_out: list[str]
    written: bool

    def as_json(self) -> dict[str, Any]:
        rows = [
            {"tensor": r.tensor, "from": r.origin, "shape": r.shape, "dtype": r.dtype, "to": r.to}
            for r in self.rows
        ]
        return {
            "source": str(self.source),
            "target": str(self.target),
            "from": self.kind,
            "written": self.written,
            "groups": self.groups,
            "left_out": self.left_out,
            "tensors": rows,
        }


@torch.no_grad()
def convert(
    source: str | Path,
    target: str | Path,
    *,
    kind: Kind | None = None,
    to: str = "fully_reshardable",
    optimizers: Sequence[str | Path] = (),
    names: Names | str | Path | None = None,
    model: nn.Module | None = None,
    rename: Sequence[tuple[str, str]] = (),
    preset: str | None = None,
    step: int | None = None,
    only: Part | None = None,
    verify: bool = True,
    dry_run: bool = False,
) -> Converted:
    """Read a checkpoint of any known format and write a complete one of samestep, or nothing.

    Args:
        source: A folder or file.
        target: A folder that does not exist yet.
        kind: Whose it is; found out if None.
        to: The format to write.
        optimizers: Files with state dicts of optimizers, if the source has the model alone.
        names: Where files know parameters by number: their names in the optimizer's order, in one
            list or one per group; or a JSON file with these.
        model: The same from a model (on the meta device too), where its order is the optimizer's.
        rename: Pairs of a regular expression and what stands for it, applied to names in order.
        preset: Give Muon's groups the options of a preset but for their numbers; momentum is
            rescaled where it is kept otherwise there.
        step: The count of steps of AdamW, for files that have none.
        only: Take the model alone, or the optimizer alone.
        verify: Compare checksums, of sources that have some.
        dry_run: Read everything, and write nothing.

    Raises:
        CheckpointError: Nothing is left behind.
    """
    path = Path(source)
    if isinstance(names, str | Path):
        names = naming.names_in(Path(names))
    given = SourceOptions([Path(file) for file in optimizers], names, model, verify, only, step)
    with claims_of(path):
        found = kind or kind_of(path)
        read = _part(_read(path, found, given), only)
    if kind in OF_FILES and kind not in read.by:
        whose = ", ".join(sorted(read.by)) or "no optimizer"
        raise CheckpointError(f"{path} is a checkpoint of {whose}, not of {kind}: leave --from out")
    read = naming.renamed(with_preset(with_step(read, step), preset), rename)
    if not read.tensors:
        raise CheckpointError("{path} has no tensors")
    if found != "samestep":  # whose rules may be anybody's
        checked(read)
    if not dry_run:
        _write(read, Path(target), own_name(ALIASES.get(to, to)))
    rows = [
        Row(
            name_and_key(name)[0],
            read.origins.get(name, name),
            tuple(entry.size),
            str(entry.properties.dtype).removeprefix("torch."),
            name,
        )
        for name, entry in read.tensors.items()
    ]
    found = next((own for own in OF_FILES if own in read.by), found)
    return Converted(path, Path(target), found, rows, len(read.groups), read.left_out, not dry_run)


def _part(source: Source, only: Part | None) -> Source:
    """The report without the part that --only leaves out."""
    if only is None:
        return source
    kept = {
        name: entry
        for name, entry in source.tensors.items()
        if name.startswith(f"{MODEL}.") == (only == "model")
    }
    return replace(source, tensors=kept, groups=[] if only == "model" else source.groups)


def kind_of(path: Path) -> Kind:
    """The package that wrote a checkpoint, found by its files."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if path.is_file():
        return "torch"  # or dion's, or nanochat's: its groups tell
    if (path / INDEX).is_file() or (path / folder.LATEST).is_file():
        return "samestep"
    if megatron.folder_of(path) is not None:
        return "megatron"
    if trainer.is_trainer(path):
        return "trainer"
    if deepspeed.folder_of(path) is not None:
        return "deepspeed"
    if (path / folder.METADATA).is_file():
        return "dcp"
    raise CheckpointError(
        f"{path} is no checkpoint of a known format: it has no {INDEX}, no "
        f"{folder.METADATA}, no *_optim_states.pt and no optimizer.pt; give the folder "
        "that has these files, or name the format with --from"
    )


def _read(path: Path, kind: Kind, given: SourceOptions) -> Source:
    if kind in READERS:
        return READERS[kind](path, given)
    if path.is_file():
        if kind in ("samestep", "dcp"):
            raise CheckpointError(
                f"{path} is a file, and checkpoints of {kind} are folders: give the folder"
            )
        return torch_save.read(path, given)
    if given.optimizers:
        raise CheckpointError(
            f"--optimizer goes with a SOURCE that is a file of torch.save, and {path} "
            "is a folder, which has its optimizer state inside: leave --optimizer out"
        )
    stored = open_checkpoint(folder.find(path))
    if given.verify:
        stored.verify()
    known = [stored.content[key] for key in ("groups", "extra", "world_size")]
    source = Source(stored.read, stored.tensors, {}, *known)
    if isinstance(stored, TorchFiles):
        if stored.refusal and given.only != "model":
            raise stored.refusal
        source.left_out, source.origins, source.by = stored.left_out, stored.origins, stored.by
    return source


def _without_values(entry: TensorStorageMetadata) -> Pieces:
    boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
    return empty_pieces(entry.size, entry.properties.dtype, torch.device("meta"), boxes)


def _write(source: Source, path: Path, name: str) -> None:
    ranks = Ranks()
    facts = facts_of(name, source.world_size, source.groups, source.extra)
    target = FORMATS[name]
    tensors = {key: _without_values(entry) for key, entry in source.tensors.items()}
    planner = plan_locally(target.state_dict(tensors, facts), target.is_nested)
    ours = {id(tensor): key for key, tensor in tensors.items()}

    def read(item: WriteItem) -> Tensor:
        own = ours[id(planner.state_dict[item.index.fqn])]
        return source.read(MetadataIndex(own, item.index.offset))

    plan = target.plan(planner, {}, ranks)
    request = SaveRequest(path, None, None, source.extra, None, name)
    unfinished = folder.Unfinished(path)
    seen = Seen(planner, planner.state_dict, facts)
    write(Prepared(request, ranks, unfinished, unfinished.folder, seen, plan), read)
