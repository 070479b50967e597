"""What it takes to look at attention's largest logits, beside the attention itself.

python -m benchmarks.qk_clip --out DIR   # needs one GPU, and torch alone

Milliseconds of one layer in bfloat16, causal, in turns: forward and backward of
`scaled_dot_product_attention`, the kernel that QK-clip looks with, and the same in plain torch.
Then of whole training steps of a GPT under autocast, with a QK-clip and without.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import samestep
from benchmarks import heading, run_script, write_json
from samestep.lab.bench.gpu.measure import in_rounds, take_turn, times_of
from samestep.lab.bench.gpu.options import device_of
from samestep.models.gpt import GPT, GPTConfig
from samestep.qk_clip import QKClip, QKHeads, largest_logits, logits
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


def training(rounds: int, device: torch.device) -> dict[str, Any]:
    """Steps of a GPT with a clip that only looks, and without, in turns."""
    config = GPTConfig(50304, 2048, width=1024, layers=12, heads=16, kv_heads=16)
    batch = 8
    if device.type == "cpu":
        config, batch = GPTConfig(50, 16, width=32, layers=1, heads=2, kv_heads=1), 2
    torch.manual_seed(0)
    model = GPT(config).to(device)
    opt = samestep.MuonAdamW(model, lr=1e-3, max_grad_norm=1.0)
    heads = QKHeads.separate(
        config.heads, config.head_dim, config.kv_heads, q="q.weight", k="k.weight"
    )
    tokens = torch.randint(config.vocab_size, (batch, config.context + 1), device=device)

    def step(clip: QKClip | None) -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        torch.autograd.backward(loss)
        opt.step()
        if clip is not None:
            clip.step()
        opt.zero_grad()

    def without(_: int) -> float:
        return take_turn(partial(step, None), device).ms

    def with_clip(_: int) -> float:
        clip = QKClip(opt, model, {"blocks.*.attention": heads}, tau=1e9)
        took = take_turn(partial(step, clip), device).ms
        clip.close()
        return took

    times = in_rounds({"without": without, "with QK-clip": with_clip}, rounds, warmup=3)
    found = {name: times_of(own) for name, own in times.items()}
    for name, own in found.items():
        print(f"a step {name}: {own.median:.1f} ms, half of them within {own.middle_half:.1f}")
    asked = {"layers": config.layers, "width": config.width, "context": config.context}
    return {**asked, "batch": batch, "ms": {name: own._asdict() for name, own in found.items()}}


@dataclass(frozen=True)
class Options:
    """How often, and where."""

    rounds: int = 20
    out: Path = Path("out/qk-clip")
    device: Annotated[Literal["cuda", "cpu"], "cpu: to try it"] = "cuda"


def main(options: Options) -> None:
    check_folder(options.out)
    device, rows = device_of(options.device), []
    names: list[str] = []
    for layer in LAYERS[options.device]:
        torch.manual_seed(0)
        turns = {
            name: lambda _, call=call: take_turn(call, device).ms
            for name, call in contestants(layer, device).items()
        }
        times = in_rounds(turns, options.rounds, warmup=3)
        found = {name: times_of(own) for name, own in times.items()}
        if not names:
            names = list(found)
            print(f"{'batch x heads/keys x places x size':36}" + "".join(f"{n:>26}" for n in names))
        shape = f"{layer.batch} x {layer.heads}/{layer.kv_heads} x {layer.places} x {layer.size}"
        print(f"{shape:36}" + "".join(f"{found[name].median:26.3f}" for name in names))
        ms = {name: own._asdict() for name, own in found.items()}
        rows.append({"layer": layer._asdict(), "ms": ms})
    content = {**heading("qk_clip", options, device=device), "rows": rows}
    write_json(
        options.out, "qk_clip.json", {**content, "training": training(options.rounds, device)}
    )


if __name__ == "__main__":
    run_script(main, Options)
