"""Losses of routers, shared and null experts: formulas, and meshes against one process."""

from dataclasses import replace

import pytest
import torch

from samestep.lab.stress.matrix import Case
from samestep.mesh import build
from samestep.models.gpt import GPT, GPTConfig, MixtureOfExperts, gpt_plan, mean_loss
from samestep.parallel import router_losses, tensor
from samestep.parallel.experts import TokenDispatch
from samestep.parallel.router_losses import RouterLosses
from samestep.parallel.stack import Stack
from tests.parallel.test_layouts import EXPERTS, SP, failures, prove_all
from tests.ranks import run_forked
from tests.soak import SOAK, twin

# --- formulas -------------------------------------------------------------------------------------


def given(experts=6, active=2, tokens=10):
    torch.manual_seed(0)
    logits = torch.randn(tokens, experts, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        chosen = logits.topk(active).indices
    return logits, chosen


def plain(logits, chosen, balance, z):
    """As the papers have it, token by token and expert by expert."""
    scores = logits.sigmoid()
    tokens, experts = logits.shape
    found = 0.0
    for expert in range(experts):
        f = sum(int(expert in own) for own in chosen.tolist()) / chosen.numel()
        p = sum(scores[t, expert] / scores[t].sum() for t in range(tokens)) / tokens
        found = found + balance * experts * f * p
    logsum = [logits[t].exp().sum().log() for t in range(tokens)]
    return found + z * sum(each**2 for each in logsum) / tokens


@pytest.mark.parametrize(("balance", "z"), [(0.5, 0.0), (0.0, 0.25), (0.5, 0.25)])
def test_gradients_are_those_of_the_formula(balance, z):
    logits, chosen = given()
    losses = RouterLosses(balance, z)
    losses.divisor, losses.share, losses.scale = 3, 0.5, torch.tensor(8.0)
    through = losses(logits.sigmoid(), logits, logits.sigmoid(), chosen)
    assert torch.equal(through, logits.sigmoid())
    task = (through**2).sum()
    (found,) = torch.autograd.grad(task, logits)
    whole = (logits.sigmoid() ** 2).sum() + 3 * 0.5 * 8 * plain(logits, chosen, balance, z)
    (expected,) = torch.autograd.grad(whole, logits)
    torch.testing.assert_close(found, expected)
    both = [plain(logits, chosen, 1.0, 0.0), plain(logits, chosen, 0.0, 1.0)]
    torch.testing.assert_close(losses.added, 0.5 * torch.stack(both).detach())


def test_even_use_costs_one():
    losses = RouterLosses(balance=1.0)
    logits = torch.zeros(4, 4, requires_grad=True)
    chosen = torch.arange(8).view(4, 2) % 4
    losses(logits, logits, logits.sigmoid(), chosen)
    assert losses.added[0] == 1.0


def test_nothing_is_added_where_nobody_trains():
    logits, chosen = given()
    losses = RouterLosses(balance=1.0).eval()
    assert losses(logits, logits, logits.sigmoid(), chosen) is logits
    with torch.no_grad():
        losses.train()(logits, logits, logits.sigmoid(), chosen)
    RouterLosses().train()(logits, logits, logits.sigmoid(), chosen)
    assert losses.added.tolist() == [0.0, 0.0]
    assert RouterLosses(z=1.0)(logits, logits[:0], logits[:0], chosen[:0]).requires_grad


# --- null and shared experts ----------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [0.0, 4.0])
def test_null_experts_add_nothing_and_cost_nothing(capacity):
    torch.manual_seed(0)
    x = torch.randn(5, 8, requires_grad=True)
    chosen = torch.tensor([[0, 4], [4, 5], [1, 0], [5, 2], [5, 4]])
    weights = torch.rand(5, 2)
    rows = []

    def experts(given, counts=None):
        rows.append(len(given) if counts is not None else int((given != 0).any(-1).sum()))
        return 2 * given

    dispatch = TokenDispatch(4, capacity, null=2)
    found = dispatch(x, chosen, weights, experts)
    real = (chosen < 4) * weights
    torch.testing.assert_close(found, 2 * x * real.sum(dim=1, keepdim=True))
    assert rows == [4]
    assert dispatch.overflow == 0
    (grad,) = torch.autograd.grad(found.sum(), x)
    torch.testing.assert_close(grad, 2 * real.sum(dim=1, keepdim=True).expand(5, 8))


def test_null_experts_that_overflow_are_no_loss():
    dispatch = TokenDispatch(2, capacity=1.0, null=2)
    chosen = torch.tensor([[2, 3]] * 4 + [[0, 2]] * 4)  # 16 / 4: four fit
    dispatch(torch.ones(8, 3), chosen, torch.ones(8, 2), lambda rows: rows)
    assert dispatch.overflow == 0
    dispatch(torch.ones(8, 3), torch.zeros(8, 1, dtype=torch.int64), torch.ones(8, 1), lambda r: r)
    assert dispatch.overflow == 6  # 8 / 4: two fit


def test_the_mix_of_shared_null_and_chosen_experts():
    torch.manual_seed(0)
    config = GPTConfig(
        context=8, width=16, layers=1, heads=2, experts=3, active_experts=2, null_experts=2,
        shared_experts=2, expert_size=5,
    )  # fmt: skip
    experts = GPT(config).blocks[0].mlp
    assert experts.router.weight.shape == (5, 16)
    assert experts.shared_experts.up.weight.shape == (10, 16)
    up, down = experts.experts.up, experts.experts.down
    x = torch.randn(4, 8, 16)
    found = experts(x)
    seen = set()
    for row, token in zip(found.flatten(0, 1), x.flatten(0, 1), strict=True):
        scores = experts.router(token).sigmoid()
        real = [e for e in scores.topk(2).indices.tolist() if e < 3]
        seen.add(len(real))
        total = sum(scores[e] for e in real)
        expected = experts.shared_experts(token)
        for e in real:
            expected = expected + scores[e] / total * down[e] @ (up[e] @ token).relu().square()
        torch.testing.assert_close(row, expected)
    assert seen == {0, 1, 2}
    assert experts.load.sum() == 4 * 8 * 2
    assert experts.load[3:].sum() > 0
    found.sum().backward()
    assert all(param.grad.isfinite().all() for param in experts.parameters())
    experts.balance(experts.load.clone())
    assert experts.bias.shape == (5,)
    assert (experts.bias != 0).any()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"null_experts": 1},
            "null_experts is 1, and the model has no experts: set experts= above 0 too",
        ),
        ({"experts": 2, "active_experts": 4, "null_experts": 1}, "experts = 2 + null_experts = 3"),
        ({"experts": 2, "shared_experts": -1}, "shared_experts must be at least 0, got -1"),
        ({"experts": 2, "z_loss": float("inf")}, "z_loss must be at least 0, got inf"),
    ],
)
def test_what_cannot_be_built(fields, message):
    with pytest.raises(ValueError, match=message.replace("+", r"\+")):
        GPTConfig(**fields)


