"""torchtitan's trainer, on 1 and 2 ranks with FSDP2, and as a pipeline with two parts on a rank."""

from __future__ import annotations

import pytest
import torch

import samestep
from tests.integrations.ranks import assert_same, values
from tests.integrations.titan import run_trainers, trained, trainer
from tests.ranks import RanksFailed


def weights(made):
    """Parameters of all model parts of this rank by name, whole."""
    return {
        name.replace("_checkpoint_wrapped_module.", ""): value
        for part in made.model_parts
        for name, value in values(part).items()
    }


def state(made):
    return {
        key: getattr(value, "full_tensor", value.clone)()
        for key, value in made.optimizers.state_dict().items()
        if isinstance(value, torch.Tensor)
    }


@pytest.mark.parametrize("world", [1, 2])
def test_a_resumed_run_is_the_run_without_a_break(world, tmp_path):
    def job(rank):
        straight = trainer(tmp_path)
        before = weights(straight)
        straight.train()
        again = trained(tmp_path, checkpoint__load_step=3, checkpoint__load_only=True)
        assert again.step == 6
        assert_same(weights(again), weights(straight))
        assert_same(state(again), state(straight))
        assert again.lr_schedulers.get_metrics() == straight.lr_schedulers.get_metrics()
        after = weights(straight)
        assert all(not torch.equal(before[name], value) for name, value in after.items())
        return after

    results = run_trainers(world, job)
    for found in results:
        assert_same(found, results[0])
    assert len(results[0]) == 45


def test_two_ranks_go_on_as_one_does(tmp_path):
    """From a file of one rank. Gradients are averaged once, and clipped once, by the joint norm."""
    (expected,) = run_trainers(1, lambda _: weights(trained(tmp_path)))

    def go_on(**changes):
        return weights(
            trained(tmp_path, checkpoint__load_step=3, checkpoint__load_only=True, **changes)
        )

    for found in run_trainers(2, lambda _: go_on()):
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=0, atol=2e-5), name
    # It would not be seen if data or clipping did not matter.
    for changes in {"rows": 1}, {"training__max_norm": 1e9}:
        (other,) = run_trainers(1, lambda _, changes=changes: go_on(**changes))
        assert not torch.allclose(other["lm_head.weight"], expected["lm_head.weight"], atol=1e-3)


PIPELINE = {
    "parallelism__pipeline_parallel_degree": 2,
    "parallelism__num_pp_microbatches": 2,
}


def test_a_pipeline_with_two_parts_on_each_rank(tmp_path):
    """It goes on with what one rank has saved, resumes, and trains what one rank trains."""
    (expected,) = run_trainers(1, lambda _: weights(trained(tmp_path)))

    def job(rank):
        straight = trained(
            tmp_path, checkpoint__load_step=3, checkpoint__interval=1, **PIPELINE
        )
        assert len(straight.model_parts) == len(straight.optimizers) == 2
        assert all(opt._rank_group is None for opt in straight.optimizers)
        again = trained(tmp_path, checkpoint__load_step=4, checkpoint__load_only=True, **PIPELINE)
        assert_same(weights(again), weights(straight))
        assert_same(state(again), state(straight))
        return weights(straight)

    here, there = run_trainers(2, job)
    assert not here.keys() & there.keys()
    found = here | there
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=0, atol=2e-5), name
