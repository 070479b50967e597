"""Conversions between conventions of state: momentum as sum or average, step counts, options.

    sum   s <- mu s + g                  ema   m <- mu m + (1 - mu) g  =  (1 - mu) s

As long as mu stays what it is, m = (1 - mu) s in every later step too, and both give Muon the same
direction but for its eps. So a sum times (1 - mu) is the average, whatever mu was before.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from samestep.checkpoint.logical import MODEL, GroupFacts, options_from, plain_options, state_key
from samestep.checkpoint.sources import Source
from samestep.checkpoint.storage import CheckpointError, in_boxes
from samestep.groups.param_groups import complete
from samestep.presets import preset_options
from samestep.rules import RULES

# What a run has chosen for itself, and a preset does not change.
NUMBERS = ("lr", "initial_lr", "weight_decay", "momentum", "maximize", "variance_beta2")


def with_preset(source: Source, preset: str | None) -> Source:
    """Convert state for an optimizer with a preset; momentum is rescaled where its form differs."""
    if preset is None:
        return source
    factors: dict[str, float] = {}
    groups: list[GroupFacts] = []
    for group in source.groups:
        own = options_from(group["options"])
        try:
            new: dict[str, Any] = {"rule": own["rule"], **preset_options(preset, own["rule"])}
        except ValueError as error:
            raise CheckpointError(f"--preset: {error}") from None
        if own["rule"] == "adamw":
            groups.append({**group, "options": plain_options(new | own)})
            continue
        _same_variance(preset, group["params"], own, new)
        factor = _factor(own, new)
        if factor == 0.0 or factor == float("inf"):
            raise CheckpointError(
                f"{group['params'][0]!r} has momentum {own['momentum']}, so that its "
                "sum of gradients cannot be turned into the average of --preset "
                f'{preset}: leave --preset out, and load it with momentum_form="sum"'
            )
        if factor != 1.0:
            factors |= {state_key(name, "momentum_buffer"): factor for name in group["params"]}
        new |= {key: own[key] for key in NUMBERS if key in own}
        groups.append({**group, "options": plain_options(new)})
    return replace(source, read=_scaled(source, factors), groups=groups)


def _factor(own: Mapping[str, Any], new: Mapping[str, Any]) -> float:
    was, becomes = own.get("momentum_form", "ema"), new["momentum_form"]
    if was == becomes:
        return 1.0
    left = 1.0 - float(own.get("momentum", new["momentum"]))
    if becomes == "ema":
        return left
    return 1.0 / left if left else float("inf")


def _same_variance(
    preset: str, names: list[str], own: Mapping[str, Any], new: Mapping[str, Any]
) -> None:
    has, wants = (options.get("variance_beta2") is not None for options in (own, new))
    if has != wants:
        does, not_there = ("keeps", "has none") if wants else ("keeps none", "has one")
        raise CheckpointError(
            f"preset {preset!r} {does} a variance of rows, and the state of "
            f"{names[0]!r} {not_there}: choose a preset that matches, or set "
            "variance_beta2 in the optimizer that loads it"
        )


def _scaled(source: Source, factors: Mapping[str, float]) -> Any:
    def read(box: MetadataIndex) -> Tensor:
        values, factor = source.read(box), factors.get(box.fqn)
        return values if factor is None else values * factor

    return read if factors else source.read


def with_step(source: Source, step: int | None) -> Source:
    """Add a step count to the state of every AdamW parameter."""
    if step is None:
        return source
    count = torch.tensor(float(step))
    ours = {
        state_key(name, "step")
        for group in source.groups
        if group["options"]["rule"] == "adamw"
        for name in group["params"]
    }
    counted = replace(source, read=lambda box: count if box.fqn in ours else source.read(box))
    for key in sorted(ours):
        counted.tensors[key] = in_boxes((), count.dtype, [((), ())])
        counted.origins[key] = "--step"
    return counted


def checked(source: Source) -> None:
    """Raise if a rule could not continue from the converted state and options."""
    for group in source.groups:
        options = options_from(group["options"])
        name = group["params"][0]
        if options["rule"] not in RULES:
            continue
        try:
            full = complete(options, {})
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"the options of {name!r} have no equivalent in samestep: {error}. Give "
                "--preset NAME to take the options of a preset, or convert the model "
                "alone with --only model"
            ) from None
        for name in group["params"]:
            _check_state(source, name, full)


def _check_state(source: Source, name: str, options: Mapping[str, Any]) -> None:
    rule = RULES[options["rule"]]
    wanted = rule.state_shapes((1, 1), options)
    model = source.tensors.get(f"{MODEL}.{name}")
    shape = None if model is None else tuple(model.size)
    for key in wanted:
        own = state_key(name, key)
        if own not in source.tensors:
            way = "give the number of steps with --step" if key == "step" else "is it whole?"
            raise CheckpointError(f"the source has no {own}, which rule {rule.name!r} needs: {way}")
        if shape is None or wanted[key] == ():
            continue
        found = source.tensors[own].size
        if wanted[key] == (1, 1) and key != "variance" and tuple(found) != shape:
            raise CheckpointError(
                f"{own} has shape {tuple(found)} and the parameter {shape}: the files "
                "are of different models, or the source stacks several parameters in "
                "one"
            )
        if key == "variance" and options.get("split_sizes") is None and len(shape) == 2:
            expected = prod(rule.state_shapes(shape, options)[key])
            if found.numel() != expected:
                raise CheckpointError(
                    f"{own} has {found.numel()} elements, and this one {expected}: "
                    f"{name!r} of shape {shape} has more columns than rows, where "
                    "dion's NorMuon keeps a variance per row and samestep one per "
                    "column: convert the model alone with --only model"
                )
