"""`samestep convert`: torch's checkpoints into ours, and back."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import samestep
from samestep import cli
from tests.checkpoint.training import Case, build, different, snapshot, train
from tests.ranks import run_forked

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:UserWarning"),
    pytest.mark.usefixtures("no_torchrun"),
]


def convert(source, target, to, *more):
    assert cli.main(["convert", str(source), str(target), "--to", to, *map(str, more)]) == 0


def small(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))


def step(model, opt, number):
    torch.manual_seed(number)
    model(torch.randn(4, 6)).square().mean().backward()
    opt.step()
    opt.zero_grad()


def torch_adamw(model):
    return torch.optim.AdamW(model.named_parameters(), lr=0.01, betas=(0.8, 0.9))


def load_with_torch(folder, model, opt):
    """The usual recipe."""
    of_model, of_opt = get_state_dict(model, opt)
    dcp.load({"model": of_model, "optimizer": of_opt}, checkpoint_id=folder, no_dist=True)
    set_state_dict(model, opt, model_state_dict=of_model, optim_state_dict=of_opt)


def save_with_torch(folder, model, opt):
    of_model, of_opt = get_state_dict(model, opt)
    dcp.save({"model": of_model, "optimizer": of_opt}, checkpoint_id=folder)


def test_ours_is_what_torch_loads(tmp_path):
    """Of several ranks and boxes; into the same optimizer, by torch's own means."""

    def job(rank):
        model, opt = build(Case("flat zero2", 2))
        train(model, opt, range(3))
        samestep.save(tmp_path / "ours", model, opt, extra={"step": 3})
        return snapshot(model, opt)

    expected = run_forked(2, job)[0]
    convert(tmp_path / "ours", tmp_path / "torch", "torch")
    found = build(Case("one", 1), seed=2, lr=0.3)
    load_with_torch(tmp_path / "torch", *found)
    assert different(snapshot(*found), expected) == []
    assert found[1].param_groups[0]["lr"] == 0.01
    convert(tmp_path / "torch", tmp_path / "again", "samestep")
    found = build(Case("one", 1), seed=3, lr=0.3)
    samestep.load(tmp_path / "again", *found)
    assert different(snapshot(*found), expected) == []
    assert found[1].param_groups[0]["lr"] == 0.01
    assert not list(tmp_path.glob(".*"))