# --- meshes against one process -------------------------------------------------------------------

# Coefficients so large that a wrong factor is far outside the bounds.
MORE = {"shared_experts": 1, "null_experts": 2, "active_experts": 3}
MORE |= {"balance_loss": 0.5, "z_loss": 0.05}
ALL = replace(EXPERTS, **MORE, expert_products="grouped")
ROOMY = replace(ALL, capacity=3.0)
STAGES = replace(ALL, layers=2)
TWO_RANKS = {
    "ep": (ALL, {"ep": 2}),
    "ep, the same tokens, room": (ROOMY, {"ep": 2, "ep_carries_data": False}),
    "tp": (ALL, {"tp": 2}),
    "tp sp, whole experts": (ALL, {**SP, "expert_tensor_parallel": 1}),
    "fsdp": (ALL, {}),
    "pp": (STAGES, {"pp": 2}),
}
FOUR_RANKS = {
    "tp sp ep": (ALL, {**SP, "ep": 2}),
    "tp sp fsdp": (ALL, SP),
    "ep pp, recomputed": (STAGES, {"ep": 2, "pp": 2}),
}
if not SOAK:  # "ep pp" has stages, too
    del TWO_RANKS["pp"], FOUR_RANKS["tp sp fsdp"]


@pytest.fixture(scope="module")
def outcomes():
    torch.set_num_threads(1)
    found = {}
    for ranks, layouts in ((2, TWO_RANKS), (4, FOUR_RANKS)):
        found |= prove_all(
            ranks,
            [
                Case(name, ranks, model, mesh, 4, 1, recompute="recomputed" in name)
                for name, (model, mesh) in layouts.items()
            ],
        )
    return found


