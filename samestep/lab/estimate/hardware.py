"""Hardware as numbers in a file: rates of a device, and of links between devices."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from samestep.lab.estimate.grid import Grid, Peers
from samestep.plan.links import GPU_LINKS, Fabric, Link
from samestep.tooling.request import BadRequestError, read_json

FORMAT = 1
RINGS = ("all_gather", "all_reduce", "broadcast", "reduce_scatter")


@dataclass(frozen=True)
class Hardware:
    """A cluster of equal hosts.

    product_rates: measured FLOP/s of orthogonalization by the short side of a block; interpolated
        between two sides, and the nearest side's rate outside them.
    bytes_rate: bytes per second that updates read and write.
    call: seconds that the host or device needs per piece, whatever its size.
    model_rate: FLOP/s of forward and backward.
    host_rate: bytes per second between a device and pinned memory of its host, each way at once;
        the default was measured over PCIe 5 with 16 lanes, on the host of one H200.
    measured: links by kind of collective and number of ranks, where `--calibrate` measured them.
    """

    name: str
    source: str
    device_memory: int
    ranks_per_host: int
    product_rates: Mapping[int, float]
    bytes_rate: float
    call: float
    model_rate: float
    inside: Link
    between: Link
    on_cpu: bool = False
    host_rate: float = 5.0e10
    measured: Mapping[str, Mapping[int, Link]] = field(default_factory=dict)

    def product_rate(self, side: int) -> float:
        sides = sorted(self.product_rates)
        if side <= sides[0]:
            return self.product_rates[sides[0]]
        for low, high in pairwise(sides):
            if side <= high:
                share = (side - low) / (high - low)
                rates = self.product_rates
                return rates[low] + share * (rates[high] - rates[low])
        return self.product_rates[sides[-1]]

    def fabric(self, peers: Peers, grid: Grid) -> Fabric:
        """Return the links between a rank and its peers; hosts have neighbouring ranks."""
        on_host = peers_on_host(peers, grid, self.ranks_per_host)
        return Fabric(self.inside, self.between, peers.size, on_host)

    def seconds(self, kind: str, carried: float, fabric: Fabric) -> float:
        """Return the seconds of a collective whose busiest direction carries so many bytes."""
        by_ranks, ranks = self.measured.get(kind), fabric.ranks
        if by_ranks:
            nearest = min(by_ranks, key=lambda known: (abs(known - ranks), known))
            return by_ranks[nearest].seconds(ranks, carried)
        link = fabric.ring() if kind in RINGS else fabric.exchange()
        return link.seconds(ranks, carried)


def device_of(hardware: Hardware) -> torch.device:
    return torch.device("cpu" if hardware.on_cpu else "cuda")


def peers_on_host(peers: Peers, grid: Grid, ranks_per_host: int) -> int:
    """Return the number of peers on the host of the first rank, the first rank included."""
    outside = [(axis, beside.size) for axis, beside in grid.beside.items()]
    stride, found = 1, 1
    for axis, size in reversed([*outside, *grid.sizes.items()]):
        if axis in peers.axes:
            found *= min(size, max(1, ranks_per_host // stride))
        stride *= size
    return found


# Rates of products: what `calibration.hardware_of` finds in benchmarks/results for one H200,
# counting products as if none were symmetric; for other devices scaled by their dense 16-bit peaks.
_H200_RATES = {1280: 8.2e14, 2048: 8.7e14}
_H200 = Hardware(
    name="h200x8",
    source=(
        "NVIDIA H200 SXM data sheet: 141 GB, 4.8 TB/s, NVLink 900 GB/s in both directions "
        "together; rates of products, bytes and calls from benchmarks/results on one H200; "
        "400 Gbit/s per GPU between hosts, 80% of it reached; latencies are assumed"
    ),
    device_memory=150_109_880_320,
    ranks_per_host=8,
    product_rates=_H200_RATES,
    bytes_rate=4.2e12,
    call=1.3e-5,
    model_rate=4.0e14,
    inside=GPU_LINKS[0],
    between=GPU_LINKS[1],
)
_H100 = replace(
    _H200,
    name="h100x8",
    source=(
        "NVIDIA H100 SXM data sheet: 80 GB, 3.35 TB/s, NVLink 900 GB/s in both directions "
        "together, 989 TFLOP/s dense bfloat16 as the H200; 400 Gbit/s per GPU between hosts, "
        "80% of it reached; rates scaled from the H200, latencies assumed"
    ),
    device_memory=80 * 10**9,
    bytes_rate=2.9e12,
)
_H800 = replace(
    _H100,
    name="h800x8",
    source=(
        "DeepSeek-V3 report (arXiv 2412.19437): 2048 H800, 8 per host, NVLink 160 GB/s, "
        "InfiniBand 50 GB/s per GPU; 80 GB; other rates as h100x8"
    ),
    inside=Link(2e-5, 1.6e11, 1e-6),
)
_PRESETS = (
    _H200,
    _H100,
    _H800,
    Hardware(
        name="a100x8",
        source=(
            "NVIDIA A100 SXM 80 GB data sheet: 2.0 TB/s, NVLink 600 GB/s in both directions "
            "together, 312 TFLOP/s dense bfloat16; 200 Gbit/s per GPU between hosts, 80% of it "
            "reached; rates of products scaled from the H200 by the peaks, latencies assumed"
        ),
        device_memory=80 * 10**9,
        ranks_per_host=8,
        product_rates={side: rate * 312 / 989 for side, rate in _H200_RATES.items()},
        bytes_rate=1.7e12,
        call=1.3e-5,
        model_rate=1.4e14,
        host_rate=2.5e10,  # PCIe 4
        inside=Link(2e-5, 2.4e11, 1e-6),
        between=Link(3e-5, 2.0e10, 1e-6),
    ),
    Hardware(
        name="mi250x8",
        source=(
            "Parallel Muon's report: 4 MI250 cards, 8 devices, 151 TFLOP/s per card in the whole "
            "step, of which 78% were products; AMD MI250 data sheet: 64 GB and 1.6 TB/s per "
            "device; links of 50 GB/s and latencies are assumed"
        ),
        device_memory=64 * 10**9,
        ranks_per_host=8,
        product_rates={1280: 151e12 / 2 / 0.78, 4096: 151e12 / 2 / 0.78},
        bytes_rate=1.1e12,
        call=5e-6,
        model_rate=6.0e13,
        host_rate=2.5e10,  # PCIe 4
        inside=Link(3e-5, 5.0e10, 2e-6),
        between=Link(5e-5, 1.0e10, 2e-6),
    ),
)
PRESETS = {preset.name: preset for preset in _PRESETS}


def hardware_as_json(hardware: Hardware) -> dict[str, Any]:
    return {"kind": "samestep hardware", "format": FORMAT, **asdict(hardware)}


def find_hardware(text: str) -> Hardware:
    """Return a preset by name, or read a hardware file; raise BadRequestError if neither works."""
    if text in PRESETS:
        return PRESETS[text]
    path = Path(text)
    if path.suffix != ".json":
        raise BadRequestError(
            f"--hardware {text!r} is neither a preset ({', '.join(PRESETS)}) nor a "
            ".json file of samestep plan --calibrate"
        )
    about = f"--hardware: {str(path)!r}"
    content = read_json(path, "--hardware: ")
    if not isinstance(content, dict) or content.get("kind") != "samestep hardware":
        raise BadRequestError(f"{about} is no hardware file of samestep plan --calibrate")
    if content.get("format") != FORMAT:
        raise BadRequestError(f"{about} has format {content.get('format')!r}, not {FORMAT}")
    try:
        inside, between = Link(**content["inside"]), Link(**content["between"])
        measured = {
            kind: {int(ranks): Link(**link) for ranks, link in by_ranks.items()}
            for kind, by_ranks in content.get("measured", {}).items()
        }
        rates = {int(side): float(rate) for side, rate in content["product_rates"].items()}
        read: dict[str, Any] = {
            "inside": inside, "between": between, "measured": measured, "product_rates": rates
        }  # fmt: skip
        plain = (own.name for own in fields(Hardware) if own.name not in read)
        given = {key: content[key] for key in plain if key in content or key != "host_rate"}
        found = Hardware(**read, **given)
    except KeyError as error:
        raise BadRequestError(f"{about} lacks {error.args[0]!r}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise BadRequestError(f"{about}: {error}") from error
    numbers = [found.bytes_rate, found.model_rate, found.ranks_per_host, found.device_memory]
    numbers.append(found.host_rate)
    if not rates or not all(number > 0 for number in (*numbers, *rates.values())):
        raise BadRequestError(f"{about}: rates and sizes must be above 0")
    return found
