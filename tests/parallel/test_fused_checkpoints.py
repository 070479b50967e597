"""Fused matrices are whole in state dicts and checkpoints, which any layout writes and loads."""

import json

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.nn.functional import mse_loss

import samestep
from samestep.checkpoint import CheckpointError
from samestep.layout.fused_rows import parts_apart
from samestep.mesh import build
from samestep.parallel.stack import Stack
from tests.parallel.fused_model import (
    fused_plan,
    new_model,
    split_sizes,
    train,
    train_stack,
)
from tests.parallel.test_fused import farthest, whole, whole_state_dict
from tests.ranks import run_forked
from tests.soak import SOAK, twin

KV_HEADS = 2
# A variance per row or column, block by block, is state that has no rows of the parameter.
OPTIONS = {"lr": 1e-2, "max_grad_norm": 0.5, "variance_beta2": 0.9}
STEPS = 2 if SOAK else 1  # before a checkpoint, and after it
LAYOUTS = {"tp 2, FSDP2": {"tp": 2}, "tp 4": {"tp": 4}}  # on four ranks


def alone(seed=0, dtype=torch.float32, **options):
    model = new_model(KV_HEADS, seed).to(dtype)
    given = {"split_sizes": split_sizes(KV_HEADS), **OPTIONS, **options}
    return model, samestep.MuonAdamW(model, **given)


def laid_out(degrees, seed=0, dtype=torch.float32, **options):
    model = new_model(KV_HEADS, seed).to(dtype)
    stack = Stack(model, fused_plan(KV_HEADS), build(**degrees), loss=mse_loss)
    return stack, stack.optimizer(**{**OPTIONS, **options})


def values(model, opt):
    """Parameters and state by name; parts are put together here, row after row."""
    found = whole_state_dict(model)
    parts = {}
    for group in opt.param_groups:
        for name, param in zip(group["param_names"], group["params"], strict=True):
            owner, _, rows = name.partition("[")
            for key, value in opt.state[param].items():
                start = int(rows.split(":")[0]) if rows else 0
                parts.setdefault(f"{owner}: {key}", {})[start] = whole(value).detach()
    for name, pieces in parts.items():
        in_order = [pieces[start] for start in sorted(pieces)]
        if in_order[0].ndim == 0:
            assert all(torch.equal(one, in_order[0]) for one in in_order)
        found[name] = torch.cat(in_order) if in_order[0].ndim else in_order[0]
    return found


def differing(found, wanted):
    assert found.keys() == wanted.keys()
    return [name for name in wanted if not torch.equal(found[name], wanted[name])]


def exchange(rank, folder, formats):
    """Save everything from everywhere, and load everything that is there."""
    found = {}
    for name, degrees in LAYOUTS.items():
        stack, opt = laid_out(degrees)
        train_stack(stack, opt, range(STEPS))
        for form in formats:
            samestep.save(folder / f"{name} {form}", stack.model, opt, format=form)
        found[name] = values(stack.model, opt)
    loaded = {}
    for name, degrees in LAYOUTS.items():
        stack, opt = laid_out(degrees, seed=5)
        for source in (*(other for other in LAYOUTS if SOAK or other != name), "alone"):
            for form in reversed(formats):
                samestep.load(folder / f"{source} {form}", stack.model, opt)
                loaded[f"{source} {form}", name] = values(stack.model, opt)
        train_stack(stack, opt, range(STEPS, 2 * STEPS))
        loaded["trained on", name] = values(stack.model, opt)
    return found, loaded


@twin
def test_every_layout_loads_the_checkpoints_of_every_other(tmp_path):
    formats = ["fully_reshardable", "fsdp_dtensor"] if SOAK else ["fully_reshardable"]
    model, opt = alone()
    train(model, opt, range(STEPS))
    for form in formats:
        samestep.save(tmp_path / f"alone {form}", model, opt, format=form)
    wanted = {"alone": values(model, opt)}
    assert wanted["alone"]["layers.0.attention.qkv.weight: variance"].any()
    train(model, opt, range(STEPS, 2 * STEPS))
    trained_on = values(model, opt)
    results = run_forked(4, exchange, tmp_path, formats)
    wanted |= results[0][0]
    for _, loaded in results:
        for (source, name), found in loaded.items():
            if source == "trained on":
                assert farthest(found, trained_on) < 2e-5
                continue
            of = next(own for own in wanted if source.startswith(own))
            assert differing(found, wanted[of]) == [], (source, name)
    for name in LAYOUTS:
        for form in formats:
            model, opt = alone(seed=9)
            samestep.load(tmp_path / f"{name} {form}", model, opt)
            assert differing(values(model, opt), wanted[name]) == [], (name, form)


@twin
def test_a_checkpoint_has_the_usual_names_and_says_how_blocks_are_cut(tmp_path):
    def job(rank):
        stack, _ = laid_out({"tp": 2})
        opt = samestep.MuonAdamW(stack.model, **OPTIONS)  # parts are blocks by themselves
        train_stack(stack, opt, range(1))
        samestep.save(tmp_path / "saved", stack.model, opt)
        return values(stack.model, opt)

    wanted, _ = run_forked(2, job)
    model, opt = alone(seed=2)
    samestep.save(tmp_path / "alone", model, opt)
    samestep.load(tmp_path / "saved", model, opt)
    assert differing(values(model, opt), wanted) == []
    indexes = [json.loads((tmp_path / of / "index.json").read_text()) for of in ("saved", "alone")]
    names = [set(index["tensors"]) for index in indexes]
    assert names[0] == names[1]
    assert not any("[" in name for name in names[0])
    cuts = []
    for index in indexes:
        (muon,) = [g["options"] for g in index["groups"] if g["options"]["rule"] == "muon"]
        cuts.append(muon["split_sizes"]["entries"])
    assert cuts[0] == cuts[1]
    assert cuts[0]["layers.1.attention.qkv.weight"] == [16, 8, 8]


