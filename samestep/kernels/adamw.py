"""AdamW on many tensors in one launch: `samestep.rules.adamw` has the formulas."""

from collections.abc import Sequence

import torch
from torch import Tensor

from samestep.kernels import elementwise
from samestep.kernels.call import CHUNK, Gradients, Step, Table, chunk_table
from samestep.kernels.norm import DTYPES
from samestep.rules.state import MASTER, State


class AdamWTensors:
    """Contiguous parameters of one device and their state, whose dtypes are alike."""

    def __init__(self, params: Sequence[Tensor], states: Sequence[State]) -> None:
        self.count = len(params)
        self.steps = Table([[state["step"] for state in states]])
        self.step_dtype = DTYPES[states[0]["step"].dtype]
        keys = ["exp_avg", "exp_avg_sq", *([MASTER] if MASTER in states[0] else [])]
        self.table = Table([params, *([state[key] for state in states] for key in keys)])
        self.chunks = chunk_table(tuple(param.numel() for param in params), params[0].device)
        dtypes = [DTYPES[tensors[0].dtype] for tensors in self.table.tensors]
        self.param_dtype, self.first_dtype, self.second_dtype = dtypes[:3]
        self.has_master = len(dtypes) == 4

    def step_(self, grads: Gradients, step: Step) -> None:
        scalars = step.scalars
        step_sizes, root_corrections = torch.empty(
            2, self.count, dtype=torch.float64, device=grads.addresses.device
        )
        elementwise.advance[(self.count,)](
            self.steps.addresses,
            step_sizes,
            root_corrections,
            step.only_if,
            grads.writes,
            scalars["lr"],
            scalars["beta1"],
            scalars["beta2"],
            step_dtype=self.step_dtype,
            num_warps=1,
        )
        elementwise.adamw[(len(self.chunks),)](
            grads.addresses,
            self.table.addresses,
            self.count,
            self.chunks,
            step_sizes,
            root_corrections,
            step.only_if,
            grads.writes,
            scalars["lr"],
            scalars["beta1"],
            scalars["beta2"],
            scalars["eps"],
            scalars["weight_decay"],
            step.factor,
            param_dtype=self.param_dtype,
            grad_dtype=grads.dtype,
            first_dtype=self.first_dtype,
            second_dtype=self.second_dtype,
            HAS_MASTER=self.has_master,
            MAXIMIZE=step.maximize,
            EPS_HAT=step.options["eps_hat"],
            CAUTIOUS=step.options["cautious"],
            DECAY=step.options["decay_form"],
            ALIGNED=self.table.aligned and grads.aligned,
            BLOCK=CHUNK,
            num_warps=8,
        )
