"""What it takes to look at attention's largest logits, beside the attention itself.

python -m benchmarks.qk_clip --out DIR   # needs one GPU, and torch alone

Milliseconds of one layer in bfloat16, causal, in turns: forward and backward of
`scaled_dot_product_attention`, the kernel that QK-clip looks with, and the same in plain torch.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import write_json
from benchmarks.small_state import where
from samestep.bench.gpu.measure import in_turn, settle, take_turn, times_of
from samestep.bench.gpu.options import device_of
from samestep.qk_clip import largest_logits, logits
from samestep.tooling.output import check_folder


class Layer(NamedTuple):
    """Attention of one layer."""

    batch: int
    heads: int
    kv_heads: int
    places: int
    size: int


LAYERS = {
    "cuda": [
        Layer(16, 12, 12, 1024, 64),
        Layer(8, 16, 16, 2048, 128),
        Layer(4, 32, 8, 4096, 128),
        Layer(1, 32, 8, 16384, 128),
        Layer(2, 64, 64, 4096, 192),
    ],
    "cpu": [Layer(2, 2, 1, 32, 16)],
}


def contestants(layer: Layer, device: torch.device) -> dict[str, Callable[[], Any]]:
    """What is timed, by its name."""

    def random(heads: int) -> Tensor:
        shape = layer.batch, layer.places, heads, layer.size
        return torch.randn(shape, device=device, dtype=torch.bfloat16).transpose(1, 2)

    q, k, v = random(layer.heads), random(layer.kv_heads), random(layer.kv_heads)
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    grad = torch.randn_like(q)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = layer.heads != layer.kv_heads
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    def both() -> None:
        torch.autograd.grad(attention(*leaves), leaves, grad)

    def plain() -> Tensor:
        with patch.object(logits, "missing", lambda device: "for comparison"):
            return largest_logits(q, k, is_causal=True)

    return {
        "forward": lambda: attention(q, k, v),
        "forward and backward": both,
        "largest logits": lambda: largest_logits(q, k, is_causal=True),
        "the same in plain torch": plain,
    }


def run(options: argparse.Namespace, command: str) -> None:
    check_folder(options.out)
    device, rows = device_of(options.device), []
    names: list[str] = []
    for layer in LAYERS[options.device]:
        torch.manual_seed(0)
        asked = contestants(layer, device)
        for call in asked.values():
            for _ in range(3):
                call()
        settle(device)
        times: dict[str, list[float]] = {name: [] for name in asked}
        for number in range(options.rounds):
            for name in in_turn(list(asked), number):
                times[name].append(take_turn(asked[name], device).ms)
        found = {name: times_of(own) for name, own in times.items()}
        if not names:
            names = list(found)
            print(f"{'batch x heads/keys x places x size':36}" + "".join(f"{n:>26}" for n in names))
        shape = f"{layer.batch} x {layer.heads}/{layer.kv_heads} x {layer.places} x {layer.size}"
        print(f"{shape:36}" + "".join(f"{found[name].median:26.3f}" for name in names))
        ms = {name: own._asdict() for name, own in found.items()}
        rows.append({"layer": layer._asdict(), "ms": ms})
    write_json(options.out, "qk_clip.json", {"command": command, **where(device), "rows": rows})


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("out/qk-clip"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try it")
    words = sys.argv[1:] if given is None else given
    run(
        parser.parse_args(words),
        shlex.join(["python", "-m", "benchmarks.qk_clip", *words]),
    )


if __name__ == "__main__":
    main()
