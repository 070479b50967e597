"""The contract: every size against the degree that cuts it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.mesh import Degrees
from samestep.mesh.contract import ContractError, ModelSizes, check, terms
from tests.mesh.strategies import degrees

LANE = ModelSizes(
    heads=4, kv_heads=2, mlp_width=512, experts=8, expert_width=64, layers=16, sequence=128,
    batch=8,
)  # fmt: skip


def test_the_lane_fits():
    lane = Degrees(8, ep=2, tp=2, sequence_parallel=True)
    check(LANE, lane)
    assert [str(term) for term in terms(LANE, lane)] == [
        "heads 4 % tp 2 = 0",
        "key and value heads 2 % tp 2 = 0",
        "MLP width 512 % tp 2 = 0",
        "sequence 128 % tp 2 = 0",
        "experts 8 % ep 2 = 0",
        "expert width 64 % tp 2 = 0",
        "batch 8 % ranks with tokens of their own 4 = 0",
    ]


def test_all_that_does_not_fit_is_said_at_once_with_sizes_that_do():
    sizes = ModelSizes(
        heads=6, kv_heads=3, indexer_heads=5, experts=6, layers=10, sequence=130, batch=3
    )
    asked = Degrees(64, pp=4, ep=4, tp=4, sequence_parallel=True)
    with pytest.raises(ContractError) as caught:
        check(sizes, asked)
    head, *lines = str(caught.value).replace("fit: ", "fit; ", 1).split("; ")
    assert head == "7 sizes do not fit"
    assert lines == [
        "heads 6 % tp 4 = 2: take heads 4 or 8, or tp 1",
        "key and value heads 3 % tp 4 = 3: take key and value heads 4, or tp 1",
        "indexer heads 5 % tp 4 = 1: take indexer heads 4 or 8, or tp 1",
        "sequence 130 % tp 4 = 2: take sequence 128 or 132, or tp 1",
        "experts 6 % ep 4 = 2: take experts 4 or 8, or ep 2",
        "layers 10 % pp 4 = 2: take layers 8 or 12, or pp 2",
        "batch 3 % ranks with tokens of their own 4 = 3: take batch 4",
    ]


def test_key_and_value_heads_are_as_many_as_heads_if_not_said():
    with pytest.raises(ContractError, match="key and value heads 6 % tp 4 = 2"):
        check(ModelSizes(heads=6), Degrees(4, tp=4))
    check(ModelSizes(heads=8), Degrees(4, tp=4))


@pytest.mark.parametrize(("kv_heads", "tp"), [(4, 2), (2, 2), (1, 2), (2, 4), (1, 4)])
def test_ranks_share_heads_of_a_fused_weight(kv_heads, tp):
    sizes = ModelSizes(heads=4, kv_heads=kv_heads, fused_qkv=True)
    check(sizes, Degrees(4, tp=tp))
    if kv_heads < tp:
        with pytest.raises(ContractError, match=f"key and value heads {kv_heads} % tp {tp}"):
            check(ModelSizes(heads=4, kv_heads=kv_heads), Degrees(4, tp=tp))


def test_sets_of_ranks_that_share_a_head_are_of_one_size():
    sizes = ModelSizes(heads=12, kv_heads=3, fused_qkv=True)
    with pytest.raises(ContractError) as caught:
        check(sizes, Degrees(4, tp=4))
    assert str(caught.value) == "tp 4 % key and value heads 3 = 1: take tp 3 or 6"
    with pytest.raises(ContractError, match="heads 6 % tp 4 = 2"):
        check(ModelSizes(heads=12, kv_heads=6, fused_qkv=True), Degrees(4, tp=4))


def test_what_a_degree_does_not_cut_is_not_looked_at():
    odd = ModelSizes(heads=7, experts=7, layers=7, sequence=7, expert_width=7)
    assert terms(odd, Degrees(8)) == []
    assert [term.what for term in terms(odd, Degrees(2, tp=2))] == [
        "heads", "key and value heads", "expert width",
    ]  # fmt: skip
    whole_experts = Degrees(2, tp=2, expert_tensor_parallel=1)
    assert [term.what for term in terms(odd, whole_experts)] == ["heads", "key and value heads"]


def test_several_stages_per_rank():
    with pytest.raises(ContractError, match=r"layers 6 % \(pp x 2 stages per rank\) 4 = 2"):
        check(ModelSizes(layers=6, stages_per_rank=2), Degrees(2, pp=2))


@pytest.mark.parametrize(
    ("name", "value"), [("heads", -1), ("layers", 1.5), ("stages_per_rank", 0)]
)
def test_what_is_no_size(name, value):
    with pytest.raises(ContractError, match=f"{name} must be a whole number, at least [01], got"):
        ModelSizes(**{name: value})


@given(degrees(), st.lists(st.integers(1, 24), min_size=7, max_size=7))
def test_a_model_that_fits_can_be_cut_and_one_that_does_not_cannot(degrees, sizes):
    """By cutting, not by remainders; and every degree that is offered works."""
    names = ("heads", "kv_heads", "indexer_heads", "experts", "layers", "sequence", "mlp_width")
    model = ModelSizes(**dict(zip(names, sizes, strict=True)))
    cuts = [
        *((getattr(model, name), degrees.tp) for name in ("heads", "kv_heads", "indexer_heads")),
        (model.mlp_width, degrees.tp),
        (model.experts, degrees.ep),
        (model.layers, degrees.pp),
        (model.sequence, degrees.tp if degrees.sequence_parallel else 1),
    ]
    fits = all(len({len(range(i, n, d)) for i in range(d)}) == 1 for n, d in cuts)
    try:
        check(model, degrees)
    except ContractError:
        assert not fits
    else:
        assert fits
    for term in terms(model, degrees):
        same = [other for other in terms(model, degrees) if other.degree_name == term.degree_name]
        assert (term.degree in term.choices) == all(other.holds for other in same)
        for choice in term.choices:
            free = {"sequence_parallel": False, "expert_tensor_parallel": 0}
            asked = {
                name: getattr(degrees, name) for name in ("world", "pp", "replicate", "ep", "tp")
            }
            changed = Degrees(**asked | free | {term.degree_name: choice})
            again = [
                other for other in terms(model, changed) if other.degree_name == term.degree_name
            ]
            assert all(other.holds for other in again)
