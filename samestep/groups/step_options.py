"""How an optimizer takes its steps: what the user asked for, as one value."""

from dataclasses import dataclass

from samestep.rules import checks


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
    max_grad_norm: float | None = None
    update_rms: bool = False
    compile: bool | str = False
    cuda_graph: bool | None = None
    batch_elements: int | None = None

    def __post_init__(self) -> None:
        if self.max_grad_norm is not None:
            checks.limit("max_grad_norm", self.max_grad_norm)
        checks.boolean("update_rms", self.update_rms)
        if self.cuda_graph is not None:
            checks.boolean("cuda_graph", self.cuda_graph)
        if self.batch_elements is not None:
            checks.count("batch_elements", self.batch_elements)
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
