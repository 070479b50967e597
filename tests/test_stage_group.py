"""`stage_group`: ranks that hold other parameters of the same model; only scalars cross."""

from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import samestep
from samestep.comm.presence import RankProblemError
from tests.ranks import run_cases, run_forked
from tests.soak import twin, twin_cases

STEPS = 4
OPTIONS = {"lr": 1e-2, "max_grad_norm": 0.5, "reduction": "ordered", "crossover": 20}
STAGES = (("embed", "up"), ("down", "lm_head"))


def model():
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "embed": nn.Embedding(20, 8),
            "up": nn.Linear(8, 24),
            "down": nn.Linear(24, 8),
            "lm_head": nn.Linear(8, 20),
        }
    )


def gradients(step, rank):
    """Different on every rank, and far larger in one stage than in the other."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {
        name: torch.randn(param.shape, generator=generator) * (5.0 if "down" in name else 0.1)
        for name, param in model().named_parameters()
    }


def groups():
    """Ranks 0, 1 are a stage, 2, 3 another; 0, 2 and 1, 3 are pipelines."""
    made = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    rank = dist.get_rank()
    return made[rank // 2], made[2 + rank % 2]


def stage_of(rank):
    whole = model()
    return nn.ModuleDict({name: whole[name] for name in STAGES[rank // 2]})


def optimizer(part, sharding="zero2", **options):
    process_group, stage_group = groups()
    return samestep.MuonAdamW(
        part,
        **OPTIONS | {"sharding": sharding} | options,
        process_group=process_group,
        stage_group=stage_group,
    )


def set_gradients(part, values):
    for name, param in part.named_parameters():
        param.grad = values[name].clone()


def train(rank, sharding):
    part = stage_of(rank)
    opt = optimizer(part, sharding)
    norms = []
    for step in range(STEPS):
        set_gradients(part, gradients(step, rank % 2))
        opt.step()
        norms.append(opt.metrics()["grad_norm"].item())
    return norms, {name: param.detach() for name, param in part.named_parameters()}


def alone():
    whole = model()
    opt = samestep.MuonAdamW(whole, lr=OPTIONS["lr"])
    norms = []
    for step in range(STEPS):
        first, second = gradients(step, 0), gradients(step, 1)
        set_gradients(whole, {name: (first[name] + second[name]) / 2 for name in first})
        norms.append(nn.utils.clip_grad_norm_(whole.parameters(), OPTIONS["max_grad_norm"]).item())
        opt.step()
    return norms, {name: param.detach() for name, param in whole.named_parameters()}


@twin_cases("none")
@pytest.mark.parametrize("sharding", ["zero2", "none"])
def test_clips_by_the_norm_of_all_stages(sharding):
    norms, wanted = alone()
    assert min(norms) > 2 * OPTIONS["max_grad_norm"]
    found = run_forked(4, train, sharding)
    for rank, (own_norms, params) in enumerate(found):
        assert own_norms == pytest.approx(norms, rel=1e-6)
        for name, param in params.items():
            torch.testing.assert_close(param, wanted[name], rtol=0, atol=2e-6)
            assert torch.equal(param, found[rank ^ 1][1][name])  # the other replica


def skip(rank, bad):
    part = stage_of(rank)
    opt = optimizer(part)
    set_gradients(part, gradients(0, rank % 2))
    opt.step()
    before = {name: param.detach().clone() for name, param in part.named_parameters()}
    state = opt.whole_state()
    values = gradients(1, rank % 2)
    if rank == bad:
        next(iter(values[name] for name in before)).view(-1)[0] = float("nan")
    set_gradients(part, values)
    opt.step()
    torch.testing.assert_close(opt.whole_state(), state, rtol=0, atol=0)
    assert not opt.metrics()["grad_norm"].isfinite()
    unchanged = all(torch.equal(param, before[name]) for name, param in part.named_parameters())
    set_gradients(part, gradients(2, rank % 2))
    opt.step()  # and training goes on
    return unchanged, not torch.equal(next(part.parameters()), next(iter(before.values())))


@twin_cases("0")
@pytest.mark.parametrize("bad", [0, 3])
def test_a_gradient_of_one_stage_that_is_not_finite_skips_the_step_on_all(bad):
    assert run_forked(4, skip, bad) == [(True, True)] * 4


def stumble(rank, bad):
    part = stage_of(rank)
    opt = optimizer(part, max_grad_norm=None)
    set_gradients(part, gradients(0, rank % 2))
    before = [param.detach().clone() for param in part.parameters()]
    if rank == bad:
        opt.param_groups[0]["lr"] = -1.0
    with pytest.raises((ValueError, RankProblemError)) as raised:
        opt.step()
    assert all(map(torch.equal, part.parameters(), before))
    opt.param_groups[0]["lr"] = OPTIONS["lr"]
    set_gradients(part, gradients(0, rank % 2))
    opt.step()
    return str(raised.value)


@twin
def test_a_stage_that_cannot_take_the_step_stops_all():
    texts = run_forked(4, stumble, 1)
    assert "learning rate" in texts[1]
    assert all("could not take the step" in texts[rank] for rank in (0, 2, 3))


def alone_in_its_stage(rank):
    """One rank per stage: there is no other replica through which it would hear."""
    part = nn.ModuleDict({name: model()[name] for name in STAGES[rank]})
    alone_here = [dist.new_group([other]) for other in range(2)][rank]
    opt = samestep.MuonAdamW(
        part, **OPTIONS, process_group=alone_here, stage_group=dist.group.WORLD
    )
    set_gradients(part, gradients(0, 0))
    if rank == 1:
        next(part.parameters()).grad = None
        opt.param_groups[0]["weight_decay"] = float("nan")
    with pytest.raises((ValueError, RankProblemError)) as raised:
        opt.step()
    opt.param_groups[0]["weight_decay"] = 0.1
    opt.step()
    with pytest.raises(TypeError, match="cannot be copied"):
        opt.__getstate__()
    return str(raised.value), opt.metrics()["grad_norm"].item()


def test_stages_of_one_rank_each():
    (first, norm), (second, other) = run_forked(2, alone_in_its_stage)
    assert "rank 1 could not take the step" in first
    assert "weight_decay" in second
    assert norm == other


def test_the_stage_itself_must_be_named():
    def job(rank):
        with pytest.raises(ValueError, match="process_group= too, the ranks of this stage"):
            samestep.MuonAdamW(model(), stage_group=dist.group.WORLD)
        for value, error in (("pipe", ValueError), (object(), TypeError)):
            with pytest.raises(error, match="stage_group"):
                samestep.MuonAdamW(model(), stage_group=value)

    run_forked(1, job)


def scale(rank, ranks_per_stage):
    part = stage_of(rank * 2 // ranks_per_stage)
    if ranks_per_stage == 2:
        opt = optimizer(part)
    else:
        alone_here = [dist.new_group([other]) for other in range(2)][rank]
        groups_of_two = {"process_group": alone_here, "stage_group": dist.group.WORLD}
        opt = samestep.MuonAdamW(part, **OPTIONS, **groups_of_two)
    of_torch = torch.amp.GradScaler(device="cpu")
    of_torch.scale(torch.ones(()))
    set_gradients(part, gradients(0, 0))
    with pytest.raises(RuntimeError, match=r"use samestep\.GradScaler"):
        of_torch.step(opt)
    scaler = samestep.GradScaler(device="cpu", init_scale=4.0, growth_interval=100)
    before = next(part.parameters()).detach().clone()
    norms = []
    for step in range(2):
        values = {name: 4.0 * grad for name, grad in gradients(step, rank % 2).items()}
        if step == 0 and rank == ranks_per_stage:  # the first of the second stage
            values["lm_head.bias"][0] = float("inf")
        scaler.scale(torch.ones(()))  # as of a loss
        set_gradients(part, values)
        scaler.step(opt)
        scaler.update()
        norms.append(opt.metrics()["grad_norm"].item())
        if step == 0:
            assert torch.equal(next(part.parameters()), before)
    return scaler.get_scale(), norms[1]


@twin_cases("2")
@pytest.mark.parametrize("ranks_per_stage", [1, 2])
def test_a_scaler_has_one_scale_for_all_stages(ranks_per_stage):
    found = run_forked(2 * ranks_per_stage, scale, ranks_per_stage)
    assert {own_scale for own_scale, _ in found} == {2.0}
    assert len({norm for _, norm in found}) == 1


def test_parameters_that_some_ranks_have_swapped():
    """One rank, a whole stage, a whole pipeline, all but one: an error on every rank; or all."""

    def job(rank, who):
        part = stage_of(rank)
        opt = optimizer(part)
        for step in range(2):
            if step and rank in who:
                for module in part.values():
                    for name, param in list(module.named_parameters(recurse=False)):
                        setattr(module, name, nn.Parameter(param.detach().clone()))
                named = dict(part.named_parameters())
                for group in opt.param_groups:
                    group["params"] = [named[name] for name in group["param_names"]]
            set_gradients(part, gradients(step, rank % 2))
            try:
                opt.step()
            except RankProblemError as error:
                return str(error)
        return {name: param.detach() for name, param in part.named_parameters()}

    cases = [(), (0,), (0, 1), (0, 2), (0, 1, 2), (0, 1, 2, 3)]
    (_, plain), *some, (_, swapped) = run_cases(4, cases, job)
    for who, found in some:
        assert all(isinstance(text, str) for text in found), who
        assert any("replaced by another tensor on rank" in text for text in found), who
    for expected, found in zip(plain, swapped, strict=True):
        assert all(torch.equal(expected[name], found[name]) for name in expected)


# --- stages that nobody has named ----------------------------------------------------------------


def block(stage):
    """A stage as a module of one linear layer: both have the same names, and other shapes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4 + 4 * stage, 8 - 4 * stage))


