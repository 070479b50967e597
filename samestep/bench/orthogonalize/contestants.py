"""Functions that orthogonalize a 16-bit batch (B, m, n): ours, torch's, and peers'."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samestep.bench.gpu.accuracy import Reference
from samestep.bench.gpu.peers import peer
from samestep.rules.orthogonalize import POLYNOMIALS, orthogonalize, step_coefficients

QUINTIC = POLYNOMIALS["newton-schulz"].coefficients[0]


class Function(NamedTuple):
    """What is timed, and the polynomial it is to compute."""

    call: Callable[[Tensor], Tensor]
    reference: Reference | None


class Contestant(NamedTuple):
    """Who takes part."""

    name: str
    what: str
    build: Callable[[], Function]
    ours: bool = False
    kernels: bool = True
    default: bool = True


def _ours(method: str = "polar-express", **options: Any) -> Callable[[], Function]:
    def build() -> Function:
        reference = Reference(step_coefficients(method, 5), POLYNOMIALS[method].norm_factor)
        return Function(lambda X: orthogonalize(X, method=method, **options), reference)

    return build


def _torch_single() -> Function:
    """What torch.optim.Muon calls for each matrix; it scales its argument, hence the copy."""
    one: Any = peer("torch.optim._muon")._zeropower_via_newtonschulz

    def call(X: Tensor) -> Tensor:
        for matrix in X:
            last: Tensor = one(matrix.clone(), QUINTIC, 5, 1e-7)
        return last[None]

    return Function(call, Reference([QUINTIC] * 5))


def _dion_triton() -> Function:
    module = peer("dion.newton_schulz_triton")
    try:
        reference = Reference(peer("gram_newton_schulz").YOU_COEFFICIENTS)  # the same, readable
    except ImportError:
        reference = None
    return Function(module.newton_schulz_triton, reference)


def _dion_polar() -> Function:
    module = peer("dion.polar_express")
    return Function(module.polar_express_triton, Reference(module._POLAR_EXPRESS_COEFFS, 1.02))


def _gram(**options: Any) -> Callable[[], Function]:
    def build() -> Function:
        package = peer("gram_newton_schulz")
        table = package.POLAR_EXPRESS_COEFFICIENTS
        call = package.GramNewtonSchulz(
            ns_coefficients=table, gram_newton_schulz_reset_iterations=[2], **options
        )
        return Function(call, Reference(table))

    return build


CONTESTANTS = (
    Contestant("ours", "samestep's orthogonalize", _ours(), ours=True),
    Contestant(
        "ours-float16", "the same with compute_dtype=float16",
        _ours(compute_dtype=torch.float16), ours=True,
    ),
    Contestant("torch-single", "torch.optim.Muon's function, matrix by matrix", _torch_single),
    Contestant(
        "torch-batched", "the same polynomial on the batch, in plain torch",
        _ours("newton-schulz", execution="standard", compute_dtype=torch.bfloat16), kernels=False,
    ),
    Contestant(
        "torch-gram", "samestep's orthogonalize in plain torch (SAMESTEP_KERNELS=0)",
        _ours(compute_dtype=torch.bfloat16), kernels=False,
    ),
    Contestant("dion-triton", "dion's newton_schulz_triton", _dion_triton),
    Contestant(
        "dion-polar", "dion's polar_express_triton, compiled", _dion_polar, default=False
    ),
    Contestant("gram", "gram-newton-schulz with its kernels", _gram()),
    Contestant("gram-torch", "gram-newton-schulz in plain torch", _gram(ns_use_kernels=False)),
)  # fmt: skip
