"""What a step on several ranks needs beside averaging: scales, norms, experts, checks, numbers."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

import samestep
from samestep.comm.presence import RankProblemError
from tests.ranks import run_forked
from tests.soak import twin_cases

OPTIONS = {"lr": 1e-2, "reduction": "ordered", "crossover": 20, "bucket_size": 100}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.hidden = nn.Linear(6, 9)
        self.other = nn.Linear(9, 6)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.normal_(std=0.3, generator=generator)


def random(shape, *seed):
    generator = torch.Generator().manual_seed(hash(seed) % (1 << 31))
    return torch.randn(shape, generator=generator)


def backward(model, rank, step, factor=1.0, scaler=None):
    """Gradients of one's own, through autograd."""
    loss = 0.0
    for place, param in enumerate(model.parameters()):
        loss = loss + (param * random(param.shape, place, rank, step)).sum() * factor
    (loss if scaler is None else scaler.scale(loss)).backward()


def mean_gradients(model, world, step):
    for place, param in enumerate(model.parameters()):
        total = torch.zeros_like(param)
        for rank in range(world):
            total = total + random(param.shape, place, rank, step)
        param.grad = total / world


def values(model):
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def same(left, right):
    return all(torch.equal(left[name], right[name]) for name in left)


# --- GradScaler --------------------------------------------------------------------------------


@twin_cases("False")
@pytest.mark.parametrize("overlap", [False, True])
def test_the_scaler_skips_on_all_ranks_and_its_scale_stays_equal(overlap):
    """One rank overflows in step 2 and has NaN in step 4; powers of two leave no trace."""
    world, steps, bad = 3, 6, {2: math.inf, 4: math.nan}
    single = Net()
    single_opt = samestep.MuonAdamW(single, lr=1e-2)
    for step in range(steps):
        if step not in bad:
            mean_gradients(single, world, step)
            single_opt.step()

    def job(rank):
        model = Net()
        opt = samestep.MuonAdamW(model, **OPTIONS, overlap_grad_reduce=overlap)
        scaler = samestep.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        scales, finite = [], []
        for step in range(steps):
            factor = bad.get(step, 1.0) if rank == 1 else 1.0
            before = values(model), [t.clone() for s in opt.state.values() for t in s.values()]
            backward(model, rank, step, factor, scaler)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            scales.append(scaler.get_scale())
            finite.append(bool(opt.metrics()["grad_norm"].isfinite()))
            if step in bad:
                after = [t for s in opt.state.values() for t in s.values()]
                assert same(before[0], values(model))
                assert all(map(torch.equal, before[1], after)), "momentum is not clean"
        return scales, finite, values(model), scaler.state_dict()

    results = run_forked(world, job)
    for scales, finite, found, saved in results:
        assert scales == [256.0, 512.0, 256.0, 256.0, 128.0, 128.0]
        assert finite == [step not in bad for step in range(steps)]
        assert same(found, values(single))
        assert saved == results[0][3]


def test_the_scaler_clips_unscaled_gradients():
    world = 2
    single = Net()
    single_opt = samestep.MuonAdamW(single, lr=1e-2, max_grad_norm=0.5)
    mean_gradients(single, world, 0)
    single_opt.step()

    def job(rank):
        model = Net()
        opt = samestep.MuonAdamW(model, **OPTIONS, max_grad_norm=0.5)
        scaler = samestep.GradScaler("cpu", init_scale=2.0**10)
        backward(model, rank, 0, scaler=scaler)
        scaler.step(opt)
        return opt.metrics()["grad_norm"].item(), values(model)

    for norm, found in run_forked(world, job):
        assert norm == pytest.approx(single_opt.metrics()["grad_norm"].item(), rel=1e-12)
        for name, value in values(single).items():
            assert torch.allclose(found[name], value, rtol=0, atol=2e-6), name


def test_torchs_scaler_is_refused_where_its_scale_would_drift():
    def job(rank):
        model = Net()
        opt = samestep.MuonAdamW(model, **OPTIONS)
        before = values(model)
        torchs, ours = torch.amp.GradScaler("cpu"), samestep.GradScaler("cpu")
        backward(model, rank, 0, scaler=torchs)
        with pytest.raises(RuntimeError, match=r"use samestep\.GradScaler"):
            torchs.step(opt)
        with pytest.raises(RuntimeError, match="max_grad_norm= instead of clip_grad_norm_"):
            ours.unscale_(opt)
        with pytest.raises(RuntimeError, match="was not called before step"):
            ours.step(opt)
        ours.scale(torch.ones(()))
        ours.step(opt)
        with pytest.raises(RuntimeError, match="already been called"):
            ours.step(opt)
        ours.update()
        disabled = samestep.GradScaler("cpu", enabled=False)
        disabled.step(opt)
        return same(before, values(model))

    assert run_forked(2, job) == [False, False]


