"""What every rank has to compute in a step: FLOPs of orthogonalization, bytes of updates."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from samestep.estimate.blueprint import Blueprint, Sharing, Spreading
from samestep.estimate.floors import ADAMW_BYTES, MUON_BYTES
from samestep.estimate.hardware import Hardware
from samestep.layout.owners import busiest_lower_bound
from samestep.rules.orthogonalize import orthogonalize_flops


@dataclass(frozen=True)
class Work:
    """Of all ranks of a plan: each (ranks of the plan,), in float64."""

    product_seconds: Tensor
    flops: Tensor
    bytes: Tensor  # read and written by updates
    pieces: Tensor

    def seconds(self, hardware: Hardware) -> Tensor:
        return self.product_seconds + self.bytes / hardware.bytes_rate + self.pieces * hardware.call


def no_work(ranks: int) -> Work:
    return Work(*(torch.zeros(ranks, dtype=torch.float64) for _ in range(4)))


@dataclass(frozen=True)
class OwnerBalance:
    """How evenly the orthogonalizations of a plan are spread.

    ratio: the busiest rank against the mean, which no assignment can bring below `bound`.
    """

    axes: str
    ranks: int
    blocks: int
    flops: float
    ratio: float
    bound: float


def balance(placement: Sharing | Spreading) -> OwnerBalance | None:
    """None if no matrix rule runs there."""
    ranks = placement.peers.size
    flops = [0.0] * ranks
    blocks = [
        orthogonalize_flops(block.rows, block.cols)
        for spec in placement.specs
        for block in spec.blocks or ()
    ]
    if not blocks:
        return None
    count = len(blocks)
    if isinstance(placement, Spreading):
        for chunk in placement.plan.chunks:
            for route in chunk:
                flops[route.owner] += orthogonalize_flops(*route.block.shape)
        if placement.distribution.muon_schedule == "gather":
            blocks = blocks * ranks
    else:
        for bucket in placement.plan.buckets:
            for rank, segment in bucket.filled:
                pieces = [piece.block for piece in segment.pieces if piece.block is not None]
                for cost in (orthogonalize_flops(*block.shape) for block in pieces):
                    if bucket.replicated:
                        flops = [each + cost for each in flops]
                    else:
                        flops[rank] += cost
        if all(bucket.replicated for bucket in placement.plan.buckets):
            blocks = blocks * ranks
    mean = sum(flops) / ranks
    busiest = max(flops), busiest_lower_bound(blocks, ranks)
    ratios = (each / mean if mean else 1.0 for each in busiest)
    return OwnerBalance(placement.peers.name, ranks, count, sum(flops), *ratios)


def bucket_work(sharing: Sharing, number: int, hardware: Hardware) -> Work:
    bucket = sharing.plan.buckets[number]
    found = []
    for _, segment in bucket.filled:
        seconds = flops = moved = 0.0
        for piece in segment.pieces:
            width = sharing.params[piece.param].dtype.itemsize
            if piece.block is None:
                moved += piece.size * _adamw_bytes(width)
            else:
                cost = orthogonalize_flops(*piece.block.shape)
                flops += cost
                seconds += cost / hardware.product_rate(min(piece.block.shape))
                moved += piece.size * _muon_bytes(width)
        found.append((seconds, flops, moved, len(segment.pieces)))
    columns = torch.zeros(4, len(bucket.segments), dtype=torch.float64)
    columns[:, [place for place, _ in bucket.filled]] = torch.tensor(found, dtype=torch.float64).T
    return Work(*(columns.expand(4, sharing.peers.size) if bucket.replicated else columns))


def local_work(blueprint: Blueprint, hardware: Hardware) -> Work:
    """Of one process that has everything."""
    found = no_work(1)
    for shape, elements, width in _local_pieces(blueprint):
        found.pieces[0] += 1
        if shape is None:
            found.bytes[0] += elements * _adamw_bytes(width)
        else:
            cost = orthogonalize_flops(*shape)
            found.flops[0] += cost
            found.product_seconds[0] += cost / hardware.product_rate(min(shape))
            found.bytes[0] += elements * _muon_bytes(width)
    if blueprint.clips:
        found.bytes[0] += sum(p.numel() * 4 for group in blueprint.groups for p in group["params"])
    return found


def _local_pieces(blueprint: Blueprint) -> Iterator[tuple[tuple[int, int] | None, int, int]]:
    for group in blueprint.groups:
        for param in group["params"]:
            blocks = blueprint.optimizer._blocks[param]
            width = param.dtype.itemsize
            if blocks is None:
                yield None, param.numel(), width
            for block in blocks or ():
                yield block.shape, block.rows * block.cols, width


def elementwise_work(spreading: Spreading) -> Work:
    """AdamW's parameters of a mesh, on every rank its parts."""
    found = no_work(spreading.peers.size)
    for param, spec, held in zip(spreading.params, spreading.specs, spreading.held, strict=True):
        if spec.blocks is None:
            sizes = torch.tensor([box.numel for box in held.boxes], dtype=torch.float64)
            found.bytes.add_(sizes * _adamw_bytes(param.dtype.itemsize))
            found.pieces.add_(1)
    return found


def chunk_flops(spreading: Spreading, number: int, hardware: Hardware) -> Work:
    found = no_work(spreading.peers.size)
    for route in spreading.plan.chunks[number]:
        cost = orthogonalize_flops(*route.block.shape)
        found.flops[route.owner] += cost
        found.product_seconds[route.owner] += cost / hardware.product_rate(min(route.block.shape))
        found.bytes[route.owner] += 8 * route.box.numel  # put together
        found.pieces[route.owner] += 1
    return found


def chunk_parts(spreading: Spreading, number: int) -> Tensor:
    """Elements of a chunk's blocks that each rank holds: (ranks,)."""
    sizes = [0] * spreading.peers.size
    for route in {route.key: route for route in spreading.plan.chunks[number]}.values():
        for rank, size, _ in route.parts.sizes:
            sizes[rank] += size
    return torch.tensor(sizes, dtype=torch.float64)


def _adamw_bytes(width: int) -> int:
    """Per element: fp32 gradient and moments, a parameter of that width."""
    return ADAMW_BYTES - 2 * (4 - width)


def _muon_bytes(width: int) -> int:
    return MUON_BYTES - 2 * (4 - width)
