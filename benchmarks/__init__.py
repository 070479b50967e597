"""Measurements of this repository: what its documentation says of speed and memory."""

import json
from collections.abc import Mapping
from pathlib import Path

from samestep.tooling.output import write_files


def write_json(folder: Path, name: str, content: Mapping[str, object], indent: int = 2) -> None:
    write_files(folder, {name: json.dumps(content, indent=indent).encode() + b"\n"})
    print(f"written to {folder / name}")
