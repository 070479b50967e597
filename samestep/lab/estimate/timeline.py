"""The simulator: when every operation of a schedule begins and ends, on every rank.

The simulator runs the schedule as the executor does, on clocks in place of devices. Each rank has a
host that does one operation after the other, and a link on which transfers follow each other:

    start(k) = max(launch of k, end of the link's transfer before), over all peers
    end(k)   = start(k) + latency + bytes / bandwidth

In two levels the second leg of a transfer follows the first, over another link, if the ranks are
GPUs. CPUs launch the second leg when the next transfer of its kind is launched, or when a rank
waits, and wait for the first leg then, as `comm.collectives.Chained` does.

State that is offloaded to the host is copied on separate links, one each way; the step is over when
all state is back on the host.

A rank that waits either waits for peers that have not launched yet (idle), or for the link
(exposed communication). While a model runs, layers wait for their collectives, and stages of a
pipeline for their neighbours. FSDP2 gathers the next unit as one computes, in forward and in
backward; a reduction overlaps with the next unit's backward, and has to be over before the next
reduction begins; in a pipeline units stay whole from the first backward pass on.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from samestep.lab.estimate.collectives import BOTH, Collective, Counted, Launches, Leg, legs_of
from samestep.lab.estimate.fsdp import Unit, gather_of, reductions_of
from samestep.lab.estimate.grid import Peers, per_peer
from samestep.lab.estimate.grid_plan import GridPlacement, GridPlan
from samestep.lab.estimate.hardware import Hardware
from samestep.lab.estimate.slots import Pass, Slot
from samestep.lab.estimate.training import Training
from samestep.lab.estimate.work import (
    Work,
    bucket_work,
    chunk_count,
    chunk_flops,
    chunk_parts,
    elementwise_work,
    local_work,
)
from samestep.plan.exchanges import transfer_of
from samestep.plan.placement_plan import BlockPlan, BucketPlan
from samestep.plan.schedule import (
    Agree,
    Apply,
    Average,
    BucketId,
    Clip,
    Collect,
    Fetch,
    Gather,
    GiveBack,
    Measure,
    OfWindow,
    Operation,
    Place,
    Reduce,
    Return,
    Sum,
    Transform,
    Update,
    WindowId,
    describe_operation,
)
from samestep.plan.transfers import Traffic, Transfer
from samestep.tooling.output import Drawn, trace_file

TO_DEVICE, TO_HOST = "to the device", "to the host"
Flight = tuple[str, object]  # what kind of transfer, and of what: a bucket, a unit

ROWS = ("operations", "waits", "transfers")  # of a trace


class Span(NamedTuple):
    """An operation or a transfer of one rank, in seconds."""

    name: str
    start: float
    end: float
    launched: float | None = None  # of a transfer


@dataclass
class Shown:
    """The spans of one rank, for a picture or a trace."""

    operations: list[Span] = field(default_factory=list)
    waits: list[Span] = field(default_factory=list)
    transfers: list[Span] = field(default_factory=list)


@dataclass(frozen=True)
class Timeline:
    """One step of all ranks, in seconds; tensors have the shape of the grid."""

    seconds: float  # until the last rank is done
    computing: Tensor
    exposed: Tensor
    idle: Tensor
    link: Tensor  # busy
    by_operation: dict[str, float]  # the worst rank's, waits included
    shown: dict[int, Shown]

    @property
    def exposed_seconds(self) -> float:
        """Return the mean over ranks of the seconds of exposed communication."""
        return float(self.exposed.mean())


def simulate(
    grid_plan: GridPlan,
    hardware: Hardware,
    *,
    show: Sequence[int] = (),
    training: Training | None = None,
) -> Timeline:
    """Simulate one step on all ranks; with a training, the second of two iterations."""
    simulator = _Simulator(grid_plan, hardware, show)
    if training is None:
        simulator.step()
    else:
        simulator.iterate(training)
        simulator.begin_anew()
        simulator.iterate(training)
    return simulator.timeline()


class _Simulator:
    def __init__(self, grid_plan: GridPlan, hardware: Hardware, show: Sequence[int]) -> None:
        self._grid_plan, self._hardware, self._grid = grid_plan, hardware, grid_plan.grid
        self._launches = Launches(grid_plan)
        self._now = self._grid.zeros()
        names = (*BOTH, TO_DEVICE, TO_HOST)
        self._links = {name: self._grid.zeros() for name in names}  # when each is free
        # Collectives in flight: per rank when each may begin and when it is over.
        self._flying: dict[Flight, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        self._second: dict[Flight, Leg] = {}  # legs to be launched when the first ones are over
        self._launched: set[BucketId] = set()
        self._returned: dict[int, Tensor] = {}  # by staging buffer: when its window is back
        self._gathered: set[str] = set()  # units that a pipeline keeps whole
        self._show = list(show)
        self._expert_tokens = 1.0
        self.begin_anew()

    def begin_anew(self) -> None:
        self._begun = self._now.clone()
        self._exposed, self._idle = self._grid.zeros(), self._grid.zeros()
        self._busy, self._computing = self._grid.zeros(), self._grid.zeros()
        self._by_operation: dict[str, Tensor] = defaultdict(self._grid.zeros)
        self._shown = {rank: Shown() for rank in self._show}

    def timeline(self) -> Timeline:
        last = int((self._now - self._begun).flatten().argmax())
        return Timeline(
            float(self._now.max()) - float(self._begun.min()),
            self._computing,
            self._exposed,
            self._idle,
            self._busy,
            {name: float(t.flatten()[last]) for name, t in self._by_operation.items()},
            self._shown,
        )

    # --- an iteration ------------------------------------------------------------------------

    def iterate(self, training: Training) -> None:
        begun = self._now
        passes = training.slots or [
            Slot(Pass(kind, stage, number), 0.0, 0.0)
            for number in range(training.micro_batches)
            for kind in "FB"
            for stage in training.stages
        ]
        for number, slot in enumerate(passes):
            if training.slots:
                self._await_stages(begun + slot.start)
            is_last = number == len(passes) - 1
            self._pass(training, slot.run, is_first=number == 0, is_last=is_last)
        if training.slots and training.units:
            self._reduce_units(training.units)
        self.step()

    def _await_stages(self, until: Tensor) -> None:
        """Wait for a neighbouring pipeline stage until a time: the bubble."""
        before = self._now
        self._now = torch.maximum(before, until)
        self._idle += self._now - before
        self._draw("waits", "stages", before, self._now)
        self._tell("bubble", before)

    def _pass(self, training: Training, run: Pass, *, is_first: bool, is_last: bool) -> None:
        """Run forward or backward of a stage's layers over one micro-batch."""
        busy = training.stages[run.stage]
        flops = busy.share * training.flops[run.kind] * training.tokens / training.micro_batches
        self._expert_tokens = training.expert_tokens
        if run.kind == "F":
            self._forward_shared(flops)
        else:
            self._backward_shared(flops, reduces=is_last)
        if training.units:
            before = self._now - self._computing
            if not training.slots:
                self._run_units(training.units, run.kind, flops)
            else:
                self._run_whole_units(training.units, run, flops, is_first=is_first)
            self._by_operation["FSDP2"] += self._now - self._computing - before
        elif elements := self._spread_or_alone():
            self._compute(_name(run), elements * flops)
        self._layers_send(busy.forward if run.kind == "F" else busy.backward)

    def _spread_or_alone(self) -> float:
        """Return a rank's elements of DTensors that a token uses; in one process, all elements."""
        found = 0.0
        for placement in self._grid_plan.placements:
            if placement.bucket_plans:
                continue
            whole = sum(spec.numel for spec in placement.specs)
            share = self._tokens_of(placement) / self._grid.sizes.get("model", 1)
            if "expert" in placement.mesh.axes:
                share /= self._grid.sizes["expert"]
            found += whole * share
        if not self._grid_plan.placements:
            found = sum(p.numel() for group in self._grid_plan.groups for p in group["params"])
        return found

    def _tokens_of(self, placement: GridPlacement) -> float:
        """Return the tokens that come to a placement, as a multiple of one rank's tokens."""
        return self._expert_tokens if "expert" in placement.mesh.axes else 1.0

    def _forward_shared(self, flops: float) -> None:
        for number, placement in self._grid_plan.reduced():
            tokens = self._tokens_of(placement)
            for place, bucket in reversed([*enumerate(placement.buckets.plan.buckets)]):
                self._wait("gather", BucketId(number, place))
                self._compute(f"forward {place}", bucket.size * tokens * flops)

    def _backward_shared(self, flops: float, *, reduces: bool) -> None:
        for number, placement in self._grid_plan.reduced():
            tokens, own = self._tokens_of(placement), placement.buckets
            for place, bucket in enumerate(own.plan.buckets):
                self._compute(f"backward {place}", bucket.size * tokens * flops)
                if reduces and own.options.overlap_grad_reduce:
                    if own.options.one_in_flight and place:
                        self._wait("reduce", BucketId(number, place - 1))
                    self._run(own.shape.sending(Reduce, BucketId(number, place)))

    def _layers_send(self, collectives: Counted) -> None:
        """Run the collectives of a pass's layers, without overlap with computation."""
        before = self._now
        for each, count in collectives:
            (leg,) = legs_of(each, self._grid, self._hardware)
            self._occupy("layers", None, leg._replace(seconds=count * leg.seconds))
            self._wait("layers", None)
        if collectives:
            self._by_operation["layers"] += self._now - before

    # --- FSDP2 -------------------------------------------------------------------------------

    def _run_units(self, units: Sequence[Unit], kind: str, flops: float) -> None:
        """Run forward or backward of FSDP2 units, gathering one unit ahead."""
        name, order = "forward", list(units)
        if kind == "B":
            name, order = "backward", [unit for unit in reversed(units) if unit.reshards]
            order += [unit for unit in units if not unit.reshards]  # reduced at the end

        def gather(unit: Unit) -> None:
            is_whole = kind == "B" and not unit.reshards  # still
            self._send("unit", unit.name, () if is_whole else gather_of(unit))

        before: str | None = None
        gather(order[0])
        for place, unit in enumerate(order):
            self._wait("unit", unit.name)
            for later in order[place + 1 : place + 2]:
                gather(later)
            self._compute(f"{name} {unit.name}", flops * _elements(unit))
            if kind == "B":
                self._wait("reduce", before)
                self._send("reduce", unit.name, reductions_of(unit))
                before = unit.name
        self._wait("reduce", before)

    def _run_whole_units(
        self, units: Sequence[Unit], run: Pass, flops: float, *, is_first: bool
    ) -> None:
        """Run a pipeline's pass of FSDP2 units, which stay whole after their first backward."""
        if is_first:
            self._gathered.clear()
        for unit in units if run.kind == "F" else reversed(units):
            if unit.name not in self._gathered:
                self._send("unit", unit.name, gather_of(unit))
                self._wait("unit", unit.name)
            if run.kind == "B" or not unit.reshards:
                self._gathered.add(unit.name)
        self._compute(_name(run), flops * sum(map(_elements, units)))

    def _reduce_units(self, units: Sequence[Unit]) -> None:
        before = self._now
        for unit in units:
            self._send("reduce", unit.name, reductions_of(unit))
            self._wait("reduce", unit.name)
        self._by_operation["FSDP2"] += self._now - before

    def _compute(self, name: str, flops: float) -> None:
        """Spend the time of a part of the model, on every rank."""
        before = self._now
        self._spend(flops / self._hardware.model_rate)
        self._tell(name, before)

    def step(self) -> None:
        before = self._now
        self._send("begin", None, self._launches.of_beginning())
        self._wait("begin", None)
        spent = self._now - before
        if bool(spent.any()):
            self._by_operation["Begin"] += spent
        schedule = self._grid_plan.schedule()
        self._nbytes = {op.window: op.nbytes for op in schedule if isinstance(op, Fetch)}
        self._bucket_bytes = Counter[BucketId]()
        for window, nbytes in self._nbytes.items():
            self._bucket_bytes[window.bucket] += nbytes if window.stage == "update" else 0
        for operation in schedule:
            self._run(operation)
        for slot in self._returned:  # the step ends when all state is back
            self._wait("host", slot)
        self._returned.clear()
        for number, _ in self._grid_plan.reduced():
            self._advance("gather", number)
        self._launched.clear()

    # --- operations --------------------------------------------------------------------------

    def _run(self, operation: Operation) -> None:
        before = self._now
        match operation:
            case Reduce(bucket, transfer):
                if bucket not in self._launched:
                    self._launched.add(bucket)
                    self._advance("reduce", bucket.placement)
                    self._copy_pieces(bucket, transfer)
                    self._launch("reduce", bucket, operation)
                    own = self._buckets_of(bucket)
                    if own is not None and bucket.bucket == len(own.plan.buckets) - 1:
                        self._advance("reduce", bucket.placement)
            case Agree() | Clip() | Measure():
                if isinstance(operation, Clip):
                    self._read_gradients()
                self._launch("scalar", operation, operation)
                if not isinstance(operation, Measure):
                    self._wait("scalar", operation)
            case Average(bucket):
                self._wait("reduce", bucket)
                self._add_up(bucket)
                self._launch("outer", bucket, operation)
                self._wait("outer", bucket)
            case Fetch(window, slot):
                self._copy(operation, TO_DEVICE, window, after=self._returned.get(slot, 0.0))
            case Return(_, slot):
                self._flying.pop(("host", slot), None)  # it has come back, or none could be fetched
                self._returned[slot] = self._copy(operation, TO_HOST, slot)
            case Update(buckets, window):
                self._wait("host", window)
                self._update(buckets, self._share_of(window))
            case Gather(bucket, transfer):
                self._copies(bucket, transfer)
                self._advance("gather", bucket.placement)
                self._launch("gather", bucket, operation)
            case Place(bucket):
                self._wait("gather", bucket)
                own = self._buckets_of(bucket)
                if own is not None and own.options.buffers != "flat":
                    gather = own.shape.exchanges[bucket.bucket].gather
                    self._copy_pieces(bucket, transfer_of(gather))
            case Collect(chunk):
                self._wait("host", WindowId(chunk, "chunk"))
                self._elementwise(chunk, 16 + 4)
                self._launch("collect", chunk, operation)
            case Transform(chunk):
                self._wait("collect", chunk)
                self._spend(self._of_blocks(chunk, self._seconds_of_chunk))
            case GiveBack(chunk):
                self._launch("return", chunk, operation)
            case Sum(chunk):
                self._wait("return", chunk)
                self._elementwise(chunk, 12)
                self._launch("sums", chunk, operation)
            case Apply(chunk):
                self._wait("return", chunk)
                self._wait("sums", chunk)
                self._elementwise(chunk, 12)
        self._tell(describe_operation(operation), before)

    def _buckets_of(self, bucket: BucketId) -> BucketPlan | None:
        placement = self._grid_plan.reduced_by(bucket)
        return None if placement is None else placement.buckets

    def _of_blocks(self, chunk: BucketId, count: Callable[[BlockPlan, int], Tensor]) -> Tensor:
        """Count over a chunk's blocks on every rank; each mesh of copies owns different blocks."""
        placement = self._grid_plan.placements[chunk.placement]
        nothing = torch.zeros(placement.mesh.size, dtype=torch.float64)
        known = {id(each): each for each in placement.block_plans}  # where all have the same
        rows = {
            key: count(each, chunk.bucket) if chunk.bucket < len(each.chunks) else nothing
            for key, each in known.items()
        }
        together = torch.stack([rows[id(each)] for each in placement.block_plans])
        return self._grid.spread_both(together, placement.peers, placement.mesh)

    def _seconds_of_chunk(self, blocks: BlockPlan, number: int) -> Tensor:
        return chunk_flops(blocks, number, self._hardware).seconds(self._hardware)

    def _copy_pieces(self, bucket: BucketId, transfer: Transfer | None) -> None:
        """Spend the time of copies into a bucket before a transfer, or out of it afterwards."""
        own = self._buckets_of(bucket)
        if own is not None and transfer is not None:
            moved = 2 * transfer.elements * transfer.dtype.itemsize
            self._spend(moved / self._hardware.bytes_rate)
            parts = own.plan.buckets[bucket.bucket].packing.parts
            self._spend(len(parts) * self._hardware.call)

    def _add_up(self, bucket: BucketId) -> None:
        placement = self._grid_plan.reduced_by(bucket)
        if placement is None or not placement.buckets.shape.reduces:
            return
        reduce = placement.buckets.shape.exchanges[bucket.bucket].reduce.transfer
        summands = placement.peers.size if reduce.traffic is Traffic.EXCHANGE else 1
        own = _to_update(placement.buckets, bucket.bucket)
        self._bytes(own * 4 * (3 * (summands - 1) + 2), placement.peers)

    # --- state on the host: windows are as large as the first rank's -------------------------

    def _copy(
        self, operation: OfWindow, link: str, about: object, after: float | Tensor = 0.0
    ) -> Tensor:
        """Start a copy between host and device once `after` has passed; return when it ends."""
        seconds = self._grid.zeros() + operation.nbytes / self._hardware.host_rate
        leg = Leg(describe_operation(operation), seconds, lambda times: times, (link,))
        return self._occupy("host", about, leg, after)

    def _share_of(self, window: WindowId | None) -> float:
        """Return the share of its bucket's bytes that a window has; 1.0 without a window."""
        if window is None:
            return 1.0
        return self._nbytes[window] / max(1, self._bucket_bytes[window.bucket])

    def _update(self, buckets: Sequence[BucketId], share: float) -> None:
        if not self._grid_plan.placements:
            work = local_work(self._grid_plan, self._hardware)
            self._spend(share * float(work.seconds(self._hardware)))
            return
        for bucket in buckets:
            if bucket.placement == len(self._grid_plan.placements):
                continue  # of one process, and empty
            placement = self._grid_plan.placements[bucket.placement]
            if placement.bucket_plans:
                work = bucket_work(placement.buckets, bucket.bucket, self._hardware)
                self._do(work, placement.peers, share)
            else:
                (blocks,) = placement.block_plans
                self._do(elementwise_work(blocks, self._hardware), placement.mesh, share)

    def _copies(self, bucket: BucketId, transfer: Transfer | None) -> None:
        """Spend the time of copying a rank's updated parameters before they are sent."""
        placement = self._grid_plan.reduced_by(bucket)
        if placement is None or transfer is None:
            return
        ranks, own = placement.peers.size, _to_update(placement.buckets, bucket.bucket)
        copies = 0 if placement.buckets.options.buffers == "flat" else 1
        if transfer.traffic is Traffic.COPIES and ranks > 2:
            copies += ranks - 1
        self._bytes(own * 2 * transfer.dtype.itemsize * copies, placement.peers)

    def _elementwise(self, chunk: BucketId, per_element: int) -> None:
        elements = self._of_blocks(chunk, chunk_parts)
        self._spend(elements * (per_element / self._hardware.bytes_rate))
        self._spend(self._of_blocks(chunk, chunk_count) * self._hardware.call)

    def _read_gradients(self) -> None:
        for _, placement in self._grid_plan.reduced():
            numbers = range(len(placement.buckets.plan.buckets))
            owned = torch.stack([_to_update(placement.buckets, number) for number in numbers])
            self._bytes(owned.sum(0) * 4, placement.peers)

    # --- time --------------------------------------------------------------------------------

    def _spend(self, seconds: float | Tensor) -> None:
        self._now = self._now + seconds
        self._computing += seconds

    def _do(self, work: Work, peers: Peers, share: float = 1.0) -> None:
        self._spend(share * self._grid.spread(work.seconds(self._hardware), peers))

    def _bytes(self, per_peer: Tensor, peers: Peers) -> None:
        """Spend the time in which each peer reads or writes so many bytes."""
        self._spend(self._grid.spread(per_peer / self._hardware.bytes_rate, peers))

    def _launch(self, kind: str, about: object, operation: Operation) -> None:
        self._send(kind, about, self._launches.of(operation))

    def _send(self, kind: str, about: object, collectives: Iterable[Collective]) -> None:
        """Launch collectives, which queue behind earlier transfers of the link."""
        for each in collectives:
            first, *others = legs_of(each, self._grid, self._hardware)
            over = self._occupy(kind, about, first)
            for second in others:
                if self._hardware.on_cpu:
                    self._second[kind, about] = second
                else:
                    self._occupy(kind, about, second, after=over)

    def _advance(self, kind: str, placement: int) -> None:
        """Wait for first legs of a placement, and launch their second legs."""
        for each, about in list(self._second):
            if each == kind and isinstance(about, BucketId) and about.placement == placement:
                self._launch_second(kind, about)

    def _launch_second(self, kind: str, about: object) -> None:
        self._land(kind, about)
        self._occupy(kind, about, self._second.pop((kind, about)))

    def _occupy(self, kind: str, about: object, leg: Leg, after: float | Tensor = 0.0) -> Tensor:
        """Launch a leg that begins once `after` has passed and links are free; return its end."""
        ready = leg.latest(self._now)
        start = leg.latest(torch.maximum(self._now, self._grid.zeros() + after))
        for name in leg.links:
            start = torch.maximum(start, leg.latest(self._links[name]))
        end = start + leg.seconds
        for name in leg.links:
            self._links[name] = end
        self._busy += leg.seconds if kind != "host" else 0.0
        self._flying[kind, about].append((ready, end))
        self._draw("transfers", leg.name, start, end, self._now)
        return end

    def _wait(self, kind: str, about: object) -> None:
        """Wait until transfers are over, if any were launched."""
        if (kind, about) in self._second:
            self._launch_second(kind, about)
        self._land(kind, about)

    def _land(self, kind: str, about: object) -> None:
        for ready, end in self._flying.pop((kind, about), ()):
            until = torch.maximum(self._now, end)
            others = torch.minimum(torch.maximum(self._now, ready), until)
            self._idle += others - self._now
            self._exposed += until - others
            self._draw("waits", kind, self._now, until)
            self._now = until

    def _tell(self, name: str, before: Tensor) -> None:
        """Record an operation that began at `before` and ends now; its first word is its kind."""
        self._by_operation[name.split()[0]] += self._now - before
        self._draw("operations", name, before, self._now)

    def _draw(self, row: str, name: str, *times: Tensor) -> None:
        """Record a span (start, end, launch) of the ranks that are shown, unless an empty wait."""
        if not self._shown:
            return
        begun = self._begun.min()
        columns = [(each.flatten()[self._show] - begun).tolist() for each in times]
        for shown, own in zip(self._shown.values(), zip(*columns, strict=True), strict=True):
            span = Span(name, *own)
            if row != "waits" or span.end > span.start:
                getattr(shown, row).append(span)


