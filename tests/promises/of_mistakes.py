"""Promises of messages about mistakes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import samestep
from samestep.fsdp import take_part
from tests.promises.claims import heard, refused, same, unchanged, warned
from tests.promises.layouts import BY_FSDP, EVERY, FLAT, GIVES_BACK, NORM, OVERLAPS, PLAIN, WHOLE
from tests.promises.listed import MISTAKES, promise
from tests.promises.trial import NAMES, Net, Run, Trial


@promise(
    MISTAKES,
    "Views beside each other in one buffer, as of a flat model, are fine.",
    "works",
    OVERLAPS,
    layouts=(*PLAIN, "stages"),
    but={"FSDP2": "FSDP2 moves its parameters", "TP": "cut parameters have memory of their own"},
)
def neighbours_in_one_buffer(trial: Trial) -> None:
    """The model's parameters are views of one tensor"""
    model = trial.model()
    buffer = torch.cat([p.detach().flatten() for p in model.parameters()])
    begin = 0
    for param in model.parameters():
        param.data = buffer[begin : begin + param.numel()].view(param.shape)
        begin += param.numel()
    run = Run(trial, model, trial.optimizer(model)).train(0, 1)
    same(
        run.weights(),
        {k: v for k, v in trial.plain().train(0, 1).weights().items() if k in trial.names},
    )


@promise(
    MISTAKES,
    "here it is refused, in one process and in every layout, on every rank (found when the optimizer is built, "
    "and before steps 1, 2, 4, 8, ...)",
    "raises",
    OVERLAPS,
    but={"FSDP2": "FSDP2 gives each parameter memory of its own"},
)
def shared_memory(trial: Trial) -> None:
    """A second parameter of the same memory, also transposed, at construction"""
    model = trial.model()
    layer = next(model.children())
    for name, value in (("again", layer.weight.data), ("turned", layer.weight.data.T)):
        if isinstance(value, DTensor) and name == "turned":
            continue
        layer.register_parameter(name, nn.Parameter(value))
        refused(lambda: trial.optimizer(model), "lie in the same memory", "weight", name)
        del layer._parameters[name]


@promise(
    MISTAKES,
    'With `buffers="flat"` a parameter that shares memory with a frozen one, or with a buffer of the model, is refused as well',
    "raises",
    OVERLAPS,
    layouts=FLAT,
)
def shared_with_frozen(trial: Trial) -> None:
    """A frozen parameter, then a buffer, in the memory of a trained one"""
    for kind in ("frozen", "buffer"):
        model = trial.model()
        if kind == "frozen":
            model.first.register_parameter(
                "other", nn.Parameter(model.first.weight.data, requires_grad=False)
            )
        else:
            model.first.register_buffer("other", model.first.weight.data)
        refused(lambda model=model: trial.optimizer(model), "memory", "first.weight")


@promise(
    MISTAKES,
    "Each stage would clip by a norm of its own.",
    "raises",
    ("max_grad_norm", "GradScaler"),
    layouts=(*PLAIN, "FSDP2", "stages"),
    but={"TP": "its meshes have all ranks"},
)
def norm_of_a_stage(trial: Trial) -> None:
    """Groups that leave out ranks, without stage_group"""
    model = Net()
    groups: dict[str, object] = {"process_group": trial.ranks.alone}
    if trial.layout == "stages":
        groups, model = {"process_group": trial.ranks.stage, "stage_group": None}, trial.model()
    if trial.layout == "FSDP2":
        groups = {}
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("others", "own"))["own"]
        model = nn.Sequential(*[nn.Identity()] * trial.rank, nn.Linear(4, 4))  # other names on each
        fully_shard(model, mesh=mesh)
    if trial.option == "max_grad_norm":
        refused(lambda: trial.optimizer(model, **groups), "whole model", "stage_group")
        return
    opt = trial.optimizer(model, **groups)
    loss = sum(
        p.sum() for p in (q.to_local() if isinstance(q, DTensor) else q for q in model.parameters())
    )
    scaler = samestep.GradScaler("cpu")
    scaler.scale(loss).backward()
    refused(lambda: scaler.step(opt), "the scale of a GradScaler", "whole model", "stage_group")


