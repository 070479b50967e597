"""Translates state and options of other optimizers into samestep's names and forms.

Which rule a parameter had is told by the keys of its state, and of whom it is by the keys of its
group. Where the same state would mean another update here, it is refused.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from samestep.checkpoint.sources import Collected
from samestep.checkpoint.storage import CheckpointError
from samestep.groups.group_keys import without_keys_for_torchs_muon
from samestep.groups.param_groups import own_spelling
from samestep.presets import preset_options
from samestep.rules import RULES

Group = Mapping[str, Any]
MOMENTS = {key: key for key in ("exp_avg", "exp_avg_sq", "step", "max_exp_avg_sq")}
MOONLIGHT = {"moment1": "exp_avg", "moment2": "exp_avg_sq", "step": "step"}
OF_DION = {"momentum": "exp_avg", "variance": "exp_avg_sq", "step_dev": "step"}
NUMBERS = ("lr", "initial_lr", "betas", "eps", "weight_decay", "momentum", "maximize", "nesterov")
OTHERS = {  # their state means nothing here
    "Q": "Dion keeps a low-rank basis",
    "row_var": "Adafactor keeps factors",
    "exp_avg_sq_row": "Adafactor keeps factors",
    "square_avg": "it is of RMSprop or Adadelta",
    "sum": "it is of Adagrad",
    "GG": "Shampoo and SOAP keep factors",
}


class Meaning(NamedTuple):
    """The state of one parameter in samestep's names."""

    rule: str
    keys: dict[str, str]  # theirs: ours
    options: dict[str, Any]
    by: str  # whose optimizer it is


def meaning(name: str, keys: Collection[str], group: Group) -> Meaning:
    """Translate a parameter's state; raises if samestep has no equivalent."""
    if "rule" in group:  # ours
        own = {key: key for key in keys}
        group = without_keys_for_torchs_muon(group)
        return Meaning(group["rule"], own, _known(group["rule"], group), "samestep")
    if "algorithm" in group:
        return _of_dion(name, keys, group)
    if {"exp_avg", "exp_avg_sq"} <= set(keys):
        return Meaning("adamw", _there(MOMENTS, keys), _adamw(name, group), "torch.optim")
    if {"moment1", "moment2"} <= set(keys):
        options = preset_options("moonlight", "adamw") | _of_moonlight(group)
        return Meaning("adamw", _there(MOONLIGHT, keys), _known("adamw", options), "moonlight")
    if "momentum_buffer" in keys:
        return _muon(name, keys, group)
    reason = next((why for key, why in OTHERS.items() if key in keys), "it is of another optimizer")
    raise CheckpointError(
        f"the state of {name!r} has the keys {sorted(keys)}, which no rule of samestep "
        f"has ({reason}): convert the model alone with --only model, and begin with new "
        "optimizer state"
    )


def _there(wanted: Mapping[str, str], keys: Collection[str]) -> dict[str, str]:
    return {theirs: ours for theirs, ours in wanted.items() if theirs in keys}


def _adamw(name: str, group: Group) -> dict[str, Any]:
    decoupled = group.get("decoupled_weight_decay", True)
    if not decoupled and float(group.get("weight_decay", 0)):
        raise CheckpointError(
            f"{name!r} was trained by Adam with weight_decay {group['weight_decay']}, "
            "which Adam adds to gradients (L2), so that it is part of its moments; "
            "AdamW keeps it apart. Convert the model alone with --only model, or train "
            "on with weight_decay 0 there and save again"
        )
    if group.get("bias_correction") is False or group.get("correct_bias") is False:
        raise CheckpointError(
            f"{name!r} was trained by an Adam without bias correction, and samestep "
            "always corrects: its steps would differ. Convert the model alone with "
            "--only model"
        )
    return _known("adamw", group)


def _muon(name: str, keys: Collection[str], group: Group) -> Meaning:
    if "dampening" in group:
        raise CheckpointError(
            f"{name!r} was trained by SGD with momentum, and samestep has no such rule: "
            "convert the model alone with --only model"
        )
    found = {"momentum_buffer": "momentum_buffer"}
    if "adamw_betas" in group and "wd" in group:  # whose Muon sums
        form = _form_of("moonlight")
        options = form | _of_moonlight(group) | {"eps": form["eps"]}  # its own is of AdamW
        return Meaning("muon", found, _known("muon", options), "moonlight")
    if "use_muon" in group:
        preset = "keller"
    elif "ns_coefficients" in group or "adjust_lr_fn" in group:
        preset = "torch"
    else:  # Megatron's, whose files do not say how it scales: that stays as the loader has it
        options = {"momentum_form": "ema", **group}
        return Meaning("muon", found, _known("muon", options), "emerging_optimizers")
    try:
        options = _form_of(preset) | own_spelling(dict(group))
    except ValueError as error:
        raise CheckpointError(
            f"{name!r} was trained with adjust_lr_fn={group['adjust_lr_fn']!r}, which "
            f"samestep does not know ({error}): convert the model alone with --only "
            "model"
        ) from None
    return Meaning("muon", found, _known("muon", options), preset)


