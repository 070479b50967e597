"""`max_grad_norm`: one joint norm over all rules, groups and ranks; a bad step changes nothing."""

import copy

import pytest
import torch
from torch import nn

import samestep
from tests.ranks import run_forked
from tests.soak import some, twin


def model() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {"embed": nn.Embedding(50, 8), "up": nn.Linear(8, 24), "lm_head": nn.Linear(8, 50)}
    )


def gradients(net: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(p.shape, generator=generator) for n, p in net.named_parameters()}


def set_gradients(net: nn.Module, values: dict[str, torch.Tensor]) -> None:
    for name, param in net.named_parameters():
        param.grad = values[name].clone()


@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_clips_like_torch(limit):
    """The same norm, and the same step as torch's own clipping before an unclipped one."""
    ours, theirs = model(), model()
    opt, plain = samestep.MuonAdamW(ours, max_grad_norm=limit), samestep.MuonAdamW(theirs)
    for step in range(5):
        for net in (ours, theirs):
            set_gradients(net, gradients(net, step))
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), limit)
        opt.step()
        plain.step()
        torch.testing.assert_close(opt.metrics()["grad_norm"].float(), norm, rtol=1e-6, atol=0)
    for param, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(param, other, rtol=0, atol=2e-6)


def test_gradients_are_not_scaled_in_place():
    net = model()
    values = gradients(net, 0)
    set_gradients(net, values)
    samestep.MuonAdamW(net, max_grad_norm=0.1).step()
    assert all(torch.equal(p.grad, values[n]) for n, p in net.named_parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scaling_rounds_no_16_bit_gradient(dtype):
    """Moments are those of 32-bit parameters, also of what 16 bits could not hold once unscaled."""
    kept = []
    for kind in (dtype, torch.float32):
        net = nn.Linear(8, 8, bias=False).to(kind)
        clipped = samestep.AdamW(net, max_grad_norm=0.3, master_weights=False)
        net.weight.grad = gradients(net, 0)["weight"].to(dtype).to(kind)
        clipped.step()
        unscaled = samestep.Muon(net, master_weights=False)
        unscaled.scaled_step(torch.tensor(2.0**-30))  # as of a GradScaler
        kept.append([clipped.state[net.weight]["exp_avg"]])
        kept[-1].append(unscaled.state[net.weight]["momentum_buffer"])
    assert all(torch.equal(narrow, wide) for narrow, wide in zip(*kept, strict=True))
    assert all(bool(tensor.ne(0).all()) for tensor in kept[0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["up.weight", "lm_head.bias"])
def test_a_step_that_is_not_finite_changes_nothing(bad, name):
    net = model()
    opt = samestep.MuonAdamW(net, max_grad_norm=1.0, variance_beta2=0.9)
    set_gradients(net, gradients(net, 0))
    opt.step()
    before = copy.deepcopy((net.state_dict(), opt.state_dict()["state"]))
    values = gradients(net, 1)
    values[name].view(-1)[0] = bad
    set_gradients(net, values)
    opt.step()
    assert not opt.metrics()["grad_norm"].isfinite()
    after = (net.state_dict(), opt.state_dict()["state"])
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(old, new, rtol=0, atol=0)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), "1"])
def test_a_bad_limit_is_refused(bad):
    with pytest.raises((ValueError, TypeError), match="max_grad_norm"):
        samestep.MuonAdamW(model(), max_grad_norm=bad)


def _clip_on_ranks(rank: int, sharding: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    net = model()
    opt = samestep.MuonAdamW(
        net, max_grad_norm=0.5, sharding=sharding, reduction="ordered", crossover=32
    )
    norms = []
    for step in range(4):
        values = gradients(net, 10 * step + rank)
        if step == 2 and rank == 1:
            values["up.weight"][0, 0] = float("inf")
        set_gradients(net, values)
        opt.step()
        opt.zero_grad()
        norms.append(float(opt.metrics()["grad_norm"]))
    return norms, {n: p.detach() for n, p in net.named_parameters()}


@twin
@pytest.mark.parametrize("ranks", some([2, 3]))
def test_all_ranks_clip_and_skip_alike(ranks):
    """An inf on one rank skips the step on all; the norm is of averaged gradients, counted once."""
    net = model()
    opt = samestep.MuonAdamW(net, max_grad_norm=0.5)
    norms = []
    for step in range(4):
        each = [gradients(net, 10 * step + rank) for rank in range(ranks)]
        total = each[0]
        for values in each[1:]:
            total = {name: total[name] + values[name] for name in total}
        if step != 2:
            set_gradients(net, {name: value / ranks for name, value in total.items()})
            opt.step()
            norms.append(float(opt.metrics()["grad_norm"]))
    for sharding in ("none", "zero1", "zero2"):
        results = run_forked(ranks, _clip_on_ranks, sharding)
        for rank_norms, params in results:
            assert rank_norms == results[0][0]
            assert rank_norms[2] == float("inf")
            finite = [norm for place, norm in enumerate(rank_norms) if place != 2]
            assert finite == pytest.approx(norms, rel=1e-12)
            for name, param in net.named_parameters():
                assert torch.equal(params[name], results[0][1][name])
                torch.testing.assert_close(params[name], param.detach(), rtol=0, atol=1e-6)
