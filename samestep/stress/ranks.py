"""Running a case on ranks: forked here, or those of torchrun."""

import io
import mmap
import multiprocessing.connection
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
import torch.distributed as dist

from samestep.comm.messages import gather_on_first
from samestep.launch import RanksFailed, TorchrunRank, run_forked
from samestep.stress.rank import Message, Work, run_rank
from samestep.stress.sample import Ending, Sample

# What launch says of ranks that a collective has stopped. Where sizes do not match, gloo aborts,
# or writes where it should not.
CRASHED = ("died of SIGABRT", "died of SIGSEGV")
WITHOUT_ENDING = ("had not finished", "was still running", *CRASHED)

PATIENCE = timedelta(hours=1)  # ranks may compute alone for long

OnSample = Callable[[Sequence[Sample]], None]  # the samples of all ranks after the same step


class Ranks(Protocol):
    """Something that runs a case on all ranks and gives how each of them ended."""

    def run(self, work: Work, on_sample: OnSample) -> dict[int, Ending]:
        """Run it; `on_sample` is called, in this process, as samples arrive."""
        ...


class ForkedRanks:
    """Processes of this machine, new ones for every case."""

    def __init__(self, world: int, watchdog: float) -> None:
        self.world = world
        self.watchdog = watchdog

    def run(self, work: Work, on_sample: OnSample) -> dict[int, Ending]:
        """Run a case; whatever ranks do, they are gone afterwards."""
        world = 1 if work.layout.one_process else self.world
        limit = max(120.0, work.steps * world * 0.2) + 10 * self.watchdog
        with _Mailbox(world, on_sample) as mailbox:
            reports: dict[int, str] = {}
            try:
                run_forked(
                    world,
                    lambda rank: run_rank(
                        work, rank, mailbox.sender(rank), note=mailbox.notes[rank].write
                    ),
                    timeout=limit,
                    collective_timeout=self.watchdog,
                )
            except RanksFailed as failed:
                reports = failed.reports
        endings = mailbox.endings
        for rank in range(world):
            if rank not in endings:
                report = reports.get(rank, "is gone").strip()
                step, note = mailbox.steps[rank], mailbox.notes[rank]
                endings[rank] = _without_ending(report, step, note, rank)
        return endings


def _without_ending(report: str, step: int, note: "Note", rank: int) -> Ending:
    """What is known of a rank that could not say how it ended."""
    kind = "hang" if report.startswith(WITHOUT_ENDING) else "error"
    if report.startswith(CRASHED):
        report = f"died in a collective that other ranks did not launch alike\n{report}"
    return Ending(step, report, kind, {rank: note.read()})


