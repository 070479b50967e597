"""Gradients that were reduced inside backward: looked at, clipped, or dropped before the step.

`.grad` means what it means in torch: what was dropped does not count, and nobody computes with
what is not there. Without overlap a step finds gradients as autograd left them, so its bits are
asked for.
"""

from __future__ import annotations

import gc
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import samestep
from samestep.comm.presence import RankProblemError
from samestep.shards.replicated.reduced_gradient import GradientIsReducedError
from tests import test_copies
from tests.ranks import run_cases, run_forked
from tests.soak import SOAK, twin
from tests.test_overlap import LAYERS, Net, build, loss_of, same, values

LAYOUTS = {
    "none": {"sharding": "none"},
    "zero1": {"sharding": "zero1"},
    "zero2": {"sharding": "zero2"},
    "flat zero1": {"buffers": "flat", "sharding": "zero1"},
    "flat zero2": {"buffers": "flat", "sharding": "zero2"},
}


def build_alone(model, layout, **options):
    """Another optimizer that is still there would hold its launches back beside this one."""
    gc.collect()
    gc.freeze()  # what is older is not looked through again
    return build(model, **LAYOUTS[layout], **options)


def backward(model, rank, batch):
    """Where no expert is used, later buckets wait for the step."""
    expert = (0, None, 1, 2)[batch % 4]
    loss_of(model, ((torch.arange(6) + rank + 3 * batch) % 13, LAYERS, expert)).backward()


def broken_backward(model, rank):
    """It has reduced some gradients when it breaks off."""
    x = model.embedding(torch.arange(6) + rank)
    middle = x + model.first(x).tanh()
    middle.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.head(middle + model.third(middle)).square().sum().backward()


def by_hand(model, rank):
    for param in model.parameters():
        param.grad = torch.full_like(param, 1.0 + rank)


# What is done before the step, and how gradients are dropped in it.
DROPS = {
    "opt": lambda model, opt: opt.zero_grad(),
    "model": lambda model, opt: model.zero_grad(),
    "opt to zeros": lambda model, opt: opt.zero_grad(set_to_none=False),
    "model to zeros": lambda model, opt: model.zero_grad(set_to_none=False),
}


def dropped(model, opt, rank, drop):
    backward(model, rank, 0)
    drop(model, opt)


def dropped_then_more(model, opt, rank, drop):
    dropped(model, opt, rank, drop)
    backward(model, rank, 1)


def dropped_twice(model, opt, rank, drop):
    dropped_then_more(model, opt, rank, drop)
    drop(model, opt)
    backward(model, rank, 2)


def dropped_after_micro_batches(model, opt, rank, drop):
    with opt.no_sync():
        backward(model, rank, 0)
        backward(model, rank, 1)
    backward(model, rank, 2)
    drop(model, opt)
    with opt.no_sync():
        backward(model, rank, 3)
    backward(model, rank, 4)


def dropped_between_micro_batches(model, opt, rank, drop):
    with opt.no_sync():
        backward(model, rank, 0)
        drop(model, opt)
        backward(model, rank, 1)
    backward(model, rank, 2)


def broken(model, opt, rank, drop):
    broken_backward(model, rank)
    drop(model, opt)


def broken_then_more(model, opt, rank, drop):
    broken(model, opt, rank, drop)
    backward(model, rank, 1)


def dropped_then_by_hand(model, opt, rank, drop):
    dropped(model, opt, rank, drop)
    by_hand(model, rank)


def replaced(model, opt, rank, drop):
    backward(model, rank, 0)
    by_hand(model, rank)


def one_dropped(model, opt, rank, drop):
    backward(model, rank, 0)
    model.second.weight.grad = None
    model.head.weight.grad = None


def after_synchronize(model, opt, rank, drop):
    """Reduced twice, dropped, and reduced once more."""
    for batch in range(2):
        backward(model, rank, batch)
        opt.synchronize()
    drop(model, opt)
    backward(model, rank, 2)


def sums_dropped(model, opt, rank, drop):
    backward(model, rank, 0)
    opt.synchronize()
    drop(model, opt)