@promise(
    MISTAKES,
    "An optimizer has the parameters that existed when it was built.",
    "warns",
    OVERLAPS,
    but={"FSDP2": "a parameter that was frozen when FSDP2 cut the model stays out of its sums"},
)
def unfrozen_later(trial: Trial) -> None:
    """A parameter that is unfrozen after construction; once added it trains"""
    model = trial.model()
    layer = next(model.children())
    layer.bias.requires_grad_(False)
    opt = trial.optimizer(model)
    run = Run(trial, model, opt)
    before = run.weights()
    layer.bias.requires_grad_(True)
    name = next(name for name in trial.names if "bias" in name)
    warned(lambda: run.train(0), f"{name} has gradients, but the optimizer does not have it")
    opt.add_param_group({"params": [(name, layer.bias)], "rule": "adamw"})
    run.train(1)
    assert not torch.equal(run.weights()[name], before[name]), "it was not trained"


@promise(
    MISTAKES,
    "call opt.adopt(model) on every rank right after it, where names and shapes are the same",
    "raises",
    OVERLAPS,
)
def replaced_parameters(trial: Trial) -> None:
    """All parameters are replaced by copies"""
    run = trial.run()
    other = trial.model()
    for name, layer in other.named_children():
        if trial.layout == "FSDP2":
            for own, param in layer.named_parameters():
                setattr(getattr(run.model, name), own, nn.Parameter(param.detach()))
        else:
            setattr(run.model, name, layer)
    if trial.layout == "FSDP2":
        take_part(run.model)
    run.backward(0)
    refused(
        run.opt.step,
        "no parameter that this optimizer has is in its model any more|could not take the step",
    )


@promise(
    MISTAKES,
    "Without a rule there is an error",
    "raises",
)
def group_without_rule(trial: Trial) -> None:
    """add_param_group without a rule"""
    run = trial.run()
    late = nn.Parameter(torch.ones(4, 4))
    refused(
        lambda: run.opt.add_param_group({"params": [("late", late)]}),
        "a parameter group has no rule",
    )
    unused = heard(lambda: run.train(0))
    assert not unused


@promise(
    MISTAKES,
    "no parameter had a gradient in the first 3 steps, so nothing was trained",
    "warns",
    (
        "",
        "overlap_grad_reduce",
        "overlap_param_gather",
        "no_sync",
        "max_grad_norm",
        "GradScaler",
        "offload",
    ),
)
def steps_without_gradients(trial: Trial) -> None:
    """zero_grad() between backward and step, four times"""
    run = trial.run()

    def wrong_order() -> None:
        for step in range(4):
            run.backward(step)
            run.opt.zero_grad()
            run.step()

    warned(wrong_order, "no parameter had a gradient in the first 3 steps")
    same(run.weights(), Run(trial, fresh := trial.model(), trial.optimizer(fresh)).weights())


@promise(
    MISTAKES,
    "A single step without gradients, or a rank without them, is no mistake: parameters without a gradient are left alone, "
    "and nothing is said.",
    "works",
    EVERY,
)
def few_steps_without_gradients(trial: Trial) -> None:
    """Two steps without backward, between others"""
    run = trial.run().train(0)
    unchanged(run, run.opt.step)
    unchanged(run, run.opt.step)
    run.train(1)
    plain = trial.plain().train(0, 1)
    same(run.weights(), {name: plain.weights()[name] for name in trial.names})


@promise(
    MISTAKES,
    "updates smaller than their last bit are lost, at small learning rates most of them",
    "warns",
    OVERLAPS,
)
def sixteen_bit_weights(trial: Trial) -> None:
    """bfloat16 parameters without a word on master_weights"""
    model = trial.place(Net(trial.kept_layers).bfloat16())
    warned(lambda: trial.optimizer(model), "are bfloat16", "master_weights")
    assert not heard(lambda: trial.optimizer(model, master_weights=False))


@promise(
    MISTAKES,
    "all gradients were changed between backward() and step(), before they were averaged over ranks.",
    "warns",
    layouts=(*PLAIN, "TP", "stages"),
    but={
        "FSDP2": "its gradients are averaged already, and clipping them is right",
    },
)
def clipping_by_hand(trial: Trial) -> None:
    """torch's clip_grad_norm_ before averaging"""
    run = trial.run()

    def clip() -> None:
        for step in range(2):
            run.backward(step)
            nn.utils.clip_grad_norm_(run.model.parameters(), NORM)
            run.opt.step()
            run.opt.zero_grad()

    warned(clip, "changed between backward\\(\\) and step\\(\\)", "max_grad_norm=")


