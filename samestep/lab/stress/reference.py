"""The reference optimizer: one process in float64, written from the formulas.

The harness judges optimizers by this file, so it imports nothing of theirs: constants are retyped
from the publications, a polynomial of a matrix is taken through its singular values, and every
block of every parameter is visited in a loop. Slow and obvious is the point.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

import torch
from torch import Tensor

Options = Mapping[str, Any]  # of one group, complete
State = dict[str, Tensor]
Triple = tuple[float, float, float]
Updated = tuple[Tensor, State]

# Every option that changes the result, with the value of a group that does not name it.
DEFAULTS: dict[str, dict[str, Any]] = {
    "adamw": {
        "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False,
        "eps_hat": False, "cautious": False, "decay_form": "decoupled", "maximize": False,
    },
    "muon": {
        "lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95, "momentum_form": "ema", "nesterov": True,
        "equilibrate": False, "orthogonalize": "polar-express", "ns_steps": None,
        "ns_coefficients": None, "eps": 1e-7, "eps_form": "clamp", "renormalize": False,
        "variance_beta2": None, "variance_axis": "long", "variance_eps": 1e-10,
        "variance_eps_form": "clamp", "adjust_lr": "match_rms_adamw", "update_scale": 1.0,
        "cautious": False, "scale_decay": False, "decay_form": "decoupled", "norm_factor": None,
        "ns_start": "norm",
        "split_sizes": None, "flatten": False, "transposed": False,
        "maximize": False,
    },
    "adamuon": {
        "lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95, "momentum_form": "sum",
        "nesterov": False, "sign": True, "orthogonalize": "newton-schulz", "ns_steps": None,
        "ns_coefficients": None, "eps": 1e-7, "eps_form": "clamp", "norm_factor": None,
        "ns_start": "norm",
        "variance_beta2": 0.95, "variance_eps": 1e-8, "renormalize": True,
        "adjust_lr": "match_rms_adamw", "update_scale": 1.0, "cautious": False,
        "scale_decay": False, "decay_form": "decoupled", "split_sizes": None, "flatten": False,
        "transposed": False, "maximize": False,
    },
}  # fmt: skip
TABLES: dict[str, list[Triple]] = {
    "newton-schulz": [(3.4445, -4.7750, 2.0315)],
    "polar-express": [
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ],
    "polar-express-4": [
        (8.052883582775221, -22.197527146338555, 15.676948541745741),
        (3.891667802292666, -2.7724841532176883, 0.50606481785034),
        (3.2857536577556536, -2.368129493342537, 0.4644902423300309),
        (2.3465413258596373, -1.7097828382687061, 0.4232355116930524),
    ],
    "polar-express-3": [
        (7.655008779852204, -21.10079742859885, 14.902385896282563),
        (3.2857536577556536, -2.368129493342537, 0.4644902423300309),
        (2.346541325859637, -1.7097828382687066, 0.42323551169305273),
    ],
    "quintic": [
        (4.0848, -6.8946, 2.927), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012),
    ],
    "cans": [
        (8.4703, -25.1081, 18.6293), (4.1828, -3.1087, 0.5806), (3.9619, -2.9541, 0.563),
        (3.2866, -2.4647, 0.5074), (2.2737, -1.6447, 0.4162),
    ],
    "aol": [
        (4.0098, -7.0585, 2.4635), (3.4585, -5.5479, 2.5959), (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
    ],
    "deepseek-v4": [*[(3.4445, -4.775, 2.0315)] * 8, *[(2.0, -1.5, 0.5)] * 2],
    "cubic": [
        (3.3656576, -3.3420992, 0.0), (2.5744352, -1.4957376, 0.0), (2.5368962, -1.431257, 0.0),
        (2.4418906, -1.276404, 0.0), (2.2230472, -0.963065, 0.0),
    ],
}  # fmt: skip
NORM_FACTORS = dict.fromkeys(("polar-express", "polar-express-4", "polar-express-3"), 1.01)


class Reference:
    """Parameters and state of one process that is given the gradients of all ranks.

    `groups` are those of an optimizer with names for parameters:
    `{"param_names": [...], "rule": "muon" | "adamw", "lr": ..., ...}`. Other keys are ignored, and
    what is missing gets its default. Parameters of no group are held and never change.

    params: per name the value, in the parameter's shape.
    state: per name the tensors that a samestep optimizer of one process has, in its shapes.
    groups: dicts that may be edited between steps: `reference.groups[0]["lr"] = 0.1`.

    All tensors are float64 on the CPU. A step puts new ones into `params` and `state`, so that
    those handed out before keep their values.
    """

    def __init__(
        self, params: Mapping[str, Tensor], groups: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        self.params = {name: in_float64(param) for name, param in params.items()}
        self.state: dict[str, State] = {}
        self.groups: list[dict[str, Any]] = []
        for group in groups:
            self.add_group(group)

    def add_group(self, group: Mapping[str, Any]) -> None:
        rule = group.get("rule")
        if rule not in DEFAULTS:
            raise ValueError(f"rule {rule!r} has no reference; choose one of {sorted(DEFAULTS)}")
        own = {key: group.get(key, default) for key, default in DEFAULTS[rule].items()}
        own = deepcopy({"rule": rule, "param_names": list(group["param_names"]), **own})
        state: dict[str, State] = {}
        for name in own["param_names"]:
            if name in self.state or name in state:
                raise ValueError(f"parameter {name!r} is in more than one group, or twice in one")
            state[name] = initial_state(name, self._param(name), own)
        self.state |= state
        self.groups.append(own)

    def set_param(self, name: str, value: Tensor) -> None:
        """Set the value of a parameter; its state is unchanged."""
        refuse_other_shape(name, self._param(name), value)
        self.params[name] = in_float64(value)

    def step(
        self,
        grads: Mapping[str, Sequence[Tensor | None]],
        *,
        divisor: float,
        max_grad_norm: float | Mapping[str, float] | None = None,
    ) -> bool:
        """Take one step; returns False, with nothing changed, if the norm is not finite.

        grads[name][rank] is that rank's accumulated gradient, None where it has none. A parameter
        that no rank has a gradient for is untouched; else the gradient is sum over ranks / divisor.
        A `max_grad_norm` of infinity clips nothing, but still skips steps; one by rule is about the
        norm of the rule's parameters.
        """
        averaged: dict[str, Tensor] = {}
        for name, of_ranks in grads.items():
            grad = average(name, self._param(name), of_ranks, divisor)
            if grad is not None and name in self.state:
                averaged[name] = grad
        factors = dict.fromkeys(RULES, 1.0)
        if max_grad_norm is not None:
            norms: dict[str, list[float]] = {rule: [] for rule in RULES}
            for group in self.groups:
                here = averaged.keys() & set(group["param_names"])
                norms[group["rule"]] += [norm(averaged[name]) for name in here]
            joint = math.hypot(*chain.from_iterable(norms.values()))
            if not math.isfinite(joint):
                return False
            for rule, own in norms.items():
                if isinstance(max_grad_norm, Mapping):
                    limit, size = max_grad_norm.get(rule, math.inf), math.hypot(*own)
                else:
                    limit, size = max_grad_norm, joint
                factors[rule] = min(1.0, limit / (size + 1e-6))
        for group in self.groups:
            factor = factors[group["rule"]]
            for name in group["param_names"]:
                if name in averaged:
                    grad = averaged[name] * (-factor if group["maximize"] else factor)
                    now = self.params[name], grad, self.state[name]
                    self.params[name], self.state[name] = RULES[group["rule"]](name, *now, group)
        return True

    def _param(self, name: str) -> Tensor:
        if name not in self.params:
            raise ValueError(f"the reference has no parameter named {name!r}")
        return self.params[name]


def in_float64(tensor: Tensor) -> Tensor:
    """Return a contiguous copy in float64 on the CPU."""
    copy = torch.empty(tensor.shape, dtype=torch.float64)
    return copy.copy_(tensor.detach())


def norm(tensor: Tensor) -> float:
    return math.sqrt(float(tensor.square().sum()))


def refuse_other_shape(name: str, param: Tensor, other: Tensor) -> None:
    """Raise if two shapes differ, instead of broadcasting."""
    if other.shape != param.shape:
        raise ValueError(
            f"parameter {name!r} has shape {tuple(param.shape)}, got {tuple(other.shape)}"
        )


def average(
    name: str, param: Tensor, of_ranks: Sequence[Tensor | None], divisor: float
) -> Tensor | None:
    """Return sum over ranks / divisor, None counting as zeros; None if no rank has a gradient."""
    present = [grad for grad in of_ranks if grad is not None]
    if not present:
        return None
    total = torch.zeros_like(param)
    for grad in present:
        refuse_other_shape(name, param, grad)
        total += in_float64(grad)
    return total / divisor


def initial_state(name: str, param: Tensor, group: Options) -> State:
    """Return state of zeros; the variance of Muon is 1-D, block after block."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64)

    if group["rule"] == "adamw":
        state = {"step": zeros(), "exp_avg": zeros(*param.shape), "exp_avg_sq": zeros(*param.shape)}
        return {**state, "max_exp_avg_sq": zeros(*param.shape)} if group["amsgrad"] else state
    state = {"momentum_buffer": zeros(*param.shape)}
    if group["rule"] == "adamuon":
        return {**state, "second_moment": zeros(param.numel())}
    count = sum(variance_counts(blocks_of(name, param, group), group))
    if group["variance_beta2"] is not None:
        state["variance"] = zeros(count)
    return state


