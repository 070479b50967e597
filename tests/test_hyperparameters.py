"""Hyperparameters that differ between ranks: every rank hears of it before anything changes."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

import samestep
from samestep.comm.integrity.agreement import RanksDisagreeError
from samestep.comm.presence import RankProblemError, presence_elements
from tests.ranks import run_cases, run_forked
from tests.soak import twin

SHAPES = {"matrix": (8, 6), "norm": (6,)}
COPIES, CUT = Replicate(), Shard(0)


def whole(name, seed=0):
    generator = torch.Generator().manual_seed(seed + 10 * list(SHAPES).index(name))
    return torch.randn(SHAPES[name], generator=generator)


def plain_model():
    return {name: nn.Parameter(whole(name)) for name in SHAPES}


def distributed(shape, placements):
    mesh = init_device_mesh("cpu", shape)
    return {name: nn.Parameter(distribute_tensor(whole(name), mesh, placements)) for name in SHAPES}


def with_fsdp(shape):
    model = nn.Module()
    for name, param in plain_model().items():
        model.register_parameter(name, param)
    names = ("replicate", "shard")[-len(shape) :]
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    return dict(model.named_parameters())


# Parameters by layout, for 4 ranks, and options.
LAYOUTS = {
    "zero2": (plain_model, {}),
    "zero1": (plain_model, {"sharding": "zero1"}),
    "none": (plain_model, {"sharding": "none"}),
    "flat": (plain_model, {"buffers": "flat"}),
    "reduced": (plain_model, {"grads": "reduced"}),
    "overlap": (plain_model, {"overlap_grad_reduce": True}),
    "tensor lr": (plain_model, {"lr": torch.tensor(0.1)}),
    "FSDP2": (lambda: with_fsdp((4,)), {}),
    "HSDP": (lambda: with_fsdp((2, 2)), {}),
    "TP": (lambda: distributed((4,), [CUT]), {}),
    "copies of parts": (lambda: distributed((2, 2), [COPIES, CUT]), {}),
    "offload": (plain_model, {"offload": "state"}),
}


def give(params, seed):
    for name, param in params.items():
        grad = whole(name, seed)
        if isinstance(param, DTensor):
            grad = distribute_tensor(grad, param.device_mesh, param.placements)
        param.grad = grad.clone()


def local(tensor):
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def everything(params, opt):
    """Parameters and state as this rank holds them."""
    state = [local(tensor) for own in opt.state.values() for tensor in own.values()]
    return [local(param) for param in params.values()] + state


def refused(params, opt, seed=1):
    """Why the step was refused; nothing has changed."""
    give(params, seed)
    before = everything(params, opt)
    with pytest.raises(RuntimeError) as caught:
        opt.step()
    assert all(map(torch.equal, before, everything(params, opt)))
    assert isinstance(caught.value, RanksDisagreeError), caught.value
    return str(caught.value)


def group_of(opt, rule):
    index = next(i for i, group in enumerate(opt.param_groups) if group["rule"] == rule)
    return index, opt.param_groups[index]


def test_every_layout():
    """A learning rate that one rank has lowered; alike again, training goes on."""

    def job(rank, layout):
        build, options = LAYOUTS[layout]
        params = build()
        opt = samestep.MuonAdamW(list(params.items()), **{"lr": 0.1, "crossover": 1, **options})
        give(params, 0)
        opt.step()
        index, group = group_of(opt, "adamw")
        if rank == 2:
            group["lr"] = group["lr"] * 0.5 if layout != "tensor lr" else group["lr"].mul_(0.5)
        text = refused(params, opt)
        group["lr"] = 0.1
        give(params, 2)
        before = everything(params, opt)
        opt.step()
        assert not all(map(torch.equal, before, everything(params, opt)))
        return index, text

    for layout, found in run_cases(4, LAYOUTS, job):
        for index, text in found:
            assert f"lr of param_groups[{index}] is 0.1" in text, layout
            assert re.search(r"on ranks 0, 1, 3 and 0.05\d* on rank 2, so no rank took", text), text


# Of each rule, what is set on rank 1, and what is said of it.
CHANGES = {
    "momentum": (
        "muon",
        {"momentum": 0.5},
        "momentum of param_groups[0] is 0.95 on rank 0 and 0.5",
    ),
    "decay": ("muon", {"weight_decay": 0.0}, "weight_decay of param_groups[0] is 0.1 on rank 0"),
    "adjust_lr": ("muon", {"adjust_lr": "original"}, "adjust_lr of param_groups[0] is 'match_rms"),
    "nesterov": ("muon", {"nesterov": False}, "nesterov of param_groups[0] is True on rank 0"),
    "ns_steps": ("muon", {"ns_steps": 4}, "ns_steps of param_groups[0] is "),
    "update_scale": ("muon", {"update_scale": 0.5}, "update_scale of param_groups[0] is 1.0 on"),
    "maximize": ("muon", {"maximize": True}, "maximize of param_groups[0] is False on rank 0"),
    "compute_dtype": ("muon", {"compute_dtype": torch.float32}, "compute_dtype of param_groups"),
    "betas": ("adamw", {"betas": (0.9, 0.9)}, "beta2 of param_groups[1] is 0.95 on rank 0 and 0.9"),
    "eps": ("adamw", {"eps": 1e-6}, "eps of param_groups[1] is 1e-08 on rank 0 and 1e-06 on rank"),
    "cautious": ("adamw", {"cautious": True}, "cautious of param_groups[1] is False on rank 0"),
    "one bit": ("adamw", {"lr": 0.1 + 2**-56}, "lr of param_groups[1] is 0.1 on rank 0 and 0.100"),
    "several": (
        "muon",
        {"lr": 0.2, "momentum": 0.5, "nesterov": False, "ns_steps": 4, "weight_decay": 0.0},
        "(2 more differ)",
    ),
}


def test_every_option():
    def job(rank):
        params = plain_model()
        opt = samestep.MuonAdamW(list(params.items()), lr=0.1, crossover=1)
        found = {}
        for name, (rule, change, _) in CHANGES.items():
            _, group = group_of(opt, rule)
            before = {key: group[key] for key in change}
            group.update(change if rank == 1 else {})
            found[name] = refused(params, opt)
            group.update(before)
            give(params, 1)
            opt.step()
        return found

    for found in run_forked(2, job):
        for name, (*_, said) in CHANGES.items():
            assert said in found[name], (name, found[name])


def test_what_is_no_option_of_a_rule_may_differ():
    """Keys that trainers keep in groups, and spellings of the same value."""

    def job(rank):
        params = plain_model()
        opt = samestep.MuonAdamW(list(params.items()), lr=1.0, crossover=1)
        _, group = group_of(opt, "adamw")
        group["note"] = f"rank {rank}"
        if rank == 1:
            group["lr"], group["betas"] = torch.tensor(1), [0.9, 0.95]
        give(params, 0)
        opt.step()
        return [param.detach() for param in params.values()]

    first, second = run_forked(2, job)
    assert all(map(torch.equal, first, second))


def test_a_scheduler_that_looks_at_the_loss_of_each_rank():
    def job(rank):
        params = plain_model()
        opt = samestep.MuonAdamW(list(params.items()), lr=1e-3, crossover=1)
        scheduler = ReduceLROnPlateau(opt, patience=0, factor=1e-5)
        for epoch in range(4):
            give(params, epoch)
            try:
                opt.step()
            except RanksDisagreeError as error:
                return epoch, str(error)
            scheduler.step(epoch if rank else -epoch)
        return None

    for epoch, text in run_forked(2, job):
        assert epoch > 0
        assert "ReduceLROnPlateau" in text
        assert re.search(r"lr of param_groups\[0\] is 0.001 on rank 0 and [\de.-]+ on rank 1", text)


def test_the_scale_and_the_precision_of_matrix_products():
    def job(rank):
        params = plain_model()
        opt = samestep.MuonAdamW(list(params.items()), lr=0.1, crossover=1)
        give(params, 0)
        with pytest.raises(RanksDisagreeError, match=r"GradScaler is 0.5 on rank 0 and 0.25 on"):
            opt.scaled_step(torch.tensor(0.5 / (rank + 1), dtype=torch.float64))
        if rank == 1:
            torch.set_float32_matmul_precision("high")
        give(params, 0)
        with pytest.raises(RanksDisagreeError, match=r"precision\(\) is highest on rank 0 and hi"):
            opt.step()

    run_forked(2, job)


@twin
def test_groups_with_ranks_of_their_own():
    """Experts on pairs of ranks: a pair may have rates of its own, the ranks of a pair may not.

    Ranks that do not hold the parameters hear of it too, and wait for nobody.
    """

    def job(rank):
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        dense = nn.Parameter(whole("norm"))
        expert = nn.Parameter(whole("norm", rank // 2))
        opt = samestep.AdamW(
            [
                {"params": [("dense", dense)]},
                {"params": [(f"expert {rank // 2}", expert)], "process_group": pairs[rank // 2]},
            ],
            lr=0.1,
            crossover=1,
        )
        group = opt.param_groups[1]
        found = []
        for rates in [(0.1, 0.1, 0.2, 0.2), (0.1, 0.1, 0.2, 0.3)]:
            group["lr"] = rates[rank]
            dense.grad, expert.grad = whole("norm", 3), whole("norm", 4)
            before = expert.detach().clone(), dense.detach().clone()
            try:
                opt.step()
            except (RanksDisagreeError, RankProblemError) as error:
                assert all(map(torch.equal, before, (expert.detach(), dense.detach())))
                found.append(str(error))
        return found

    results = run_forked(4, job)
    for (text,) in results[:2]:
        assert text.startswith("rank 3 could not take the step")
    for (text,) in results[2:]:
        assert "lr of param_groups[1] is 0.2 on rank 2 and 0.3 on rank 3" in text


def test_stages_may_differ_and_hear_of_a_difference_in_another():
    def job(rank):
        made = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
        param = nn.Parameter(whole("norm", rank // 2))
        opt = samestep.AdamW(
            [(f"stage {rank // 2}", param)],
            lr=0.1,
            process_group=made[rank // 2],
            stage_group=made[2 + rank % 2],
            crossover=1,
        )
        found = []
        for rates in [(0.1, 0.1, 0.2, 0.2), (0.3, 0.1, 0.2, 0.2)]:
            opt.param_groups[0]["lr"] = rates[rank]
            param.grad = whole("norm", 3)
            try:
                opt.step()
            except (RanksDisagreeError, RankProblemError) as error:
                found.append(str(error))
        return found

    results = run_forked(4, job)
    for (text,) in results[:2]:
        assert "lr of param_groups[0] is 0.3 on rank 0 and 0.1 on rank 1" in text
    for (text,) in results[2:]:
        assert re.match(r"rank [01] could not take the step", text)


def test_no_collective_more():
    """The digest travels with presence: as many collectives of a step as without it."""

    def job(rank):
        params = plain_model()
        opt = samestep.MuonAdamW(list(params.items()), lr=0.1, crossover=1, sharding="none")
        with samestep.FlightRecorder() as recorder:
            give(params, 0)
            opt.step()
        return [(record.name, record.elements) for record in recorder.records]

    for found in run_forked(2, job):
        names = [name for name, _ in found]
        assert names.count("presence") == 1
        assert dict(found)["presence"] == presence_elements(len(SHAPES)) == len(SHAPES) + 6
        assert not [name for name in names if "comparison" in name]
