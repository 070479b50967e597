"""Numbers for `opt.metrics()`: norms, sizes of updates, outliers and presence."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from samestep.comm.collectives import Pending, total
from samestep.comm.groups import RankGroup
from samestep.kernels.choice import missing as missing_kernels
from samestep.update.plain import Operand


class UpdateSizes:
    """RMS of the updates of a step, per group over all ranks."""

    def __init__(self, groups: int) -> None:
        self._groups = groups
        self._sums: list[tuple[int, Tensor, Tensor]] = []  # group, squares, elements
        self._pending: list[tuple[list[int], Pending[Tensor]]] = []
        self._totals: Tensor | None = None

    def add(self, group: int, operands: Sequence[Operand], squares: Tensor) -> None:
        """Add the sums of squares, (B,), of the blocks of this rank that are present."""
        for operand, square in zip(operands, squares, strict=True):
            if operand.counted:
                square = square * operand.share
                size = torch.full_like(square, operand.param.numel() * operand.share)
                if operand.present is not None:
                    square, size = (torch.where(operand.present, x, 0.0) for x in (square, size))
                self._sums.append((group, square, size))

    def combine(
        self,
        group: RankGroup | None,
        device: torch.device,
        apart: Mapping[RankGroup, Sequence[int]],
    ) -> None:
        """Start summing squares and sizes over ranks, without waiting."""
        totals = torch.zeros(2, self._groups, dtype=torch.float64, device=device)
        for index, square, size in self._sums:
            totals[0, index] += square.to(device)
            totals[1, index] += size.to(device)
        self._sums, self._totals = [], totals
        for ranks, own in apart.items():
            part = totals[:, list(own)].flatten()
            self._pending.append((list(own), total("update sizes of stages", part, ranks)))
        if group is not None:
            rest = [
                index
                for index in range(self._groups)
                if all(index not in own for own in apart.values())
            ]
            part = totals[:, rest].flatten()
            self._pending.append((rest, total("update sizes", part, group)))

    def rms(self) -> Tensor | None:
        """Return the RMS per group, (groups,); NaN: nothing was present. None before `combine`."""
        for indices, pending in self._pending:
            assert self._totals is not None
            self._totals[:, indices] = pending.wait().view(2, -1)
        self._pending = []
        return None if self._totals is None else (self._totals[0] / self._totals[1]).sqrt()


class Outliers:
    """Counts of blocks whose update exceeded the largest possible norm.

    An outlier means that the orthogonalization has left its basin, or that a gradient was not
    finite. Kernels write flags into the host's memory; outliers of plain torch on a GPU are
    only in `counts`.
    """

    def __init__(self) -> None:
        self._found: dict[int, Tensor] = {}  # by group, on any device
        self._flags: dict[int, list[Tensor]] = {}  # by group: one per block, in the host's memory
        self._told = False

    def look_at(
        self, group: int, squares: Tensor, largest_norm: float, only_if: Tensor | None
    ) -> None:
        """Count directions whose squares, (B,), exceed `largest_norm` squared or are NaN."""
        flags = squares.le(largest_norm**2).logical_not_()  # so that NaN counts
        if only_if is not None:
            flags &= only_if != 0
        count = flags.sum()
        known = self._found.get(group)
        self._found[group] = count if known is None else known + count.to(known.device)

    def watch(self, group: int, flags: Sequence[Tensor]) -> None:
        """Count also the flags that kernels set."""
        self._flags.setdefault(group, []).extend(flags)

    def counts(self, groups: int) -> Tensor:
        """Return the number of outliers per group, (groups,)."""
        device = next((count.device for count in self._found.values()), torch.device("cpu"))
        counts = torch.zeros(groups, dtype=torch.int64, device=device)
        for group, count in self._found.items():
            counts[group] += count.to(device)
        for group, flags in self._flags.items():
            counts[group] += sum(int(flag.sum()) for flag in flags)
        return counts

    def new(self) -> int | None:
        """Return a group with an outlier, once, without waiting for the device; None otherwise."""
        if self._told:
            return None
        for group, flags in self._flags.items():
            self._told |= any(flag.any() for flag in flags)
            if self._told:
                return group
        for group, count in self._found.items():
            if count.device.type == "cpu" and count:
                self._told = True
                return group
        return None


class StepNumbers(NamedTuple):
    """Results of a step for `opt.metrics()`."""

    grad_norm: Tensor | None
    sizes: UpdateSizes | None


def present_counts(groups: int, present: Iterable[tuple[int, bool | Tensor]]) -> Tensor:
    """Return the number of present parameters per group, (groups,)."""
    known, flags = [0] * groups, []
    for index, flag in present:
        if isinstance(flag, Tensor):
            flags.append((index, flag))
        else:
            known[index] += flag
    if not flags:
        return torch.tensor(known)
    counts = torch.zeros(groups, dtype=torch.int64, device=flags[0][1].device)
    for index, count in enumerate(known):
        counts[index] += count
    for index, flag in flags:
        counts[index] += flag
    return counts


def square_sum(grads: Iterable[Tensor]) -> Tensor | None:
    """Return the sum of all squares, () float64; None without gradients."""
    grads = list(grads)
    if not grads:
        return None
    device = grads[0].device
    if missing_kernels(device) is None and can_sum_with_kernels(grads):
        from samestep.kernels import norm

        return norm.square_sum(grads)
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]
    return torch.stack([norm.to(device) for norm in norms]).square().sum()


def can_sum_with_kernels(grads: list[Tensor]) -> bool:
    """Whether a kernel can sum the gradients: one device, contiguous, not float64."""
    return (
        len({grad.device for grad in grads}) == 1
        and all(map(Tensor.is_contiguous, grads))
        and torch.float64 not in {grad.dtype for grad in grads}
    )


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor on gradients, min(1, max_norm / (norm + 1e-6)), as torch clips."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
