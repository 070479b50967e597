"""Runs cases on forked ranks, on ranks of torchrun, or on the devices of one XLA program."""

import atexit
import io
import mmap
import multiprocessing.connection
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import groupby
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.comm.messages import gather_on_first
from samestep.lab.stress.rank import Ending, Message, Sample, Work, run_rank
from samestep.launch import RanksFailed, TorchrunRank
from samestep.launch.forked import NCCL, run_forked
from samestep.xla import runtime

OnSample = Callable[[Sequence[Sample]], None]  # of all ranks, after the same step
OnEnd = Callable[[dict[int, Ending]], None]
Result = TypeVar("Result")

LOOK = 0.1  # seconds; the end of a rank is heard of sooner
START = timedelta(minutes=5)  # from the first rank of torchrun's start to the last one's
POLL = 0.05
# What launch says of ranks that a collective has stopped. Where sizes do not match, gloo aborts,
# or writes where it should not.
CRASHED = ("died of SIGABRT", "died of SIGSEGV")
WITHOUT_ENDING = ("had not finished", "was still running", *CRASHED)


# --- forked here -----------------------------------------------------------------------------


class Note:
    """A line of text that a forked rank writes and this process reads, even if the rank dies."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 512)

    def write(self, text: str) -> None:
        line = text.encode(errors="replace")[:510]
        self._memory[: len(line) + 1] = line + b"\n"

    def read(self) -> str:
        """Return the last text; "" if there was none."""
        return self._memory[:].split(b"\n")[0].decode(errors="replace").strip("\0")


class Mailbox:
    """One pipe per rank, read by a thread, so that no rank waits for this process.

    `on_sample` gets the samples of all ranks after the same step, `on_end` the endings of all ranks
    if none has an error: work after work, called in that thread.
    """

    def __init__(self, world: int, on_sample: OnSample, on_end: OnEnd) -> None:
        self.endings: dict[int, dict[int, Ending]] = {}  # by place and rank
        self.notes = [Note() for _ in range(world)]  # the last collective that each launched
        self.steps = dict.fromkeys(range(world), 0)
        self.ended = 0  # how many works have ended well
        self.since = time.monotonic()  # when the last of them did
        self._on_sample, self._on_end = on_sample, on_end
        self._samples: dict[tuple[int, int], dict[int, Sample]] = {}
        self._pipes = [multiprocessing.Pipe(duplex=False) for _ in range(world)]
        self._done = threading.Event()
        self.problem: BaseException | None = None  # of those who are told
        self._reader = threading.Thread(target=self._read, daemon=True)

    def sender(self, rank: int, place: int) -> Callable[[Message], None]:
        """Return the function by which a rank sends its samples of one case."""

        def send(message: Message) -> None:
            file = io.BytesIO()  # as bytes: tensors would travel as file descriptors
            torch.save((place, message), file)
            self._pipes[rank][1].send_bytes(file.getvalue())

        return send

    def __enter__(self) -> "Mailbox":
        self._reader.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._done.set()
        for _read, write in self._pipes:  # so that a message cut short by a rank's end has an end
            write.close()
        self._reader.join()
        for read, _write in self._pipes:
            read.close()
        if self.problem is not None and kind is None:
            raise self.problem

    def _read(self) -> None:
        places = {pair[0]: rank for rank, pair in enumerate(self._pipes)}
        try:
            while True:
                last_look = self._done.is_set()
                ready = multiprocessing.connection.wait(list(places), timeout=LOOK)
                for connection in [place for place in places if place in ready]:
                    try:
                        self._take(places[connection], connection)
                    except (EOFError, OSError):  # the rank sends no more
                        del places[connection]
                if not places or (last_look and not ready):
                    return
        except BaseException as problem:
            self.problem = problem

    def _take(self, rank: int, connection: "Connection[Any, Any]") -> None:
        content = io.BytesIO(connection.recv_bytes())
        place, message = torch.load(content, weights_only=False)  # from a process of our own
        if isinstance(message, Ending):
            self._take_ending(rank, place, message)
            return
        self.steps[rank] = message.step
        of_step = self._samples.setdefault((place, message.step), {})
        of_step[rank] = message
        if len(of_step) == len(self._pipes):
            del self._samples[place, message.step]
            self._on_sample([of_step[rank] for rank in sorted(of_step)])

    def _take_ending(self, rank: int, place: int, ending: Ending) -> None:
        of_ranks = self.endings.setdefault(place, {})
        of_ranks[rank] = ending
        self.steps[rank] = 0
        whole = len(of_ranks) == len(self._pipes)
        if whole and all(each.error is None for each in of_ranks.values()):
            self._on_end(dict(sorted(of_ranks.items())))
            self.ended, self.since = place + 1, time.monotonic()


class ForkedRanks:
    """Forked processes that run cases until one fails, and are then replaced.

    Like ranks of torchrun, they run cases one after the other and report how each rank ended each
    case. `aside` computes something on one process beside them, given their device.
    """

    least_limit = 120.0  # seconds that a case has
    processes: int | None = None  # that are forked; None: one for each rank
    broken = False  # new ones can always be forked

    def __init__(
        self, world: int, watchdog: float, device: str = "cpu", backend: str = "gloo"
    ) -> None:
        self.world = world
        self.watchdog = watchdog
        self._on_gpu = device == "cuda"
        self._backend = NCCL if backend == "nccl" else backend

    def run(self, works: Sequence[Work], on_sample: OnSample, on_end: OnEnd) -> None:
        """Run all cases, and end all processes afterwards."""
        for alone, alike in groupby(works, key=lambda work: work.layout.one_process):
            batch = list(alike)
            while batch:
                ended = self._run_batch(batch, 1 if alone else self.world, on_sample, on_end)
                batch = batch[ended:]

    def aside(self, compute: Callable[[torch.device | None], Result]) -> Result:
        """Run a function here, or in a forked process where autograd would prevent later forks."""
        if not self._on_gpu:
            return compute(None)
        return in_own_process(compute, torch.device("cuda", 0))

    def _take_part(self, rank: int, works: Sequence[Work], mailbox: Mailbox) -> None:
        """Run all cases as one rank, one after the other."""
        device = shared_gpu(rank) if self._on_gpu else None
        for place, work in enumerate(works):
            mailbox.notes[rank].write("")
            send = mailbox.sender(rank, place)
            run_rank(work, rank, send, device, mailbox.notes[rank].write)

    def _run_batch(
        self, works: Sequence[Work], world: int, on_sample: OnSample, on_end: OnEnd
    ) -> int:
        """Run cases up to the first that fails, and return how many have ended."""
        start = time.monotonic()
        with Mailbox(world, on_sample, on_end) as mailbox:

            def limit() -> float:
                if mailbox.problem is not None:
                    return 0.0  # nobody would hear of what they find
                steps = works[min(mailbox.ended, len(works) - 1)].case.steps
                since = mailbox.since - start
                return since + max(self.least_limit, steps * world * 0.2) + 10 * self.watchdog

            reports: dict[int, str] = {}
            try:
                limits: dict[str, Any] = {"timeout": limit, "collective_timeout": self.watchdog}
                if world > 1:
                    limits["backend"] = self._backend
                run_forked(self.processes or world, self._take_part, works, mailbox, **limits)
            except RanksFailed as failed:
                reports = failed.reports
        if mailbox.ended == len(works):
            return len(works)
        endings = mailbox.endings.get(mailbox.ended, {})
        for rank in range(world):
            if rank not in endings:
                report = reports.get(rank, "is gone").strip()
                step, note = mailbox.steps[rank], mailbox.notes[rank]
                endings[rank] = _without_ending(report, step, note, rank)
        on_end(dict(sorted(endings.items())))
        return mailbox.ended + 1


def in_own_process(
    compute: Callable[[torch.device | None], Result], device: torch.device | None
) -> Result:
    """Run a function in a forked process."""
    found: Result = run_forked(1, lambda _: compute(device), timeout=600.0)[0]
    return found


def shared_gpu(rank: int) -> torch.device:
    """Return a GPU for this process, which other ranks may use too."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _without_ending(report: str, step: int, note: Note, rank: int) -> Ending:
    """Describe a rank that ended without a report."""
    kind = "hang" if report.startswith(WITHOUT_ENDING) else "error"
    if report.startswith(CRASHED):
        report = f"died in a collective that other ranks did not launch alike\n{report}"
    return Ending(step, report, kind, {rank: note.read()})


