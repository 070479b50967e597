"""AdamW: Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101)."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from samestep.rules import checks
from samestep.rules.fused_adamw import fused_adamw_
from samestep.rules.rule import Options, Shape, Tensors, Update, bounded_gradient, in_dtype, on_host

LARGEST_GRADIENT = 2.0**63  # larger elements count as this: 32 bits hold its square


class AdamWRule:
    """The elementwise rule `"adamw"`, the same operations in the same order as torch's.

    p <- p (1 - lr wd)
    m <- m + (1 - beta1) (g - m)
    v <- beta2 v + (1 - beta2) g^2
    p <- p - lr / (1 - beta1^t)  m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

    Options of a group:
        lr: learning rate. A tensor is copied for each group.
        betas: decay rates of the averages of gradients and of their squares.
        eps: added to the root of v after bias correction; 0: an element whose v is 0 stays.
        weight_decay: parameters shrink by `lr * weight_decay` in a step.
        amsgrad: divide by the root of the largest v so far.
        eps_hat: add eps before bias correction, as section 2 of arXiv 1412.6980 does.
        cautious: decay only elements where m and the parameter have the same sign (arXiv
            2510.12402).
        decay_form: "decoupled"; "independent" of the learning rate; "l2": in the gradient.
        fused: torch's kernel on CPU: about twice as fast, other by rounding; not with `eps_hat`,
            `cautious` or another `decay_form`.
        state_dtypes: how state is stored: "8bit", "bf16_stochastic", or a mapping of state names to
            these or to dtypes. None: float32.
    """

    name = "adamw"
    kind: Literal["elementwise"] = "elementwise"
    defaults: ClassVar[Options] = {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.01,
        "amsgrad": False,
        "eps_hat": False,
        "cautious": False,
        "decay_form": "decoupled",
        "fused": False,
        "state_dtypes": None,
    }
    schedulable = frozenset({"lr", "betas", "eps", "weight_decay"})
    taken: ClassVar[Mapping[str, checks.Check]] = {
        "lr": checks.learning_rate,
        "betas": checks.betas,
        "eps": checks.not_negative,
        "weight_decay": checks.not_negative,
        "amsgrad": checks.boolean,
        "eps_hat": checks.boolean,
        "cautious": checks.boolean,
        "decay_form": partial(checks.one_of, allowed=("decoupled", "independent", "l2")),
        "fused": checks.boolean,
        "state_dtypes": checks.state_dtypes,
    }

    def check(self, options: Options) -> None:
        checks.every(self.taken, options)
        form = options["decay_form"]
        if options["cautious"] and form == "l2":
            raise ValueError(
                "cautious=True and decay_form='l2' exclude each other: decay that is part of the "
                "gradient cannot be left out where signs differ; leave one of them out"
            )
        if options["fused"] and (options["eps_hat"] or options["cautious"] or form != "decoupled"):
            raise ValueError(
                "fused=True is torch's kernel, which has no eps_hat, no cautious decay and no "
                f"decay_form but 'decoupled' (given: eps_hat={options['eps_hat']}, "
                f"cautious={options['cautious']}, decay_form={form!r}): leave fused out"
            )
        if options["fused"] and not isinstance(options["eps"], Tensor) and options["eps"] == 0:
            raise ValueError(
                "fused=True is torch's kernel, which with eps=0 divides 0 by 0 where all gradients "
                "have been 0: give eps a small number, or leave fused out"
            )

    def scalars(self, options: Options) -> dict[str, float | Tensor]:
        beta1, beta2 = options["betas"]
        return {
            "lr": options["lr"],
            "beta1": beta1,
            "beta2": beta2,
            "eps": options["eps"],
            "weight_decay": options["weight_decay"],
        }

    def state_shapes(self, shape: Shape, options: Options) -> dict[str, Shape]:
        """Return the shapes of two moments (three with amsgrad) and of a step count."""
        shapes = {"step": (), "exp_avg": shape, "exp_avg_sq": shape}
        return {**shapes, "max_exp_avg_sq": shape} if options["amsgrad"] else shapes

    def update(
        self, param: Tensor, grad: Tensor, state: Tensors, scalars: Tensors, options: Options
    ) -> Update:
        """Compute one AdamW step on tensors of any shape."""
        return _step(param, grad, state, scalars, options, in_place=False)

    def update_(
        self, param: Tensor, grad: Tensor, state: Tensors, scalars: Tensors, options: Options
    ) -> None:
        """Write the AdamW update into `param` and `state`."""
        _step(param, grad, state, scalars, options, in_place=True)

    def runs_together(self, options: Options) -> bool:
        """Whether one call of torch's fused kernel can update all parameters of a group."""
        return bool(options["fused"])

    def update_all_(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[Tensors],
        scalars: Tensors,
        options: Options,
    ) -> None:
        """Take one AdamW step on many tensors in place."""
        for state in states:
            state["step"].add_(1)
        numbers = {key: value.item() for key, value in scalars.items()}
        grads = [bounded_gradient(grad, LARGEST_GRADIENT) for grad in grads]
        fused_adamw_(params, grads, states, **numbers)


