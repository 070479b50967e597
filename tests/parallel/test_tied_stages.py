"""One weight in several pipeline stages: gradients are added up, and copies stay the same."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import samestep
from samestep.mesh import build
from samestep.models.gpt import gpt_plan
from samestep.parallel.pipeline import GPT_STAGES
from samestep.parallel.replicas import check_replicas
from samestep.parallel.stack import Stack
from samestep.parallel.stages import StagePlan, StagePlanError, tie
from tests.parallel.pipelines import (
    CONFIG,
    OPTIONS,
    axes,
    batch,
    gpt,
    gradients_alone,
    mean_loss,
    optimizer_of,
    pipeline_of,
    train_alone,
)
from tests.ranks import run_forked
from tests.soak import SOAK

BEFORE, AFTER = (3, 2) if SOAK else (2, 1)
RATE = 5e-3  # another one than the optimizers are built with
SAME = {"reduction": "ordered", "update_rms": True}
# Of several buckets the first has to land before the next is launched.
OVERLAP = {"buffers": "flat", "overlap_grad_reduce": True, "bucket_size": 200}


def tied():
    model = gpt()
    with torch.no_grad():
        model.embedding.weight.mul_(0.3)  # a loss that says something
    model.head.weight = model.embedding.weight
    model.blocks[3].mlp.down.weight = model.blocks[0].mlp.down.weight  # a matrix of Muon's
    return model


class Training:
    """A pipeline with an optimizer, and what it gave."""

    def __init__(self, stages, model=None, plan=GPT_STAGES, options=None, **schedule):
        stage, pipe, self.place = axes(stages)
        self.pipeline = pipeline_of(tied() if model is None else model, pipe, plan=plan, **schedule)
        self.model = self.pipeline.model
        self.opt = optimizer_of(self.pipeline, stage, **SAME | (options or {}))
        self.losses, self.norms, self.sizes = [], [], []

    def run(self, *steps):
        for step in steps:
            self.losses.append(self.pipeline.step(*batch(step, self.place)).item())
            self.opt.step()
            self.opt.zero_grad()
            found = self.opt.metrics()
            self.norms.append(found["grad_norm"].item())
            names = [group["param_names"] for group in self.opt.param_groups]
            self.sizes.append(found["update_rms"][names.index(["embedding.weight"])].item())
        self.opt.wait_for_parameters()

    def parameters(self):
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def found(self):
        check_replicas(self.model)
        return self.losses, self.norms, self.parameters()


def assert_close(found, wanted, atol=1e-6):
    for name, param in found.items():
        torch.testing.assert_close(param, wanted[name], rtol=0, atol=atol, msg=name)


# --- against one process, with a skipped step and checkpoints ------------------------------------


def train_and_save(rank, dp, folder):
    """Steps, one of which is skipped everywhere; a checkpoint; then one that a process has made."""
    stages = dist.get_world_size() // dp
    training = Training(stages, options={"lr": RATE})
    training.run(*range(BEFORE))
    before, state = training.parameters(), copy.deepcopy(training.opt.whole_state())
    training.pipeline.step(*batch(7, training.place))
    if rank == dist.get_world_size() - 1:
        training.model.embedding.weight.grad[3, 3] = torch.nan
    training.opt.step()
    training.opt.zero_grad()
    assert training.opt.metrics()["grad_norm"].isnan()
    after, state_after = training.parameters(), training.opt.whole_state()
    assert all(torch.equal(before[name], after[name]) for name in before)
    for name, own in state.items():
        assert all(torch.equal(own[key], state_after[name][key]) for key in own), name
    samestep.save(folder / f"stages {dp}", training.model, training.opt)
    wanted = {"embedding.weight", "head.weight"} if rank % (stages * dp - dp) < dp else set()
    assert {n for n in training.model.state_dict() if "blocks" not in n} - {"norm.weight"} == wanted
    return training.found(), training.sizes, training.opt.owners()


def load_and_train(rank, dp, folder, options, schedule):
    training = Training(dist.get_world_size() // dp, options=options, **schedule)
    with torch.no_grad():
        for param in training.model.parameters():
            param.zero_()
    samestep.load(folder / "one process", training.model, training.opt)
    training.run(*range(BEFORE + AFTER, BEFORE + 2 * AFTER))
    return training.found(), [group["lr"] for group in training.opt.param_groups]


@pytest.mark.parametrize(
    ("dp", "options", "schedule"), [(1, {}, {}), (2, OVERLAP, {"schedule": "interleaved"})]
)
def test_steps_and_checkpoints_are_those_of_one_process(tmp_path, dp, options, schedule):
    _, norms, wanted = train_alone(BEFORE, dp, tied(), lr=RATE)
    assert min(norms) > 2 * OPTIONS["max_grad_norm"]
    found = run_forked(2 * dp, train_and_save, dp, tmp_path)
    for rank, ((_, own_norms, params), sizes, owners) in enumerate(found):
        assert own_norms == pytest.approx(norms, rel=1e-5)
        assert_close(params, wanted)
        assert params.keys() & {"embedding.weight", "head.weight"} == {"embedding.weight"}
        assert sizes == found[0][1]
        assert owners["embedding.weight"] == tuple(range(2 * dp)), rank
    model = tied()
    opt = samestep.MuonAdamW(model, **OPTIONS)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    samestep.load(tmp_path / f"stages {dp}", model, opt)
    assert {group["lr"] for group in opt.param_groups} == {RATE}
    assert_close(dict(model.named_parameters()), wanted)
    for step in range(BEFORE, BEFORE + AFTER):
        gradients_alone(dp, step, model)
        opt.step()
        opt.zero_grad()
    samestep.save(tmp_path / "one process", model, opt)
    _, _, wanted = train_alone(BEFORE + 2 * AFTER, dp, tied(), lr=RATE)
    for (_, _, params), rates in run_forked(
        2 * dp, load_and_train, dp, tmp_path, options, schedule
    ):
        assert set(rates) == {RATE}
        assert_close(params, wanted, atol=1e-5)


# --- more than two stages, and stages of one's own -----------------------------------------------


class Predicts(nn.Module):
    """A layer with a head of its own, as those that predict further tokens have it."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 24, bias=False)

    def forward(self, x):
        return x + 0.1 * self.head(x).tanh() @ self.head.weight


