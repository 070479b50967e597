"""A plan in one XLA program: specs from the plan that cuts a model over ranks; needs no XLA."""

from dataclasses import replace
from math import prod

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from samestep.comm.meshes import own_box
from samestep.layout.boxes import Box
from samestep.mesh import Degrees, SpmdMesh, build
from samestep.mesh.replicate_list import ReplicateListError
from samestep.models.gpt import GPT, GPTConfig, gpt_plan, mean_loss
from samestep.parallel import spmd
from samestep.parallel.apply import apply
from samestep.parallel.experts import ProgramPlaces, TokenDispatch
from samestep.parallel.lora import add_lora
from samestep.parallel.plan import FusedPart, Plan, PlanError
from samestep.parallel.spmd import PartitionError, SpmdStack, partition_specs
from samestep.xla.tiling import Tiling
from tests.ranks import run_forked

MOE = GPTConfig(
    vocab_size=16, context=8, width=16, layers=1, heads=4, kv_heads=2, experts=8, expert_size=8
)
DENSE = GPTConfig(vocab_size=16, context=8, width=16, layers=1, heads=4, kv_heads=2)
MESHES = [
    {"tp": 2, "sequence_parallel": True},
    {"ep": 2},
    {"ep": 2, "ep_carries_data": False},
    {"tp": 2, "ep": 2},
    {"tp": 2, "ep": 4, "expert_tensor_parallel": 1},
    {"tp": 2, "replicate": 2},
]


def box_on(shape, tiling, device):
    """The box of a device: equal parts, of which the last of a dim are short or empty."""
    tile, offsets, sizes = tiling.tile_of[device], [], []
    for number, size, parts in zip(tile, shape, tiling.tiles, strict=True):
        most = -(-size // parts)
        offsets.append(min(number * most, size))
        sizes.append(min(most, size - offsets[-1]))
    return Box(tuple(offsets), tuple(sizes))


def other_boxes(rank):
    """Of every mesh, parameters of which a rank holds another box than the device in its place."""
    found, compared = [], 0
    for asked, fsdp in [*((asked, True) for asked in MESHES), (MESHES[3], False)]:
        degrees, plan = Degrees(8, **asked), gpt_plan(MOE)
        mesh = SpmdMesh(degrees, tuple(range(8)), ("",) * 8)
        torch.manual_seed(0)
        model = GPT(MOE)
        specs = partition_specs(model, plan, degrees, fsdp=fsdp)
        apply(model, plan, build(**asked), fsdp=fsdp)
        for name, param in model.named_parameters():
            whole = Box((0,) * param.ndim, tuple(param.shape))
            held = own_box(param) if isinstance(param, DTensor) else whole
            compared += held != whole
            if box_on(param.shape, mesh.tiling(specs[name]), rank) != held:
                found.append((asked, fsdp, name, held, specs[name]))
    return found, compared


def test_a_device_has_the_box_of_the_rank_in_its_place():
    for found, compared in run_forked(8, other_boxes, timeout=120.0):
        assert found == []
        assert compared > 70  # that are no whole parameters


# --- what is refused -------------------------------------------------------------------------


class FusedHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 32, bias=False)


@pytest.mark.parametrize(
    ("model", "plan", "asked", "message"),
    [
        (
            GPT(DENSE),
            gpt_plan(DENSE),
            {"ep": 2},
            "the mesh has ep=2, and the plan names no experts",
        ),
        (GPT(MOE), gpt_plan(MOE), {"tp": 3}, "which 3 ranks of the model axis cannot share"),
        (
            GPT(MOE),
            replace(gpt_plan(MOE), on_stream=("norm",)),
            {"tp": 2},
            "the plan does not mention parameters blocks.0.attention_norm.weight",
        ),
        (
            FusedHeads(),
            Plan((), fused={"qkv": (FusedPart(16, 4), FusedPart(8, 1), FusedPart(8, 1))}),
            {"tp": 4},
            r"'qkv' has 4 \+ 1 \+ 1 = 6 heads, which 4 devices of the model axis cannot share",
        ),
    ],
)
def test_plans_that_do_not_fit(model, plan, asked, message):
    with pytest.raises(PlanError, match=message):
        partition_specs(model, plan, Degrees(24, **asked))


def test_the_mesh_of_ranks_and_a_model_elsewhere_are_refused():
    mesh = SpmdMesh(Degrees(8, tp=2), tuple(range(8)), ("",) * 8)
    with pytest.raises(PartitionError, match="is on cpu, and the mesh is of XLA devices"):
        SpmdStack(GPT(DENSE), gpt_plan(DENSE), mesh, loss=mean_loss)
    with pytest.raises(PartitionError, match="got NoneType: a mesh of ranks is for"):
        SpmdStack(GPT(DENSE), gpt_plan(DENSE), None, loss=mean_loss)


def test_factors_of_lora_stay_whole():
    model = GPT(DENSE)
    add_lora(model, ["*.attention.*"])
    specs = partition_specs(model, gpt_plan(DENSE), Degrees(8, tp=2))
    assert specs["blocks.0.attention.q.weight"] == (("model", "data"), ())
    assert specs["blocks.0.attention.q.lora_A"] == ((), ())
    assert specs["blocks.0.attention.out.lora_B"] == ((), ())


# --- the contract: what tensors say is held against plan and list ----------------------------


