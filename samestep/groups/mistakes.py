"""Detects common mistakes, with a warning or an error for each.

What cannot be right raises; what may be meant is warned of, with the way to say that it is meant.
docs/troubleshooting.md has a row for each message. Nothing here waits for a GPU, and after the
first steps little is left of it: two comparisons, and a look at the model now and then.
"""

import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from samestep.comm.diagnosis.flight import has_passed, recorded_event
from samestep.groups.gradient_writes import Look, look
from samestep.groups.param_groups import members, parameter_names
from samestep.groups.pipelines import PipelineStages, instances_of, with_subclasses
from samestep.groups.step_options import GradLimit, clips, limit_text
from samestep.rules.state import needs_master
from samestep.tooling.warn import some, warn_user

Group = Mapping[str, Any]
EMPTY_STEPS = 3  # steps without any gradient, from the first one on, that are too many
EDITS_LOOKED_FOR = 2  # steps
IF_MEANT = (
    "If the ranks are meant to train separately, or DistributedDataParallel already averages the "
    'gradients, pass grads="reduced" (the optimizer then averages nothing)'
)


# --- ranks that do not know of each other --------------------------------------------------------


def has_process_group() -> bool:
    """Whether torch.distributed is initialized."""
    return dist.is_available() and dist.is_initialized()


def warn_of_missing_group() -> None:
    """Warn if torchrun started several ranks and no process group exists."""
    ranks = os.environ.get("WORLD_SIZE", "")
    if "RANK" in os.environ and ranks.isdigit() and int(ranks) > 1:
        warn_user(
            f"{ranks} ranks were started (WORLD_SIZE={ranks} in the environment), but "
            "there is no process group yet, so this optimizer takes itself for the "
            "only process and every rank would train its own model: call "
            f"torch.distributed.init_process_group() before building it. {IF_MEANT}"
        )


def refuse_late_group() -> None:
    """Raise if a process group of several ranks was made after the optimizer."""
    ranks = dist.get_world_size()
    if ranks > 1:
        raise RuntimeError(
            f"this optimizer was built before torch.distributed.init_process_group(), so it does "
            f"not average gradients over the {ranks} ranks that there are now: build it "
            f"afterwards. {IF_MEANT}"
        )


# --- parameters that are not what they seem ------------------------------------------------------


def refuse_flat_parameters(index: int, group: Group) -> None:
    """Refuse FSDP1, whose flattened shards look like whole parameters."""
    for _, name, param in members([group], index):
        if getattr(param, "_is_flat_param", False) or getattr(param, "_fsdp_flattened", False):
            raise ValueError(
                f"parameter {name!r} belongs to FullyShardedDataParallel (FSDP1), which keeps a "
                "different flattened shard under the same name on each rank; samestep would take "
                "these for copies of one parameter and overwrite them all with rank 0's. Shard the "
                "model with torch.distributed.fsdp.fully_shard (FSDP2) instead"
            )


def warn_of_lost_updates(groups: Iterable[Group], first: int = 0) -> None:
    """Warn of 16-bit parameters without a choice of `master_weights`."""
    named = [(name, param) for _, name, param in members(groups, first)]
    narrow = [(name, param) for name, param in named if needs_master(param, True)]
    if narrow:
        dtypes = dict.fromkeys(str(param.dtype).removeprefix("torch.") for _, param in narrow)
        warn_user(
            f"{len(narrow)} of {len(named)} parameters are {' or '.join(dtypes)} "
            f"({some([name for name, _ in narrow])}), and updates smaller than their last bit are "
            "lost, at small learning rates most of them. Pass master_weights=True to keep 32-bit "
            "copies (4 bytes per element), or master_weights=False to keep 16-bit updates and "
            "silence this warning"
        )


# --- a model that was changed, a step in the wrong place -----------------------------------------


