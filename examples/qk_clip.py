"""Train a tiny GPT whose attention logits grow, with and without QK-clip, and plot both.

    python -m examples.qk_clip --out docs/qk_clip.png

The model has no norm on queries and keys, and the learning rate is far too large for it, so that
the logits of some heads soon pass tau. Both runs have the same weights, batches and learning rate.
A head is clipped after its logits have passed tau, so forward sees them above it by what one step
adds, which is much at such a learning rate. So tau is half of the limit that logits shall keep
below: with QK-clip they do, in every step.
The text is the source of the standard library of the Python that runs this.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu, scaled_dot_product_attention

import samestep
from samestep.train.corpus import Corpus, load_corpus, windows

WIDTH, LAYERS, HEADS, KV_HEADS, CONTEXT, BATCH = 64, 2, 4, 2, 64, 16
HEAD_DIM = WIDTH // HEADS
COLORS = {"without": "#c2571a", "with QK-clip": "#1f5fa8"}


class Attention(nn.Module):
    """Causal attention of 4 query heads that share 2 key heads, (B, T, C) to (B, T, C)."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.k = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.v = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Attention and an MLP, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.down(relu(self.up(self.mlp_norm(x))))
        return out


class TinyGPT(nn.Module):
    """Bytes (B, T) to logits of the next one (B, T, 256)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


class Run(NamedTuple):
    """Of every step the largest logit of all heads, as forward had it, and the loss."""

    logits: list[float]
    losses: list[float]


def train(corpus: Corpus, *, steps: int, tau: float, lr: float, seed: int) -> Run:
    """Train one model; where tau is infinite, logits are only looked at."""
    torch.manual_seed(seed)
    model = TinyGPT()
    opt = samestep.MuonAdamW(model, lr=lr, weight_decay=0.0)
    heads = samestep.QKHeads.separate(HEADS, HEAD_DIM, KV_HEADS, q="q.weight", k="k.weight")
    clip = samestep.QKClip(opt, model, {"blocks.*.attention": heads}, tau=tau)
    generator = torch.Generator().manual_seed(seed)
    run = Run([], [])
    for step in range(steps):
        for group in opt.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 30)
        starts = torch.randint(len(corpus.train) - CONTEXT, (BATCH,), generator=generator)
        inputs, targets = windows(corpus.train, starts, CONTEXT)
        loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        opt.step()
        run.logits.append(max(float(own.max()) for own in clip.step().values()))
        opt.zero_grad()
        run.losses.append(loss.item())
    return run


def plot(runs: dict[str, Run], tau: float, limit: float, path: Path) -> None:
    """Draw logits and losses of both runs."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    logits, losses = figure.subplots(1, 2)
    for name, run in runs.items():
        logits.plot(run.logits, color=COLORS[name], label=name, linewidth=1.2)
        losses.plot(run.losses, color=COLORS[name], label=name, linewidth=0.8)
    logits.axhline(limit, color="#555555", linestyle="-", linewidth=1, label=f"limit {limit:g}")
    logits.axhline(tau, color="#555555", linestyle="--", linewidth=1, label=f"tau = {tau:g}")
    logits.set(yscale="log", xlabel="step", ylabel="largest attention logit")
    losses.set(xlabel="step", ylabel="loss (nats per byte)")
    logits.legend(frameon=False)
    for axes in (logits, losses):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(words: Sequence[str] | None = None) -> int:
    """Train both, say what was seen, and plot it."""
    parser = argparse.ArgumentParser(
        "python -m examples.qk_clip", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--out", type=Path, default=Path("out/qk_clip.png"), help="PNG or SVG")
    parser.add_argument("--steps", type=int, default=300, help="of each run")
    parser.add_argument("--limit", type=float, default=30.0, help="what logits shall keep below")
    parser.add_argument("--tau", type=float, help="where heads are clipped (half of the limit)")
    parser.add_argument("--lr", type=float, default=0.05, help="after 30 steps of warmup")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    asked = parser.parse_args(words)
    torch.set_num_threads(1)  # so small a model is no faster on more
    corpus = load_corpus()
    limit = asked.limit
    tau = limit / 2 if asked.tau is None else asked.tau
    runs: dict[str, Run] = {}
    for name, clips in (("without", False), ("with QK-clip", True)):
        own = tau if clips else math.inf
        runs[name] = run = train(corpus, steps=asked.steps, tau=own, lr=asked.lr, seed=asked.seed)
        above = sum(logit > limit for logit in run.logits)
        last = run.losses[-20:]
        print(
            f"{name:12}  largest logit {max(run.logits):.1f}, above the limit of {limit:g} in "
            f"{above} of {asked.steps} steps, loss at the end {sum(last) / len(last):.3f}"
        )
    plot(runs, tau, limit, asked.out)
    print(f"drawn in {asked.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
