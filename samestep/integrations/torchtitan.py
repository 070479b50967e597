"""torchtitan: MuonAdamW in its container of optimizers, one for each model part.

    def llama3_debugmodel_muon() -> Trainer.Config:
        config = llama3_debugmodel()
        config.optimizer = samestep.torchtitan.optimizers(lr=3e-4)
        return config

The container is built after torchtitan has sharded the model, so there is nothing to put off.
torchtitan clips and averages gradients, schedules rates and saves by itself.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from samestep.groups.param_groups import name_matches
from samestep.groups.routing import Matcher, Overrides, routable, without_wrappers



# 3-D stacks (experts, out, in) of its mixture of experts.
EXPERT_STACKS = ("w1_EFD", "w2_EDF", "w3_EFD")


def optimizers(**options: Any) -> Any:
    """What `Trainer.Config(optimizer=...)` takes: a configuration of `Optimizers`.

    `options` are those of `MuonAdamW`. Needs torchtitan.
    """
    from samestep.integrations.torchtitan_container import Optimizers

    return Optimizers.Config(options=options)


def known_overrides(part: nn.Module, own: Overrides | None = None) -> dict[Matcher, dict[str, Any]]:
    """What torchtitan's modules say of their parameters, under what a user says.

    Query, key and value rows of `FusedQKVLinear` are three matrices, a few rows of each in every
    group of heads; `GroupedExperts` are stacks of matrices; a router is none.
    """
    found: dict[Matcher, dict[str, Any]] = {key: dict(value) for key, value in (own or {}).items()}
    here = {parameter.name: parameter.param for parameter in routable(part).parameters}
    for path, module in part.named_modules():
        for name, options in _of_module(without_wrappers(path), module).items():
            if name in here:
                said = _said(name, here[name], own or {})
                rest = {key: value for key, value in options.items() if key not in said}
                if rest and name not in found:
                    found[name] = rest
    return found


def _of_module(path: str, module: nn.Module) -> dict[str, dict[str, Any]]:
    # By name: importing a model's modules would import all of torchtitan.
    kinds = {kind.__name__ for kind in type(module).__mro__}
    within: Any = module
    if "FusedQKVLinear" in kinds:
        size = within.head_dim
        groups = within.wqkv.out_features // (within.r_dim * size)
        split = f"interleaved:{within.heads_per_kv * size}+{size}+{size}x{groups}"
        return {f"{path}.wqkv.weight": {"split_sizes": split}}
    if "GroupedExperts" in kinds:
        return {f"{path}.{name}": {"rule": "muon"} for name in EXPERT_STACKS}
    if "TokenChoiceTopKRouter" in kinds:
        return {f"{path}.gate.weight": {"rule": "adamw"}}
    return {}


def _said(name: str, param: Tensor, own: Overrides) -> set[str]:
    """The keys that a user gives a parameter."""
    return {key for matcher, options in own.items() if means(matcher, name, param) for key in options}


def means(matcher: Matcher, name: str, param: Tensor) -> bool:
    """Whether a pattern or predicate selects a parameter."""
    if isinstance(matcher, str):
        return name_matches(name, matcher)
    return bool(matcher(name, param))