def refuse_second_clipping(model: nn.Module | None, max_grad_norm: GradLimit) -> None:
    """Raise if Lightning clips gradients by their norm too."""
    try:
        trainer = getattr(model, "trainer", None)
    except RuntimeError:  # Lightning's property, of a module that has no trainer
        return
    limit = getattr(trainer, "gradient_clip_val", None)
    by_value = getattr(trainer, "gradient_clip_algorithm", None) == "value"
    if clips(max_grad_norm) and isinstance(limit, int | float) and limit > 0 and not by_value:
        raise ValueError(
            f"gradients would be clipped twice, by {limit_text(max_grad_norm)} here and by "
            f"gradient_clip_val={limit:g} of Lightning's Trainer: leave one of them out. "
            "max_grad_norm=math.inf only skips steps whose gradients are not finite"
        )


class TrainingWatch:
    """Watches whether the optimizer updates the parameters that the model trains.

    The model is looked at before steps 1, 2, 4, 8, ..., which are counted here as they begin;
    whether there are gradients at all until there was one.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._model = None if model is None else weakref.ref(model)
        self.steps = 0
        self.next_look = 1
        self._empty_steps = 0
        self._told: set[str] = set()  # parameters of the last warning
        self._answers: list[tuple[Tensor, torch.cuda.Event]] = []  # of a GPU
        self.waits = True  # no gradient has been seen yet

    def tensors_of_model(self) -> Iterator[tuple[str, Tensor]]:
        """All parameters and buffers of the model, where there is one."""
        model = None if self._model is None else self._model()
        if model is not None:
            yield from model.named_parameters()
            yield from model.named_buffers()

    def look_at_model(self, groups: Iterable[Group], only_rule: str | None) -> None:
        """Warn if the model trains parameters that the optimizer does not have.

        `only_rule`: of an optimizer whose groups need not name their rule.
        """
        self.next_look *= 2
        model = None if self._model is None else self._model()
        if model is None:
            return
        mine = {param for group in groups for param in group["params"]}
        strange = [
            name
            for name, param in model.named_parameters()
            if param.requires_grad and param.grad is not None and param not in mine
        ]
        if not strange:
            return
        have, them, were = (
            ("has", "it, so it is", "it came into the model, or was")
            if len(strange) == 1
            else ("have", "them, so they are", "they came into the model, or were")
        )
        text = (
            f"{have} gradients, but the optimizer does not have {them} not trained: {were} "
            "unfrozen, after the optimizer was built. "
        )
        if not any(param in mine for param in model.parameters()):
            raise RuntimeError(
                "no parameter that this optimizer has is in its model any more; "
                f"{some(strange)} {text}Build the optimizer after fully_shard, LoRA or "
                "other code that replaces parameters, or call opt.adopt(model) on "
                "every rank right after it, where names and shapes are the same"
            )
        if not any(param.requires_grad for param in mine):
            raise RuntimeError(
                f"all {len(mine)} parameters of this optimizer are frozen, and {some(strange)} "
                f"{text}Build the optimizer after adding LoRA or a new head; where a trainer adds "
                "them (trl with peft_config=), let it build the optimizer: "
                "optimizer_cls_and_kwargs=samestep.hf.factory(lr=...)"
            )
        if set(strange) == self._told:
            return
        self._told = set(strange)
        rule, others = "", ""
        if only_rule is None:
            rule = ', "rule": "muon"'
            others = ' for hidden matrices, with "rule": "adamw" for biases, norms and embeddings'
        warn_user(
            f"{some(strange)} {text}Build the optimizer after changing the model, or add them: "
            f'opt.add_param_group({{"params": [("name", p)]{rule}}}){others}'
        )

    def look_at_gradients(
        self, present: Sequence[bool | Tensor], groups: Iterable[Group], ranks: int
    ) -> None:
        """Warn after some steps in which no rank had any gradient."""
        while self._answers and has_passed(self._answers[0][1]):
            self._heard(bool(self._answers.pop(0)[0]))
        if any(flag is True for flag in present):
            self._heard(True)
        elif flags := [flag for flag in present if isinstance(flag, Tensor)]:
            if flags[0].is_cuda:
                pinned = torch.empty((), dtype=torch.bool, pin_memory=True)
                pinned.copy_(torch.stack(flags).any(), non_blocking=True)
                event = recorded_event(flags[0].device)
                assert event is not None
                self._answers.append((pinned, event))
        else:
            self._heard(False)
        if self.waits and self._empty_steps >= EMPTY_STEPS:
            self.waits = False
            self._warn_of_nothing(groups, ranks)

    def _heard(self, anything: bool) -> None:
        if anything:
            self.waits = False
        else:
            self._empty_steps += 1

    def _warn_of_nothing(self, groups: Iterable[Group], ranks: int) -> None:
        params = [param for group in groups for param in group["params"]]
        where = "" if ranks == 1 else f" on any of {ranks} ranks"
        nothing = f"no parameter had a gradient in the first {self._empty_steps} steps{where}, so"
        if not any(param.requires_grad for param in params):
            warn_user(
                f"{nothing} nothing was trained: all {len(params)} parameters of this optimizer "
                "are frozen (requires_grad=False). Call requires_grad_(True) on those to train; if "
                "others are trained (LoRA, a new head), build the optimizer after adding them"
            )
            return
        warn_user(
            f"{nothing} nothing was trained: call loss.backward() before step(), and zero_grad() "
            "after step() or before backward(), not between. If the model was changed after the "
            "optimizer was built (fully_shard, LoRA, .to_empty(), a new head), the optimizer has "
            "parameters that the model no longer uses: build it afterwards"
        )


# --- gradients that were edited, or averaged already ---------------------------------------------


class GradientEdits:
    """Watches in the first steps whether local gradients are edited after backward.

    Hooks remember how often each gradient had been written to when backward was done with it;
    after a few steps they are taken away.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = list(params)
        self._seen: dict[int, Look] = {}
        self._steps_left = EDITS_LOOKED_FOR
        watch = weakref.ref(self)  # hooks must not keep a dropped optimizer

        def hook_of(index: int) -> Any:
            def arrived(param: Tensor) -> None:
                alive = watch()
                grad = param.grad
                if alive is None or grad is None or grad.layout != torch.strided:
                    return
                if grad.numel():
                    alive._seen[index] = look(grad, values=True)

            return arrived

        self._hooks = [
            param.register_post_accumulate_grad_hook(hook_of(index))  # type: ignore[no-untyped-call]
            for index, param in enumerate(self._params)
            if param.requires_grad
        ]

    def look(self) -> bool:
        """Warn before a step if all gradients were edited in place after backward.

        Whether to look again before the next.
        """
        edited = self._edited()
        self._seen.clear()
        self._steps_left -= 1
        if edited:
            self._steps_left = 0
        if self._steps_left == 0:
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()
        if edited:
            warn_user(
                "all gradients were changed between backward() and step(), before they were "
                "averaged over ranks. If that was torch.nn.utils.clip_grad_norm_, every rank has "
                "clipped by the norm of its own gradients: leave it out and pass max_grad_norm= to "
                "the optimizer, which clips the averaged gradients by their joint norm "
                '(opt.metrics()["grad_norm"]). If you averaged them yourself, pass '
                'grads="reduced". If you only multiplied them by the same number on every rank '
                "(1 / accumulation steps), ignore this"
            )
        return self._steps_left > 0

    def _edited(self) -> bool:
        """Whether all gradients were edited, not counting those of pipeline schedules."""
        times = {index: self._writes(index, seen) for index, seen in self._seen.items()}
        if not all(times.values()):
            return False
        known = PipelineStages(self._params).edits()
        for index in list(times):
            expected = known.get(self._params[index], 0)
            if expected is None:
                del times[index]
            else:
                times[index] = max(0, times[index] - expected)
        return bool(times) and all(times.values())

    def _writes(self, index: int, seen: Look) -> int:
        """Number of writes to a gradient after its backward."""
        grad = self._params[index].grad
        if grad is None or grad.layout != torch.strided:
            return 0
        return seen.writes(grad) or 0  # not if it is another, or was reduced


