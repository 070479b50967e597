"""torchtitan's container of optimizers with a MuonAdamW for each model part."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torchtitan.components.optimizer import OptimizersContainer

from samestep.comm.groups import registry
from samestep.comm.integrity.agreement import gather_texts
from samestep.groups.param_groups import name_matches
from samestep.groups.routing import Matcher, Overrides, routable
from samestep.integrations.torchtitan import recipe
from samestep.layout.boxes import mesh_of
from samestep.optimizer.muon_adamw import MuonAdamW

SPLITS = "split_sizes"


class Optimizers(OptimizersContainer):
    """A MuonAdamW for each model part: torchtitan's schedulers and checkpoints find what they know.

    Each works with the ranks that have its part, which in a pipeline are not all.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """`options` are keywords of MuonAdamW.

        Of torchtitan's own, `implementation` names ways of torch's AdamW to compute the same
        ("fused", "foreach", "for-loop"): nothing is passed on, since a step is a few launches
        anyway. `param_groups` is refused, and so is "fused_opt_states_bf16".
        """

        options: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        _refuse(config)
        options = dict(config.options)
        asked: Overrides = options.pop("overrides", None) or {}
        self.model_parts = model_parts
        self.optimizers = []
        groups = [_ranks_of(part) for part in model_parts]
        if any(group is not None for group in groups):
            _refuse_typos(asked, model_parts)
        for part, group in zip(model_parts, groups, strict=True):
            own = {"recipe": recipe(part), "overrides": asked}
            if group is not None:
                own |= {"process_group": group, "overrides": _about(part, asked)}
            self.optimizers.append(MuonAdamW(part, **{**own, **options}))
        # The container is an optimizer itself, for hooks.
        params = [param for group in self._groups() for param in group["params"]]
        Optimizer.__init__(self, params, {})

    def state_dict(self) -> dict[str, Any]:
        """Flat, by name; of each parameter its own split, and not those of all of its group."""
        flat: dict[str, Any] = super().state_dict()
        for group in self._cut_groups():
            for name in group["param_names"]:
                flat[f"param_groups.{name}.{SPLITS}"] = group[SPLITS].get(name)
        return flat

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        flat = dict(state_dict)
        for group in self._cut_groups():
            keys = {name: f"param_groups.{name}.{SPLITS}" for name in group["param_names"]}
            splits = {name: state_dict.get(key) for name, key in keys.items()}
            # Its group is read under the name of the first.
            flat[keys[group["param_names"][0]]] = {n: s for n, s in splits.items() if s is not None}
        super().load_state_dict(flat)

    def _groups(self) -> list[dict[str, Any]]:
        return [group for each in self.optimizers for group in each.param_groups]

    def _cut_groups(self) -> list[dict[str, Any]]:
        """The groups with splits by name."""
        return [group for group in self._groups() if isinstance(group.get(SPLITS), Mapping)]


def _refuse(config: Optimizers.Config) -> None:
    if config.param_groups:
        raise ValueError(
            "param_groups are for torchtitan's own optimizers, and samestep's chooses "
            'rules by itself: for exceptions give options={"overrides": {"<pattern>": '
            '{"rule": "adamw", "lr": ...}}}'
        )
    if config.implementation == "fused_opt_states_bf16":
        raise ValueError(
            'implementation="fused_opt_states_bf16" is for torch\'s AdamW: give '
            'options={"state_dtypes": {"exp_avg": torch.bfloat16, "exp_avg_sq": '
            'torch.bfloat16}}, and "momentum_buffer" for Muon'
        )
    if config.options.get("max_grad_norm") is not None:
        raise ValueError(
            f"max_grad_norm={config.options['max_grad_norm']} would clip gradients that "
            "torchtitan has clipped already: leave it out and set training.max_norm, "
            "whose default is 1.0"
        )


def _ranks_of(part: nn.Module) -> dist.ProcessGroup | None:
    """The ranks that share a part; None: all of them, or there are no others."""
    meshes = {mesh_of(param) for param in part.parameters()} - {None}
    if not meshes or not dist.is_initialized():
        return None
    ranks = {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}
    if len(ranks) == dist.get_world_size():
        return None
    for mesh in meshes:
        if mesh.ndim == 1 and mesh.size() == len(ranks):
            group: dist.ProcessGroup = mesh.get_group()
            return group
    return registry.of_members(ranks).handle


def _about(part: nn.Module, asked: Overrides) -> Overrides:
    """Overrides of a part: others may be about other stages."""
    here = routable(part).parameters

    def is_about(matcher: Matcher) -> bool:
        if isinstance(matcher, str):
            return any(name_matches(name, matcher) for name, _, _ in here)
        return any(matcher(name, param) for name, param, _ in here)

    return {matcher: options for matcher, options in asked.items() if is_about(matcher)}


def _refuse_typos(asked: Overrides, parts: Sequence[nn.Module]) -> None:
    """Raise on every rank if an override is about no part of any. Collective over all of them."""
    if not asked:
        return
    used = [bool([part for part in parts if _about(part, {key: {}})]) for key in asked]
    device = next(parts[0].parameters()).device
    told = gather_texts("comparison of overrides", json.dumps(used), registry.of(), device)
    for matcher, of_ranks in zip(asked, zip(*map(json.loads, told), strict=True), strict=True):
        if not any(of_ranks):
            raise ValueError(
                f"overrides: {matcher!r} matches no trainable parameter of any model part on any "
                "rank; print the names with [name for name, _ in model.named_parameters()]"
            )
