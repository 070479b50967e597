"""MuonH and SOAP once more in float64, written from their papers: nothing of the examples' code."""

import math

import torch

from samestep.lab.stress import reference
from samestep.lab.stress.reference import blocks_of, orthogonal_direction

MUON_OF_MUONH = {
    key: value for key, value in reference.DEFAULTS["muon"].items() if key != "weight_decay"
}
DEFAULTS = {
    "muonh": {**MUON_OF_MUONH, "lr": 0.02, "radius": None},
    "soap": {
        "lr": 3e-3, "betas": (0.95, 0.95), "shampoo_beta": None, "eps": 1e-8, "weight_decay": 0.01,
        "precondition_frequency": 10, "max_precond_dim": 10_000, "split_sizes": None,
        "flatten": False, "transposed": False, "maximize": False,
    },
}  # fmt: skip


def muonh(name, param, grad, state, options):
    """W <- R (W - lr R u / |u|) / |W - lr R u / |u||, with R = |W| or a radius."""
    mu = options["momentum"]
    momentum = mu * state["momentum_buffer"] + (1 - mu) * grad
    direction = mu * momentum + (1 - mu) * grad
    new = param.clone()
    for (matrix, rows), (given, _) in zip(
        blocks_of(name, new, options), blocks_of(name, direction, options), strict=True
    ):
        weight, step = matrix[rows], orthogonal_direction(given[rows], options)
        norm = torch.linalg.matrix_norm
        radius = norm(weight) if options["radius"] is None else options["radius"]
        start = weight * radius / norm(weight)
        size = norm(step)
        moved = start - options["lr"] * radius * step / size if size > 0 else start
        matrix[rows] = radius * moved / norm(moved)
    return new, {"momentum_buffer": momentum}


class _Soap:
    """One block: what the authors' code does, step by step, on numpy-like whole matrices."""

    def __init__(self):
        self.seen = 0
        self.bases = None

    def step(self, weight, grad, options):
        beta1, beta2 = options["betas"]
        beta = beta2 if options["shampoo_beta"] is None else options["shampoo_beta"]
        limit, eye = options["max_precond_dim"], [torch.eye(n).double() for n in grad.shape]
        whole = [n <= limit for n in grad.shape]
        decayed = weight * (1 - options["lr"] * options["weight_decay"])
        if self.seen == 0:
            self.factors = [torch.zeros(n, n).double() for n in grad.shape]
            self.mean, self.square = torch.zeros_like(grad), torch.zeros_like(grad)
            self._look(grad, beta)
            self.bases = [
                torch.linalg.eigh(factor)[1].flip(1) if use else identity
                for factor, use, identity in zip(self.factors, whole, eye, strict=True)
            ]
            self.seen = 1
            return decayed
        left, right = self.bases
        inside = left.T @ grad @ right
        self.mean = beta1 * self.mean + (1 - beta1) * inside
        self.square = beta2 * self.square + (1 - beta2) * inside**2
        scale = math.sqrt(1 - beta2**self.seen) / (1 - beta1**self.seen)
        update = left @ (self.mean / (self.square.sqrt() + options["eps"])) @ right.T
        outside = left @ self.mean @ right.T
        self._look(grad, beta)
        if self.seen % options["precondition_frequency"] == 0:
            for side, use in enumerate(whole):
                if use:
                    old, factor = self.bases[side], self.factors[side]
                    order = torch.argsort(torch.diag(old.T @ factor @ old), descending=True)
                    self.bases[side] = torch.linalg.qr(factor @ old[:, order])[0]
                    self.square = self.square.index_select(side, order)
        self.mean = self.bases[0].T @ outside @ self.bases[1]
        self.seen += 1
        return decayed - options["lr"] * scale * update

    def _look(self, grad, beta):
        outer = grad @ grad.T, grad.T @ grad
        pairs = zip(self.factors, outer, strict=True)
        self.factors = [beta * factor + (1 - beta) * new for factor, new in pairs]


def soap(name, param, grad, state, options):
    """Of each block; what it remembers is an object of its own in the state."""
    new = param.clone()
    pairs = zip(blocks_of(name, new, options), blocks_of(name, grad, options), strict=True)
    for number, ((matrix, rows), (given, _)) in enumerate(pairs):
        block = state["blocks"].setdefault(number, _Soap())
        matrix[rows] = block.step(matrix[rows], given[rows], options)
    return new, state


def add(monkeypatch):
    """The harness' reference knows both rules."""
    usual = reference.initial_state

    def initial_state(name, param, group):
        if group["rule"] == "soap":
            return {"blocks": {}}
        if group["rule"] == "muonh":
            return {"momentum_buffer": torch.zeros_like(param).double()}
        return usual(name, param, group)

    monkeypatch.setattr(reference, "initial_state", initial_state)
    for rule, function in (("muonh", muonh), ("soap", soap)):
        monkeypatch.setitem(reference.DEFAULTS, rule, DEFAULTS[rule])
        monkeypatch.setitem(reference.RULES, rule, function)
