"""The contestants of `samestep bench step`: ours in several forms, peers at their best."""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

import samestep
from samestep.lab.bench.gpu.measure import SPECTRA, Reference, our_reference
from samestep.lab.bench.gpu.options import Contestant, peer
from samestep.models.parameter_sets import Shape, Shapes

# Parameters with gradients, for a measurement

GRADIENT = 1e-2  # size of an element


class Parameters(NamedTuple):
    """Parameters with gradients that stay the same in every step."""

    matrices: list[Parameter]
    others: list[Parameter]
    probes: list[Parameter]  # of each shape and spectrum one; the first two square, as SPECTRA

    @property
    def all(self) -> list[Parameter]:
        return [*self.matrices, *self.others]


def make_parameters(shapes: Shapes, device: torch.device) -> Parameters:
    """Return random fp32 parameters and gradients, the same for every contestant."""
    torch.manual_seed(0)
    matrices, others = (with_gradients(some, device) for some in shapes)
    by_shape: dict[Shape, list[Parameter]] = defaultdict(list)
    for parameter in matrices:
        if parameter.ndim == 2:
            by_shape[tuple(parameter.shape)].append(parameter)
    probes = []
    for (rows, cols), alike in sorted(by_shape.items(), key=lambda pair: pair[0][0] != pair[0][1]):
        for probe, (name, spectrum) in zip(alike, SPECTRA.items(), strict=False):
            if name != "gaussian":  # which they all are
                assert probe.grad is not None
                probe.grad.copy_(spectrum(rows, cols, device).mul_(GRADIENT))
            probes.append(probe)
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
    """Return stacks as views of their matrices, for optimizers that take only matrices."""
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


class Copies(NamedTuple):
    """Parameters that a contestant steps instead of the shared ones, and their originals.

    Each copy holds all of its originals, one after the other.
    """

    own: list[Parameter]
    originals: list[list[Parameter]]

    def load(self) -> None:
        for own, originals in zip(self.own, self.originals, strict=True):
            for part, original in zip(own.data.chunk(len(originals)), originals, strict=True):
                part.copy_(original.data.view(part.shape))

    def store(self) -> None:
        for own, originals in zip(self.own, self.originals, strict=True):
            for part, original in zip(own.data.chunk(len(originals)), originals, strict=True):
                original.data.copy_(part.view(original.shape))


class Entry(NamedTuple):
    """A contestant's optimizers, stepped one after the other, and their polynomial."""

    optimizers: list[Any]
    reference: Reference | None = None
    copies: Copies | None = None

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
    """Build samestep's optimizer as shipped, with clipping; `options` are further keywords."""
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
    """Build nanochat's optimizer with groups as its model makes them: one for each shape."""
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


def _dion(parameters: Parameters, *, graph: bool = False, **options: Any) -> Entry:
    """Build dion's optimizer; `graph` replays it by `CudaGraphOptimizer` from step 3 on."""
    optimizer = dion_muon(parameters.matrices, parameters.others, **options)
    if graph:
        optimizer = peer("dion.cuda_graph").CudaGraphOptimizer(optimizer, warmup_steps=2)
    return Entry([optimizer], _dion_reference(options))


def dion_muon(
    matrices: Sequence[Tensor], others: Sequence[Tensor], lr: float = LR, **options: Any
) -> Any:
    """Build dion's Muon on one device, with AdamW for `others` inside the same optimizer."""
    groups = [{"params": matrices}, {"params": others, "algorithm": "adamw"}]
    return peer("dion").Muon(
        groups, lr=lr, mu=MOMENTUM, betas=BETAS, weight_decay=DECAY, nesterov=True,
        adjust_lr="rms_norm", **options,
    )  # fmt: skip


def _dion_reference(options: dict[str, Any]) -> Reference | None:
    """Return the polynomial of dion's Muon, or None if no peer lets it be read."""
    try:
        if options.get("use_gram_newton_schulz"):
            return Reference(peer("gram_newton_schulz").POLAR_EXPRESS_COEFFICIENTS)
        if options.get("use_polar_express", True):
            return Reference(peer("dion.polar_express")._POLAR_EXPRESS_COEFFS, 1.02)
        return Reference(peer("gram_newton_schulz").YOU_COEFFICIENTS)
    except (ImportError, AttributeError):
        return None


# The optimizer of modded-nanogpt: bfloat16 parameters and gradients, blocks of a shape in one bank

SPEEDRUN = "train_gpt.py"
NEEDED = ("polar_express_coeffs", "polar_express", "ParamConfig", "NorMuonAndAdam")
KERNELS = ("XXT", "XTX", "ba_plus_cAA", "transpose_add", "transpose_copy")


