"""Promises for when something goes wrong."""

from __future__ import annotations

import math
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import samestep
from tests.promises.claims import refused, same
from tests.promises.layouts import OVERLAPS, PLAIN
from tests.promises.listed import TROUBLE, promise
from tests.promises.trial import Trial, checking


@promise(
    TROUBLE,
    "Plans are compared there, and a difference raises",
    "raises",
    OVERLAPS,
)
def other_models(trial: Trial) -> None:
    """A parameter more on one rank; the next optimizer is built as ever"""
    model = trial.model()
    if trial.rank == 1:
        model.register_parameter("extra", nn.Parameter(torch.ones(5)))
    if trial.layout == "stages" and trial.rank > 1:
        trial.optimizer(model)  # of another stage, whose ranks are not asked
    else:
        refused(lambda: trial.optimizer(model), "extra|plan differs between ranks")
    trial.run().train(0)


@promise(
    TROUBLE,
    "`state_dict()` of an optimizer whose ranks share the state raises until all of them have called `consolidate_state_dict()`; "
    "then it is whole on rank 0 and loads on any number of them",
    "works",
    ("", *OVERLAPS[1:], "master_weights", "8 bits", "offload"),
    layouts=(*PLAIN,),
    but={
        "FSDP2": "its state dict has DTensors",
        "TP": "as of FSDP2",
        "stages": "as the layout inside of the stage",
    },
)
def consolidated(trial: Trial) -> None:
    """state_dict() raises, is whole after consolidation, and loads into one process"""
    run, plain = trial.run().train(0, 1), trial.plain().train(0, 1)
    if trial.layout != "none":
        refused(run.opt.state_dict, "consolidate_state_dict")
    run.opt.consolidate_state_dict()
    told = [run.opt.state_dict()] if trial.rank == 0 else [None]
    dist.broadcast_object_list(told, group=trial.ranks.told)
    fresh = trial.plain()
    fresh.model.load_state_dict(run.model.state_dict())
    fresh.opt.load_state_dict(told[0])
    fresh.train(2)
    plain.train(2)
    run.train(2)
    same(run.weights(), plain.weights())
    same(fresh.weights(), plain.weights())


@promise(
    TROUBLE,
    "*Saved on another number of ranks or in another layout*: `samestep.load` takes it",
    "works",
    ("", *OVERLAPS[1:], "max_grad_norm", "master_weights", "8 bits", "offload"),
    but={"stages": "a checkpoint of stages: `tests/parallel/test_pipeline_checkpoints.py`"},
)
def checkpoints(trial: Trial) -> None:
    """Saved here, loaded into one process and back, and trained on"""
    run, plain = trial.run().train(0, 1), trial.plain().train(0, 1)
    told = [tempfile.mkdtemp() if trial.rank == 0 else None]
    dist.broadcast_object_list(told, group=trial.ranks.told)
    path = Path(told[0]) / "checkpoint"
    samestep.save(path, run.model, run.opt)
    other = trial.run()
    samestep.load(path, other.model, other.opt)
    for each in (run, plain, other):
        each.train(2)
    same(run.weights(), plain.weights())
    same(other.weights(), plain.weights())
    dist.barrier(group=trial.ranks.told)
    if trial.rank == 0:
        shutil.rmtree(told[0])


@promise(
    TROUBLE,
    "a step that is not finite is skipped, on all ranks",
    "works",
    ("max_grad_norm", "clip_grad_norm_, overlap", "GradScaler"),
)
def skipped_on_all(trial: Trial) -> None:
    """One step with a NaN on one rank between others"""
    run, plain = trial.run(**checking(trial)).train(0), trial.plain().train(0)
    run.train(1, bad=math.nan)
    run.train(2)
    plain.train(2)
    same(run.weights(), {name: plain.weights()[name] for name in trial.names})


@promise(
    TROUBLE,
    "gradients are freed as buckets are reduced, and that happens inside backward only with `overlap_grad_reduce=True`",
    "works",
    ("", "overlap_grad_reduce"),
    layouts=("zero2", "flat zero2", "TP", "stages"),
    but={
        **dict.fromkeys(("none", "zero1", "flat zero1"), "gradients stay whole"),
        "FSDP2": "gradients are parts from the start",
    },
)
def freed_in_backward(trial: Trial) -> None:
    """Whether gradients have memory after backward"""
    run = trial.run()
    run.backward(0)
    for name, param in run.model.named_parameters():
        overlapped = trial.option == "overlap_grad_reduce"
        try:
            param.grad.norm()
            has = True
        except RuntimeError:
            has = False
        assert has != overlapped, name
    run.step()
