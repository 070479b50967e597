"""`samestep mesh`: prints the map of a mesh and checks model sizes, without ranks."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, ClassVar

from samestep.mesh import map as mesh_map
from samestep.mesh.build import require_local_groups
from samestep.mesh.contract import ContractError, ModelSizes, Term, terms
from samestep.mesh.degrees import Degrees, DegreesError
from samestep.mesh.predicates import predicates
from samestep.tooling.output import check_folder, write_files
from samestep.tooling.request import BadRequestError


@dataclass(frozen=True)
class Options:
    """Show the place of each rank on the mesh axes, its groups, and whether a model's sizes divide.

        samestep mesh --world-size 16 --tp 2 --pp 2 --heads 32 --layers 24
        samestep mesh --world-size 64 --tp 8 --ranks-per-host 8

    Starts no ranks.

    Exit status: 0, the sizes fit; 2, they do not, or the axes cannot be built.
    """

    SECTIONS: ClassVar[Mapping[str, str]] = {
        "world_size": "ranks and axes",
        "heads": "sizes of the model, checked where above 0",
        "picture": "the result",
    }

    world_size: Annotated[int, "number of ranks"] = 8
    tp: Annotated[int, "tensor parallel: ranks that share each matrix"] = 1
    sp: Annotated[
        bool, "sequence parallel: ranks of --tp also share the sequence between matrix products"
    ] = False
    ep: Annotated[int, "expert parallel: ranks that share the experts of a layer"] = 1
    ep_carries_data: Annotated[
        bool, "ranks of --ep see different tokens; without it they see the same"
    ] = True
    expert_tensor_parallel: Annotated[
        int, "ranks that share the matrices of one expert; 0: as many as --tp"
    ] = 0
    pp: Annotated[int, "pipeline parallel: number of stages"] = 1
    replicate: Annotated[int, "copies of the sharded model"] = 1
    ranks_per_host: Annotated[
        int | None, "ranks on each host, to show hosts and to keep tp and ep groups inside them"
    ] = None
    across_hosts: Annotated[bool, "allow tp and ep groups that span hosts"] = False

    heads: Annotated[int, "query heads"] = 0
    kv_heads: Annotated[int, "key and value heads; 0: as many as --heads"] = 0
    fused_qkv: Annotated[bool, "queries, keys and values share one weight (Plan.fused)"] = False
    indexer_heads: Annotated[int, "heads of the indexer of sparse attention"] = 0
    mlp_width: Annotated[int, "channels inside an MLP"] = 0
    experts: Annotated[int, "experts per layer"] = 0
    expert_width: Annotated[int, "channels inside an expert"] = 0
    layers: Annotated[int, "transformer layers"] = 0
    stages_per_rank: Annotated[int, "pipeline stages on each rank; above 1: interleaved"] = 1
    sequence: Annotated[int, "tokens per sequence"] = 0
    batch: Annotated[int, "sequences per step, of all ranks together"] = 0

    picture: Annotated[Path | None, "PNG file to write, for up to 256 ranks (needs matplotlib)"] = (
        None
    )

    @property
    def sizes(self) -> ModelSizes:
        return ModelSizes(**{size.name: getattr(self, size.name) for size in fields(ModelSizes)})

    @property
    def degrees(self) -> Degrees:
        return Degrees(
            self.world_size, self.pp, self.replicate, self.ep, self.tp, self.sp,
            self.expert_tensor_parallel, self.ep_carries_data,
        )  # fmt: skip


def run(options: Options) -> int:
    """Print map, facts and verdict; return 2 if the model does not fit."""
    try:
        degrees, sizes, hosts = options.degrees, options.sizes, _hosts(options)
        if hosts and not options.across_hosts:
            require_local_groups(degrees, hosts)
    except (DegreesError, ContractError) as error:
        raise BadRequestError(_as_flags(str(error))) from None
    if options.picture is not None:
        _write_picture(options.picture, degrees, hosts)
    mesh_map.show(degrees, sys.stdout, hosts)
    facts = predicates(degrees, experts=sizes.experts > 0)
    for name, value in vars(facts).items():
        sys.stdout.write(f"{name}: {value}\n")
    return _verdict(terms(sizes, degrees))


def _verdict(lines: Sequence[Term]) -> int:
    if not lines:
        sys.stdout.write("contract: no sizes of a model were given that a degree above 1 cuts\n")
        return 0
    for term in lines:
        sys.stdout.write(f"{'fits' if term.holds else 'DOES NOT FIT'}: {term}\n")
    broken = sum(not term.holds for term in lines)
    verdict = "all sizes fit" if not broken else f"{broken} of {len(lines)} sizes do not fit"
    sys.stdout.write(f"contract: {verdict}\n")
    return 2 if broken else 0


def _hosts(options: Options) -> tuple[str, ...]:
    if options.ranks_per_host is None:
        return ()
    if options.ranks_per_host < 1:
        raise BadRequestError(f"--ranks-per-host must be at least 1, got {options.ranks_per_host}")
    return tuple(f"host{rank // options.ranks_per_host}" for rank in range(options.world_size))


def _write_picture(path: Path, degrees: Degrees, hosts: Sequence[str]) -> None:
    from samestep.mesh.picture import draw

    check_folder(path.parent)
    try:
        png = draw(degrees, hosts)
    except ValueError as error:
        raise BadRequestError(str(error)) from None
    write_files(path.parent, {path.name: png})


def _as_flags(text: str) -> str:
    """Rewrite an error with the names of the command's flags."""
    return text.replace("across_hosts=True", "--across-hosts").replace(
        "sequence_parallel shares", "--sp shares"
    )
