"""Problems of a GPU that presence tells a step later, and where a difference is looked for."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import pytest
import torch

from samestep.comm.groups import RankGroup, registry
from samestep.comm.integrity.agreement import RanksDisagreeError
from samestep.comm.integrity.checksum import text_checksum
from samestep.comm.presence import (
    Call,
    PresenceAgreement,
    RankFailure,
    RankProblemError,
    _codes_of,
    _Said,
)
from samestep.comm.replicated_votes import ReplicatedHere
from samestep.plan.replicated_gradients import ReplicatedAlong, line_through, replicated_along
from tests.ranks import run_forked

STEP = Call("step()")


NO_DROPS = (0, 7)  # no rank dropped a gradient, and 6 is the last that did not


@pytest.fixture
def read_later():
    """An agreement of ranks 4 and 6 on a GPU, to which has come what they said a step before."""

    class Passed:
        def query(self):
            return True

    def agreement(votes, codes, intents=(STEP, STEP)):
        along = replicated_along((2,), [[0], [0]])
        ranks = RankGroup(None, 0, 2, (4, 6))
        names, device = ["first", "second"], torch.device("cpu")
        found = PresenceAgreement(names, [ranks], device, ReplicatedHere(along, (0,), ranks, ""))
        said = [along[0].votes(of_rank, 0, rank) for rank, of_rank in enumerate(votes)]
        digests = [max(each.digest for each in intents), max(~each.digest for each in intents)]
        told = torch.cat([torch.maximum(*said), torch.tensor([*codes, *NO_DROPS, *digests])])
        found._on_their_way.append(_Said(told, Passed(), intents[0], None))
        return found

    return agreement


def test_a_gpu_tells_in_a_later_step(read_later):
    """Before anything else is sent."""
    agreement = read_later([[True, False], [True, True]], [7, 0])
    with pytest.raises(RankProblemError, match=r"rank 6 .* 'second', and rank 4.* checkpoint"):
        agreement.agree([1, 1], None, None, whole=lambda param, axis: True)


def test_a_gpu_tells_of_hyperparameters_in_a_later_step(read_later):
    class Rate(NamedTuple):
        lr: float

        @property
        def digest(self):
            return text_checksum(str(self.lr))

        def lines(self, on_device):
            return [f"lr of param_groups[0] = {self.lr}"]

    agreement = read_later([[True, True]] * 2, [7, 0], [Rate(0.1), Rate(0.2)])
    with pytest.raises(RanksDisagreeError, match=r"rank 4 .* checkpoint.*param_groups\[0\] = 0.1"):
        agreement.agree([1, 1], None, None, whole=lambda param, axis: True)


def test_numbers_that_only_a_device_knows():
    """Compared where they are: what the host knows is the same."""

    class Rates(NamedTuple):
        on_device: list
        digest: int = 5

        def lines(self, on_device):
            assert on_device == [float(number) for number in self.on_device]
            return [f"lr of param_groups[{n}] = {lr}" for n, lr in enumerate(on_device)]

    def job(rank):
        agreement = PresenceAgreement(["only"], [registry.of()], torch.device("cpu"))
        alike = Rates([torch.tensor(0.1), torch.tensor(0.2, dtype=torch.float64)])
        assert agreement.agree([1], None, alike) == [True]
        swapped = Rates(list(reversed(alike.on_device))) if rank else alike
        one_bit = Rates([torch.tensor(0.1), torch.tensor(0.2 + rank * 2**-55, dtype=torch.float64)])
        found = []
        for differing in swapped, one_bit:
            with pytest.raises(RanksDisagreeError) as caught:
                agreement.agree([1], None, differing)
            found.append(str(caught.value))
        return found

    for swapped, one_bit in run_forked(2, job):
        assert "lr of param_groups[0] is 0.10000000149011612 on rank 0 and 0.2 on rank 1" in swapped
        assert "lr of param_groups[1] is 0.2 on rank 0 and 0.20000000000000004 on rank 1" in one_bit


def test_a_gpu_tells_of_swapped_parameters_in_a_later_step(read_later):
    """The rank that has swapped them has known at once, from the same numbers."""
    error = RuntimeError("'second' was replaced")
    other, code = _codes_of(RankFailure(error, swapped=("second",)), 6, ["first", "second"])
    assert other == 0
    mine = _codes_of(None, 4)
    agreement = read_later([[True, True]] * 2, [max(other, mine[0]), max(code, mine[1]) << 1])
    with pytest.raises(
        RankProblemError, match=r"'second' was replaced .* rank 6 and not on rank 4"
    ):
        agreement.agree([1, 1], None, None, whole=lambda param, axis: True)


@pytest.mark.parametrize("ranks", [2, 3, 4096])
def test_any_difference_is_found_and_named(ranks):
    """Of many parameters, in every line, whoever it is; and no other is."""
    params = tuple(range(7, 7 + 150))
    (along,) = replicated_along((ranks,), [[]] * 7 + [[0]] * 150)
    assert along == ReplicatedAlong(0, params, 1, ranks)
    torch.manual_seed(0)
    whole = torch.randint(2, (150,)).bool()
    said = along.votes(whole.tolist(), 0, ranks - 1)
    assert len(said) == along.elements
    assert along.difference(torch.maximum(said, along.votes(whole.tolist(), 0, 0))) is None
    for param in 0, 1, 48, 49, 50, 61, 62, 149:
        other = whole.clone()
        other[param] = ~other[param]
        other[param + 40 :] = False  # the first is told
        found = along.difference(torch.maximum(said, along.votes(other.tolist(), 0, 0)))
        has, lacks = (ranks - 1, 0) if whole[param] else (0, ranks - 1)
        assert found == (7 + param, has, lacks)


def test_lines_do_not_mix():
    """Each of the lines of a (2, 3, 2) mesh, of which there are two copies, has its own numbers."""
    sizes, copies = (2, 3, 2), 2
    found = replicated_along(sizes, [[0, 1], [1], []], copies)
    assert [(each.axis, each.params, each.lines) for each in found] == [
        (0, (0,), 12),
        (1, (0, 1), 8),
    ]
    for each in found:
        places = list(product(range(copies), *map(range, sizes)))
        lines = [line_through(sizes, at, each.axis, copy) for copy, *at in places]
        assert sorted(lines) == sorted(list(range(each.lines)) * sizes[each.axis])
        # Every line says something else, and all of its ranks the same.
        votes = [
            each.votes([bool(line >> n & 1) for n in range(len(each.params))], line, place)
            for place, line in enumerate(lines)
        ]
        assert each.difference(torch.stack(votes).amax(0)) is None
        odd = each.votes([True] * len(each.params), lines[5], 5)
        all_but = torch.stack([*votes[:5], odd, *votes[6:]]).amax(0)
        expected = None if lines[5] % 2 ** len(each.params) == 2 ** len(each.params) - 1 else 5
        difference = each.difference(all_but)
        assert (difference and difference.has) == expected
