"""State that stays on the host: the same bits as beside the parameters, in every layout."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import samestep
from samestep.comm.diagnosis.flight import CollectiveError
from samestep.plan import windows
from tests.ranks import run_cases
from tests.soak import SOAK

WINDOW = 1 << 14  # bytes: several of the large parameters, and several parameters in one
OPTIONS = {
    "lr": 1e-2,
    "variance_beta2": 0.9,
    "master_weights": True,
    "max_grad_norm": 0.7,
    "overrides": {
        "fused.weight": {"split_sizes": (16, 16, 16)},
        "woven.weight": {"split_sizes": "interleaved:2x8"},
        "experts": {"rule": "muon"},
    },
}


class Net(nn.Module):
    """What goes to AdamW: a vocabulary of several windows, a vector, a number. The rest to Muon."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.embedding = nn.Embedding(700, 32)
        self.fused = nn.Linear(32, 48)
        self.woven = nn.Linear(48, 32, bias=False)
        self.experts = nn.Parameter(torch.zeros(3, 64, 96))
        self.unused = nn.Linear(32, 32, bias=False)
        self.scale = nn.Parameter(torch.ones(()))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.normal_(std=0.3, generator=generator)
        self.to(dtype)


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch):
    monkeypatch.setattr(windows, "WINDOW_BYTES", WINDOW)


