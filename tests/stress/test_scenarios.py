"""What scenarios say of themselves, without any rank."""

import pytest
import torch

from samestep.lab.stress.judge import expected_run
from samestep.lab.stress.scenario import AddGroup, Recorded
from samestep.lab.stress.scenarios import SCENARIOS
from samestep.lab.stress.scenarios.patterns import PATTERNS
from samestep.lab.stress.training import mean_gradients, rank_gradients


def make(name, world=2):
    return SCENARIOS[name](0, world)


def test_the_four_patterns_average_as_documented():
    scenario = make("dist_adamw_muon")
    model = scenario.model()
    means = []
    for step in range(4):
        mean = mean_gradients(scenario, model, step)
        means.append({float(value) for grad in mean.values() for value in grad.flatten()})
        assert len(mean) in (0, 6)
    assert means == [{0.5}, {-0.25}, {0.5}, set()]
    assert PATTERNS == ((1.0, None), (None, -0.5), (0.25, 0.75), (None, None))


@pytest.mark.parametrize("name", SCENARIOS)
def test_models_are_the_same_at_every_call_and_differ_by_seed(name):
    first, second = make(name).model().state_dict(), make(name).model().state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    other = SCENARIOS[name](1, 2).model().state_dict()
    assert not all(torch.equal(first[key], other[key]) for key in first)
    assert SCENARIOS[name].story
    assert SCENARIOS[name].name == name


@pytest.mark.parametrize("world", [2, 5])
@pytest.mark.parametrize("name", SCENARIOS)
def test_gradients_are_the_same_at_every_call_and_ranks_disagree(name, world):
    """Some parameter is present on some ranks only, and ranks that have one have another value."""
    scenario, model = make(name, world), make(name, world).model()
    for event in (e for step in range(20) for e in scenario.events(step)):
        if isinstance(event, AddGroup):
            for param in event.names:
                model.get_parameter(param).requires_grad_(True)
    partly = different = 0
    for step in range(12):
        by_rank = [rank_gradients(scenario, model, step, rank)[-1] for rank in range(world)]
        again = rank_gradients(scenario, model, step, world - 1)[-1]
        assert again.keys() == by_rank[-1].keys()
        for param, grad in again.items():
            torch.testing.assert_close(grad, by_rank[-1][param], rtol=0, atol=0, equal_nan=True)
        for param, _ in model.named_parameters():
            found = [grads[param] for grads in by_rank if param in grads]
            partly += 0 < len(found) < world
            different += any(not torch.equal(found[0], other) for other in found[1:])
    always_present = name == "fixed_capacity"  # zeros instead of None is what it is about
    assert partly > 0 or always_present
    assert different > 0


def test_zeros_and_none_are_the_difference_of_two_scenarios():
    for step in range(8):
        zeros, none = [
            rank_gradients(make(name), make(name).model(), step, 1)[0]
            for name in ("fixed_capacity", "conditional_compute")
        ]
        assert len(zeros) == len(make("fixed_capacity").model().state_dict())
        for name, grad in zeros.items():
            if name in none:
                assert torch.equal(grad, none[name])
            else:
                assert not grad.any()
    final = {
        name: expected_run(make(name), {8}).samples[8].params
        for name in ("fixed_capacity", "conditional_compute")
    }
    apart = [
        name
        for name, value in final["fixed_capacity"].items()
        if not torch.equal(value, final["conditional_compute"][name])
    ]
    assert apart == ["expert_0", "expert_1", "expert_2"]


@pytest.mark.parametrize("accumulation", ["uneven_accumulation", "uneven_accumulation_sharded"])
def test_accumulated_means_agree(accumulation):
    """Reduced once or after each micro-batch: the same sum but for rounding."""
    scenario = make(accumulation, 3)
    model = scenario.model()
    assert len(rank_gradients(scenario, model, 0, 0)) == (1 if "sharded" not in accumulation else 3)
    sums = mean_gradients(scenario, model, 1)
    other = mean_gradients(make("uneven_accumulation", 3), model, 1)
    assert sums.keys() == other.keys()
    for param, total in sums.items():
        torch.testing.assert_close(total, other[param])


def test_a_recorded_run_gives_back_its_gradients():
    scenario = make("megatron_conditional")
    expected = expected_run(scenario, {3})
    replay = Recorded(scenario, expected.gradients)
    model = replay.model()
    for rank in range(2):
        played = rank_gradients(replay, model, 2, rank)[0]
        assert played.keys() == expected.gradients[2][rank].keys()
        assert all(torch.equal(played[n], g) for n, g in expected.gradients[2][rank].items())
    assert replay.name == "megatron_conditional"


def test_presence_is_counted_per_parameter_and_step():
    presence = expected_run(make("dist_adamw_muon"), {4}).presence
    assert presence["adam"] == [1, 1, 2, 0]
    late = expected_run(make("frozen_and_added"), {9}).presence["late_muon_0"]
    assert len(late) == 9
    assert late[:7] == [0] * 7
    assert max(late) > 0


def test_own_models_are_used_where_they_can_be():
    def linear():
        return torch.nn.Linear(3, 4)

    own = SCENARIOS["dist_adamw_muon"](0, 2, linear)
    assert isinstance(own.model(), torch.nn.Linear)
    assert "groups" not in own.options()
    expected = expected_run(own, {2, 4})
    assert expected.families == {"weight": "mu_a", "bias": "adam"}