@promise(
    MISTAKES,
    "`.grad` has a tensor without memory in their place, which raises as soon as anybody computes with it",
    "raises",
    ("overlap_grad_reduce", "overlap_param_gather", "no_sync", "GradScaler, overlap"),
    layouts=GIVES_BACK,
    but={
        **dict.fromkeys(("none", "zero1"), "gradients stay: see the next row"),
        "FSDP2": "gradients stay",
    },
)
def clipping_what_was_given_back(trial: Trial) -> None:
    """torch's clip_grad_norm_, get_total_norm and clip_grad_value_ after overlapped backward"""
    run = trial.run()
    run.backward(0)
    how = "opt.clip_grad_norm_\\(max_norm\\)"
    for act in (
        lambda: nn.utils.clip_grad_norm_(run.model.parameters(), NORM),
        lambda: nn.utils.get_total_norm([p.grad for p in run.model.parameters()]),
        lambda: nn.utils.clip_grad_value_(run.model.parameters(), 1.0),
    ):
        refused(act, "was reduced \\(averaged over ranks\\) and given back", how)


@promise(
    MISTAKES,
    "In the other layouts gradients stay, and editing them raises on every rank in the step",
    "raises",
    ("overlap_grad_reduce", "overlap_param_gather", "no_sync"),
    layouts=("none", "zero1"),
    but={
        **dict.fromkeys(GIVES_BACK, "gradients are given back: see the row above"),
        "FSDP2": "gradients stay, and editing them is right",
    },
)
def editing_what_was_reduced(trial: Trial) -> None:
    """One rank scales a gradient after overlapped backward"""
    run = trial.run()
    run.backward(0)
    if trial.rank == 1:
        run.model.first.weight.grad.mul_(0.5)
    unchanged(
        run,
        lambda: refused(
            run.opt.step, "was changed on rank 1|rank 1 could not take the step", "first.weight"
        ),
    )


@promise(
    MISTAKES,
    "Or, before the step, by the same norm in every layout, with DDP and FSDP2 too",
    "works",
    ("clip_grad_norm_", "clip_grad_norm_, overlap"),
)
def norm_before_the_step(trial: Trial) -> None:
    """The norm that opt.clip_grad_norm_ gives, and that of one process"""
    run, plain = trial.run(), trial.plain()
    for step in range(3):
        run.backward(step)
        norm = run.opt.clip_grad_norm_(NORM)
        run.opt.step()
        run.opt.zero_grad()
        plain.train(step)
        assert torch.equal(norm.cpu().float(), plain.opt.metrics()["grad_norm"].float()), step
    same(run.weights(), {name: plain.weights()[name] for name in trial.names})


@promise(
    MISTAKES,
    "Under DDP or FSDP2, `clip_grad_norm_` is right and nothing is said.",
    "works",
    layouts=("none", "zero1", "zero2", "flat zero1", "flat zero2", "FSDP2"),
    but={
        "TP": "DDP takes no DTensors",
        "stages": "a norm of a stage is not that of the model",
        **dict.fromkeys(FLAT, 'flat buffers refuse `grads="reduced"`'),
    },
)
def clipping_by_hand_where_it_is_right(trial: Trial) -> None:
    """torch's clip_grad_norm_ with DDP around the model, or FSDP2"""
    model = trial.model()
    wrapped = model if trial.layout == "FSDP2" else DistributedDataParallel(model)
    run = Run(trial, wrapped, trial.optimizer(wrapped))
    plain = trial.plain(max_grad_norm=NORM)
    for step in range(3):
        run.backward(step)
        nn.utils.clip_grad_norm_(wrapped.parameters(), NORM)
        run.opt.step()
        run.opt.zero_grad()
        plain.train(step)
    for (name, value), own in zip(plain.weights().items(), model.parameters(), strict=True):
        whole = own.full_tensor() if isinstance(own, DTensor) else own.detach()
        torch.testing.assert_close(whole, value, rtol=0, atol=1e-6, msg=name)


