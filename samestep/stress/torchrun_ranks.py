"""Running cases on the ranks that torchrun has started."""

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from samestep.comm.messages import gather_on_first
from samestep.launch import TorchrunRank
from samestep.stress.mailbox import OnEnd, OnSample
from samestep.stress.rank import Message, Work, run_rank
from samestep.stress.ranks import Result, shared_gpu
from samestep.stress.sample import Ending, Sample

START = timedelta(minutes=5)  # from the first rank's start to the last one's
POLL = 0.05


class TorchrunRanks:
    """The ranks that torchrun has started; samples are gathered on rank 0 as they come.

    Between cases there is no process group, so that one process can compute alone.
    """

    def __init__(
        self, place: TorchrunRank, watchdog: float, backend: str, device: str = "cpu"
    ) -> None:
        self.world = place.world_size
        self._rank = place.rank
        self._watchdog = timedelta(seconds=watchdog)
        self._backend = "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo"
        self._device = shared_gpu(place.local_rank) if device == "cuda" else None
        self._store, _, _ = next(dist.rendezvous("env://", timeout=START))
        self._pulse = Pulse(self._store, place.rank, watchdog)
        self._cases = 0

    def run(self, works: Sequence[Work], on_sample: OnSample, on_end: OnEnd) -> None:
        """Run cases up to the first that fails; only rank 0 hears of all samples and endings."""
        for work in works:
            endings = self._run_one(work, on_sample)
            on_end(endings)
            if any(ending.error is not None for ending in endings.values()):
                return

    def aside(self, compute: Callable[[torch.device | None], Result]) -> Result:
        """Here."""
        return compute(self._device)

    def _run_one(self, work: Work, on_sample: OnSample) -> dict[int, Ending]:
        endings: dict[int, Ending] = {}
        if work.layout.one_process:
            if self._rank == 0:
                with suppress(Exception):  # it is in the ending
                    _run_alone(work, on_sample, endings, self._device)
            return endings
        try:
            self._meet()
        except Exception as error:
            return {self._rank: Ending(0, str(error).split("\n")[0], "hang")}
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
        self._pulse.wait_for(store, [f"here_{rank}" for rank in range(self.world)])
        dist.init_process_group(
            self._backend,
            store=store,
            rank=self._rank,
            world_size=self.world,
            timeout=self._watchdog,
        )

    def _sender(self, on_sample: OnSample, endings: dict[int, Ending]) -> Callable[[Message], None]:
        def send(message: Message) -> None:
            if isinstance(message, Ending) and message.error is not None:
                endings[self._rank] = message  # there may be nobody left to gather with
                return
            try:
                gathered = gather_on_first(message)
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


class Pulse:
    """Every rank's sign of life, so that one that computes for long is told from one that is gone.

    A rank is gone if it has given none for `patience` seconds.
    """

    def __init__(self, store: dist.Store, rank: int, patience: float) -> None:
        self._store, self._rank, self._patience = store, rank, patience
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, args=(_clone(store),), daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # a thread inside the store would not survive Python's end

    def _beat(self, store: dist.Store) -> None:
        with suppress(RuntimeError):  # the store's host has ended, and so will this process
            while not self._stopped.wait(min(1.0, self._patience / 4)):
                store.add(f"samestep_pulse_{self._rank}", 1)

    def stop(self) -> None:
        """Give no more signs."""
        self._stopped.set()
        self._thread.join(1.0)

    def wait_for(self, store: dist.Store, keys: Sequence[str]) -> None:
        """Wait until every rank has set its key; raise as soon as one that has not is gone."""
        heard = {rank: (0, time.monotonic()) for rank in range(len(keys))}
        while missing := [rank for rank, key in enumerate(keys) if not store.check([key])]:
            for rank in missing:
                beats, since = self._store.add(f"samestep_pulse_{rank}", 0), heard[rank][1]
                if beats != heard[rank][0]:
                    heard[rank] = beats, time.monotonic()
                elif time.monotonic() - since > self._patience:
                    raise RuntimeError(
                        f"rank {rank} was not heard of for {self._patience:g} s between two cases"
                    )
            time.sleep(POLL)


def _clone(store: dist.Store) -> dist.Store:
    """A connection of its own: a thread that waits for the store holds up no other."""
    clone: dist.Store = store.clone()  # type: ignore[attr-defined]
    return clone


def _run_alone(
    work: Work,
    on_sample: OnSample,
    endings: dict[int, Ending],
    device: torch.device | None,
) -> None:
    def send(message: Message) -> None:
        if isinstance(message, Sample):
            on_sample([message])
        else:
            endings[0] = message

    run_rank(work, 0, send, device)
