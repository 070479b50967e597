"""The contestants of `samestep bench step`: ours in several forms, peers at their best."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

import samestep
from samestep.lab.bench.gpu.measure import Reference, our_reference, power_law
from samestep.lab.bench.gpu.options import Contestant, peer
from samestep.models.parameter_sets import Shape, Shapes

# Parameters with gradients, for a measurement

GRADIENT = 1e-2  # size of an element


class Parameters(NamedTuple):
    """Parameters with gradients that stay the same in every step."""

    matrices: list[Parameter]
    others: list[Parameter]
    probes: list[Parameter]  # two square matrices: Gaussian gradient, and 1, 1/2, 1/3, ...

    @property
    def all(self) -> list[Parameter]:
        return [*self.matrices, *self.others]


def make_parameters(shapes: Shapes, device: torch.device) -> Parameters:
    """Random parameters and gradients in fp32, the same for every contestant."""
    torch.manual_seed(0)
    matrices, others = (with_gradients(some, device) for some in shapes)
    probes = [p for p in matrices if p.ndim == 2 and p.shape[0] == p.shape[1]][:2]
    falling = probes[1].grad
    assert falling is not None
    falling.copy_(power_law(len(falling), len(falling), device).mul_(GRADIENT))
    return Parameters(matrices, others, probes)


def with_gradients(
    shapes: Iterable[Shape], device: torch.device, dtype: torch.dtype = torch.float32
) -> list[Parameter]:
    found = []
    for shape in shapes:
        parameter = Parameter(torch.randn(shape, device=device).mul_(0.02).to(dtype))
        parameter.grad = torch.randn(shape, device=device).mul_(GRADIENT).to(dtype)
        found.append(parameter)
    return found


def as_matrices(parameters: Sequence[Parameter]) -> list[Parameter]:
    """Stacks as views of their matrices, for optimizers that know only those."""
    found: list[Parameter] = []
    for parameter in parameters:
        if parameter.ndim == 2:
            found.append(parameter)
            continue
        assert parameter.grad is not None
        for values, grad in zip(_each(parameter.data), _each(parameter.grad), strict=True):
            view = Parameter(values)
            view.grad = grad
            found.append(view)
    return found


def _each(stack: Tensor) -> tuple[Tensor, ...]:
    return stack.flatten(end_dim=-3).unbind()


# Contestants

LR = 1e-3
DECAY = 0.1
MOMENTUM = 0.95
BETAS = (0.9, 0.95)


class Entry(NamedTuple):
    """A contestant: its optimizers, stepped one after the other, and its polynomial."""

    optimizers: list[Any]
    reference: Reference | None = None

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def state_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for o in self.optimizers for t in _tensors(o.state))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif hasattr(value, "values"):
        for each in value.values():
            yield from _tensors(each)


def _ours(parameters: Parameters, **options: Any) -> Entry:
    """Our optimizer as shipped, with clipping; `options` are what differs."""
    groups = [
        {"params": parameters.matrices, "rule": "muon"},
        {"params": parameters.others, "rule": "adamw"},
    ]
    optimizer = samestep.MuonAdamW(groups, lr=LR, max_grad_norm=1.0, **options)
    plain = "variance_beta2" not in options
    return Entry([optimizer], our_reference() if plain else None)


def _our_adamw(parameters: Parameters, **options: Any) -> Entry:
    return Entry(
        [samestep.AdamW(parameters.all, lr=LR, betas=BETAS, weight_decay=DECAY, **options)]
    )


def fused_adamw(parameters: Sequence[Tensor], lr: float = LR) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, betas=BETAS, weight_decay=DECAY, fused=True)


def _torch_muon(parameters: Parameters) -> Entry:
    muon = torch.optim.Muon(
        as_matrices(parameters.matrices),
        lr=LR,
        weight_decay=DECAY,
        momentum=MOMENTUM,
        adjust_lr_fn="match_rms_adamw",
    )
    return Entry([muon, fused_adamw(parameters.others)], our_reference("newton-schulz"))


def _nanochat(parameters: Parameters) -> Entry:
    """Groups as its model makes them: one for each shape."""
    optim = peer("nanochat.optim")
    matrices = as_matrices(parameters.matrices)
    groups: list[dict[str, Any]] = [
        {
            "kind": "adamw", "params": parameters.others, "lr": LR, "betas": BETAS,
            "eps": 1e-10, "weight_decay": DECAY,
        }
    ]  # fmt: skip
    for shape in sorted({tuple(p.shape) for p in matrices}):
        alike = [p for p in matrices if tuple(p.shape) == shape]
        groups.append(
            {
                "kind": "muon", "params": alike, "lr": LR, "momentum": MOMENTUM,
                "ns_steps": 5, "beta2": 0.9, "weight_decay": DECAY,
            }
        )  # fmt: skip
    return Entry([optim.MuonAdamW(groups)])


def _dion(parameters: Parameters, **options: Any) -> Entry:
    optimizer = dion_muon(parameters.matrices, parameters.others, **options)
    return Entry([optimizer], _dion_reference(options))


def dion_muon(
    matrices: Sequence[Tensor], others: Sequence[Tensor], lr: float = LR, **options: Any
) -> Any:
    """dion's Muon on one device, AdamW for the rest inside the same optimizer."""
    groups = [{"params": matrices}, {"params": others, "algorithm": "adamw"}]
    return peer("dion").Muon(
        groups, lr=lr, mu=MOMENTUM, betas=BETAS, weight_decay=DECAY, nesterov=True,
        adjust_lr="rms_norm", **options,
    )  # fmt: skip


