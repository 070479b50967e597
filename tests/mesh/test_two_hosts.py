"""Two hosts of one machine: the same bits as on one, and a clear end when one is cut off."""

import json

import pytest

from benchmarks.namespaces import refused
from benchmarks.two_hosts import Ended, Options, clear_end, main, same_run
from tests.soak import SOAK


@pytest.mark.skipif(not SOAK, reason="takes minutes: make soak runs it")
def test_two_hosts(tmp_path):
    reason = refused()
    if reason is not None:
        pytest.skip(f"there can be no hosts of our own here: {reason}")
    assert main(Options(layers=2, steps=3, out=tmp_path)) == 0
    receipt = json.loads((tmp_path / "receipt.json").read_text())
    assert receipt["same_bits_as_on_one_host"]
    assert len(set(receipt["hosts"])) == 2
    assert all("not answer" in error for error in receipt["cut"]["errors"].values())


def told(rank, **more):
    host = "a" if rank < 2 else "b"
    return {"rank": rank, "host": host, "losses": [1.0], "checksum": [5], "groups": [], **more}


def ended(changes=(), statuses=(0, 0), output=("", "")):
    of_ranks = {rank: told(rank) for rank in range(4)}
    for rank, change in dict(changes).items():
        of_ranks[rank] |= change
    return Ended(list(statuses), of_ranks, list(output), 1.0)


@pytest.mark.parametrize(
    ("two", "problem"),
    [
        (ended(), None),
        (ended({3: {"losses": [1.0000001]}}), "rank 3: losses differ"),
        (ended({0: {"checksum": [6]}}), "rank 0: checksum differ"),
        (ended(statuses=(0, 1)), "two hosts: 4 of 4 ranks told, [0, 1]"),
        (ended({2: {"host": "a"}, 3: {"host": "a"}}), "the two hosts have one name"),
    ],
)
def test_runs_that_are_not_the_same(two, problem):
    assert same_run(ended(), two, 4) == ([] if problem is None else [problem])


def test_ends_that_are_not_clear():
    options = Options(ranks_per_host=2, timeout=20.0, grace=10.0)
    failed = {rank: {"error": "x", "ended": 120.0} for rank in range(4)}
    assert clear_end(options, ended(failed), 100.0) == []
    late = ended(failed | {1: {"error": "x", "ended": 131.0}}, output=("", "KILLED"))
    late.told[2].pop("error")
    del late.told[3]
    assert clear_end(options, late, 100.0) == [
        "rank 3 did not tell how it ended",
        "rank 1 ended after 31.0 s",
        "rank 2 did not fail",
        "torchrun did not end by itself",
    ]
