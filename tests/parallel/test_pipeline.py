"""Pipelines against one process: gradients, losses, clipping, names."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import samestep
from samestep.comm.integrity.agreement import RanksDisagreeError
from samestep.models.gpt import GPT
from samestep.parallel.pipeline import GPT_STAGES, _check
from samestep.parallel.stages import StagePlan, StagePlanError, cut
from tests.parallel.pipelines import (
    CONFIG,
    OPTIONS,
    axes,
    batch,
    gpt,
    gradients_alone,
    optimizer_of,
    pipeline_of,
    train_alone,
)
from tests.ranks import run_forked
from tests.soak import SOAK, some, twin

SCHEDULES = {
    "2 stages": (2, 1, {}),
    "4 stages": (4, 1, {"micro_batches": 8}),
    "interleaved": (2, 1, {"schedule": "interleaved"}),
    "2 stages x 2": (2, 2, {}),
    "interleaved x 2": (2, 2, {"schedule": "interleaved"}),
}


def gradients(rank, stages, options):
    stage, pipe, dp_rank = axes(stages)
    pipeline = pipeline_of(gpt(), pipe, **options)
    opt = optimizer_of(pipeline, stage)
    loss = pipeline.step(*batch(0, dp_rank))
    names = [name for name, _ in pipeline.model.named_parameters()]
    return loss.item(), {name: opt.full_gradient(name) for name in names}


@twin
@pytest.mark.parametrize("case", some(list(SCHEDULES), every=4))
def test_gradients_are_those_of_one_process(case):
    stages, dp, options = SCHEDULES[case]
    _, wanted = gradients_alone(dp)
    found = run_forked(stages * dp, gradients, stages, options)
    seen = set()
    losses = []
    for loss, by_name in found:
        losses.append(loss)
        seen |= by_name.keys()
        for name, grad in by_name.items():
            torch.testing.assert_close(grad, wanted[name], rtol=0, atol=1e-6, msg=name)
            assert grad.abs().max() > 1e-4, name
    assert seen == wanted.keys()
    of_dp = [gradients_alone_of(rank) for rank in range(dp)]
    assert losses == pytest.approx(of_dp * stages, abs=1e-6)


def gradients_alone_of(dp_rank):
    inputs, targets = batch(0, dp_rank)
    return gpt().loss(inputs, targets).item()


LONG = 20 if SOAK else 2  # steps
OVERLAP = {"buffers": "flat", "overlap_grad_reduce": True, "overlap_param_gather": True}


def train(rank, stages, options, steps, layout):
    stage, pipe, dp_rank = axes(stages)
    pipeline = pipeline_of(gpt(), pipe, **options)
    opt = optimizer_of(pipeline, stage, **layout)
    losses, norms = [], []
    for step in range(steps):
        losses.append(pipeline.step(*batch(step, dp_rank)).item())
        (shared,) = opt.shared_parameters
        early = shared.reductions.launched
        assert early == (len(shared.plan.buckets) if "overlap_grad_reduce" in layout else 0)
        opt.step()
        opt.zero_grad()
        norms.append(opt.metrics()["grad_norm"].item())
    opt.wait_for_parameters()
    return losses, norms, {name: p.detach() for name, p in pipeline.model.named_parameters()}


@pytest.mark.parametrize(
    ("case", "steps", "layout"),
    some(
        [
            ("2 stages x 2", LONG, {"overlap_grad_reduce": True, "bucket_size": 500}),
            ("2 stages x 2", LONG, {}),
            ("interleaved x 2", LONG, OVERLAP),
        ],
        every=4,
    ),
)
def test_steps_are_those_of_one_process(case, steps, layout):
    """With clipping active: one norm over all stages.

    Where reductions overlap, all are launched inside of the last micro-batch of their stage.
    """
    stages, dp, options = SCHEDULES[case]
    losses, norms, wanted = train_alone(steps, dp)
    assert min(norms) > 2 * OPTIONS["max_grad_norm"]
    found = run_forked(stages * dp, train, stages, options, steps, layout)
    mean = [sum(of_ranks) / len(found) for of_ranks in zip(*(one[0] for one in found), strict=True)]
    assert mean == pytest.approx(losses, abs=1e-4)
    for _, own_norms, params in found:
        assert own_norms == pytest.approx(norms, rel=1e-4)
        for name, param in params.items():
            torch.testing.assert_close(param, wanted[name], rtol=0, atol=3e-4, msg=name)


class Other(nn.Module):
    """A model of a user: other names, a ModuleDict, a head that only its shape gives away."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.reader = nn.ModuleDict({"tokens": nn.Embedding(24, 8)})
        self.layers = nn.ModuleDict({f"layer{i}": nn.Linear(8, 8) for i in range(3)})
        self.guess = nn.Linear(8, 24, bias=False)

    def forward(self, x):
        x = self.reader["tokens"](x)
        for layer in self.layers.values():
            x = x + layer(x).tanh()
        return self.guess(x)