# --- AdamW ---------------------------------------------------------------------------------


def adamw(name: str, param: Tensor, grad: Tensor, state: State, options: Options) -> Updated:
    """m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2;  with amsgrad the largest v so far counts.

    p <- p (1 - lr wd) - lr m' / (sqrt(v') + eps),  m' = m / (1 - b1^t),  v' = v / (1 - b2^t)

    eps_hat: (sqrt(v) + eps) / sqrt(1 - b2^t) divides. independent: p (1 - wd). l2: g + wd p is the
    gradient. cautious: no decay where the update and p differ in sign.
    """
    lr, eps, weight_decay = (float(options[key]) for key in ("lr", "eps", "weight_decay"))
    beta1, beta2 = (float(beta) for beta in options["betas"])
    if options["decay_form"] == "l2":
        grad = grad + weight_decay * param
    step = state["step"] + 1
    exp_avg = beta1 * state["exp_avg"] + (1 - beta1) * grad
    exp_avg_sq = beta2 * state["exp_avg_sq"] + (1 - beta2) * grad.square()
    new_state = {"step": step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    second_moment = exp_avg_sq
    if options["amsgrad"]:
        second_moment = torch.maximum(state["max_exp_avg_sq"], exp_avg_sq)
        new_state["max_exp_avg_sq"] = second_moment
    corrected1 = exp_avg / (1 - beta1 ** float(step))
    correction2 = 1 - beta2 ** float(step)
    if options["eps_hat"]:
        update = corrected1 * math.sqrt(correction2) / (second_moment.sqrt() + eps)
    else:
        update = corrected1 / ((second_moment / correction2).sqrt() + eps)
    decay = {"decoupled": lr * weight_decay, "independent": weight_decay, "l2": 0.0}
    decayed = decay[options["decay_form"]] * param
    if options["cautious"]:
        decayed = decayed * (update * param >= 0)
    return param - decayed - lr * update, new_state


# --- Muon ----------------------------------------------------------------------------------


def muon(name: str, param: Tensor, grad: Tensor, state: State, options: Options) -> Updated:
    """Update the momentum of the whole parameter, then each block by itself."""
    momentum, direction = accumulate(state["momentum_buffer"], grad, options)
    new_param, new_state = param.clone(), {"momentum_buffer": momentum}
    blocks = blocks_of(name, new_param, options)
    directions = blocks_of(name, direction, options)
    updates = [orthogonal_direction(matrix[rows], options) for matrix, rows in directions]
    if options["variance_beta2"] is not None:
        new_state["variance"] = state["variance"].clone()
        variances = torch.split(new_state["variance"].view(-1), variance_counts(blocks, options))
        pairs = zip(updates, variances, strict=True)
        updates = [reduce_variance_(update, variance, options) for update, variance in pairs]
    for (matrix, rows), update in zip(blocks, updates, strict=True):
        matrix[rows] = new_block(matrix[rows], update, options)
    return new_param, new_state


def adamuon(name: str, param: Tensor, grad: Tensor, state: State, options: Options) -> Updated:
    """Take a step of AdaMuon per block: u = orthogonalized sign(m); v <- b2 v + (1 - b2) u^2.

    u / (sqrt(v) + eps) is brought to the norm sqrt(min(rows, cols)), and is then a direction like
    Muon's. Second moments lie block after block.
    """
    momentum, direction = accumulate(state["momentum_buffer"], grad, options)
    new_param, second_moment = param.clone(), state["second_moment"].clone()
    beta2, eps = float(options["variance_beta2"]), float(options["variance_eps"])
    begin = 0
    directions = blocks_of(name, direction, options)
    for (matrix, rows), (given, _) in zip(
        blocks_of(name, new_param, options), directions, strict=True
    ):
        block = given[rows].sign() if options["sign"] else given[rows]
        update = orthogonalize(block, options)
        moment = second_moment[begin : begin + update.numel()].view(update.shape)
        moment.copy_(beta2 * moment + (1 - beta2) * update.square())
        begin += update.numel()
        update = update / (moment.sqrt() + eps)
        if options["renormalize"]:
            update = update * (math.sqrt(min(update.shape)) / max(norm(update), 1e-6))
        matrix[rows] = new_block(matrix[rows], update, options)
    return new_param, {"momentum_buffer": momentum, "second_moment": second_moment}


def blocks_of(name: str, tensor: Tensor, options: Options) -> list[tuple[Tensor, list[int]]]:
    """Return views (out, in) of a parameter's matrices, each with the rows of one block.

    2-D is one matrix, 3-D a stack of them, with `flatten` N-D is (out, all the rest), and with
    `transposed` each matrix is stored as (in, out). It is cut into its split_sizes.
    """
    if tensor.numel() == 0:
        return []
    if options["flatten"]:
        tensor = tensor.flatten(start_dim=1)
    if tensor.ndim not in (2, 3):
        raise ValueError(f"parameter {name!r} of shape {tuple(tensor.shape)} is no matrix or stack")
    if options["transposed"]:
        tensor = tensor.transpose(-2, -1)
    matrices = tensor.unbind() if tensor.ndim == 3 else (tensor,)
    parts = rows_of(split_sizes_of(name, options["split_sizes"]), tensor.shape[-2])
    return [(matrix, rows) for matrix in matrices for rows in parts]


def rows_of(split: Sequence[int] | str | None, rows: int) -> list[list[int]]:
    """Return the rows of each block of a matrix that has so many."""
    if split is None:
        return [list(range(rows))]
    groups = 1
    if split == "halves":
        sizes = [rows // 2] * 2
    elif isinstance(split, str) and split.startswith("heads:"):
        count = int(split.removeprefix("heads:"))
        sizes = [rows // count] * count
    elif not isinstance(split, str):
        sizes = list(split)
    else:  # interleaved:3x16, interleaved:4+1+1x8
        given, _, groups_given = split.removeprefix("interleaved:").rpartition("x")
        groups = int(groups_given)
        sizes = [int(size) for size in given.split("+")]
        if "+" not in given:
            sizes = [rows // (sizes[0] * groups)] * sizes[0]
    blocks: list[list[int]] = [[] for _ in sizes]
    row = 0
    for _ in range(groups):
        for block, size in zip(blocks, sizes, strict=True):
            block.extend(range(row, row + size))
            row += size
    if row != rows:
        raise ValueError(f"split_sizes {split!r} are {row} rows, not {rows}")
    return blocks


def split_sizes_of(name: str, split_sizes: Any) -> Sequence[int] | str | None:
    """Return the split sizes of one parameter: of its group, or of the one pattern that matches."""
    patterns = split_sizes if isinstance(split_sizes, Mapping) else {name: split_sizes}
    found = [sizes for key, sizes in patterns.items() if name == key or fnmatchcase(name, key)]
    if len(found) > 1:
        raise ValueError(f"split_sizes: {name!r} is matched by {len(found)} patterns")
    return found[0] if found else None


def accumulate(momentum: Tensor, grad: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Return the new momentum, and the direction that it or Nesterov's look-ahead gives.

    ema: m <- mu m + (1 - mu) g, ahead (1 - mu) g + mu m.   sum: m <- mu m + g, ahead g + mu m.
    """
    mu = float(options["momentum"])
    share = {"ema": 1 - mu, "sum": 1.0}[options["momentum_form"]]
    momentum = mu * momentum + share * grad
    return momentum, mu * momentum + share * grad if options["nesterov"] else momentum


def orthogonal_direction(matrix: Tensor, options: Options) -> Tensor:
    """Return the direction of a block (rows, cols): [equilibrate], orthogonalize, [renormalize]."""
    rows, cols = matrix.shape
    if options["equilibrate"]:  # every row gets the norm ||X|| / sqrt(rows)
        row_norms = matrix.square().sum(dim=1, keepdim=True).sqrt()
        matrix = matrix / row_norms.clamp_min(1e-6) * (norm(matrix) / math.sqrt(rows))
    update = orthogonalize(matrix, options)
    if options["renormalize"]:  # to the norm of an exactly orthogonal block
        update = update * (math.sqrt(min(rows, cols)) / max(norm(update), 1e-6))
    return update


def orthogonalize(matrix: Tensor, options: Options) -> Tensor:
    """Return U p(s / size) V^T of U s V^T (rows, cols); p is a s + b s^3 + c s^5, step by step."""
    method, eps = options["orthogonalize"], float(options["eps"])
    factor = NORM_FACTORS.get(method, 1.0) if options["norm_factor"] is None else None
    size = (options["norm_factor"] if factor is None else factor) * norm(matrix)
    size = size + eps if options["eps_form"] == "add" else max(size, eps)
    if size == 0:
        return torch.zeros_like(matrix)
    if not math.isfinite(size):
        return torch.full_like(matrix, math.nan)
    matrix = started(matrix / size, options["ns_start"])
    U, s, Vt = torch.linalg.svd(matrix, full_matrices=False)
    for a, b, c in triples(method, options["ns_steps"], options["ns_coefficients"]):
        square = s * s
        s = s * (a + square * (b + square * c))
    # A row or column of zeros stays exactly that: cautious decay looks at signs, also of noise.
    zero_row, zero_col = ~matrix.any(dim=1, keepdim=True), ~matrix.any(dim=0, keepdim=True)
    update: Tensor = (U * s) @ Vt
    return update.masked_fill(zero_row | zero_col, 0.0)


def started(matrix: Tensor, start: str) -> Tensor:
    """Scale a block by a bound of its largest singular value, by the method `ns_start`.

    gram: by N^2 over the least of two bounds of the largest eigenvalue of X X^T, X the block or its
    transpose, whichever is wide: the largest sum of sizes in a row, and its norm.
    aol: every row of X by its own sum.
    """
    if start == "norm":
        return matrix
    if matrix.shape[0] > matrix.shape[1]:
        return started(matrix.T, start).T
    gram = matrix @ matrix.T
    sums = gram.abs().sum(dim=1, keepdim=True)
    if start == "gram":
        sums = torch.minimum(sums.max(), gram.square().sum().sqrt())
    return matrix * (norm(matrix) / sums.sqrt()).nan_to_num(0.0, posinf=0.0)


def triples(method: str, steps: int | None, coefficients: Any) -> list[Triple]:
    """Return one (a, b, c) per step: a long table is cut, the last of a short one repeated.

    Without a number of steps as many as the table has; of a single triple five.
    """
    table = TABLES[method] if coefficients is None else coefficients
    if not isinstance(table[0], Sequence):
        table = [table]
    if steps is None:
        steps = 5 if len(table) == 1 else len(table)
    return [table[min(step, len(table) - 1)] for step in range(steps)]


def variance_counts(blocks: Sequence[tuple[Tensor, list[int]]], options: Options) -> list[int]:
    """Return the number of variances of each block: one per row, or per column if it is wide."""
    if options["variance_axis"] == "rows":
        return [len(rows) for _, rows in blocks]
    return [max(len(rows), matrix.shape[1]) for matrix, rows in blocks]


def reduce_variance_(update: Tensor, variance: Tensor, options: Options) -> Tensor:
    """Normalize the update by the variance of its rows or columns; updates `variance` in place.

    v = mean(u^2) of each;  s <- b2 s + (1 - b2) v
    r = 1 / sqrt(max(s, eps)) or 1 / (sqrt(s) + eps);  u <- u r ||u|| / max(||u r||, eps)
    """
    rows, cols = update.shape
    beta2, eps = float(options["variance_beta2"]), float(options["variance_eps"])
    dim = 1 if rows >= cols or options["variance_axis"] == "rows" else 0
    mean_square = update.square().mean(dim=dim)
    variance.copy_(beta2 * variance + (1 - beta2) * mean_square)
    if options["variance_eps_form"] == "add":
        roots = variance.sqrt() + eps
    else:
        roots = variance.clamp_min(eps).sqrt()
    evened = update / roots.unsqueeze(dim)
    return evened * (norm(update) / max(norm(evened), eps))


def new_block(block: Tensor, update: Tensor, options: Options) -> Tensor:
    """Return p - decay p - lr' u, with the learning rate for the block's shape.

    With cautious, decay applies only where u p >= 0.
    """
    rows, cols = block.shape
    factor = {
        "match_rms_adamw": 0.2 * math.sqrt(max(rows, cols)),
        "original": math.sqrt(max(1.0, rows / cols)),
        "unit_rms_norm": math.sqrt(rows / cols),
        "sqrt_max": math.sqrt(max(rows, cols)),
        None: 1.0,
    }[options["adjust_lr"]] * float(options["update_scale"])
    lr = float(options["lr"])
    decay = (lr * factor if options["scale_decay"] else lr) * float(options["weight_decay"])
    if options["decay_form"] == "independent":
        decay = float(options["weight_decay"])
    decayed = (update * block >= 0) if options["cautious"] else torch.ones_like(block)
    return block - decay * block * decayed - lr * factor * update


RULES = {"adamw": adamw, "muon": muon, "adamuon": adamuon}
