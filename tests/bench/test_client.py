"""`samestep bench client`, with peers that a test writes: small, and with the same few names."""

import json
import sys
from textwrap import dedent
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import samestep
from samestep import cli
from samestep.lab.bench.client import llama, nanochat, report
from samestep.lab.bench.client.llama import Llama, LlamaShape
from samestep.lab.bench.client.training import Batches, Contestant, NotFinite, Training
from samestep.lab.bench.gpu import report as gpu_report
from samestep.train.corpus import load_file

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PEERS = ("nanochat", "dion")

pytestmark = pytest.mark.usefixtures("no_torchrun")

# A model of nanochat's interface: built on meta, filled by init_weights, gives its loss, and makes
# groups of both kinds. Its optimizer is SGD on AdamW groups and the polar factor on Muon's.
NANOCHAT = {
    "nanochat/__init__.py": "",
    "nanochat/common.py": """
        import os
        import torch
        COMPUTE_DTYPE = getattr(torch, os.environ["NANOCHAT_DTYPE"])
        """,
    "nanochat/optim.py": """
        import torch
        class MuonAdamW(torch.optim.Optimizer):
            def __init__(self, groups):
                super().__init__(groups, defaults={})
            @torch.no_grad()
            def step(self):
                for group in self.param_groups:
                    for p in group["params"]:
                        g = p.grad
                        if group["kind"] == "muon":
                            u, _, v = torch.linalg.svd(g, full_matrices=False)
                            g = u @ v
                        p -= group["lr"] * g
        """,
    "nanochat/gpt.py": """
        from dataclasses import dataclass
        import torch
        from torch import nn
        from nanochat.optim import MuonAdamW
        @dataclass
        class GPTConfig:
            sequence_len: int = 2048
            vocab_size: int = 32768
            n_layer: int = 12
            n_head: int = 6
            n_kv_head: int = 6
            n_embd: int = 768
        class GPT(nn.Module):
            def __init__(self, config):
                super().__init__()
                assert config.n_embd == 128 * config.n_head
                self.wte = nn.Embedding(config.vocab_size, 8)
                self.h = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(config.n_layer))
                self.lm_head = nn.Linear(8, config.vocab_size, bias=False)
                self.scale = nn.Parameter(torch.ones(1))
            @torch.no_grad()
            def init_weights(self):
                print("initializing")
                for p in self.parameters():
                    nn.init.normal_(p, std=0.3)
            def forward(self, inputs, targets):
                x = self.wte(inputs)
                for linear in self.h:
                    x = x + linear(x).relu()
                logits = self.lm_head(x * self.scale)
                return nn.functional.cross_entropy(logits.view(-1, 256), targets.view(-1))
            def setup_optimizer(self, matrix_lr=0.02, weight_decay=0.0):
                adam = [self.wte.weight, self.lm_head.weight, self.scale]
                groups = [dict(kind="adamw", params=adam, lr=0.1, betas=(0.8, 0.95), eps=1e-10,
                               weight_decay=0.01)]
                groups.append(dict(kind="muon", params=list(self.h.parameters()), lr=matrix_lr,
                                   momentum=0.95, ns_steps=5, beta2=0.9, weight_decay=weight_decay))
                optimizer = MuonAdamW(groups)
                for group in optimizer.param_groups:
                    group["initial_lr"] = group["lr"]
                return optimizer
        """,
    "COMMIT": "abc123\n",
}


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text).lstrip("\n"))
    return folder


