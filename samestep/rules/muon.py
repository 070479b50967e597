"""Muon: momentum, orthogonalized block by block (Keller Jordan, kellerjordan.github.io/posts/muon).

    momentum -> [equilibrate] -> orthogonalize -> [renormalize] -> [variance reduction]
             -> scale -> (cautious) weight decay -> update

Each stage is one small pure function below, on stacks of blocks (B, rows, cols).
"""

import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from samestep.rules import checks
from samestep.rules.basin import TOLERANCE, Table, basin_of
from samestep.rules.orthogonalize import (
    POLYNOMIALS,
    EpsForm,
    block_norm,
    default_compute_dtype,
    orthogonalize,
    step_coefficients,
)
from samestep.rules.rule import (
    Direction,
    Options,
    Shape,
    Tensors,
    Update,
    bounded_gradient,
    in_dtype,
    number,
    on_host,
    staged_update,
)

# Larger elements of a gradient count as this. All that is made of them fits 32 bits: differences,
# momenta that are sums up to a momentum of 0.999, norms of blocks of 2^40 elements.
LARGEST_GRADIENT = 2.0**100
LARGEST_RESCALE = 2.0**63  # of variance reduction: its square fits 32 bits

MomentumForm = Literal["ema", "sum"]
VarianceAxis = Literal["long", "rows"]


