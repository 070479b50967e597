"""Files of others, one kind after the other: what is in them, and what is refused.

Those of DeepSpeed, Megatron, dion and Trainer are of the packages (`foreign/make_*.py`); where a
test writes some itself, by what is known of their format, it says so.
"""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import samestep
from samestep import cli
from samestep.checkpoint import CheckpointError
from samestep.checkpoint.converting import convert
from samestep.checkpoint.foreign.naming import groups_of_trainer
from samestep.checkpoint.logical import Pieces
from samestep.layout.boxes import held_range
from tests.checkpoint.foreign.net import ADAMW, BEFORE, Net, adamw_groups, tokens_of
from tests.checkpoint.test_switching import NAMES_OF_DION, NEAR, adamw, distance, files, muon, named
from tests.checkpoint.test_switching import train as go_on

__all__ = ["files"]  # a fixture
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:UserWarning"),
    pytest.mark.usefixtures("no_torchrun"),
]


def refused(source, target, *, match, **options):
    """An error that says it, and nothing is left."""
    with pytest.raises(CheckpointError, match=match):
        convert(source, target, **options)
    assert not target.exists()
    assert not list(target.parent.glob(f".{target.name}*"))


def trained(make=None, steps=BEFORE):
    model = Net()
    opt = (make or (lambda m: torch.optim.AdamW(adamw_groups(m), **ADAMW)))(model)
    for step in range(steps):
        model(tokens_of(step)).backward()
        opt.step()
        opt.zero_grad()
    return model, opt


def state_by_name(model, opt):
    names = {param: name for name, param in model.named_parameters()}
    return {names[param]: state for param, state in opt.state.items()}


def assert_has(folder, model, state):
    """That a checkpoint has a torch optimizer's state and a model's parameters, to the bit."""
    found = Net(seed=9)
    loaded = adamw(found)
    samestep.load(folder, found, loaded)
    for name, param in model.named_parameters():
        assert torch.equal(found.get_parameter(name), param), name
        for key, value in state[name].items():
            assert torch.equal(loaded.state[found.get_parameter(name)][key], value), (name, key)
    return loaded


# --- DeepSpeed -------------------------------------------------------------------------------


def test_deepspeed_in_16_bits(files, tmp_path):
    """The model in bf16, main parameters in 32 bits beside it."""
    convert(files / "deepspeed" / "zero2_bf16", tmp_path / "ours")
    model = Net(seed=9).bfloat16()
    opt = adamw(model, master_weights=True)
    samestep.load(tmp_path / "ours", model, opt)
    for name, param in model.named_parameters():
        master = opt.state[param]["master_weight"]
        assert master.dtype == torch.float32
        assert torch.equal(master.bfloat16(), param), name
        assert not torch.equal(master, param.float()), name  # more bits than it has
        assert float(opt.state[param]["step"]) == BEFORE
    assert [group["weight_decay"] for group in opt.param_groups] == [0.1, 0.0]