def _speedrun_optimizer() -> Any:
    """Return the optimizer class of modded-nanogpt, out of its script, which is not imported.

    Importing the script would start a training. ImportError says that there is no script.
    """
    scripts = (Path(folder) / SPEEDRUN for folder in sys.path)
    script = next((each for each in scripts if each.is_file()), None)
    if script is None:
        raise ImportError(f"no {SPEEDRUN} of modded-nanogpt here; --peer-path names a checkout")
    kernels = peer("triton_kernels")
    known: dict[str, Any] = {"torch": torch, "dist": torch.distributed, "nn": torch.nn}
    known |= {"Tensor": Tensor, "dataclass": dataclass, "__name__": "speedrun"}
    known |= {name: getattr(kernels, name) for name in KERNELS}
    tree = ast.parse(script.read_text())
    tree.body = [node for node in tree.body if _names(node) & {*NEEDED}]
    exec(compile(tree, str(script), "exec"), known)
    return known["NorMuonAndAdam"]


def _names(node: ast.stmt) -> set[str]:
    """Return the names that a statement of a script defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    return set()


class _Speedrun:
    """The optimizer of modded-nanogpt, with the `step` and `state` of a contestant."""

    def __init__(self, banks: Sequence[Parameter], others: Sequence[Parameter]) -> None:
        table: dict[str, dict[str, Any]] = {}
        self._grads = [(parameter, parameter.grad) for parameter in (*banks, *others)]
        for number, (parameter, _) in enumerate(self._grads):
            label: Any = f"parameter {number}"
            normuon = number < len(banks)
            parameter.label = label  # type: ignore[attr-defined]
            parameter.reshape = tuple(parameter.shape)  # type: ignore[assignment, method-assign]
            table[label] = {
                "optim": "normuon" if normuon else "adam",
                "comms": "replicated",
                "adam_betas": None if normuon else BETAS,
            }
        self._optimizer = _speedrun_optimizer()(
            [(parameter.label, parameter) for parameter, _ in self._grads],  # type: ignore[attr-defined]
            param_table=table,
            scatter_order=list(table),
            work_order=list(table),
            adam_defaults={"lr": LR, "eps": 1e-10, "weight_decay": DECAY},
            normuon_defaults={"lr": LR, "momentum": MOMENTUM, "beta2": 0.9, "weight_decay": DECAY},
        )
        self.state = self._optimizer.param_states

    def step(self) -> None:
        for parameter, grad in self._grads:  # which it drops
            parameter.grad = grad
        self._optimizer.step()


def _in_bfloat16(originals: Sequence[list[Parameter]]) -> Copies:
    """Copy parameters and gradients in bfloat16; several originals become one bank."""
    found = []
    for alike in originals:
        values = [torch.stack([part.detach() for part in alike]).bfloat16()]
        values.append(torch.stack([_grad(part) for part in alike]).bfloat16())
        own, grad = values if len(alike) > 1 else [value[0] for value in values]
        found.append(Parameter(own))
        found[-1].grad = grad
    return Copies(found, list(originals))


def _grad(parameter: Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _speedrun(parameters: Parameters) -> Entry:
    banks: dict[Shape, list[Parameter]] = defaultdict(list)
    for matrix in as_matrices(parameters.matrices):
        banks[tuple(matrix.shape)].append(matrix)
    copies = _in_bfloat16([*banks.values(), *([other] for other in parameters.others)])
    return Entry([_Speedrun(copies.own[: len(banks)], copies.own[len(banks) :])], None, copies)


def _our_speedrun(parameters: Parameters) -> Entry:
    """Build samestep's optimizer for the dtypes and rules of `_speedrun`.

    Main parameters are kept as remainders of the bfloat16 parameters.
    """
    copies = _in_bfloat16([[parameter] for parameter in parameters.all])
    count = len(parameters.matrices)
    groups = [
        {"params": copies.own[:count], "rule": "muon", "variance_beta2": 0.9, "cautious": True},
        {"params": copies.own[count:], "rule": "adamw", "cautious": True},
    ]
    remainders = {"master_weight": "remainder"}
    optimizer = samestep.MuonAdamW(
        groups, lr=LR, master_weights=True, state_dtypes=remainders, max_grad_norm=1.0
    )
    return Entry([optimizer], None, copies)


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
        "dion-graph", "dion's Muon, Newton-Schulz in Triton, replayed by its CudaGraphOptimizer",
        partial(_dion, use_triton=True, use_polar_express=False, graph=True),
    ),
    Contestant(
        "dion-gns", "dion's Muon, Gram Newton-Schulz with its kernels",
        partial(_dion, use_triton=True, use_gram_newton_schulz=True),
    ),
    Contestant(
        "dion-gns-graph", "the same, replayed by dion's CudaGraphOptimizer",
        partial(_dion, use_triton=True, use_gram_newton_schulz=True, graph=True),
    ),
    Contestant(
        "dion-gns-torch", "dion's Muon, Gram Newton-Schulz in plain torch",
        partial(_dion, use_gram_newton_schulz=True), default=False,
    ),
    Contestant(
        "speedrun", "modded-nanogpt's NorMuonAndAdam, bfloat16 with mantissas, one bank per shape",
        _speedrun, "bfloat16",
    ),
    Contestant(
        "ours-remainder", "ours on the same dtypes by the same rules", _our_speedrun,
        "bfloat16", ours=True, clips=True,
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
