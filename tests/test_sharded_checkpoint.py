"""DTensors and torch's checkpoints: saved on some ranks, loaded on as many or others."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import samestep
from tests.ranks import run_cases, run_forked
from tests.soak import SOAK, twin
from tests.test_sharded import OPTIONS, Net, fsdp, loss_of

pytestmark = pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:UserWarning")

BEFORE, AFTER = (3, 3) if SOAK else (1, 1)  # steps


def build(**options):
    model = fsdp(Net())
    return model, samestep.MuonAdamW(model, **{**OPTIONS, **options})


def train(model, opt, steps):
    """All ranks have the same data, so that their number does not matter."""
    for step in steps:
        loss_of(model, 0, step).backward()
        opt.step()
        opt.zero_grad()


def other_values(model):
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(-1)


def snapshot(opt):
    names = [name for group in opt.param_groups for name in group["param_names"]]
    found = {name: opt.full_parameter(name) for name in names}
    for name, state in opt.whole_state().items():
        found |= {f"{name}.{key}": tensor for key, tensor in state.items()}
    return found


def save(model, opt, folder):
    of_model, of_optimizer = get_state_dict(model, opt)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)


def load(model, opt, folder):
    of_model, of_optimizer = get_state_dict(model, opt)
    dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
    set_state_dict(model, opt, model_state_dict=of_model, optim_state_dict=of_optimizer)


def saving(folder, make=build, **options):
    """What a rank does that saves and goes on: what it has then, and at the end."""

    def job(rank):
        model, opt = make(**options)
        train(model, opt, range(BEFORE))
        save(model, opt, folder)
        at_save = snapshot(opt)
        train(model, opt, range(BEFORE, BEFORE + AFTER))
        return at_save, snapshot(opt)

    return job


def loading(folder, make=build, **options):
    """The same from another start, without a step before."""

    def job(rank):
        model, opt = make(**options)
        other_values(model)
        load(model, opt, folder)
        at_load = snapshot(opt)
        train(model, opt, range(BEFORE, BEFORE + AFTER))
        return at_load, snapshot(opt)

    return job


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def assert_near(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape
        assert (found[name] - value).abs().max() < 2e-5, name


def test_saved_on_two_ranks(tmp_path):
    """What is loaded is what was saved, to the bit, on any number of ranks and other options."""
    jobs = {
        "saved": saving(tmp_path),
        "the same": loading(tmp_path),
        "others": loading(tmp_path, muon_schedule="gather", chunks_ahead=2),
    }
    (_, saved), *others = run_cases(2, jobs, lambda rank, case: jobs[case](rank))
    at_save, at_end = saved[0]
    for case, results in others:
        for at_load, found in results:
            assert_equal(at_load, at_save)
            (assert_equal if case == "the same" else assert_near)(found, at_end)
    for world in (3, 4) if SOAK else (3,):
        for at_load, found in run_forked(world, loading(tmp_path)):
            assert_equal(at_load, at_save)
            assert_near(found, at_end)


@twin
def test_master_weights(tmp_path):
    def make():
        model = fsdp(Net().bfloat16())
        return model, samestep.MuonAdamW(model, **{**OPTIONS, "master_weights": True})

    jobs = {"saved": saving(tmp_path, make), "loaded": loading(tmp_path, make)}
    (_, saved), (_, loaded) = run_cases(2, jobs, lambda rank, case: jobs[case](rank))
    at_save, at_end = saved[0]
    assert at_save["head.weight.master_weight"].dtype == torch.float32
    for at_load, found in loaded:
        assert_equal(at_load, at_save)
        assert_equal(found, at_end)
    for at_load, _ in run_forked(3, loading(tmp_path, make)):
        assert_equal(at_load, at_save)


def on_mesh(*shape):
    """Data and tensor parallel, or replicas of shards."""

    def make():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "model"))
        model = Net(36)
        for block in model.blocks:
            parallelize_module(
                block, mesh["model"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
        fsdp(model, mesh["data"])
        own = {"experts": {"rule": "muon"}}
        return model, samestep.MuonAdamW(model, **{**OPTIONS, "overrides": own})

    return make


@twin
def test_from_one_mesh_to_another(tmp_path):
    """Tensor parallel over two ranks, then FSDP2 alone."""
    at_save, at_end = run_forked(4, saving(tmp_path, on_mesh(2, 2)))[0]
    at_load, found = run_forked(2, loading(tmp_path, on_mesh(2, 1)))[0]
    assert_equal(at_load, at_save)
    assert_near(found, at_end)


@twin
def test_before_the_first_step(tmp_path):
    """A state of zeros is saved and loaded over one that is not."""

    def job(rank):
        model, opt = build()
        save(model, opt, tmp_path)
        first = snapshot(opt)
        train(model, opt, range(2))
        load(model, opt, tmp_path)
        return first, snapshot(opt)

    for first, found in run_forked(2, job):
        assert_equal(found, first)
        assert not found["head.weight.exp_avg"].any()


@twin
def test_learning_rates_are_loaded(tmp_path):
    def job(rank):
        model, opt = build()
        for group in opt.param_groups:
            group["lr"] = 0.125
        save(model, opt, tmp_path)
        model, opt = build()
        load(model, opt, tmp_path)
        return [group["lr"] for group in opt.param_groups]

    for rates in run_forked(2, job):
        assert set(rates) == {0.125}


@twin
def test_other_forms():
    """Whole tensors on every rank, on the first alone, or flat keys."""

    def job(rank, form):
        model, opt = build()
        train(model, opt, range(BEFORE))
        another, loaded = build()
        other_values(another)
        if form == "from the first rank":
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            saved = get_state_dict(model, opt, options=options)
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            of_model, of_optimizer = saved if rank == 0 else ({}, {})
            set_model_state_dict(another, of_model, options=options)
            set_optimizer_state_dict(another, loaded, of_optimizer, options=options)
        else:
            flat = form == "flattened"
            options = StateDictOptions(full_state_dict=not flat, flatten_optimizer_state_dict=flat)
            of_model, of_optimizer = get_state_dict(model, opt, options=options)
            set_state_dict(
                another,
                loaded,
                model_state_dict=of_model,
                optim_state_dict=of_optimizer,
                options=options,
            )
        at_load = snapshot(opt), snapshot(loaded)
        train(model, opt, range(BEFORE, BEFORE + AFTER))
        train(another, loaded, range(BEFORE, BEFORE + AFTER))
        return at_load, (snapshot(opt), snapshot(loaded))

    for _, results in run_cases(2, ["whole", "from the first rank", "flattened"], job):
        for pairs in results:
            for expected, found in pairs:
                assert_equal(found, expected)


NARROW = {"exp_avg": torch.bfloat16, "momentum_buffer": torch.bfloat16}


@twin
def test_other_forms_of_state_that_is_kept_otherwise():
    """What is said of formats travels as text, and what is loaded is rounded to those wanted."""

    def job(rank, case):
        form, saved_as, loaded_as = case
        model, opt = build(state_dtypes=saved_as)
        train(model, opt, range(BEFORE))
        first, flat = form == "from the first rank", form == "flattened"
        options = StateDictOptions(
            full_state_dict=not flat, flatten_optimizer_state_dict=flat, cpu_offload=first
        )
        of_optimizer = get_optimizer_state_dict(model, opt, options=options)
        model, loaded = build(state_dtypes=loaded_as)
        if first:
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            of_optimizer = of_optimizer if rank == 0 else {}
        set_optimizer_state_dict(model, loaded, of_optimizer, options=options)
        assert all(group["state_dtypes"] == loaded_as for group in loaded.param_groups)
        return opt.whole_state(), loaded.whole_state()

    ways = [(NARROW, None), (NARROW, NARROW), (None, NARROW), ("bf16_stochastic", NARROW)]
    forms = ["whole", "from the first rank", "flattened"]
    for (_, _, loaded_as), results in run_cases(2, [(f, *way) for f in forms for way in ways], job):
        for saved, loaded in results:
            for name, state in saved.items():
                for key in state.keys() - {"step"}:
                    found, expected = loaded[name][key], state[key]
                    if key in NARROW:
                        assert found.dtype == (torch.float32 if loaded_as is None else NARROW[key])
                    narrower = min(found.dtype, expected.dtype, key=lambda dtype: dtype.itemsize)
                    assert torch.equal(found.to(narrower), expected.to(narrower)), (name, key)


@twin
def test_the_state_dict_of_a_rank(tmp_path):
    """Without torch's helpers: every rank loads its own file."""

    def job(rank):
        model, opt = build()
        train(model, opt, range(BEFORE))
        torch.save((model.state_dict(), opt.state_dict()), tmp_path / f"{rank}.pt")
        train(model, opt, range(BEFORE, BEFORE + AFTER))
        another, loaded = build()
        of_model, of_optimizer = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        another.load_state_dict(of_model)
        loaded.load_state_dict(of_optimizer)
        train(another, loaded, range(BEFORE, BEFORE + AFTER))
        return snapshot(opt), snapshot(loaded)

    for expected, found in run_forked(2, job):
        assert_equal(found, expected)