DROPS: dict[str, Callable[[Run], None]] = {
    "opt.zero_grad()": lambda run: run.opt.zero_grad(),
    "model.zero_grad()": lambda run: run.model.zero_grad(),
    "opt.zero_grad(set_to_none=False)": lambda run: run.opt.zero_grad(set_to_none=False),
}


@promise(
    MISTAKES,
    "the batch does not count, and `backward(); zero_grad(); backward(); step()` takes the second one",
    "works",
    EVERY,
)
def dropped_batch(trial: Trial) -> None:
    """Batches that opt.zero_grad() and model.zero_grad() drop, before others"""
    run, plain = trial.run(), trial.plain()
    for step, drop in enumerate(DROPS.values()):
        run.train(step)
        run.backward(10 + step)
        drop(run)
        run.train(20 + step)
        plain.train(step, 20 + step)
    same(run.weights(), {name: plain.weights()[name] for name in trial.names})


@promise(
    MISTAKES,
    "A gradient that one rank drops alone is in the sum of all, so that every rank raises",
    "raises",
    ("overlap_grad_reduce", "overlap_param_gather", "no_sync", "synchronize"),
    layouts=(*PLAIN, "TP", "stages"),
    but={"FSDP2": BY_FSDP},
)
def dropped_on_one_rank(trial: Trial) -> None:
    """zero_grad() on data rank 1 after reduction; nothing changes, and the next step trains"""
    run = trial.run().train(0)
    run.backward(1)
    if trial.option == "synchronize":
        run.opt.synchronize()
    if trial.data == 1:
        run.opt.zero_grad()
    unchanged(run, lambda: refused(run.opt.step, "was dropped on rank"))
    run.opt.zero_grad()
    run.train(2)
    plain = trial.plain().train(0, 2)
    same(run.weights(), {name: plain.weights()[name] for name in trial.names})


@promise(
    MISTAKES,
    "With overlap_grad_reduce=False, and before synchronize() and clip_grad_norm_(), a rank may drop its own",
    "works",
    ("", "max_grad_norm", "GradScaler", "master_weights", "8 bits", "offload"),
    layouts=(*PLAIN, "TP", "stages"),
    but={"FSDP2": BY_FSDP},
)
def dropped_on_one_rank_before_reduction(trial: Trial) -> None:
    """zero_grad() on data rank 1 before the step counts as zeros"""
    run = trial.run()
    run.backward(0)
    if trial.data == 1:
        run.opt.zero_grad()
    run.step()
    plain = trial.plain()
    plain.backward(0, lacks=NAMES, lacking=1)
    plain.step()
    same(run.weights(), {name: plain.weights()[name] for name in trial.names})


@promise(
    MISTAKES,
    "`model.zero_grad(set_to_none=False)` before another backward is refused as an edit: `opt.zero_grad(set_to_none=False)` is not.",
    "raises",
    ("overlap_grad_reduce",),
    layouts=("none", "zero1"),
    but={**dict.fromkeys(GIVES_BACK, "gradients are given back, and dropped"), "FSDP2": BY_FSDP},
)
def zeros_by_the_model(trial: Trial) -> None:
    """model.zero_grad(set_to_none=False) and another backward"""
    run = trial.run()
    run.backward(0)
    run.model.zero_grad(set_to_none=False)

    def again() -> None:
        run.backward(1)
        run.opt.step()

    refused(again, "changed|reduced")


@promise(
    MISTAKES,
    "these parameters belong to a DistributedDataParallel model, which averages their gradients, and this optimizer "
    "averages them once more.",
    "warns",
    layouts=(*PLAIN, "stages"),
    but={
        "FSDP2": "DDP takes no DTensors",
        "TP": "DDP takes no DTensors",
        "stages": "as the layout inside of the stage",
    },
)
def averaged_twice(trial: Trial) -> None:
    """The model is wrapped in DDP after the optimizer was built; the training is right"""
    run = trial.run()
    inner, run.model = run.model, DistributedDataParallel(run.model)
    warned(lambda: run.train(0, 1), "belong to a DistributedDataParallel model", 'grads="reduced"')
    run.model = inner
    same(run.weights(), trial.plain().train(0, 1).weights())