# --- those of torchrun -----------------------------------------------------------------------


class TorchrunRanks:
    """The ranks that torchrun started; rank 0 gathers samples as they come.

    Between cases there is no process group, so that one process can compute alone.
    """

    def __init__(
        self, place: TorchrunRank, watchdog: float, backend: str, device: str = "cpu"
    ) -> None:
        self.world = place.world_size
        self._rank = place.rank
        self._watchdog = timedelta(seconds=watchdog)
        self._backend = NCCL if backend == "nccl" else "gloo"
        self._device = shared_gpu(place.local_rank) if device == "cuda" else None
        self._store, _, _ = next(dist.rendezvous("env://", timeout=START))
        self._pulse = Pulse(self._store, place.rank, watchdog)
        self._cases = 0
        self.broken = False  # a case has failed, and none can follow

    def run(self, works: Sequence[Work], on_sample: OnSample, on_end: OnEnd) -> None:
        """Run cases up to the first that fails; only rank 0 receives samples and endings."""
        for work in works:
            endings = self._run_one(work, on_sample)
            on_end(endings)
            if any(ending.error is not None for ending in endings.values()):
                self.broken = True
                return

    def aside(self, compute: Callable[[torch.device | None], Result]) -> Result:
        return compute(self._device)

    def _run_one(self, work: Work, on_sample: OnSample) -> dict[int, Ending]:
        alone = work.layout.one_process
        if alone and self._rank > 0:
            return {}
        try:
            if not alone:
                self._meet()
        except Exception as error:
            return {self._rank: Ending(0, str(error).split("\n")[0], "hang")}
        endings: dict[int, Ending] = {}
        try:
            with suppress(Exception):  # it is in the ending
                run_rank(work, self._rank, self._sender(on_sample, endings, alone), self._device)
        finally:
            if not alone:
                dist.destroy_process_group()
        return endings

    def _meet(self) -> None:
        """Wait for all ranks, which may compute alone for long, and make a process group."""
        self._cases += 1
        store = dist.PrefixStore(f"samestep_stress_{self._cases}", self._store)
        store.set(f"here_{self._rank}", "")
        self._pulse.wait_for(store, [f"here_{rank}" for rank in range(self.world)])
        place: dict[str, Any] = {"rank": self._rank, "world_size": self.world}
        dist.init_process_group(self._backend, store=store, timeout=self._watchdog, **place)

    def _sender(
        self, on_sample: OnSample, endings: dict[int, Ending], alone: bool
    ) -> Callable[[Message], None]:
        def send(message: Message) -> None:
            if isinstance(message, Ending) and message.error is not None:
                endings[self._rank] = message  # there may be nobody left to gather with
                return
            try:
                gathered: list[Any] | None = [message] if alone else gather_on_first(message)
            except RuntimeError as error:
                if isinstance(message, Ending):  # all went well here, and then somebody was gone
                    endings[self._rank] = Ending(message.step, str(error).split("\n")[0], "hang")
                raise
            if gathered is None:
                return
            if isinstance(message, Sample):
                on_sample(gathered)
            else:
                endings.update(enumerate(gathered))

        return send


