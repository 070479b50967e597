"""Which 8-bit code suits moments: the error of an AdamW update whose moments are kept in each.

python -m benchmarks.small_state_codes      # a small GPT on CPU, some minutes

One training in 32 bits gives the gradients. Beside it moments of some rows of every matrix are kept
in each code, from the same gradients, so that errors add up as they do in a training. At the end
the updates m / (sqrt(v) + eps) are compared with those in 32 bits.

`power p`: a (c / 127)^p or a (c / 255)^p, rounded at random or to the nearest. `dynamic`: that of
bitsandbytes by its formula (Dettmers et al., arXiv 2110.02861): leading zeros are a decimal
exponent, and the bits that are left a linear fraction; to the nearest.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from benchmarks import run_script
from samestep.models.gpt import GPT, GPTConfig
from samestep.train.corpus import load_corpus

BLOCK = 256
EPS = 1e-8
Rounding = Callable[[Tensor], Tensor]  # values (blocks, BLOCK) to what is kept of them


def ladder_of(power: float, *, signed: bool) -> Tensor:
    """What codes stand for, ascending, with a scale of 1."""
    most = 127 if signed else 255
    steps = (torch.arange(most + 1, dtype=torch.float64) / most) ** power
    return torch.cat([-steps.flip(0)[:-1], steps]).float() if signed else steps.float()


def dynamic_ladder(*, signed: bool) -> Tensor:
    """Seven decades; each has twice as many linear steps as the one below."""
    found = [0.0, 1.0]
    for exponent in range(7):
        count = 2 ** (exponent if signed else exponent + 1)
        edges = torch.linspace(0.1, 1, count + 1, dtype=torch.float64)
        steps = (10.0 ** (exponent - 6) * (edges[:-1] + edges[1:]) / 2).tolist()
        found += steps + ([-step for step in steps] if signed else [])
    return torch.tensor(sorted(found)).float()


def rounding(steps: Tensor, *, random: bool, never_zero: bool) -> Rounding:
    def rounded(values: Tensor) -> Tensor:
        scale = values.abs().amax(1, keepdim=True)
        share = values / torch.where(scale == 0, 1.0, scale)
        place = torch.searchsorted(steps, share).clamp(1, len(steps) - 1)
        low, high = steps[place - 1], steps[place]
        line = torch.rand_like(share) if random else 0.5
        found = torch.where(share - low > line * (high - low), high, low)
        if never_zero:
            found = torch.where((values > 0) & (found == 0), steps[1], found)
        return found * scale

    return rounded


class Code(NamedTuple):
    """How both moments are kept."""

    name: str
    first: Rounding | None  # None: 32 bits
    second: Rounding | None


def codes() -> list[Code]:
    def power(number: float, *, signed: bool, random: bool = True) -> Rounding:
        return rounding(ladder_of(number, signed=signed), random=random, never_zero=not signed)

    def dynamic(*, signed: bool) -> Rounding:
        return rounding(dynamic_ladder(signed=signed), random=False, never_zero=False)

    found = [Code(f"exp_avg power {p}", power(p, signed=True), None) for p in (1, 2, 3)]
    found += [Code("exp_avg power 2, nearest", power(2, signed=True, random=False), None)]
    found += [Code("exp_avg dynamic", dynamic(signed=True), None)]
    found += [
        Code(f"exp_avg_sq power {p}", None, power(p, signed=False)) for p in (1, 2, 3, 4, 6, 8)
    ]
    found += [Code("exp_avg_sq power 4, nearest", None, power(4, signed=False, random=False))]
    found += [Code("exp_avg_sq dynamic", None, dynamic(signed=False))]
    for second in (4, 6, 8):
        both = power(2, signed=True), power(second, signed=False)
        found.append(Code(f"both, powers 2 and {second}", *both))
    found.append(Code("both dynamic", dynamic(signed=True), dynamic(signed=False)))
    return found


class Moments:
    """m and v of one matrix in one code, (blocks, BLOCK)."""

    def __init__(self, code: Code, like: Tensor) -> None:
        self.code = code
        self.first, self.second = torch.zeros_like(like), torch.zeros_like(like)

    def add(self, grad: Tensor, betas: tuple[float, float]) -> Tensor:
        """One step; the update without corrections, from what is not rounded yet."""
        self.first.lerp_(grad, 1 - betas[0])
        self.second.lerp_(grad.square(), 1 - betas[1])
        update = self.first / (self.second.sqrt() + EPS)
        if self.code.first is not None:
            self.first = self.code.first(self.first)
        if self.code.second is not None:
            self.second = self.code.second(self.second)
        return update


@dataclass(frozen=True)
class Options:
    """Of which model, and for how long."""

    steps: int = 300
    width: int = 256
    layers: int = 2
    context: int = 64
    sequences: int = 8
    rows: Annotated[int, "of each matrix, that are kept"] = 16
    betas: tuple[float, float] = (0.9, 0.999)


def main(options: Options) -> None:
    torch.manual_seed(0)
    betas = options.betas
    text, length = load_corpus().train, options.context + 1
    config = GPTConfig(width=options.width, layers=options.layers, context=options.context)
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=betas)
    kept = {
        name: param
        for name, param in model.named_parameters()
        if param.ndim == 2 and param.shape[1] % BLOCK == 0
    }
    rows = options.rows
    exact = Code("32 bits", None, None)
    moments = {
        name: [Moments(code, p.detach()[:rows].reshape(-1, BLOCK)) for code in (exact, *codes())]
        for name, p in kept.items()
    }
    updates: dict[str, list[Tensor]] = {}
    for _ in range(options.steps):
        starts = torch.randint(len(text) - length, (options.sequences, 1))
        batch = text[starts + torch.arange(length)].long()
        loss = model.loss(batch[:, :-1], batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for name, param in kept.items():
            assert param.grad is not None
            grad = param.grad[:rows].reshape(-1, BLOCK)
            updates[name] = [own.add(grad, betas) for own in moments[name]]
        optimizer.step()
    print(f"{options.steps} steps, betas {betas}, loss {loss.item():.3f}, {len(kept)} matrices")
    print(f"{'kept':32} {'error of updates':>16} {'their size':>12}")
    exact_updates = torch.cat([found[0].flatten() for found in updates.values()])
    for place, code in enumerate(codes(), start=1):
        found = torch.cat([of_codes[place].flatten() for of_codes in updates.values()])
        error = (found - exact_updates).norm() / exact_updates.norm()
        size = found.norm() / exact_updates.norm()
        print(f"{code.name:32} {float(error):16.4f} {float(size):12.4f}")


if __name__ == "__main__":
    run_script(main, Options)
