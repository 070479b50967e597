"""Promises of training on several ranks."""

from __future__ import annotations

import copy
import math
import pickle
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import samestep
from samestep.stress import check
from tests.promises.claims import heard, refused, same, same_state, unchanged, warned
from tests.promises.layouts import BY_FSDP, EVERY, FLAT, OVERLAPS, PLAIN, SHARED, WHOLE
from tests.promises.listed import DISTRIBUTED, promise
from tests.promises.trial import NAMES, Net, Run, Trial, checking, gradient


@promise(
    DISTRIBUTED,
    '**With `reduction="ordered"` the layout does not show**',
    "works",
    EVERY,
)
def bits_of_one_process(trial: Trial) -> None:
    """Five steps: weights and state, bit for bit, and the ranks compared"""
    ordered = {} if trial.layout == "FSDP2" else {"reduction": "ordered"}
    run, plain = trial.run(**ordered), trial.plain()
    run.train(*range(5))
    plain.train(*range(5))
    same(run.weights(), {name: plain.weights()[name] for name in trial.names})
    assert check(run.model, run.opt) == []
    same_state(run.state(), {k: v for k, v in plain.state().items() if k in trial.names})


@promise(
    DISTRIBUTED,
    "With overlap, a second backward pass outside of `no_sync()` is an error that names the parameter",
    "raises",
    ("overlap_grad_reduce", "overlap_param_gather"),
    layouts=(*PLAIN, "TP", "stages"),
    but={"FSDP2": BY_FSDP},
)
def second_backward(trial: Trial) -> None:
    """Two backward passes without no_sync()"""
    run = trial.run()
    run.backward(0)
    refused(
        lambda: run.backward(1),
        "no_sync\\(\\)",
        "first.weight|second.weight|first.bias|second.bias",
    )


@promise(
    DISTRIBUTED,
    "Ranks without one add zeros; a parameter without a gradient on every rank is untouched, bit for bit.",
    "works",
    EVERY,
)
def missing_gradients(trial: Trial) -> None:
    """A parameter that one rank lacks, then one that all lack, then a whole batch on one rank"""
    run, plain = trial.run().train(0), trial.plain().train(0)
    hows = (
        {"lacks": ("first.weight",), "lacking": 1},
        {"lacks": ("second.bias", "first.bias"), "lacking": None},
        {"lacks": ("second.weight", "second.bias"), "lacking": None},
        {"lacks": NAMES, "lacking": 0},
    )
    for step, how in enumerate(hows, 1):
        before, state = run.weights(), run.state()
        run.train(step, **how)
        plain.train(step, **how)
        if how["lacking"] is None:
            left = [name for name in how["lacks"] if name in trial.names]
            same({k: run.weights()[k] for k in left}, {k: before[k] for k in left})
            same_state(run.state(), {k: state[k] for k in left if k in state})
    same(run.weights(), {name: plain.weights()[name] for name in trial.names})


@promise(
    DISTRIBUTED,
    'With `grads="reduced"` there is nothing to add zeros to: a rank without a gradient that others have is an error on every rank.',
    "raises",
    ("", "max_grad_norm", "offload"),
    layouts=WHOLE,
    but={
        **dict.fromkeys(FLAT, 'flat buffers refuse `grads="reduced"`'),
        "FSDP2": "a rank that lacks a gradient is in FSDP2's hands: `take_part`",
        "TP": "as in the layout over copies",
        "stages": "as the layout inside of the stage",
    },
)
def missing_where_reduced(trial: Trial) -> None:
    """One rank lacks a gradient that comes reduced"""
    run = trial.run(grads="reduced")
    for name, param in run.model.named_parameters():
        if trial.rank == 0 or name != "first.weight":
            param.grad = gradient(name, 0, 0, 0)
    unchanged(run, lambda: refused(run.opt.step, "first.weight"))


@promise(
    DISTRIBUTED,
    "compared at construction and for every added group; a difference raises on every rank and is named.",
    "raises",
    OVERLAPS,
)
def other_plans(trial: Trial) -> None:
    """Another bucket_size on one rank"""
    model = trial.model()
    kind = partial(trial.optimizer, model)
    refused(lambda: kind(bucket_size=64 + trial.data), "bucket|disagree|differ")


