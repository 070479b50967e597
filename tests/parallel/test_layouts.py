"""Layouts of the example GPT against one process: gradients, losses, parameters, copies."""

import warnings
from functools import reduce

import pytest
import torch

from samestep.lab.stress import matrix
from samestep.lab.stress.matrix import Case, Outcome, reference, run_rank
from samestep.models.gpt import GPTConfig
from samestep.parallel import data, tensor
from samestep.parallel.replicas import ReplicasDifferError, check_replicas
from tests.ranks import RanksFailed, run_forked
from tests.soak import SOAK, twin

LAYERS = 2 if SOAK else 1  # each is cut as the others are, and test_fused.py has two
SHAPE = {"vocab_size": 32, "context": 8, "width": 16, "heads": 4, "kv_heads": 2, "layers": LAYERS}
DENSE = GPTConfig(**SHAPE)
EXPERTS = GPTConfig(**SHAPE, experts=4, expert_size=8)
ROOMY = GPTConfig(**SHAPE, experts=4, expert_size=8, capacity=2.0)  # room for every token
GROUPED = GPTConfig(**SHAPE, experts=4, expert_size=8, expert_products="grouped")
SP = {"tp": 2, "sequence_parallel": True}

TWO_RANKS = {
    "tp": (DENSE, {"tp": 2}),
    "tp sp": (DENSE, SP),
    "tp experts": (EXPERTS, {"tp": 2}),
    "tp sp, whole experts": (EXPERTS, {**SP, "expert_tensor_parallel": 1}),
    "tp, whole experts": (EXPERTS, {"tp": 2, "expert_tensor_parallel": 1}),
    "ep": (EXPERTS, {"ep": 2}),
    "ep, room": (ROOMY, {"ep": 2}),
    "ep, the same tokens": (EXPERTS, {"ep": 2, "ep_carries_data": False}),
    "ep, the same tokens, room": (ROOMY, {"ep": 2, "ep_carries_data": False}),
    "pp": (EXPERTS, {"pp": 2}),
}
FOUR_RANKS = {
    "tp sp ep": (EXPERTS, {**SP, "ep": 2}),
    "tp sp ep, the same tokens": (ROOMY, {**SP, "ep": 2, "ep_carries_data": False}),
    "tp sp fsdp": (DENSE, SP),
    "ep fsdp": (EXPERTS, {"ep": 2}),
    "ep hsdp": (EXPERTS, {"ep": 2, "replicate": 2}),
    "pp tp sp": (DENSE, {**SP, "pp": 2}),
}
if not SOAK:
    # receipts/hybrid.json has these, too, and test_router_losses.py has others like them.
    some = ("ep, room", "pp", "tp experts", "tp, whole experts", "ep, the same tokens, room")
    for name in some:
        del TWO_RANKS[name]
    for name in ("tp sp ep", "tp sp ep, the same tokens", "ep fsdp", "pp tp sp"):
        del FOUR_RANKS[name]


def cases(ranks: int) -> list[Case]:
    layouts = TWO_RANKS if ranks == 2 else FOUR_RANKS
    return [
        Case(name, ranks, model, mesh, sequences=4, steps=2)
        for name, (model, mesh) in layouts.items()
    ]


def run_all(rank, given):
    return {case.name: run_rank(rank, case, expected) for case, expected in given}


def prove_all(ranks: int, chosen: list[Case]) -> dict[str, Outcome]:
    """Outcomes by name; the ranks are started once for all of them."""
    given = [(case, reference(case)) for case in chosen]
    of_ranks = run_forked(ranks, run_all, given)
    return {c.name: reduce(Outcome.merged, [own[c.name] for own in of_ranks]) for c in chosen}


@pytest.fixture(scope="module")
def outcomes():
    torch.set_num_threads(1)
    return prove_all(2, cases(2)) | prove_all(4, cases(4))