class MuonRule:
    """The matrix rule `"muon"`; `samestep.presets` holds the option sets people know.

    Options of a group:
        lr: learning rate. A tensor is copied for each group.
        weight_decay: parameters shrink by `lr * weight_decay` in a step.
        momentum: decay rate of the average of gradients.
        momentum_form: "ema" is m + (1 - mu)(g - m); "sum" is mu m + g.
        nesterov: look ahead by one momentum step.
        equilibrate: scale rows to one norm before orthogonalization, as nanochat does.
        orthogonalize: table of coefficients: "polar-express", "polar-express-4", "polar-express-3",
            "newton-schulz", "quintic", "cans", "aol", "deepseek-v4" or "cubic".
        norm_factor: a block's norm is multiplied with it before the first step. None: the table's.
        ns_steps: number of steps. None: as many as the table has; 5 of a single triple.
        ns_coefficients: (a, b, c), or one triple per step, instead of the table.
        ns_start: "norm" divides a block by its norm; "gram" and "aol" by a closer bound from its
            Gram matrix, in plain torch alone.
        execution: "standard" multiplies the block in each step, "gram" its Gram matrix. None: the
            one with fewer FLOPs.
        eps: smallest norm to divide by; 0: the update has full size however small the momentum.
        eps_form: "clamp" divides by max(norm, eps), "add" by norm + eps.
        renormalize: scale the result to the Frobenius norm sqrt(min(rows, cols)).
        variance_beta2: NorMuon: even out rows or columns by a running mean of their squares with
            this decay rate. None: do not.
        variance_axis: "long" evens out the longer side, "rows" always rows.
        variance_eps: smallest variance to divide by.
        variance_eps_form: "clamp" is 1 / sqrt(max(s, eps)), "add" 1 / (sqrt(s) + eps).
        adjust_lr: scale of the update: "match_rms_adamw" 0.2 sqrt(max(rows, cols)), "original"
            sqrt(max(1, rows / cols)), "unit_rms_norm" sqrt(rows / cols), "sqrt_max"
            sqrt(max(rows, cols)), None: 1.
        update_scale: one more factor on the update.
        cautious: decay only elements where update and parameter have the same sign.
        decay_form: "decoupled", or "independent" of the learning rate.
        scale_decay: weight decay with the scaled learning rate.
        split_sizes: rows of each matrix in a fused weight: sizes, "halves", "heads:16",
            "interleaved:3x16", or a mapping of name patterns to these.
        flatten: take a convolution as (out, everything else).
        transposed: the weight is stored as (in, out).
        compute_dtype: dtype of the products. None: float16 on accelerators if the table has room
            for its rounding, else float32.
        state_dtypes: how state is stored: "8bit", "bf16_stochastic", or a mapping of state names to
            these or to dtypes. None: float32.
    """

    name = "muon"
    kind: Literal["matrix"] = "matrix"
    defaults: ClassVar[Options] = {
        "lr": 1e-3,
        "weight_decay": 0.1,
        "momentum": 0.95,
        "momentum_form": "ema",
        "nesterov": True,
        "equilibrate": False,
        "orthogonalize": "polar-express",
        "norm_factor": None,
        "ns_steps": None,
        "ns_coefficients": None,
        "ns_start": "norm",
        "execution": None,
        "eps": 1e-7,
        "eps_form": "clamp",
        "renormalize": False,
        "variance_beta2": None,
        "variance_axis": "long",
        "variance_eps": 1e-10,
        "variance_eps_form": "clamp",
        "adjust_lr": "match_rms_adamw",
        "update_scale": 1.0,
        "cautious": False,
        "decay_form": "decoupled",
        "scale_decay": False,
        "split_sizes": None,
        "flatten": False,
        "transposed": False,
        # Kernels multiply in float16 what was rounded to bfloat16, and round the result to it: so
        # it travels between ranks.
        "compute_dtype": None,
        "state_dtypes": None,
    }
    schedulable = frozenset({"lr", "weight_decay", "momentum", "variance_beta2"})
    taken: ClassVar[Mapping[str, checks.Check]] = {
        "lr": checks.learning_rate,
        "weight_decay": checks.not_negative,
        "momentum": checks.fraction,
        "momentum_form": partial(checks.one_of, allowed=("ema", "sum")),
        "nesterov": checks.boolean,
        "equilibrate": checks.boolean,
        "orthogonalize": partial(checks.one_of, allowed=tuple(POLYNOMIALS)),
        "norm_factor": checks.optional(checks.at_least_one),
        "ns_steps": checks.steps,
        "ns_coefficients": checks.coefficients,
        "ns_start": partial(checks.one_of, allowed=("norm", "gram", "aol")),
        "execution": partial(checks.one_of, allowed=("standard", "gram", None)),
        "eps": checks.not_negative,
        "eps_form": partial(checks.one_of, allowed=("clamp", "add")),
        "renormalize": checks.boolean,
        "variance_beta2": checks.optional(checks.fraction),
        "variance_axis": partial(checks.one_of, allowed=("long", "rows")),
        "variance_eps": checks.positive,
        "variance_eps_form": partial(checks.one_of, allowed=("clamp", "add")),
        "adjust_lr": lambda name, value: checks.one_of(name, value, tuple(LR_FACTORS)),
        "update_scale": checks.positive,
        "cautious": checks.boolean,
        "decay_form": partial(checks.one_of, allowed=("decoupled", "independent")),
        "scale_decay": checks.boolean,
        "split_sizes": checks.split_sizes,
        "flatten": checks.boolean,
        "transposed": checks.boolean,
        "compute_dtype": checks.compute_dtype,
        "state_dtypes": checks.state_dtypes,
    }

    def check(self, options: Options) -> None:
        checks.every(self.taken, options)
        checks.table(
            "orthogonalize" if options["ns_coefficients"] is None else "ns_coefficients",
            table_of(options),
            norm_factor_of(options),
            options["compute_dtype"],
        )

    def scalars(self, options: Options) -> dict[str, float | Tensor]:
        scalars: dict[str, float | Tensor] = {
            key: options[key] for key in ("lr", "weight_decay", "momentum")
        }
        if options["variance_beta2"] is not None:
            scalars["variance_beta2"] = options["variance_beta2"]
        return scalars

    def state_shapes(self, shape: Shape, options: Options) -> dict[str, Shape]:
        """Return the shapes of momentum (the block's) and, if asked for, of the variance."""
        shapes = {"momentum_buffer": shape}
        if options["variance_beta2"] is not None:
            rows, cols = shape
            shapes["variance"] = variance_shape(rows, cols, options["variance_axis"])
        return shapes

    def largest_norm(self, shape: Shape, options: Options) -> float:
        """Return the norm of a block all of whose singular values are as large as they can be."""
        return float(min(shape[0], math.prod(shape[1:])) ** 0.5 * largest_singular_value(options))

    def update(
        self, param: Tensor, grad: Tensor, state: Tensors, scalars: Tensors, options: Options
    ) -> Update:
        """Compute one Muon step on blocks (B, rows, cols); the variance alone has another shape."""
        return staged_update(self, param, grad, state, scalars, options)

    def prepare(
        self, grad: Tensor, state: Tensors, scalars: Tensors, options: Options
    ) -> Direction:
        """Update the momentum of any part of a block; return the direction for `transform`."""
        grad = bounded_gradient(grad, LARGEST_GRADIENT)
        mu, form = number(scalars["momentum"], grad), options["momentum_form"]
        momentum = accumulate_momentum(state["momentum_buffer"], grad, mu, form)
        direction = look_ahead(momentum, grad, mu, form) if options["nesterov"] else momentum
        return Direction(direction, {"momentum_buffer": momentum})

    def transform(
        self, prepared: Tensor, state: Tensors, scalars: Tensors, options: Options
    ) -> Direction:
        """Orthogonalize blocks (B, rows, cols), and do all else that needs whole blocks."""
        if len(prepared) > 1 and _depends_on_company(prepared, options):
            alone = [
                self.transform(
                    prepared[place : place + 1].clone(),
                    {key: tensor[place : place + 1] for key, tensor in state.items()},
                    scalars,
                    options,
                )
                for place in range(len(prepared))
            ]
            of_blocks = {key: torch.cat([new[key] for _, new in alone]) for key in alone[0].state}
            return Direction(torch.cat([direction for direction, _ in alone]), of_blocks)
        return self.transform_stack(prepared, state, scalars, options)

    def transform_stack(
        self, prepared: Tensor, state: Tensors, scalars: Tensors, options: Options
    ) -> Direction:
        """Do `transform` on blocks whose bits do not depend on their stack."""
        direction, new_state = prepared, {}
        if options["equilibrate"]:
            direction = equilibrate_rows(direction)
        direction = orthogonalized(direction, options)
        if options["renormalize"]:
            direction = renormalize(direction)
        if "variance" in state:
            direction, new_state["variance"] = reduce_variance(
                direction,
                state["variance"],
                number(scalars["variance_beta2"], direction),
                axis=options["variance_axis"],
                eps=options["variance_eps"],
                eps_form=options["variance_eps_form"],
            )
        return Direction(direction, new_state)

    def finish(
        self,
        param: Tensor,
        direction: Tensor,
        block_shape: Shape,
        scalars: Tensors,
        options: Options,
    ) -> Tensor:
        """Apply weight decay and the step to any part of a block of `block_shape` (rows, cols)."""
        rows, cols = block_shape
        lr, weight_decay = (number(scalars[key], param) for key in ("lr", "weight_decay"))
        adjusted_lr = lr * lr_factor(rows, cols, options["adjust_lr"], options["update_scale"])
        if options["decay_form"] == "independent":
            decay = weight_decay
        else:
            decay = (adjusted_lr if options["scale_decay"] else lr) * weight_decay
        decayed = decay_weights(param, direction, decay, cautious=options["cautious"])
        if on_host(param):
            step_size = torch.scalar_tensor(-adjusted_lr, dtype=param.dtype)
        else:
            step_size = -adjusted_lr.to(param.dtype)
        return decayed.addcmul_(direction, step_size)