@pytest.mark.parametrize("name", [*TWO_RANKS, *FOUR_RANKS])
def test_a_mesh_equals_one_process(outcomes, name):
    found = outcomes[name]
    assert found.failures() == []
    assert found.gradient < 5e-7 < 1e-2 < found.largest_gradient
    assert found.router < 5e-6


# --- the proof can fail ---------------------------------------------------------------------------


def mutant(axes, **changes):
    return Case("mutant", 2, replace(ALL, **changes), axes, sequences=4, steps=1)


def kinds(case):
    """What is out of bounds."""
    return {line.split()[0] for line in failures(case)}


@twin
def test_statistics_of_own_tokens_are_seen(monkeypatch):
    """Ranks whose balance loss is that of their own tokens: other gradients of the router."""

    def alone(model, ranks, divisor):
        for losses in router_losses.router_losses(model):
            losses.divisor = 1

    monkeypatch.setattr(router_losses, "place", alone)
    found = kinds(mutant({"ep": 2}, z_loss=0.0))
    assert {"gradient", "router"} <= found


@twin
def test_ranks_of_the_sequence_left_out_are_seen(monkeypatch):
    class Mesh:
        """One without sequence parallel, to those who ask."""

        def __init__(self, mesh):
            self.degrees, self.rank = replace(mesh.degrees, sequence_parallel=False), mesh.rank

    place = router_losses.place_on
    monkeypatch.setattr(router_losses, "place_on", lambda model, mesh: place(model, Mesh(mesh)))
    found = kinds(mutant({**SP, "expert_tensor_parallel": 1}))
    assert {"gradient", "router"} <= found


@twin
def test_a_missing_divisor_is_seen(monkeypatch):
    place = router_losses.place
    monkeypatch.setattr(router_losses, "place", lambda model, ranks, _: place(model, ranks, 1))
    found = kinds(mutant({"ep": 2}))
    assert "gradient" in found
    assert "router" not in found


def test_micro_batches_that_count_whole_are_seen(monkeypatch):
    monkeypatch.setattr("samestep.parallel.pipeline.set_share", lambda model, share: None)
    found = kinds(mutant({"pp": 2}, layers=2))
    assert {"gradient", "router"} <= found


@twin
def test_shared_experts_whose_gradients_are_not_combined_are_seen(monkeypatch):
    """Each rank of the sequence takes what its own tokens say for the whole."""
    right = tensor._styles

    def styles(*args):
        for name, style in right(*args):
            yield name, tensor.CopiedModule(own_part=False) if "shared_experts" in name else style

    monkeypatch.setattr(tensor, "_styles", styles)
    (found,) = prove_all(2, [mutant(SP)]).values()
    assert found.failures()[0].startswith("gradient ")
    assert "shared_experts" in found.gradient_of


def test_null_experts_in_the_sum_of_weights_are_seen():
    torch.manual_seed(0)
    model = GPT(ALL).eval()
    tokens = torch.randint(32, (2, 8))
    right = model(tokens)
    for block in model.blocks:
        block.mlp.null = 0
    assert not torch.allclose(model(tokens), right)


# --- stages that lie apart ------------------------------------------------------------------------


def first_step(rank):
    """Loads and losses after the first step, for which torch calls every stage once more."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = replace(ALL, layers=4)
    model = GPT(config)
    options = {"micro_batches": 2, "schedule": "interleaved"}
    stack = Stack(model, gpt_plan(config), build(pp=2), loss=mean_loss, **options)
    tokens = torch.randint(32, (4, 9))
    stack.backward(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    loads = [module.load for module in model.modules() if isinstance(module, MixtureOfExperts)]
    return loads, router_losses.collect(model)


@twin
def test_interleaved_stages_count_once():
    of_ranks = run_forked(2, first_step)
    torch.manual_seed(0)
    model = GPT(replace(ALL, layers=4))
    tokens = torch.randint(32, (4, 9))
    router_losses.set_share(model, 0.5)
    for part in tokens.chunk(2):
        model(part[:, :-1])
    expected = router_losses.collect(model)
    for loads, _ in of_ranks:
        assert [int(load.sum()) for load in loads] == [4 * 8 * 3] * 2
    torch.testing.assert_close(of_ranks[0][1] + of_ranks[1][1], expected)