def test_both_scalers_work_on_one_process_and_under_ddp():
    def losses(scaler_class, wrap):
        model = Net()
        opt = samestep.MuonAdamW(wrap(model), lr=1e-2)
        scaler = scaler_class("cpu", init_scale=2.0**5)
        for step in range(3):
            mean_gradients(model, 2, step)
            for param in model.parameters():
                param.grad *= math.inf if step == 1 else 2.0**5
            scaler.scale(torch.ones(()))
            scaler.unscale_(opt)
            scaler.step(opt)
            scaler.update()
        return scaler.get_scale(), values(model)

    def job(rank):
        wrap = nn.parallel.DistributedDataParallel
        return [losses(c, wrap) for c in (torch.amp.GradScaler, samestep.GradScaler)]

    expected = losses(torch.amp.GradScaler, lambda model: model)
    found = [losses(samestep.GradScaler, lambda model: model), *run_forked(2, job)[0]]
    for scale, result in found:
        assert scale == expected[0] == 16.0
        assert same(result, expected[1])


# --- non-finite gradients ----------------------------------------------------------------------


def test_an_infinite_limit_checks_without_clipping():
    model, plain = Net(), Net()
    opt = samestep.MuonAdamW(model, lr=1e-2, max_grad_norm=math.inf)
    reference = samestep.MuonAdamW(plain, lr=1e-2)
    for step in range(3):
        mean_gradients(model, 2, step)
        mean_gradients(plain, 2, step)
        reference.step()
        opt.step()
    assert same(values(model), values(plain))
    model.hidden.weight.grad[0, 0] = math.nan
    opt.step()
    assert same(values(model), values(plain))
    with pytest.raises(ValueError, match="max_grad_norm"):
        samestep.MuonAdamW(model, max_grad_norm=math.nan)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_bad_local_gradient_is_reported_with_parameter_and_rank(overlap):
    def job(rank):
        model = Net()
        opt = samestep.MuonAdamW(
            model, **OPTIONS, check_gradients=True, overlap_grad_reduce=overlap
        )
        before = values(model)
        backward(model, rank, 0, math.inf if rank == 2 else 1.0)
        with pytest.raises((FloatingPointError, RankProblemError)) as caught:
            opt.step()
        assert same(before, values(model))
        opt.zero_grad()
        backward(model, rank, 1)
        opt.step()  # and it goes on
        return type(caught.value), str(caught.value), values(model)

    results = run_forked(3, job)
    for rank, (kind, text, found) in enumerate(results):
        assert kind is (FloatingPointError if rank == 2 else RankProblemError)
        assert "rank 2" in text
        assert "'other." in text  # the first that backward finishes
        assert rank != 2 or "before it was averaged" in text
        assert same(found, results[0][2])


def test_an_error_on_one_rank_is_an_error_on_all_and_changes_nothing():
    """A learning rate that only one rank has spoiled."""

    def job(rank):
        model = Net()
        opt = samestep.MuonAdamW(model, **OPTIONS)
        before = values(model)
        backward(model, rank, 0)
        if rank == 1:
            opt.param_groups[0]["lr"] = -1.0
        with pytest.raises((ValueError, RankProblemError)) as caught:
            opt.step()
        opt.param_groups[0]["lr"] = 1e-2
        assert same(before, values(model))
        backward(model, rank, 1)
        opt.step()
        return str(caught.value), values(model)

    results = run_forked(3, job)
    assert "-1.0" in results[1][0]
    for rank in (0, 2):
        assert "rank 1 could not take the step" in results[rank][0]
    assert all(same(found, results[0][1]) for _, found in results)


