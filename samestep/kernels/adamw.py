"""AdamW on many tensors in one launch: `samestep.rules.adamw` has the formulas."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from samestep.kernels import elementwise
from samestep.kernels.norm import DTYPES
from samestep.kernels.tables import CHUNK, addresses, aligned, chunk_table
from samestep.state import MASTER, State


def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[State],
    scalars: Mapping[str, Tensor],
    *,
    factor: Tensor | None,
    maximize: bool,
    writes: Tensor | None,  # (count,) float64: 0 leaves a tensor as it is
) -> None:
    """One step on contiguous tensors of one device, whose dtypes are alike."""
    steps = [state["step"] for state in states]
    if writes is None:
        torch._foreach_add_(steps, 1)
    else:
        torch._foreach_add_(steps, list(writes.to(steps[0].dtype).unbind()))
    counts = torch.stack(steps).double()
    rows = [list(params), list(grads)]
    rows += [[state[key] for state in states] for key in ("exp_avg", "exp_avg_sq")]
    has_master = MASTER in states[0]
    if has_master:
        rows.append([state[MASTER] for state in states])
    chunks = chunk_table(tuple(param.numel() for param in params), params[0].device)
    elementwise.adamw[(len(chunks),)](
        addresses(rows),
        len(params),
        chunks,
        scalars["lr"] / (1 - scalars["beta1"] ** counts),
        (1 - scalars["beta2"] ** counts).sqrt(),
        counts if writes is None else writes,
        scalars["lr"],
        scalars["beta1"],
        scalars["beta2"],
        scalars["eps"],
        scalars["weight_decay"],
        counts if factor is None else factor,
        param_dtype=DTYPES[params[0].dtype],
        grad_dtype=DTYPES[grads[0].dtype],
        first_dtype=DTYPES[states[0]["exp_avg"].dtype],
        second_dtype=DTYPES[states[0]["exp_avg_sq"].dtype],
        HAS_MASTER=has_master,
        HAS_FACTOR=factor is not None,
        HAS_WRITES=writes is not None,
        MAXIMIZE=maximize,
        ALIGNED=aligned(rows),
        BLOCK=CHUNK,
        num_warps=8,
    )