@pytest.fixture
def peers(tmp_path, monkeypatch):
    """A folder for checkouts, whose modules are forgotten afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "torch._dynamo.config", SimpleNamespace())
    yield tmp_path / "peers"
    for name in list(sys.modules):
        if name.partition(".")[0] in PEERS:
            del sys.modules[name]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 40)
    return path


@pytest.fixture
def plain(monkeypatch):
    """No picture and no coloured tables, which take longer than all the rest."""
    for module in (report, gpu_report):
        monkeypatch.setattr(module, "find_spec", lambda name: None)


def words(peers, text, out, *more):
    return [
        "bench", "client", "nanochat", "--peer-path", str(peers), "--device", "cpu", "--data",
        str(text), "--layers", "1", "--batch", "2", "--sequence", "16", "--steps", "8", "--warmup",
        "2", "--every", "3", "--out", str(out), *more,
    ]  # fmt: skip


def test_nanochat(tmp_path, capsys, peers, text):
    write(peers, NANOCHAT)
    out = tmp_path / "out"
    assert cli.main(words(peers, text, out, "--seeds", "4", "5")) == 0
    shown = capsys.readouterr()
    content = json.loads((out / "nanochat.json").read_text())
    assert content["kind"] == "samestep client nanochat"
    assert content["peers"] == {str(peers): "abc123"}
    assert content["model"]["config"]["n_embd"] == 128
    assert content["model"]["dtype"] == "float32"
    assert content["training"]["seeds"] == [4, 5]
    assert content["text"]["bytes"] == len(text.read_bytes()) - len(text.read_bytes()) // 10
    assert [each["seed"] for each in content["seeds"]] == [4, 5]
    for seed in content["seeds"]:
        theirs, ours = seed["trainings"]
        assert (theirs["name"], ours["name"]) == ("nanochat", "ours")
        assert theirs["losses"][0] == ours["losses"][0]  # the same weights and the same batch
        assert theirs["losses"][1:] != ours["losses"][1:]
        for training in (theirs, ours):
            assert training["failed"] is training["not_finite"] is None
            assert training["steps_done"] == len(training["losses"]) == 8
            assert training["final_loss"] == pytest.approx(sum(training["losses"]) / 8, abs=1e-5)
            assert training["validation_loss"] > 0
            for times in ("optimizer_ms", "host_ms", "iteration_ms"):
                assert training[times]["low"] <= training[times]["median"]
        assert ours["validation_loss"] < ours["losses"][0]
    first, second = (seed["trainings"][0]["losses"] for seed in content["seeds"])
    assert first != second
    theirs, ours = content["contestants"]
    assert ours["final_losses"] == [s["trainings"][1]["final_loss"] for s in content["seeds"]]
    assert ours["mean"] == pytest.approx(sum(ours["final_losses"]) / 2)
    assert ours["finite"] is True
    assert theirs["standard_deviation"] == pytest.approx(
        abs(theirs["final_losses"][0] - theirs["final_losses"][1]) / 2**0.5
    )
    broke, loss = content["bars"]
    assert broke["met"] is True
    assert loss["value"] == pytest.approx(ours["mean"] - theirs["mean"])
    assert loss["bar"] == theirs["standard_deviation"]
    assert (out / "nanochat.png").read_bytes().startswith(PNG_SIGNATURE)
    assert "seed 4: nanochat final loss" in shown.out
    assert "Time by the wall clock" in shown.out
    assert "ours: mean final loss above nanochat's" in shown.out
    assert "initializing" not in shown.out
    for done in (3, 6, 8):
        assert f"seed 5, step {done}: nanochat " in shown.err


@pytest.mark.usefixtures("plain")
def test_both_see_the_same_from_step_to_step(tmp_path, capsys, peers, text, monkeypatch):
    """Ours twice: nothing may differ."""
    write(peers, NANOCHAT)
    ours = Contestant("twin", "", nanochat.our_optimizer, ours=True)
    both = (nanochat.contestants()[1], ours)
    monkeypatch.setattr(nanochat, "contestants", lambda lr_scale=1.0: both)
    assert cli.main(words(peers, text, tmp_path, "--seeds", "1", "--variants", "ours", "twin")) == 0
    content = json.loads((tmp_path / "nanochat.json").read_text())
    first, second = content["seeds"][0]["trainings"]
    assert first["losses"] == second["losses"]
    assert first["validation_loss"] == second["validation_loss"]


@pytest.mark.usefixtures("plain")
def test_what_is_not_finite_is_named_and_ends_nobody_else(tmp_path, capsys, peers, text):
    optim = NANOCHAT["nanochat/optim.py"]
    for old, new in (
        ("super().__init__(groups, defaults={})", "super().__init__(groups, {}); self.steps = 0"),
        ("def step(self):", "def step(self):\n                self.steps += 1"),
        ("-= group", "-= (float('nan') if self.steps == 4 and p.shape == (8, 8) else 1) * group"),
    ):
        assert optim.count(old) == 1
        optim = optim.replace(old, new)
    files = {**NANOCHAT, "nanochat/optim.py": optim}
    write(peers, files)
    assert cli.main(words(peers, text, tmp_path, "--seeds", "0")) == 0  # ours came through
    content = json.loads((tmp_path / "nanochat.json").read_text())
    theirs, ours = content["seeds"][0]["trainings"]
    assert theirs["not_finite"] == {"step": 3, "parameters": ["h.0.weight"]}
    assert theirs["steps_done"] == 4
    assert theirs["final_loss"] is theirs["validation_loss"] is None
    assert ours["steps_done"] == 8
    assert ours["final_loss"] is not None
    assert content["contestants"][0]["finite"] is False
    assert "nanochat is NOT FINITE at step 3: h.0.weight" in capsys.readouterr().out


@pytest.mark.usefixtures("plain")
def test_ours_that_is_not_finite_is_a_failure(tmp_path, capsys, peers, text, monkeypatch):
    write(peers, NANOCHAT)
    step = samestep.MuonAdamW.step

    def broken(self, *arguments):
        step(self, *arguments)
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                param.fill_(float("inf"))

    monkeypatch.setattr(samestep.MuonAdamW, "step", broken)
    assert cli.main(words(peers, text, tmp_path, "--seeds", "0", "1")) == 1
    shown = capsys.readouterr().out
    assert "seed 1: " in shown
    assert "ours is NOT FINITE at step 0: scale and 2 more" in shown
    assert "NOT MET      ours: trainings that broke: 2, bar <= 0" in shown


@pytest.mark.usefixtures("plain")
def test_one_that_fails_is_out_and_the_receipt_says_why(tmp_path, capsys, peers, text):
    write(peers, NANOCHAT)
    more = ("--seeds", "0", "--variants", "nanochat", "ours", "ours-graph")
    assert cli.main(words(peers, text, tmp_path, *more)) == 1
    content = json.loads((tmp_path / "nanochat.json").read_text())
    theirs, ours, graph = content["seeds"][0]["trainings"]
    assert theirs["failed"] is ours["failed"] is None
    assert "cuda_graph=True" in graph["failed"]
    assert graph["losses"] == []


@pytest.mark.usefixtures("plain")
def test_what_was_measured_is_there_when_a_run_is_cut_off(
    tmp_path, capsys, peers, text, monkeypatch
):
    write(peers, NANOCHAT)
    step, calls = samestep.MuonAdamW.step, []

    def interrupted(self, *arguments):
        calls.append(1)
        if len(calls) == 13:
            raise KeyboardInterrupt
        step(self, *arguments)

    monkeypatch.setattr(samestep.MuonAdamW, "step", interrupted)
    assert cli.main(words(peers, text, tmp_path, "--seeds", "0", "1")) == 130
    content = json.loads((tmp_path / "nanochat.json").read_text())
    whole, cut = content["seeds"]
    assert whole["trainings"][1]["final_loss"] is not None
    assert cut["trainings"][1]["steps_done"] == 3  # as of the last line of progress
    assert cut["trainings"][1]["final_loss"] is None
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["text", "nanochat.json"]


@pytest.mark.usefixtures("plain")
def test_without_matplotlib_there_is_no_picture(tmp_path, capsys, peers, text):
    write(peers, NANOCHAT)
    assert cli.main(words(peers, text, tmp_path, "--seeds", "0")) == 0
    assert "No picture: matplotlib is not installed." in capsys.readouterr().out
    assert not (tmp_path / "nanochat.png").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--steps 0", "--steps must be at least 1, got 0"),
        ("--layers 0", "--layers must be at least 1, got 0"),
        ("--batch -1", "--batch must be at least 1, got -1"),
        ("--sequence 1", "--sequence must be at least 2, got 1"),
        ("--every 0", "--every must be at least 1, got 0"),
        ("--warmup 7", "--warmup 7 leaves fewer than two of --steps 8 to time"),
        ("--seeds 0 -1", "--seeds must be at least 0, got -1"),
        ("--lr-scale 0", "--lr-scale must be above 0, got 0.0"),
        ("--variants mine", "--variants: 'mine' is unknown; choose from nanochat, ours"),
        ("--dtype float8", "argument --dtype: invalid choice: 'float8'"),
        ("--data nowhere", "--data 'nowhere' is not a file"),
        ("--sequence 5000", "--sequence 5000 needs at least 5001 bytes in the training"),
        ("--peer-path nowhere", "--peer-path 'nowhere' is not a folder"),
        ("--colour red", "unrecognized arguments: --colour red"),
    ],
)
def test_what_cannot_be_done(tmp_path, capsys, peers, text, more, message):
    write(peers, NANOCHAT)
    assert cli.main(words(peers, text, tmp_path, *more.split())) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"error: {message}")
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_a_gpu_is_needed_unless_a_cpu_is_asked_for(tmp_path, capsys, peers, text, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", "client", "nanochat"]) == 2
    assert "--device cuda needs a CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "nanochat cannot be imported: ImportError: no nanochat here; --peer-path names a"),
        (
            {"nanochat/__init__.py": "", "nanochat/gpt.py": "import nobody_has_this"},
            "nanochat cannot be imported: ModuleNotFoundError: No module named 'nobody_has_this'",
        ),
        (
            {**NANOCHAT, "nanochat/common.py": "import torch\nCOMPUTE_DTYPE = torch.bfloat16"},
            "--dtype is float32, but nanochat was imported with torch.bfloat16",
        ),
        (
            {**NANOCHAT, "nanochat/gpt.py": "class GPT: pass"},
            "this nanochat's GPT has no setup_optimizer: use a newer checkout",
        ),
    ],
    ids=["no checkout", "something missing", "another dtype", "too old"],
)
def test_peers_that_do_not_fit_are_refused(tmp_path, capsys, peers, text, files, message):
    write(peers, {**files, "COMMIT": ""})
    assert cli.main(words(peers, text, tmp_path / "out")) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
    assert not (tmp_path / "out").exists()


# Llama


# dion's Muon as SGD, which keeps learning rates in tensors of its own, as the real one does.
DION = {
    "dion/__init__.py": """
        import torch
        class Muon(torch.optim.Optimizer):
            def __init__(self, groups, lr, **options):
                assert not options["use_triton"] and options["adjust_lr"] == "rms_norm"
                super().__init__(groups, {"lr": lr, "algorithm": "muon"})
                for group in self.param_groups:
                    group["lr"] = torch.tensor(lr)
                self.rates = [group["lr"] for group in self.param_groups]
                self.seen = []
            @torch.no_grad()
            def step(self):
                for group, rate in zip(self.param_groups, self.rates):
                    group["lr"] = rate.fill_(float(group["lr"]))
                    for p in group["params"]:
                        assert (p.ndim == 1) <= (group["algorithm"] == "adamw")
                        p -= rate * p.grad
        """,
}


def llama_words(text, out, *more):
    return [
        "bench", "client", "llama", "--model", "builtin", "--device", "cpu", "--data", str(text),
        "--layers", "1", "--width", "64", "--batch", "2", "--sequence", "16", "--steps", "6",
        "--warmup", "2", "--seeds", "3", "--out", str(out), *more,
    ]  # fmt: skip


@pytest.mark.usefixtures("plain")
def test_llama(tmp_path, capsys, peers, text):
    write(peers, DION)
    assert cli.main(llama_words(text, tmp_path, "--peer-path", str(peers))) == 0
    content = json.loads((tmp_path / "llama.json").read_text())
    assert content["model"]["model"] == "builtin"
    assert content["model"]["transformers"] is None
    assert content["model"]["dtype"] == "bfloat16"
    found = {each["name"]: each for each in content["seeds"][0]["trainings"]}
    assert list(found) == ["ours", "dion", "ours-adamw", "torch-adamw", "torch-adamw-16bit"]
    for training in found.values():
        assert training["failed"] is None
        assert training["losses"][0] == found["ours"]["losses"][0]
        assert training["validation_loss"] < training["losses"][0]
    # Main weights by hand and by us: the same rule, and 16 bits alone are something else.
    assert found["ours-adamw"]["losses"] == pytest.approx(found["torch-adamw"]["losses"], abs=1e-3)
    assert found["torch-adamw-16bit"]["losses"] != found["torch-adamw"]["losses"]
    rivals = {each["name"]: each["rival"] for each in content["contestants"]}
    assert rivals["ours"] == "dion"
    assert rivals["ours-adamw"] == "torch-adamw"


@pytest.mark.usefixtures("plain")
def test_llama_without_dion_goes_on_without_it(tmp_path, capsys, peers, text):
    assert cli.main(llama_words(text, tmp_path, "--variants", "ours", "dion")) == 0
    content = json.loads((tmp_path / "llama.json").read_text())
    ours, dion = content["seeds"][0]["trainings"]
    assert dion["failed"] == "ImportError: no dion here; --peer-path names a checkout"
    assert ours["final_loss"] is not None


def test_llama_of_transformers_is_refused_without_it(tmp_path, capsys, text, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    out = tmp_path / "out"
    assert cli.main(llama_words(text, out, "--model", "transformers")) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: --model transformers is not available (ModuleNotFoundError")
    assert shown.endswith("or --model builtin for the same shapes without it\n")
    assert not out.exists()


@pytest.mark.usefixtures("plain")
def test_llama_of_transformers_gets_the_shape(tmp_path, capsys, text, monkeypatch):
    made = []

    class Model(Llama):
        def __init__(self, config):
            made.append((config, torch.get_default_dtype()))
            super().__init__(LlamaShape(256, 64, 192, 1, 1, 1))

        def forward(self, input_ids):
            return SimpleNamespace(logits=super().forward(input_ids))

    fake = SimpleNamespace(
        LlamaConfig=lambda **given: given, LlamaForCausalLM=Model, __version__="9.9"
    )
    monkeypatch.setitem(sys.modules, "transformers", fake)
    words = llama_words(text, tmp_path, "--model", "transformers", "--variants", "ours")
    assert cli.main(words) == 0
    [(config, dtype)] = made
    assert dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32
    assert config["hidden_size"] == 64
    assert config["intermediate_size"] == 192
    assert config["max_position_embeddings"] == 16
    content = json.loads((tmp_path / "llama.json").read_text())
    assert content["model"]["transformers"] == "9.9"
    assert content["seeds"][0]["trainings"][0]["final_loss"] is not None


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--width 32", "--width must be at least 64, got 32"),
        ("--width 100", "--width must be a multiple of 64, got 100"),
        ("--lr 0", "--lr must be above 0, got 0.0"),
        ("--model gpt", "argument --model: invalid choice: 'gpt'"),
    ],
)
def test_what_llama_cannot_do(tmp_path, capsys, text, more, message):
    assert cli.main(llama_words(text, tmp_path, *more.split())) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"error: {message}")
    assert shown.err.count("\n") == 1


def test_our_llama_is_causal_and_has_fewer_key_heads():
    torch.manual_seed(0)
    shape = LlamaShape(256, 64, 128, 2, num_attention_heads=4, num_key_value_heads=2)
    model = Llama(shape)
    assert model.layers[0].self_attn.k_proj.weight.shape == (32, 64)
    tokens = torch.randint(256, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (tokens[0, 5] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any(-1).all()
    swapped = tokens[:, [1, 0, *range(2, 8)]]
    assert not torch.allclose(model(swapped)[:, -1], before[:, -1], atol=1e-7)  # positions count


def test_learning_rates_of_llama_rise_and_fall_from_where_they_began():
    """Also of an optimizer that writes the rate it was given into a tensor of its own."""
    rate = torch.tensor(0.5)
    optimizer = SimpleNamespace(param_groups=[{"lr": rate}])
    seen = []
    for step in range(20):
        llama.set_rate(optimizer, step, 20)
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.param_groups[0]["lr"] = rate.fill_(seen[-1])
    assert seen[:3] == pytest.approx([0.25, 0.5, 0.5 * (1 - 0.9 / 18)])
    assert seen[-1] == pytest.approx(0.05)


# Batches


def test_batches_follow_from_the_seed_and_the_step(text):
    options = SimpleNamespace(batch=2, sequence=16)
    corpus = load_file(text)

    def batches(seed):
        return Batches(corpus, options, torch.device("cpu"), seed)

    inputs, targets = batches(0).training(3)
    assert inputs.shape == targets.shape == (2, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs, batches(0).training(3)[0])
    assert not torch.equal(inputs, batches(0).training(4)[0])
    assert not torch.equal(inputs, batches(1).training(3)[0])
    held_out = [list(batches(seed).validation()) for seed in (0, 1)]
    assert len(held_out[0]) == 8
    for (one, _), (other, _) in zip(*held_out, strict=True):
        assert torch.equal(one, other)


# Groups


PARAM = nn.Parameter(torch.ones(4, 6))
ADAMW = {
    "kind": "adamw", "params": [PARAM], "lr": 0.31, "betas": (0.81, 0.96), "eps": 1e-11,
    "weight_decay": 0.013, "initial_lr": 0.5,
}  # fmt: skip
MUON = {
    "kind": "muon", "params": [PARAM], "lr": 0.021, "momentum": 0.94, "ns_steps": 4, "beta2": 0.87,
    "weight_decay": 0.27, "initial_lr": 0.6,
}  # fmt: skip


def test_groups_of_adamw_key_by_key():
    assert nanochat.our_group(ADAMW) == {
        "rule": "adamw", "params": [PARAM], "lr": 0.31, "betas": (0.81, 0.96),
        "eps": 1e-11, "weight_decay": 0.013, "initial_lr": 0.5,
    }  # fmt: skip


def test_groups_of_muon_key_by_key():
    assert nanochat.our_group(MUON) == {
        **samestep.presets.nanochat(), "params": [PARAM], "lr": 0.021,
        "momentum": 0.94, "ns_steps": 4, "variance_beta2": 0.87, "weight_decay": 0.27,
        "initial_lr": 0.6,
    }  # fmt: skip


@pytest.mark.parametrize("group", [ADAMW, MUON], ids=["adamw", "muon"])
def test_groups_with_other_keys_are_refused(group):
    with pytest.raises(ValueError, match=r"unknown \['colour'\], missing \[\]"):
        nanochat.our_group({**group, "colour": "red"})
    for key in group.keys() - {"kind", *nanochat.KEPT}:
        with pytest.raises(ValueError, match=rf"unknown \[\], missing \['{key}'\]"):
            nanochat.our_group({k: v for k, v in group.items() if k != key})
    with pytest.raises(ValueError, match="of kind 'sgd', and only adamw and muon are known"):
        nanochat.our_group({**group, "kind": "sgd"})


def test_ours_takes_the_groups_and_the_schedule_sets_them():
    other = nn.Parameter(torch.ones(4))
    groups = [nanochat.our_group(group) for group in ({**ADAMW, "params": [other]}, MUON)]
    optimizer = samestep.MuonAdamW(groups)
    nanochat.set_groups(optimizer, 19, 1000)
    adamw, muon = optimizer.param_groups
    assert (adamw["lr"], adamw["weight_decay"]) == (0.5 * 0.5, 0.013)
    assert muon["lr"] == 0.6 * 0.5
    assert muon["momentum"] == pytest.approx(0.85 + 0.12 * 19 / 400)
    assert muon["weight_decay"] == pytest.approx(0.28, rel=2e-3)
    assert "momentum" not in adamw or adamw["momentum"] != muon["momentum"]


def test_schedules():
    """Values that its training script gives for 1000 iterations."""
    shares = [nanochat.rate_share(step, 1000) for step in (0, 39, 40, 350, 351, 675, 1000)]
    assert shares == pytest.approx([1 / 40, 1, 1, 1, 1 - 0.95 / 650, 0.525, 0.05])
    momenta = [nanochat.muon_momentum(step, 1000) for step in (0, 200, 399, 400, 675, 1000)]
    assert momenta == pytest.approx([0.85, 0.91, 0.9697, 0.97 - 0.07 / 13, 0.935, 0.9])
    assert nanochat.muon_momentum(500, 10_000) == 0.97
    decays = [nanochat.muon_decay(step, 1000) for step in (0, 500, 1000)]
    assert decays == pytest.approx([0.28, 0.14, 0])


# Words


def test_outcomes_in_words():
    peer = Contestant("peer", "", lambda model: None)
    assert report.outcome(Training(peer, failed="OSError: no")) == "peer is out: OSError: no"
    lost = Training(peer, not_finite=NotFinite(7, []))
    assert report.outcome(lost) == "peer is NOT FINITE at step 7: the loss"
    done = Training(peer, losses=[2.0, 1.0], optimizer_ms=[3.0], host_ms=[1.0], steps=2)
    assert report.outcome(done) == "peer final loss 1.5000, optimizer 3.00 ms (host 1.00)"
