"""Every known bug is caught by the check that its story names; without it the same case passes."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

from samestep.lab.stress.campaign import MutantRunner
from samestep.lab.stress.judge import CHECKS
from samestep.lab.stress.layouts import EVERY_LAYOUT
from samestep.lab.stress.mutants import MUTANTS
from samestep.lab.stress.scenarios import EVERY_SCENARIO
from samestep.rules import muon
from samestep.shards.replicated.reduction import BucketReductions
from tests.limits import limit
from tests.soak import SOAK


@pytest.fixture(scope="module")
def runner():
    return MutantRunner(watchdog=limit(2.0))


# Steps after which the bugs of a scenario, or one by itself, have shown: most do in the first one,
# some need state or wait for an event.
SHOWS_AFTER = {
    "clipped": 2,
    "schedules": 2,
    "megatron_conditional": 2,
    "conditional_compute": 2,
    "unused_are_left_out": 5,
    "not_finite": 8,
    "overflow_scaler": 8,
    "megatron_conditional_live": 8,
    "resume": 12,
    "resume_midrun": 10,
    "frozen_and_added": 15,
    "small_state_remainder": 6,
    "step_counted_for_absent": 4,
}


# Long ones, each beside another of the same check in the same kind of layout.
SELDOM = {
    "stale_chunk_size", "no_order_between_plans", "reduction_chosen_at_launch",
    "copies_averaged_twice", "gathered_before_applied", "sequence_parts_not_added",
    "lora_not_synchronized", "momentum_lost_at_resume",
    "remainders_lost_at_load", "duplicate_group", "copies_not_averaged", "options_lost_at_resume",
    "routed_by_the_shape_of_a_shard", "orthogonalization_left_out", "updates_are_clipped",
    "flat_slices_have_no_momentum", "loaded_parameters_not_gathered", "gathered_from_freed_memory",
    "updated_parameters_not_placed", "empty_shards_skip_the_exchange",
    "options_of_groups_discarded", "one_rate_for_all_groups", "matrix_without_an_optimizer",
    "scale_of_padded_rows", "momentum_normalized_in_place", "overflow_not_shared",
    "scale_never_backs_off", "clipped_before_averaging", "kept_sum_overwritten",
    "filled_zeros_are_used", "use_in_the_last_micro_batch_only", "absent_is_not_untouched",
    "zeros_are_absent", "last_micro_batch_only", "overflow_taken", "schedule_not_seen",
    "buffer_reused_before_wait", "step_counted_for_absent", "momentum_lost_at_load",
    "sums_sent_on_arrival", "empty_collective_skipped", "groups_cut_as_if_row_after_row",
    "fused_as_one_matrix", "proportional_split_sizes", "sums_in_another_order",
    "expert_predicate_off_the_wrong_mesh",
}  # fmt: skip
USUAL = {name: mutant for name, mutant in MUTANTS.items() if SOAK or name not in SELDOM}


@pytest.mark.parametrize("name", USUAL)
def test_mutant_is_caught(runner, name):
    mutant = MUTANTS[name]
    if not SOAK:
        steps = SHOWS_AFTER.get(name, SHOWS_AFTER.get(mutant.scenario, 1))
        mutant = replace(mutant, steps=min(mutant.steps, steps))
    result = runner.run(mutant)
    assert result.unpatched == "exact"
    assert result.caught, result.findings
    assert result.first.check == MUTANTS[name].expected
    assert result.first.message


def test_a_patch_that_changes_nothing_is_not_caught(runner):
    """So that being caught means something."""
    harmless = replace(MUTANTS["sum_for_mean"], patch=nullcontext, steps=4)
    result = runner.run(harmless)
    assert (result.unpatched, result.findings, result.caught) == ("exact", (), False)


def test_mutants_name_what_exists():
    for mutant in MUTANTS.values():
        assert mutant.expected in CHECKS
        assert EVERY_SCENARIO[mutant.scenario].name == mutant.scenario
        assert EVERY_LAYOUT[mutant.layout].name == mutant.layout
        assert mutant.story


def test_every_check_has_a_bug_that_it_has_to_catch():
    assert {mutant.expected for mutant in USUAL.values()} == set(CHECKS)
    pairs = [
        {(mutant.expected, EVERY_LAYOUT[mutant.layout].parameters) for mutant in some.values()}
        for some in (MUTANTS, USUAL)
    ]
    assert pairs[0] == pairs[1]


def test_patches_are_undone():
    for mutant in MUTANTS.values():
        with mutant.patch():
            pass
    assert BucketReductions.mean.__module__ == "samestep.shards.replicated.reduction"
    assert BucketReductions.mean.__name__ == "mean"
    assert muon.decay_weights.__name__ == "decay_weights"