def orthogonalized(blocks: Tensor, options: Options) -> Tensor:
    """Orthogonalize blocks (B, rows, cols) as the options of a group say."""
    return orthogonalize(
        blocks,
        method=options["orthogonalize"],
        steps=options["ns_steps"],
        coefficients=options["ns_coefficients"],
        norm_factor=options["norm_factor"],
        eps=options["eps"],
        eps_form=options["eps_form"],
        compute_dtype=options["compute_dtype"],
        execution=options["execution"],
        start=options["ns_start"],
    )


def _depends_on_company(blocks: Tensor, options: Options) -> bool:
    """Whether the bits of a block would depend on the other blocks of its stack.

    Stacks differ from layout to layout, and cuBLAS chooses its algorithm for products of 32 bits
    and more by the number of blocks.
    """
    if not blocks.is_cuda:
        return False
    dtype = options["compute_dtype"] or default_compute_dtype(
        blocks.dtype, blocks.device.type, table_of(options)
    )
    wide = dtype.itemsize > 2 or options["ns_start"] != "norm"
    return wide and not torch.compiler.is_compiling()


def accumulate_momentum(
    momentum: Tensor, grad: Tensor, mu: float | Tensor, form: MomentumForm = "ema"
) -> Tensor:
    """Return the new momentum.  ema: m + (1 - mu) (g - m).  sum: mu m + g."""
    if form == "ema":
        return torch.lerp(momentum, grad, in_dtype(1 - mu, grad))
    return momentum * mu + grad