def _to_update(plan: BucketPlan, number: int) -> Tensor:
    """Return the elements of a bucket that each peer updates: (size,)."""
    bucket, ranks = plan.plan.buckets[number], plan.fabric.ranks
    return per_peer([bucket.size] * ranks if bucket.replicated else bucket.segment_sizes)


def _elements(unit: Unit) -> float:
    """Return a unit's elements times the tokens that come to it, per token of one rank."""
    return sum(param.numel() for param in unit.params) * unit.brings_tokens


def _name(run: Pass) -> str:
    """Return the label of a pass for pictures, such as "forward 0.1" (stage, micro-batch)."""
    return f"{'forward' if run.kind == 'F' else 'backward'} {run.stage}.{run.micro_batch}"


def chrome_trace(timelines: Mapping[str, Timeline]) -> bytes:
    """Return a Chrome trace: a process per timeline and rank, rows for host, waits and link."""

    def drawn(shown: Shown) -> Iterator[Drawn]:
        for row, kind in enumerate(ROWS):
            for name, start, end, launched in getattr(shown, kind):
                about = None if launched is None else {"launched": round(1e6 * launched, 3)}
                yield Drawn(row, name, start, end, about)

    return trace_file(
        (f"{title}: rank {rank}", ROWS, drawn(shown))
        for title, timeline in timelines.items()
        for rank, shown in timeline.shown.items()
    )