def test_blocks_that_were_cut_otherwise_are_refused(tmp_path):
    """Saved as one block, of which tensor parallel has three."""
    model, opt = alone(split_sizes={"*.qkv.weight": (32,), "*.gate_up.weight": (24,)})
    samestep.save(tmp_path / "one", model, opt)

    def job(rank):
        stack, opt = laid_out({"tp": 2})
        with pytest.raises(CheckpointError, match=r"split_sizes: \(32,\) -> \(16, 8, 8\)"):
            samestep.load(tmp_path / "one", stack.model, opt)
        samestep.load(tmp_path / "one", stack.model)
        return whole_state_dict(stack.model)

    for found in run_forked(2, job):
        assert differing(found, model.state_dict()) == []


def test_what_one_process_cannot_have_is_not_saved(tmp_path):
    def job(rank):
        stack, _ = laid_out({"tp": 2})
        keys = "layers.0.attention.qkv.weight[[]16:24]"
        apart = samestep.MuonAdamW(stack.model, overrides={keys: {"lr": 1e-3}})
        stack.model.get_parameter("layers.1.attention.qkv.weight[0:16]").requires_grad_(False)
        frozen = samestep.MuonAdamW(stack.model)
        found = []
        for opt in (apart, frozen):
            with pytest.raises(CheckpointError) as caught:
                samestep.save(tmp_path / "none", stack.model, opt)
            found.append(str(caught.value))
        return found

    for apart, frozen in run_forked(2, job):
        assert apart.startswith(
            "shards of parameter 'layers.0.attention.qkv.weight' are in several param_groups"
        )
        assert "rows 0 to 16 of 'layers.1.attention.qkv.weight' are missing" in frozen
        assert not (tmp_path / "none").exists()


@twin
def test_master_weights_come_back_with_all_their_bits(tmp_path):
    """Not rounded anew from the 16 bits of the parameters."""
    options = {"master_weights": True, "dtype": torch.bfloat16}
    model, opt = alone(**options)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    opt.step()
    samestep.save(tmp_path / "alone", model, opt)
    wanted = values(model, opt)
    master = wanted["layers.0.attention.qkv.weight: master_weight"]
    assert not torch.equal(master, master.bfloat16().float())

    def job(rank):
        stack, opt = laid_out({"tp": 2}, seed=3, **options)
        samestep.load(tmp_path / "alone", stack.model, opt)
        found = values(stack.model, opt)
        samestep.save(tmp_path / "again", stack.model, opt, format="fsdp_dtensor")
        samestep.save(tmp_path / "local", stack.model, opt, format="dp_local")
        other, opt = laid_out({"tp": 2}, seed=4, **options)
        samestep.load(tmp_path / "local", other.model, opt)
        return found, values(other.model, opt)

    for both in run_forked(2, job):
        for found in both:
            assert differing(found, wanted) == []
    model, opt = alone(seed=8, **options)
    samestep.load(tmp_path / "again", model, opt)
    assert differing(values(model, opt), wanted) == []


# --- state dicts ----------------------------------------------------------------------------------


def state_dicts(rank, degrees, kv_heads):
    plan = fused_plan(kv_heads)
    model = Stack(new_model(kv_heads), plan, build(**degrees), loss=mse_loss).model
    other, before = new_model(kv_heads, seed=6), new_model(kv_heads).state_dict()
    assert list(model.state_dict()) == list(before)
    assert differing(whole_state_dict(model), before) == []
    assert list(get_model_state_dict(model)) == list(before)
    with parts_apart():
        keys = f"qkv.weight[16:{16 + 4 * kv_heads}]"
        assert any(keys in name for name in model.state_dict())
    # Each rank takes its part of what all have; nobody sends anything.
    wanted = other.state_dict()
    fused = {name: value for name, value in wanted.items() if "qkv" in name or "gate_up" in name}
    found = model.load_state_dict(fused, strict=False)
    assert found.unexpected_keys == []
    assert not any("qkv" in name or "gate_up" in name for name in found.missing_keys)
    after = whole_state_dict(model)
    assert differing({n: after[n] for n in fused}, fused) == []
    set_model_state_dict(model, get_model_state_dict(model))
    assert differing(whole_state_dict(model), after) == []
    name = "layers.0.attention.qkv.weight"
    with pytest.raises(RuntimeError, match=r"size mismatch for layers.0.attention.qkv.weight: \(3"):
        model.load_state_dict({name: wanted[name][:3]}, strict=False)
    assert differing(whole_state_dict(model), after) == []
    return True


def test_state_dicts_have_the_usual_tensors():
    # FSDP2 cuts 8 rows over 3 ranks: torch's own full_tensor mixes up what was cut unevenly twice.
    # One head of keys is on both ranks of tensor parallel, two are on one each.
    for kv_heads in (1, 2) if SOAK else (1,):
        assert run_forked(6, state_dicts, {"tp": 2}, kv_heads) == [True] * 6
    if SOAK:
        assert run_forked(4, state_dicts, {"tp": 4}, 2) == [True] * 4
