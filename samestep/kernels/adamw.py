"""AdamW on many tensors in one launch: `samestep.rules.adamw` has the formulas."""

from collections.abc import Sequence

import torch
from torch import Tensor

from samestep.kernels import elementwise
from samestep.kernels.call import (
    CHUNK,
    FUSION,
    SMALL_CHUNK,
    SMALL_WARPS,
    Gradients,
    Origins,
    Step,
    Table,
    chunk_table,
    codes_per_scale,
)
from samestep.kernels.launch import launch
from samestep.kernels.norm import DTYPES, STORED_DTYPES
from samestep.rules.noise import Origin
from samestep.rules.state import MASTER, State
from samestep.rules.stored import REMAINDER_KEY, SCALE_SUFFIX

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamWTensors:
    """Contiguous parameters of one device and their state, whose dtypes are alike.

    `origins` is given if state is rounded at random; all tensors then round the same state.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        states: Sequence[State],
        origins: Sequence[Origin] | None = None,
    ) -> None:
        first, device = states[0], params[0].device
        self.count = len(params)
        self.steps = Table([[state["step"] for state in states]])
        self.step_dtype = DTYPES[first["step"].dtype]
        masters = [key for key in (MASTER, REMAINDER_KEY) if key in first]
        keys = (*MOMENTS, *masters)
        self.table = Table([params, *([state[key] for state in states] for key in keys)])
        self.chunk, self.warps = (CHUNK, 8) if origins is None else (SMALL_CHUNK, SMALL_WARPS)
        self.chunks = chunk_table(tuple(param.numel() for param in params), device, self.chunk)
        dtypes = [STORED_DTYPES[tensors[0].dtype] for tensors in self.table.tensors]
        self.param_dtype, self.first_dtype, self.second_dtype = dtypes[:3]
        self.master_dtype = dtypes[3] if masters else None
        coded = [key for key in MOMENTS if key + SCALE_SUFFIX in first]
        self.block = codes_per_scale(first, coded[0]) if coded else 0
        # Of a moment without scales: a place that nobody reads.
        scales = [
            [state.get(key + SCALE_SUFFIX, state[key]) for state in states] for key in MOMENTS
        ]
        self.scales = Table(scales) if coded else None
        self.random = [origins is not None and key in origins[0].seeds for key in MOMENTS]
        self.origins: Tensor | None = None
        self.places = "near"
        if origins is not None:
            places = Origins(origins, [param.shape for param in params])
            self.origins, self.places = places.on(device), places.places

    def step_(self, grads: Gradients, step: Step) -> None:
        scalars = step.scalars
        step_sizes, root_corrections = torch.empty(
            2, self.count, dtype=torch.float64, device=grads.addresses.device
        )
        launch(
            elementwise.advance,
            (self.count,),
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
        launch(
            elementwise.adamw,
            (len(self.chunks),),
            grads.addresses,
            self.table.addresses,
            None if self.scales is None else self.scales.addresses,
            self.count,
            self.chunks,
            None if self.origins is None else self.steps.addresses,
            self.origins,
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
            master_dtype=self.master_dtype,
            step_dtype=self.step_dtype,
            Q=self.block,
            FIRST_RANDOM=self.random[0],
            SECOND_RANDOM=self.random[1],
            PLACES=self.places,
            MAXIMIZE=step.maximize,
            EPS_HAT=step.options["eps_hat"],
            CAUTIOUS=step.options["cautious"],
            DECAY=step.options["decay_form"],
            ALIGNED=self.table.aligned and grads.aligned,
            BLOCK=self.chunk,
            num_warps=self.warps,
            enable_fp_fusion=FUSION,
        )
