"""Running cases on the devices of one XLA program, each of which stands for a rank."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from samestep.stress.rank import Ending, Message, Sample, Work, run_rank
from samestep.stress.ranks import ForkedRanks, Mailbox, OnEnd, OnSample
from samestep.xla import runtime

COMPILES = 1800.0  # seconds: every kind of step is compiled once, the slowest in a minute


class XlaDevices(ForkedRanks):
    """A process for every case, so that none finds the programs of another one compiled."""

    def __init__(self, world: int, watchdog: float) -> None:
        super().__init__(world, watchdog)
        self.least_limit, self.processes = COMPILES, 1

    def run(self, works: Sequence[Work], on_sample: OnSample, on_end: OnEnd) -> None:
        for work in works:
            self._run_batch([work], self.world, on_sample, on_end)

    def _take_part(self, rank: int, works: Sequence[Work], mailbox: Mailbox) -> None:
        device = runtime.start(self.world)
        for place, work in enumerate(works):
            senders = [mailbox.sender(number, place) for number in range(self.world)]
            run_rank(work, rank, partial(_send_all, senders), device)


def _send_all(senders: Sequence[Callable[[Message], None]], message: Message) -> None:
    """As if every device had told of itself."""
    for place, send in enumerate(senders):
        send(message if isinstance(message, Ending) else _of_device(message, place))


def _of_device(sample: Sample, place: int) -> Sample:
    """What one device sees, of tensors (devices, ...)."""

    def own(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: tensor[place].clone() for key, tensor in tensors.items()}

    state = {name: own(entries) for name, entries in sample.state.items()}
    return replace(sample, params=own(sample.params), state=state)