@pytest.mark.parametrize("name", [*TWO_RANKS, *FOUR_RANKS])
def test_a_layout_equals_one_process(outcomes, name):
    found = outcomes[name]
    assert found.failures() == []
    assert found.gradient < 1e-7 < 1e-2 < found.largest_gradient
    assert found.norm < 1e-6
    assert found.clipped == 2
    observed = found.trace["observed"]
    assert (observed["hooks_pre"], observed["hooks_post"]) == (0, 0)
    experts = observed.get("expert_parallel_active", False)  # a model without says nothing
    assert experts == ("ep" in name.replace(",", "").split())


def test_copies_are_compared_where_there_are_any(outcomes):
    norms = 4 * LAYERS + 1  # with those of queries and keys, and the last one
    assert outcomes["tp"].copies == outcomes["tp sp"].copies == norms
    assert outcomes["tp sp, whole experts"].copies == norms + 3 * LAYERS  # routers, stacks
    assert outcomes["ep"].copies == 0
    assert outcomes["ep, the same tokens"].copies > norms


# --- the proof can fail ---------------------------------------------------------------------------


def failures(case: Case) -> list[str]:
    (found,) = prove_all(case.ranks, [case]).values()
    return found.failures()


@twin
def test_experts_averaged_over_their_own_ranks_are_seen(monkeypatch):
    """003: both kinds of parameters divide by all ranks that have tokens."""

    def by_own_ranks(module, divisor, *, alone):
        module.set_force_sum_reduction_for_comms(True)

    monkeypatch.setattr(data, "_divide_by", by_own_ranks)
    (found,) = failures(Case("mutant", 2, EXPERTS, {"ep": 2}, sequences=4, steps=1))
    assert found.startswith("gradient ")


def as_if_whole(self, own_part):
    """Each rank takes its part of a gradient for the whole: copies drift apart."""
    self._given = tensor.Replicate()


@twin
def test_norms_whose_gradients_are_not_combined_are_seen(monkeypatch):
    monkeypatch.setattr(tensor.CopiedModule, "__init__", as_if_whole)
    with pytest.raises(RanksFailed, match=r"differs between ranks 0 and 1 after they were laid"):
        prove_all(2, [Case("mutant", 2, DENSE, SP, sequences=4, steps=1)])


@twin
def test_qk_norms_whose_gradients_are_not_combined_are_seen(monkeypatch):
    monkeypatch.setattr(tensor.CopiedModule, "__init__", as_if_whole)
    monkeypatch.setattr(matrix, "check_replicas", lambda model: 0)
    found, *_ = failures(Case("mutant", 2, DENSE, {"tp": 2}, sequences=4, steps=1))
    assert found.startswith("gradient ")


def drift(rank):
    model = torch.nn.Linear(3, 2)
    torch.nn.init.ones_(model.weight)
    torch.nn.init.zeros_(model.bias)
    same = check_replicas(model)
    if rank == 1:
        model.bias.data[1] = -0.0  # equal, and other bits
    try:
        check_replicas(model)
    except ReplicasDifferError as error:
        return same, str(error)


def test_copies_differ_by_bits():
    for same, message in run_forked(2, drift):
        assert same == 2
        assert message.startswith("parameter 'bias' differs between ranks 0 and 1")


# --- compiled -------------------------------------------------------------------------------------


def quietly(rank, case, expected):
    # Of torch's own compiler, about tensors that it looks at.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    return run_rank(rank, case, expected)


@pytest.mark.skipif(
    not SOAK, reason="compiles for long: make soak runs it, and receipts/hybrid.json has it"
)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("ranks", "model", "mesh"),
    [(2, ROOMY, {"ep": 2}), (2, GROUPED, SP), (4, DENSE, {**SP, "pp": 2})],
    ids=["ep", "tp sp, grouped experts", "tp sp pp"],
)
def test_blocks_compile_once(ranks, model, mesh, recompute):
    """Also experts of fixed capacity over an expert axis, where the gates are closed by default."""
    torch.set_num_threads(1)
    options = {"sequences": 4, "steps": 3, "compile": "aot_eager", "recompute": recompute}
    case = Case("compiled", ranks, model, mesh, **options)
    found = reduce(Outcome.merged, run_forked(ranks, quietly, case, reference(case)))
    assert found.failures() == []
    assert found.graphs > 0
    assert found.recompiled == 0
