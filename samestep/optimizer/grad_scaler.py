"""A GradScaler for optimizers that average gradients themselves.

torch's own looks for inf in each rank's `.grad` before the step. Here gradients are averaged
inside the step and may be freed inside backward, and a scale that follows one rank's gradients
drifts from the others'. This one has the optimizer look after averaging, so the verdict, and
with it the scale, is the same on every rank.
"""

from itertools import chain
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from samestep.layout.boxes import mesh_of
from samestep.optimizer.rule_optimizer import RuleOptimizer


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` with the same arguments and use, for samestep's optimizers too.

        scaler.scale(loss).backward(); scaler.step(opt); scaler.update()

    The scaler owns the scale; the optimizer divides by it after averaging, before clipping. Clip
    with `max_grad_norm`: there is no local gradient to unscale and clip before.
    """

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale gradients in `.grad`: not for optimizers that have yet to average them."""
        if _unscales_in_step(optimizer):
            raise RuntimeError(
                "GradScaler.unscale_() is not needed: gradients are unscaled inside "
                "step(), after averaging over ranks. Leave unscale_() out, and clip "
                "with max_grad_norm= instead of clip_grad_norm_"
            )
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step with unscaled gradients; if any rank's are not finite, no rank changes anything."""
        if isinstance(optimizer, RuleOptimizer) and self.is_enabled():
            optimizer.plan.refuse_norm_of_a_part("the scale of a GradScaler")
        if not _unscales_in_step(optimizer) or not self.is_enabled():
            return super().step(optimizer, *args, **kwargs)
        assert isinstance(optimizer, RuleOptimizer)
        if args or kwargs:
            raise RuntimeError(
                "step(closure) cannot be used with a GradScaler: call backward yourself, "
                "and step() without a closure"
            )
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        scale = self._get_scale_async()
        if scale is None:
            raise RuntimeError("scale(loss) was not called before step(): nothing was scaled")
        finite = optimizer.scaled_step(scale.double().reciprocal())
        state["found_inf_per_device"] = {finite.device: (~finite).float()}
        state["stage"] = OptState.STEPPED
        return None


def _unscales_in_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step takes the scale: torch's own unscales no DTensors beside plain tensors."""
    if not isinstance(optimizer, RuleOptimizer):
        return False
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return optimizer.averages_gradients or len({mesh_of(param) is None for param in params}) > 1
