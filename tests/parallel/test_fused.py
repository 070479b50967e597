"""Fused matrices under tensor parallel: cut part by part, whole to everybody else."""

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import linear, mse_loss

import samestep
from samestep.mesh import build
from samestep.models.gpt import GPT, GPTConfig, gpt_plan, mean_loss
from samestep.parallel import fused
from samestep.parallel.apply import apply
from samestep.parallel.fused import FusedLinear
from samestep.parallel.lora import LoRAError, add_lora
from samestep.parallel.plan import FusedPart, Plan, PlanError
from samestep.parallel.replicas import check_replicas
from samestep.parallel.stack import Stack
from samestep.shards.dtensor.gradients import combine_gradients
from tests.parallel.fused_model import (
    HEAD,
    HEADS,
    HIDDEN,
    WIDTH,
    batch,
    fused_plan,
    new_model,
    qkv_sizes,
    rows_of,
    separate,
    split_sizes,
    train,
    train_stack,
)
from tests.ranks import RanksFailed, run_cases, run_forked
from tests.soak import SOAK, twin, twin_cases

KV_HEADS = {"MHA": 4, "GQA": 2, "MQA": 1}
OPTIONS = {"lr": 1e-2, "max_grad_norm": 0.5}
TOLERANCE = 2e-5


def parts_of(name):
    """Names of the parts of a fused parameter, in order, from the plan alone."""

    def names(model):
        found = [key for key, _ in model.named_parameters() if key.startswith(f"{name}[")]
        return sorted(found, key=lambda key: int(key.split("[")[1].split(":")[0]))

    return names


# --- one layer, exactly ---------------------------------------------------------------------------


