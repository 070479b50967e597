"""Choices of a plan for its ranks and links, with reasons: buckets, levels, owners.

Every whole block has one owner. With more ranks than blocks most ranks own none, and all wait for
the owner of the largest block: more ranks do not make that wait shorter. The ranks of a host could
share that block, each computing some rows of every product, and gather the Gram matrix after each;
samestep does not do so, and `OwnerChoice` estimates the most that sharing would save.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, sqrt

import torch

from samestep.lab.common.numbers import count, duration
from samestep.lab.estimate.grid import Grid
from samestep.lab.estimate.grid_plan import GridPlacement, GridPlan
from samestep.lab.estimate.hardware import Hardware
from samestep.lab.estimate.work import owner_flops, shape_flops
from samestep.plan.links import LEAST_ELEMENTS, MOST_ELEMENTS, Fabric, bucket_elements
from samestep.plan.placement_plan import bytes_of, largest_block, legs_in_a_row
from samestep.rules.basin import gram_segments
from samestep.rules.orthogonalize import USUAL_TABLE, cheaper_execution

PRODUCT_DTYPE = torch.float16  # of orthogonalization on accelerators


@dataclass(frozen=True)
class BucketChoice:
    """The bucket size and the levels of collectives for replicated parameters.

    elements: most elements of a bucket; `given`: whether the user chose that, not the plan.
    begins: seconds of latency of a collective; travels: seconds that all bytes take.
    one_level, two_levels: seconds of the largest bucket; None: there is one level only.
    """

    axes: str
    ranks: int
    buckets: int
    elements: int
    given: bool
    begins: float
    travels: float
    levels: int
    per_host: int
    hosts: int
    one_level: float
    two_levels: float | None

    def lines(self) -> Iterator[tuple[str, str]]:
        where = f"{self.axes} ({self.ranks:,})"
        what = f"{count(self.buckets, 'bucket')} of at most {self.elements:,} elements"
        begins, travels = duration(self.begins), duration(self.travels)
        if self.given:
            yield f"buckets, {where}", f"{what}: given"
        else:
            best = max(1.0, sqrt(self.travels / max(self.begins, 1e-9)))
            why = (
                f"a collective takes {begins} to begin and all bytes {travels}, so that "
                f"{count(round(best), 'bucket')} would be best"
            )
            if self.elements in (LEAST_ELEMENTS, MOST_ELEMENTS):
                end = "least" if self.elements == LEAST_ELEMENTS else "most"
                why += f"; {self.elements:,} elements are the {end} that a bucket may have"
            yield f"buckets, {where}", f"{what}: chosen, {why}"
        if self.two_levels is None:
            why = "all ranks are on one host" if self.hosts == 1 else "hosts have one rank each"
            yield f"levels, {where}", f"one: {why}"
            return
        one, two = duration(self.one_level), duration(self.two_levels)
        yield (
            f"levels, {where}",
            f"{'two' if self.levels == 2 else 'one'}: the largest bucket takes {one} in one level, "
            f"{two} inside hosts ({self.per_host}) and across them ({self.hosts:,})",
        )


@dataclass(frozen=True)
class OwnerChoice:
    """The owners of whole blocks on all ranks of a plan.

    without: number of ranks that own no block.
    enough: number of owners beyond which more do not help: all FLOPs over the largest block's.
    seconds: time of the busiest owner's products; largest_seconds: of the largest block's.
    shared_seconds: time of that block, gathers included, if the ranks of a host shared it.
    within: seconds of the step, or of the iteration around it.
    """

    ranks: int
    blocks: int
    without: int
    enough: int
    largest: tuple[int, int]
    seconds: float
    largest_seconds: float
    on_host: int
    shared_seconds: float
    within: float

    @property
    def saves(self) -> float:
        """Return the most seconds per step saved if the ranks of a host shared that block."""
        return max(0.0, self.largest_seconds - self.shared_seconds)

    def lines(self) -> Iterator[tuple[str, str]]:
        rows, cols = self.largest
        share = self.largest_seconds / self.within
        text = f"{count(self.blocks, 'block')} on {count(self.ranks, 'rank')}"
        text += f": {self.without:,} own none" if self.without else ": every rank owns some"
        text += (
            f". The largest ({rows} x {cols}) takes its owner {duration(self.largest_seconds)}, "
            f"{share:.1%} of the time; from {count(self.enough, 'owner')} on more ranks do not "
            "make that shorter"
        )
        yield "owners of blocks", text
        if self.on_host == 1:
            return
        shared = (
            f"the {self.on_host} ranks of a host would need {duration(self.shared_seconds)} for "
            "that block together (rows of each product, gathered in between)"
        )
        saves = f"saves at most {duration(self.saves)}, {self.saves / self.within:.1%} of"
        if self.ranks < self.enough:
            shared += f", and with fewer than {self.enough:,} owners no rank waits for one block"
        elif self.saves == 0:
            shared += ", which saves nothing"
        else:
            shared += f", which {saves} the time; it is not done"
        yield "sharing a block", shared


@dataclass(frozen=True)
class Choices:
    """The choices of one pipeline stage's plan: its buckets, and the owners of blocks."""

    buckets: list[BucketChoice]
    owners: OwnerChoice | None  # None: no matrix rule, or every rank computes every block

    def lines(self) -> list[tuple[str, str]]:
        """Return pairs of a choice's subject and a text with the decision and its reason."""
        found = [line for each in self.buckets for line in each.lines()]
        return found + list(self.owners.lines() if self.owners is not None else ())


