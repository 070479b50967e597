"""AdamW in one pass over memory on CPU: torch's own kernel, the one behind `fused=True`.

The kernel has no public name. It rounds otherwise than separate operations do, by an ulp or so.
On x86 it rounds the elements after the last whole vector of a tensor in yet another way, so these
are given to it in a vector of their own: a slice of a parameter gets the same bits as the whole.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
VECTOR = 64  # elements, a multiple of what any register holds


def fused_adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Mapping[str, Tensor]],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Take one step on parameters and state in place; the counts already include this step."""
    moments = [[state[key] for state in states] for key in MOMENTS if key in states[0]]
    kinds = (params, grads, *moments)
    # With strides the kernel writes where it should not.
    flat = [[tensor.contiguous().view(-1) for tensor in kind] for kind in kinds]
    counts = [state["step"].float() for state in states]
    given = [[_whole_vectors(tensor) for tensor in dense] for dense in flat]
    together = _with_rests(flat[0], counts)
    for alike in together:
        counts.append(counts[alike[0]])
        for dense, whole in zip(flat, given, strict=True):
            whole.append(_joined(_rests(dense, alike)))
    torch._fused_adamw_(
        given[0],
        given[1],
        given[2],
        given[3],
        given[4] if len(given) > 4 else [],
        counts,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=len(given) > 4,
        maximize=False,
    )
    for kind, dense, whole in zip(kinds, flat, given, strict=True):
        if kind is grads:
            continue
        for alike, joined in zip(together, whole[len(params) :], strict=True):
            rests = _rests(dense, alike)
            sizes = list(map(len, rests))
            for rest, new in zip(rests, torch.split(joined[: sum(sizes)], sizes), strict=True):
                rest.copy_(new)
        for tensor, new in zip(kind, dense, strict=True):
            if not tensor.is_contiguous():
                tensor.copy_(new.view(tensor.shape))


def _rest(tensor: Tensor) -> int:
    """Return the number of elements after the last whole vector."""
    return tensor.numel() % VECTOR


def _whole_vectors(flat: Tensor) -> Tensor:
    rest = _rest(flat)
    return flat[:-rest] if rest else flat


def _with_rests(params: Sequence[Tensor], counts: Sequence[Tensor]) -> list[list[int]]:
    """Return the places of parameters that have a rest, grouped by dtype and step count."""
    found: dict[tuple[torch.dtype, float], list[int]] = {}
    for place, (param, count) in enumerate(zip(params, counts, strict=True)):
        if _rest(param):
            found.setdefault((param.dtype, float(count)), []).append(place)
    return list(found.values())


def _rests(flat: Sequence[Tensor], places: Sequence[int]) -> list[Tensor]:
    return [flat[place][-_rest(flat[place]) :] for place in places]


def _joined(rests: Sequence[Tensor]) -> Tensor:
    """Concatenate rests, padded with zeros to a whole number of vectors."""
    padding = -sum(map(len, rests)) % VECTOR
    return torch.cat([*rests, rests[0].new_zeros(padding)])