def _dion_reference(options: dict[str, Any]) -> Reference | None:
    """The coefficients, from where a peer lets them be read."""
    try:
        if options.get("use_gram_newton_schulz"):
            return Reference(peer("gram_newton_schulz").POLAR_EXPRESS_COEFFICIENTS)
        if options.get("use_polar_express", True):
            return Reference(peer("dion.polar_express")._POLAR_EXPRESS_COEFFS, 1.02)
        return Reference(peer("gram_newton_schulz").YOU_COEFFICIENTS)
    except (ImportError, AttributeError):
        return None


CONTESTANTS = (
    Contestant("ours", "samestep as shipped, clipping on", _ours, ours=True, clips=True),
    Contestant(
        "ours-float16", "the same with compute_dtype=float16",
        partial(_ours, compute_dtype=torch.float16), ours=True, clips=True,
    ),
    Contestant(
        "ours-variance", "the same with variance reduction and cautious decay",
        partial(_ours, variance_beta2=0.9, cautious=True), ours=True, clips=True,
    ),
    Contestant(
        "ours-graph", "the same replayed as a CUDA graph (cuda_graph=True)",
        partial(_ours, cuda_graph=True), ours=True, clips=True,
    ),
    Contestant(
        "ours-plain-torch", "the same without kernels (SAMESTEP_KERNELS=0)",
        _ours, ours=True, clips=True, kernels=False,
    ),
    Contestant("torch", "torch.optim.Muon and fused AdamW", _torch_muon),
    Contestant("nanochat", "nanochat's MuonAdamW, compiled", _nanochat),
    Contestant(
        "dion-triton", "dion's Muon, Newton-Schulz in Triton",
        partial(_dion, use_triton=True, use_polar_express=False),
    ),
    Contestant(
        "dion-polar", "dion's Muon, Polar Express in Triton and compiled",
        partial(_dion, use_triton=True), default=False,
    ),
    Contestant(
        "dion-gram", "dion's Muon, Gram Newton-Schulz with its kernels",
        partial(_dion, use_triton=True, use_gram_newton_schulz=True),
    ),
    Contestant(
        "dion-gram-torch", "dion's Muon, Gram Newton-Schulz in plain torch",
        partial(_dion, use_gram_newton_schulz=True),
    ),
    Contestant("ours-adamw", "samestep.AdamW on everything", _our_adamw, "adamw", ours=True),
    Contestant(
        "ours-adamw-graph", "the same replayed as a CUDA graph (cuda_graph=True)",
        partial(_our_adamw, cuda_graph=True), "adamw", ours=True,
    ),
    Contestant(
        "torch-adamw", "torch's fused AdamW on everything",
        lambda parameters: Entry([fused_adamw(parameters.all)]), "adamw",
    ),
)  # fmt: skip