@promise(
    DISTRIBUTED,
    "So does an error that only one rank has: a learning rate that is no number, an edited gradient. No rank takes that step.",
    "raises",
    (
        "",
        "overlap_grad_reduce",
        "overlap_param_gather",
        "max_grad_norm",
        "GradScaler",
        "master_weights",
        "8 bits",
        "offload",
    ),
)
def error_of_one_rank(trial: Trial) -> None:
    """lr that is no number on rank 1"""
    run = trial.run().train(0)
    run.backward(1)
    if trial.rank == 1:
        for group in run.opt.param_groups:
            group["lr"] = "fast"
    unchanged(run, lambda: refused(run.step, "lr|rank 1 could not"))


@promise(
    DISTRIBUTED,
    "where ranks differ, as with `ReduceLROnPlateau` on each rank's own loss, every rank raises before anything has changed",
    "raises",
    EVERY,
)
def other_hyperparameters(trial: Trial) -> None:
    """Another lr on one rank; with the old one the step trains"""
    run = trial.run().train(0)
    run.backward(1)
    if trial.data == 1:
        for group in run.opt.param_groups:
            group["lr"] = 0.2
    unchanged(
        run,
        lambda: refused(
            run.step, "lr of param_groups\\[0\\] is", "0.2", "0.1", "no rank took the step"
        ),
    )
    for group in run.opt.param_groups:
        group["lr"] = 0.1
    run.opt.zero_grad()
    run.__post_init__()  # a scaler that has seen no step
    run.train(2)
    plain = trial.plain().train(0, 2)
    same(run.weights(), {name: plain.weights()[name] for name in trial.names})


@promise(
    DISTRIBUTED,
    "where they differ, rank 0's values are taken with a warning that names them.",
    "warns",
    OVERLAPS,
    layouts=(*PLAIN, "TP", "stages"),
    but={"FSDP2": "each rank begins with a part of its own"},
)
def other_replicas(trial: Trial) -> None:
    """A weight that differs on data rank 1 at construction; strict=True raises"""
    for strict in (True, False):
        model = trial.model()
        with torch.no_grad():
            if trial.data == 1:
                param = next(model.parameters())
                (param.to_local() if isinstance(param, DTensor) else param).add_(1)
        if strict:
            refused(lambda model=model: trial.optimizer(model, strict=True), "weight")
        else:
            warned(lambda model=model: trial.optimizer(model), "weight")
            same(Run(trial, model, None).weights(), Run(trial, trial.model(), None).weights())


@promise(
    DISTRIBUTED,
    "If it is not finite, the step is skipped on every rank and nothing changes.",
    "works",
    (
        "max_grad_norm",
        "clip_grad_norm_",
        "clip_grad_norm_, overlap",
        "GradScaler",
        "GradScaler, overlap",
    ),
)
def skipped_steps(trial: Trial) -> None:
    """NaN and infinity in one gradient of data rank 1; scales stay equal"""
    run, plain = trial.run(**checking(trial)).train(0), trial.plain().train(0)
    for step, bad in enumerate((math.nan, math.inf, -math.inf), 1):

        def skip_it(step: int = step, bad: float = bad) -> None:
            run.backward(step, bad=bad)
            run.step()
            run.opt.zero_grad()

        unchanged(run, skip_it)
    if run.scaler is not None:
        assert run.scaler.get_scale() == 1.0, run.scaler.get_scale()
    run.train(5)
    plain.train(5)
    same(run.weights(), {name: plain.weights()[name] for name in trial.names})


@promise(
    DISTRIBUTED,
    "`max_grad_norm=math.inf` is only that check.",
    "works",
    ("", *OVERLAPS[1:], "no_sync", "synchronize", "master_weights", "8 bits", "offload"),
)
def only_the_check(trial: Trial) -> None:
    """max_grad_norm=math.inf with a NaN, and with the bits of no clipping"""
    run, plain = trial.run(max_grad_norm=math.inf).train(0, 1), trial.plain().train(0, 1)

    def skip_it() -> None:
        run.backward(2, bad=math.nan)
        run.step()
        run.opt.zero_grad()

    unchanged(run, skip_it)
    run.train(3)
    plain.train(3)
    same(run.weights(), {name: plain.weights()[name] for name in trial.names})


@promise(
    DISTRIBUTED,
    "which may be freed by then and differs between ranks: it is refused, except under DDP.",
    "raises",
    ("", "overlap_grad_reduce", "overlap_param_gather"),
)
def torchs_scaler(trial: Trial) -> None:
    """torch.amp.GradScaler"""
    run = trial.run()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    wanted = run._wanted(0, 0, trial.data, (), None, None)
    scaler.scale(run.model(wanted)).backward()

    def act() -> None:
        scaler.step(run.opt)
        scaler.update()

    refused(act, "GradScaler|was reduced .* and given back")