def dropped_before_synchronize(model, opt, rank, drop):
    dropped_then_more(model, opt, rank, drop)
    opt.synchronize()
    backward(model, rank, 2)
    opt.synchronize()
    backward(model, rank, 3)


def kept(model, opt, rank, drop):
    """Nothing is dropped: a round was reduced before, and this one is added to it."""
    backward(model, rank, 0)
    opt.synchronize()
    with opt.no_sync():
        backward(model, rank, 1)
    backward(model, rank, 2)


WAYS = [
    dropped,
    dropped_then_more,
    dropped_twice,
    dropped_after_micro_batches,
    dropped_between_micro_batches,
    broken,
    broken_then_more,
    dropped_then_by_hand,
    after_synchronize,
    sums_dropped,
    dropped_before_synchronize,
]
FURTHER = [replaced, one_dropped, kept]


def after(way, drop, layout, rank, **options):
    """Weights after each of two ordinary steps, one with a drop, and another ordinary one.

    In the first two, optimizers without overlap look whether gradients were edited, and warn.
    """
    model = Net()
    opt = build_alone(model, layout, **options)
    found = []
    for step in range(4):
        if step == 2:
            way(model, opt, rank, DROPS[drop])
        else:
            backward(model, rank, 5 + step)
        opt.step()
        found.append(values(model))
        opt.zero_grad()
    return found


def test_what_is_dropped_does_not_count():
    names, drops = list(LAYOUTS), list(DROPS)
    cases = [(way, drops[n % 4], [names[n % 5]]) for n, way in enumerate(WAYS)]
    cases += [(way, "model", [names[n % 5]]) for n, way in enumerate(FURTHER)]
    if SOAK:
        cases = [(way, drop, names) for way in WAYS for drop in DROPS]

    def job(rank, case):
        way, drop, layouts = case
        if drop == "model to zeros":  # where gradients stay in `.grad`, this is an edit of them
            layouts = ["zero2", "flat zero2"]
        found = {name: after(way, drop, name, rank, overlap_grad_reduce=True) for name in layouts}
        return after(way, drop, "none", rank), found

    for (way, drop, _), results in run_cases(2, cases, job):
        for plain, found in results:
            for layout, trained in found.items():
                for step, (left, right) in enumerate(zip(plain, trained, strict=True)):
                    assert same(left, right), (way.__name__, drop, layout, step)
            nothing_left = way in (dropped, broken, sums_dropped) and "zeros" not in drop
            assert same(plain[1], plain[2]) == nothing_left, (way.__name__, drop)
            assert not same(plain[2], plain[3])


# --- clipping ------------------------------------------------------------------------------------


def clipped_by(clip, layout, rank, **options):
    """Weights and norms after steps with clipping, some of them thrown away, and a last one."""
    model = Net()
    limit = {} if clip else {"max_grad_norm": 0.5}
    opt = build_alone(model, layout, **options, **limit)
    norms = []
    for step in range(4):
        with opt.no_sync():
            backward(model, rank, 2 * step)
        backward(model, rank, 2 * step + 1)
        if clip:
            norms.append(clip(opt))
        if step == 2:
            model.zero_grad()
            backward(model, rank, 9)
            if clip:
                norms[-1] = clip(opt)
        opt.step()
        if not clip:
            norms.append(opt.metrics()["grad_norm"])
        opt.zero_grad()
    return [values(model), torch.stack(norms)]


@twin
def test_clipping_before_the_step_is_that_of_the_step():
    cases = [(name, {"overlap_grad_reduce": True}) for name in LAYOUTS]
    cases += [("none", {}), ("flat zero1", {}), ("zero2", {"max_grad_norm": math.inf})]

    def job(rank, case):
        layout, options = case
        found = clipped_by(lambda opt: opt.clip_grad_norm_(0.5), layout, rank, **options)
        return clipped_by(None, layout, rank), found

    for case, results in run_cases(2, cases, job):
        for (plain, norms), (found, returned) in results:
            assert torch.equal(norms, returned), case
            assert same(plain, found), case
            assert (norms > 0.5).all()


# --- gradients that are looked at ----------------------------------------------------------------

