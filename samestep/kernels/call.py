"""The arguments of launches: tables of addresses, the step, and how tiles are cut.

With a table of addresses one launch works on many tensors in place.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, reduce
from operator import or_
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from samestep.rules.noise import WORD, Origin, levels
from samestep.rules.rule import Options
from samestep.rules.state import State
from samestep.rules.stored import SCALE_SUFFIX

# Compilers that may fuse a product and a sum choose which, here and there another: then an element
# would be rounded by its place in a tile, which is not the same in a part and in a whole block.
FUSION = False
CHUNK = 4096  # elements of one tensor that one program works on
TILE = 64  # rows and columns of a block or part that one program works on
WIDE = 256  # columns of the tile, as large, of a block that is not turned
# The same where state is rounded at random: that takes registers, and smaller programs leave room
# for some of them to compute while others wait for memory.
SMALL_CHUNK, SMALL_WARPS = 1024, 4
CODED_TILE, CODED_WARPS = 2048, 4  # elements of a tile as wide as a block of codes
CODED_REGISTERS = 80  # of a thread at most: six programs at a time instead of four or five
SEVERAL = 4  # tiles of one program without codes, which begins with a hash of seed and step


T = TypeVar("T")


def tiled(codes: int = 0, *, turned: bool = True) -> dict[str, Any]:
    """Return the constants of a launch on tiles; they are square if `turned`, else wide.

    `turned`: some tiles are read or written transposed.
    `codes`: how many 8-bit codes share a scale, which is the width of a tile; 0: no codes.
    """
    rows, cols, warps, registers = TILE, TILE, 8, {}
    if codes:
        rows, cols, warps = max(1, CODED_TILE // codes), codes, CODED_WARPS
        registers = {"maxnreg": CODED_REGISTERS}
    elif not turned:
        rows, cols = max(1, TILE**2 // WIDE), WIDE
    cut = {"ROWS": rows, "COLS": cols, "num_warps": warps, "enable_fp_fusion": FUSION}
    return {**cut, **registers}


def tiles(rows: int, cols: int, cut: Mapping[str, Any]) -> int:
    """Return the number of tiles that cover a matrix."""
    found: int = -(-rows // cut["ROWS"]) * -(-cols // cut["COLS"])
    return found


class Step(NamedTuple):
    """The numbers and options of one optimizer step of a parameter group."""

    scalars: Mapping[str, Tensor]
    options: Options
    factor: Tensor | None  # gradients are multiplied with it
    maximize: bool
    only_if: Tensor | None  # (): 0 leaves all as it is

    @property
    def momentum(self) -> dict[str, Any]:
        """Return the momentum arguments of kernels that compute directions."""
        return {
            "mu": self.scalars["momentum"],
            "factor": self.factor,
            "EMA": self.options["momentum_form"] == "ema",
            "NESTEROV": self.options["nesterov"],
            "MAXIMIZE": self.maximize,
        }


class Gradients(NamedTuple):
    """The gradients of the tensors that one launch works on."""

    addresses: Tensor  # (count,)
    aligned: bool
    dtype: object  # Triton's
    writes: Tensor | None  # (count,) float64: 0 leaves a tensor as it is


class AddressSource(Protocol):
    """A provider of address tables on the device while a CUDA graph is recorded."""

    def take(self, addresses: Sequence[Sequence[int]]) -> Tensor:
        """Return a table, (rows, columns), that is filled before the graph runs."""
        ...


_source: ContextVar[AddressSource | None] = ContextVar("addresses", default=None)


@contextmanager
def addresses_from(source: AddressSource) -> Iterator[None]:
    """Let every `Table` that is made inside the context take its addresses from `source`."""
    token = _source.set(source)
    try:
        yield
    finally:
        _source.reset(token)


class Table:
    """A table of the addresses where tensors begin, (rows, tensors), on their device."""

    def __init__(self, rows: Sequence[Sequence[Tensor]]) -> None:
        self.tensors = rows
        found = tuple(tuple(map(Tensor.data_ptr, row)) for row in rows)
        # Of 16 bytes each: what lets a program read as much at once.
        self.aligned = not any(
            reduce(or_, of_row) % 16 or reduce(or_, map(Tensor.numel, row)) % 8
            for row, of_row in zip(rows, found, strict=True)
        )
        device = rows[0][0].device
        source = _source.get()
        if source is not None:
            self.addresses = source.take(found)
            return
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "step() is being captured by torch.cuda.graph, which would replay the "
                "learning rates and gradients of the recording for ever: give the "
                "optimizer cuda_graph=True instead"
            )
        # Tensors come back to where they were, step after step: most tables are known.
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        self.addresses = _known_table(found, device, stream)


class Origins:
    """A table of the places of shards in whole tensors, and of seeds, for random rounding.

    (tensors, 4): the index of the first element, the length of a run of neighbours, the stride from
    one run to the next (0: there is only one), and the seed. `places` lets kernels leave work out:
    "near": one run per tensor; "runs": several; both have 32-bit indices; "far": any indices.
    """

    def __init__(self, origins: Sequence[Origin], shapes: Sequence[Sequence[int]]) -> None:
        self.rows = []
        for origin, shape in zip(origins, shapes, strict=True):
            place = _two_levels(origin, shape)
            assert place is not None, "only tensors that `has_two_levels` says yes to come here"
            seed = next(iter(origin.seeds.values())) & WORD  # above it: which half a key takes
            self.rows.append((*place, seed))
        last = max(
            _last_index(origin, shape) for origin, shape in zip(origins, shapes, strict=True)
        )
        several = any(stride for _, _, stride, _ in self.rows)
        self.places = "far" if last > WORD else "runs" if several else "near"

    def on(self, device: torch.device) -> Tensor:
        """Return the table on a device, (tensors, 4) int64."""
        return _known_origins(tuple(self.rows), device)


def codes_per_scale(state: State, key: str) -> int:
    """Return the number of 8-bit codes that share a scale."""
    return state[key].numel() // state[key + SCALE_SUFFIX].numel()


def has_two_levels(origin: Origin, shape: Sequence[int]) -> bool:
    """Whether a shard's elements form runs at one constant stride, as kernels require."""
    return _two_levels(origin, shape) is not None


