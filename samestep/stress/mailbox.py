"""What forked ranks tell the process that forked them."""

import io
import mmap
import multiprocessing.connection
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from samestep.stress.rank import Message
from samestep.stress.sample import Ending, Sample

OnSample = Callable[[Sequence[Sample]], None]  # of all ranks, after the same step
OnEnd = Callable[[dict[int, Ending]], None]

LOOK = 0.1  # seconds; the end of a rank is heard of sooner


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


class Mailbox:
    """One pipe per rank, emptied by a thread, so that no rank ever waits for this process.

    `on_sample` gets the samples of all ranks after the same step, `on_end` the endings of all ranks
    if none has an error: work after work, called in that thread.
    """

    def __init__(
        self,
        world: int,
        on_sample: OnSample,
        on_end: OnEnd,
    ) -> None:
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
        """What the rank sends with while it does the work at that place of its list."""

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
