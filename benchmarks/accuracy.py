"""How far orthogonalizations are from their own polynomial in float64: ours and those of peers.

The same blocks for all, by shape and spectrum: the distance relative to the exact result, median
and worst. A peer's loop runs if `--peer-path` leads to its checkout. Needs torch alone.
"""

import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from benchmarks import heading, run_script, write_json
from benchmarks.hard_blocks import Shape, blocks_of
from benchmarks.kernel_arithmetic import BFLOAT16, FLOAT16, OLD, OLD_SEGMENTS, emulated
from samestep.lab.bench.gpu.measure import our_reference, polynomial
from samestep.lab.bench.gpu.options import make_importable, peer
from samestep.lab.bench.orthogonalize import Function
from samestep.rules.orthogonalize import USUAL_TABLE, cheaper_execution, orthogonalize
from samestep.tooling.request import Flag

SHAPES: tuple[Shape, ...] = ((6, 12), (64, 64), (128, 128), (128, 512), (256, 1024))
LARGE: tuple[Shape, ...] = ((768, 768), (768, 3072), (2048, 2048))
SPECTRA = ("gaussian", "power law", "steep", "low rank", "equilibrated", "uneven rows")
POLAR, QUINTIC = our_reference("polar-express"), our_reference("newton-schulz")


def contestants(device: torch.device) -> Iterator[tuple[str, Function]]:
    """Ours as it runs on the device (emulated on a CPU), as it was, and who can be imported."""
    on_gpu = device.type == "cuda"
    emulated_polar = partial(emulated, table=USUAL_TABLE, norm_factor=POLAR.norm_factor)

    def ours(arithmetic: Any, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        if on_gpu:
            return lambda X: orthogonalize(X, compute_dtype=dtype)
        return lambda X: emulated_polar(
            X, execution=cheaper_execution(*X.shape[1:]), arithmetic=arithmetic
        )

    def before(X: Tensor) -> Tensor:
        wide = max(X.shape[1:]) >= 1.5 * min(X.shape[1:])
        segments = OLD_SEGMENTS if wide else None
        return emulated_polar(X, execution="standard", arithmetic=OLD, segments=segments)

    yield "ours, float16", Function(ours(FLOAT16, torch.float16), POLAR)
    yield "ours, bfloat16", Function(ours(BFLOAT16, torch.bfloat16), POLAR)
    yield "ours before, emulated", Function(before, POLAR)
    yield "nanochat's loop", Function(_nanochat, POLAR)
    yield "torch", Function(_each(peer("torch.optim._muon")._zeropower_via_newtonschulz), QUINTIC)
    try:
        dion = peer("dion.polar_express").polar_express
        # Not compiled: tuning its kernels takes minutes for each shape, and the rounding is that of
        # bfloat16 either way.
        plain = getattr(dion, "_torchdynamo_orig_callable", dion)
        yield "dion", Function(plain, POLAR._replace(norm_factor=1.02))
    except ImportError as error:
        print(f"dion takes no part: {error}", file=sys.stderr)


def _each(function: Any) -> Callable[[Tensor], Tensor]:
    """It takes one matrix, and scales it in place."""
    triple = QUINTIC.table[0]
    return lambda X: torch.stack([function(matrix.clone(), triple, 5, 1e-7) for matrix in X])


def _nanochat(blocks: Tensor) -> Tensor:
    """The loop of nanochat/optim.py, which is the middle of a larger function there."""
    X = blocks.bfloat16()
    X = X / (X.norm(dim=(-2, -1), keepdim=True) * 1.01 + 1e-6)
    X = X.mT if X.shape[1] > X.shape[2] else X
    for a, b, c in POLAR.table:
        A = X @ X.mT
        B = b * A + c * (A @ A)
        X = a * X + B @ X
    found: Tensor = X.mT if blocks.shape[1] > blocks.shape[2] else X
    return found


def distances(blocks: Tensor, function: Function) -> list[float]:
    """Of each block, relative to the norm of the exact result."""
    assert function.reference is not None
    wanted = torch.stack([polynomial(block, function.reference) for block in blocks])
    found = function.call(blocks.clone()).double()
    norms = torch.linalg.matrix_norm(found - wanted) / torch.linalg.matrix_norm(wanted)
    return [float(norm) for norm in norms]


@dataclass(frozen=True)
class Options:
    """What to measure, and where."""

    device: str = "cpu"
    blocks: Annotated[int, "of each shape and spectrum"] = 8
    large: Annotated[bool, "also 768x768 and up"] = False
    peer_path: Annotated[tuple[Path, ...], Flag("a checkout of a peer", one_by_one=True)] = ()
    out: Path = Path("out/bench")


def main(options: Options) -> int:
    make_importable(options.peer_path)
    device = torch.device(options.device)
    present = dict(contestants(device))
    print(f"{'':26s}" + "".join(f"{name:>24s}" for name in present))
    rows = []
    for shape in (*SHAPES, *(LARGE if options.large else ())):
        for number, kind in enumerate(SPECTRA):
            blocks = blocks_of(
                kind, shape, options.blocks, number, USUAL_TABLE, device, scaled=False
            )
            found = {name: distances(blocks, function) for name, function in present.items()}
            cells = {
                name: {"median": statistics.median(of), "worst": max(of)}
                for name, of in found.items()
            }
            rows.append({"shape": shape, "spectrum": kind, "distances": cells})
            texts = (f"{cell['median']:.5f} / {cell['worst']:.5f}" for cell in cells.values())
            print(f"{f'{shape[0]}x{shape[1]} {kind}':26s}" + "".join(f"{t:>24s}" for t in texts))
    receipt = {
        **heading("accuracy", options, device=device),
        "distances to the polynomial in float64, relative": rows,
    }
    write_json(options.out, "accuracy.json", receipt)
    return 0


if __name__ == "__main__":
    run_script(main, Options)
