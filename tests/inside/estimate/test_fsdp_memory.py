"""What FSDP2 holds while a model runs, against torch's allocator; one token, so layers add 1%."""

import pytest
import torch

from samestep.lab.estimate.cluster import plan_shares, stack_units
from samestep.lab.estimate.fsdp import fsdp_peak, passes_1f1b
from samestep.mesh import Degrees, build
from samestep.models.gpt import GPT, GPTConfig, gpt_plan, mean_loss
from samestep.parallel.pipeline import GPT_STAGES
from samestep.parallel.stack import Stack
from samestep.parallel.stages import cut
from tests.counting_group import CountingGroup
from tests.inside.estimate.peaks import peak_bytes
from tests.ranks import run_forked
from tests.soak import SOAK, some, twin

# The vocabulary is divided with padding.
SHAPE = GPTConfig(vocab_size=250, context=4, width=128, layers=4, heads=4, kv_heads=4)


def measured(rank, mesh):
    """The peak of forward and backward, in bytes."""
    torch.set_num_threads(1)
    CountingGroup.install()
    torch.manual_seed(0)
    stack = Stack(GPT(SHAPE), gpt_plan(SHAPE), build(**mesh), loss=mean_loss)
    optimizer = stack.optimizer()
    tokens = torch.zeros(mesh.get("pp", 1), 1, dtype=torch.int64)
    stack.backward(tokens, tokens)
    optimizer.zero_grad()
    with peak_bytes() as peak:
        stack.backward(tokens, tokens)
    return peak.value


CASES = [(2, {}), (4, {"pp": 2})]
if SOAK:
    CASES += [(3, {}), (4, {}), (4, {"replicate": 2}), (8, {}), (8, {"pp": 4}), (8, {"pp": 2})]


@twin
@pytest.mark.parametrize(("world", "mesh"), some(CASES))
def test_units_and_gradients_are_foreseen(world, mesh):
    ranks = run_forked(world, measured, mesh)
    degrees, plan = Degrees(world, **mesh), gpt_plan(SHAPE)
    for rank, found in enumerate(ranks):
        stage = rank // (world // degrees.pp)
        with torch.device("meta"):
            model = GPT(SHAPE)
        if degrees.pp > 1:
            cut(model, GPT_STAGES, degrees.pp, [stage])
        blocks = dict(plan.named(model, "blocks"))
        units = stack_units(model, blocks, plan_shares(model, plan, degrees), degrees)
        foreseen = fsdp_peak(units, passes_1f1b(stage, degrees.pp, degrees.pp)).total
        assert foreseen < found < 1.03 * foreseen, (rank, found / foreseen)