def test_deepspeed_that_is_not_whole(files, tmp_path):
    folder = tmp_path / "zero3"
    shutil.copytree(files / "deepspeed" / "zero3", folder)
    (folder / "step5" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    refused(folder, tmp_path / "a", match="has 1 .* files instead of 2")
    shutil.copytree(files / "deepspeed" / "universal_zero2", tmp_path / "universal")
    (tmp_path / "universal" / "zero" / "up.bias" / "exp_avg_sq.pt").unlink()
    refused(tmp_path / "universal", tmp_path / "a", match="state of 'up.bias' has the keys")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", tmp_path / "a", match="is no checkpoint of a known format")
    refused(
        tmp_path / "empty", tmp_path / "a", kind="deepspeed", match="no checkpoint of DeepSpeed"
    )


def test_deepspeed_without_bias_correction(files, tmp_path):
    shutil.copytree(files / "deepspeed" / "universal_zero2", tmp_path / "universal")
    path = tmp_path / "universal" / "zero" / "optimizer_state.pt"
    group = {"lr": 0.1, "bias_correction": False, "params": [0]}
    torch.save({"param_groups": [group, group]}, path)
    refused(tmp_path / "universal", tmp_path / "a", match="'embed.weight' .* without bias corr")


# --- Megatron --------------------------------------------------------------------------------


def write_megatron(folder, tensors, groups, iteration=7):
    """By its format: torch_dist is torch.distributed.checkpoint, with common.pt beside it."""
    dcp.save(tensors, checkpoint_id=folder, no_dist=True)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    content = {"iteration": iteration, "optimizer": {"optimizer": {"param_groups": groups}}}
    torch.save(content, folder / "common.pt")


GROUPS = [
    {"lr": 0.5, "betas": (0.8, 0.9), "eps": 1e-7, "weight_decay": 0.2, "wd_mult": 1.0, "step": 7},
    {"lr": 0.5, "betas": (0.8, 0.9), "eps": 1e-7, "weight_decay": 0.0, "wd_mult": 0.0, "step": 7},
]


def flattened(tensor, parts, cuts):
    """As fully_sharded_model_space has it: parts of rows, each flat, and that cut anywhere."""
    flat = tensor.reshape(parts, 1, -1) if tensor.ndim == 2 else tensor.reshape(parts, -1)
    held = []
    for part in range(parts):
        for start, stop in zip([0, *cuts], [*cuts, flat.shape[-1]], strict=True):
            offset = part * flat.shape[-1] + start
            values = flat.reshape(-1)[offset : offset + stop - start].clone()
            held += held_range(tuple(flat.shape), offset, values)
    return Pieces(flat.shape, tensor.dtype, tensor.device, held)


def test_megatron_in_model_space(tmp_path):
    """Layers in a stack, state flat and cut; written by its format, as versions up to 0.13 do."""
    torch.manual_seed(0)
    params = {
        "embedding.weight": torch.randn(8, 6, dtype=torch.bfloat16),
        "decoder.layers.mlp.weight": torch.randn(2, 4, 6, dtype=torch.bfloat16),
        "decoder.layers.mlp.bias": torch.randn(2, 4, dtype=torch.bfloat16),
    }
    state = {
        (key, name): torch.randn(param.shape)
        for name, param in params.items()
        for key in ("exp_avg", "exp_avg_sq", "fp32_param")
    }
    tensors = dict(params)
    for (key, name), value in state.items():
        own = f"optimizer.state.{key}.{name}"
        tensors[own] = flattened(value, 2, [5, 13]) if name == "embedding.weight" else value
    write_megatron(tmp_path / "iter", tensors, GROUPS)
    done = convert(tmp_path / "iter", tmp_path / "ours", rename=[(r"^decoder\.layers", "blocks")])
    assert done.kind == "megatron"

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(8, 6)
            layers = [nn.ModuleDict({"mlp": nn.Linear(6, 4)}) for _ in range(2)]
            self.blocks = nn.ModuleList(layers)

    model = Model().bfloat16()
    bare = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": [p for p in model.parameters() if p.ndim > 1]}, {"params": bare}]
    opt = samestep.AdamW(named(model, groups), lr=9.0, master_weights=True)
    samestep.load(tmp_path / "ours", model, opt)
    assert [g["weight_decay"] for g in opt.param_groups] == [0.2, 0.0]
    for layer in range(2):
        for name in ("weight", "bias"):
            param = model.get_parameter(f"blocks.{layer}.mlp.{name}")
            assert torch.equal(param, params[f"decoder.layers.mlp.{name}"][layer])
            found = opt.state[param]
            assert float(found["step"]) == 7
            for key, ours in (("exp_avg", "exp_avg"), ("fp32_param", "master_weight")):
                assert torch.equal(found[ours], state[key, f"decoder.layers.mlp.{name}"][layer])
    found = opt.state[model.embedding.weight]["exp_avg_sq"]
    assert torch.equal(found, state["exp_avg_sq", "embedding.weight"])


def test_muon_of_megatron(tmp_path):
    """Its layer-wise optimizer: chained, Muon and Adam; written by its format."""
    weight, bias = torch.randn(4, 6), torch.randn(4)
    tensors = {"up.weight": weight, "up.bias": bias}
    momentum = torch.randn(4, 6)
    tensors["chained_0.optimizer.state.momentum_buffer.up.weight"] = momentum
    for key in ("exp_avg", "exp_avg_sq"):
        tensors[f"chained_1.optimizer.state.{key}.up.bias"] = torch.rand(4)
    of_muon = {"lr": 0.3, "momentum": 0.9, "nesterov": True, "weight_decay": 0.0, "wd_mult": 1.0}
    write_megatron(tmp_path / "iter", tensors, [of_muon, GROUPS[1]])
    convert(tmp_path / "iter", tmp_path / "ours")
    model = nn.ModuleDict({"up": nn.Linear(6, 4)})
    opt = samestep.MuonAdamW(model, lr=9.0)
    samestep.load(tmp_path / "ours", model, opt)
    assert torch.equal(opt.state[model["up"].weight]["momentum_buffer"], momentum)
    by_rule = {group["rule"]: group for group in opt.param_groups}
    assert (by_rule["muon"]["lr"], by_rule["muon"]["momentum"]) == (0.3, 0.9)
    assert (by_rule["adamw"]["lr"], by_rule["adamw"]["betas"]) == (0.5, (0.8, 0.9))
    assert by_rule["muon"]["momentum_form"] == "ema"


def test_what_is_refused_of_megatron(files, tmp_path):
    buckets = files / "megatron" / "dp_reshardable"
    refused(buckets, tmp_path / "a", match="flat buckets without names .dp_reshardable.")
    names = json.loads((files / "megatron" / "names.json").read_text())
    refused(
        buckets, tmp_path / "a", names=names[::-1], match="at the place of 'embed.weight' differ"
    )
    refused(buckets, tmp_path / "a", names=names[1:], match="would end at .* of bucket")
    refused(buckets, tmp_path / "a", names=[*names, "other"], match="has the name 'other', which")
    tensors = {"a": torch.ones(3), "optimizer.state.exp_avg.b": torch.ones(3)}
    write_megatron(tmp_path / "one", tensors, GROUPS)
    refused(tmp_path / "one", tmp_path / "a", match="state of 'b' and no such parameter")
    tensors = {"a": torch.ones(3)} | {
        f"optimizer.state.{key}.a": torch.ones(3) for key in ("exp_avg", "exp_avg_sq")
    }
    write_megatron(tmp_path / "two", tensors, [])
    refused(
        tmp_path / "two", tmp_path / "a", match="the source has no state.a.step, .* with --step"
    )
    done = convert(tmp_path / "two", tmp_path / "a", step=12)
    assert {row.to for row in done.rows} >= {"state.a.step", "state.a.exp_avg"}
    (tmp_path / "two" / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    refused(tmp_path / "two", tmp_path / "b", match="format zarr, and only torch_dist is supported")


# --- torch, dion and those who look like them ------------------------------------------------


def test_names_from_a_list_or_a_model(tmp_path):
    """Two groups without names: by lists of groups, or where no two parameters share a shape."""
    model, opt = trained()
    names = {param: name for name, param in model.named_parameters()}
    groups = [[names[p] for p in group["params"]] for group in opt.param_groups]
    torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, tmp_path / "a.pt")
    refused(
        tmp_path / "a.pt", tmp_path / "no", match="nothing says which are in which of its 2 groups"
    )
    convert(tmp_path / "a.pt", tmp_path / "ours", names=groups)
    loaded = assert_has(tmp_path / "ours", model, state_by_name(model, opt))
    assert [group["lr"] for group in loaded.param_groups] == [0.01, 0.02]
    wrong = [groups[0][::-1], groups[1]]
    refused(
        tmp_path / "a.pt", tmp_path / "no", names=wrong, match="does not fit 'down.weight' of sh"
    )
    refused(tmp_path / "a.pt", tmp_path / "no", names=groups[:1], match="groups of .* names, and")


def test_a_state_dict_and_a_model(tmp_path):
    """The optimizer's file alone; names are those of a model that is built."""
    model, opt = trained(lambda m: torch.optim.AdamW(m.parameters(), **ADAMW))
    torch.save(opt.state_dict(), tmp_path / "opt.pt")
    with torch.device("meta"):
        built = nn.ModuleDict(dict(Net().named_children()))
    done = convert(tmp_path / "opt.pt", tmp_path / "ours", model=built)
    assert all(row.to.startswith("state.") for row in done.rows)
    ours = Net(seed=9)
    loaded = samestep.AdamW(ours.named_parameters())
    samestep.load(tmp_path / "ours", optimizer=loaded)
    for name, state in state_by_name(model, opt).items():
        assert torch.equal(
            loaded.state[ours.get_parameter(name)]["exp_avg_sq"], state["exp_avg_sq"]
        )


@pytest.mark.parametrize("form", ["a list", "two files"])
def test_two_optimizers_side_by_side(tmp_path, form):
    """As nanochat had them: AdamW and Muon, each with a state dict."""

    def both(model):
        weights = [model.up.weight, model.down.weight]
        others = [p for p in model.parameters() if all(p is not w for w in weights)]
        return Both(torch.optim.AdamW(others, **ADAMW), torch.optim.Muon(weights, lr=0.03))

    model, opt = trained(both)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    dicts = [own.state_dict() for own in opt.both]
    paths = [tmp_path / "optim.pt"]
    if form == "a list":
        torch.save(dicts, paths[0])
    else:
        paths = [tmp_path / "adamw.pt", tmp_path / "muon.pt"]
        for path, content in zip(paths, dicts, strict=True):
            torch.save(content, path)
    names = NAMES_OF_DION[::-1]
    convert(tmp_path / "model.pt", tmp_path / "ours", optimizers=paths, names=names)
    ours = Net(seed=9)
    loaded = muon(ours)
    samestep.load(tmp_path / "ours", ours, loaded)
    for own in opt.both:
        for name, state in state_by_name(model, own).items():
            for key, value in state.items():
                assert torch.equal(loaded.state[ours.get_parameter(name)][key], value)
    assert [group["lr"] for group in loaded.param_groups] == [0.03, 0.01]


class Both:
    def __init__(self, *both):
        self.both = both

    def step(self):
        for own in self.both:
            own.step()

    def zero_grad(self):
        for own in self.both:
            own.zero_grad()


@pytest.mark.parametrize("whose", ["keller", "moonlight"])
def test_muon_of_others(tmp_path, whose):
    """Keller Jordan's averages and Moonlight's sums; written as their classes lay it out."""
    matrix, rest = torch.randn(9, 5), torch.rand(9)
    if whose == "keller":
        of_muon = {"use_muon": True, "lr": 0.3, "momentum": 0.9, "weight_decay": 0.2}
        others = {"use_muon": False, "lr": 0.4, "betas": (0.7, 0.8), "eps": 1e-9}
        groups = [{**of_muon, "params": [0]}, {**others, "weight_decay": 0.2, "params": [1]}]
        state = {
            0: {"momentum_buffer": matrix},
            1: {"exp_avg": rest, "exp_avg_sq": rest + 1, "step": 6},
        }
    else:
        both = {"lr": 0.3, "wd": 0.2, "momentum": 0.9, "nesterov": True, "ns_steps": 4}
        both |= {"adamw_betas": (0.7, 0.8), "adamw_eps": 1e-9, "params": [0, 1]}
        groups = [both]
        state = {
            0: {"use_muon": True, "momentum_buffer": matrix},
            1: {"use_muon": False, "moment1": rest, "moment2": rest + 1, "step": 6},
        }
    torch.save({"state": state, "param_groups": groups}, tmp_path / "opt.pt")
    convert(tmp_path / "opt.pt", tmp_path / "ours", names=["up.weight", "up.bias"])
    model = nn.ModuleDict({"up": nn.Linear(5, 9)})
    opt = samestep.MuonAdamW(model, lr=9.0)
    samestep.load(tmp_path / "ours", optimizer=opt)
    by_rule = {group["rule"]: group for group in opt.param_groups}
    of_muon, of_adamw = by_rule["muon"], by_rule["adamw"]
    assert torch.equal(opt.state[model["up"].weight]["momentum_buffer"], matrix)
    assert torch.equal(opt.state[model["up"].bias]["exp_avg_sq"], rest + 1)
    assert float(opt.state[model["up"].bias]["step"]) == 6
    assert of_muon["momentum_form"] == ("ema" if whose == "keller" else "sum")
    assert (of_muon["lr"], of_muon["momentum"], of_muon["weight_decay"]) == (0.3, 0.9, 0.2)
    assert (of_adamw["betas"], of_adamw["eps"], of_adamw["weight_decay"]) == ((0.7, 0.8), 1e-9, 0.2)
    assert of_muon["eps"] == 1e-7
    assert of_muon["adjust_lr"] == ("original" if whose == "keller" else "match_rms_adamw")


def test_normuon_of_dion(files, tmp_path):
    """Its variance is per row, of wide blocks too, and the run goes on where it was."""
    folder = files / "dion" / "normuon"
    convert(folder / "step5.pt", tmp_path / "ours", names=NAMES_OF_DION)
    model = Net(seed=9)
    loaded = muon(model, variance_beta2=0.5, variance_axis="rows")
    samestep.load(tmp_path / "ours", model, loaded)
    theirs = torch.load(folder / "step5.pt")["optimizer"]["state"]
    for number, param in enumerate((model.up.weight, model.down.weight)):
        found = loaded.state[param]
        assert torch.equal(found["variance"], theirs[number]["variance_neuron"].flatten())
        assert torch.equal(found["momentum_buffer"], theirs[number]["momentum"])
    assert loaded.param_groups[0]["variance_beta2"] == 0.95
    go_on(model, loaded, 0, 1)
    found = {name: loaded.full_parameter(name) for name, _ in model.named_parameters()}
    assert distance(found, torch.load(folder / "expected.pt")) < NEAR["muon"]


def test_what_has_no_counterpart(tmp_path):
    """Each is refused with the name of a tensor, and the reason."""

    def file(make, change=None):
        model, opt = trained(make, steps=1)
        content = opt.state_dict()
        if change:
            change(content)
        torch.save({"model": model.state_dict(), "optimizer": content}, tmp_path / "a.pt")
        return tmp_path / "a.pt"

    def optimizer(kind, **options):
        return lambda model: kind(model.named_parameters(), **options)

    out = tmp_path / "out"
    adam = optimizer(torch.optim.Adam, weight_decay=0.1)
    refused(file(adam), out, match="'embed.weight' was trained by Adam with weight_decay 0.1")
    convert(file(optimizer(torch.optim.Adam)), tmp_path / "no decay")
    sgd = optimizer(torch.optim.SGD, momentum=0.9)
    refused(file(sgd), out, match="'embed.weight' was trained by SGD")
    rmsprop = file(optimizer(torch.optim.RMSprop))
    refused(rmsprop, out, match="of RMSprop or Adadelta")
    done = convert(rmsprop, tmp_path / "model", only="model")
    assert len(done.rows) == 7
    assert all(row.to.startswith("model.") for row in done.rows)

    def scaled(content):
        content["param_groups"][0]["adjust_lr_fn"] = "spectral"

    def matrices(model):
        return torch.optim.Muon([("up.weight", model.up.weight)])

    refused(file(matrices, scaled), out, match="'up.weight' was trained with adjust_lr_fn='spec")

    def spectral(content):
        group = content["param_groups"][0]
        group |= {"algorithm": "muon", "mu": 0.95, "epsilon": 1e-8, "nesterov": True}
        group["adjust_lr"] = "spectral_norm"
        for state in content["state"].values():
            state |= {"momentum": state.pop("exp_avg")}

    of_dion = file(optimizer(torch.optim.AdamW), spectral)
    if "dion" not in samestep.presets.PRESETS:
        refused(of_dion, out, match="options of 'embed.weight' have no equivalent")
    convert(of_dion, out, preset="moonlight")
    assert out.exists()
    refused(of_dion, tmp_path / "b", preset="nanochat", match="keeps a variance of rows, and")
    refused(of_dion, tmp_path / "b", preset="other", match="preset 'other' is not known")


def test_a_folder_of_torch_whose_optimizer_is_none_of_ours(tmp_path):
    """The model loads; who wants its state is told why there is none."""
    model, opt = trained(lambda m: torch.optim.SGD(m.named_parameters(), momentum=0.9), steps=1)
    of_model, of_opt = get_state_dict(model, opt)
    content = {"model": of_model, "optimizer": of_opt}
    dcp.save(content, checkpoint_id=tmp_path / "sgd", no_dist=True)
    ours = Net(seed=9)
    samestep.load(tmp_path / "sgd", ours)
    assert torch.equal(ours.up.weight, model.up.weight)
    with pytest.raises(CheckpointError, match="was trained by SGD"):
        samestep.load(tmp_path / "sgd", ours, adamw(ours))
    refused(tmp_path / "sgd", tmp_path / "a", match="was trained by SGD")
    assert len(convert(tmp_path / "sgd", tmp_path / "a", only="model").rows) == 7


def test_a_part_of_others(files, tmp_path):
    """The model alone, also where it is made of main parameters; and the optimizer alone."""
    for name in ("deepspeed/zero3", "deepspeed/universal_zero3", "megatron/dp_reshardable"):
        own = tmp_path / name.replace("/", " ")
        assert len(convert(files / name, own, only="model").rows) == 7
        samestep.load(own, Net(seed=9))
    done = convert(files / "deepspeed" / "zero1", tmp_path / "opt", only="optimizer")
    assert len(done.rows) == 21
    samestep.load(tmp_path / "opt", optimizer=adamw(Net()))


# --- Trainer ---------------------------------------------------------------------------------


def test_trainer(files, tmp_path):
    """With names that its own run has written down; every parameter has its own state."""
    folder = files / "trainer" / "run" / "checkpoint-3"
    names = files / "trainer" / "names.json"
    done = convert(folder, tmp_path / "ours", names=names)
    assert done.kind == "trainer"
    expected = torch.load(files / "trainer" / "expected.pt")
    checkpoint = samestep.checkpoint.formats.open_checkpoint(tmp_path / "ours")
    for name, state in expected.items():
        for key in ("exp_avg", "exp_avg_sq", "step"):
            entry = checkpoint.tensors[f"state.{name}.{key}"]
            index = dcp.metadata.MetadataIndex(f"state.{name}.{key}", entry.chunks[0].offsets)
            assert torch.equal(checkpoint.read(index), state[key].cpu().reshape(entry.size)), name
    groups = checkpoint.content["groups"]
    assert [group["options"]["weight_decay"] for group in groups] == [0.1, 0.0]
    assert checkpoint.content["extra"] == {
        "trainer": {"global_step": 3, "epoch": 0.75, "max_steps": 3}
    }
    assert [group["params"] for group in groups] == json.loads(names.read_text())


def test_order_of_trainer():
    """Decayed first; norms and biases after them, whatever their place in the model."""
    model = nn.ModuleDict({"up": nn.Linear(2, 2), "norm": nn.LayerNorm(2), "out": nn.Linear(2, 2)})
    model["final"] = nn.Sequential(nn.LayerNorm(2))
    assert groups_of_trainer(model) == [
        ["up.weight", "out.weight"],
        ["up.bias", "norm.weight", "norm.bias", "out.bias", "final.0.weight", "final.0.bias"],
    ]


def test_trainer_with_transformers(files, tmp_path):
    """The model of config.json gives the order, and a tied head its name."""
    pytest.importorskip("transformers")
    folder = files / "trainer" / "run" / "checkpoint-3"
    done = convert(folder, tmp_path / "ours")
    named = convert(folder, tmp_path / "named", names=files / "trainer" / "names.json")
    assert {(r.to, r.origin) for r in named.rows} < {(r.to, r.origin) for r in done.rows}
    assert {r.to for r in done.rows} - {r.to for r in named.rows} == {"model.lm_head.weight"}


# --- the command -----------------------------------------------------------------------------


def test_report_and_dry_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    model, opt = trained(lambda m: torch.optim.AdamW(m.named_parameters(), **ADAMW))
    torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, tmp_path / "a.pt")
    words = ["convert", str(tmp_path / "a.pt"), str(tmp_path / "ours"), "--rename"]
    words += [r"^(up|down)\.=mlp.\1.", "--rename", "^embed=wte"]
    assert cli.main([*words, "--dry-run", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["written"], report["from"], report["left_out"]) == (False, "torch", [])
    rows = {row["to"]: row for row in report["tensors"]}
    assert set(rows) >= {"model.mlp.up.weight", "state.mlp.down.weight.exp_avg", "model.wte.weight"}
    assert rows["state.wte.weight.exp_avg"]["shape"] == [11, 5]
    assert rows["state.wte.weight.exp_avg"]["from"] == "a.pt: embed.weight exp_avg"
    assert not (tmp_path / "ours").exists()
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    assert "28 tensors of torch" in shown
    assert "state.mlp.up.weight.exp_avg" in "".join(shown.split())
    ours = nn.ModuleDict({"wte": nn.Embedding(11, 5)})
    loaded = samestep.AdamW(ours.named_parameters())
    samestep.load(tmp_path / "ours", ours, loaded, partial=True)
    assert torch.equal(ours["wte"].weight, model.embed.weight)
    value = opt.state[model.embed.weight]["exp_avg"]
    assert torch.equal(loaded.state[ours["wte"].weight]["exp_avg"], value)


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ("up", "not of the form regex=replacement"),
        ("nothing=x", "matches no name; the names are embed.weight"),
        ("up|down=both", r"turns both 'up.weight' and 'down.weight' into 'both.weight'"),
        ("(=x", "missing \\)"),
    ],
)
def test_renames_that_are_refused(tmp_path, capsys, rule, reason):
    model, _ = trained(steps=1)
    torch.save(model.state_dict(), tmp_path / "a.pt")
    words = ["convert", tmp_path / "a.pt", tmp_path / "ours", "--rename", rule]
    assert cli.main([*map(str, words)]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert re.search(reason, shown), shown
    assert not (tmp_path / "ours").exists()


class Trap:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (open, (str(self.mark), "w"))


def test_nothing_in_files_of_others_is_run(files, tmp_path):
    mark = tmp_path / "mark"
    folder = tmp_path / "zero1"
    shutil.copytree(files / "deepspeed" / "zero1", folder)
    path = next(folder.glob("step5/*model_states.pt"))
    torch.save(torch.load(path) | {"client": Trap(mark)}, path)
    refused(folder, tmp_path / "a", match="loading it could run code; nothing was loaded")
    folder = tmp_path / "megatron"
    shutil.copytree(files / "megatron" / "fully_reshardable", folder)
    torch.save({"args": Trap(mark)}, folder / "iter_0000005" / "common.pt")
    refused(
        folder,
        tmp_path / "a",
        match="loading it could run code; nothing was loaded.* or give --step N",
    )
    done = convert(folder, tmp_path / "without", step=BEFORE)
    assert done.left_out == ["common.pt"]
    assert not mark.exists()


def test_whose_it_is(files, tmp_path):
    """It is found out, and what was said is held against it."""
    folder = files / "dion" / "muon"
    assert convert(folder / "dcp", tmp_path / "a").kind == "dion"
    assert convert(folder / "dcp", tmp_path / "b", kind="dion").kind == "dion"
    model, opt = trained(lambda m: torch.optim.AdamW(m.named_parameters()), steps=1)
    torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, tmp_path / "a.pt")
    refused(
        tmp_path / "a.pt",
        tmp_path / "c",
        kind="dion",
        match="is a checkpoint of torch.optim, not of d",
    )
    refused(tmp_path / "a.pt", tmp_path / "c", kind="dcp", match="is a file, and checkpoints of")
    refused(folder, tmp_path / "c", kind="megatron", match="is no distributed checkpoint of Mega")
    refused(folder, tmp_path / "c", kind="trainer", match="is no checkpoint of Trainer")


def test_cut_rows_keep_their_names(tmp_path):
    """Of ours, under another name: how a fused weight is cut goes along."""
    model = nn.ModuleDict({"qkv": nn.Linear(4, 6, bias=False)})
    opt = samestep.MuonAdamW(model, overrides={"qkv.weight": {"split_sizes": (2, 4)}})
    samestep.save(tmp_path / "a", model, opt)
    convert(tmp_path / "a", tmp_path / "b", rename=[("^qkv", "attn.fused")])
    inner = nn.ModuleDict({"fused": nn.Linear(4, 6, bias=False)})
    other = nn.ModuleDict({"attn": inner})
    loaded = samestep.MuonAdamW(other, overrides={"attn.fused.weight": {"split_sizes": (2, 4)}})
    samestep.load(tmp_path / "b", other, loaded)
    assert torch.equal(inner["fused"].weight, model["qkv"].weight)
    uncut = samestep.MuonAdamW(other)
    with pytest.raises(CheckpointError, match="split_sizes"):
        samestep.load(tmp_path / "b", other, uncut)
