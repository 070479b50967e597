"""Delays and mutants of streams, as far as they can be tried without a GPU."""

import re
from itertools import groupby
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from samestep.comm.diagnosis.flight import Flight
from samestep.comm.diagnosis.recorder import FlightRecorder
from samestep.lab.stress.command import Session
from samestep.lab.stress.delays import Delays, _Draws
from samestep.lab.stress.judge import CHECKS
from samestep.lab.stress.layouts import EVERY_LAYOUT
from samestep.lab.stress.mutants import STREAM_MUTANTS
from samestep.lab.stress.mutants.streams import NOT_WAITED
from samestep.lab.stress.options import Options
from samestep.lab.stress.scenarios import EVERY_SCENARIO
from samestep.lab.stress.sharded_training import new_training
from samestep.tooling.request import BadRequestError
from tests.limits import HANG
from tests.ranks import run_forked


def launched(rank, mutants):
    """The names of all operations that each mutant's case launches in four steps."""
    names = {}
    for mutant in mutants:
        scenario = EVERY_SCENARIO[mutant.scenario](0, mutant.world)
        with FlightRecorder(4) as recorder:
            own = names[mutant.name] = set()
            recorder.on_launch.append(lambda record, own=own: own.add(record.name))
            training = new_training(scenario, EVERY_LAYOUT[mutant.layout], rank)
            for step in range(4):
                training.step(step)
            training.parameters()
    return names


def test_every_operation_that_is_not_waited_for_is_launched():
    """Else the mutant changes nothing, and nobody sees that without a GPU."""
    cases = sorted((STREAM_MUTANTS[name] for name in NOT_WAITED), key=lambda each: each.world)
    for world, mutants in groupby(cases, key=lambda each: each.world):
        alike = list(mutants)
        names = run_forked(world, launched, alike, timeout=HANG)[0]
        for mutant in alike:
            pattern = NOT_WAITED[mutant.name][0]
            found = [name for name in names[mutant.name] if re.search(pattern, name)]
            assert found, (mutant.name, names[mutant.name])


def test_mutants_of_streams_name_what_exists_and_are_undone():
    before = Flight.wait
    for mutant in STREAM_MUTANTS.values():
        assert mutant.expected in CHECKS
        assert (mutant.device, bool(mutant.delays), bool(mutant.story)) == ("cuda", True, True)
        assert EVERY_LAYOUT[mutant.layout].reason_against(
            EVERY_SCENARIO[mutant.scenario], mutant.world
        ) is None  # fmt: skip
        with mutant.patch():
            pass
    assert Flight.wait is before


def test_only_the_named_operation_is_not_waited_for():
    waited = []
    work = SimpleNamespace(wait=lambda: waited.append(1))
    group = SimpleNamespace(handle=dist.group.WORLD, rank=0, members=(0,), size=1)
    with mock.patch("samestep.comm.diagnosis.flight._roll_call", return_value=None):
        flights = [
            Flight(name, group, lambda: work, on_host=False)
            for name in ("presence", "gather of bucket 0 (a, ...)")
        ]
        with STREAM_MUTANTS["presence_not_waited"].patch():
            flights[0].wait()
            assert waited == []
            flights[1].wait()
        assert waited == [1]
        flights[0].wait()
    assert waited == [1, 1]


def test_delays_depend_on_seed_and_rank_alone():
    def drawn(seed, rank, **how):
        delays = Delays(seed=seed, **how)
        with (
            mock.patch.object(dist, "is_initialized", return_value=True),
            mock.patch.object(dist, "get_world_size", return_value=4),
            mock.patch.object(dist, "get_rank", return_value=rank),
        ):
            draws = _Draws(delays)
        return [draws.ms(where) for _ in range(100) for where in delays.where], draws

    first, _ = drawn(1, 2)
    assert first == drawn(1, 2)[0] != drawn(2, 2)[0]
    assert first != drawn(1, 3)[0]
    assert 0 < sum(map(bool, first)) < len(first)
    assert max(first) <= Delays().most_ms
    always, _ = drawn(1, 2, where=("copies",), often=1.0)
    assert min(always) >= Delays().most_ms / 2
    assert sum(drawn(5, rank)[1]._late_host for rank in range(4)) == 1


def test_collectives_of_a_host_are_launched_as_they_are():
    """The patch is there, gives on what it was given, and is gone afterwards."""
    before = dist.all_reduce
    values = torch.ones(3)
    with Delays(often=1.0).applied():
        assert dist.all_reduce is not before
        with pytest.raises(ValueError, match="process group"):
            dist.all_reduce(values)
    assert dist.all_reduce is before


def test_delays_want_a_gpu(no_torchrun, tmp_path):
    with pytest.raises(BadRequestError, match=r"--delays are for streams of GPUs.*on cpu"):
        Session(Options(delays=True, out=tmp_path), None, mock.Mock())
    for other in ({"mutants": True}, {"faults": True}):
        with pytest.raises(BadRequestError, match="--delays are for scenarios"):
            Options(delays=True, **other).check()