def warn_of_reductions_in_step() -> None:
    """Warn that overlap_grad_reduce=True has no effect with such a pipeline schedule."""
    warn_user(
        "overlap_grad_reduce=True has no effect with a schedule of "
        "torch.distributed.pipelining, which runs several backward passes without "
        "saying which is the last: gradients are reduced in step(), with the same "
        "result. Leave overlap_grad_reduce=True out to silence this warning, or use "
        "samestep.parallel.Pipeline, whose 1F1B and interleaved schedules overlap"
    )


_ddp_modules: "weakref.WeakSet[DistributedDataParallel]" = weakref.WeakSet()


def _remember_ddp(module: nn.Module, _: str, __: nn.Module | None) -> None:
    """Record the parameters that DistributedDataParallel wraps, by a hook on registration."""
    if isinstance(module, DistributedDataParallel):
        _ddp_modules.add(module)


def find_ddp() -> None:
    """Find existing DDP modules, which need a process group to exist."""
    if has_process_group():
        _ddp_modules.update(instances_of(with_subclasses(DistributedDataParallel)))


register_module_module_registration_hook(_remember_ddp)
find_ddp()  # in case that this is imported late


def warn_of_ddp(named: Iterable[tuple[str, Tensor]]) -> bool:
    """Warn if DistributedDataParallel averages gradients that the optimizer averages too."""
    wrapped = _in_ddp()
    twice = [name for name, param in named if param in wrapped]
    if twice:
        warn_user(
            f"{some(twice)}: these parameters belong to a DistributedDataParallel "
            "model, which averages their gradients, and this optimizer averages them "
            "once more. Give it the wrapped model, MuonAdamW(ddp_model), or pass "
            'grads="reduced"; or drop DistributedDataParallel: this optimizer averages '
            "gradients itself"
        )
    return bool(twice)


