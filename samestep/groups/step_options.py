"""Options about every step, as one dataclass."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import isinf
from typing import Annotated, Any

from samestep.groups.distribution import check_fields
from samestep.rules import RULES, checks

GradLimit = float | Mapping[str, float] | None  # of all gradients, or by rule


def _limit_or_limits(name: str, value: Any) -> None:
    """Check one limit for the norm of all gradients, or one per rule."""
    if not isinstance(value, Mapping):
        checks.optional(checks.limit)(name, value)
        return
    if not value:
        raise ValueError(f'{name} {{}} names no rule: give {{"adamw": 1.0}}, or None')
    for rule, limit in value.items():
        checks.one_of(f"a key of {name}", rule, sorted(RULES), ", which is a rule each")
        checks.limit(f"{name}[{rule!r}]", limit)


def clips(limit: GradLimit) -> bool:
    """Whether gradients are scaled, not only checked to be finite."""
    limits = limit.values() if isinstance(limit, Mapping) else (limit,)
    return not all(each is None or isinf(each) for each in limits)


def limit_text(limit: GradLimit) -> str:
    """max_grad_norm as the user wrote it."""
    if isinstance(limit, Mapping):
        each = ", ".join(f'"{rule}": {limit[rule]:g}' for rule in sorted(limit))
        return f"max_grad_norm={{{each}}}"
    return f"max_grad_norm={limit}" if limit is None else f"max_grad_norm={limit:g}"


def _flag_or_backend(name: str, value: Any) -> None:
    """Check a bool or the name of a torch.compile backend."""
    if not isinstance(value, str):
        checks.boolean(name, value, ", or the name of a backend of torch.compile")


@dataclass(frozen=True)
class StepOptions:
    """The keywords of an optimizer that concern every step, whatever the rules and the ranks.

    master_weights: keep fp32 main parameters of 16-bit parameters and update those. None warns that
        small updates are lost; False accepts that.
    max_grad_norm: clip by the joint norm of all averaged gradients, and skip a step whose norm is
        not finite. math.inf: only that. {"adamw": 1.0}: a norm for each rule that is named.
    update_rms: `metrics()` has the size of the updates.
    compile: run the math through torch.compile: True, or the name of a backend.
    cuda_graph: replay the whole step as one CUDA graph, in one process on a GPU. Learning rates
        stay live; a step with other gradients runs without it. None: where the memory of the graph
        is at most 4% of the GPU's.
    batch_elements: elements of Muon's blocks that are orthogonalized at once; fewer need less
        memory. The bits are the same.
    """

    master_weights: bool | None = None
    max_grad_norm: Annotated[GradLimit, _limit_or_limits] = None
    update_rms: bool = False
    compile: Annotated[bool | str, _flag_or_backend] = False
    cuda_graph: bool | None = None
    batch_elements: Annotated[int | None, checks.optional(checks.count)] = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.cuda_graph and self.compile:
            raise ValueError(
                "cuda_graph=True and compile cannot be combined: leave one of them out"
            )
        if self.cuda_graph and self.clipped_rules:
            raise ValueError(
                f"cuda_graph=True records one limit for all gradients, and "
                f"{limit_text(self.max_grad_norm)} has one by rule: leave cuda_graph out"
            )

    @cached_property
    def clipped_rules(self) -> tuple[str, ...]:
        """Rules with a limit of their own."""
        return tuple(sorted(self.max_grad_norm)) if isinstance(self.max_grad_norm, Mapping) else ()

    def lines(self) -> list[str]:
        """Options that must agree between ranks, as lines of text."""
        return [
            f"master_weights = {bool(self.master_weights)}",
            limit_text(self.max_grad_norm).replace("=", " = ", 1),
            f"update_rms = {self.update_rms}",
            f"compile = {self.compile}",
        ]