def _step(
    param: Tensor,
    grad: Tensor,
    state: Tensors,
    scalars: Tensors,
    options: Options,
    *,
    in_place: bool,
) -> Update:
    def into(tensor: Tensor) -> Tensor | None:
        return tensor if in_place else None

    step = torch.add(state["step"], 1, out=into(state["step"]))
    numbers: dict[str, Any] = {"step": step, **scalars}
    reads = on_host(param)
    if reads:
        numbers = {key: value.item() for key, value in numbers.items()}
    grad = bounded_gradient(grad, LARGEST_GRADIENT)
    if options["fused"]:
        return _fused_step(param, grad, {**state, "step": step}, numbers, in_place=in_place)
    count, lr, beta1, beta2 = (numbers[key] for key in ("step", "lr", "beta1", "beta2"))
    decay, form = numbers["weight_decay"], options["decay_form"]
    if form == "l2":
        grad = grad + param * decay
    exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
    exp_avg = torch.lerp(exp_avg, grad, in_dtype(1 - beta1, grad), out=into(exp_avg))
    exp_avg_sq = torch.mul(exp_avg_sq, beta2, out=into(exp_avg_sq))
    if reads:
        exp_avg_sq.addcmul_(grad, grad, value=1 - beta2)
    else:  # a tensor as factor needs a product of its own
        exp_avg_sq.addcmul_(grad * (1 - beta2), grad)
    new_state = {"step": step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    second_moment = exp_avg_sq
    if options["amsgrad"]:
        largest = state["max_exp_avg_sq"]
        second_moment = torch.maximum(largest, exp_avg_sq, out=into(largest))
        new_state["max_exp_avg_sq"] = second_moment
    correction1 = 1 - beta1**count
    correction2 = 1 - beta2**count
    if options["eps_hat"]:
        denominator = second_moment.sqrt().add_(numbers["eps"]).div_(correction2**0.5)
    else:
        denominator = second_moment.sqrt().div_(correction2**0.5).add_(numbers["eps"])
    if not reads or numbers["eps"] == 0:
        denominator.masked_fill_(denominator == 0, torch.inf)  # no step where nothing is known
    step_size = in_dtype(lr / correction1, param)
    if form == "decoupled":
        decay = lr * decay
    if options["cautious"]:  # the sign of the update is that of its average
        lost = param * decay * (exp_avg.sign() * param >= 0)
        new_param = torch.sub(param, lost, out=into(param))
    else:
        new_param = torch.mul(param, 1.0 if form == "l2" else 1 - decay, out=into(param))
    if reads:
        new_param.addcdiv_(exp_avg, denominator, value=-step_size)
    else:
        new_param.addcdiv_(exp_avg * -step_size, denominator)
    return Update(new_param, new_state, lambda: exp_avg / (denominator * correction1))


def _fused_step(
    param: Tensor, grad: Tensor, state: Tensors, numbers: dict[str, Any], *, in_place: bool
) -> Update:
    if not in_place:
        param = param.clone()
        state = {key: value if key == "step" else value.clone() for key, value in state.items()}
    count = numbers.pop("step")
    fused_adamw_([param], [grad], [state], **numbers)
    correction1, correction2 = 1 - numbers["beta1"] ** count, 1 - numbers["beta2"] ** count
    second_moment = state.get("max_exp_avg_sq", state["exp_avg_sq"])

    def direction() -> Tensor:
        denominator = second_moment.sqrt().div_(correction2**0.5).add_(numbers["eps"])
        return state["exp_avg"] / denominator.mul_(correction1)

    return Update(param, dict(state), direction)