def _two_levels(origin: Origin, shape: Sequence[int]) -> tuple[int, int, int] | None:
    """Return first index, run length and stride as in `Origins`; None: too many levels."""
    dims, run = levels(shape, origin.strides)
    if not dims:
        return origin.offset, run, 0
    return (origin.offset, run, dims[0][1]) if len(dims) == 1 else None


def _last_index(origin: Origin, shape: Sequence[int]) -> int:
    steps = ((size - 1) * stride for size, stride in zip(shape, origin.strides, strict=True))
    return origin.offset + sum(steps)


def recorded(function: Callable[[], T], device: torch.device) -> tuple[torch.cuda.CUDAGraph, T]:
    """Record the launches of a function as a CUDA graph, without running them.

    Return the graph and the function's result. `torch.cuda.graph` would wait for the device first.
    """
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        # Other threads (gloo's, NCCL's, a data loader's) allocate and wait as they like.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            result = function()
        finally:
            graph.capture_end()
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph, result


@lru_cache(maxsize=256)
def chunk_table(sizes: tuple[int, ...], device: torch.device, chunk: int = CHUNK) -> Tensor:
    """Return (tensor, first element, tensor size) per chunk of `chunk` elements, (chunks, 3)."""
    rows = [
        (number, first, size)
        for number, size in enumerate(sizes)
        for first in range(0, size, chunk)
    ]
    return _on_device(rows or [(0, 0, 0)], device)


@lru_cache(maxsize=256)
def _known_origins(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    return _on_device(rows, device)


@lru_cache(maxsize=256)
def _known_table(rows: tuple[tuple[int, ...], ...], device: torch.device, stream: int) -> Tensor:
    """Return a cached table per stream: another stream would have to wait for the copy."""
    return _on_device(rows, device)


def _on_device(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Copy whole numbers to the device as int64, without waiting for the copy."""
    table = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True)
