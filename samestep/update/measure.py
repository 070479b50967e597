"""Measures which kernels are fastest for symmetric products, once per shape and machine.

A batch of a fixed size is measured, so that the choice depends on the shape of a block alone: its
result must not depend on other blocks. The first rank measures and sends its choices to the others.
All ways take turns until the chip is as hot as in training, where power limits its speed.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from samestep.comm.groups import RankGroup
from samestep.comm.integrity.agreement import gather_texts
from samestep.kernels.choice import WAYS, Shape, Way, products_of, settled, way_of
from samestep.version import __version__

BATCH_ELEMENTS = 1 << 27  # of all operands that are measured at once
AHEAD = 0.97  # of the time of what is taken unmeasured: less could be noise
ROUNDS = 4  # in which each way has a turn
TURN = 25.0  # milliseconds

# `way_of` is what was measured there from so many rows on (benchmarks/results/step_parts_gpu.txt).
KNOWN_DEVICE, KNOWN_SIZE = "H200", 1024

Measure = Callable[[Shape, torch.device], Mapping[Way, float]]


def settle(
    blocks: Iterable[tuple[int, int]],  # rows, cols
    device: torch.device,
    group: RankGroup | None,
    measure: Measure | None = None,
) -> None:
    """Choose kernels for the symmetric products of blocks; a collective if given a group."""
    wanted = sorted({shape for block in blocks for shape in products_of(*block)})
    found: dict[Shape, Way] = {}
    if group is None or group.rank == 0:
        found = _measured(wanted, device, measure or milliseconds)
    if group is not None:
        text = gather_texts("ways of products", _text(found), group, device)[0]
        found = _ways(json.loads(text))
    for shape in wanted:  # in a fake group a rank hears itself alone
        settled.setdefault(shape, found.get(shape, way_of(*shape)))


def _measured(
    shapes: Iterable[Shape],
    device: torch.device,
    measure: Measure,
) -> dict[Shape, Way]:
    """Return the choice for each shape, from the cache file or by measuring."""
    known = {**_kept(device), **settled}
    unknown = [shape for shape in shapes if shape not in known and not _goes_by_rule(shape, device)]
    if unknown and measure is milliseconds:
        _compile(unknown, device)
    new = {shape: _fastest(shape, device, measure) for shape in unknown}
    # What another process has found meanwhile counts: later ones will read it, and have its bits.
    found = {**new, **_kept(device)}
    if new:
        _keep(found, device)
    return {**found, **settled}


def _goes_by_rule(shape: Shape, device: torch.device) -> bool:
    """Whether `way_of` decides for a shape without measuring."""
    size, _ = shape
    if device.type != "cuda" or size < KNOWN_SIZE:
        return False
    return KNOWN_DEVICE in torch.cuda.get_device_name(device)


def _fastest(shape: Shape, device: torch.device, measure: Measure) -> Way:
    usual = way_of(*shape)
    times = measure(shape, device)
    best = min(WAYS, key=times.__getitem__)
    return best if times[best] < AHEAD * times[usual] else usual


def _compile(shapes: Iterable[Shape], device: torch.device) -> None:
    """Compile the candidate kernels in parallel."""
    from samestep.kernels.launch import compile_ahead
    from samestep.kernels.symmetric import symmetric_product

    def products() -> None:
        for size, depth in shapes:
            X = torch.empty(1, size, depth, device=device, dtype=torch.float16)
            for way in WAYS:
                symmetric_product(X, X, way=way)

    compile_ahead(products, device)


def milliseconds(shape: Shape, device: torch.device) -> dict[Way, float]:
    """Return the time of a batch of products by each way, in ms; inf: tiles do not fit."""
    from triton.runtime.errors import OutOfResources

    from samestep.kernels.symmetric import symmetric_product

    size, depth = shape
    count = min(max(4, BATCH_ELEMENTS // (size * depth)), 256)  # tiles for every multiprocessor
    X = torch.randn(count, size, depth, device=device, dtype=torch.float16)
    times: dict[Way, list[float]] = {}
    for way in WAYS:
        with suppress(OutOfResources):
            _timed(partial(symmetric_product, X, X, way=way), 1)  # compiles
            times[way] = []
    for _ in range(ROUNDS):
        for way, of_way in times.items():
            product = partial(symmetric_product, X, X, way=way)
            count = max(1, round(TURN / max(_timed(product, 3), 1e-3)))
            of_way.append(_timed(product, count))
    return {way: median(times[way][1:]) if way in times else float("inf") for way in WAYS}


def _timed(function: Callable[[], object], count: int) -> float:
    """Return the mean time of a call on the device, in ms."""
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    begin.record()
    for _ in range(count):
        function()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / count


# --- what a machine has found stays on it --------------------------------------------------


def _kept(device: torch.device) -> dict[Shape, Way]:
    """Read the choices for a device from the cache file; none if it cannot be read."""
    try:
        entries = json.loads(_file().read_text())[_key(device)]
        return _ways(entries)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _keep(ways: Mapping[Shape, Way], device: torch.device) -> None:
    """Write choices for a device to the cache file, atomically."""
    path = _file()
    with suppress(OSError, ValueError):
        path.parent.mkdir(parents=True, exist_ok=True)
        others = {}
        with suppress(OSError, ValueError):
            others = dict(json.loads(path.read_text()))
        others[_key(device)] = json.loads(_text(ways))
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as new:
            json.dump(others, new, indent=1)
        os.replace(new.name, path)


def _file() -> Path:
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "samestep" / "products.json"


def _key(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{name}, torch {torch.__version__}, samestep {__version__}"


def _text(ways: Mapping[Shape, Way]) -> str:
    return json.dumps({f"{size}x{depth}": way for (size, depth), way in ways.items()})


def _ways(entries: Mapping[str, str]) -> dict[Shape, Way]:
    found: dict[Shape, Way] = {}
    for text, name in entries.items():
        size, depth = map(int, text.split("x"))
        found[size, depth] = WAYS[WAYS.index(name)]
    return found