READS = {
    "clip_grad_norm_": lambda p: nn.utils.clip_grad_norm_([p], 1.0),
    "clip_grad_norm_ without foreach": lambda p: nn.utils.clip_grad_norm_([p], 1.0, foreach=False),
    "clip_grad_value_": lambda p: nn.utils.clip_grad_value_([p], 1.0),
    "get_total_norm": lambda p: nn.utils.get_total_norm([p.grad]),
    "norm": lambda p: p.grad.norm(),
    "data": lambda p: p.grad.data.mul_(2),
    "clone": lambda p: p.grad.detach().clone(),
    "isnan": lambda p: torch.isnan(p.grad).any(),
    "foreach": lambda p: torch._foreach_mul_([p.grad], 2.0),
    "flat": lambda p: nn.utils.parameters_to_vector([p.grad]),
    "copied into": lambda p: torch.zeros_like(p).copy_(p.grad),
    "assigned": lambda p: p.grad.copy_(torch.ones_like(p)),
    "added to": lambda p: p.grad.add_(torch.ones_like(p)),
    "numpy": lambda p: p.grad.numpy(),
    "tolist": lambda p: p.grad.tolist(),
    "item": lambda p: p.grad.item(),
    "memory": lambda p: p.grad.untyped_storage(),
    "address": lambda p: p.grad.data_ptr(),
    "shared memory": lambda p: p.grad.share_memory_(),
    "torch's scaler": lambda p: torch._amp_foreach_non_finite_check_and_unscale_(
        [p.grad], torch.zeros(()), torch.ones(())
    ),
}


def test_nobody_computes_with_a_gradient_that_was_given_back():
    def job(rank):
        found = {}
        for layout in ("zero2", "flat zero2"):
            model = Net()
            opt = build_alone(model, layout, overlap_grad_reduce=True)
            backward(model, rank, 0)
            param = model.second.weight
            assert (param.grad.shape, param.grad.dtype) == (param.shape, param.dtype)
            assert "second.weight" in repr(param.grad)
            for name, read in READS.items():
                try:
                    found[layout, name] = read(param)
                except RuntimeError as error:
                    found[layout, name] = type(error), str(error)
            with pytest.raises(RuntimeError, match=r"after its bucket was reduced.*no_sync\(\)"):
                backward(model, rank, 1)
            model.zero_grad()
            backward(model, rank, 0)
            opt.step()
            assert all(p.grad is None for p in model.parameters())
            found[layout] = values(model)
            plain = Net()
            plain_opt = build_alone(plain, layout)
            backward(plain, rank, 0)
            plain_opt.step()
            assert same(values(plain), values(model))
        return found

    for found in run_forked(2, job):
        for (layout, name), error in ((k, v) for k, v in found.items() if isinstance(k, tuple)):
            assert error[0] is GradientIsReducedError, (layout, name, error)
            assert "'second.weight'" in error[1]
            assert "opt.clip_grad_norm_(max_norm)" in error[1]


def test_a_rank_that_drops_alone_is_an_error_on_every_rank():
    cases = [(layout, drop) for layout in LAYOUTS for drop in ("opt", "opt to zeros")]

    def job(rank, case):
        layout, drop = case
        model = Net()
        opt = build_alone(model, layout, overlap_grad_reduce=True)
        before = values(model)
        backward(model, rank, 0)
        if rank == 1:
            DROPS[drop](model, opt)
            backward(model, rank, 1)
        with pytest.raises(RankProblemError, match="was dropped on rank 1") as error:
            opt.step()
        assert same(values(model), before)
        opt.zero_grad()
        backward(model, rank, 0)
        opt.step()
        return str(error.value), values(model)

    texts = {}
    for (layout, drop), results in run_cases(2, cases, job):
        text, trained = results[0]
        texts[layout] = text
        assert all(other == text and same(trained, weights) for other, weights in results), drop
        assert not same(trained, values(Net()))
    assert len(set(texts.values())) == 1
    assert "'embedding.weight'" in texts["zero2"] or "not on rank 0" in texts["zero2"]