class Holder(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.qkv = nn.Linear(5, rows)

    def forward(self, x):
        return self.qkv(x)


def whole_numbers(seed, *shape):
    """Small ones: products and sums of them are exact in 32 bits, in any order."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


def own_columns(place, tp, heads, kv_heads):
    """Which outputs of the whole a rank has, by what heads it has."""
    queries = HEADS // tp
    first_kv = place * kv_heads // tp
    kv = range(first_kv, first_kv + max(1, kv_heads // tp))
    wanted = [(0, h) for h in range(place * queries, (place + 1) * queries)]
    wanted += [(HEADS, h) for h in kv] + [(HEADS + kv_heads, h) for h in kv]
    return [c for start, h in wanted for c in range((start + h) * HEAD, (start + h + 1) * HEAD)]


def layer_by_itself(rank, case):
    kv_heads, tp = case
    sizes = qkv_sizes(kv_heads)
    model = Holder(sum(sizes))
    with torch.no_grad():
        model.qkv.weight.copy_(whole_numbers(1, sum(sizes), 5))
        model.qkv.bias.copy_(whole_numbers(2, sum(sizes)))
    parts = tuple(map(FusedPart, sizes, (HEADS, kv_heads, kv_heads)))
    apart = [
        (w.detach().clone().requires_grad_(), b.detach().clone().requires_grad_())
        for w, b in zip(model.qkv.weight.split(sizes), model.qkv.bias.split(sizes), strict=True)
    ]
    apply(model, Plan(blocks=(), fused={"qkv": parts}), build(tp=tp))
    x = whole_numbers(3, 2, 3, 5).requires_grad_()
    columns = own_columns(rank, tp, HEADS, kv_heads)
    given = model(x)
    given.backward(whole_numbers(10 + rank, 2, 3, len(columns)))
    combine_gradients(model.parameters())
    # Separate matrices, with what all ranks have given back added up.
    x_apart = x.detach().clone().requires_grad_()
    outputs = torch.cat([linear(x_apart, w, b) for w, b in apart], dim=-1)
    back = torch.zeros_like(outputs)
    for other in range(tp):
        theirs = own_columns(other, tp, HEADS, kv_heads)
        back[..., theirs] += whole_numbers(10 + other, 2, 3, len(theirs))
    outputs.backward(back)
    assert torch.equal(given, outputs[..., columns])
    assert torch.equal(x.grad, x_apart.grad)
    for place, key in enumerate(("weight", "bias")):
        names = parts_of(f"qkv.{key}")(model)
        assert len(names) == 3
        for name, expected in zip(names, apart, strict=True):
            grad = model.get_parameter(name).grad
            assert torch.equal(grad.full_tensor(), expected[place].grad), name
    return tuple(given.shape)


@twin_cases("2")
@pytest.mark.parametrize("tp", [2, 4])
def test_a_layer_has_the_outputs_and_gradients_of_separate_matrices(tp):
    """Bit for bit, where nothing is rounded.

    Rounding differs in the gradient of the inputs alone: it is one sum over all rows, or three.
    """
    cases = [(kv_heads, tp) for kv_heads in KV_HEADS.values()]
    for (kv_heads, _), shapes in run_cases(tp, cases, layer_by_itself):
        columns = HEADS // tp + 2 * max(1, kv_heads // tp)
        assert shapes == [(2, 3, columns * HEAD)] * tp


# --- a model against one process ------------------------------------------------------------------

LAYOUTS = {
    2: {"tp 2": {"tp": 2}, "FSDP2": {}},
    4: {"tp 4": {"tp": 4}, "tp 2, FSDP2": {"tp": 2}, "tp 2, HSDP": {"tp": 2, "replicate": 2}},
}
if not SOAK:
    del LAYOUTS[4]["tp 2, HSDP"]


STEPS = 4 if SOAK else 2  # the second has momentum


def reference(kv_heads, steps=STEPS, **options):
    model = new_model(kv_heads)
    opt = samestep.MuonAdamW(model, **{"split_sizes": split_sizes(kv_heads), **OPTIONS, **options})
    train(model, opt, range(steps))
    return {name: value.clone() for name, value in model.state_dict().items()}


def laid_out(kv_heads, degrees, seed=0, **options):
    plan = fused_plan(kv_heads)
    stack = Stack(new_model(kv_heads, seed), plan, build(**degrees), loss=mse_loss)
    return stack, stack.optimizer(**{**OPTIONS, **options})


def whole(value):
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()


def whole_state_dict(model):
    return {name: whole(value).detach() for name, value in model.state_dict().items()}


def trained(rank, case):
    kv_heads, degrees = case
    stack, opt = laid_out(kv_heads, degrees)
    layers = [type(module) for module in stack.model.modules() if hasattr(module, "in_features")]
    assert layers.count(FusedLinear) == (4 if "tp" in degrees else 0)  # as it is without
    train_stack(stack, opt, range(STEPS))
    return check_replicas(stack.model), whole_state_dict(stack.model)


def farthest(found, expected):
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


def kinds_in(layout):
    """Where ranks share heads, all and some; where none do, and without tensor parallel, any."""
    few = {"tp 2": ["MQA"], "FSDP2": ["GQA"], "tp 4": ["GQA"], "tp 2, FSDP2": ["MHA"]}
    return KV_HEADS if SOAK else few.get(layout, KV_HEADS)


@pytest.fixture(scope="module")
def outcomes():
    torch.set_num_threads(1)
    found = {}
    for world, layouts in LAYOUTS.items():
        names = [(kind, name) for name in layouts for kind in kinds_in(name)]
        cases = [(KV_HEADS[kind], layouts[name]) for kind, name in names]
        results = run_cases(world, cases, trained)
        found |= {name: of_ranks for name, (_, of_ranks) in zip(names, results, strict=True)}
    return found


@pytest.mark.parametrize(
    ("kind", "layout"),
    [(kind, name) for some in LAYOUTS.values() for name in some for kind in kinds_in(name)],
)
def test_parameters_are_those_of_one_process(outcomes, kind, layout):
    expected = reference(KV_HEADS[kind])
    for copies, found in outcomes[kind, layout]:
        assert bool(copies) == ("tp" in layout)  # norms, at least, and heads that ranks share
        assert farthest(found, expected) < TOLERANCE


def test_shared_heads_have_copies_with_the_same_bits(outcomes):
    """Layer norms and biases of row layers; of every part of a layer that ranks share, two."""
    copies = {key: of_ranks[0][0] for key, of_ranks in outcomes.items()}
    alone = 2 * (2 * 2 + 2)  # layers; weight and bias of norms, and biases
    if SOAK:
        assert copies["MHA", "tp 4"] == alone
        assert copies["GQA", "tp 2, FSDP2"] == copies["MHA", "tp 2, FSDP2"]
        assert copies["MQA", "tp 4"] == alone + 2 * 2 * 2
    assert copies["MQA", "tp 2"] == alone + 2 * 2 * 2
    assert copies["GQA", "tp 4"] == alone + 2 * 2 * 2 * 2  # layers, k and v, weight and bias, heads


def test_queries_keys_and_values_as_one_block_are_another_update(outcomes):
    """What Muon does without `split_sizes`: far from all layouts."""
    rows = {"*.qkv.weight": (24,), "*.gate_up.weight": (2 * HIDDEN,)}
    as_one = reference(KV_HEADS["MQA"], split_sizes=rows)
    for layout in [layout for kind, layout in outcomes if kind == "MQA" and "tp" in layout]:
        (_, found), *_ = outcomes["MQA", layout]
        for name in ("layers.0.attention.qkv.weight", "layers.1.mlp.gate_up.weight"):
            assert float((found[name] - as_one[name]).abs().max()) > 100 * TOLERANCE


def cut_as_one_block(rank, degrees):
    """As tensor parallel cuts any weight: equal parts from the top, one block."""
    as_one = {"layers.*.attention.qkv": (FusedPart(3 * WIDTH, 3 * HEADS),)}
    plan = fused_plan(4)
    plan = replace(plan, fused={**plan.fused, **as_one})
    fused.FusedLinear.own_sizes = property(  # a forward that splits what it is given
        lambda self: [part.own_rows // 3 for part in self.parts for _ in range(3)]
    )
    stack = Stack(new_model(4), plan, build(**degrees), loss=mse_loss)
    opt = stack.optimizer(**OPTIONS)
    loss = float(stack.backward(*batch(0, rows_of(stack))))
    opt.step()
    return loss, whole_state_dict(stack.model)


@twin
def test_a_fused_matrix_that_is_cut_as_one_is_seen():
    model = new_model(4)
    right = float(mse_loss(model(batch(0)[0]), batch(0)[1]).detach())
    expected = reference(4, steps=1)
    for loss, found in run_forked(2, cut_as_one_block, {"tp": 2}):
        assert abs(loss - right) > 1e-3
        assert farthest(found, expected) > 100 * TOLERANCE


def as_if_whole(rank):
    """Each rank takes its summand of the gradient of a shared head for all of it."""
    original = fused._placement

    def without_sum(part, axis, sets):
        mesh, placements, _ = original(part, axis, sets)
        return mesh, placements, placements

    fused._placement = without_sum
    return trained(rank, (1, {"tp": 2}))


@twin
def test_gradients_of_shared_heads_that_are_not_added_up_are_seen():
    with pytest.raises(RanksFailed, match=r"qkv\.\w+\[\d+:\d+\]' differs between ranks 0 and 1"):
        run_forked(2, as_if_whole)


# --- fused against separate matrices, in one layout -----------------------------------------------


def both_ways(rank, kv_heads):
    """The largest difference of a gradient, and of a parameter after some steps."""
    plan = fused_plan(kv_heads)
    columns = ("layers.*.attention.[qkv]", "layers.*.mlp.gate", "layers.*.mlp.up")
    allow = samestep.mesh.replicate_list.ShardRule("*.mlp.gate.*", "model", 0, "a gate of an MLP")
    apart = replace(plan, fused={}, column=columns, rules=(allow,))
    mesh = build(tp=2)
    one = Stack(new_model(kv_heads), plan, mesh, loss=mse_loss)
    other = Stack(separate(new_model(kv_heads)), apart, mesh, loss=mse_loss)
    pairs = {}
    for path, names in (("attention.qkv", "qkv"), ("mlp.gate_up", ("gate", "up"))):
        for layer in (0, 1):
            for key in ("weight", "bias"):
                owner = path.split(".")[0]
                parts = parts_of(f"layers.{layer}.{path}.{key}")(one.model)
                pairs |= {
                    part: f"layers.{layer}.{owner}.{name}.{key}"
                    for part, name in zip(parts, names, strict=True)
                }
    optimizers = [stack.optimizer(**OPTIONS) for stack in (one, other)]
    gradients = 0.0
    for step in range(STEPS):
        for stack in (one, other):
            stack.backward(*batch(step))
            combine_gradients(stack.model.parameters())
        if step == 0:
            gradients = distance(one.model, other.model, pairs, lambda param: param.grad)
        for opt in optimizers:
            opt.step()
            opt.zero_grad()
    return gradients, distance(one.model, other.model, pairs, lambda param: param.detach())


def distance(one, other, pairs, of):
    return max(
        float((whole(of(one.get_parameter(a))) - whole(of(other.get_parameter(b)))).abs().max())
        for a, b in pairs.items()
    )


def test_a_model_of_separate_matrices_takes_the_same_steps():
    for _, found in run_cases(2, [4, 2], both_ways):
        for gradient, parameter in found:
            assert gradient < 1e-6
            assert parameter < TOLERANCE


# --- the example GPT, with sequence parallel and pipelines ----------------------------------------

SHAPE = {"vocab_size": 32, "context": 8, "width": 32, "layers": 2, "heads": 4, "fused_qkv": True}


def tokens_of(step):
    return torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(step))


def gpt_of(kv_heads):
    torch.manual_seed(0)
    return GPT(GPTConfig(**SHAPE, kv_heads=kv_heads))


def gpt_reference(kv_heads):
    model = gpt_of(kv_heads)
    sizes = {"*.qkv.weight": model.config.qkv_sizes}
    opt = samestep.MuonAdamW(model, split_sizes=sizes, **OPTIONS)
    for step in range(GPT_STEPS):
        model.loss(tokens_of(step)[:, :-1], tokens_of(step)[:, 1:]).backward()
        opt.step()
        opt.zero_grad()
    return model.state_dict()


def train_gpt(rank, case, compile=False):
    kv_heads, degrees = case
    model = gpt_of(kv_heads)
    plan = gpt_plan(model.config)
    stack = Stack(model, plan, build(**degrees), loss=mean_loss, compile=compile)
    opt = stack.optimizer(**OPTIONS)
    for step in range(GPT_STEPS):
        tokens = tokens_of(step)[rows_of(stack)]
        stack.backward(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        opt.step()
        opt.zero_grad()
    check_replicas(stack.model)
    return whole_state_dict(stack.model)


GPTS = [
    (2, {"tp": 4, "sequence_parallel": True}),
    (1, {"tp": 2, "pp": 2}),
    (1, {"tp": 2, "sequence_parallel": True}),
]
if not SOAK:
    del GPTS[-1]
GPT_STEPS = 3 if SOAK else 2


@twin
def test_the_example_gpt_has_fused_projections():
    torch.set_num_threads(1)
    expected = {kv_heads: gpt_reference(kv_heads) for kv_heads in (1, 2)}
    for (kv_heads, degrees), of_ranks in run_cases(4, GPTS, train_gpt):
        seen = set()
        for found in of_ranks:
            seen |= found.keys()
            own = {name: expected[kv_heads][name] for name in found}
            assert farthest(found, own) < TOLERANCE, degrees
        assert seen == expected[kv_heads].keys()


@pytest.mark.skipif(not SOAK, reason="eight ranks: make soak runs it")
@pytest.mark.parametrize("degrees", [{"tp": 4}, {"tp": 4, "pp": 2}], ids=str)
def test_sets_of_ranks_that_share_heads_beside_other_axes(degrees):
    expected = gpt_reference(2)
    for found in run_forked(8, train_gpt, (2, degrees)):
        assert farthest(found, {name: expected[name] for name in found}) < TOLERANCE


def compiled(rank):
    # Of torch's own compiler, about tensors that it looks at.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    found = train_gpt(rank, (2, {"tp": 4}), compile="aot_eager")
    counted = torch._dynamo.utils.counters
    return found, counted["stats"]["unique_graphs"], dict(counted["graph_break"])


@pytest.mark.skipif(not SOAK, reason="compiles: make soak runs it")
def test_blocks_with_fused_matrices_are_one_graph():
    expected = gpt_reference(2)
    for found, graphs, breaks in run_forked(4, compiled):
        assert farthest(found, expected) < TOLERANCE
        assert graphs == 1  # of both blocks, and no other in later steps
        assert breaks == {}


# --- options --------------------------------------------------------------------------------------


def patterns_mean_parts(rank):
    """A block per head, and a learning rate of its own, asked for as in one process."""
    sizes = {"*.qkv.weight": (HEAD,) * 8, "*.gate_up.weight": (6, 6, 12)}
    overrides = {"layers.1.attention.qkv.weight": {"lr": 5e-3}, "*.gate_up.*": {"lr": 2e-2}}
    stack, opt = laid_out(2, {"tp": 4}, split_sizes=sizes, overrides=overrides)
    train_stack(stack, opt, range(STEPS))
    return whole_state_dict(stack.model), opt.table(), opt.explain()


@twin
def test_patterns_and_split_sizes_speak_of_the_whole():
    sizes = {"*.qkv.weight": (HEAD,) * 8, "*.gate_up.weight": (6, 6, 12)}
    overrides = {"layers.1.attention.qkv.weight": {"lr": 5e-3}, "*.gate_up.*": {"lr": 2e-2}}
    expected = reference(2, split_sizes=sizes, overrides=overrides)
    for found, table, explained in run_forked(4, patterns_mean_parts):
        assert farthest(found, expected) < TOLERANCE
        (line,) = [
            row for row in table.splitlines() if "layers.1.attention.qkv.weight[0:16]" in row
        ]
        assert "0.005" in line
        assert "4 x 16" in line
        assert "projections in one weight" not in explained  # the forward knows its rows


def refused(act):
    try:
        act()
    except (PlanError, ValueError, LoRAError) as error:
        return str(error)
    return ""


def what_is_refused(rank):
    mesh, plan = build(tp=4), fused_plan(2)

    def with_parts(*parts, name="layers.*.attention.qkv", kv_heads=2):
        given = replace(plan, fused={**plan.fused, name: parts})
        return refused(lambda: apply(new_model(kv_heads), given, mesh))

    three = [FusedPart(16, 4), FusedPart(8, 2), FusedPart(8, 2)]
    stack, _ = laid_out(2, {"tp": 4})
    make = samestep.MuonAdamW
    return {
        "nothing": with_parts(*three, name="layers.*.attention.kqv"),
        "no linear layer": with_parts(*three, name="layers.*.attention"),
        "twice": with_parts(*three, name="layers.*.attention.out"),
        "two patterns": with_parts(*three, name="layers.0.attention.qkv"),
        "sum": with_parts(FusedPart(16, 4), FusedPart(8, 2)),
        "no rows": with_parts(FusedPart(32, 4), FusedPart(0, 2)),
        "heads": with_parts(FusedPart(16, 4), FusedPart(8, 3), FusedPart(8, 3)),
        "queries": with_parts(FusedPart(16, 2), FusedPart(8, 2), FusedPart(8, 2)),
        "groups": with_parts(FusedPart(20, 4), FusedPart(6, 3), FusedPart(6, 3)),
        "rows": with_parts(FusedPart(18), FusedPart(6), name="layers.*.mlp.gate_up"),
        "one block": refused(lambda: make(stack.model, split_sizes={"*.qkv.weight": (32,)})),
        "too many": refused(lambda: make(stack.model, split_sizes={"*.qkv.weight": (16, 8, 8, 8)})),
        "LoRA": refused(lambda: add_lora(stack.model, ["*.attention.qkv"], mesh=mesh)),
    }


def test_what_is_refused():
    for found in run_forked(4, what_is_refused):
        assert (
            found["nothing"] == "Plan.fused: 'layers.*.attention.kqv' matches nothing in the model"
        )
        assert (
            "'layers.0.attention' is a Attention, and only an nn.Linear can have fused parts"
            in found["no linear layer"]
        )
        assert "'layers.0.attention.out' is in both Plan.row and Plan.fused" in found["twice"]
        assert "'layers.0.attention.qkv' is matched by 2 patterns" in found["two patterns"]
        assert "'layers.0.attention.qkv' have 16 + 8 rows, and it has 32" in found["sum"]
        assert "have 32 + 0 rows, and it has 32" in found["no rows"]
        assert (
            "8 rows of 'layers.0.attention.qkv' cannot be divided into 3 equal heads"
            in found["heads"]
        )
        assert "a part of 2 heads, which 4 ranks of the model axis" in found["queries"]
        assert "parts of 4 and of 3 heads, neither of which divides the other" in found["groups"]
        assert "a part of 18 rows, which 4 ranks of the model axis" in found["rows"]
        assert found["rows"].endswith("use tp=2 or 3")
        assert "is rows 0 to 16 of 32, and split_sizes (32,) of" in found["one block"]
        assert "split_sizes (16, 8, 8, 8) of" in found["too many"]
        assert "is a FusedLinear, and LoRA factors can only be added to nn.Linear" in found["LoRA"]


def test_sets_of_different_sizes_are_refused():
    """12 query and 6 key heads on 4 ranks: two ranks would need half a head each."""
    model = Holder(24)
    plan = Plan(blocks=(), fused={"qkv": (FusedPart(12, 12), FusedPart(6, 6), FusedPart(6, 6))})
    with pytest.raises(PlanError, match=r"a part of 6 heads, which 4 ranks .* use tp=2 or 3"):
        fused.check_fused(model, plan, 4)
    fused.check_fused(model, plan, 3)
    fused.check_fused(model, plan, 12)
    plan.check(model)


def test_a_model_on_one_process_stays_as_it_is():
    model = new_model(2)
    plan = fused_plan(2)
    before = copy.deepcopy(model.state_dict())
    plan.check(model)
    assert plan.split_sizes(model) == {
        f"layers.{layer}.{name}.weight": sizes
        for layer in (0, 1)
        for name, sizes in (("attention.qkv", (16, 8, 8)), ("mlp.gate_up", (12, 12)))
    }
    model.layers[0].requires_grad_(False)
    assert all(name.startswith("layers.1.") for name in plan.split_sizes(model))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