class Several(nn.Module):
    """Embedding, a layer of the four and the head are one weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(24, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), Predicts(), nn.Linear(8, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 24, bias=False)
        self.blocks[1].head.weight = self.head.weight = self.embedding.weight

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


RATES = {"embedding_lr": 3e-3, "unembedding_lr": 0.7, "reduction": "ordered"}


def of_several_stages(rank):
    training = Training(4, Several(), StagePlan(last=("head",)), RATES)
    for step in range(2):
        training.pipeline.step(*batch(step))
        training.opt.step()
        training.opt.zero_grad()
    return training.found()[2], training.opt.owners().get("embedding.weight")


def test_heads_in_the_middle_are_tied_too():
    _, _, wanted = train_alone(2, 1, Several(), **RATES)
    names = {"embedding.weight"}
    for rank, (params, owners) in enumerate(run_forked(4, of_several_stages)):
        assert_close(params, wanted)
        assert params.keys() & {*names, "head.weight", "blocks.1.head.weight"} == (
            names if rank != 2 else set()
        )
        assert owners == (None if rank == 2 else (0, 1, 3))


class First(nn.Module):
    def __init__(self, whole):
        super().__init__()
        self.embedding, self.up = whole.embedding, whole.up

    def forward(self, tokens):
        return self.up(self.embedding(tokens))


class Last(nn.Module):
    def __init__(self, whole):
        super().__init__()
        self.down = whole.down
        self.head = nn.Linear(8, 24, bias=False)

    def forward(self, x):
        return self.head(self.down(x))


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.embedding = nn.Embedding(24, 8)
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 24, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.down(self.up(self.embedding(tokens))))


NAMES = ("embedding.weight", "head.weight")


def stages_of_ones_own(rank):
    stage, pipe, _ = axes(2)
    part = (First, Last)[rank](Whole())
    tie(part, *NAMES, places=(0, 1))
    with pytest.warns(UserWarning, match="parameters differ between ranks"), torch.no_grad():
        # The head was made anew: it takes the values of the first stage.
        opt = samestep.MuonAdamW(part, **OPTIONS, process_group=stage, stage_group=pipe)
    schedule = ScheduleGPipe(
        PipelineStage(part, rank, 2, torch.device("cpu"), group=pipe), 4, loss_fn=mean_loss
    )
    for step in range(3):
        inputs, targets = batch(step)
        schedule.step(*(() if rank else (inputs,)), **({"target": targets} if rank else {}))
        opt.step()
        opt.zero_grad()
    check_replicas(part)
    return {name: p.detach() for name, p in part.named_parameters()}, sorted(part.state_dict())


def test_stages_of_ones_own_are_tied_by_their_names():
    _, _, wanted = train_alone(3, 1, Whole())
    (first, names), (last, others) = run_forked(2, stages_of_ones_own)
    assert set(names) & set(others) == set(NAMES)
    assert next(iter(last)) == "embedding.weight"
    for params in (first, last):
        assert_close(params, wanted)
    assert first.keys() | last.keys() == wanted.keys()


# --- what cannot work ----------------------------------------------------------------------------


def refused(rank):
    """The errors of this rank, by what was asked for."""
    stage, pipe, _ = axes(2)
    groups = {"process_group": stage, "stage_group": pipe}

    def part():
        pipeline_of(model := tied(), pipe)
        return model

    def replaced():
        model = part()
        module = model.embedding if rank == 0 else model.head
        other = nn.Parameter(torch.ones_like(module.weight))
        model.embedding.weight = model.head.weight = other
        return samestep.MuonAdamW(model, **groups)

    def other_shape():
        model = (First, Last)[rank](Whole())
        if rank:
            model.head = nn.Linear(8, 30, bias=False)
        tie(model, *NAMES, places=(0, 1))
        return samestep.AdamW(model, **groups)

    def changed_later():
        opt = samestep.MuonAdamW(model := part(), **groups)
        opt.param_groups[0]["lr"] = 0.1 * (1 + rank)
        model.embedding.weight.grad = torch.ones(24, 16)
        opt.step()

    def mixed():
        model = part()
        first, *others, last = model.named_parameters()
        opt = samestep.MuonAdamW([{"params": others, "rule": "adamw"}], **groups)
        opt.add_param_group({"params": [first, last], "rule": "adamw"})

    def late():
        first, *others = (pair for pair in part().named_parameters() if "mlp.down" not in pair[0])
        opt = samestep.MuonAdamW([{"params": others, "rule": "adamw"}], **groups)
        opt.add_param_group({"params": [first], "rule": "adamw"})

    tries = {
        "no stages": lambda: samestep.MuonAdamW(part()),
        "other rates": lambda: samestep.MuonAdamW(part(), lr=0.1 * (1 + rank), **groups),
        "other rule": lambda: samestep.MuonAdamW(
            part(), overrides={"embedding.weight": {"rule": ("adamw", "muon")[rank]}}, **groups
        ),
        "other shape": other_shape,
        "reduced": lambda: samestep.MuonAdamW(part(), grads="reduced", **groups),
        "deferred": lambda: samestep.MuonAdamW(part(), deferred=True, **groups),
        "replaced": replaced,
        "changed later": changed_later,
        "mixed": mixed,
        "late": late,
        "none here": lambda: tie(nn.Linear(2, 2), *NAMES, places=(0, 1)),
    }
    found = {}
    for name, attempt in tries.items():
        try:
            attempt()
        except (ValueError, RuntimeError) as error:
            found[name] = str(error)
    named = list(part().named_parameters())
    opt = samestep.MuonAdamW([{"params": named, "rule": "adamw"}], **groups)
    assert opt.param_groups[0]["param_names"] == ["embedding.weight", "blocks.0.mlp.down.weight"]
    assert len(opt.param_groups[1]["param_names"]) == len(named) - 2
    return found


REFUSED = {
    "no stages": r"'embedding.weight' is tied over the stages of ranks \[0, 1\] of a pipeline, "
    r"whose gradients are added up: pass process_group=",
    "other rates": r"param_groups\[0\]: lr = 0\.[12]",
    "other rule": "embedding.weight: .* (adamw|muon)",
    "other shape": r"embedding.weight: \((24|30), 8\)",
    "reduced": 'with grads="reduced" nothing is added up here',
    "deferred": "deferred=True finds ranks later",
    "replaced": "was replaced since: FSDP2, tensor parallel and copying a stage break the tie",
    "changed later": r"lr of param_groups\[0\]",
    "mixed": "'embedding.weight' is tied over pipeline stages, and other parameters of its "
    "group are not",
    "late": "and comes late: give it to the optimizer when that is made",
    "none here": "tie: this stage has none of embedding.weight, head.weight",
}


def test_what_cannot_be_tied_is_refused_on_every_rank():
    for found in run_forked(2, refused):
        assert found.keys() == REFUSED.keys()
        for name, text in REFUSED.items():
            assert re.search(text, found[name]), (name, found[name])


def on_a_mesh(rank):
    mesh = build(pp=2)
    with pytest.raises(
        StagePlanError, match="which have whole copies of it, and FSDP2 would shard"
    ):
        Stack(tied(), gpt_plan(CONFIG), mesh, loss=mean_loss)
    stack = Stack(tied(), gpt_plan(CONFIG), mesh, loss=mean_loss, fsdp=False)
    opt = stack.optimizer(**OPTIONS, reduction="ordered")
    for step in range(2):
        stack.backward(*batch(step, stack.batch_place))
        opt.step()
        opt.zero_grad()
    check_replicas(stack.model)
    return {name: p.detach() for name, p in stack.model.named_parameters()}


def test_a_stack_ties_copies_and_refuses_to_cut_them():
    _, _, wanted = train_alone(2, 2, tied())
    for params in run_forked(4, on_a_mesh):
        assert_close(params, wanted)