def look_ahead(
    momentum: Tensor, grad: Tensor, mu: float | Tensor, form: MomentumForm = "ema"
) -> Tensor:
    """Return Nesterov's direction from the new momentum.  ema: g + mu (m - g).  sum: g + mu m."""
    if form == "ema":
        return torch.lerp(grad, momentum, in_dtype(mu, grad))
    return momentum * mu + grad


def equilibrate_rows(blocks: Tensor) -> Tensor:
    """Scale each row to one norm: row x (||X||_F / sqrt(rows)) / max(||row||, 1e-6)."""
    target = block_norm(blocks) / blocks.shape[-2] ** 0.5
    rows = torch.linalg.vector_norm(blocks, dim=-1, keepdim=True, dtype=torch.float64)
    # A row of zeros in a huge block: its factor has to be finite, or it becomes NaN.
    factor: Tensor = (target / rows.clamp_min(1e-6)).clamp_max(torch.finfo(blocks.dtype).max)
    return blocks * factor.to(blocks.dtype)


def renormalize(blocks: Tensor) -> Tensor:
    """Scale to the Frobenius norm sqrt(min(rows, cols)), that of an exactly orthogonal block."""
    factor: Tensor = min(blocks.shape[-2:]) ** 0.5 / block_norm(blocks).clamp_min(1e-6)
    return blocks * factor.to(blocks.dtype)


def variance_of_rows(rows: int, cols: int, axis: VarianceAxis) -> bool:
    """Whether a block has one second moment per row, and not per column."""
    return axis == "rows" or rows >= cols


def variance_shape(rows: int, cols: int, axis: VarianceAxis = "long") -> Shape:
    """Return the shape of the variance: one per row of a tall block, per column of a wide one.

    With the axis "rows" there is one per row in any case, as in the paper's code and dion; nanochat
    and Megatron keep the longer side.
    """
    return (rows, 1) if variance_of_rows(rows, cols, axis) else (1, cols)