class Mixed(nn.Module):
    """One layer for FSDP2, and one that it leaves alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.plain = nn.Linear(6, 6, bias=False)
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(self.plain(x))


def make_mixed(**options):
    model = Mixed()
    fully_shard(model, ignored_params={model.plain.weight})
    return model, samestep.MuonAdamW(model, lr=0.01, variance_beta2=0.9, **options)


def train_mixed(model, opt, rank):
    for step in range(2):
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(2 * step + rank))
        model(x).square().sum().backward()
        opt.step()
        opt.zero_grad()


@twin
def test_the_state_dict_of_a_rank_with_plain_parameters():
    def job(rank):
        model, opt = make_mixed()
        train_mixed(model, opt, rank)
        another, loaded = make_mixed()
        another.load_state_dict(model.state_dict())
        loaded.load_state_dict(opt.state_dict())
        train_mixed(model, opt, rank)
        train_mixed(another, loaded, rank)
        return snapshot(opt), snapshot(loaded)

    for expected, found in run_forked(2, job):
        assert_equal(found, expected)


@twin
def test_plain_parameters_beside_dtensors(tmp_path):
    """A checkpoint that was written can be loaded; what cannot be saved is refused before."""

    def job(rank, sharding):
        model, opt = make_mixed(sharding=sharding)
        train_mixed(model, opt, rank)
        try:
            save(model, opt, tmp_path / sharding)
        except Exception as error:
            return str(error)
        another, loaded = make_mixed(sharding=sharding)
        load(another, loaded, tmp_path / sharding)
        train_mixed(model, opt, rank)
        train_mixed(another, loaded, rank)
        return snapshot(opt), snapshot(loaded)

    for _, results in run_cases(2, ["zero2", "none"], job):
        for found in results:
            if isinstance(found, str):
                assert "rank" in found
            else:
                assert_equal(found[1], found[0])


@twin
def test_one_process_and_two_ranks(tmp_path):
    """Either loads what the other has saved."""

    def plain():
        model = Net()
        return model, samestep.MuonAdamW(model, **OPTIONS)

    of_one, of_two = tmp_path / "one", tmp_path / "two"
    at_save, at_end = run_forked(1, saving(of_one, plain))[0]
    jobs = {"load": loading(of_one), "save": saving(of_two)}
    (_, loaded), (_, saved) = run_cases(2, jobs, lambda rank, case: jobs[case](rank))
    for at_load, found in loaded:
        assert_equal(at_load, at_save)
        assert_near(found, at_end)
    ((at_load, found),) = run_forked(1, loading(of_two, plain))
    assert_equal(at_load, saved[0][0])
    assert_near(found, saved[0][1])
