"""FSDP2 and HSDP that add up gradients in rank order, as `reduction="ordered"` does elsewhere."""

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from samestep.comm.collectives import exchange_segments
from samestep.comm.groups import RankGroup, registry
from samestep.shards.dtensor.checked_reduction import set_reduce_scatter
from samestep.shards.dtensor.fsdp_units import called, fsdp_modules, grid


def use_ordered_reduction(model: nn.Module) -> None:
    """Let every FSDP2 module of a model add up gradients in rank order, in fp32 or wider.

    FSDP2 and HSDP then give the bits of `MuonAdamW(..., reduction="ordered")` on plain parameters,
    with as many ranks and the same data on each. As many bytes travel as without it, but for fp16
    gradients and HSDP's sums over copies of 16 bits, which are fp32. A gradient divide factor is
    respected.

    Call it after `fully_shard`, on all ranks; once more changes nothing. It takes the place of a
    custom reduce-scatter and of `set_force_sum_reduction_for_comms`.

    Raises:
        ValueError: The model has no FSDP2 module, or one whose sum cannot be ordered.
    """
    comms = [(module, _ordered(name, module)) for name, module in fsdp_modules(model).items()]
    for module, comm in comms:
        if comm is not None:
            assert isinstance(module, FSDPModule)
            # torch divides the sum at the very end then, with div_, as all of samestep does.
            module.set_force_sum_reduction_for_comms(True)
            set_reduce_scatter(module, comm)


class OrderedReduceScatter:
    """For `set_custom_reduce_scatter`: a sum in rank order over shards and their copies.

    In HSDP the copies of a shard divide it among them: each adds up a part over all ranks, and
    leaves the rest at -0.0, so that torch's own sum over copies changes no bit.

    Args:
        name: Of the operation.
        grid: Global ranks: a row per copy of the model, a column per shard. [[0, 1], [2, 3]] is
            HSDP on 2 x 2 ranks, [[0, 1, 2]] is FSDP2 on three.
    """

    def __init__(self, name: str, grid: Sequence[Sequence[int]]) -> None:
        self._name = name
        self._copies, self._shards = len(grid), len(grid[0])
        self._row = next(tuple(row) for row in grid if dist.get_rank() in row)
        places = {rank: (r, s) for r, row in enumerate(grid) for s, rank in enumerate(row)}
        self._places = [places[rank] for rank in sorted(places)]
        self._everyone = registry.of_members(places) if self._copies > 1 else None
        self._asked = -1  # elements of an input that has no output yet

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Room for the gradients of all shards, then for the sum of one: that is in fp32 or wider.

        Other narrow dtypes than bf16 are divided by a power of two before they are sent, which is
        exact in fp32 only.
        """
        elements = prod(int(length) for length in size)
        is_output = elements * self._shards == self._asked
        self._asked = -1 if is_output else elements
        if is_output or dtype != torch.bfloat16:
            dtype = torch.promote_types(dtype, torch.float32)
        return torch.empty([int(length) for length in size], dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Give this rank the sum of its part; done on return."""
        shards = registry.of(group)
        self._check(shards, op)
        everyone = self._everyone or shards
        copies = self._copies
        pieces = [shard.tensor_split(copies) for shard in input_tensor.tensor_split(self._shards)]
        segments = [pieces[shard][copy] for copy, shard in self._places]
        buffer = input_tensor if copies == 1 else torch.cat(segments)
        sizes = [segment.numel() for segment in segments]
        summed = exchange_segments(self._name, buffer, sizes, everyone, reuse=True).wait()
        my_copy, _ = self._places[everyone.rank]
        if copies > 1:
            output_tensor.fill_(-0.0)
        output_tensor.tensor_split(copies)[my_copy].copy_(summed)

    def _check(self, shards: RankGroup, op: object) -> None:
        if op != dist.ReduceOp.SUM:
            raise RuntimeError(
                f"{self._name}: torch asks for {op} instead of a sum: do not call "
                "set_force_sum_reduction_for_comms(False) after use_ordered_reduction"
            )
        if shards.members != self._row:
            raise RuntimeError(
                f"{self._name}: it is sharded over ranks {shards.members}, and the "
                f"first axes of its mesh have {self._row}: give a mesh whose first axes "
                "are FSDP's, in rank order"
            )


def _ordered(name: str, module: nn.Module) -> OrderedReduceScatter | None:
    """The reduce-scatter for a module; None if there is nothing to add."""
    what = called(name)
    ranks = grid(module)
    if not ranks or ranks == [[dist.get_rank()]]:
        return None
    if len(ranks[0]) == 1:
        raise ValueError(
            f"{what} is replicated on {len(ranks)} ranks and not sharded, and torch "
            "does not let that all-reduce be replaced: use a mesh with a shard axis "
            "above 1, or plain parameters"
        )
    return OrderedReduceScatter(f"reduction of {what}", ranks)
