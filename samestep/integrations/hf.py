"""Hugging Face's Trainer, trl and accelerate: an optimizer that they may wrap, shard and save.

    trainer = Trainer(..., optimizer_cls_and_kwargs=samestep.hf.factory(lr=3e-4))

    optimizer = samestep.hf.optimizer(model, lr=3e-4)
    model, optimizer = accelerator.prepare(model, optimizer)

These trainers build the optimizer before they wrap the model in DDP or shard it with FSDP2, average
gradients themselves, clip them themselves, and save what rank 0 alone gives. So plans and state are
made in the first step (`deferred`), where DDP and FSDP2 are seen, and every rank keeps all of the
state (`sharding="none"`). Whoever wants to share it (`sharding="zero2"`) lets all ranks gather it
before a save: `SaveWhole` for the Trainer, `save_whole` for accelerate.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from samestep.groups.step_options import clips, limit_text
from samestep.optimizer.muon_adamw import MuonAdamW
from samestep.optimizer.rule_optimizer import RuleOptimizer

if TYPE_CHECKING:
    from samestep.integrations.trainer_callback import SaveWhole as SaveWhole

Built = Callable[..., RuleOptimizer]


def factory(
    kind: type[RuleOptimizer] = MuonAdamW, **options: Any
) -> tuple[Callable[[], Built], dict[str, Any]]:
    """The value that the Trainer (also trl's) takes as `optimizer_cls_and_kwargs`.

    `options` are those of `kind`. The learning rate is the one given here: the Trainer's schedules
    start from it, and `TrainingArguments(learning_rate=, weight_decay=)` are not read.
    """
    _check_kind(kind)
    _refuse_second_clipping(options)

    def build(model: nn.Module, **options: Any) -> RuleOptimizer:
        return optimizer(model, kind, **options)

    return lambda: build, options


def optimizer(
    model: nn.Module, kind: type[RuleOptimizer] = MuonAdamW, **options: Any
) -> RuleOptimizer:
    """An optimizer to be given to `accelerator.prepare` together with its model."""
    _check_kind(kind)
    _refuse_second_clipping(options)
    return kind(model, **{"deferred": True, "sharding": "none", **options})


def save_whole(accelerator: Any, optimizer: Any) -> None:
    """Let all ranks gather the state before `accelerator.save_state`, where they share it.

    `optimizer`: as it is before `prepare` or after it.
    """
    own = unwrapped(optimizer)

    def gather(*_: object) -> None:
        everywhere = accelerator.project_configuration.save_on_each_node
        own.consolidate_state_dict(to=None if everywhere else 0)

    accelerator.register_save_state_pre_hook(gather)


def unwrapped(optimizer: Any) -> RuleOptimizer:
    """The optimizer inside accelerate's wrapper."""
    while not isinstance(optimizer, RuleOptimizer):
        inner = getattr(optimizer, "optimizer", None)
        if inner is None:
            raise TypeError(f"expected an optimizer of samestep, got {type(optimizer)}")
        optimizer = inner
    return optimizer


def _check_kind(kind: object) -> None:
    if not (isinstance(kind, type) and issubclass(kind, RuleOptimizer)):
        raise TypeError(
            "kind must be samestep.MuonAdamW, samestep.Muon or samestep.AdamW, got "
            f"{kind!r}: give the class, and options such as lr by keyword"
        )


def _refuse_second_clipping(options: dict[str, Any]) -> None:
    limit = options.get("max_grad_norm")
    if isinstance(limit, int | float | Mapping) and clips(limit):
        raise ValueError(
            f"{limit_text(limit)} would clip gradients that the trainer has clipped "
            "already: leave it out and set TrainingArguments(max_grad_norm=...), whose "
            "default is 1.0, or accelerator.clip_grad_norm_. max_grad_norm=math.inf "
            "only skips steps whose gradients are not finite"
        )


def __getattr__(name: str) -> Any:
    """The callback when asked for, since it needs transformers."""
    if name == "SaveWhole":
        from samestep.integrations.trainer_callback import SaveWhole

        return SaveWhole
    raise AttributeError(f"module 'samestep.integrations.hf' has no attribute {name!r}")