def choices(plan: GridPlan, hardware: Hardware, within: float) -> Choices:
    """Return the choices of a plan; `within`: seconds of the step, or of the iteration."""
    buckets = [
        _of_buckets(placement, plan.grid, hardware)
        for _, placement in plan.reduced()
        if placement.peers.size > 1
    ]
    return Choices(buckets, _of_owners(plan, hardware, within))


def _of_buckets(placement: GridPlacement, grid: Grid, hardware: Hardware) -> BucketChoice:
    fabric, own = hardware.fabric(placement.peers, grid), placement.buckets
    params, _, buckets = own.even or own.plan
    in_bytes = bytes_of(params)
    given = own.options.bucket_size
    elements = given or bucket_elements(sum(spec.numel for spec in params), in_bytes, fabric)
    largest = max(bucket.nbytes for bucket in buckets)
    link = fabric.ring()
    begins = link.seconds(fabric.ranks, 0)
    exchanged = own.policy.on_cpu or own.policy.ordered
    in_a_row = legs_in_a_row(len(buckets), on_cpu=own.policy.on_cpu)
    one = fabric.exchange() if exchanged else link
    return BucketChoice(
        placement.peers.name,
        placement.peers.size,
        len(buckets),
        elements,
        given is not None,
        begins,
        in_bytes / link.bandwidth,
        own.policy.levels,
        fabric.per_host,
        fabric.hosts,
        one.seconds(fabric.ranks, largest),
        fabric.seconds_in_two(largest, largest_block(placement.specs), in_a_row)
        if fabric.has_levels
        else None,
    )


def _of_owners(plan: GridPlan, hardware: Hardware, within: float) -> OwnerChoice | None:
    shapes = [
        block.shape
        for placement in plan.placements
        for spec in placement.specs
        for block in spec.blocks or ()
    ]
    if not shapes:
        return None
    flops = torch.stack([owner_flops(each, plan.grid) for each in plan.placements]).sum(0)
    each_block = [shape_flops(*shape) for shape in shapes]
    if float(flops.sum()) > 1.5 * sum(each_block) or flops.numel() == 1:
        return None  # nobody owns: all compute all
    largest = shapes[each_block.index(max(each_block))]
    on_host = min(hardware.ranks_per_host, plan.grid.ranks)
    rate = hardware.product_rate(min(largest))
    return OwnerChoice(
        plan.grid.ranks,
        len(shapes),
        int((flops == 0).sum()),
        ceil(sum(each_block) / max(each_block)),
        largest,
        float(flops.max()) / rate,
        max(each_block) / rate,
        on_host,
        shared_block_seconds(largest, on_host, hardware),
        within,
    )


def shared_block_seconds(shape: tuple[int, int], ranks: int, hardware: Hardware) -> float:
    """Return the seconds of one block if so many ranks of a host shared the rows of its products.

    Before the first product the block's gradient is gathered to all these ranks; after each product
    whose whole result another product needs, the rows of the result are gathered.
    """
    fabric = Fabric(hardware.inside, hardware.between, ranks, ranks)
    width = PRODUCT_DTYPE.itemsize
    gathered = [shape[0] * shape[1] * width, *_gathers(shape, width)]
    travels = sum(
        hardware.seconds("all_gather", size * (ranks - 1) / ranks, fabric) for size in gathered
    )
    flops = shape_flops(*shape)
    return flops / ranks / hardware.product_rate(min(shape)) + (travels if ranks > 1 else 0.0)


def _gathers(shape: tuple[int, int], width: int) -> Sequence[int]:
    """Return the bytes of each product that ranks would have to gather, in order."""
    m, n = min(shape), max(shape)
    square, whole = m * m * width, m * n * width
    if cheaper_execution(*shape, USUAL_TABLE, PRODUCT_DTYPE) == "standard":
        return [square, square, whole] * len(USUAL_TABLE)  # X X^T, its square, the next X
    found: list[int] = []
    for start, stop in gram_segments(USUAL_TABLE, PRODUCT_DTYPE, m):
        steps = stop - start
        found += [square] * (1 + 4 * steps - 3)  # the Gram matrix; A A, P Q, P A P
        found.append(whole)  # X, for the next segment or for its owner
    return found
