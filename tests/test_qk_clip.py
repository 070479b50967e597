"""QK-clip: the formula in float64, the same bits in every layout, and logits as they are."""

from __future__ import annotations

import copy
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import samestep
from samestep import QKClip, QKHeads
from samestep.fsdp import use_ordered_reduction
from samestep.layout.fused_rows import rows_in
from samestep.mesh import build as build_mesh
from samestep.models.gpt import GPT, GPTConfig, gpt_plan
from samestep.parallel.apply import apply
from samestep.qk_clip import HeadRows, largest_logits
from samestep.qk_clip.logits import watched
from tests.qk_models import (
    DIM,
    GROUPED,
    HEADS,
    NOPE,
    ROPE,
    VALUE,
    Attention,
    Net,
    heads_of,
    overrides_of,
    scale_by_hand,
    tokens_of,
)
from tests.ranks import run_cases, run_forked
from tests.soak import SOAK, some, twin_cases

LAYERS = "layers.*.attention"
KINDS = ["mha", "gqa", "mqa", "fused", "interleaved", "by_head", "conv1d", "mla"]


def build(kind="gqa", dtype=torch.float64, *, tau=1.0, options=None, **more):
    model = Net(kind, dtype)
    opt = samestep.MuonAdamW(model, lr=0.02, overrides=overrides_of(kind), **(options or {}))
    return model, opt, QKClip(opt, model, {LAYERS: heads_of(kind)}, tau=tau, **more)


