"""The checks, on samples made by hand."""

from dataclasses import replace

import pytest
import torch

from samestep.lab.stress.judge import (
    LIMITS,
    STATE_LIMIT,
    Expected,
    Judge,
    difference,
)
from samestep.lab.stress.rank import Case, Ending, Sample, Work
from samestep.lab.stress.scenarios import SCENARIOS


def sample(step=5, **changes):
    params = {"adam": torch.ones(4), "a": torch.ones(2, 2), "b": torch.ones(2, 3)}
    state = {"adam": {"step": torch.tensor(3.0), "exp_avg": torch.ones(4)}}
    return replace(Sample(step, params, state, 7, "digest"), **changes)


def moved(original, name, by):
    params = {**original.params, name: original.params[name] + by}
    return replace(original, params=params)


def judge(scenario="dist_adamw_muon", base=None, exact=True, world=1, steps=5, layout="zero2"):
    wide = {name: value.double() for name, value in sample().params.items()}
    reference = {step: sample(step, params=wide) for step in (5, 200)}
    families = {"adam": "adam", "a": "mu_a", "b": "mu_b"}
    expected = Expected(samples=reference, families=families)
    reduction = "ordered" if exact else "fast"
    case = Case(scenario, layout, world, steps, steps, reduction, also_after=(5,))
    return Judge(Work(case, SCENARIOS[scenario](0, world)), expected, base or {})


def due(scenario, steps, every, **more):
    return Case(scenario, "none", 2, steps, every, **more).due(SCENARIOS[scenario](0, 2))


def checks(judged):
    return [finding.check for finding in judged.findings]


def test_equal_samples_are_exact():
    judged = judge(base={5: sample()}, world=2)
    verdict = judged.add([sample(), sample()])
    judged.end({0: Ending(5), 1: Ending(5)})
    assert (judged.status(), judged.findings, judged.worst) == ("exact", [], 0.0)
    assert verdict.replicas.params == verdict.layouts.largest == verdict.reference.largest == 0.0
    assert verdict.same_collectives


@pytest.mark.parametrize(("name", "family"), [("adam", "adam"), ("a", "mu_a"), ("b", "mu_b")])
def test_replicas_must_be_equal_to_the_last_bit(name, family):
    judged = judge()
    one_bit = torch.nextafter(torch.ones(()), torch.tensor(2.0)).item() - 1
    verdict = judged.add([sample(), moved(sample(), name, one_bit)])
    assert checks(judged) == ["replicas"]
    assert getattr(verdict.replicas, family) == one_bit
    assert judged.status() == "failed"


def test_state_of_replicas_counts():
    judged = judge()
    state = {"adam": {"step": torch.tensor(4.0), "exp_avg": torch.ones(4)}}
    judged.add([sample(), sample(state=state)])
    assert checks(judged) == ["replicas"]


@pytest.mark.parametrize(("name", "limit"), [("adam", 2e-5), ("a", 3e-4), ("b", 3e-4)])
def test_the_reference_has_limits(name, limit):
    assert limit in LIMITS.values()
    for factor, found in ((0.9, []), (1.1, ["reference"])):
        judged = judge()
        away = moved(sample(), name, factor * limit)
        judged.add([away, away])
        assert checks(judged) == found


def test_the_state_is_held_against_the_reference_relative_to_its_size():
    for size, factor, found in ((1.0, 0.9, []), (1.0, 1.1, ["state"]), (10.0, 1.1, [])):
        judged = judge()
        for known in judged.expected.samples.values():
            known.state["adam"]["exp_avg"] = torch.full((4,), size, dtype=torch.float64)
        average = torch.full((4,), size, dtype=torch.float64) + factor * STATE_LIMIT
        away = sample(state={"adam": {"step": torch.tensor(3.0), "exp_avg": average}})
        judged.add([away, away])
        assert checks(judged) == found, size


def test_missing_state_is_infinitely_far():
    judged = judge()
    none = sample(state={})
    verdict = judged.add([none, none])
    assert checks(judged) == ["state"]
    assert verdict.reference.state == float("inf")


def test_layouts_are_exact_with_ordered_sums_and_near_with_fast_ones():
    near = moved(sample(), "a", 1e-6)
    ordered = judge(base={5: sample()})
    ordered.add([near, near])
    assert checks(ordered) == ["layouts"]
    fast = judge(base={5: sample()}, exact=False)
    fast.add([near, near])
    assert (fast.status(), fast.findings) == ("within_tolerance", [])
    assert fast.worst == pytest.approx(1e-6, rel=0.1)
    far = judge(base={5: moved(sample(), "a", 4e-4)}, exact=False)
    far.add([sample(), sample()])
    assert checks(far) == ["layouts"]


def test_a_closed_loop_is_compared_with_the_reference_for_100_steps():
    for step, compared in ((5, True), (200, False)):
        for exact in (True, False):
            judged = judge("empty_expert", base={step: sample(step)}, exact=exact)
            verdict = judged.add([sample(step), sample(step)])
            assert (verdict.reference is not None) == compared
            assert (verdict.layouts is not None) == (compared or exact)


def test_different_collectives_are_found():
    for change in ({"collectives": 8}, {"digest": "other"}):
        judged = judge()
        judged.add([sample(), sample(**change)])
        assert checks(judged) == ["collectives"]