@promise(
    DISTRIBUTED,
    "`present` (parameters per group that had a gradient on any rank)",
    "works",
    ("", *OVERLAPS[1:], "no_sync", "max_grad_norm", "8 bits", "offload"),
)
def metrics(trial: Trial) -> None:
    """metrics()["present"] and ["update_rms"]"""
    run = trial.run(update_rms=True)
    run.train(0, lacks=("first.bias", "second.bias"), lacking=1)
    found = run.opt.metrics()
    count = int(sum(torch.as_tensor(n).sum().item() for n in found["present"]))
    assert count == len(trial.names), found
    assert found["update_rms"].isfinite().all(), found
    run.train(1, lacks=("first.bias", "second.bias"))
    found = run.opt.metrics()
    count = int(sum(torch.as_tensor(n).sum().item() for n in found["present"]))
    assert count == len(trial.names) // 2, found


@promise(
    DISTRIBUTED,
    "launch in their steps, in the order in which these are called",
    "works",
    ("overlap_grad_reduce", "overlap_param_gather"),
    layouts=(*PLAIN, "TP"),
    but={"FSDP2": BY_FSDP, "stages": "a layer for each stage: nothing to divide"},
)
def two_optimizers(trial: Trial) -> None:
    """An optimizer for each layer, whose backward is one; each rank is told once"""
    model = trial.model()
    layers = [trial.optimizer(layer) for layer in model.children()]
    run, plain = Run(trial, model, layers[0]), trial.plain()

    def train() -> None:
        for step in range(3):
            lacks = ("second.weight",) if step == 1 else ()
            run.backward(step, lacks=lacks, lacking=trial.data)
            plain.train(step, lacks=lacks)
            for opt in layers:
                opt.step()
                opt.zero_grad()

    said = heard(train)
    assert all("MuonAdamW" in told or "overlap" in told for told in said), said
    same(run.weights(), plain.weights())


@promise(
    DISTRIBUTED,
    "**float16 gradients do not overflow when they are averaged.**",
    "works",
    layouts=(*PLAIN, "TP", "stages"),
    but={"FSDP2": BY_FSDP},
)
def float16_averages(trial: Trial) -> None:
    """40,000 on both data ranks"""
    model = trial.place(Net(trial.kept_layers).half())
    opt = trial.optimizer(model, master_weights=True)
    for param in model.parameters():
        param.grad = torch.full_like(param, 40_000.0)
    name = trial.names[0]
    mean = opt.full_gradient(name)
    assert (mean == 40_000.0).all(), mean.flatten()[:3]


@promise(
    DISTRIBUTED,
    "compares what ranks should have alike, bit for bit: all parameters of the model (frozen ones too)",
    "raises",
    OVERLAPS,
    but={"FSDP2": "ranks have parts, and no copies"},
)
def drift(trial: Trial) -> None:
    """One element that differs on data rank 1: samestep.stress.check names it on every rank"""
    run = trial.run().train(0)
    run.opt.wait_for_parameters() if hasattr(run.opt, "wait_for_parameters") else None
    assert check(run.model, run.opt) == []
    param = next(run.model.parameters())
    with torch.no_grad():
        if trial.data == 1:
            (param.to_local() if isinstance(param, DTensor) else param).view(-1)[3] += 1
    refused(lambda: check(run.model, run.opt), "replicas have drifted apart", "weight")


@promise(
    DISTRIBUTED,
    "`opt.whole_state()` gives every rank the state of every parameter by name, as one process would keep it, bit for bit",
    "works",
    EVERY,
)
def whole_state(trial: Trial) -> None:
    """whole_state() after three steps"""
    run, plain = trial.run().train(0, 1, 2), trial.plain().train(0, 1, 2)
    found = run.opt.whole_state()
    wanted = {k: v for k, v in plain.opt.whole_state().items() if k in trial.names}
    assert set(wanted) <= set(found)
    same_state(found, wanted)


