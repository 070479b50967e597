"""What a run leaves on disk: JSON, and a picture where one can be drawn."""

import json
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from samestep.bench.gpu.ceilings import Ceilings
from samestep.bench.gpu.peers import revisions
from samestep.kernels.choice import missing_products
from samestep.tooling.output import write_files
from samestep.version import __version__

FORMAT = 1


def heading(
    kind: str, command: str, device: torch.device, ceilings: Ceilings, peer_paths: Sequence[Path]
) -> dict[str, Any]:
    """What every receipt begins with."""
    return {
        "kind": kind,
        "format": FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "versions": {
            "samestep": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": _installed("triton"),
        },
        "device": describe(device),
        "kernels_missing": missing_products(device),
        "peers": revisions(peer_paths),
        "ceilings": {
            "tflops": ceilings.flops / 1e12,
            "tflops_when_hot": ceilings.hot_flops / 1e12,
            "terabytes_per_second": ceilings.bytes / 1e12,
        },
    }


def describe(device: torch.device) -> dict[str, Any]:
    """Which device it is."""
    if device.type != "cuda":
        return {"type": "cpu", "name": platform.machine()}
    properties = torch.cuda.get_device_properties(device)
    return {
        "type": "cuda",
        "name": properties.name,
        "memory": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "capability": [properties.major, properties.minor],
    }


def leave(folder: Path, name: str, content: dict[str, Any], picture: bytes | None) -> list[str]:
    """Write the files; their names."""
    files = {f"{name}.json": json.dumps(content, indent=1).encode() + b"\n"}
    if picture is not None:
        files[f"{name}.png"] = picture
    write_files(folder, files)
    return list(files)


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
