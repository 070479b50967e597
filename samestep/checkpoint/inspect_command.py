"""`samestep inspect`: shows the contents of a checkpoint."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any, ClassVar

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from samestep.checkpoint import folder
from samestep.checkpoint.formats import WRITTEN_AS, open_checkpoint
from samestep.checkpoint.logical import name_and_key
from samestep.checkpoint.storage import CheckpointError, StoredCheckpoint
from samestep.tooling.request import BadRequestError, Flag

# Of a folder that torch has written.
UNKNOWN: dict[str, Any] = {
    "format": None,
    WRITTEN_AS: "torch.distributed.checkpoint",
    "samestep": None,
    "torch": None,
    "fingerprint": "",
    "files": {},
}


@dataclass(frozen=True)
class Options:
    """Show the parameters, options and metadata of a checkpoint.

        samestep inspect out/gpt/checkpoints
        samestep inspect out/gpt/checkpoints/step_00000300 --verify

    Exit status: 0, shown; 2, the checkpoint is missing or damaged, and the error says which file.
    """

    SECTIONS: ClassVar[Mapping[str, str]] = {"verify": "what is checked and shown"}

    path: Annotated[
        Path,
        Flag(
            "a checkpoint, or a folder whose file LATEST names one",
            metavar="PATH",
            positional=True,
        ),
    ]
    verify: Annotated[bool, "also compare the SHA-256 checksums of all files"] = False
    json: Annotated[bool, "print everything as JSON"] = False


def run(options: Options) -> int:
    try:
        stored = open_checkpoint(folder.find(options.path))
        if options.verify:
            stored.verify()
    except CheckpointError as error:
        raise BadRequestError(str(error)) from error
    facts = contents(stored) | {"verified": options.verify}
    if options.json:
        sys.stdout.write(f"{json.dumps(facts, indent=1)}\n")
    else:
        _show(facts, Console())
    return 0


def contents(stored: StoredCheckpoint) -> dict[str, Any]:
    """The record that `--json` prints."""
    content = {**UNKNOWN, **stored.content}
    parameters: dict[str, dict[str, Any]] = {}
    rules = {
        name: group["options"]["rule"] for group in content["groups"] for name in group["params"]
    }
    for tensor, entry in stored.tensors.items():
        name, key = name_and_key(tensor)
        known = parameters.setdefault(
            name, {"rule": rules.get(name), "shape": None, "dtype": None, "bytes": 0, "state": {}}
        )
        dtype = entry.properties.dtype
        known["bytes"] += entry.size.numel() * dtype.itemsize
        described = {"shape": list(entry.size), "dtype": str(dtype).removeprefix("torch.")}
        if key is None:
            known.update(described)
        else:
            known["state"][key] = described
    same = ("format", WRITTEN_AS, "samestep", "torch", "world_size", "fingerprint", "layout")
    return {
        "path": str(stored.folder),
        **{key: content[key] for key in (*same, "extra", "groups", "files")},
        "bytes": sum(content["files"].values()),
        "parameters": {name: parameters[name] for name in sorted(parameters)},
    }


def _show(facts: dict[str, Any], console: Console) -> None:
    table = Table("parameter", "rule", "shape", "dtype", "state", "bytes", box=None)
    table.columns[-1].justify = "right"
    for name, entry in facts["parameters"].items():
        state = ", ".join(
            key if own["dtype"] == "float32" else f"{key} ({own['dtype']})"
            for key, own in entry["state"].items()
        )
        shape = "" if entry["shape"] is None else " x ".join(map(str, entry["shape"])) or "()"
        cells = (name, entry["rule"] or "", shape, entry["dtype"] or "", state)
        table.add_row(*map(escape, cells), f"{entry['bytes']:,}")
    console.print(table)
    elements = sum(prod(e["shape"]) for e in facts["parameters"].values() if e["shape"] is not None)
    files, ranks = len(facts["files"]), facts["world_size"]
    lines = [
        f"{elements:,} elements in the model, {facts['bytes']:,} bytes in {files} files",
        f"format {facts[WRITTEN_AS]}, saved by {ranks} ranks",
        f"samestep {facts['samestep']}, torch {facts['torch']}",
        *(f"  {line}" for line in facts["layout"]),
        f"extra: {json.dumps(facts['extra'])}",
        "every checksum is right" if facts["verified"] else "checksums: not compared (--verify)",
        facts["path"],
    ]
    for line in lines:
        console.print(escape(line), highlight=False)
