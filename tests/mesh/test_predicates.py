"""Predicates: computed from degrees, told by every rank, compared."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.comm.integrity.agreement import RanksDisagreeError
from samestep.mesh import Degrees, build
from samestep.mesh.predicates import predicates, trace
from tests.mesh.fake import fake_world
from tests.mesh.strategies import degrees
from tests.ranks import run_forked, run_threaded


def test_experts_that_follow_tensor_parallel_are_active():
    """A known bug: expert parallelism was asked of a mesh that "follow" does not allocate."""
    lane = Degrees(8, ep=2, tp=2, sequence_parallel=True, expert_tensor_parallel=0)
    facts = predicates(lane, experts=True)
    assert facts.expert_parallel_active
    assert facts.expert_lane
    assert facts.expert_tensor_parallel_active
    assert facts.sequence_parallel_on_block
    assert not facts.experts_share_tokens
    assert facts.divisor == 4


@given(degrees(), st.booleans())
def test_facts_follow_from_degrees(degrees, experts):
    facts = predicates(degrees, experts=experts)
    assert facts.expert_parallel_active == (degrees.ep > 1)
    assert facts.divisor == degrees.batch_ranks
    if facts.expert_lane:
        assert facts.expert_parallel_active
        assert degrees.ep_carries_data
    if facts.sequence_parallel_on_block:
        assert facts.tensor_parallel_active
    assert not (facts.expert_tensor_parallel_active and facts.experts_share_tokens)


def test_every_rank_tells_one_line_and_the_receipt_has_all():
    def job(rank):
        told = []
        mesh = build(tp=2, ep=2, sequence_parallel=True)
        facts = predicates(mesh.degrees, experts=True)
        receipt = trace(mesh, facts, observed={"expert_lane": True, "hooks": 0}, tell=told.append)
        assert told == [receipt["ranks"][rank]]
        return json.loads(json.dumps(receipt))

    first, *others = run_threaded(4, job)
    assert all(other == first for other in others)
    assert first["ranks"][2].startswith(
        "rank=2 mesh=pipe1.data1.expert2.model2 at=0,0,0,1,0 pipeline_active=False"
    )
    assert first["ranks"][2].endswith(" divisor=2 seen.expert_lane=True seen.hooks=0")
    assert first["predicates"]["expert_parallel_active"] is True
    assert first["degrees"]["tp"] == 2


def test_ranks_that_disagree_are_told_so():
    def job(rank):
        mesh = build(ep=2)
        facts = predicates(mesh.degrees, experts=rank != 3)
        with pytest.raises(RanksDisagreeError) as caught:
            trace(mesh, facts, tell=lambda line: None)
        return str(caught.value)

    for message in run_forked(4, job):
        assert message.startswith(
            "ranks have decided differently: expert_lane is True on ranks 0, 1, 2, False on rank 3."
        )


def test_what_a_rank_did_is_held_against_what_it_says():
    def job(rank):
        mesh = build(ep=2)
        facts = predicates(mesh.degrees, experts=True)
        with pytest.raises(RanksDisagreeError) as caught:
            trace(mesh, facts, observed={"expert_lane": False}, tell=lambda line: None)
        return str(caught.value)

    for message in run_threaded(2, job):
        assert "rank 0 has expert_lane=True, and did expert_lane=False" in message
        assert "rank 1 has expert_lane=True, and did expert_lane=False" in message


def test_a_rank_that_has_nothing_to_say_has_no_say():
    """A stage without experts."""

    def job(rank):
        mesh = build(pp=2)
        seen = {"sizes": (1, 2)} | ({"expert_lane": False} if rank else {})
        facts = predicates(mesh.degrees, experts=True)
        return trace(mesh, facts, observed=seen, tell=lambda line: None)["ranks"]

    first, second = run_threaded(2, job)
    assert first == second
    assert first[0].endswith("seen.sizes=(1, 2)")


def test_one_rank_of_a_large_world():
    with fake_world(100, 256):
        mesh = build(tp=8, ep=8)
        receipt = trace(mesh, predicates(mesh.degrees, experts=True), tell=lambda line: None)
    assert len(receipt["ranks"]) == 1
    assert receipt["ranks"][0].startswith("rank=100 mesh=pipe1.data4.expert8.model8 at=0,0,1,4,4 ")