def test_adamw_of_torch_and_back(tmp_path):
    """The moments of torch.optim go on in ours, and come back."""
    model = small()
    opt = torch_adamw(model)
    for number in range(3):
        step(model, opt, number)
    save_with_torch(tmp_path / "torch", model, opt)
    convert(tmp_path / "torch", tmp_path / "ours", "samestep")
    ours = small(1)
    loaded = samestep.AdamW(ours, lr=0.5)
    samestep.load(tmp_path / "ours", ours, loaded)
    assert loaded.param_groups[0]["betas"] == (0.8, 0.9)
    for number in range(3, 6):
        step(model, opt, number)
        step(ours, loaded, number)
    for mine, theirs in zip(ours.parameters(), model.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)
    samestep.save(tmp_path / "later", ours, loaded)
    convert(tmp_path / "later", tmp_path / "back", "torch")
    back = small(2)
    again = torch_adamw(back)
    step(back, again, 0)
    load_with_torch(tmp_path / "back", back, again)
    for mine, theirs in zip(back.parameters(), ours.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        whole = loaded.state[theirs]
        assert torch.equal(again.state[mine]["exp_avg"], whole["exp_avg"])
        assert float(again.state[mine]["step"]) == 6


def test_flattened_options_of_torch(tmp_path):
    """Options per parameter, and a model without a prefix, as torchtitan has them."""
    model = small()
    opt = torch_adamw(model)
    step(model, opt, 0)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    of_model, of_opt = get_state_dict(model, opt, options=options)
    dcp.save({**of_model, "optimizer": of_opt}, checkpoint_id=tmp_path / "torch")
    convert(tmp_path / "torch", tmp_path / "ours", "samestep")
    ours = small(1)
    loaded = samestep.AdamW(ours, lr=0.5)
    samestep.load(tmp_path / "ours", ours, loaded)
    assert loaded.param_groups[0]["betas"] == (0.8, 0.9)
    for mine, theirs in zip(ours.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(loaded.state[mine]["exp_avg"], opt.state[theirs]["exp_avg"])


@pytest.mark.parametrize("form", ["named", "by order", "two files", "ddp"])
def test_files_of_torch_save(tmp_path, form):
    model = small()
    named = model.named_parameters() if form != "by order" else model.parameters()
    opt = torch.optim.AdamW(named, lr=0.01)
    step(model, opt, 0)
    prefix = "module." if form == "ddp" else ""
    of_model = {prefix + name: value for name, value in model.state_dict().items()}
    more = []
    if form == "two files":
        torch.save(of_model, tmp_path / "model.pt")
        torch.save(opt.state_dict(), tmp_path / "optimizer.pt")
        more = ["--optimizer", tmp_path / "optimizer.pt"]
    else:
        content = {"model": of_model, "optimizer": opt.state_dict(), "step": 7}
        torch.save(content, tmp_path / "model.pt")
    convert(tmp_path / "model.pt", tmp_path / "ours", "samestep", *more)
    ours = small(1)
    loaded = samestep.AdamW(ours, lr=0.5)
    samestep.load(tmp_path / "ours", ours, loaded)
    assert loaded.param_groups[0]["lr"] == 0.01
    for mine, theirs in zip(ours.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        for key, value in opt.state[theirs].items():
            assert torch.equal(loaded.state[mine][key], value)


def test_muon_of_torch(tmp_path):
    model = nn.Linear(5, 4, bias=False)
    opt = torch.optim.Muon(model.named_parameters(), lr=0.02, momentum=0.9)
    torch.manual_seed(0)
    for number in range(2):
        torch.manual_seed(number)
        model(torch.randn(3, 5)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "ours", "samestep")
    ours = nn.Linear(5, 4, bias=False)
    loaded = samestep.Muon(ours.named_parameters())
    samestep.load(tmp_path / "ours", ours, loaded)
    group = loaded.param_groups[0]
    assert (group["lr"], group["momentum"], group["orthogonalize"]) == (0.02, 0.9, "newton-schulz")
    buffer = opt.state[model.weight]["momentum_buffer"]
    assert torch.equal(loaded.state[ours.weight]["momentum_buffer"], buffer)
    assert torch.equal(ours.weight, model.weight)


def test_torchs_muon_takes_what_was_converted_for_torch(tmp_path):
    def trained(model: nn.Linear, opt: torch.optim.Optimizer, steps: int) -> None:
        for step in range(steps):
            torch.manual_seed(step)
            model.weight.grad = torch.randn(20, 24)
            opt.step()

    model, other = (nn.Linear(24, 20, bias=False) for _ in range(2))
    options = {**samestep.presets.torch(), "lr": 0.02}
    del options["rule"]
    ours = samestep.Muon(model.named_parameters(), **options)
    trained(model, ours, 3)
    samestep.save(tmp_path / "ours", model, ours)
    convert(tmp_path / "ours", tmp_path / "theirs", "torch")
    theirs = torch.optim.Muon(other.named_parameters(), lr=0.5, ns_steps=1)
    of_model, of_opt = get_state_dict(other, theirs)
    dcp.load({"model": of_model, "optimizer": of_opt}, checkpoint_id=tmp_path / "theirs")
    set_state_dict(other, theirs, model_state_dict=of_model, optim_state_dict=of_opt)
    for each in ((model, ours), (other, theirs)):
        trained(*each, 3)
    torch.testing.assert_close(model.weight, other.weight, rtol=0, atol=1e-5)


def refused(capsys, *words):
    assert cli.main(["convert", *map(str, words)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err


def test_what_is_refused(tmp_path, capsys):
    target = (tmp_path / "to", "--to", "samestep")
    assert "does not exist" in refused(capsys, tmp_path / "no", *target)
    (tmp_path / "text").write_text("hello")
    assert "is no file of torch.save" in refused(capsys, tmp_path / "text", *target)
    stacked = {
        "state": {0: {"momentum_buffer": torch.zeros(3, 4, 4)}},
        "param_groups": [{"params": [0, 1, 2], "kind": "muon"}],
    }
    torch.save(stacked, tmp_path / "optim.pt")
    torch.save(dict.fromkeys("abc", torch.zeros(4, 4)), tmp_path / "model.pt")
    words = (tmp_path / "model.pt", *target, "--optimizer", tmp_path / "optim.pt")
    assert "is a checkpoint of nanochat, whose optimizer state has no names" in refused(
        capsys, *words
    )
    del stacked["param_groups"][0]["kind"]
    torch.save(stacked, tmp_path / "optim.pt")
    assert "the optimizer had another order of parameters" in refused(capsys, *words)
    sgd = torch.optim.SGD(small().parameters(), momentum=0.9)
    torch.save(sgd.state_dict(), tmp_path / "sgd.pt")
    assert "has no names of parameters" in refused(capsys, tmp_path / "sgd.pt", *target)
    part = {"state": {}, "param_groups": [], "part": {"rank": 0}}
    torch.save(part, tmp_path / "part.pt")
    assert "is the state of one rank of several" in refused(capsys, tmp_path / "part.pt", *target)
    torch.save({"epoch": 3}, tmp_path / "epoch.pt")
    assert "none is the state dict" in refused(capsys, tmp_path / "epoch.pt", *target)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith((".", "to"))) == []


class Trap:
    """Leaves a mark when it is unpickled the usual way."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (open, (str(self.mark), "w"))


def test_nothing_in_a_file_is_run(tmp_path, capsys):
    mark = tmp_path / "mark"
    torch.save({"model": Trap(mark)}, tmp_path / "trap.pt")
    (tmp_path / "trap").mkdir()
    (tmp_path / "trap" / ".metadata").write_bytes(pickle.dumps(Trap(mark)))
    words = (tmp_path / "to", "--to", "samestep")
    assert "loading it could run code; nothing was loaded" in refused(
        capsys, tmp_path / "trap.pt", *words
    )
    assert "no code of it was run" in refused(capsys, tmp_path / "trap", *words)
    assert not mark.exists()