# --- dtypes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["fast", "ordered"])
def test_gradients_travel_in_the_dtype_asked_for(reduction):
    """bf16 on the wire: the mean of rounded gradients; fp32 for bf16 parameters: exact."""

    def job(rank):
        found = []
        for dtype, reduce_dtype in ((torch.float32, torch.bfloat16), (torch.bfloat16, None)):
            model = Net().to(dtype)
            reduce_dtype = reduce_dtype or torch.float32
            opt = samestep.AdamW(
                model, lr=1.0, betas=(0.0, 0.0), eps=1e30, weight_decay=0.0,
                reduction=reduction, reduce_dtype=reduce_dtype, master_weights=True, crossover=20,
            )  # fmt: skip
            seen = []
            real = dist.all_to_all_single

            def spy(output, given, *args, real=real, seen=seen, **kwargs):
                seen.append(output.dtype)
                return real(output, given, *args, **kwargs)

            dist.all_to_all_single = spy
            for place, param in enumerate(model.parameters()):
                param.grad = random(param.shape, place, rank).to(dtype)
            opt.step()
            dist.all_to_all_single = real
            assert seen[0] == reduce_dtype
            moments = [opt.state[p]["exp_avg"] for p in model.parameters()]
            owned = opt.shared_parameters[0].plan.owned(rank)
            pieces = [[p for p in owned if p.param == i] for i in range(len(moments))]
            found.append([(p, m.clone()) for p, m in zip(pieces, moments, strict=True)])
        return found

    results = run_forked(2, job)
    shapes = [param.shape for param in Net().parameters()]
    for half, number in ((torch.bfloat16, 0), (torch.float32, 1)):
        dtype = torch.float32 if number == 0 else torch.bfloat16
        for place, shape in enumerate(shapes):
            grads = [random(shape, place, rank).to(dtype).to(half) for rank in range(2)]
            total = grads[0].float() + grads[1].float()
            if reduction == "fast" and shape.numel() < 20:  # the backend's all-reduce
                total = (grads[0] + grads[1]).float()
            expected = (total / 2).reshape(-1)
            for found in results:
                pieces, moment = found[number][place]
                parts = [expected[piece.start : piece.stop] for piece in pieces]
                assert torch.equal(moment, torch.cat([*parts, expected[:0]]))


# --- experts: process groups of their own ------------------------------------------------------


class Experts(nn.Module):
    """A dense part on all ranks, and an expert that half of them hold."""

    def __init__(self, which: int) -> None:
        super().__init__()
        self.dense = nn.Linear(6, 6, bias=False)
        self.expert = nn.Linear(6, 8, bias=False)
        with torch.no_grad():
            self.dense.weight.copy_(random((6, 6), "dense"))
            self.expert.weight.copy_(random((8, 6), "expert", which))


@twin_cases("None")
@pytest.mark.parametrize("limit", [None, 0.7])
def test_experts_are_summed_over_their_ranks_and_divided_by_all(limit):
    """Four ranks, two experts on two ranks each, one joint norm; against one process."""
    world, steps = 4, 3

    def grads(rank, step):
        return random((6, 6), "d", rank, step), random((8, 6), "e", rank, step)

    reference = nn.ParameterDict(
        {"dense": random((6, 6), "dense"), "e0": random((8, 6), "expert", 0),
         "e1": random((8, 6), "expert", 1)}
    )  # fmt: skip
    single = samestep.Muon(reference.parameters(), lr=1e-2, max_grad_norm=limit)
    for step in range(steps):
        given = [grads(rank, step) for rank in range(world)]
        reference["dense"].grad = sum(g[0] for g in given) / world
        reference["e0"].grad = (given[0][1] + given[2][1]) / world
        reference["e1"].grad = (given[1][1] + given[3][1]) / world
        single.step()

    def job(rank):
        halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        model = Experts(rank % 2)
        opt = samestep.MuonAdamW(
            model,
            groups=[
                {"params": "dense.*", "rule": "muon"},
                {
                    "params": "expert.*",
                    "rule": "muon",
                    "process_group": halves[rank % 2],
                    "divisor": world,
                },
            ],
            lr=1e-2,
            max_grad_norm=limit,
            crossover=1,
            reduction="ordered",
            state_dict_form="part",
        )
        for step in range(steps):
            model.dense.weight.grad, model.expert.weight.grad = grads(rank, step)
            opt.step()
        norm = opt.metrics().get("grad_norm")
        opt.load_state_dict(opt.state_dict())  # handles are not saved
        return model.dense.weight.detach(), model.expert.weight.detach(), norm

    for rank, (dense, expert, norm) in enumerate(run_forked(world, job)):
        tolerance = {"rtol": 0, "atol": 0 if limit is None else 1e-6}
        assert torch.allclose(dense, reference["dense"], **tolerance)
        assert torch.allclose(expert, reference[f"e{rank % 2}"], **tolerance)
        assert limit is None or norm == pytest.approx(single.metrics()["grad_norm"].item())


