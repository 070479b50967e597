"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner (Vyas et al., arXiv 2409.11321).

    L <- b L + (1 - b) G G^T        R <- b R + (1 - b) G^T G        Q: their eigenvectors
    G' = Q_L^T G Q_R                m, v: Adam's averages of G' and G'^2
    W <- W (1 - lr wd) - lr Q_L (m' / (sqrt(v) + eps)) Q_R^T,  m' = m sqrt(1 - b2^t) / (1 - b1^t)

The eigenvectors are found once, and then every `precondition_frequency` steps improved by one step
of power iteration and a QR decomposition; m turns with them, v is reordered. As in the authors'
code the first step only looks at the gradient, eps is added before m and v are corrected for their
start, and L and R are not corrected (`shampoo_beta=None`: b is Adam's second beta). Weights decay
before the step, in theirs after it, and in the first one too.

    import samestep
    from examples.rules.soap import SOAP

    samestep.register_rule(SOAP())
    opt = samestep.MuonAdamW(model, overrides={"*.weight": {"rule": "soap", "lr": 3e-3}})

All state belongs to whole blocks and is kept by their owners alone: 2 (rows cols + rows^2 + cols^2)
numbers for each block. Of what travels it is as Muon is: gradients to the owner, directions back.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from samestep.rules import Direction, Update, checks, staged_update
from samestep.rules.rule import bounded_gradient

Tensors = Mapping[str, Tensor]
Options = Mapping[str, Any]
Shape = tuple[int, ...]

SIDES = "left", "right"


class SOAP:
    """The matrix rule `"soap"`.

    Blocks are computed one by one, so that the bits of each do not depend on the others. A side
    longer than `max_precond_dim` is left as it is. On a GPU the host reads each block's count.
    """

    name = "soap"
    kind: Literal["matrix"] = "matrix"
    defaults: ClassVar[Options] = {
        "lr": 3e-3,
        "betas": (0.95, 0.95),
        "shampoo_beta": None,
        "eps": 1e-8,
        "weight_decay": 0.01,
        "precondition_frequency": 10,
        "max_precond_dim": 10_000,
        "split_sizes": None,
        "flatten": False,
        "transposed": False,
    }
    schedulable = frozenset({"lr", "betas", "weight_decay"})
    taken: ClassVar = {
        "lr": checks.learning_rate,
        "betas": checks.betas,
        "shampoo_beta": checks.optional(checks.fraction),
        "eps": checks.positive,
        "weight_decay": checks.not_negative,
        "precondition_frequency": checks.count,
        "max_precond_dim": checks.count,
        "split_sizes": checks.split_sizes,
        "flatten": checks.boolean,
        "transposed": checks.boolean,
    }

    def check(self, options: Options) -> None:
        checks.every(self.taken, options)

    def scalars(self, options: Options) -> dict[str, float | Tensor]:
        beta1, beta2 = options["betas"]
        lr, weight_decay = options["lr"], options["weight_decay"]
        return {"lr": lr, "weight_decay": weight_decay, "beta1": beta1, "beta2": beta2}

    def state_shapes(self, shape: Shape, options: Options) -> dict[str, Shape]:
        """Averages of the turned gradient; L and R, and their eigenvectors, where short enough."""
        found: dict[str, Shape] = {"count": (), "exp_avg": shape, "exp_avg_sq": shape}
        for side, size in zip(SIDES, shape, strict=True):
            size = size if size <= options["max_precond_dim"] else 0
            found |= {side: (size, size), f"{side}_basis": (size, size)}
        return found

    def owned_state(self, options: Options) -> frozenset[str]:
        """All of it: nothing lies as the parameter does."""
        return frozenset(self.state_shapes((0, 0), options))

    def update(
        self, param: Tensor, grad: Tensor, state: Tensors, scalars: Tensors, options: Options
    ) -> Update:
        """One step on a stack of blocks, (B, rows, cols)."""
        return staged_update(self, param, grad, state, scalars, options)

    def prepare(
        self, grad: Tensor, state: Tensors, scalars: Tensors, options: Options
    ) -> Direction:
        """The gradient as it is, of any part of a block."""
        return Direction(bounded_gradient(grad, 2.0**50), {})

    def transform(
        self, prepared: Tensor, state: Tensors, scalars: Tensors, options: Options
    ) -> Direction:
        """Of whole blocks, (B, rows, cols)."""
        found = []
        for number, grad in enumerate(prepared):
            # Copies lie alike in memory in every layout, so that products have the same bits.
            own = {key: tensor[number].clone() for key, tensor in state.items()}
            found.append(_direction(grad.clone(), own, scalars, options))
        directions, states = zip(*found, strict=True)
        new_state = {key: torch.stack([own[key] for own in states]) for key in state}
        return Direction(torch.stack(directions), new_state)

    def finish(
        self,
        param: Tensor,
        direction: Tensor,
        block_shape: Shape,
        scalars: Tensors,
        options: Options,
    ) -> Tensor:
        """Weight decay and the step, of any part of a block."""
        lr = scalars["lr"]
        decayed = param * (1 - lr * scalars["weight_decay"]).to(param.dtype)
        return decayed - direction * lr.to(param.dtype)


def _direction(
    grad: Tensor, state: dict[str, Tensor], scalars: Tensors, options: Options
) -> tuple[Tensor, dict[str, Tensor]]:
    """Of one block: the step at a learning rate of 1, and the new state."""
    beta1, beta2 = (scalars[key].to(grad.dtype) for key in ("beta1", "beta2"))
    shampoo = options["shampoo_beta"]
    keep = beta2 if shampoo is None else torch.full_like(beta2, shampoo)
    # Steps that had a direction, and one. Estimates of memory have no values: the largest step.
    done = options["precondition_frequency"] if grad.is_meta else int(state["count"])
    outer = {"left": grad @ grad.mT, "right": grad.mT @ grad}
    new = {**state, "count": state["count"] + 1}
    for side in SIDES:
        if state[side].numel():
            new[side] = torch.lerp(state[side], outer[side], 1 - keep)
    if done == 0:
        new |= {f"{side}_basis": _eigenvectors(new[side]) for side in SIDES}
        return torch.zeros_like(grad), new
    left, right = state["left_basis"], state["right_basis"]
    turned = _turned(grad, left, right)
    exp_avg = torch.lerp(state["exp_avg"], turned, 1 - beta1)
    exp_avg_sq = torch.lerp(state["exp_avg_sq"], turned.square(), 1 - beta2)
    step = exp_avg / exp_avg_sq.sqrt().add_(options["eps"])
    correction = (1 - scalars["beta2"] ** done).sqrt() / (1 - scalars["beta1"] ** done)
    direction = _turned(step, left.mT, right.mT) * correction.to(grad.dtype)
    if done % options["precondition_frequency"] == 0:
        back = _turned(exp_avg, left.mT, right.mT)
        new["left_basis"], rows = _improved(new["left"], left)
        new["right_basis"], cols = _improved(new["right"], right)
        exp_avg = _turned(back, new["left_basis"], new["right_basis"])
        exp_avg_sq = exp_avg_sq if rows is None else exp_avg_sq[rows]
        exp_avg_sq = exp_avg_sq if cols is None else exp_avg_sq[:, cols]
    return direction, {**new, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


def _turned(block: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Q_L^T X Q_R, without the sides that have no basis."""
    block = left.mT @ block if left.numel() else block
    return block @ right if right.numel() else block


def _eigenvectors(matrix: Tensor) -> Tensor:
    """By falling eigenvalue; nothing of nothing."""
    return torch.linalg.eigh(matrix).eigenvectors.flip(1) if matrix.numel() else matrix


def _improved(matrix: Tensor, basis: Tensor) -> tuple[Tensor, Tensor | None]:
    """One step of power iteration, and the order of the columns by what was their eigenvalue."""
    if not matrix.numel():
        return basis, None
    product = matrix @ basis
    order = (basis * product).sum(0).argsort(descending=True)
    return torch.linalg.qr(product[:, order]).Q, order