def sharded_model(kind):
    if kind == "tensor parallel":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        return test_copies.tensor_parallel(mesh["model"]), mesh.get_local_rank("data")
    model = test_copies.net()
    if kind == "DDP":
        return nn.parallel.DistributedDataParallel(model), dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(model, mesh=mesh), dist.get_rank()


def test_clipping_and_dropping_of_dtensors_and_of_gradients_that_others_average():
    options = list(test_copies.OPTIONS.values())
    kinds = [("tensor parallel", each) for each in (options if SOAK else options[:2])]
    kinds += [("DDP", {}), ("HSDP", {})]

    def job(rank, case):
        kind, options = case
        found = []
        for clip in (False, True):
            gc.collect()
            model, data = sharded_model(kind)
            limit = {} if clip else {"max_grad_norm": 0.01}
            opt = samestep.MuonAdamW(model, lr=0.1, **options, **limit)
            norms = []
            for step in range(3 if SOAK else 2):
                for again in (True, False):
                    if again and not (clip and step == 1):
                        continue
                    generator = torch.Generator().manual_seed(100 * step + data + 7 * again)
                    x = torch.randn(4, 8, generator=generator)
                    (model(x) - x).pow(2).mean().backward()
                    if again:  # dropped before and after clipping
                        model.zero_grad()
                        (model(x) - x).pow(2).mean().backward()
                        opt.clip_grad_norm_(0.5)
                        opt.zero_grad()
                if clip:
                    norms.append(opt.clip_grad_norm_(0.01))
                opt.step()
                if not clip:
                    norms.append(opt.metrics()["grad_norm"])
                opt.zero_grad()
            weights = {name: opt.full_parameter(name) for name in opt.whole_state()}
            found.append((weights, torch.stack(norms)))
        return found

    for case, results in run_cases(4, kinds, job):
        for (plain, norms), (clipped, returned) in results:
            assert (norms > 0.01).all()
            torch.testing.assert_close(returned, norms, rtol=1e-12, atol=0)
            for name, value in plain.items():
                torch.testing.assert_close(
                    clipped[name], value, rtol=1e-6, atol=1e-7, msg=str(case)
                )
                assert torch.equal(clipped[name], results[0][1][0][name])


def test_clipping_in_one_process_is_that_of_torch():
    found = []
    for clip in (lambda _, opt: opt.clip_grad_norm_(0.1), lambda m, _: torchs(m, 0.1)):
        model = Net()
        opt = build(model)
        for batch in range(1, 4):
            backward(model, 0, batch)
            norm = clip(model, opt)
            opt.step()
            opt.zero_grad()
        found.append({**values(model), "norm": norm.float()})
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-5, atol=1e-6)


def torchs(model, limit):
    return nn.utils.clip_grad_norm_(model.parameters(), limit)


def test_refused_of_clipping():
    model = Net()
    with pytest.raises(ValueError, match="clipped twice, by max_grad_norm=1 in every step and by"):
        build(model, max_grad_norm=1.0).clip_grad_norm_(2.0)
    with pytest.raises(ValueError, match="Invalid max_norm value: -1"):
        build(model).clip_grad_norm_(-1)
    opt = build(model)
    opt.clip_grad_norm_(math.inf)
    with pytest.raises(
        RuntimeError,
        match="clip_grad_norm_ was called on gradients that are still scaled by a GradScaler",
    ):
        opt.scaled_step(torch.ones((), dtype=torch.float64))


def test_ranks_that_clip_by_other_limits_or_not_at_all():
    calls = [lambda opt, rank: opt.clip_grad_norm_(1.0 + rank)]
    calls += [lambda opt, rank: opt.clip_grad_norm_(1.0) if rank else opt.step()]

    def job(rank, number):
        model = Net()
        opt = build_alone(model, "zero2")
        backward(model, rank, 0)
        with pytest.raises(RuntimeError) as error:
            calls[number](opt, rank)
        assert same(values(model), values(Net()))
        return str(error.value)

    for number, texts in run_cases(2, [0, 1], job):
        for text in texts:
            assert "clip_grad_norm_(1.0)" in text
            assert ("step()" if number else "clip_grad_norm_(2.0)") in text