def test_what_a_scenario_promises():
    judged = judge("fused_qkv_mha")
    parts = {name: torch.ones(12, 12) for name in "qkv"}
    fused = torch.ones(36, 12)
    whole = sample(params={**sample().params, **parts, "fused": fused})
    judged.add([whole, whole])
    assert checks(judged) == []
    fused[3, 3] = 2
    judged.add([whole, whole])
    assert checks(judged) == ["promise"]
    assert "differ by 1" in judged.findings[0].message


@pytest.mark.parametrize(
    ("kinds", "found"),
    [
        (["hang", "hang"], "rank 0: hang"),
        (["hang", "error"], "rank 1: error"),
        (["plan", "hang"], "rank 0: plan"),
        (["state", "error"], "rank 0: state"),
    ],
)
def test_the_rank_that_failed_first_is_told_of(kinds, found):
    judged = judge()
    endings = {rank: Ending(3, f"{kind}\nstack", kind) for rank, kind in enumerate(kinds)}
    judged.end(endings)
    assert [finding.message for finding in judged.findings] == [found]
    assert judged.findings[0].step == 3


def test_a_run_of_which_nothing_is_known_is_not_clean():
    judged = judge()
    judged.end({})
    assert checks(judged) == ["error"]


def test_every_rank_has_to_say_how_it_ended():
    judged = judge(world=3)
    judged.add([sample()] * 3)
    judged.end({0: Ending(5), 2: Ending(5)})
    assert [f.message for f in judged.findings] == ["rank 1 has not told how it ended"]


def test_every_sample_that_is_due_has_to_come():
    judged = judge(world=2, steps=200)
    judged.add([sample(), sample()])
    judged.end({0: Ending(200), 1: Ending(200)})
    assert checks(judged) == ["error"]
    assert judged.findings[0].message == "there is no sample of all ranks after step 200"
    assert judged.findings[0].step == 200


def test_fingerprints_are_compared():
    judged = judge(world=2)
    judged.add([sample(), sample()])
    judged.end({0: Ending(3, fingerprint="a"), 1: Ending(3, fingerprint="b")})
    assert checks(judged) == ["plan"]


def test_a_check_is_told_of_once():
    judged = judge()
    for _ in range(3):
        judged.add([sample(), moved(sample(), "a", 1.0)])
    assert checks(judged) == ["replicas"]


def test_differences():
    nan, inf = float("nan"), float("inf")
    assert difference(torch.tensor([nan, 1.0]), torch.tensor([nan, 1.0])) == 0.0
    assert difference(torch.tensor([nan, 1.0]), torch.tensor([nan, 3.0])) == 2.0
    assert difference(torch.tensor([nan]), torch.tensor([1.0])) == inf
    assert difference(torch.tensor([inf]), torch.tensor([inf])) == 0.0
    assert difference(torch.tensor([inf]), torch.tensor([1.0])) == inf
    assert difference(torch.ones(2), torch.ones(2, dtype=torch.float64)) == 0.0
    assert difference(torch.ones(2), torch.ones(3)) == inf
    assert difference(torch.ones(0), torch.ones(0, dtype=torch.float64)) == 0.0


def test_a_reference_that_is_not_finite_judges_nothing():
    judged = judge()
    for known in judged.expected.samples.values():
        known.params["a"] = torch.full((2, 2), float("nan"), dtype=torch.float64)
    bad = replace(sample(), params={**sample().params, "a": torch.full((2, 2), float("nan"))})
    judged.add([bad, bad])
    assert checks(judged) == ["reference"]


def test_state_of_fast_layouts_has_a_limit():
    judged = judge(base={5: sample()}, exact=False)
    state = {"adam": {"step": torch.tensor(3.0), "exp_avg": torch.ones(4) + 2 * STATE_LIMIT}}
    judged.base[5].state.update(state)
    judged.add([sample(), sample()])
    assert checks(judged) == ["layouts"]


def test_a_closed_loop_is_sampled_where_it_can_be_compared():
    assert due("empty_expert", 1000, 400) == {100, 400, 800, 1000}
    assert due("empty_expert", 50, 400) == {50}
    assert due("clipped", 1000, 400) == {400, 800, 1000}


def test_when_samples_are_due():
    assert due("clipped", 10, 4) == {4, 8, 10}
    assert due("clipped", 8, 4) == {4, 8}
    assert due("clipped", 3, 100) == {3}
    assert due("clipped", 8, 4, also_after=(3, 9)) == {3, 4, 8}


PROGRAM = {
    "programs": 5,
    "kinds_of_step": 5,
    "host_reads": 0,
    "state_bytes": 1300,
    "even_state_bytes": 1000,
}


@pytest.mark.parametrize(
    ("key", "value", "check"),
    [("programs", 6, "programs"), ("host_reads", 1, "host_reads"), ("state_bytes", 1301, "memory")],
)
def test_a_program_of_xla(key, value, check):
    """As much as allowed passes, and one more fails."""
    clean, judged = judge(), judge()
    for each in (clean, judged):
        each.add([sample()])
    clean.end({0: Ending(5, program=PROGRAM)})
    judged.end({0: Ending(5, program={**PROGRAM, key: value})})
    assert (checks(clean), checks(judged)) == ([], [check])


def test_state_that_is_not_shared_may_be_whole():
    judged = judge(layout="none")
    judged.add([sample()])
    judged.end({0: Ending(5, program={**PROGRAM, "state_bytes": 4000})})
    assert checks(judged) == []