def refused(build, error=ValueError):
    with pytest.raises(error) as raised:
        build()
    return str(raised.value)


def test_a_norm_that_leaves_out_stages_is_refused_on_every_rank():
    """By clipping and by a scaler; plain, FSDP2 and tensor parallel; with process_group and not."""

    def job(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "data"))
        stage, beside = rank // 2, mesh["data"].get_group()
        pipe = mesh["pipe"].get_group()
        alone_here = [dist.new_group([other]) for other in range(4)][rank]
        clips = {"max_grad_norm": 0.1}

        def plain():
            return block(stage)

        def sharded():
            part = nn.Sequential(OrderedDict({f"layer{stage}": block(stage)}))
            return fully_shard(part, mesh=mesh["data"])

        def cut():
            part = nn.ModuleDict({f"layer{stage}": nn.Linear(8, 8, bias=False)})
            return parallelize_module(part, mesh["data"], {f"layer{stage}": ColwiseParallel()})

        for model in (plain, sharded, cut):
            for group in (beside, alone_here) if model is plain else (beside,):
                text = refused(
                    lambda m=model, g=group: samestep.MuonAdamW(m(), process_group=g, **clips)
                )
                assert "max_grad_norm=0.1 needs the norm of the whole model" in text
                assert "of 4: the others may hold other parameters" in text
                assert "stage_group=, one rank of each stage" in text
                assert 'say stage_group="none"' in text
        for model in (sharded, cut):
            text = refused(lambda m=model: samestep.MuonAdamW(m(), **clips))
            others = "ranks 2, 3" if stage == 0 else "ranks 0, 1"
            assert f"{others} hold other parameters" in text
            samestep.MuonAdamW(model())  # nothing asks for a norm
        text = refused(lambda: samestep.MuonAdamW(sharded(), grads="reduced", max_grad_norm=0.1))
        assert "hold other parameters. For stages" in text
        text = refused(lambda: samestep.MuonAdamW(plain()), RuntimeError)
        assert "rank 2 has '0.weight: (4, 8)" in text
        assert "stage_group=, one rank of each stage" in text
        # Meant, or right.
        samestep.MuonAdamW(plain(), process_group=beside, stage_group="none", **clips)
        samestep.MuonAdamW(sharded(), stage_group="none", **clips)
        samestep.MuonAdamW(sharded(), process_group=beside, stage_group=pipe, **clips)
        samestep.MuonAdamW(block(0), process_group=beside, outer_group=pipe, **clips)
        everywhere = fully_shard(block(0))
        samestep.MuonAdamW(everywhere, process_group=beside, **clips)  # its mesh has all ranks
        # A stage that counts twice is no norm of the whole model either.
        text = refused(
            lambda: samestep.MuonAdamW(
                plain(), process_group=beside, stage_group=dist.group.WORLD, **clips
            )
        )
        assert "would count that stage several times" in text
        # A scaler decides by the same norm.
        part = plain()
        opt = samestep.MuonAdamW(part, process_group=beside)
        scaler = samestep.GradScaler(device="cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        for param in part.parameters():
            param.grad = torch.ones_like(param)
        assert "the scale of a GradScaler needs the norm" in refused(lambda: scaler.step(opt))
        opt.step()
        # A stage of this rank alone averages nothing, and would go by its own gradients.
        opt = samestep.MuonAdamW(part, process_group=alone_here)
        for param in part.parameters():
            param.grad = torch.ones_like(param)
        assert "the scale of a GradScaler needs the norm" in refused(lambda: scaler.step(opt))
        return True

    assert all(run_forked(4, job))


def test_stages_that_look_alike_are_known_by_torchs_pipelining():
    """Both have parameters of the same names and shapes: they would be taken for copies."""

    def job(rank):
        def stage_of_torch(part):
            return PipelineStage(part, rank, 2, torch.device("cpu"))

        part = nn.Linear(4, 4)
        of_torch = stage_of_torch(part)
        texts = [refused(lambda: samestep.MuonAdamW(part))]
        alone_here = [dist.new_group([other]) for other in range(2)][rank]
        samestep.MuonAdamW(part, process_group=alone_here)
        samestep.MuonAdamW(
            part, process_group=alone_here, stage_group=dist.group.WORLD, max_grad_norm=1.0
        )
        younger = nn.Linear(4, 4)  # than its optimizer
        opt = samestep.MuonAdamW(younger, strict=False, grads="reduced")
        of_torch = [of_torch, stage_of_torch(younger)]
        for param in younger.parameters():
            param.grad = torch.ones_like(param)
        texts.append(refused(opt.step))
        return texts

    for rank, texts in enumerate(run_forked(2, job)):
        for text in texts:
            assert f"parameters of stage {rank} of a pipeline of 2" in text
            assert "stage_group=, one rank of each stage" in text
