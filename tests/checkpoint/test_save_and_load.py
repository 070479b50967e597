"""What is saved and loaded: parts, options, before the first step; what is refused."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import samestep
from samestep.checkpoint.storage import INDEX, read_json, write_json
from tests.checkpoint.training import (
    OVERRIDES,
    Case,
    build,
    different,
    local_bits,
    same_bits,
    snapshot,
    train,
)
from tests.ranks import run_forked

pytestmark = pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:UserWarning")
ONE = Case("one", 1)


@pytest.fixture
def trained():
    model, opt = build(ONE)
    train(model, opt, range(2))
    return model, opt


def other(**options):
    """Somewhere else, with state that is not zero."""
    model, opt = build(ONE, seed=2, **options)
    train(model, opt, range(7, 9))
    return model, opt


def test_without_a_process_group_and_the_newest_by_its_folder(tmp_path, trained):
    samestep.save(tmp_path / "a", *trained)
    train(*trained, range(2, 3))
    samestep.save(tmp_path / "b", *trained)
    found = other()
    assert samestep.load(tmp_path, *found).path == tmp_path / "b"
    assert different(snapshot(*found), snapshot(*trained)) == []


def test_before_the_first_step(tmp_path):
    """Zeros are saved and loaded over a state that is not zero."""
    fresh = build(ONE)
    samestep.save(tmp_path / "a", *fresh)
    found = other()
    samestep.load(tmp_path / "a", *found)
    assert different(snapshot(*found), snapshot(*fresh)) == []
    train(*found, range(3))
    train(*fresh, range(3))
    assert different(snapshot(*found), snapshot(*fresh)) == []


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_one_of_both(tmp_path, trained, part):
    """Of a checkpoint of both, and of a checkpoint of that part alone."""
    chosen = {"model": trained[0], "optimizer": trained[1]}
    samestep.save(tmp_path / "both", *trained)
    samestep.save(tmp_path / "part", **{part: chosen[part]})
    for name in ("both", "part"):
        model, opt = other()
        before = snapshot(model, opt)
        samestep.load(tmp_path / name, **{part: {"model": model, "optimizer": opt}[part]})
        after, expected = snapshot(model, opt), snapshot(*trained)
        of_model = {key for key, _ in (*model.named_parameters(), *model.named_buffers())}
        taken, left = (of_model, after.keys() - of_model)
        if part == "optimizer":
            taken, left = left, taken
        assert different(pick(after, taken), pick(expected, taken)) == []
        assert different(pick(after, left), pick(before, left)) == []
    with pytest.raises(samestep.CheckpointError, match=r"lacks.*partial=True"):
        samestep.load(tmp_path / "part", *other())


def pick(values, names):
    return {name: values[name] for name in names}


def test_partial(tmp_path, trained):
    """A model with a new layer takes what there is."""
    samestep.save(tmp_path / "a", *trained)
    model, _ = build(ONE, seed=2)
    model.extra = nn.Linear(5, 5)
    del model.row
    opt = samestep.MuonAdamW(model, variance_beta2=0.9, overrides={"experts": {"rule": "muon"}})
    own = model.extra.weight.clone()
    with pytest.raises(samestep.CheckpointError, match=r"lacks: model\.extra"):
        samestep.load(tmp_path / "a", model)
    samestep.load(tmp_path / "a", model, partial=True)
    assert torch.equal(model.head.weight, trained[0].head.weight)
    assert torch.equal(model.extra.weight, own)
    samestep.load(tmp_path / "a", None, opt, partial=True)
    mine, theirs = (o.whole_state()["head.weight"]["exp_avg"] for o in (opt, trained[1]))
    assert torch.equal(mine, theirs)
    assert opt.param_groups[0]["lr"] == 0.01
    with pytest.raises(
        samestep.CheckpointError, match="none of the names of this model and optimizer"
    ):
        samestep.load(tmp_path / "a", nn.Linear(2, 2), partial=True)


def test_options_are_restored(tmp_path):
    """Those of schedules and all others; numbers of schedulers too."""
    model, opt = build(ONE, betas=(0.8, 0.9), momentum=0.7, compute_dtype=torch.bfloat16)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    train(model, opt, range(1))
    schedule.step()
    samestep.save(tmp_path / "a", model, opt, extra=schedule.state_dict())
    for lr in (0.3, torch.tensor(0.3, dtype=torch.float64)):
        again, loaded = other(lr=lr)
        extra = samestep.load(tmp_path / "a", again, loaded).extra
        assert extra["last_epoch"] == 1
        for mine, saved in zip(loaded.param_groups, opt.param_groups, strict=True):
            assert isinstance(mine["lr"], type(lr))
            assert float(mine["lr"]) == saved["lr"] == 0.005
            for key in ("betas", "momentum", "compute_dtype", "initial_lr"):
                assert mine.get(key) == saved.get(key)
        train(again, loaded, range(1, 3))
    later = torch.optim.lr_scheduler.ExponentialLR(loaded, 0.5, last_epoch=1)
    assert later.base_lrs[0] == 0.01


def test_master_weights_are_made_where_there_are_none(tmp_path):
    """From the loaded parameters; and left out where they are not wanted."""
    narrow = Case("one", 1, "bf16")
    model, opt = build(narrow, master_weights=False)
    train(model, opt, range(2))
    samestep.save(tmp_path / "without", model, opt)
    again, loaded = build(narrow, seed=2)
    samestep.load(tmp_path / "without", again, loaded)
    assert torch.equal(loaded.full_state("head.weight", "master_weight"), model.head.weight.float())
    train(again, loaded, range(2))
    samestep.save(tmp_path / "with", again, loaded)
    samestep.load(tmp_path / "with", model, opt)
    assert torch.equal(model.head.weight, again.head.weight)


def copies_job(rank, folder):
    """16 bits with copies of 32, then 32 bits in another layout, then remainders in a third."""
    remainders = {"state_dtypes": {"master_weight": "remainder"}}
    others = [(Case("fsdp2", 2), {}), (Case("flat zero1", 2, "bf16"), remainders)]
    source = build(Case("zero2", 2, "bf16"))
    train(*source, range(2))
    lost = []
    for number, (case, options) in enumerate(others):
        samestep.save(folder / str(number), *source)
        into = build(case, seed=2, **options)
        samestep.load(folder / str(number), *into)
        names = [name for name, _ in into[0].named_parameters()]
        both = [(source[1].full_parameter(name), into[1].full_parameter(name)) for name in names]
        lost += [float((mine - theirs).abs().max()) for mine, theirs in both]
        source = into
    rounded = [(p, source[1].full_parameter(n)) for n, p in source[0].named_parameters()]
    assert any(
        not torch.equal(param.float(), copy) for param, copy in rounded
    )  # there are more bits
    assert all(torch.equal(param, copy.bfloat16()) for param, copy in rounded)
    return max(lost)


def test_32_bit_parameters_are_the_master_copies_of_others(tmp_path):
    assert run_forked(2, copies_job, tmp_path) == [0.0, 0.0]


def test_tied_weights_and_frozen_ones(tmp_path):
    def make(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 5), nn.Linear(5, 7, bias=False))
        model[2].weight = model[0].weight
        model[1].bias.requires_grad_(False)
        return model, samestep.MuonAdamW(model)

    saved, found = make(0), make(1)
    samestep.save(tmp_path / "a", *saved)
    samestep.load(tmp_path / "a", *found)
    for name, value in saved[0].state_dict().items():
        assert torch.equal(found[0].state_dict()[name], value)
    assert found[0][2].weight is found[0][0].weight


def test_numbers_empty_tensors_and_other_dtypes(tmp_path):
    class Odd(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.number = nn.Parameter(torch.tensor(float(value)))
            self.register_buffer("empty", torch.zeros(0, 3))
            self.register_buffer("flag", torch.tensor([value > 1, False]))
            self.register_buffer("count", torch.tensor(value))
            self.register_buffer("phase", torch.tensor([1j * value]))
            self.register_buffer("small", torch.full((3,), value).to(torch.float8_e4m3fn))

    samestep.save(tmp_path / "a", Odd(2))
    found = Odd(1)
    samestep.load(tmp_path / "a", found)
    for name, value in Odd(2).state_dict().items():
        assert torch.equal(found.state_dict()[name].float(), value.float()), name


# --- what is refused ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"x": float("nan")}, "extra must be of types that JSON can store"),
        ({"x": torch.zeros(1)}, "extra must be of types that JSON can store"),
        ({"milestones": {30: 1}}, "the dict has the key 30, and JSON's keys are str"),
    ],
)
def test_extra_that_would_not_come_back(tmp_path, trained, extra, message):
    with pytest.raises(samestep.CheckpointError, match=message):
        samestep.save(tmp_path / "a", *trained, extra=extra)
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_exists_or_cannot_be_written(tmp_path, trained):
    (tmp_path / "a").mkdir()
    with pytest.raises(samestep.CheckpointError, match=r"a exists: save under another name"):
        samestep.save(tmp_path / "a", *trained)
    (tmp_path / "file").touch()
    with pytest.raises(samestep.CheckpointError, match=r"cannot write .*: (Not a directory|File)"):
        samestep.save(tmp_path / "file" / "a", *trained)
    with pytest.raises(samestep.CheckpointError, match="keep must be at least 1, got 0"):
        samestep.save(tmp_path / "b", *trained, keep=0)
    with pytest.raises(samestep.CheckpointError, match="nothing to save"):
        samestep.save(tmp_path / "b")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "file"]


@contextmanager
def no_root():
    """Root may write everywhere: be nobody for a moment."""
    own = os.geteuid()
    if own == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(own)


def test_an_unwritable_folder(trained):
    """It says so, leaves nothing, and training goes on."""
    with tempfile.TemporaryDirectory() as name:  # those of pytest are closed to others
        folder = Path(name)
        folder.chmod(0o555)
        with no_root(), pytest.raises(samestep.CheckpointError, match="a: Permission denied"):
            samestep.save(folder / "a", *trained)
        assert list(folder.iterdir()) == []
        train(*trained, range(2, 3))
        folder.chmod(0o755)
        samestep.save(folder / "a", *trained)
        (folder / "a" / "rank_0.bin").chmod(0o000)
        with no_root(), pytest.raises(samestep.CheckpointError, match=r"rank_0.bin: Permission"):
            samestep.load(folder / "a", *trained)


def refused(path, model, opt, message, **options):
    """It says why, and nothing has changed."""
    before = local_bits(model, opt)
    with pytest.raises(samestep.CheckpointError, match=message):
        samestep.load(path, model, opt, **options)
    assert same_bits(local_bits(model, opt), before)


def test_another_model(tmp_path, trained):
    samestep.save(tmp_path / "a", *trained)
    model, _ = other()
    model.head = nn.Linear(5, 14, bias=False)
    opt = samestep.MuonAdamW(model, variance_beta2=0.9, overrides=OVERRIDES)
    refused(tmp_path / "a", model, opt, r"head.weight\S* has shape \(13, 5\)")
    refused(tmp_path / "a", model, opt, r"head.weight\S* has shape \(13, 5\)", partial=True)
    model, opt = other(overrides={**OVERRIDES, "*.down.weight": {"rule": "adamw"}})
    refused(tmp_path / "a", model, opt, "was trained with rule 'muon' and has rule 'adamw'")
    model, opt = other(overrides={**OVERRIDES, "*.up.weight": {"split_sizes": (10, 9, 17)}})
    refused(tmp_path / "a", model, opt, r"split_sizes: \(9, 10, 17\) -> \(10, 9, 17\)")


def test_other_groups_of_the_same_parameters(tmp_path, trained):
    """Options go by parameter, not by the place of a group."""
    samestep.save(tmp_path / "a", *trained)
    cut = {"rule": "muon", "split_sizes": (9, 10, 17), "variance_beta2": 0.9}
    found, _ = build(ONE, seed=2)
    opt = samestep.MuonAdamW(
        found,
        groups=[
            {"params": "*.down.weight", "rule": "muon", "variance_beta2": 0.9},
            {"params": "blocks.1.up.weight", **cut},
            {"params": "experts", "rule": "muon", "variance_beta2": 0.9},
            {"params": "blocks.0.up.weight", **cut},
            {"params": ["*.bias", "embedding.*", "head.*", "row.*", "scale"], "rule": "adamw"},
        ],
    )
    samestep.load(tmp_path / "a", found, opt)
    assert different(snapshot(found, opt), snapshot(*trained)) == []
    assert {group["lr"] for group in opt.param_groups} == {0.01}


def test_groups_that_differ_in_the_file_and_are_one_here(tmp_path):
    """One group cannot have both decays: refused, or with `partial` left as it is here."""

    def build(decays):
        model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
        groups = [
            {"params": list(model[n].named_parameters(f"{n}")), "weight_decay": decay, "lr": 0.5}
            for n, decay in enumerate(decays)
        ]
        if len(decays) == 1:
            groups[0]["params"] = list(model.named_parameters())
        return model, samestep.AdamW(groups)

    saved = build([0.1, 0.0])
    set_gradients(saved[0])
    saved[1].step()
    samestep.save(tmp_path / "a", *saved)
    model, opt = build([0.3])
    opt.param_groups[0]["lr"] = 0.2
    before = [param.detach().clone() for param in model.parameters()]
    message = r"'0.weight' and '1.weight' .*weight_decay = 0.1 and 0.0"
    with pytest.raises(samestep.CheckpointError, match=message):
        samestep.load(tmp_path / "a", model, opt)
    assert all(map(torch.equal, model.parameters(), before))
    samestep.load(tmp_path / "a", model, opt, partial=True)
    assert opt.param_groups[0]["weight_decay"] == 0.3
    assert opt.param_groups[0]["lr"] == 0.5
    assert different(snapshot(model, opt), snapshot(*saved)) == []


def set_gradients(model):
    for param in model.parameters():
        param.grad = torch.ones_like(param)


def test_nothing_there(tmp_path, trained):
    refused(tmp_path / "a", *trained, "does not exist")
    refused(tmp_path, *trained, "is no checkpoint: it has no index.json and no LATEST")
    (tmp_path / "LATEST").write_bytes(b"gone\n")
    refused(tmp_path, *trained, "LATEST names 'gone', which is no checkpoint")
    (tmp_path / "LATEST").write_bytes(b"\xff\x00gone\n")
    refused(tmp_path, *trained, "LATEST has invalid contents .* Give the path of the checkpoint")


def test_a_newer_format(tmp_path, trained):
    samestep.save(tmp_path / "a", *trained)
    content = read_json(tmp_path / "a" / INDEX)
    for file in (tmp_path / "a").glob("index*"):
        file.unlink()
    write_json(tmp_path / "a" / INDEX, {**content, "format": 2})
    refused(tmp_path / "a", *other(), r"index.json has format 2, .* reads 1: load it with")


def test_the_index_is_plain(tmp_path, trained):
    """Whoever has no samestep can read it, and `sha256sum --check` too."""
    samestep.save(tmp_path / "a", *trained, extra={"step": 2})
    content = json.loads((tmp_path / "a" / INDEX).read_text())
    assert content["extra"] == {"step": 2}
    assert content["tensors"]["model.head.weight"]["shape"] == [13, 5]
    box = content["tensors"]["model.head.weight"]["boxes"][0]
    raw = (tmp_path / "a" / box["file"]).read_bytes()[box["start"] : box["start"] + box["size"]]
    stored = torch.frombuffer(bytearray(raw), dtype=torch.float32).view(13, 5)
    assert torch.equal(stored, trained[0].head.weight)


def test_parameters_that_share_a_name_but_not_their_values(tmp_path):
    """Experts of two ranks: one of them would be lost."""

    def job(rank):
        import torch.distributed as dist

        groups = [dist.new_group([one]) for one in range(2)]
        model = nn.ModuleDict({"shared": nn.Linear(4, 4), "expert": nn.Linear(4, 4)})
        opt = samestep.MuonAdamW(
            model,
            groups=[
                {"params": "shared.*", "rule": "adamw"},
                {
                    "params": "expert.*",
                    "rule": "adamw",
                    "process_group": groups[rank],
                    "divisor": 2,
                },
            ],
        )
        try:
            samestep.save(tmp_path / "a", model, opt)
        except samestep.CheckpointError as error:
            return str(error)

    for text in run_forked(2, job):
        assert "'expert.weight' is one tensor on ranks [0] and another on ranks [1]" in text
    assert list(tmp_path.iterdir()) == []
