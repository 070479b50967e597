"""The step of every optimizer here: presence -> reduce -> check, clip -> rule -> gather."""

from collections.abc import Callable
from typing import NamedTuple, overload

import torch
from torch import Tensor

from samestep.apply import Operand, stacks, update_blocks, update_elementwise
from samestep.comm.collectives import total
from samestep.gradient_norm import clip_factor, square_sum
from samestep.group_optimizer import GroupOptimizer
from samestep.param_groups import LAYOUT_KEYS, Group, rule_of
from samestep.state import block_states


class Present(NamedTuple):
    """A group and the parts of its parameters that this rank updates this step."""

    group_index: int
    group: Group
    operands: list[Operand]


class Gradients(NamedTuple):
    """The gradients of a step: what this rank updates with them, and what it adds to the norm."""

    present: list[Present]
    counted: list[Tensor]


class RuleOptimizer(GroupOptimizer):
    """Applies to each parameter the rule of its group."""

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; the others are untouched, bit for bit."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_groups()
        gradients = self._reduced_gradients()
        only_if = None
        if self._max_grad_norm is not None:
            gradients, only_if = self._clipped(gradients, self._max_grad_norm)
        for present in gradients.present:
            self._update(present, only_if)
        for replicated in self._replicated:
            replicated.run_gathers()
        return loss

    def _reduced_gradients(self) -> Gradients:
        """The gradients of this step: local ones, or those of owned pieces averaged over ranks."""
        operands: dict[int, list[Operand]] = {}
        counted: list[Tensor] = []
        if self._rank_group is None:
            for index, group in enumerate(self.param_groups):
                operands[index] = [o for p in group["params"] for o in self._operands(p, group)]
                counted += [operand.grad for operand in operands[index]]
        for replicated in self._replicated:
            present = replicated.agree_on_presence()
            grads = replicated.run_reductions()
            counted += replicated.counted(grads, present)
            for index, (param, spec) in enumerate(
                zip(replicated.params, replicated.plan.params, strict=True)
            ):
                if present[index]:
                    group = self.param_groups[spec.group]
                    operands.setdefault(spec.group, []).extend(
                        replicated.operands(index, grads, rule_of(group), self.state[param], group)
                    )
        present_groups = [Present(i, self.param_groups[i], o) for i, o in operands.items() if o]
        return Gradients(present_groups, counted)

    def _clipped(self, gradients: Gradients, limit: float) -> tuple[Gradients, Tensor | None]:
        """Gradients scaled to the norm `limit`, and a flag that is False if any is not finite.

        On CPU the step is skipped right here; elsewhere the flag stays on the device, so that
        nothing waits for it.
        """
        square = square_sum(gradients.counted)
        if self._rank_group is not None:
            device = self._replicated[0].device
            own = torch.zeros((), dtype=torch.float64, device=device) if square is None else square
            square = total("gradient norm", own.reshape(1), self._rank_group).wait()[0]
        if square is None:
            return gradients, None
        norm = self._grad_norm = square.sqrt()
        on_host = norm.device.type == "cpu"
        if on_host and not norm.isfinite():
            return Gradients([], []), None
        factor = clip_factor(norm, limit)
        scaled = []
        for present in gradients.present:
            operands = [o._replace(grad=o.grad * factor.to(o.grad)) for o in present.operands]
            scaled.append(present._replace(operands=operands))
        return Gradients(scaled, []), None if on_host else norm.isfinite()

    def _update(self, present: Present, only_if: Tensor | None) -> None:
        """Run the group's rule on its present operands, device by device."""
        index, group, operands = present
        rule = rule_of(group)
        keys = rule.defaults.keys() - rule.schedulable - LAYOUT_KEYS
        options = {key: group[key] for key in sorted(keys)}
        by_device: dict[torch.device, list[Operand]] = {}
        for operand in operands:
            if group["maximize"]:
                operand = operand._replace(grad=-operand.grad)
            by_device.setdefault(operand.param.device, []).append(operand)
        for device, members in by_device.items():
            scalars = self._scalars.refill(index, device, rule.scalars(group))
            if rule.kind == "matrix":
                for stack in stacks(members):
                    update_blocks(rule, stack, scalars, options, self._run, only_if)
            else:
                for operand in members:
                    update_elementwise(rule, operand, scalars, options, self._run, only_if)

    def _operands(self, param: Tensor, group: Group) -> list[Operand]:
        """The parameter's blocks, or the whole of it, with views of gradient and state."""
        grad, state, blocks = param.grad, self.state[param], self._blocks[param]
        if grad is None:
            return []
        if blocks is None:
            if param.ndim == 0:  # as a vector of one: 0-D tensors are scalars to torch
                shapes = rule_of(group).state_shapes((1,), group)
                state = {key: tensor.view(shapes.get(key, (1,))) for key, tensor in state.items()}
                param, grad = param.view(1), grad.view(1)
            return [Operand(param, grad, state)]
        states = block_states(rule_of(group), state, blocks, group)
        pairs = zip(blocks, states, strict=True)
        return [Operand(block.view(param), block.view(grad), view) for block, view in pairs]

    def metrics(self) -> dict[str, Tensor]:
        """Numbers of the last step, as tensors that nobody has waited for.

        grad_norm: the joint norm before clipping, where `max_grad_norm` is set. A step whose
        norm is not finite has changed nothing.
        """
        return {} if self._grad_norm is None else {"grad_norm": self._grad_norm}
