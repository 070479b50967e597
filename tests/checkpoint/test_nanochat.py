"""Files of nanochat's optimizer: Muon's state in stacks, AdamW's in slices, one file per rank."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import samestep
from samestep import cli

pytestmark = pytest.mark.usefixtures("no_torchrun")
GROUPS = [["head.weight"], ["scale"], ["wide.0.weight", "wide.1.weight", "wide.2.weight"], ["tall"]]


class Net(nn.Module):
    """Three matrices of a shape, one of another, a large and a small parameter of AdamW."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.head = nn.Linear(6, 12, bias=False)
        self.scale = nn.Parameter(torch.randn(6))
        self.wide = nn.ModuleList(nn.Linear(8, 6, bias=False) for _ in range(3))
        self.tall = nn.Parameter(torch.randn(8, 6))

    def forward(self, x):
        x = sum(layer(x) for layer in self.wide) * self.scale
        return self.head(x + x @ (self.tall.T @ self.tall))


def optimizer(model, **options):
    groups = [
        {"params": names, "rule": "muon" if number > 1 else "adamw"}
        for number, names in enumerate(GROUPS)
    ]
    return samestep.MuonAdamW(model, groups=groups, preset="nanochat", **options)


def train(model, opt, steps):
    for number in steps:
        torch.manual_seed(number)
        model(torch.randn(4, 8)).square().mean().backward()
        opt.step()
        opt.zero_grad()


def write_as_nanochat(folder, model, opt, ranks):
    """As it lays them out; written from what is known of its files."""
    numbers, groups = {}, []
    for names, own in zip(GROUPS, opt.param_groups, strict=True):
        assert own["param_names"] == names
        numbers |= {name: len(numbers) + place for place, name in enumerate(names)}
        keys = ("lr", "weight_decay", "ns_steps", "momentum", "betas", "eps")
        group = {key: own[key] for key in keys if key in own}
        group |= {"params": [numbers[name] for name in names], "initial_lr": 0.5}
        muon = own["rule"] == "muon"
        groups.append(group | ({"kind": "muon", "beta2": 0.9} if muon else {"kind": "adamw"}))
    states = [{} for _ in range(ranks)]
    for names in GROUPS:
        mine = [opt.whole_state()[name] for name in names]
        for rank, state in enumerate(states):
            if "exp_avg" in mine[0]:
                large = ranks > 1 and mine[0]["exp_avg"].numel() >= 50
                for name, own in zip(names, mine, strict=True):
                    moments = {
                        key: own[key].chunk(ranks)[rank] if large else own[key]
                        for key in ("exp_avg", "exp_avg_sq")
                    }
                    state[numbers[name]] = {"step": int(own["step"]), **moments}
            else:
                state[numbers[names[0]]] = stacks(mine, rank, ranks)
    for rank, state in enumerate(states):
        content = {"state": state, "param_groups": groups}
        torch.save(content, folder / f"optim_000003_rank{rank}.pt")
    torch.save(model.state_dict(), folder / "model_000003.pt")
    (folder / "names.json").write_text(json.dumps(GROUPS))


def stacks(mine, rank, ranks):
    share = -(-len(mine) // ranks)
    owned = mine[rank * share : (rank + 1) * share]
    momentum = torch.zeros(share, *mine[0]["momentum_buffer"].shape)
    rows, cols = momentum.shape[1:]
    variance = torch.zeros(share, rows, 1) if rows >= cols else torch.zeros(share, 1, cols)
    for place, own in enumerate(owned):
        momentum[place] = own["momentum_buffer"]
        variance[place] = own["variance"].view(variance.shape[1:])
    return {"momentum_buffer": momentum, "second_momentum_buffer": variance}


def convert(folder, *more):
    words = ["convert", folder / "model_000003.pt", folder / "ours", "--to", "samestep"]
    return cli.main([*map(str, words), *map(str, more)])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_run_goes_on(tmp_path, ranks):
    """State, options and the next steps are those of the optimizer that it was written from."""
    model = Net(0)
    opt = optimizer(model, lr=0.03)
    train(model, opt, range(3))
    write_as_nanochat(tmp_path, model, opt, ranks)
    more = ("--optimizer", tmp_path / "optim_000003_rank0.pt", "--names", tmp_path / "names.json")
    assert convert(tmp_path, *more) == 0
    again = Net(1)
    loaded = optimizer(again, lr=0.5)
    train(again, loaded, range(7, 9))
    assert samestep.load(tmp_path / "ours", again, loaded).world_size == ranks
    for mine, theirs in zip(loaded.param_groups, opt.param_groups, strict=True):
        assert mine["lr"] == theirs["lr"]
        assert mine["initial_lr"] == 0.5
        assert mine["weight_decay"] == theirs["weight_decay"]
    for steps in (range(0), range(3, 6)):
        train(model, opt, steps)
        train(again, loaded, steps)
        for name, state in opt.whole_state().items():
            for key, value in state.items():
                assert torch.equal(loaded.whole_state()[name][key], value), (name, key)
        for name, value in model.state_dict().items():
            assert torch.equal(again.state_dict()[name], value), name


def test_what_is_refused(tmp_path, capsys):
    model = Net(0)
    opt = optimizer(model)
    train(model, opt, range(1))
    write_as_nanochat(tmp_path, model, opt, 2)
    first, names = tmp_path / "optim_000003_rank0.pt", tmp_path / "names.json"

    def refused(*more):
        assert convert(tmp_path, *more) == 2
        assert not (tmp_path / "ours").exists()
        return " ".join(capsys.readouterr().err.split())

    assert "has no names of parameters: give the names" in refused("--optimizer", first)
    second = tmp_path / "optim_000003_rank1.pt"
    assert "give the file of the first rank" in refused("--optimizer", second, "--names", names)
    both = ("--optimizer", first, "--names", names)
    names.write_text(json.dumps([GROUPS[0], GROUPS[1], GROUPS[2]]))
    assert "groups of [1, 1, 3] names" in refused(*both)
    names.write_text(json.dumps([*GROUPS[:3], ["high"]]))
    assert "--names has 'high', which the model does not have" in refused(*both)
    names.write_text("{")
    assert "is no JSON" in refused(*both)
    names.write_text(json.dumps(GROUPS))
    second.unlink()
    assert "copy the files of all ranks" in refused(*both)