def reduce_variance(
    direction: Tensor,
    variance: Tensor,
    beta2: float | Tensor,
    *,
    axis: VarianceAxis = "long",
    eps: float = 1e-10,
    eps_form: EpsForm = "clamp",
) -> tuple[Tensor, Tensor]:
    """Even out the size of rows (or columns) without changing the norm of a block.

    v = mean(u^2) across;  s <- beta2 s + (1 - beta2) v
    clamp: r = 1 / sqrt(max(s, eps))      add: r = 1 / (sqrt(s) + eps)
    u <- u r ||u|| / max(||u r||, eps)          (NorMuon, arXiv 2510.05491)
    """
    rows, cols = direction.shape[-2:]
    dim = -1 if variance_of_rows(rows, cols, axis) else -2
    mean_square = direction.square().mean(dim=dim, keepdim=True)
    variance = torch.lerp(variance, mean_square, in_dtype(1 - beta2, variance))
    if eps_form == "add":
        rescale = variance.sqrt().add_(eps).reciprocal_()
    else:
        rescale = variance.clamp_min(eps).rsqrt()
    rescale = rescale.clamp_max(LARGEST_RESCALE)  # rows of zeros, with the smallest eps
    square_sums = mean_square * direction.shape[dim]
    norm = square_sums.sum(dim=(-2, -1), keepdim=True).sqrt()
    new_norm = (square_sums * rescale.square()).sum(dim=(-2, -1), keepdim=True).sqrt()
    return direction * (rescale * (norm / new_norm.clamp_min(eps))), variance


# What the learning rate of a block is multiplied with, from its rows and columns.
LR_FACTORS: dict[str | None, Callable[[int, int], float]] = {
    # The usual RMS of an AdamW update (Moonlight, arXiv 2502.16982).
    "match_rms_adamw": lambda rows, cols: 0.2 * max(rows, cols) ** 0.5,
    # Keller Jordan, kellerjordan.github.io/posts/muon.
    "original": lambda rows, cols: max(1.0, rows / cols) ** 0.5,
    # From RMS to RMS: Scion (arXiv 2502.07529), Bernstein (jeremybernste.in/writing/deriving-muon).
    # dion calls it "spectral_norm", torchtitan "spectral_unclamped".
    "unit_rms_norm": lambda rows, cols: (rows / cols) ** 0.5,
    # Moonlight's without its 0.2, which is then `update_scale`: "spectral" in Megatron.
    "sqrt_max": lambda rows, cols: max(rows, cols) ** 0.5,
    None: lambda rows, cols: 1.0,
}


def lr_factor(rows: int, cols: int, adjust_lr: str | None, scale: float = 1.0) -> float:
    """Return the factor on the learning rate of a block of this logical shape."""
    return float(LR_FACTORS[adjust_lr](rows, cols) * scale)


def largest_singular_value(options: Options) -> float:
    """Return a bound of the singular values that the orthogonalization of a group can give."""
    own, steps = options["ns_coefficients"], options["ns_steps"]
    return _largest(
        options["orthogonalize"],
        steps,
        None if own is None else step_coefficients(options["orthogonalize"], steps, own),
        options["norm_factor"],
    )


@lru_cache(maxsize=256)
def _largest(method: str, steps: int | None, own: Table | None, factor: float | None) -> float:
    table = own or step_coefficients(method, steps)
    factor = POLYNOMIALS[method].norm_factor if factor is None else factor
    return basin_of(table, factor).largest[-1] + TOLERANCE


def norm_factor_of(options: Options) -> float:
    """Return the factor on the norm of blocks that a group asks for."""
    asked: float | None = options["norm_factor"]
    return POLYNOMIALS[options["orthogonalize"]].norm_factor if asked is None else asked


def table_of(options: Options) -> Table:
    """Return the coefficients of the steps that a group asks for."""
    return step_coefficients(
        options["orthogonalize"], options["ns_steps"], options["ns_coefficients"]
    )


def decay_weights(
    param: Tensor, direction: Tensor, decay: float | Tensor, *, cautious: bool
) -> Tensor:
    """Return p (1 - decay); cautious: decay only where update u and parameter agree, u p >= 0.

    The gate reads the sign of the parameter against the finished direction. Gated by the raw
    gradient's sign, weights that are left out keep growing: at high rates nothing is learned.
    """
    if not cautious:
        return param * (1 - decay)
    return param - param * decay * (direction * param >= 0)