def test_an_expert_of_one_rank_is_divided_too():
    def job(rank):
        alone = [dist.new_group([other]) for other in range(3)][rank]
        weight = nn.Parameter(torch.zeros(8, 6))
        group = {"params": [weight], "rule": "adamw", "process_group": alone, "divisor": 3}
        shared = nn.Parameter(torch.zeros(5))
        opt = samestep.MuonAdamW(
            [{"params": [shared], "rule": "adamw"}, group], max_grad_norm=math.inf
        )
        weight.grad, shared.grad = torch.full((8, 6), 6.0), torch.zeros(5)
        opt.step()
        return opt.metrics()["grad_norm"].item()

    for norm in run_forked(3, job):
        assert norm == pytest.approx((3 * 48 * 2.0**2) ** 0.5)


def test_a_divisor_needs_ranks_and_a_sensible_value():
    def group(**keys):
        return [{"params": [nn.Parameter(torch.zeros(4, 4))], "rule": "muon", **keys}]

    with pytest.raises(ValueError, match=r"param_groups\[0\].*this is the only rank"):
        samestep.MuonAdamW(group(divisor=4))

    def job(rank):
        for bad in (0, -1, math.inf, "4"):
            with pytest.raises((TypeError, ValueError), match=r"param_groups\[0\].*divisor"):
                samestep.MuonAdamW(group(divisor=bad))
        with pytest.raises(ValueError, match="grads"):
            samestep.MuonAdamW(group(divisor=4), grads="reduced")
        other = dist.new_group([1])
        if rank == 0:
            with pytest.raises(ValueError, match="not a member"):
                samestep.MuonAdamW(group(process_group=other))

    run_forked(2, job)


# --- metrics and names -------------------------------------------------------------------------


@twin_cases("none")
@pytest.mark.parametrize("sharding", ["none", "zero2"])
def test_metrics_are_those_of_the_whole_model_on_every_rank(sharding):
    """Some gradients are missing on some ranks, some on all; against one process."""
    world = 3

    def give(model, rank, step):
        for place, param in enumerate(model.parameters()):
            missing = place == 4 or (place + rank) % 3 == 0
            param.grad = None if missing else random(param.shape, place, rank, step)

    single = Net()
    single_opt = samestep.MuonAdamW(single, lr=1e-2, update_rms=True, max_grad_norm=1e9)
    for step in range(2):
        twins = [Net() for _ in range(world)]
        for rank, twin in enumerate(twins):
            give(twin, rank, step)
        for param, *others in zip(*(m.parameters() for m in (single, *twins)), strict=True):
            grads = [other.grad for other in others if other.grad is not None]
            param.grad = sum(grads) / world if grads else None
        single_opt.step()

    def job(rank):
        model = Net()
        opt = samestep.MuonAdamW(
            model, **OPTIONS, sharding=sharding, update_rms=True, max_grad_norm=1e9
        )
        assert int(opt.metrics()["present"].sum()) == 0
        for step in range(2):
            give(model, rank, step)
            opt.step()
        return opt.metrics()

    expected = single_opt.metrics()
    assert 0 < int(expected["present"].sum()) < len(list(single.parameters()))
    for found in run_forked(world, job):
        assert found.keys() == expected.keys()
        assert found.keys() == {"grad_norm", "outliers", "present", "update_rms"}
        assert not found["outliers"].any()
        assert torch.equal(found["present"], expected["present"])
        for key in ("grad_norm", "update_rms"):
            assert torch.allclose(found[key], expected[key], rtol=1e-9, equal_nan=True), key