@promise(
    MISTAKES,
    "A model wrapped in DDP, also a compiled one, tells the optimizer that gradients come averaged",
    "works",
    ("", "max_grad_norm", "clip_grad_norm_", "GradScaler", "8 bits", "offload"),
    layouts=WHOLE,
    but={
        **dict.fromkeys(FLAT, 'flat buffers refuse `grads="reduced"`'),
        "FSDP2": "DDP takes no DTensors",
        "TP": "DDP takes no DTensors",
        "stages": "as the layout inside of the stage",
    },
)
def given_ddp(trial: Trial) -> None:
    """MuonAdamW(ddp_model), in silence"""
    model = trial.model()
    wrapped = DistributedDataParallel(model)
    run = Run(trial, wrapped, trial.optimizer(wrapped)).train(0, 1, 2)
    run.model = model
    same(run.weights(), trial.plain().train(0, 1, 2).weights())


@promise(
    MISTAKES,
    "The same holds for `overrides=`, for keywords, for keys that are set in `param_groups` later, where the next step raises, "
    "and for groups that are loaded.",
    "raises",
)
def keys_that_do_nothing(trial: Trial) -> None:
    """A key of another rule, dion's spelling, a keyword in a group, capturable: given, and set later"""
    keys = {"momentum": 0.9, "mu": 0.9, "max_grad_norm": 1.0, "capturable": True, "kind": "adamw"}
    for key, value in keys.items():
        model = trial.model()
        named = [(name, p) for name, p in model.named_parameters() if p.ndim == 1]
        group = {"params": named, "rule": "adamw", key: value}
        refused(lambda group=group: trial.optimizer([group]), key)
        opt = trial.optimizer([{"params": named, "rule": "adamw"}])
        for _, param in named:
            param.grad = torch.ones_like(param)
        opt.param_groups[0][key] = value
        said = refused(opt.step, key)
        assert "param_groups[0]" in said, said


@promise(
    MISTAKES,
    "Groups that are put into `opt.param_groups` by hand, or taken out of it, are an error at the next step",
    "raises",
    OVERLAPS,
)
def groups_by_hand(trial: Trial) -> None:
    """param_groups.append, and pop"""
    for edit in (lambda groups: groups.append(dict(groups[0])), lambda groups: groups.pop()):
        run = trial.run()
        run.backward(0)
        edit(run.opt.param_groups)
        refused(run.opt.step, "param_groups had|was put into the list")


@promise(
    MISTAKES,
    "Unknown keys are kept, since trainers and schedulers store their own",
    "works",
    OVERLAPS,
)
def unknown_keys(trial: Trial) -> None:
    """A key of a trainer stays in its group, and nothing is said"""
    run = trial.run()
    for group in run.opt.param_groups:
        group["lr_scale"] = 0.5
    run.train(0, 1)
    assert all(group["lr_scale"] == 0.5 for group in run.opt.param_groups)
    plain = trial.plain().train(0, 1)
    same(run.weights(), {name: plain.weights()[name] for name in trial.names})


@promise(
    MISTAKES,
    "one that looks like a typo of an option gets a warning",
    "warns",
)
def typos(trial: Trial) -> None:
    """A typo in a group, and in overrides, where it is an error"""
    model = trial.model()
    named = [(name, p) for name, p in model.named_parameters() if p.ndim == 2]
    group = {"params": named, "rule": "muon", "momentun": 0.9}
    warned(lambda: trial.optimizer([group]), "'momentun' is not known", "'momentum'")
    refused(
        lambda: trial.optimizer(model, overrides={named[0][0]: {"momentun": 0.9}}),
        "momentun",
        "'momentum'",
    )


@promise(
    MISTAKES,
    "FSDP1 replaces parameters by one flat vector per module, cut into shards.",
    "raises",
    layouts=(*PLAIN,),
    but=dict.fromkeys(("FSDP2", "TP", "stages"), "another way to cut the model"),
)
def fsdp1(trial: Trial) -> None:
    """FullyShardedDataParallel around the model"""
    model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    refused(lambda: trial.optimizer(model), "belongs to FullyShardedDataParallel", "FSDP2")