def _in_ddp() -> set[Tensor]:
    return {param for module in _ddp_modules for param in module.parameters()}


def averages_with_ddp(params: object) -> bool:
    """Whether all of the optimizer's parameters are in a DistributedDataParallel."""
    if is_ddp(params):
        return True
    if not _ddp_modules:
        return False
    given = list(params.parameters()) if isinstance(params, nn.Module) else _tensors_in(params)
    trained = {param for param in given if param.requires_grad}
    return bool(trained) and trained <= _in_ddp()


def _tensors_in(params: object) -> list[Tensor]:
    """The parameters in lists of parameters, (name, parameter) pairs or groups of either."""
    if isinstance(params, Tensor):
        return [params]
    if isinstance(params, Mapping):
        return _tensors_in(params.get("params"))
    items = params if isinstance(params, list | tuple) else ()
    return [tensor for item in items for tensor in _tensors_in(item)]


def is_ddp(model: object) -> bool:
    """Whether a model is a DistributedDataParallel, also inside torch.compile's wrapper."""
    while isinstance(model, nn.Module) and not isinstance(model, DistributedDataParallel):
        model = getattr(model, "_orig_mod", None)
    return isinstance(model, DistributedDataParallel)


def warn_of_outliers(index: int, group: Group) -> None:
    """Warn of an update larger than any orthogonalized one."""
    warn_user(
        f"an update in param_groups[{index}] ({parameter_names(group, index)[0]!r} and "
        "others) was not finite, or larger than an orthogonalized update can be, and "
        "the parameters have it now. Load an earlier checkpoint, and look for "
        "gradients that are not finite: max_grad_norm=math.inf skips such steps. "
        "metrics()['outliers'] counts these blocks"
    )