class Laid:
    """A model whose parameters lie as they are told, without XLA."""

    def __init__(self, monkeypatch, **changed):
        self.model, self.plan = GPT(MOE), gpt_plan(MOE)
        self.mesh = SpmdMesh(Degrees(8, tp=2, ep=2), tuple(range(8)), ("",) * 8)
        self.specs = partition_specs(self.model, self.plan, self.mesh.degrees)
        tilings = {name: self.mesh.tiling(spec) for name, spec in (self.specs | changed).items()}
        found = {id(param): tilings[name] for name, param in self.model.named_parameters()}
        monkeypatch.setattr(
            spmd, "tiling_of", lambda p: found[id(p)] if prod(found[id(p)].tiles) > 1 else None
        )
        self.found = found

    def check(self):
        spmd.check_layout(self.model, self.plan, self.mesh, self.specs)

    def observed(self):
        return spmd.observed(self.model, self.plan, self.mesh)


def test_what_lies_as_the_plan_says_is_right(monkeypatch):
    laid = Laid(monkeypatch)
    laid.check()
    seen = laid.observed()
    assert seen["tensor_parallel_active"]
    assert seen["data_sharded"]
    assert seen["expert_parallel_active"]
    assert not seen["expert_lane"]  # nobody has told the dispatch


@pytest.mark.parametrize(
    ("name", "spec", "error", "message"),
    [
        (
            "blocks.0.mlp.router.weight",
            (("model",), ()),
            ReplicateListError,
            r"router.weight' is Shard\(0\) over model, and is on the replicate list \(router\)",
        ),
        (
            "blocks.0.attention.q.weight",
            ((), ("model",)),
            ReplicateListError,
            r"q.weight' is Shard\(1\) over model, and the rule is .*q.weight': Shard\(0\) over",
        ),
        (
            "norm.weight",
            (("expert", "model"),),
            ReplicateListError,
            r"'norm.weight' is Shard\(0\) over expert, and is on the replicate list \(norms",
        ),
        (
            "blocks.0.mlp.experts.up",
            (("expert",), ("model",), ()),
            PartitionError,
            r"experts.up' lies as \(\('expert',\), .* and the plan says \(\('expert', 'data'\)",
        ),
    ],
)
def test_what_lies_otherwise_is_named(monkeypatch, name, spec, error, message):
    with pytest.raises(error, match=message):
        Laid(monkeypatch, **{name: spec}).check()


def test_parts_across_the_axes_are_named(monkeypatch):
    laid = Laid(monkeypatch)
    laid.found[id(laid.model.norm.weight)] = Tiling((2,), (0, 3, 4, 7, 1, 2, 5, 6))
    with pytest.raises(PartitionError, match=r"'norm.weight' lies as Tiling.* not along the axes"):
        laid.check()


def test_experts_on_no_axis_are_seen(monkeypatch):
    names = ("blocks.0.mlp.experts.up", "blocks.0.mlp.experts.down")
    laid = Laid(monkeypatch, **dict.fromkeys(names, (("data",), (), ())))
    seen = laid.observed()
    assert not seen["expert_parallel_active"]
    assert not seen["expert_tensor_parallel_active"]


# --- experts whose sizes never change --------------------------------------------------------


def dispatched(dispatch, tokens, stack):
    scores = (tokens @ stack[0].T)[:, :4]
    weights, chosen = scores.softmax(-1).topk(2)

    def experts(rows, counts=None):
        if counts is None:
            return rows @ stack
        return torch.cat([part @ one for part, one in zip(rows.split(counts), stack, strict=True)])

    return dispatch(tokens, chosen, weights, experts)


@pytest.fixture
def in_program(monkeypatch):
    """A dispatch of four experts in a program whose tokens are in three groups."""
    monkeypatch.setattr("samestep.parallel.experts.laid", lambda x, tiling: x)
    nowhere = Tiling((), ())

    def make(capacity=0.0):
        dispatch = TokenDispatch(4, capacity)
        dispatch.program = ProgramPlaces(3, nowhere, nowhere)
        return dispatch

    return make


def test_room_for_all_that_come_is_what_sizes_that_follow_the_data_give(in_program):
    torch.manual_seed(0)
    tokens, stack = torch.randn(12, 6, requires_grad=True), torch.randn(4, 6, 6)
    found = []
    for dispatch in (TokenDispatch(4), in_program()):
        mixed = dispatched(dispatch, tokens, stack)
        (grad,) = torch.autograd.grad(mixed.square().sum(), tokens)
        found.append((mixed, grad))
        assert dispatch.overflow == 0
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_each_part_of_the_batch_has_room_of_its_own(in_program):
    """As on ranks, each of which has a third of the tokens."""
    torch.manual_seed(0)
    tokens, stack = torch.randn(24, 6), torch.randn(4, 6, 6)
    whole, rank = in_program(capacity=1.0), TokenDispatch(4, 1.0)
    parts = [dispatched(rank, part, stack) for part in tokens.chunk(3)]
    torch.testing.assert_close(dispatched(whole, tokens, stack), torch.cat(parts))
    assert whole.overflow == rank.overflow > 0


def test_tokens_that_parts_cannot_share_are_refused(in_program):
    with pytest.raises(ValueError, match="10 tokens, which 3 parts of the mesh cannot share"):
        dispatched(in_program(), torch.randn(10, 6), torch.randn(4, 6, 6))
