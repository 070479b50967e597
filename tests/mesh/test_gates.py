"""Gates: what is not compiled unless somebody says so."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.mesh import Degrees
from samestep.mesh.gates import GATES, CompileFacts, decide
from tests.mesh.strategies import degrees

LANE = Degrees(8, ep=2, tp=2, sequence_parallel=True)
MOE = CompileFacts(experts=True, capacity=True)


def test_what_was_not_asked_for_is_eager():
    decision = decide(False, LANE, MOE, environment={})
    assert not decision.compile
    assert decision.receipt()["fallback_reason"] is None


def test_dense_models_are_compiled():
    decision = decide(True, LANE, CompileFacts(), environment={})
    assert decision.compile
    assert decision.why == "no gate is closed"


def test_the_receipt_says_requested_actual_and_why():
    receipt = decide(True, LANE, MOE, environment={"SAMESTEP_COMPILE_EP": "1"}).receipt()
    why = receipt.pop("fallback_reason")
    assert receipt == {
        "requested_backend": "compiled",
        "actual_backend": "eager",
        "gates_closed": ["padded_experts", "moe_fsdp"],
        "gates_opened": ["ep"],
    }
    assert "SAMESTEP_COMPILE_MOE_FSDP=1 opens it" in why
    assert "padded expert permutation" in why


def test_all_gates_opened():
    names = [gate.name for gate in GATES]
    decision = decide(True, LANE, MOE, open_gates=names, environment={})
    assert decision.compile
    assert decision.receipt()["gates_opened"] == names


def test_the_environment_counts_more_than_the_flag():
    decision = decide(
        True, Degrees(2, ep=2), CompileFacts(experts=True, fsdp=False), open_gates=["ep"],
        environment={"SAMESTEP_COMPILE_EP": "0"},
    )  # fmt: skip
    assert decision.closed == ("ep",)


@pytest.mark.parametrize(
    ("environment", "open_gates", "message"),
    [
        ({"SAMESTEP_COMPILE_EP": "yes"}, [], "SAMESTEP_COMPILE_EP must be 0 or 1, got 'yes'"),
        (
            {"SAMESTEP_COMPILE_PE": "1"},
            [],
            "SAMESTEP_COMPILE_PE is no environment variable of a gate; the gates are ",
        ),
        ({}, ["pe"], "unknown gate 'pe'; the gates are ep, moe_fsdp, padded_experts"),
    ],
)
def test_misspelled_gates_are_refused(environment, open_gates, message):
    with pytest.raises(ValueError, match=message):
        decide(True, LANE, MOE, open_gates=open_gates, environment=environment)


@given(degrees(), st.booleans(), st.booleans(), st.booleans())
def test_nothing_is_compiled_behind_a_closed_gate(degrees, experts, capacity, fsdp):
    facts = CompileFacts(experts, capacity, fsdp)
    closing = {gate.name for gate in GATES if gate.closes(degrees, facts)}
    decision = decide(True, degrees, facts, environment={})
    assert decision.compile == (not closing)
    assert set(decision.closed) == closing
    assert decide(True, degrees, facts, open_gates=closing, environment={}).compile
