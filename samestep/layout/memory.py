"""Detect tensors that share memory, whatever their shapes and strides."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from samestep.layout.boxes import local_of

UNKNOWN = ("meta", "xla")  # devices whose tensors do not tell where they lie


class _Span(NamedTuple):
    """Address range of a tensor; `dense` if it fills the range."""

    start: int
    stop: int
    dense: bool
    name: str
    tensor: Tensor
    counts: bool


def overlap(
    named: Iterable[tuple[str, Tensor]], others: Iterable[tuple[str, Tensor]] = ()
) -> tuple[str, str] | None:
    """Return the names of two tensors that share an element; None if no two do.

    A DTensor counts as its local tensor. `others` are compared with `named` alone. Tensors that
    only lie in one storage, such as disjoint views of one buffer, share no element.
    """
    by_device: dict[torch.device, list[_Span]] = {}
    for counts, tensors in ((True, named), (False, others)):
        for name, tensor in tensors:
            span = _span(name, local_of(tensor).detach(), counts)
            if span is not None:
                by_device.setdefault(span.tensor.device, []).append(span)
    for spans in by_device.values():
        spans.sort(key=lambda span: span.start)
        reaching: list[_Span] = []  # those before that end after the start of this one
        for span in spans:
            reaching = [before for before in reaching if before.stop > span.start]
            for before in reaching:
                if (before.counts or span.counts) and _have_common(before, span):
                    first, second = sorted((before, span), key=lambda s: not s.counts)
                    return first.name, second.name
            reaching.append(span)
    return None


def _span(name: str, tensor: Tensor, counts: bool) -> _Span | None:
    if tensor.device.type in UNKNOWN or tensor.layout != torch.strided or not tensor.numel():
        return None
    try:
        start = tensor.data_ptr()
    except RuntimeError:  # a fake tensor
        return None
    if not start:
        return None
    elements = 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    stop = start + elements * tensor.itemsize
    return _Span(start, stop, elements == tensor.numel(), name, tensor, counts)


def _have_common(one: _Span, other: _Span) -> bool:
    """Whether two tensors with overlapping ranges share an element."""
    if one.dense and other.dense:
        return True
    start = min(one.start, other.start)
    marks = torch.zeros(max(one.stop, other.stop) - start, dtype=torch.bool)
    _bytes_in(marks, one, start).fill_(True)
    return bool(_bytes_in(marks, other, start).any())


def _bytes_in(marks: Tensor, span: _Span, start: int) -> Tensor:
    """Return a view of `marks` at the bytes of a tensor."""
    tensor = span.tensor
    strides = [stride * tensor.itemsize for stride in tensor.stride()]
    sizes = (*tensor.shape, tensor.itemsize)
    return marks.as_strided(sizes, (*strides, 1), span.start - start)
