"""What the Muon schedules' benchmark makes of traces, and the modelled link that made them."""

import copy
import json
from dataclasses import asdict

import pytest

from benchmarks.modelled_link import ModelledLink, Speed, Transfer
from benchmarks.muon_schedules import (
    DRAWN,
    EXPOSED,
    IDLE,
    RESULT,
    Case,
    Options,
    Results,
    computed,
    exposed,
    main,
    measure,
    of_mark,
    of_transfer,
    table,
    verdicts,
    waits_apart,
)
from benchmarks.timeline import Trace

PIPELINED = Case("parallel", True, "balanced")


def transfer(name, ready, seconds, *waits):
    return Transfer(
        0,
        "all_to_all",
        8.0,
        seconds,
        0.0,
        name=name,
        ready=ready,
        start=ready,
        end=ready + seconds,
        waits=tuple(waits),
    )


def a_trace(late=0.0):
    """A rank that waits for others from 2 to 3, and for the link from 3 to 4 and from 6 to 7."""
    return Trace(
        [("Agree 0", 0.0, 1.0), ("Transform 0.0", 1.0, 5.0), ("Apply 0.0", 5.0, 8.0 + late)],
        [
            transfer("presence", 0.2, 0.1, (0.2, 0.3)),
            transfer("collection of chunk 0", 3.0, 1.0, (2.0, 4.0)),
            transfer("return of chunk 0", 5.5, 1.5, (6.0, 7.0)),
        ],
    )


def test_waiting_for_the_link_is_exposed_and_waiting_for_ranks_is_idle():
    step = measure([a_trace(), a_trace(late=1.0)])
    assert step.whole == 9.0
    assert step.exposed == step.most_exposed == 2.0
    assert step.idle == 1.0
    assert step.busy == step.ends == 2.5
    assert computed(a_trace()) == pytest.approx(8.0 - 3.1)
    assert exposed(a_trace()) == pytest.approx(2.1)  # with that of presence


def test_operations_are_cut_where_they_wait():
    cut = waits_apart(a_trace())
    assert cut.marks[3:] == [
        ("Transform 0.0", 1.0, 2.0),
        (IDLE, 2.0, 3.0),
        (EXPOSED, 3.0, 4.0),
        ("Transform 0.0", 4.0, 5.0),
        ("Apply 0.0", 5.0, 6.0),
        (EXPOSED, 6.0, 7.0),
        ("Apply 0.0", 7.0, 8.0),
    ]
    assert not any(transfer.waits for transfer in cut.transfers)
    assert of_mark("Transform 0.12") == ("transform", "12")
    assert of_mark("Apply 0.12") == ("apply", "")
    assert of_mark("GiveBack 0.12") == ("other", "")
    assert [of_transfer(t) for t in cut.transfers] == [
        ("other", ""), ("collection", "0"), ("return", "0")
    ]  # fmt: skip


@pytest.mark.parametrize(("share", "verdict"), [(0.25, ": met."), (0.5, ": not met.")])
def test_a_pipeline_is_held_against_the_same_without(share, verdict):
    step = measure([a_trace()])
    steps = {
        (PIPELINED.unpipelined, "free"): [step._replace(whole=4.0)] * 3,
        (PIPELINED, "free"): [step._replace(whole=4.0)] * 3,
        (PIPELINED.unpipelined, "slow"): [step._replace(whole=6.0)] * 3,
        (PIPELINED, "slow"): [
            step._replace(whole=whole, exposed=share * step.exposed) for whole in (9.0, 5.0, 4.0)
        ],
    }
    results = Results(steps, "free")
    plain, piped = rows = results.rows()
    assert "exposed_of_unpipelined" not in plain
    assert piped["exposed_of_unpipelined"] == share
    assert piped["longer_of_unpipelined"] == 0.5  # 1 s in place of 2
    assert results.typical(PIPELINED, "slow") == 1
    (line,) = verdicts(rows)
    assert verdict in line
    assert table(rows).count("\n") == 3
    assert f"| {share:.0%} |" in table(rows)


def test_a_transfer_takes_as_long_as_on_its_busiest_rank():
    first = ModelledLink(2, "cpu")
    first._rank, first._counts = 0, [0]
    first.set_speed(latency=1.0, bandwidth=10.0)
    second = copy.copy(first)  # with the same shared memory
    second._rank, second._unknown, second._counts = 1, [], [0]
    mine = first.launch("all_to_all", 10.0, 0, (0, 1))
    assert not first.is_over(mine)
    assert mine.ready != mine.ready  # not known before all have launched it
    other = second.launch("all_to_all", 40.0, 0, (0, 1))
    for link, seen in (first, mine), (second, other):
        link.is_over(seen)
        assert seen.seconds == pytest.approx(5.0)
        assert seen.ready == max(mine.launched, other.launched)
        assert seen.end == pytest.approx(seen.start + 5.0)


def test_transfers_of_a_rank_follow_each_other_over_its_groups():
    first = ModelledLink(2, "cpu", groups=2, capacity=8)
    first._rank, first._counts = 0, [0, 0]
    speeds = {(0, 1): Speed(1.0, 10.0), (0,): Speed(5.0, 10.0)}
    first.set_speeds(lambda kind, members: speeds[tuple(members)])
    second = copy.copy(first)
    second._rank, second._unknown, second._counts = 1, [], [0, 0]
    alone = first.launch("all_gather", 0.0, 1, (0,))  # 5 s, of the first rank alone
    mine = first.launch("all_to_all", 10.0, 0, (0, 1))
    other = second.launch("all_to_all", 10.0, 0, (0, 1))
    assert not second.is_over(other)  # it cannot know what the other link does before
    assert other.end != other.end
    for link, seen in (first, mine), (second, other):
        link.is_over(seen)
        assert seen.start == pytest.approx(alone.end)
        assert seen.end == pytest.approx(alone.end + 2.0)


def test_pictures_are_drawn_from_json(tmp_path):
    receipt = {
        "ranks": 2,
        "shape": {"layers": 1, "width": 8},
        "megabytes_per_second": {"middle": 3.0},
        "traces": {
            name: {"title": title, "ranks": [asdict(a_trace()), asdict(a_trace(1.0))]}
            for name, (title, _) in DRAWN.items()
        },
    }
    (tmp_path / RESULT).write_text(json.dumps(receipt))
    main(Options(draw=tmp_path))
    assert {path.stem for path in tmp_path.glob("*.png")} == set(DRAWN)