def _of_moonlight(group: Group) -> dict[str, Any]:
    """Whether groups have options of both rules under Moonlight's names."""
    spelled = {"wd": "weight_decay", "adamw_betas": "betas", "adamw_eps": "eps"}
    same = {"ns_steps": group["ns_steps"]} if "ns_steps" in group else {}
    return (
        _numbers(group) | same | {own: group[key] for key, own in spelled.items() if key in group}
    )


def _form_of(preset: str) -> dict[str, Any]:
    """Options of Muon that a state file lacks: the form of its momentum, and its divisor."""
    keys = ("momentum_form", "nesterov", "orthogonalize", "eps", "eps_form", "adjust_lr")
    options = preset_options(preset, "muon")
    return {key: options[key] for key in keys if key in options}


def _of_dion(name: str, keys: Collection[str], group: Group) -> Meaning:
    """Translate options of github.com/microsoft/dion, whose momentum is a sum, mu m + g."""
    algorithm = group["algorithm"]
    numbers = _numbers(group) | {"eps": group["epsilon"]}
    if algorithm == "adamw":
        options = numbers | {
            "betas": (group["beta1"], group["beta2"]),
            "cautious": group.get("cautious_wd", False),
        }
        return Meaning("adamw", _there(OF_DION, keys), _known("adamw", options), "dion")
    if algorithm not in ("muon", "normuon"):
        raise CheckpointError(
            f"{name!r} was trained by dion's {algorithm!r}, and samestep has no such "
            "rule: convert the model alone with --only model"
        )
    # What files do not say, such as its polynomial and how it divides by the norm, is its default.
    preset = "dion_normuon" if algorithm == "normuon" else "dion"
    options = (
        preset_options(preset, "muon")
        | numbers
        | {
            "momentum": group["mu"],
            "momentum_form": "sum",
            "nesterov": group["nesterov"],
            "adjust_lr": _dions_rate(group["adjust_lr"]),
            "cautious": group.get("cautious_wd", False),
        }
    )
    found = {"momentum": "momentum_buffer"}
    if algorithm == "normuon":
        found["variance_neuron"] = "variance"
        options["variance_beta2"] = group["muon_beta2"]
    return Meaning("muon", found, _known("muon", options), "dion")


def _dions_rate(adjust_lr: str | None) -> str | None:
    """Translate the name of a state tensor of dion; unknown ones are kept, and refused later."""
    ours = {"rms_norm": "match_rms_adamw", "spectral_norm": "unit_rms_norm"}
    return adjust_lr if adjust_lr is None else ours.get(adjust_lr, adjust_lr)


def _numbers(group: Group) -> dict[str, Any]:
    return {key: group[key] for key in NUMBERS if key in group}


def _known(rule: str, options: Group) -> dict[str, Any]:
    """The options of a group that its rule has, as plain numbers."""
    keys = ("maximize", "initial_lr", *RULES[rule].defaults)
    kept = {key: options[key] for key in keys if key in options}
    plain = {
        k: v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for k, v in kept.items()
    }
    plain.pop("fused", None)  # how it was computed, which is nobody's business here
    return {"rule": rule, **plain}


class Translated(NamedTuple):
    """A parameter's state, with the step count that its group had."""

    name: str
    meaning: Meaning
    step: Any


def in_our_words(
    collected: Collected, groups: Iterable[Group], keys_of: Mapping[str, Collection[str]]
) -> list[Translated]:
    """Translate groups whose "params" are names; `keys_of` has the state keys of each."""
    found = []
    for place, group in enumerate(groups):
        for name in group["params"]:
            if keys_of.get(name):
                own = meaning(name, keys_of[name], group)
                counts = own.rule == "adamw" and "step" not in own.keys.values()
                found.append(Translated(name, own, group.get("step") if counts else None))
                collected.add_options(place, name, own.options)
    return found
