"""What users write today: one Newton-Schulz per matrix in fp32, beside torch's foreach AdamW."""

from collections.abc import Sequence

import torch
from torch import Tensor


class UnbatchedMuon(torch.optim.Optimizer):
    """torch.optim.Muon's algorithm without its bfloat16 cast, one matrix at a time.

    torch's own class computes in bfloat16, which this kind of CPU emulates: a comparison
    with it would measure the emulation.
    """

    def __init__(self, params: Sequence[Tensor], lr: float = 1e-3, weight_decay: float = 0.1):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": 0.95})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Momentum, five quintic steps, decay, update."""
        for group in self.param_groups:
            lr, mu = group["lr"], group["momentum"]
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["momentum"] = torch.zeros_like(param)
                momentum = state["momentum"].lerp_(param.grad, 1 - mu)
                X = param.grad.lerp(momentum, mu)
                tall = X.shape[0] > X.shape[1]
                X = X.T if tall else X
                X = X / X.norm().clamp(min=1e-7)
                for _ in range(5):
                    A = X @ X.T
                    B = torch.addmm(A, A, A, beta=-4.7750, alpha=2.0315)
                    X = torch.addmm(X, B, X, beta=3.4445)
                X = X.T if tall else X
                param.mul_(1 - lr * group["weight_decay"])
                param.add_(X, alpha=-lr * 0.2 * max(param.shape) ** 0.5)


class Twin:
    """UnbatchedMuon for the matrices and torch.optim.AdamW(foreach=True) for the rest."""

    def __init__(self, matrices: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        self.muon = UnbatchedMuon(matrices)
        self.adamw = torch.optim.AdamW(others, foreach=True)

    def step(self) -> None:
        """Both optimizers, one after the other."""
        self.muon.step()
        self.adamw.step()