def residual(model, layer, x, inputs):
    return x + layer(x).tanh()


OTHER = StagePlan(blocks="layers", first=("reader.tokens",), last=("guess",), block=residual)


def test_a_plan_is_compared_with_the_model():
    inputs, _ = batch(0)
    OTHER.check(Other(), inputs)
    GPT_STAGES.check(gpt(), inputs)
    with pytest.raises(
        StagePlanError, match=r"outputs are up to [\d.]+ away.*: pass enter=, block= or"
    ):
        replace(OTHER, block=None).check(Other(), inputs)
    with pytest.raises(StagePlanError, match="instead of"):
        replace(OTHER, leave=lambda model, x: x).check(Other(), inputs)


def test_a_module_of_another_stage_is_not_called():
    model = gpt()
    cut(model, GPT_STAGES, 2, [0])
    with pytest.raises(RuntimeError, match="this module is in another pipeline stage"):
        GPT.forward(model, batch(0)[0])


def other_model(rank):
    stage, pipe, _ = axes(2)
    pipeline = pipeline_of(Other(), pipe, plan=OTHER)
    opt = optimizer_of(
        pipeline, stage, overrides={"guess.*": {"lr": 0.5}, "reader.*": {"lr": 0.25}}
    )
    pipeline.step(*batch(0))
    lines = {
        name: (group["rule"], group["role"], group["lr"])
        for group in opt.param_groups
        for name in group["param_names"]
    }
    return lines, {name: p.grad for name, p in pipeline.model.named_parameters()}


def test_a_model_of_a_user_and_its_rules_are_those_of_the_whole_model():
    model = Other()
    _, wanted = gradients_alone(model=model)
    (first, grads), (second, more) = run_forked(2, other_model)
    torch.testing.assert_close(grads | more, wanted, rtol=0, atol=1e-6)
    assert first["reader.tokens.weight"] == ("adamw", "embedding", 0.25)
    # The embedding whose shape says so is in the other stage.
    assert second["guess.weight"] == ("adamw", "unembedding", 0.5)
    assert "layers.layer1.weight" in first  # the last stage has the head too
    assert second["layers.layer2.weight"][0] == "muon"


def test_a_pattern_that_no_stage_has_is_a_typo():
    model = gpt()
    cut(model, GPT_STAGES, 2, [0])
    samestep.MuonAdamW(model, overrides={"head.*": {"lr": 0.1}})
    with pytest.raises(ValueError, match=r"'heat.\*' matches no trainable parameter"):
        samestep.MuonAdamW(model, overrides={"heat.*": {"lr": 0.1}})
    groups = [{"params": "head.*", "rule": "adamw"}, {"params": ["e*", "b*"], "rule": "adamw"}]
    groups.append({"params": "norm.*", "rule": "adamw"})
    opt = samestep.MuonAdamW(model, groups=groups)
    assert len(opt.param_groups) == 1


