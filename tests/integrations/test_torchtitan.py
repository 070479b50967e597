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
