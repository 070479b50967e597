"""Promises of flat buffers."""

from __future__ import annotations

import copy
import io

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

import samestep
from tests.promises.claims import refused, same
from tests.promises.layouts import EVERY, FLAT, NORM, OVERLAPS, PLAIN
from tests.promises.listed import FLAT_PAGE, promise
from tests.promises.trial import NAMES, Net, Run, Trial


@promise(
    FLAT_PAGE,
    "**After `step()` gradients are gone**",
    "works",
    ("", *OVERLAPS[1:], "no_sync", "max_grad_norm", "offload"),
    layouts=FLAT,
)
def gradients_are_gone(trial: Trial) -> None:
    """.grad after a step, and a gradient that is assigned"""
    run, plain = trial.run(), trial.plain()
    for step in range(3):
        run.backward(step)
        run.step()
        assert all(p.grad is None for p in run.model.parameters())
        plain.train(step)
    for param in run.model.parameters():
        param.grad = torch.full_like(param, 0.5 + trial.data)
    for param in plain.model.parameters():
        param.grad = torch.full_like(param, 1.0)
    run.step()
    plain.step()
    same(run.weights(), plain.weights())


@promise(
    FLAT_PAGE,
    "waits for them and needs to call nothing: EMA (`AveragedModel`), clamping, printing, `deepcopy`, `pickle`, `state_dict`, "
    "a module that computes with the weights of another.",
    "works",
    ("overlap_param_gather",),
    layouts=(*FLAT, "TP", "stages"),
    but={"FSDP2": "FSDP2 gathers parameters itself"},
)
def early_reads(trial: Trial) -> None:
    """An AveragedModel, clamping, deepcopy, pickle and state_dict right after step()"""
    run, plain = trial.run(), trial.plain()
    average, wanted = AveragedModel(run.model), AveragedModel(plain.model)
    for step in range(3):
        for each, ema in ((run, average), (plain, wanted)):
            each.train(step)
            ema.update_parameters(each.model)
            with torch.no_grad():
                for param in each.model.parameters():
                    param.clamp_(-0.25, 0.25)
    run.train(3)
    plain.train(3)
    copied = copy.deepcopy(run.model)
    run.train(4)
    states = dict(run.model.state_dict())
    plain_copy = copy.deepcopy(plain.model)
    plain.train(4)

    def whole(params: dict) -> dict:
        return {
            k: (v.full_tensor() if isinstance(v, DTensor) else v).detach()
            for k, v in params.items()
            if k in trial.names
        }

    same(whole(states), whole(plain.model.state_dict()))
    same(whole(dict(copied.named_parameters())), whole(dict(plain_copy.named_parameters())))
    same(
        whole(dict(average.module.named_parameters())),
        whole(dict(wanted.module.named_parameters())),
    )
    if trial.layout != "TP":
        run.train(5)
        plain.train(5)
        again = torch.load(_saved(run.model.state_dict()))
        same(whole(again), whole(plain.model.state_dict()))


def _saved(value: object) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@promise(
    FLAT_PAGE,
    "**Parameters may be edited and loaded in place.**",
    "works",
    ("", *OVERLAPS[1:], "no_sync", "master_weights", "8 bits", "offload"),
)
def edited_weights(trial: Trial) -> None:
    """Weights are scaled in place between steps, and loaded"""
    run, plain = trial.run(), trial.plain()
    for step in range(3):
        for each in (run, plain):
            each.train(step)
            with torch.no_grad():
                for param in each.model.parameters():
                    param.mul_(0.5)
            if trial.option == "master_weights":
                each.opt.refresh_master_weights()
    run.train(3)
    plain.train(3)
    same(run.weights(), {name: plain.weights()[name] for name in trial.names})


@promise(
    FLAT_PAGE,
    "A parameter whose `.data` was replaced is brought back into the buffer; one of another dtype is refused.",
    "works",
    ("", *OVERLAPS[1:], "no_sync", "offload"),
    layouts=FLAT,
)
def replaced_data(trial: Trial) -> None:
    """.data is replaced between steps"""
    run, plain = trial.run().train(0), trial.plain().train(0)
    for each in (run, plain):
        each.model.first.weight.data = torch.full((12, 8), 0.5)
    for each in (run, plain):
        each.train(1)
    same(run.weights(), plain.weights())
    run.model.first.weight.data = run.model.first.weight.data.double()

    def act() -> None:
        run.backward(2)
        run.step()

    refused(act, "first.weight|dtype|Double|double")


@promise(
    FLAT_PAGE,
    "**`torch.save` of a part of a model** writes that part alone",
    "works",
    ("", *OVERLAPS[1:], "master_weights"),
    layouts=PLAIN,
)
def saved_parts(trial: Trial) -> None:
    """The first layer's state dict after a step takes the bytes of its own clones"""
    run = trial.run().train(0)
    part = list(run.model.first.state_dict().values())
    cloned = [value.clone() for value in part]
    assert len(_saved(part).getvalue()) == len(_saved(cloned).getvalue())