Ranks = ForkedRanks | TorchrunRanks


class Pulse:
    """Heartbeats of every rank, which tell a rank that computes for long from one that is gone.

    A rank is gone if it has given no heartbeat for `patience` seconds.
    """

    def __init__(self, store: dist.Store, rank: int, patience: float) -> None:
        self._store, self._rank, self._patience = store, rank, patience
        self._stopped = threading.Event()
        # A connection of its own: a thread that waits for the store holds up no other.
        own = store.clone()  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._beat, args=(own,), daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # a thread inside the store would not survive Python's end

    def _beat(self, store: dist.Store) -> None:
        with suppress(RuntimeError):  # the store's host has ended, and so will this process
            while not self._stopped.wait(min(1.0, self._patience / 4)):
                store.add(f"samestep_pulse_{self._rank}", 1)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(1.0)

    def wait_for(self, store: dist.Store, keys: Sequence[str]) -> None:
        """Wait until every rank has set its key; raise as soon as a missing rank is gone."""
        heard = {rank: (0, time.monotonic()) for rank in range(len(keys))}
        while missing := [rank for rank, key in enumerate(keys) if not store.check([key])]:
            for rank in missing:
                beats, since = self._store.add(f"samestep_pulse_{rank}", 0), heard[rank][1]
                if beats != heard[rank][0]:
                    heard[rank] = beats, time.monotonic()
                elif time.monotonic() - since > self._patience:
                    raise RuntimeError(
                        f"rank {rank} did not report for {self._patience:g} s between two cases"
                    )
            time.sleep(POLL)


# --- devices of one XLA program, each of which stands for a rank --------------------------------

COMPILES = 1800.0  # seconds: every kind of step is compiled once, the slowest in a minute


class XlaDevices(ForkedRanks):
    """One process for every case, so that no case reuses compiled programs of another."""

    least_limit, processes = COMPILES, 1

    def aside(self, compute: Callable[[torch.device | None], Result]) -> Result:
        """Run a function in a forked process, because autograd here breaks XLA in later forks."""
        return in_own_process(compute, None)

    def run(self, works: Sequence[Work], on_sample: OnSample, on_end: OnEnd) -> None:
        for work in works:
            self._run_batch([work], self.world, on_sample, on_end)

    def _take_part(self, rank: int, works: Sequence[Work], mailbox: Mailbox) -> None:
        device = runtime.start(self.world)
        for place, work in enumerate(works):
            senders = [mailbox.sender(number, place) for number in range(self.world)]
            run_rank(work, rank, partial(_send_all, senders), device)


def _send_all(senders: Sequence[Callable[[Message], None]], message: Message) -> None:
    """Send the samples of all devices, one to each sender."""
    for place, send in enumerate(senders):
        send(message if isinstance(message, Ending) else _of_device(message, place))


def _of_device(sample: Sample, place: int) -> Sample:
    """Return the sample of one device, from tensors of shape (devices, ...)."""

    def own(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: tensor[place].clone() for key, tensor in tensors.items()}

    state = {name: own(entries) for name, entries in sample.state.items()}
    return replace(sample, params=own(sample.params), state=state)
