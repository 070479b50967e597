"""Which operands of a step the kernels take, and the step on those."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from samestep.apply import GroupMath, Operand
from samestep.kernels.adamw import adamw_
from samestep.kernels.muon import Part, muon_
from samestep.kernels.norm import DTYPES
from samestep.rules.adamw import AdamWRule
from samestep.rules.muon import MuonRule
from samestep.rules.orthogonalize import kernels_run, step_coefficients

BATCH_ELEMENTS = 1 << 30  # orthogonalized at once: 4 bytes each, and less for Gram matrices


def update_with_kernels(math: GroupMath, index: int, operands: Sequence[Operand]) -> list[Operand]:
    """Run the rule of a group on the operands that kernels can do; give the others back."""
    if type(math.rule) is AdamWRule and math.sizes is None and not math.options["amsgrad"]:
        mine, others = _sorted(operands)
        for alike in _by_kind(mine).values():
            params, grads, states = _columns(alike)
            adamw_(
                params,
                grads,
                states,
                math.scalars,
                factor=math.factor,
                maximize=math.maximize,
                writes=_writes(alike, math.only_if),
            )
        return others
    if type(math.rule) is MuonRule and _orthogonalizes(math, operands[0].param.device):
        mine, others = _sorted(operands)
        for alike in _by_kind(mine).values():
            for batch in _batches(alike):
                parts = [Part(*_columns(same), _writes(same, math.only_if)) for same in batch]
                squares = muon_(
                    parts,
                    math.scalars,
                    math.options,
                    factor=math.factor,
                    maximize=math.maximize,
                    measure=math.sizes is not None,
                )
                if math.sizes is not None:
                    for same, of_part in zip(batch, squares, strict=True):
                        math.sizes.add(index, same, of_part.double())
        return others
    return list(operands)


def _orthogonalizes(math: GroupMath, device: torch.device) -> bool:
    """Whether the products of a group's orthogonalization can be symmetric 16-bit ones."""
    options = math.options
    table = step_coefficients(
        options["orthogonalize"], options["ns_steps"], options["ns_coefficients"]
    )
    dtype = options["compute_dtype"] or torch.bfloat16
    return kernels_run(table, dtype, device)


def _sorted(operands: Sequence[Operand]) -> tuple[list[Operand], list[Operand]]:
    """Those of dtypes and strides that kernels know, and the others."""
    mine: list[Operand] = []
    others: list[Operand] = []
    for operand in operands:
        tensors = [t for t in (operand.param, operand.grad, *operand.state.values()) if t.ndim]
        fits = all(t.dtype in DTYPES and t.is_contiguous() for t in tensors)
        (mine if fits and operand.param.numel() else others).append(operand)
    return mine, others


def _by_kind(operands: Sequence[Operand]) -> dict[object, list[Operand]]:
    """By the dtypes of parameter, gradient and state."""
    kinds: dict[object, list[Operand]] = defaultdict(list)
    for operand in operands:
        state = tuple((key, tensor.dtype) for key, tensor in operand.state.items())
        kinds[operand.param.dtype, operand.grad.dtype, state].append(operand)
    return kinds


def _batches(operands: Sequence[Operand]) -> Iterator[list[list[Operand]]]:
    """Blocks that are orthogonalized together: those of a shape, and those of its transpose."""
    by_shape: dict[tuple[int, ...], list[Operand]] = defaultdict(list)
    for operand in operands:
        rows = operand.param.shape[0]
        by_shape[tuple(sorted((rows, operand.param.numel() // rows)))].append(operand)
    for (short, long), members in by_shape.items():
        members.sort(key=lambda operand: operand.param.shape[0] == short)
        count = max(1, BATCH_ELEMENTS // (short * long))
        for start in range(0, len(members), count):
            batch = members[start : start + count]
            yield [list(same) for _, same in groupby(batch, lambda operand: operand.param.shape[0])]


def _columns(
    operands: Sequence[Operand],
) -> tuple[list[Tensor], list[Tensor], list[dict[str, Tensor]]]:
    return (
        [operand.param for operand in operands],
        [operand.grad for operand in operands],
        [operand.state for operand in operands],
    )


def _writes(operands: Sequence[Operand], only_if: Tensor | None) -> Tensor | None:
    """(B,) float64 flags on the device; None: all are written."""
    if only_if is None and all(operand.present is None for operand in operands):
        return None
    device = operands[0].param.device
    flags = torch.ones(len(operands), dtype=torch.float64, device=device)
    if any(operand.present is not None for operand in operands):
        one = flags[0]
        flags = torch.stack([one if o.present is None else o.present.double() for o in operands])
    return flags if only_if is None else flags * only_if
