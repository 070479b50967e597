import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.counting_group import CountingGroup
from tests.memory import peak_bytes
from tests.ranks import run_forked

MB = 2**20


def megabytes(count):
    return torch.empty(count * MB, dtype=torch.uint8)


def test_the_peak_is_of_what_lives_at_the_same_time():
    with peak_bytes() as peak:
        a = megabytes(1)
        del a
        b = megabytes(2)
    assert (peak.value, peak.live, peak.total) == (2 * MB, 2 * MB, 3 * MB)
    with peak_bytes() as peak:
        c = megabytes(1)
        d = megabytes(3)
        del c
        e = megabytes(2)
        del d
    assert (peak.value, peak.blocks, peak.live) == (5 * MB, [3 * MB, 2 * MB], 2 * MB)
    del b, e


def test_an_empty_block_has_no_peak():
    with peak_bytes() as peak:
        pass
    assert (peak.value, peak.live, peak.blocks) == (0, 0, [])


def test_memory_from_before_does_not_count():
    with peak_bytes():
        known = megabytes(4)  # its release will be reported with its size
    unknown = megabytes(4)
    with peak_bytes() as peak:
        del known, unknown
        a = megabytes(1)
    assert (peak.value, peak.live) == (MB, MB)
    del a


def test_views_and_work_in_place_add_nothing():
    x, y = torch.ones(2, MB)
    with peak_bytes() as peak:
        x.add_(y).mul_(y)
        x.copy_(y)
        x.view(-1, 2).t()[0].zero_()
        torch._foreach_add_([x, y], [y, x])
    assert peak.value == 0


def test_temporaries_count():
    x = torch.ones(MB)
    with peak_bytes() as peak:
        ((x + x) * x).add_(x)
    assert (peak.value, peak.live) == (8 * MB, 0)
    assert peak.blocks == [4 * MB] * 2


def test_what_an_operation_needs_inside_counts():
    x = torch.rand(MB)
    with peak_bytes() as peak:
        torch.kthvalue(x, 1)  # two numbers; it works on a copy and on its indices
    assert peak.value >= 12 * MB
    assert peak.live == 0


def test_an_exception_leaves_the_tool_usable():
    with pytest.raises(ValueError, match="inside"), peak_bytes():
        raise ValueError("inside")
    with peak_bytes() as peak:
        megabytes(1)
    assert peak.value == MB


class Stack(nn.Module):
    """Layers of a megabyte whose activations are small."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def backward_peak(layers, hook):
    model = Stack(layers)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(hook)
    loss = model(torch.ones(1, 512))
    with peak_bytes() as peak:
        loss.backward()
    return peak


@pytest.mark.parametrize("layers", [2, 8])
def test_gradients_count_for_as_long_as_they_are_kept(layers):
    small = 64 * 1024  # activations of 2 kB

    kept = backward_peak(layers, lambda param: None)
    assert layers * MB <= kept.value < layers * MB + small
    assert kept.live == layers * MB

    freed = backward_peak(layers, lambda param: setattr(param, "grad", None))
    assert MB <= freed.value < MB + small
    assert freed.live == 0

    copies = []
    copied = backward_peak(layers, lambda param: copies.append(param.grad.clone()))
    assert copied.live == 2 * layers * MB
    assert copied.blocks[: 2 * layers] == [MB] * (2 * layers)


def test_ranks_measure_exactly_around_collectives():
    def measure(rank):
        CountingGroup.install()
        peaks = []
        for _ in range(5):
            with peak_bytes() as peak:
                for _ in range(10):
                    buffer = torch.ones(MB)
                    segment = buffer.new_empty(MB // 2)
                    work = dist.reduce_scatter(segment, list(buffer.chunk(2)), async_op=True)
                    del buffer
                    work.wait()
                    del work, segment
                    dist.all_reduce(torch.ones(MB))
            peaks.append((peak.value, peak.live))
        return peaks

    assert run_forked(2, measure) == [[(6 * MB, 0)] * 5] * 2
