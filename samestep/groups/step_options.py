"""How an optimizer takes its steps: what the user asked for, as one value."""

from dataclasses import dataclass
from typing import Annotated, Any

from samestep.groups.distribution import check_fields
from samestep.rules import checks


def _flag_or_backend(name: str, value: Any) -> None:
    """Whether there is such a backend is known where it is looked up."""
    if not isinstance(value, str):
        checks.boolean(name, value, ", or the name of a backend of torch.compile")


@dataclass(frozen=True)
class StepOptions:
    """The keywords of an optimizer that concern every step, whatever the rules and the ranks.

    master_weights: keep a 32-bit copy of 16-bit parameters and update that. Without it most small
        updates are lost; False says that this is meant, None (the default) warns.
    max_grad_norm: clip the joint norm of all (averaged) gradients, and skip the whole step if it is
        not finite; `metrics()` has the norm. math.inf: only that check.
    update_rms: `metrics()` tells the size of the updates.
    compile: run the math through torch.compile (True, or the name of a backend).
    cuda_graph: replay the whole step as one CUDA graph, which takes the host out of it, for one
        process with its parameters on a GPU. Learning rates stay live; a step with gradients that
        the graph does not know runs without it. The memory that a step needs beside parameters and
        state is then kept. None: where that is at most 2% of the GPU's.
    batch_elements: how many elements of Muon's blocks are orthogonalized at once; fewer need less
        memory beside parameters and state, and more launches. The bits are the same.
    """

    master_weights: bool | None = None
    max_grad_norm: Annotated[float | None, checks.optional(checks.limit)] = None
    update_rms: bool = False
    compile: Annotated[bool | str, _flag_or_backend] = False
    cuda_graph: bool | None = None
    batch_elements: Annotated[int | None, checks.optional(checks.count)] = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.cuda_graph and self.compile:
            raise ValueError(
                "cuda_graph=True and compile exclude each other: leave one of them out"
            )

    def lines(self) -> list[str]:
        """What all ranks must have alike, as text."""
        return [
            f"master_weights = {bool(self.master_weights)}",
            f"max_grad_norm = {self.max_grad_norm}",
            f"update_rms = {self.update_rms}",
            f"compile = {self.compile}",
        ]