def test_update_rms_is_that_of_what_the_learning_rate_multiplies():
    """Muon's direction after enough steps is orthogonal: RMS 1 / sqrt(max(rows, cols))."""
    muon, adamw = nn.Parameter(torch.zeros(8, 32)), nn.Parameter(torch.zeros(50))
    opt = samestep.MuonAdamW(
        [
            {"params": [muon], "rule": "muon", "renormalize": True},
            {"params": [adamw], "rule": "adamw", "eps": 0.0},
        ],
        update_rms=True,
    )
    muon.grad, adamw.grad = random((8, 32), 1), random((50,), 2)
    opt.step()
    rms = opt.metrics()["update_rms"]
    assert rms[0] == pytest.approx(32**-0.5, rel=1e-5)
    assert rms[1] == pytest.approx(1.0, rel=1e-5)  # the first AdamW step is the sign
    opt.zero_grad()
    opt.step()
    assert opt.metrics()["update_rms"].isnan().all()
    assert opt.metrics()["present"].tolist() == [0, 0]


def test_a_profiler_shows_the_parts_of_a_step_by_name():
    def job(rank):
        model = Net()
        opt = samestep.MuonAdamW(model, **OPTIONS, max_grad_norm=1.0, update_rms=True)
        backward(model, rank, 0)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            opt.step()
        return {event.key for event in profiler.key_averages() if "samestep" in event.key}

    parts = ("reduce", "agree", "average", "clip", "update", "gather", "place", "measure")
    assert run_forked(2, job)[0] == {f"samestep.{part}" for part in parts}


# --- state of one rank -------------------------------------------------------------------------


def test_state_of_another_rank_or_plan_is_refused():
    def job(rank):
        def make(**options):
            params = [nn.Parameter(torch.zeros(8, 8)), nn.Parameter(torch.zeros(8, 8))]
            return samestep.Muon(params, **{"crossover": 1, **options})

        mine = make(state_dict_form="part").state_dict()
        texts = []
        files = [None] * 2
        dist.all_gather_object(files, mine)
        make(reduction="ordered", sharding="zero1").load_state_dict(files[rank])
        for optimizer, file in (
            (make(), files[1 - rank]),
            (make(sharding="none"), mine),
            (make(bucket_size=16), mine),
        ):
            with pytest.raises(ValueError, match="loaded state") as caught:
                optimizer.load_state_dict(file)
            texts.append(str(caught.value))
        return texts, mine

    for rank, ((other, whole, plan), part) in enumerate(run_forked(2, job)):
        assert f"of rank {1 - rank}, and this is rank {rank}" in other
        assert "one part of 2, saved by as many ranks, and all of it is needed" in whole
        assert "another assignment of parameters to ranks" in plan
        assert (
            "load the files with that version on the same number of ranks, call samestep.save("
            in plan
        )
        params = [nn.Parameter(torch.zeros(8, 8)) for _ in range(2)]
        with pytest.raises(
            ValueError, match="one part of 2, saved by as many ranks, and all of it is needed"
        ):
            samestep.Muon(params).load_state_dict(part)


def test_groups_of_some_ranks_wait_for_nobody_else():
    """Neither where they are built nor where that fails on a rank; the others are elsewhere."""

    def job(rank):
        pair, others = dist.new_group([0, 1]), dist.new_group([2])
        own = others if rank == 2 else pair

        def group(**keys):
            params = [nn.Parameter(torch.ones(4, 4))]
            return {"params": params, "rule": "muon", "process_group": own, **keys}

        def refused(call):
            with pytest.raises((ValueError, RankProblemError)) as caught:
                call()
            return str(caught.value)

        found = []
        if rank < 2:
            bad = {"lr": -1.0} if rank == 0 else {}
            found.append(refused(lambda: samestep.MuonAdamW([group(**bad)])))
            opt = samestep.MuonAdamW([group()])
            found.append(refused(lambda: opt.add_param_group(group(**bad))))
            opt.add_param_group(group())
            late = samestep.MuonAdamW([group()], deferred=True)
            late.param_groups[0]["params"][0].grad = torch.ones(4, 4)
            late.step()
        dist.barrier()
        foreign = others if rank < 2 else pair
        if rank == 0:
            found.append(refused(lambda: samestep.MuonAdamW([group(process_group=foreign)])))
        return found

    lr, other = (
        "param_groups[{}]: Invalid learning rate",
        "rank 0 failed in {}, so no rank goes on with it",
    )
    zero, one, two = run_forked(3, job, collective_timeout=10)
    calls = ["the construction of MuonAdamW", "add_param_group()"]
    for index, call in enumerate(calls):
        assert zero[index].startswith(lr.format(index)), zero
        assert one[index].startswith(other.format(call)), one
    assert (
        "rank 0 is not a member of the given process_group: give each rank a group that contains it"
        in zero[2]
    )
    assert two == []