class Note:
    """A line of text that a forked rank writes and this process reads, whatever becomes of it."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 512)

    def write(self, text: str) -> None:
        """Replace the text."""
        line = text.encode(errors="replace")[:510]
        self._memory[: len(line) + 1] = line + b"\n"

    def read(self) -> str:
        """The last text; "" if there was none."""
        return self._memory[:].split(b"\n")[0].decode(errors="replace").strip("\0")


class _Mailbox:
    """One pipe per rank, emptied by a thread, so that no rank ever waits for this process."""

    def __init__(self, world: int, on_sample: OnSample) -> None:
        self.endings: dict[int, Ending] = {}
        self.notes = [Note() for _ in range(world)]  # the last collective that each launched
        self.steps = dict.fromkeys(range(world), 0)
        self._on_sample = on_sample
        self._samples: dict[int, dict[int, Sample]] = {}
        self._pipes = [multiprocessing.Pipe(duplex=False) for _ in range(world)]
        self._done = threading.Event()
        self._problem: BaseException | None = None
        self._reader = threading.Thread(target=self._read, daemon=True)

    def sender(self, rank: int) -> Callable[[Message], None]:
        """What the rank sends with. As bytes: tensors would travel as file descriptors."""

        def send(message: Message) -> None:
            file = io.BytesIO()
            torch.save(message, file)
            self._pipes[rank][1].send_bytes(file.getvalue())

        return send

    def __enter__(self) -> "_Mailbox":
        self._reader.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._done.set()
        for _read, write in self._pipes:  # so that a message cut short by a rank's end has an end
            write.close()
        self._reader.join()
        for read, _write in self._pipes:
            read.close()
        if self._problem is not None and kind is None:
            raise self._problem

    def _read(self) -> None:
        places = {pair[0]: rank for rank, pair in enumerate(self._pipes)}
        try:
            while True:
                last_look = self._done.is_set()
                ready = multiprocessing.connection.wait(list(places), timeout=0.01)
                for connection in [place for place in places if place in ready]:
                    try:
                        self._take(places[connection], connection)
                    except (EOFError, OSError):  # the rank sends no more
                        del places[connection]
                if not places or (last_look and not ready):
                    return
        except BaseException as problem:
            self._problem = problem

    def _take(self, rank: int, connection: "Connection[Any, Any]") -> None:
        content = io.BytesIO(connection.recv_bytes())
        message = torch.load(content, weights_only=False)  # from a process of our own
        if isinstance(message, Ending):
            self.endings[rank] = message
            return
        self.steps[rank] = message.step
        of_step = self._samples.setdefault(message.step, {})
        of_step[rank] = message
        if len(of_step) == len(self._pipes):
            del self._samples[message.step]
            self._on_sample([of_step[rank] for rank in sorted(of_step)])


class TorchrunRanks:
    """The ranks that torchrun has started; samples are gathered on rank 0 as they come.

    Between cases there is no process group, so that one process can compute alone.
    """

    def __init__(self, place: TorchrunRank, watchdog: float, backend: str) -> None:
        self.world = place.world_size
        self._rank = place.rank
        self._watchdog = timedelta(seconds=watchdog)
        self._device = None
        if backend == "nccl":
            self._device = torch.device("cuda", place.local_rank)
            torch.cuda.set_device(self._device)
        self._store, _, _ = next(dist.rendezvous("env://", timeout=PATIENCE))
        self._cases = 0

    def run(self, work: Work, on_sample: OnSample) -> dict[int, Ending]:
        """Run a case; `on_sample` is called on rank 0 only, and only that has all endings."""
        endings: dict[int, Ending] = {}
        if work.layout.one_process:
            if self._rank == 0:
                with suppress(Exception):  # it is in the ending
                    _run_alone(work, on_sample, endings, self._device)
            return endings
        self._meet()
        try:
            with suppress(Exception):  # it is in the ending
                run_rank(work, self._rank, self._sender(on_sample, endings), self._device)
        finally:
            dist.destroy_process_group()
        return endings

    def _meet(self) -> None:
        """Wait for all ranks, which may have computed alone for long; then make a group."""
        self._cases += 1
        store = dist.PrefixStore(f"samestep_stress_{self._cases}", self._store)
        store.set(f"here_{self._rank}", "")
        store.wait([f"here_{rank}" for rank in range(self.world)], PATIENCE)
        backend = "gloo" if self._device is None else "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backend, store=store, rank=self._rank, world_size=self.world, timeout=self._watchdog
        )

    def _sender(self, on_sample: OnSample, endings: dict[int, Ending]) -> Callable[[Message], None]:
        def send(message: Message) -> None:
            if isinstance(message, Ending) and message.error is not None:
                endings[self._rank] = message  # there may be nobody left to gather with
                return
            gathered = gather_on_first(message)
            if gathered is None:
                return
            if isinstance(message, Sample):
                on_sample(gathered)
            else:
                endings.update(enumerate(gathered))

        return send


def _run_alone(
    work: Work, on_sample: OnSample, endings: dict[int, Ending], device: torch.device | None
) -> None:
    def send(message: Message) -> None:
        if isinstance(message, Sample):
            on_sample([message])
        else:
            endings[0] = message

    run_rank(work, 0, send, device)