@pytest.mark.parametrize(
    ("change", "plan", "text"),
    [
        ({}, {"blocks": "layers"}, "blocks: the model has no module 'layers'; it has embedding"),
        (
            {},
            {"last": ("head",)},
            "parameter 'norm.weight' is in none of the plan's blocks, first and last",
        ),
        ({"stages": 5}, {}, "4 blocks cannot be divided over 5 pipeline stages: use at most 4"),
    ],
)
def test_models_that_cannot_be_cut_are_refused(change, plan, text):
    model = gpt()
    before = [name for name, _ in model.named_parameters()]
    with pytest.raises(StagePlanError, match=text):
        cut(model, replace(GPT_STAGES, **plan), change.get("stages", 2), [0])
    assert [name for name, _ in model.named_parameters()] == before


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"micro_batches": 1},
            "1 micro-batches are fewer than the 2 pipeline stages: use at least 2",
        ),
        ({"micro_batches": 3, "schedule": "interleaved"}, "3 micro-batches are no multiple of 2"),
        ({"schedule": "gpipe"}, "'gpipe' is not supported; choose 1f1b or interleaved"),
        ({"stages_per_rank": 2}, "1f1b has one stage on each rank"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        _check(
            options.get("schedule", "1f1b"),
            options.get("stages_per_rank", 2 if options.get("schedule") else 1),
            options.get("micro_batches", 4),
            2,
        )


def send(rank, batched):
    """How often something was sent or received alone, and in a batch."""
    calls = {"alone": 0, "batch": 0}
    whole, batch_of = {"isend": dist.isend, "irecv": dist.irecv}, dist.batch_isend_irecv
    inside = False

    def in_batch(ops):
        nonlocal inside
        calls["batch"] += 1
        inside = True
        try:
            return batch_of(ops)
        finally:
            inside = False

    # Schedules compare operations by identity, so these are watched where they end up.
    def watch(name):
        own = getattr(dist.ProcessGroup, name)

        def call(*args, **kwargs):
            calls["alone"] += not inside
            return own(*args, **kwargs)

        return call

    pipeline = pipeline_of(gpt(), dist.group.WORLD, batched_sends=batched)
    pipeline.step(*batch(0))  # shapes are sent in the first one
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", in_batch)
        for name in ("send", "recv"):
            patch.setattr(dist.ProcessGroup, name, watch(name))
        pipeline.step(*batch(1))
    assert dist.isend is whole["isend"]
    return calls


def test_sends_are_batched():
    for calls in run_forked(2, send, True):
        assert calls["alone"] == 0
        assert calls["batch"] > 4
    assert all(calls["alone"] > 0 for calls in run_forked(2, send, False))


def evaluate(rank):
    stage, pipe, _ = axes(2)
    config = replace(CONFIG, experts=4, active_experts=2, dropout=0.3)
    pipeline = pipeline_of(gpt(config), pipe)
    opt = optimizer_of(pipeline, stage, lr=0.0, overrides=EXPERT_RULES)
    evaluated = [pipeline.evaluate(*batch(0)).item()]
    pipeline.step(*batch(0))
    load = [
        module.load.sum().item() for module in pipeline.model.modules() if hasattr(module, "load")
    ]
    opt.step()
    evaluated.append(pipeline.evaluate(*batch(0)).item())
    return evaluated, load, pipeline.model.training


EXPERT_RULES = {"*.experts.up": {"rule": "muon"}, "*.experts.down": {"rule": "muon"}}


def test_evaluation_leaves_training_as_it_was():
    """Experts count tokens, once each: the call that finds out shapes is undone."""
    model = gpt(replace(CONFIG, experts=4, active_experts=2, dropout=0.3)).eval()
    loss = model.loss(*batch(0)).item()
    for evaluated, load, training in run_forked(2, evaluate):
        assert evaluated == pytest.approx([loss, loss], abs=1e-6)
        assert load == [8 * 8 * 2] * 2  # tokens, twice each, in both layers
        assert training


def refuse(rank):
    pipeline = pipeline_of(gpt(), dist.group.WORLD, micro_batches=3)
    with pytest.raises(ValueError, match="inputs have 8 rows, which do not divide into 3"):
        pipeline.step(*batch(0))
    with pytest.raises(RanksDisagreeError, match=r"micro_batches = 2.*micro_batches = 3"):
        pipeline_of(gpt(), dist.group.WORLD, micro_batches=2 + rank)


def test_ranks_that_ask_for_different_things_are_refused():
    run_forked(2, refuse)


def test_reductions_wait_for_the_last_micro_batch(monkeypatch):
    """Launches of a stage are seen in its last backward pass alone, and no_sync() holds them."""
    from samestep.parallel.pipeline import Stage
    from samestep.shards.replicated.reduction import BucketReductions

    events = []
    backward, launch = Stage.backward_one_chunk, BucketReductions.launch

    def told_backward(self, chunk, *args, **keywords):
        events.append(("backward", chunk))
        return backward(self, chunk, *args, **keywords)

    def told_launch(self, number):
        if number >= self.launched:
            events.append(("launch",))
        launch(self, number)

    monkeypatch.setattr(Stage, "backward_one_chunk", told_backward)
    monkeypatch.setattr(BucketReductions, "launch", told_launch)

    def job(rank):
        stage, pipe, dp_rank = axes(2)
        pipeline = pipeline_of(gpt(), pipe)
        opt = optimizer_of(pipeline, stage, overlap_grad_reduce=True, bucket_size=500)
        events.clear()
        pipeline.step(*batch(0, dp_rank))
        seen = list(events)
        opt.step()
        opt.zero_grad()
        events.clear()
        with opt.no_sync():
            pipeline.step(*batch(1, dp_rank))
        return seen, list(events)

    for seen, held_back in run_forked(4, job):
        last = seen.index(("backward", 3))
        assert seen[:last] == [("backward", chunk) for chunk in range(3)]
        assert len(seen) > last + 1
        assert set(seen[last + 1 :]) == {("launch",)}
        assert held_back == [("backward", chunk) for chunk in range(4)]
