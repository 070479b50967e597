"""Ranks that torchrun has started; those that are forked here are tested in test_ranks.py."""

import pytest

from samestep.launch import RanksFailed, forked, run_forked, torchrun_rank


@pytest.fixture
def environment(monkeypatch):
    def set_to(**values: str) -> None:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return set_to


def test_place_under_torchrun(environment):
    environment(RANK="5", WORLD_SIZE="8", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4")
    assert torchrun_rank() == (5, 8, 1, 4)
    environment(RANK="1", WORLD_SIZE="2")  # set by hand: one machine
    assert torchrun_rank() == (1, 2, 1, 2)


@pytest.mark.parametrize("values", [{}, {"RANK": "0"}, {"WORLD_SIZE": "2"}])
def test_no_torchrun(environment, values):
    environment(**values)
    assert torchrun_rank() is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"RANK": "first", "WORLD_SIZE": "2"}, "RANK='first' in the environment"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK='-1' in the environment"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "WORLD_SIZE='' in the environment"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 .* not below WORLD_SIZE=2"),
    ],
)
def test_an_environment_that_makes_no_sense(environment, values, message):
    environment(**values)
    with pytest.raises(ValueError, match=message):
        torchrun_rank()


def test_forking_is_refused_where_ranks_could_outlive_their_parent(monkeypatch):
    monkeypatch.setattr(forked, "_libc", None)  # as on other systems than Linux
    with pytest.raises(RuntimeError, match="on Linux only; start them with torchrun") as caught:
        run_forked(2, lambda rank: rank)
    assert not isinstance(caught.value, RanksFailed)