# --- the formula ------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.5, 0.3])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_formula_in_float64(kind, alpha):
    model, _, clip = build(kind, tau=2.0, alpha=alpha)
    largest = {0: [1.0, 5.0, 3.0, 100.0], 1: [0.5, -3.0, 2.0, 1.9]}
    for layer, values in largest.items():
        clip.observe(f"layers.{layer}.attention", torch.tensor(values))
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    wanted = Net(kind, torch.float64)
    clip.step()

    scale_by_hand(kind, wanted.layers[0].attention, largest[0], 2.0, alpha)
    for (name, found), expected in zip(model.named_parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=4e-16, atol=0.0, msg=name)
        if "layers.0" not in name:
            assert torch.equal(found, before[name]), name
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed
    assert all(name.startswith("layers.0.attention.") for name in changed)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_every_head_are_its_own_gamma_times_what_they_were(kind):
    model, _, clip = build(kind, tau=1.5)
    x = torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    attention = model.layers[0].attention

    def logits():
        q, k, _ = attention.queries_keys_values(x)
        k = k.repeat_interleave(HEADS // k.shape[1], 1)
        return q @ k.mT / math.sqrt(q.shape[-1])

    before = logits().detach()
    causal = torch.ones(5, 5).tril().bool()
    largest = before.masked_fill(~causal, -math.inf).amax((0, 2, 3))
    attention(x)
    clip.observe("layers.1.attention", torch.zeros(HEADS))
    told = clip.step()["layers.0.attention"]
    torch.testing.assert_close(told, largest, rtol=1e-14, atol=0.0)
    gamma = (1.5 / largest).clamp(max=1.0)
    assert (gamma < 1).any()
    torch.testing.assert_close(logits(), before * gamma.view(-1, 1, 1), rtol=1e-13, atol=1e-14)


def test_a_group_may_have_one_gamma_as_in_megatron():
    model, _, clip = build("gqa", tau=1.0, gamma_of="group", strict=False)
    before = Net("gqa", torch.float64).layers[0].attention
    clip.observe("layers.0.attention", torch.tensor([4.0, 0.5, 1.0, 0.1]))
    clip.step()
    after = model.layers[0].attention
    factors = torch.tensor([0.5, 0.5, 1.0, 1.0]).repeat_interleave(DIM)
    assert torch.equal(after.q.weight, before.q.weight * factors[:, None])
    assert torch.equal(after.k.weight, before.k.weight * factors[:: HEADS // 2, None])


def test_master_copies_are_scaled_and_momentum_is_not():
    model, opt, clip = build("gqa", torch.bfloat16, tau=1.0, options={"master_weights": True})
    cross_entropy(
        model(tokens_of(0, 0)).float().flatten(0, 1), tokens_of(0, 1).flatten()
    ).backward()
    opt.step()
    name = "layers.0.attention.q.weight"
    wide, momentum = opt.full_parameter(name), opt.full_state(name, "momentum_buffer")
    assert not torch.equal(wide.bfloat16().float(), wide)
    largest = clip.step()["layers.0.attention"]
    gamma = (1.0 / largest).clamp(max=1.0)
    assert (gamma < 1).any()
    keys = gamma.view(2, 2).amin(1).sqrt().repeat_interleave(2)
    expected = (wide.double() * (gamma / keys).repeat_interleave(DIM)[:, None]).float()
    assert torch.equal(opt.full_parameter(name), expected)
    assert torch.equal(dict(model.named_parameters())[name], expected.bfloat16())
    assert torch.equal(opt.full_state(name, "momentum_buffer"), momentum)


# --- every layout -------------------------------------------------------------------------------

OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS = {
    "none": {"sharding": "none"},
    **({"zero1": {"sharding": "zero1"}} if SOAK else {}),
    "zero2": {"sharding": "zero2"},
    "flat": {"sharding": "zero1", "buffers": "flat"},
    "flat overlap": {"sharding": "zero2", "buffers": "flat", **OVERLAPS},
    "fsdp2": {},
    "fsdp2 gather": {"muon_schedule": "gather"},
}
TAU, STEPS = 3.0, 3 if SOAK else 2


def new_optimizer(model, kind, **options):
    return samestep.MuonAdamW(
        model,
        lr=0.05,
        overrides=overrides_of(kind),
        reduction="ordered",
        master_weights=True,
        crossover=20,
        bucket_size=300,
        **options,
    )


def backward(model, rank, step):
    logits = model(tokens_of(rank, step)).float()
    cross_entropy(logits.flatten(0, 1), tokens_of(rank, step + 50).flatten()).backward()


def train(rank, case):
    """Values and largest logits after every step, with this rank's own data."""
    layout, kind, dtype = case
    model = Net(kind, dtype)
    if layout.startswith("fsdp2"):
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        use_ordered_reduction(model)
    opt = new_optimizer(model, kind, **LAYOUTS[layout])
    clip = QKClip(opt, model, {LAYERS: heads_of(kind)}, tau=TAU)
    told = []
    for step in range(STEPS):
        backward(model, rank, step)
        opt.step()
        expected = whole_values(opt, model)
        found = clip.step()
        told.append(torch.cat(list(found.values())))
        opt.zero_grad()
        check_step(kind, expected, [own.tolist() for own in found.values()], opt, model)
    here = {
        n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()
    }
    here = {n: v.detach().clone() for n, v in here.items()}
    return here, whole_values(opt, model), torch.stack(told)


def whole_values(opt, model):
    return {name: opt.full_parameter(name) for name, _ in model.named_parameters()}


def check_step(kind, before, largest, opt, model):
    """Whole fp32 values are those of the formula in float64, rounded once."""
    wanted = Net(kind, torch.float64)
    wanted.load_state_dict(before)
    for layer, own in zip(wanted.layers, largest, strict=True):
        scale_by_hand(kind, layer.attention, own, TAU)
    found = whole_values(opt, model)
    for name, value in wanted.named_parameters():
        if kind in GROUPED:
            assert torch.equal(found[name], value.float()), name
        else:  # gamma^0.5 is there gamma / gamma^0.5
            torch.testing.assert_close(found[name], value.float(), rtol=1.2e-7, atol=0.0, msg=name)


def alone(world, kind, dtype):
    """The same in one process, with the data of all ranks one after the other."""
    model = Net(kind, dtype)
    opt = new_optimizer(model, kind)
    clip = QKClip(opt, model, {LAYERS: heads_of(kind)}, tau=TAU)
    told = []
    for step in range(STEPS):
        total: dict[str, torch.Tensor] = {}
        for rank in range(world):
            model.zero_grad()
            backward(model, rank, step)
            for name, param in model.named_parameters():
                grad = param.grad.float()
                total[name] = grad.clone() if rank == 0 else total[name] + grad
        for name, param in model.named_parameters():
            param.grad = (total[name] / world).to(dtype)
        opt.step()
        told.append(torch.cat(list(clip.step().values())))
    return whole_values(opt, model), torch.stack(told)


def cases_of(world):
    """All layouts with one kind; of other kinds and 16 bits, in a short run, some."""
    for kind in KINDS if SOAK else {2: ["gqa", "mla"], 4: ["interleaved"]}[world]:
        for dtype in (torch.float32, torch.bfloat16):
            for layout in LAYOUTS:
                short = kind == "mla" or dtype == torch.bfloat16 or world == 4
                some = ("flat overlap", "fsdp2")
                if kind == "mla":
                    some = ("zero2",) if dtype == torch.float32 else ("fsdp2",)
                if SOAK or not short or (layout in some and (world, dtype) != (4, torch.bfloat16)):
                    yield layout, kind, dtype


@pytest.mark.parametrize("world", some([2, 4]))
def test_every_layout_has_the_same_bits_on_every_rank(world):
    first: dict[tuple, tuple] = {}
    for (layout, kind, dtype), results in run_cases(world, list(cases_of(world)), train):
        case = f"{layout}, {kind}, {dtype}"
        # FSDP2 rounds averages of gradients to the 16 bits of a parameter.
        rounded = dtype == torch.bfloat16 and layout.startswith("fsdp2")
        params, values, told = first.setdefault((kind, dtype, rounded), results[0])
        assert 0 < (told > TAU).sum() < told.numel(), case  # some heads are scaled
        for rank, (own, wide, seen) in enumerate(results):
            assert torch.equal(seen, told), f"{case}: rank {rank} saw other logits"
            for name in params:
                assert torch.equal(own[name], params[name]), f"{case}: {name} on rank {rank}"
                assert torch.equal(wide[name], values[name]), f"{case}: {name} on rank {rank}"
    for (kind, dtype, _), (_, values, told) in first.items():
        if dtype == torch.float32:
            expected, of_all = alone(world, kind, dtype)
            torch.testing.assert_close(told, of_all, rtol=1e-5, atol=1e-5)
            for name, value in values.items():
                torch.testing.assert_close(value, expected[name], rtol=0.0, atol=3e-4, msg=name)


def cut_by_heads(rank, case):
    """Heads on different ranks: a step's logits, and whole weights before and after."""
    kind, fsdp = case
    model = Net(kind)
    mesh = init_device_mesh("cpu", (2, 2) if fsdp else (1, 2), mesh_dim_names=("data", "model"))
    plan = {"q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel()}
    for layer in model.layers:
        parallelize_module(layer.attention, mesh["model"], {**plan, "out": RowwiseParallel()})
        if fsdp:
            fully_shard(layer, mesh=mesh["data"])
    opt = samestep.MuonAdamW(model, grads="reduced", sharding="none")
    clip = QKClip(opt, model, {LAYERS: heads_of(kind)}, tau=1e9)
    model(tokens_of(0, 0)).sum().backward()  # after which FSDP2 has its shards again
    told = torch.cat(list(clip.step().values()))
    clip.tau = TAU
    own = list(range(rank % 2 * 2, rank % 2 * 2 + 2))
    numbers = torch.tensor([10.0, 7.0, 2.0, 30.0])
    for name in clip.layers:
        clip.observe(name, numbers[own])
    again = torch.cat(list(clip.step().values()))
    whole = {
        n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()
    }
    return told, again, {name: value.detach().clone() for name, value in whole.items()}


@twin_cases("2")
@pytest.mark.parametrize("world", [2, 4])
def test_heads_on_different_ranks(world):
    cases = [(kind, world == 4) for kind in (("mha", "gqa") if SOAK or world == 2 else ("gqa",))]
    for (kind, _), results in run_cases(world, cases, cut_by_heads):
        model = Net(kind)
        clip = QKClip(samestep.MuonAdamW(model), model, {LAYERS: heads_of(kind)}, tau=1e9)
        model(tokens_of(0, 0))
        expected = torch.cat(list(clip.step().values()))
        clip.tau = TAU
        numbers = torch.tensor([10.0, 7.0, 2.0, 30.0])
        for name in clip.layers:
            clip.observe(name, numbers)
        clip.step()
        for told, again, whole in results:
            torch.testing.assert_close(told, expected, rtol=1e-5, atol=1e-5)
            assert torch.equal(again, numbers.double().repeat(2))
            assert torch.equal(told, results[0][0])
            for name, value in model.named_parameters():
                assert torch.equal(whole[name], value), name


def fused_and_cut(rank, dtype, sharding):
    """The GPT of samestep with a fused weight, cut by samestep.parallel into parts of its rows.

    On 4 ranks two have copies of each part, see other data, and share its master copy.
    """
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=14, context=8, width=16, layers=1, heads=4, kv_heads=2,
                       fused_qkv=True)  # fmt: skip
    model = GPT(config).to(dtype)
    apply(model, gpt_plan(config), build_mesh(tp=2), fsdp=False)
    splits = {"*.qkv.weight": {"split_sizes": config.qkv_sizes}}
    opt = samestep.MuonAdamW(model, overrides=splits, master_weights=True, sharding=sharding)
    clip = QKClip(opt, model, {"blocks.*.attention": QKHeads.fused("qkv.weight", 4, 4, 2)}, tau=1.0)
    model(tokens_of(rank // 2, 0)).sum().backward()
    opt.step()
    before = whole_values(opt, model)
    told = clip.step()["blocks.0.attention"]
    here = {
        n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()
    }
    here = {name: value.detach().clone() for name, value in here.items()}
    return told, before, whole_values(opt, model), here


@pytest.mark.parametrize(
    ("world", "dtype", "sharding"),
    [
        *([(2, torch.float32, "none"), (4, torch.bfloat16, "zero1")] if SOAK else []),
        (4, torch.bfloat16, "zero2"),
    ],
)
def test_parts_of_a_fused_weight_that_are_parameters_of_their_own(world, dtype, sharding):
    results = run_forked(world, fused_and_cut, dtype, sharding)
    for told, before, after, here in results:
        assert torch.equal(told, results[0][0])
        gamma = (1.0 / told).clamp(max=1.0)
        assert (gamma < 1).any()
        keys = gamma.view(2, 2).amin(1).sqrt()
        factors = torch.cat([gamma / keys.repeat_interleave(2), keys, keys.new_ones(2)])
        parts = 0
        for name, value in before.items():
            part = rows_in(name)
            if part is not None:
                own = factors.repeat_interleave(4)[part.start : part.stop, None]
                value = (value.double() * own).float()
                parts += 1
            assert torch.equal(after[name], value), name
            assert torch.equal(here[name], value.to(dtype)), name
        assert parts == 3


# --- ranks, micro-batches, errors ---------------------------------------------------------------


def several(rank):
    """Logits by number that differ between ranks: what they are, and what travelled for them."""
    recorder = samestep.FlightRecorder()
    with recorder:
        _, _, clip = build(tau=1e9, strict=False, watch=False)
        before = len(recorder.records)
        clip.observe("layers.0.attention", torch.tensor([1.0, 2.0, 3.0, 4.0]) * (1 - 2 * rank))
        clip.observe("layers.1.attention", torch.full((2, HEADS, 3), float(rank)))
        found = clip.step()
        sent = [entry.name for entry in recorder.records[before:]]
    empty = clip.step()
    messages = []
    for bad in (math.nan, math.inf):
        if rank == 1:
            clip.observe("layers.1.attention", torch.tensor([0.0, bad, 0.0, 0.0]))
        with pytest.raises(ValueError) as caught:
            clip.step()
        messages.append(str(caught.value))
    clip.step()  # what was not finite is gone
    return found, sent, empty, messages


def test_the_largest_of_all_ranks_in_one_all_reduce_and_errors_on_all_of_them():
    for found, sent, empty, messages in run_forked(2, several):
        assert found["layers.0.attention"].tolist() == [1.0, 2.0, 3.0, 4.0]
        assert found["layers.1.attention"].tolist() == [1.0] * 4
        assert sent == ["largest attention logits"]
        assert all(value.isneginf().all() for value in empty.values())
        for message in messages:
            assert "'layers.1.attention' is not finite" in message
            assert "head 1:" in message


def other_numbers(rank):
    with pytest.raises(RuntimeError, match="QK-clip differs between ranks") as caught:
        build(tau=1.0 + rank)
    return str(caught.value)


def test_ranks_that_were_told_different_things():
    assert all("tau 1.0" in text and "tau 2.0" in text for text in run_forked(2, other_numbers))


def test_the_largest_of_all_micro_batches_counts_and_the_next_step_begins_anew():
    model, _, clip = build(tau=1e9)
    alone = []
    for step in range(2):
        model(tokens_of(0, step))
        alone.append(torch.cat(list(clip.step().values())))
    for step in range(2):
        model(tokens_of(0, step))
    both = torch.cat(list(clip.step().values()))
    assert not torch.equal(*alone)
    assert torch.equal(both, torch.maximum(*alone))
    model.eval()
    model(tokens_of(0, 0))
    model.train()
    with pytest.raises(
        ValueError, match=r"'layers.0.attention' reported no attention logits .* head 0,"
    ):
        clip.step()


def test_a_second_step_and_a_module_that_was_replaced_are_told():
    model, _, clip = build(tau=1e9)
    model(tokens_of(0, 0))
    clip.step()
    with pytest.raises(
        ValueError, match=r"'layers.0.attention' reported .* clip.step\(\) was called twice"
    ):
        clip.step()
    model.layers[1].attention = copy.deepcopy(model.layers[1].attention)
    model(tokens_of(0, 0))
    with pytest.raises(
        ValueError, match=r"'layers.1.attention' reported .* replaced after QKClip was"
    ):
        clip.step()


def test_attention_that_is_not_sdpa_is_told_how_to_be():
    model, _, clip = build(tau=1e9)
    model.layers[0].attention.config = SimpleNamespace(_attn_implementation="eager")
    with pytest.raises(
        ValueError, match=r"='eager', .*model with attn_implementation='sdpa'\. Report"
    ):
        clip.step()


def test_recomputed_layers_tell_the_same_and_a_failed_forward_leaves_nothing_behind():
    model, _, clip = build(tau=1e9)
    model(tokens_of(0, 0))
    expected = torch.cat(list(clip.step().values()))
    x = model.embedding(tokens_of(0, 0))
    for layer in model.layers:
        x = checkpoint(layer, x, use_reentrant=False)
    x.sum().backward()
    assert torch.equal(torch.cat(list(clip.step().values())), expected)
    with pytest.raises(RuntimeError):
        model.layers[0].attention(torch.zeros(2, 5, 3, dtype=torch.float64))
    q = torch.ones(1, HEADS, 1, DIM)
    nn.functional.scaled_dot_product_attention(q, q, q)  # outside of any layer: nobody's
    model(tokens_of(0, 0))
    assert torch.equal(torch.cat(list(clip.step().values())), expected)
    clip.close()
    model(tokens_of(0, 0))
    with pytest.raises(ValueError, match="reported no attention logits"):
        clip.step()


def test_a_copy_of_the_model_tells_nothing():
    """As an average of the weights, or a teacher, which may run in training mode."""
    model, _, clip = build(tau=1e9)
    model(tokens_of(0, 0))
    expected = torch.cat(list(clip.step().values()))
    model(tokens_of(0, 0))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.embedding.weight.data.mul_(100)
        other(tokens_of(0, 0))
    assert torch.equal(torch.cat(list(clip.step().values())), expected)


@pytest.mark.skipif(not SOAK, reason="the compiler takes seconds to import")
def test_compiled_layers_are_not_seen_and_say_so():
    model, _, clip = build("gqa", torch.float32, tau=1e9)
    model(tokens_of(0, 0))
    expected = clip.step()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(tokens_of(0, 0)).sum().backward()
    with pytest.raises(ValueError, match="or is compiled"):
        clip.step()
    compiled(tokens_of(0, 0)).sum().backward()
    for name, logits in expected.items():
        clip.observe(name, logits)
    assert all(torch.equal(expected[name], found) for name, found in clip.step().items())
    model(tokens_of(0, 0))  # as it is, it is seen again
    assert all(torch.equal(expected[name], found) for name, found in clip.step().items())


def test_mistakes_say_what_to_do():
    model = Net("gqa")
    opt = samestep.MuonAdamW(model)
    right = heads_of("gqa")
    with pytest.raises(ValueError, match=r"matches 'blocks\.\*'; it has embedding, "):
        QKClip(opt, model, {"blocks.*": right})
    with pytest.raises(ValueError, match="layers is empty"):
        QKClip(opt, model, {})
    of_names = {"q": "q.weight", "k": "k.weight"}
    with pytest.raises(
        ValueError,
        match=r"k.weight has 12 rows, but its QKHeads say 24 "
        r"\(4 keys of 6 rows, of heads=4 and kv_heads=4\)$",
    ):
        QKClip(opt, model, {LAYERS: QKHeads.separate(4, 6, **of_names)})
    with pytest.raises(
        ValueError,
        match=r"'layers\.\*' also matches 'layers\.0' \(a \* crosses dots\), which has "
        r"no 'q\.weight': use a pattern that matches only attention modules, such as "
        r"'layers\.0\.attention', ",
    ):
        QKClip(opt, model, {"layers.*": right})
    with pytest.raises(TypeError, match=r"map names of attention modules .*, got \['layers.0'\]"):
        QKClip(opt, model, ["layers.0"])
    with pytest.raises(TypeError, match=r"layers\['layers\.0'\] is 4, and must be a QKHeads"):
        QKClip(opt, model, {"layers.0": 4})
    with pytest.raises(ValueError, match=r"has no weight 'q_proj.weight'"):
        QKClip(opt, model, {LAYERS: QKHeads.separate(4, 6, 2)})
    with pytest.raises(ValueError, match="by an earlier pattern"):
        QKClip(opt, model, {LAYERS: right, "layers.0.*": right})
    with pytest.raises(ValueError, match=r"without a `config` is unknown: pass layers="):
        QKClip(opt, model)
    with pytest.raises(ValueError, match="tau must be above 0"):
        QKClip(opt, model, {LAYERS: right}, tau=0.0)
    with pytest.raises(TypeError, match="tau must be a number, got '100'"):
        QKClip(opt, model, {LAYERS: right}, tau="100")
    with pytest.raises(TypeError, match=r"an optimizer of samestep .*, got torch.optim.*AdamW"):
        QKClip(torch.optim.AdamW(model.parameters()), model, {LAYERS: right})
    with pytest.raises(ValueError, match="gamma_of must be one of"):
        QKClip(opt, model, {LAYERS: right}, gamma_of="heads")
    clip = QKClip(opt, model, {LAYERS: right})
    with pytest.raises(KeyError, match=r"'layers.7.attention' is no layer"):
        clip.observe("layers.7.attention", torch.zeros(4))
    with pytest.raises(
        ValueError, match=r"reported attention logits of 2 heads, and the layer has 4: give"
    ):
        clip.observe(model.layers[0].attention, torch.zeros(2))
    with pytest.raises(ValueError, match=r"logits of 1 head, .* head by head must report all"):
        clip.observe(model.layers[0].attention, torch.zeros(1))
    with pytest.raises(TypeError, match=r"must be a tensor, \(4,\) or .*, got \[1, 2, 3, 4\]"):
        clip.observe("layers.0.attention", [1, 2, 3, 4])
    model.layers[1].attention.k.weight.requires_grad_(False)
    with pytest.raises(
        ValueError,
        match=r"layers.1.attention.k.weight is not a parameter of the .* frozen on purpose, .* "
        r"pass layers= without this layer",
    ):
        QKClip(samestep.MuonAdamW(model), model, {LAYERS: right})
    others = QKClip(samestep.MuonAdamW(model), model, {"layers.0.attention": right})
    assert list(others.layers) == ["layers.0.attention"]
    model.layers[1].attention.k = model.layers[0].attention.k
    with pytest.raises(ValueError, match="would be scaled twice"):
        QKClip(samestep.MuonAdamW(model), model, {LAYERS: right})
    with pytest.raises(ValueError, match="multiple of kv_heads, got 4 and 3"):
        QKHeads.separate(4, 6, 3)
    with pytest.raises(ValueError, match=r"no rows .* are given as k of head 1"):
        QKHeads(2, 2, {"q": [HeadRows("q", 0, 2), HeadRows("q", 1, 2), HeadRows("k", 0, 2)]})
    with pytest.raises(
        ValueError,
        match="with whole heads in each group: correct heads, kv_heads, head_dim or split_sizes",
    ):
        QKHeads.fused("qkv.weight", 4, 6, 2, split_sizes="interleaved:3x16")


# --- the largest logits -------------------------------------------------------------------------


def by_hand(q, k, allowed):
    logits = q.double() @ k.double().repeat_interleave(q.shape[-3] // k.shape[-3], -3).mT
    return logits.masked_fill(~allowed, -math.inf).amax((0, 2, 3))


HIDES = [-math.inf, -1e9, -65504.0, -1e4]  # as attention of one's own adds them


@pytest.mark.parametrize("at_once", [1, 100, 1 << 20])
def test_largest_logits_are_those_of_pairs_that_attend(at_once):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 4, 7, 6, generator=generator)
    k = torch.randn(3, 2, 9, 6, generator=generator)
    everything = torch.ones(3, 4, 7, 9).bool()
    causal = everything.tril()
    some = torch.rand(3, 1, 7, 9, generator=generator) > 0.7
    least = torch.zeros(7, 9).masked_fill(~some[0, 0], torch.finfo(torch.float32).min)
    documents = torch.randint(3, (3, 9), generator=generator)

    def in_document(b, h, i, j):
        return documents[b, i] == documents[b, j]

    def later(score, b, h, i, j):
        return torch.where(j <= i + h, score + 100.0, -math.inf)

    rows, cols = torch.arange(7)[:, None], torch.arange(9)
    heads = torch.arange(4)[:, None, None]
    for options, allowed in [
        ({}, everything),
        ({"is_causal": True}, causal),
        ({"attn_mask": some}, some.expand(3, 4, 7, 9)),
        ({"attn_mask": least + 3.0}, some[:1].expand(3, 4, 7, 9)),
        *(({"attn_mask": least.clamp(min=hides)}, some[:1].expand(3, 4, 7, 9)) for hides in HIDES),
        ({"attn_mask": least.clamp(min=-3.0)}, everything),
        ({"mask_mod": in_document}, (documents[:, :7, None] == documents[:, None])[:, None]),
        ({"score_mod": later}, (cols <= rows + heads).expand(3, 4, 7, 9)),
        ({"attn_mask": torch.zeros(7, 9).bool()}, ~everything),
    ]:
        found = largest_logits(q, k, scale=0.7, at_once=at_once, **options).double()
        torch.testing.assert_close(found, by_hand(0.7 * q, k, allowed), rtol=1e-5, atol=1e-5)
    wide = largest_logits(q.bfloat16(), k.bfloat16(), at_once=at_once)
    expected = by_hand(q.bfloat16() / math.sqrt(6), k.bfloat16(), everything)
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide.double(), expected, rtol=1e-2, atol=1e-2)


def test_under_autocast_logits_are_those_of_rounded_queries_and_keys():
    """Rounded as attention has them, and multiplied in fp32."""
    generator = torch.Generator().manual_seed(0)
    module, told = Plain(), []
    watched(module, told.append)
    q, k = (torch.randn(2, 4, 7, 6, generator=generator) for _ in range(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(q, k).dtype == torch.bfloat16
        assert module(q.double(), k.double()).dtype == torch.float64
        told.append(largest_logits(q, k))
    everything = torch.ones(2, 4, 7, 7).bool()
    rounded = by_hand(q.bfloat16().double() / math.sqrt(6), k.bfloat16(), everything)
    exact = by_hand(q.double() / math.sqrt(6), k, everything)
    torch.testing.assert_close(told[0].double(), rounded, rtol=1e-6, atol=1e-6)
    for found in told[1:]:
        torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)
    assert (rounded - exact).abs().max() > 1e-4


class Plain(nn.Module):
    def forward(self, q, k, **options):
        return scaled_dot_product_attention(q, k, k, **options)


def seen(q, k, **options):
    """What a watched attention tells; it gives what it gives to whom nobody watches."""
    module, told = Plain(), []
    watched(module, told.append)
    result, wanted = module(q, k, **options), Plain()(q, k, **options)
    assert (result.shape, result.dtype) == (wanted.shape, wanted.dtype)
    return told[0]


def test_a_mask_hides_under_autocast_what_it_hides_from_attention():
    """-1e5 is a number in 32 bits, and as good as infinite in float16."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 2, 8, generator=generator) for _ in range(2))
    k[:, :, 1] = 100 * q[:, :, 0]
    hidden = torch.tensor([0.0, -1e5]).expand(2, 2)
    with torch.autocast("cpu", dtype=torch.float16):
        found = seen(q, k, attn_mask=hidden)
    of_first = (q.half().float() @ k[:, :, :1].half().float().mT).amax() / math.sqrt(8)
    torch.testing.assert_close(found[0], of_first)


@pytest.mark.parametrize(
    ("query", "key"),
    [
        ((0, 2, 4, 8), (0, 2, 4, 8)),
        ((1, 2, 0, 8), (1, 2, 4, 8)),
        ((1, 2, 4, 8), (1, 2, 0, 8)),
        ((1, 2, 4, 8), (3, 2, 4, 8)),
        ((2, 1, 2, 4, 8), (3, 1, 5, 8)),
    ],
)
def test_shapes_that_attention_takes_are_looked_at(query, key):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(shape, generator=generator) for shape in (query, key))
    found = seen(q, k)
    wanted = q.double() @ k.double().mT / math.sqrt(8)
    wanted = wanted.movedim(-3, 0).flatten(1)
    assert found.shape == (len(wanted),)
    if wanted.numel():
        torch.testing.assert_close(found.double(), wanted.amax(1), rtol=1e-5, atol=1e-6)
    else:
        assert found.isneginf().all()


def test_attention_without_values_is_no_reason_to_fail():
    """Memory and FLOPs are counted with tensors on no device."""
    q = torch.empty(1, 2, 4, 8, device="meta")
    assert seen(q, q).shape == (2,)


@pytest.mark.parametrize(
    ("query", "key", "message"),
    [
        ((1, 3, 4, 8), (1, 2, 4, 8), r"H a multiple of G and the same D, got \(1, 3, 4, 8\) and"),
        ((1, 2, 4, 8), (1, 2, 4, 16), "the same D"),
        ((4, 8), (4, 8), r"queries must be \(..., heads, places, D\), got \(4, 8\)"),
    ],
)
def test_shapes_without_logits_are_refused(query, key, message):
    with pytest.raises(ValueError, match=message):
        largest_logits(torch.randn(query), torch.randn(key))


def sequence_in_parts(rank):
    mesh = init_device_mesh("cpu", (2,))
    q = torch.randn(2, 2, 8, 6, generator=torch.Generator().manual_seed(0))
    whole = largest_logits(q, q)
    for dim in (2, 3):
        part = distribute_tensor(q, mesh, [Shard(dim)])
        with pytest.raises(TypeError, match="queries are a DTensor placed as"):
            largest_logits(part, part)
    with pytest.raises(TypeError, match="keys are a DTensor"):
        largest_logits(q, DTensor.from_local(q, mesh, [Partial()]))
    heads = distribute_tensor(q, mesh, [Shard(1)])
    assert torch.equal(largest_logits(heads, heads), whole[rank : rank + 1])


def test_a_sequence_in_parts_is_refused():
    """No rank has all pairs: the largest logit of its own is too small."""
    run_forked(2, sequence_in_parts)


# --- known architectures ------------------------------------------------------------------------


class Known(nn.Module):
    """Modules with the names of transformers', around layers of this file."""

    def __init__(self, inner, attention, **config):
        super().__init__()
        self.config = SimpleNamespace(**config)
        self.layers = nn.ModuleList([nn.Module() for _ in range(2)])
        for layer in self.layers:
            setattr(layer, inner, attention())


def test_heads_of_known_architectures_are_found_from_the_configuration():
    def renamed(kind, **names):
        def make():
            attention = Attention(kind)
            for old, new in names.items():
                setattr(attention, new, getattr(attention, old))
                delattr(attention, old)
            return attention

        return make

    sizes = {"num_attention_heads": 4, "hidden_size": 24}
    grouped = {**sizes, "num_key_value_heads": 2}
    latent = {"qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": VALUE}
    plain = {"q": "q_proj", "k": "k_proj", "v": "v_proj"}
    by_name = {"qkv": "query_key_value"}
    cases = {
        "llama": ("self_attn", renamed("gqa", **plain), grouped, "gqa"),
        "phi3": ("self_attn", renamed("fused", qkv="qkv_proj"), grouped, "fused"),
        "gpt_neox": ("attention", renamed("by_head", **by_name), sizes, "by_head"),
        "deepseek_v3": (
            "self_attn",
            renamed("mla"),
            {**sizes, **latent, "q_lora_rank": 8, "kv_lora_rank": 8},
            "mla",
        ),
    }
    for kind, (inner, attention, config, like) in cases.items():
        model = Known(inner, attention, model_type=kind, **config)
        opt = samestep.MuonAdamW(model)
        clip = QKClip(opt, model)
        assert list(clip.layers) == [f"layers.0.{inner}", f"layers.1.{inner}"]
        (found,), wanted = {id(h): h for h in clip.layers.values()}.values(), heads_of(like)
        assert (found.heads, found.kv_heads) == (wanted.heads, wanted.kv_heads)
        assert list(found.weights.values()) == list(wanted.weights.values())
    normalized = Known("self_attn", renamed("gqa"), model_type="qwen3", **grouped)
    with pytest.raises(ValueError, match="'qwen3' normalizes queries and keys"):
        QKClip(samestep.MuonAdamW(normalized), normalized)
    unknown = nn.ModuleList(Known("self_attn", renamed("gqa"), model_type="t5") for _ in range(2))
    with pytest.raises(ValueError, match="in a model of model type 't5' is unknown: pass"):
        QKClip(samestep.MuonAdamW(unknown), unknown)
