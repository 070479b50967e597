"""Do all ranks have the same, and which of them does not?"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.comm.collectives import from_first
from samestep.comm.groups import RankGroup
from samestep.comm.integrity.agreement import (
    RanksDisagreeError,
    differing,
    require_same_lines,
)
from samestep.comm.integrity.checksum import checksum
from tests.inside.comm.test_collectives import whole_group
from tests.ranks import run_forked, run_threaded

CPU = torch.device("cpu")


def message_of(lines):
    """What `require_same_lines` raises here, if it does."""
    try:
        require_same_lines("plan", lines, whole_group(), CPU)
    except RanksDisagreeError as error:
        return str(error)
    return None


# --- lines -----------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [run_threaded, run_forked])
def test_the_first_difference_is_named_on_every_rank(run):
    texts = [["same", "left", "end"], ["same", "left", "end"], ["same", "right", "END"]]
    messages = run(3, lambda rank: message_of(texts[rank]))
    assert len(set(messages)) == 1
    for part in ("the plan differs", "rank 0 has 'left'", "rank 2 has 'right'"):
        assert part in messages[0]
    assert "END" not in messages[0]


@pytest.mark.parametrize(
    ("texts", "parts"),
    [
        ([["a"], ["a", "b"]], ("rank 0 has '(nothing)'", "rank 1 has 'b'")),
        ([["a", "ü" * 50], ["a"]], ("rank 0 has 'ü", "rank 1 has '(nothing)'")),
        ([["a"], ["a"], ["a"], ["b"]], ("rank 0 has 'a'", "rank 3 has 'b'")),
        ([["x"], ["a"], ["a"], ["a"]], ("rank 0 has 'x'", "rank 1 has 'a'")),
        ([["a", "b"], ["b", "a"]], ("rank 0 has 'a'", "rank 1 has 'b'")),
    ],
)
def test_lines_of_different_number_and_length(texts, parts):
    messages = run_threaded(len(texts), lambda rank: message_of(texts[rank]))
    assert all(part in message for message in messages for part in parts)


def test_no_lines_against_some_lines():
    messages = run_threaded(2, lambda rank: message_of([["a"], []][rank]))
    assert all("rank 0 has 'a'" in message for message in messages)


@pytest.mark.parametrize("world", [1, 2, 5])
def test_equal_lines_pass(world):
    assert run_threaded(world, lambda rank: message_of(["a", "b"])) == [None] * world


# --- checksums -------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def values(dtype, size=64):
    return torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_checksum_sees_every_flipped_bit(dtype):
    base = values(dtype, 5)
    bits = 8 * dtype.itemsize
    integers = {16: torch.int16, 32: torch.int32, 64: torch.int64}[bits]
    sums = {int(checksum(base))}
    for place in range(5):
        for bit in range(bits):
            other = base.clone()
            mask = 1 << bit if bit < bits - 1 else -(1 << bit)
            other.view(integers)[place] ^= mask
            sums.add(int(checksum(other)))
    assert len(sums) == 1 + 5 * bits


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_checksum_sees_swapped_elements(dtype):
    base = values(dtype)
    for first in range(0, 64, 7):
        for second in range(first + 1, 64):
            other = base.clone()
            other[first], other[second] = base[second], base[first]
            assert base[first] == base[second] or checksum(other) != checksum(base)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_checksum_sees_round_values_swapped_over_a_distance(dtype):
    """Their bits differ in high places only."""
    for distance in (1, 2, 1024, 4096):
        base = torch.zeros(distance + 1, dtype=dtype)
        for one, two in ((1.0, -1.0), (1.0, 2.0), (0.0, 1.0), (0.0, -0.0)):
            base[0], base[-1] = one, two
            other = base.flip(0)
            assert checksum(other) != checksum(base), (distance, one, two)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_checksum_sees_signs(dtype):
    zeros = torch.zeros(6, dtype=dtype)
    assert checksum(-zeros[:1]) != checksum(zeros[:1])
    assert checksum(-zeros) != checksum(zeros)
    base = values(dtype, 6)
    assert checksum(-base) != checksum(base)
    two = base.clone()
    two[:2] *= -1
    assert checksum(two) != checksum(base)


def test_a_checksum_sees_the_end_of_a_long_tensor():
    base = torch.zeros((1 << 20) + 3)
    sums = [int(checksum(base))]
    for place in (0, (1 << 20) - 1, 1 << 20, (1 << 20) + 2):
        other = base.clone()
        other[place] = 1
        sums.append(int(checksum(other)))
    assert len(set(sums)) == 5


@given(st.lists(st.floats(width=32), max_size=8), st.lists(st.floats(width=32), max_size=8))
def test_a_checksum_is_of_the_bits(left, right):
    one, two = torch.tensor(left), torch.tensor(right)
    if len(left) == len(right):
        same = torch.equal(one.view(torch.int32), two.view(torch.int32))
        assert (checksum(one) == checksum(two)) == same
    assert checksum(one) == checksum(one.clone())


def test_a_checksum_does_not_depend_on_strides_or_gradients():
    base = torch.nn.Parameter(torch.randn(5, 7))
    assert checksum(base) == checksum(base.detach().t().contiguous().t())
    assert checksum(base) == checksum(base.detach().view(-1))
    assert checksum(base).shape == ()
    assert checksum(torch.tensor(3.0)) == checksum(torch.tensor([3.0]))
    assert checksum(torch.zeros(0, 3)) == checksum(torch.zeros(0))


# --- differences -----------------------------------------------------------------------------


@given(st.integers(2, 5), st.lists(st.integers(0, 2), min_size=1, max_size=8))
def test_differing_finds_exactly_the_different_ones(world, marks):
    """Mark 0: the same everywhere; 1: the last rank differs; 2: everyone does."""

    def job(rank):
        numbers = [[7, int(rank == world - 1), -rank][mark] for mark in marks]
        return differing(torch.tensor(numbers), whole_group())

    expected = [place for place, mark in enumerate(marks) if mark]
    assert run_threaded(world, job) == [expected] * world


def test_differing_compares_all_64_bits():
    def job(rank):
        low, high = -(1 << 63), (1 << 63) - 1
        numbers = torch.tensor([low, high, (high, low)[rank], high - rank])
        return differing(numbers, whole_group()), numbers.tolist()

    for rank, (found, kept) in enumerate(run_forked(2, job)):
        assert found == [2, 3]
        assert kept[3] == (1 << 63) - 1 - rank


def test_broadcast_gives_the_values_of_the_first_rank():
    def job(rank):
        tensor = torch.full((3,), float(rank) + 1)
        from_first("broadcast", tensor, whole_group()).wait()
        return tensor.tolist()

    assert run_threaded(3, job) == [[1.0, 1.0, 1.0]] * 3


def test_one_rank_agrees_with_itself_without_communication():
    group = RankGroup(None, 0, 1, (0,))
    require_same_lines("plan", ["a"], group, CPU)
    assert differing(torch.tensor([1, 2]), group) == []
    tensor = torch.ones(2)
    from_first("broadcast", tensor, group).wait()
    assert tensor.tolist() == [1.0, 1.0]
