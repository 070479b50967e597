"""Two collectives in a row on a GPU, the second of what the first gives, beside other work."""

import pytest
import torch

from samestep.comm.collectives import Chained, Pending
from tests.gpu import needs_gpu

pytestmark = [needs_gpu, pytest.mark.own_process]

LONG = 200_000_000  # cycles: about a tenth of a second
SIZE = 1 << 20
ROUNDS = 6


class OnStream:
    """A collective as NCCL has them: on a stream of its own, which others are told to wait for."""

    def __init__(self, stream, compute):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LONG)
            compute()
            self.over = torch.cuda.Event()
            self.over.record()

    def wait(self):
        self.over.wait()


def collective(stream, value, factor):
    """Gives `factor` times the value, in memory of the stream that launches it."""
    result = torch.empty_like(value)
    flight = OnStream(stream, lambda: torch.mul(value, factor, out=result))
    return Pending(flight, (value, result), lambda: result), flight


def garbage():
    """Freed memory is used by somebody else at once."""
    for _ in range(8):
        torch.full((SIZE,), torch.nan, device="cuda")


def warm_up():
    """The first launch of a kernel may wait for all that is on its way."""
    garbage()
    value = torch.full((SIZE,), 2.0, device="cuda")
    torch.mul(value, 3, out=torch.empty_like(value))
    torch.equal(value + 0.0, value)
    torch.cuda._sleep(1)
    torch.cuda.synchronize()


def test_the_second_follows_beside_what_is_computed():
    warm_up()
    inside, across, beside = (torch.cuda.Stream() for _ in range(3))
    flights, sums = [], []
    for number in range(ROUNDS):
        value = torch.full((SIZE,), float(number + 1), device="cuda")
        first, flight = collective(inside, value, 3)
        del value

        def then(summed):
            second, last = collective(across, summed, 5)
            flights.append(last)
            return second

        chained = Chained(first, then, beside)
        del first
        garbage()
        computed = torch.cuda.Event()
        computed.record()
        computed.synchronize()  # what is computed did not wait for either leg
        assert not flight.over.query()
        sums.append((number, chained))
        if number % 2:  # two are on their way at a time
            for at, waiting in sums:
                found = waiting.wait() + 0.0
                garbage()
                assert torch.equal(found, torch.full_like(found, 15.0 * (at + 1)))
            sums.clear()
    assert len(flights) == ROUNDS
