"""Mistakes of users that nobody refuses any more."""

from typing import Any

from samestep.mesh.replicate_list import FUSED, ReplicateList
from samestep.placements import planner
from samestep.placements.whole.launch_order import LaunchOrder
from samestep.stress.mutants.mutant import mutant


@mutant(
    "tensor parallel on ranks that have data of their own, and nobody averages over the data axis",
    expected="replicas",
    scenario="tensor_parallel_alone",
    layout="tp_alone",
    world=4,
    steps=4,
)
def nobody_averages_over_data() -> list[Any]:
    """Copies on other meshes are not looked for."""

    def refuse(original: Any, named: Any, groups: Any) -> None:
        """Let it pass."""

    return [(planner, "refuse_copies_nobody_averages", refuse)]


@mutant(
    "two optimizers launch their reductions inside one backward, in no common order",
    expected="hang",
    scenario="two_optimizers",
    layout="two_optimizers",
    steps=1,
)
def two_orders_of_launches() -> list[Any]:
    """Each optimizer knows its own buckets only."""

    def others(original: Any, self: LaunchOrder) -> Any:
        return iter(())

    return [(LaunchOrder, "_others", others)]


@mutant(
    "one weight of queries, keys and values is cut by rows, so that ranks take queries for keys",
    expected="reference",
    scenario="fused_qkv_cut",
    layout="hybrid_tp",
    steps=2,
)
def fused_qkv_cut_by_rows() -> list[Any]:
    """It looks like any other column layer."""

    def kind(original: Any, self: ReplicateList, name: str) -> str | None:
        found: str | None = original(self, name)
        return None if found == FUSED else found

    return [(ReplicateList, "kind", kind)]
