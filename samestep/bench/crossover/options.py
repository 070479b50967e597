"""What `samestep bench crossover` can be asked, and what of it can run here."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from samestep.bench.crossover.measure import Job
from samestep.groups.distribution import Reduction
from samestep.launch import TorchrunRank
from samestep.tooling.ranks import nccl_devices, number_of_ranks
from samestep.tooling.request import BadRequestError

Backend = Literal["gloo", "nccl"]


@dataclass(frozen=True)
class Options:
    """Measure from which size on sharding a parameter is faster than updating all of it everywhere.

    Both ways take turns in the same rounds, with the collectives and the AdamW of the optimizer.
    The result is the number to give to an optimizer as `crossover`. Ranks are started here, or
    joined if torchrun has started them:

        torchrun --nproc-per-node 4 -m samestep bench crossover
    """

    world_size: Annotated[
        int | None, arg(metavar="INT", help_behavior_hint="(default: 2, or torchrun's)")
    ] = None
    """Number of ranks."""
    backend: Annotated[
        Backend | None,
        arg(metavar="{gloo,nccl}", help_behavior_hint="(default: nccl if possible, else gloo)"),
    ] = None
    """What carries the data; nccl needs a CUDA device for every rank."""
    sizes: tuple[int, ...] = tuple(2**power for power in range(6, 21))
    """Elements of the parameters to measure."""
    rounds: int = 30
    """Measurements of each size and way; medians are compared."""
    reduction: Reduction = "fast"
    """As the optimizer's keyword: ordered adds in rank order."""
    out: Path = Path("out/crossover")
    """Folder for crossover.json and crossover.png; made if missing."""

    def job(self, torchrun: TorchrunRank | None) -> tuple[int, Job]:
        """The number of ranks and what they do; BadRequestError if that cannot run here."""
        ranks = number_of_ranks(self.world_size, torchrun, least=2)
        if not self.sizes:
            raise BadRequestError("--sizes needs at least one number of elements")
        for size in self.sizes:
            if size < 1:
                raise BadRequestError(f"--sizes must be at least 1, got {size}")
        if self.rounds < 1:
            raise BadRequestError(f"--rounds must be at least 1, got {self.rounds}")
        backend = self._backend(ranks if torchrun is None else torchrun.local_world_size)
        return ranks, Job(tuple(sorted(set(self.sizes))), self.rounds, self.reduction, backend)

    def _backend(self, ranks_here: int) -> Backend:
        devices = nccl_devices()
        if self.backend == "nccl" and devices < ranks_here:
            raise BadRequestError(
                f"--backend nccl needs a CUDA device per rank: there are {ranks_here} ranks and "
                f"{devices} devices here"
            )
        return self.backend or ("nccl" if devices >= ranks_here else "gloo")