@promise(
    DISTRIBUTED,
    "an optimizer's do, whatever gradients they lack",
    "works",
    ("", *OVERLAPS[1:], "no_sync", "max_grad_norm", "offload"),
    layouts=PLAIN,
    but={
        "FSDP2": "FSDP2's own collectives are between",
        **dict.fromkeys(
            ("TP", "stages"), "ranks are in several groups, whose operations differ by their ranks"
        ),
    },
)
def flight_digest(trial: Trial) -> None:
    """FlightRecorder's digest on ranks with other gradients"""
    run = trial.run().train(0)
    with samestep.FlightRecorder() as recorder:
        run.train(1, lacks=("first.weight", "second.bias"), lacking=1)
        run.train(2, lacks=NAMES, lacking=0)
        run.opt.wait_for_parameters()
        mine = (recorder.count, recorder.digest)
    found: list[object] = [None] * trial.ranks.world
    dist.all_gather_object(found, mine, group=trial.ranks.told)
    assert mine[0] > 0, "nothing was recorded"
    assert set(found) == {mine}, found


@promise(
    DISTRIBUTED,
    "report a gradient that is not finite, with parameter and rank, before it is averaged with others.",
    "raises",
    ("", "overlap_grad_reduce", "overlap_param_gather", "max_grad_norm"),
    layouts=(*PLAIN, "FSDP2", "TP", "stages"),
)
def checked_gradients(trial: Trial) -> None:
    """check_gradients=True and a NaN on data rank 1"""
    run = trial.run(check_gradients=True)

    def act() -> None:
        run.backward(0, bad=math.nan)
        run.opt.step()

    if trial.layout == "stages" and trial.rank > 1:
        refused(act, "rank")
    else:
        refused(act, "first.weight", "rank")


@promise(
    DISTRIBUTED,
    "A parameter that only some ranks hold names them, and what its gradients are divided by",
    "works",
    ("", "overlap_grad_reduce", "max_grad_norm", "8 bits", "offload"),
    layouts=PLAIN,
    but={
        "FSDP2": "DTensors have a mesh instead",
        "TP": "DTensors have a mesh instead",
        "stages": "groups of stages are those of the optimizer",
    },
)
def experts(trial: Trial) -> None:
    """The first layer is an expert of each rank alone, divided by 2"""
    model = trial.model()
    named = dict(model.named_parameters())
    own = {"process_group": trial.ranks.alone, "divisor": 2}
    groups = [
        {"params": [("first.weight", named["first.weight"])], "rule": "muon", **own},
        {"params": [("first.bias", named["first.bias"])], "rule": "adamw", **own},
        {"params": [("second.weight", named["second.weight"])], "rule": "muon"},
        {"params": [("second.bias", named["second.bias"])], "rule": "adamw"},
    ]
    options = {"max_grad_norm": 1e6} if trial.option == "max_grad_norm" else {}
    run = Run(trial, model, trial.optimizer(groups, **options)).train(0, 1)
    plain = trial.plain(**options)
    for step in range(2):
        for name, param in plain.model.named_parameters():
            grads = []
            for data in range(2):
                rounded = (param.detach() * 8).round() / 8
                grads.append(gradient(name, step, 0, data) + rounded)
            both = sum(grads) / 2
            param.grad = grads[trial.data] / 2 if name.startswith("first") else both
        plain.opt.step()
    same(run.weights(), plain.weights())


@promise(
    DISTRIBUTED,
    "it loads only on the same rank of the same plan",
    "raises",
    layouts=(*SHARED, "stages", "TP"),
    but={"none": "every rank has all of it", "FSDP2": "its state dict has DTensors"},
)
def part_of_a_state_dict(trial: Trial) -> None:
    """A part of rank 0 in another rank; copy and pickle are refused"""
    run = trial.run(state_dict_form="part").train(0)
    told: list[object] = [None] * trial.ranks.world
    dist.all_gather_object(told, pickle.dumps(run.opt.state_dict()), group=trial.ranks.told)
    other = pickle.loads(told[(trial.rank + 1) % trial.ranks.world])
    refused(lambda: run.opt.load_state_dict(other), "rank|part|plan")
    run.opt.load_state_dict(pickle.loads(told[trial.rank]))
    refused(lambda: copy.deepcopy(run.opt), "copied|pickled|copy")
    refused(lambda: pickle.dumps(run.opt), "copied|pickled|pickle")


@promise(
    DISTRIBUTED,
    "says for this run what the optimizer takes for granted of the world around it",
    "works",
    OVERLAPS,
)
def explained(trial: Trial) -> None:
    """explain() before and after a step"""
    run = trial.run()
    assert "averages" in str(run.opt.explain())
    run.train(0)
    assert "Checked" in str(run.opt.explain())
