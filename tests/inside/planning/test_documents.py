"""Formulas and tables of the documents that others wrote, from plans of known shapes."""

import pytest
import torch

import samestep
from samestep.lab.estimate.decoder import SHAPES, build
from samestep.lab.estimate.grid import one_axis
from samestep.lab.estimate.grid_plan import plan_on_grid
from samestep.lab.estimate.memory import kept_memory, rank_memory
from samestep.rules.orthogonalize import orthogonalize_flops
from tests.soak import twin_cases


@twin_cases("gpt-175b-174.6")
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt2-xl", 1.558),
        ("llama-7b", 6.738),
        ("llama-13b", 13.016),
        ("llama-70b", 68.977),
        ("gpt-175b", 174.6),
        ("deepseek-v3", 671.0),
        ("nanochat-d20", 0.561),
        ("parallel-muon-10b", 9.959),
    ],
)
def test_shapes_have_the_sizes_that_are_known(name, billions):
    module = build(SHAPES[name], torch.bfloat16)
    found = sum(param.numel() for param in module.parameters())
    assert found / 1e9 == pytest.approx(billions, abs=0.051 if billions > 100 else 0.0006)


def adamw_memory(elements, ranks, sharding):
    """Megatron's case: 16-bit parameters and gradients, 12 bytes of 32-bit state, AdamW alone."""
    with torch.device("meta"):
        model = torch.nn.Linear(elements // 1024, 1024, bias=False, dtype=torch.bfloat16)
    optimizer = samestep.AdamW(model, sharding=sharding, master_weights=True)
    plan = plan_on_grid(optimizer, one_axis(ranks))
    kept = kept_memory(plan, 0)
    return kept.parameters, kept.state + kept.main_parameters


@pytest.mark.parametrize("ranks", [8, 64])
def test_memory_of_stages_is_what_the_formulas_say(ranks):
    billions = 1024 * 10**6  # "1B"
    params, state = adamw_memory(billions, ranks, "none")
    assert (params, state) == (2 * billions, 12 * billions + 4)
    for sharding in ("zero1", "zero2"):
        params, state = adamw_memory(billions, ranks, sharding)
        assert params == 2 * billions
        assert state == pytest.approx(12 * billions / ranks, rel=1e-3)


def muon_memory(ranks, sharding):
    """nanochat's case: 16-bit parameters, gradients and momentum, Muon alone."""
    with torch.device("meta"):
        layers = [torch.nn.Linear(256, 256, bias=False, dtype=torch.bfloat16) for _ in range(64)]
        model = torch.nn.Sequential(*layers)
    state = {"momentum_buffer": torch.bfloat16}
    optimizer = samestep.Muon(
        model,
        sharding=sharding,
        state_dtypes=state,
        overlap_grad_reduce=sharding == "zero2",
        master_weights=False,
    )
    plan = plan_on_grid(optimizer, one_axis(ranks))
    whole = sum(param.nbytes for param in model.parameters())
    memories = [rank_memory(plan, rank) for rank in range(ranks)]
    return whole, memories


@pytest.mark.parametrize(("ranks", "saved"), [(2, 33), (4, 50), (8, 58), (16, 63), (64, 66)])
def test_savings_of_distributed_muon(ranks, saved):
    whole, sharded = muon_memory(ranks, "zero2")
    # Parameters, momentum, and a share of the gradients, as nanochat's post counts.
    together = sum(m.parameters + m.state for m in sharded) + whole
    assert together == (ranks + 2) * whole
    assert int(100 * (1 - together / (3 * ranks * whole)) + 0.5) == saved


def test_the_270_million_parameters_of_depth_20_are_561():
    module = build(SHAPES["nanochat-d20"], torch.bfloat16)
    elements = sum(param.numel() for param in module.parameters())
    layers = sum(p.numel() for n, p in module.named_parameters() if n.startswith("layers"))
    assert elements == 561_040_640  # with norms that nanochat has no weights for
    assert layers == 393_267_200
    per_rank = 540e6 * (1 + 2 / 8)
    assert per_rank == 675e6  # the arithmetic of the post's example is right


def test_the_847_teraflop_of_parallel_muon():
    module = build(SHAPES["parallel-muon-10b"], torch.bfloat16)
    matrices = [
        tuple(param.shape)
        for name, param in module.named_parameters()
        if param.ndim == 2 and not name.startswith(("embedding", "lm_head"))
    ]
    products = sum(orthogonalize_flops(*shape, execution="standard") for shape in matrices)
    assert products / 1e12 == pytest.approx(847.31, abs=0.005)
    # Their count has the sums too: 2 m n + 3 m^2 per step.
    sums = sum(5 * (2 * m * n + 3 * min(m, n) ** 2) for m, n in matrices)
    assert (products + sums) / 1e12 == pytest.approx(847.45, abs=0.005)
    assert products / 1.4 / 4 / 1e12 == pytest.approx(151, abs=0.5)  # per card of two devices
    ours = sum(orthogonalize_flops(*shape) for shape in matrices)
    assert ours / 1e12 == pytest.approx(620.9, abs=0.1)  # on the Gram matrix where it is cheaper