def gradients(model, rank, step):
    """Others on every rank; some absent for a step, and one step that is skipped."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    for place, (name, param) in enumerate(model.named_parameters()):
        grad = torch.randn(param.shape, generator=generator)
        if step == 2 and place == 1:
            grad.fill_(float("nan"))
        param.grad = None
        if name.startswith("unused") or not (place + step) % 4:
            continue
        grad = grad.to(param.dtype)
        if isinstance(param, DTensor):  # FSDP2 leaves the same mean on all ranks: here rank 0's
            grad = distribute_tensor(grad, param.device_mesh, param.placements)
        param.grad = grad


def build(offload, dtype=torch.float32, fsdp=False, **options):
    model = Net(dtype)
    if fsdp:
        ignored = {model.scale}  # FSDP2 takes no numbers: a plain parameter beside DTensors
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)), ignored_params=ignored)
    return model, samestep.MuonAdamW(model, offload=offload, **{**OPTIONS, **options})


def train(model, opt, rank, steps=range(5)):
    for step in steps:
        gradients(model, rank, step)
        opt.step()
        opt.wait_for_parameters()
    return model, opt


def assert_same(first, second):
    (model, opt), (other, own) = first, second
    pairs = zip(model.named_parameters(), other.parameters(), strict=True)
    for (name, param), twin in pairs:
        local, twin = (getattr(p, "_local_tensor", p) for p in (param, twin))
        assert torch.equal(local, twin), name
    state, found = opt.whole_state(), own.whole_state()
    for name, entries in state.items():
        for key, tensor in entries.items():
            assert torch.equal(tensor, found[name][key]), (name, key)


SMALL = {"state_dtypes": "8bit"}  # scales beside codes, and random bits that know their place
RANDOM = {"momentum_buffer": "bf16_stochastic", "exp_avg": "bf16_stochastic"}
REST = {"state_dtypes": {**RANDOM, "master_weight": "remainder"}}


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, {}), (torch.bfloat16, {}), (torch.float32, SMALL), (torch.bfloat16, REST)],
    ids=["32 bits", "16 bits", "8-bit state", "random state"],
)
def test_one_process(dtype, options):
    plain = train(*build(None, dtype, **options), 0)
    model, opt = train(*build("state", dtype, **options), 0)
    assert_same(plain, (model, opt))
    lines = [line for line in opt.schedule_lines() if line.startswith("Fetch")]
    assert len(lines) > 4


LAYOUTS = {
    "none": {"sharding": "none"},
    "zero1": {"sharding": "zero1", "crossover": 16},
    "zero2": {"sharding": "zero2", "crossover": 16, "dtype": torch.bfloat16},
    "flat": {"buffers": "flat", "overlap_param_gather": True},
    "fsdp": {"fsdp": True, "chunk_size": 1000},
    "fsdp in 16 bits": {"fsdp": True, "chunk_size": 1000, "dtype": torch.bfloat16},
    "zero2, 8-bit state": {"sharding": "zero2", "crossover": 16, **SMALL},
    "fsdp, random state": {"fsdp": True, "chunk_size": 1000, "dtype": torch.bfloat16, **REST},
}


def test_two_ranks():
    def job(rank, layout):
        options = LAYOUTS[layout]
        plain = train(*build(None, **options), rank)
        model, opt = train(*build("state", **options), rank)
        assert_same(plain, (model, opt))
        return len([line for line in opt.schedule_lines() if line.startswith("Fetch")])

    alike = () if SOAK else ("none", "fsdp")
    for layout, found in run_cases(2, [name for name in LAYOUTS if name not in alike], job):
        assert min(found) > 3, layout


@pytest.mark.parametrize("offload", ["state", None])
def test_state_loads_with_and_without_offload(offload, tmp_path):
    """A state dict, and a checkpoint, go both ways; training goes on with the same bits."""
    other = None if offload else "state"
    model, opt = train(*build(offload, torch.bfloat16), 0, range(3))
    samestep.save(tmp_path / "checkpoint", model, opt)
    twin, loaded = build(other, torch.bfloat16)
    twin.load_state_dict(model.state_dict())
    loaded.load_state_dict(opt.state_dict())
    third, restored = build(other, torch.bfloat16)
    samestep.load(tmp_path / "checkpoint", third, restored)
    train(model, opt, 0, range(3, 6))
    assert_same((model, opt), train(twin, loaded, 0, range(3, 6)))
    assert_same((model, opt), train(third, restored, 0, range(3, 6)))


def test_whole_values_on_two_ranks():
    """What is set, scaled, refreshed and gathered is the same; state stays where it was."""

    def job(rank, layout):
        found = []
        for offload in (None, "state"):
            model, opt = train(*build(offload, **LAYOUTS[layout]), rank, range(2))
            addresses = [t.data_ptr() for s in opt.state.values() for t in map(local, s.values())]
            opt.scale_parameters({"fused.weight": torch.linspace(0.5, 1.5, 48)[:, None]})
            opt.set_full_parameter("experts", torch.full((3, 64, 96), 0.3))
            opt.set_full_state("embedding.weight", "exp_avg", torch.ones(700, 32))
            with torch.no_grad():
                local(model.woven.weight).mul_(1.25)
            opt.refresh_master_weights()
            opt.consolidate_state_dict(None)
            opt.load_state_dict(opt.state_dict())
            assert addresses == [
                t.data_ptr() for s in opt.state.values() for t in map(local, s.values())
            ]
            found.append(train(model, opt, rank, range(2, 4)))
        assert_same(*found)

    run_cases(2, ["zero2", "fsdp in 16 bits", "none"], job)


def local(tensor):
    return getattr(tensor, "_local_tensor", tensor).detach()


def test_a_copy_of_an_optimizer_goes_on_alone():
    plain, (model, opt) = train(*build(None), 0), train(*build("state"), 0)
    twins = copy.deepcopy((model, opt))
    assert_same(train(*plain, 0, range(5, 7)), train(*twins, 0, range(5, 7)))


def test_parameters_that_were_moved_are_updated_where_they_are():
    """With the state that they had: windows know parts of parameters by where they lie."""
    plain, (model, opt) = train(*build(None), 0), train(*build("state"), 0)
    for param in model.parameters():
        param.data = param.data.clone()
    assert_same(train(*plain, 0, range(5, 7)), train(model, opt, 0, range(5, 7)))


class Interrupt(BaseException):
    pass


LOST = CollectiveError("another rank is gone")


def breaks_off(opt, after, error):
    """Raise instead of running another rule, once so many have run; gives how many have, (1,)."""
    run, calls = opt._runner.rules.run, [0]

    def counted(*args):
        if calls[0] == after:
            raise error
        calls[0] += 1
        return run(*args)

    opt._runner.rules.run = counted
    return calls


@pytest.mark.parametrize("error", [Interrupt(), LOST], ids=["here", "of ranks"])
def test_a_step_that_is_broken_off_leaves_weights_with_their_state(error):
    """Wherever it is: each element of both is that of the step before, or each that of the next."""

    def step(broken_after=None):
        """A second step, with all gradients: every tensor before and after, and rules that ran."""
        model, opt = train(*build("state", torch.bfloat16, max_grad_norm=None), 0, range(1))
        calls = breaks_off(opt, broken_after, error)
        before = tensors(model, opt)
        for param in model.parameters():
            generator = torch.Generator().manual_seed(param.numel())
            param.grad = torch.randn(param.shape, generator=generator).bfloat16()
        if broken_after is None:
            opt.step()
        else:
            with pytest.raises(type(error)):
                opt.step()
            opt.state_dict()  # whoever asks for state finds it
        return before, tensors(model, opt), calls[0]

    before, full, calls = step()
    assert calls > 6
    partly = 0
    for broken_after in range(calls):
        same, found, _ = step(broken_after)
        for name, was in before.items():
            alike = [key for key, tensor in was.items() if tensor.shape == was["weight"].shape]
            changes = [found[name][key] != was[key] for key in alike if key != "weight"]
            updated = torch.stack(changes).any(0)
            partly += bool(updated.any()) and not bool(updated.all())
            for key in alike:
                assert torch.equal(was[key], same[name][key])
                expected = torch.where(updated, full[name][key], was[key])
                assert torch.equal(found[name][key], expected), (broken_after, name, key)
    assert partly


def test_what_a_step_without_its_ranks_left_does_not_undo_what_is_loaded():
    """Copies that were under way are over before anything is written, and before a step."""
    model, opt = train(*build("state"), 0, range(2))
    saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    expected = train(model, opt, 0, range(3, 5))
    for broken_after in (1, 3, 5):
        other, own = train(*build("state"), 0, range(2))
        run = own._runner.rules.run
        breaks_off(own, broken_after, LOST)
        with pytest.raises(CollectiveError):
            train(other, own, 0, range(1, 2))
        own._runner.rules.run = run
        other.load_state_dict(saved[0])
        own.load_state_dict(saved[1])
        assert_same(expected, train(other, own, 0, range(3, 5)))


def tensors(model, opt):
    """Copies of each parameter and its state."""
    return {
        name: {"weight": param.detach().clone()}
        | {key: tensor.clone() for key, tensor in opt.state[param].items()}
        for name, param in model.named_parameters()
    }