@promise(
    FLAT_PAGE,
    'expanded ones, `sharding="none"`, `grads="reduced"`, `owners="cyclic"`, `max_state_ratio`.',
    "raises",
    layouts=FLAT,
)
def refused_by_flat(trial: Trial) -> None:
    """Each of these keywords, and an expanded parameter"""
    for key, value in {
        "sharding": "none",
        "grads": "reduced",
        "owners": "cyclic",
        "max_state_ratio": 1.5,
    }.items():
        refused(
            lambda key=key, value=value: trial.optimizer(trial.model(), **{key: value}), key, "flat"
        )
    model = trial.model()
    model.first.register_parameter("wide", nn.Parameter(torch.ones(1).expand(6, 6)))
    refused(lambda: trial.optimizer(model), "first.wide")


@promise(
    FLAT_PAGE,
    "Parameters with other strides (`channels_last`) become contiguous; in the other layouts they keep their strides.",
    "works",
    ("", *OVERLAPS[1:], "offload"),
    layouts=(*PLAIN, "stages"),
    but={"FSDP2": "torch's shards are contiguous", "TP": "torch's shards are contiguous"},
)
def other_strides(trial: Trial) -> None:
    """A transposed weight trains as a contiguous one"""
    model = trial.model()
    layer = next(model.children())
    layer.weight.data = layer.weight.data.T.contiguous().T
    run = Run(trial, model, trial.optimizer(model)).train(0, 1, 2)
    contiguous = trial.options.get("buffers") == "flat"
    assert layer.weight.is_contiguous() == contiguous, layer.weight.stride()
    plain = trial.plain().train(0, 1, 2)
    same(run.weights(), {name: plain.weights()[name] for name in trial.names})


@promise(
    FLAT_PAGE,
    "Collective, by name, on every rank; a setter takes the first rank's value. On all layouts, also DTensors.",
    "works",
    EVERY,
)
def whole_values(trial: Trial) -> None:
    """full_parameter, full_state, full_gradient and their setters, then two more steps"""
    run, plain = trial.run().train(0), trial.plain().train(0)
    matrix = next(name for name in trial.names if "weight" in name)
    state = "momentum_buffer"
    for each in (run, plain):
        assert each.opt.full_state(matrix, state).shape == each.opt.full_parameter(matrix).shape
    same({"p": run.opt.full_parameter(matrix)}, {"p": plain.opt.full_parameter(matrix)})
    same({"s": run.opt.full_state(matrix, state)}, {"s": plain.opt.full_state(matrix, state)})
    for each in (run, plain):
        for name in (
            own for own in NAMES if "weight" in own and (each.plain or own in trial.names)
        ):
            each.opt.set_full_parameter(name, each.opt.full_parameter(name) * 0.5)
            each.opt.set_full_state(name, state, each.opt.full_state(name, state) * 0.5)
        each.train(1)
        each.backward(2)
    scale = run.scaler.get_scale() if run.scaler is not None else 1
    same({"g": run.opt.full_gradient(matrix) / scale}, {"g": plain.opt.full_gradient(matrix)})
    for each in (run, plain):
        each.step()
        each.opt.zero_grad()
    same(run.weights(), {name: plain.weights()[name] for name in trial.names})


@promise(
    FLAT_PAGE,
    "Several model chunks under one optimizer: `MuonAdamW(nn.ModuleList(chunks), ...)`.",
    "works",
    OVERLAPS,
    layouts=FLAT,
)
def chunks(trial: Trial) -> None:
    """The two layers as chunks of a ModuleList"""
    model = trial.model()
    run = Run(trial, model, trial.optimizer(nn.ModuleList([model.first, model.second]))).train(
        0, 1, 2
    )
    same(run.weights(), trial.plain().train(0, 1, 2).weights())


@promise(
    FLAT_PAGE,
    "parameters that are on their way are NaN until they are waited for",
    "works",
    ("overlap_param_gather",),
    layouts=(*FLAT, "TP", "stages"),
    but={"FSDP2": "FSDP2 gathers parameters itself"},
)
def poisoned(trial: Trial) -> None:
    """poison_early_reads=True trains to the same bits"""
    run, plain = trial.run(poison_early_reads=True).train(0, 1, 2), trial.plain().train(0, 1, 2)
    same(run.weights(), {name: plain.weights()[name] for name in trial.names})


@promise(
    FLAT_PAGE,
    "gradients are accumulated and reduced in it",
    "works",
    ("", *OVERLAPS[1:], "no_sync", "max_grad_norm", "GradScaler", "offload"),
    layouts=(*PLAIN, "stages"),
    but={
        "FSDP2": "FSDP2's `MixedPrecisionPolicy(reduce_dtype=)`",
        "TP": "of DTensors autograd keeps their dtype",
    },
)
def wide_gradients(trial: Trial) -> None:
    """bfloat16 parameters with grad_dtype=torch.float32 and main parameters"""
    model = Net(trial.kept_layers).bfloat16()
    options = {"grad_dtype": torch.float32, "master_weights": True}
    run = Run(trial, model, trial.optimizer(model, **options))
    narrow = Net().bfloat16()
    alone = {
        "process_group": trial.ranks.alone,
        "stage_group": "none",
        "sharding": "none",
        "master_weights": True,
    }
    alone |= {"max_grad_norm": NORM} if trial.option == "max_grad_norm" else {}
    opt = samestep.MuonAdamW(narrow, lr=0.1, weight_decay=0.1, **alone)
    plain = Run(trial, narrow, opt, plain=True)
    run.train(0, 1, 2)
    plain.train(0, 1, 2)
    same(run.weights(), {name: plain.weights()[name] for name in trial.names})
