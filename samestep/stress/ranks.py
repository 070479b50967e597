"""Running cases on ranks: forked here, or (see `torchrun_ranks`) those of torchrun."""

import time
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Protocol, TypeVar

import torch

from samestep.launch import RanksFailed, run_forked
from samestep.stress.mailbox import Mailbox, Note, OnEnd, OnSample
from samestep.stress.rank import Work, run_rank
from samestep.stress.sample import Ending

# What launch says of ranks that a collective has stopped. Where sizes do not match, gloo aborts,
# or writes where it should not.
CRASHED = ("died of SIGABRT", "died of SIGSEGV")
WITHOUT_ENDING = ("had not finished", "was still running", *CRASHED)


Result = TypeVar("Result")


class Ranks(Protocol):
    """Something that runs cases on all ranks, and tells how each rank ended in each."""

    def run(self, works: Sequence[Work], on_sample: OnSample, on_end: OnEnd) -> None:
        """Run one after the other; the functions are called in that order, in this process."""
        ...

    def aside(self, compute: Callable[[torch.device | None], Result]) -> Result:
        """What one process computes beside the ranks, given the device of these."""
        ...


class ForkedRanks:
    """Processes of this machine. They do all they are given, unless a case fails: then new ones."""

    def __init__(self, world: int, watchdog: float, device: str = "cpu") -> None:
        self.world = world
        self.watchdog = watchdog
        self._on_gpu = device == "cuda"

    def run(self, works: Sequence[Work], on_sample: OnSample, on_end: OnEnd) -> None:
        """Run cases; whatever ranks do, they are gone afterwards, and no case is left out."""
        for alone, alike in groupby(works, key=lambda work: work.layout.one_process):
            batch = list(alike)
            while batch:
                ended = self._run_batch(batch, 1 if alone else self.world, on_sample, on_end)
                batch = batch[ended:]

    def aside(self, compute: Callable[[torch.device | None], Result]) -> Result:
        """Here, or in a process of its own: one that used autograd cannot fork ranks with a GPU."""
        if not self._on_gpu:
            return compute(None)
        found: Result = run_forked(1, lambda _: compute(torch.device("cuda", 0)), timeout=600.0)[0]
        return found

    def _run_batch(
        self, works: Sequence[Work], world: int, on_sample: OnSample, on_end: OnEnd
    ) -> int:
        """How many have ended, one way or the other: all, or those up to the first that failed."""
        start = time.monotonic()
        with Mailbox(world, on_sample, on_end) as mailbox:

            def fn(rank: int) -> None:
                device = shared_gpu(rank) if self._on_gpu else None
                for place, work in enumerate(works):
                    mailbox.notes[rank].write("")
                    send = mailbox.sender(rank, place)
                    run_rank(work, rank, send, device, mailbox.notes[rank].write)

            def limit() -> float:
                if mailbox.problem is not None:
                    return 0.0  # nobody would hear of what they find
                steps = works[min(mailbox.ended, len(works) - 1)].steps
                since = mailbox.since - start
                return since + max(120.0, steps * world * 0.2) + 10 * self.watchdog

            reports: dict[int, str] = {}
            try:
                run_forked(world, fn, timeout=limit, collective_timeout=self.watchdog)
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


def shared_gpu(rank: int) -> torch.device:
    """A GPU for this process, which others may use as well."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _without_ending(report: str, step: int, note: Note, rank: int) -> Ending:
    """What is known of a rank that could not say how it ended."""
    kind = "hang" if report.startswith(WITHOUT_ENDING) else "error"
    if report.startswith(CRASHED):
        report = f"died in a collective that other ranks did not launch alike\n{report}"
    return Ending(step, report, kind, {rank: note.read()})
