"""Finds group keys without effect: those of another rule, and other libraries' spellings.

Trainers store keys of their own in groups (`initial_lr`, `name`, `layer_id`, ...), so a key that
nobody knows is kept. One that we know, on a rule that does not read it, is a mistake that changes
the training: it raises, and says what to write instead.
"""

import difflib
from collections.abc import Mapping
from typing import Any, NamedTuple

from samestep.groups.distribution import Distribution
from samestep.groups.step_options import StepOptions
from samestep.rules import RULES, checks
from samestep.rules.rule import Rule

# Keywords of an optimizer that concern all of its groups.
OF_THE_OPTIMIZER = {
    *Distribution.__annotations__, *StepOptions.__annotations__, "preset", "overrides", "groups",
    "matrix_lr", "embedding_lr", "unembedding_lr", "scalar_lr", "matrix_decay", "embedding_decay",
    "unembedding_decay", "scalar_decay", "recipe", "no_decay",
} - {"process_group"}  # fmt: skip
# Every rule goes with these; "role" is what routing found.
OF_EVERY_GROUP = {
    "params", "param_names", "rule", "role", "lr", "maximize", "process_group", "divisor",
    "state_dtypes",
}  # fmt: skip
# How a matrix rule cuts parameters into blocks; also of rules that do not list them.
CUTS = ("split_sizes", "flatten", "transposed")
# Spellings of others that a group may be made with, and ours, under which it has them afterwards:
# torch.optim.Muon's and torchtitan's, and that of the document about MegaCpp's optimizers.
ALIASES = {"adjust_lr_fn": "adjust_lr", "qkv_split_sizes": "split_sizes"}
ALGORITHMS = ("muon", "normuon", "adamw", "adam", "lion", "dion", "dion2", "sgd")


class Peer(NamedTuple):
    """An option's name in another library and in samestep."""

    whose: str
    here: str
    harmless: tuple[object, ...] = ()  # values that ask for what is done here anyway
    harmful: tuple[object, ...] = ()  # if not empty: only these are that library's


_EMERGING = "Megatron's (Emerging-Optimizers)"
_OF_ROLE = '{} of MuonAdamW, or "lr" of a group with "rule": "{}"'
_RULE = '"rule": "muon" or "rule": "adamw"'
_DECAYS = '"decoupled", "independent" or, of rule "adamw", "l2"'
PEERS = {
    "mu": Peer("dion's", '"momentum"'),
    "epsilon": Peer("dion's", '"eps"'),
    "cautious_wd": Peer("dion's", '"cautious"'),
    "num_heads": Peer("dion's", '"split_sizes", with the rows of each head', harmless=(None,)),
    "muon_beta2": Peer("dion's", '"variance_beta2"'),
    "algorithm": Peer("dion's", _RULE, harmful=ALGORITHMS),
    "use_polar_express": Peer("dion's", '"orthogonalize": "polar-express" or "newton-schulz"'),
    "use_gram_newton_schulz": Peer("dion's", '"execution": "gram" or "standard"'),
    "newton_schulz_func": Peer("dion's", '"orthogonalize" and "ns_coefficients"', harmless=(None,)),
    "beta1": Peer("dion's and torchtitan's", '"betas": (beta1, beta2), of rule "adamw"'),
    "beta2": Peer(
        "dion's, nanochat's and torchtitan's",
        '"variance_beta2" on rule "muon", and "betas": (beta1, beta2) on rule "adamw"',
    ),
    "wd": Peer("Moonlight's", '"weight_decay"'),
    "adamw_lr": Peer("Moonlight's", _OF_ROLE.format("lr= beside matrix_lr=", "adamw")),
    "adamw_wd": Peer("Moonlight's", '"weight_decay" of a group with "rule": "adamw"'),
    "adamw_betas": Peer("Moonlight's", '"betas" of a group with "rule": "adamw"'),
    "adamw_eps": Peer("Moonlight's", '"eps" of a group with "rule": "adamw"'),
    "matched_adamw_rms": Peer(
        "Moonlight's", '"adjust_lr": "match_rms_adamw", whose factor is 0.2', harmless=(0.2,)
    ),
    "use_muon": Peer("Keller Jordan's and DeepSpeed's", _RULE),
    "backend_steps": Peer("Keller Jordan's", '"ns_steps"'),
    "kind": Peer("nanochat's", _RULE, harmful=ALGORITHMS),
    "momentum_beta": Peer(_EMERGING, '"momentum"'),
    "use_nesterov": Peer(_EMERGING, '"nesterov"'),
    "num_ns_steps": Peer(_EMERGING, '"ns_steps"'),
    "coefficient_type": Peer(
        _EMERGING,
        '"orthogonalize": "newton-schulz" for its "simple", "quintic", "cans", "aol", '
        '"deepseek-v4", "cubic" or "polar-express"',
    ),
    "scale_mode": Peer(
        _EMERGING,
        '"adjust_lr": "sqrt_max" for its "spectral", "original" for its "shape_scaling", or '
        '"unit_rms_norm"',
    ),
    "extra_scale_factor": Peer(_EMERGING, '"update_scale"'),
    "fp32_matmul_prec": Peer(_EMERGING, '"compute_dtype"'),
    "split_qkv": Peer(_EMERGING, '"split_sizes"', harmless=(False,)),
    "qkv_split_shapes": Peer(
        _EMERGING,
        '"split_sizes": "interleaved:Q+K+VxGROUPS", with the rows of one group',
        harmless=(None,),
    ),
    "is_qkv_fn": Peer(_EMERGING, '"split_sizes", which takes name patterns', harmless=(None,)),
    "weight_decay_method": Peer(_EMERGING, f'"decay_form": {_DECAYS}', harmless=("decoupled",)),
    "use_decoupled_weight_decay": Peer(_EMERGING, f'"decay_form": {_DECAYS}', harmless=(True,)),
    "decoupled_weight_decay": Peer("torch's", f'"decay_form": {_DECAYS}', harmless=(True,)),
    "adam_w_mode": Peer("DeepSpeed's", f'"decay_form": {_DECAYS}', harmless=(True,)),
    "bias_correction": Peer("DeepSpeed's", "always corrected: leave it out", harmless=(True,)),
    "dampening": Peer("torch.optim.SGD's", '"momentum_form": "ema" or "sum"', harmless=(0,)),
    "muon_lr": Peer("DeepSpeed's", _OF_ROLE.format("matrix_lr=", "muon")),
    "adam_lr": Peer("DeepSpeed's", _OF_ROLE.format("lr= beside matrix_lr=", "adamw")),
    "learning_rate": Peer("Hugging Face's and Keras's", '"lr"'),
}


# How torch's optimizers may compute their steps, which frameworks pass on to any optimizer: why
# what they ask for is not done, and the way out. None and False ask for nothing, and so does
# foreach, since parameters are updated together anyway.
_AWAY = "leave it out"
WAYS_OF_TORCH = {
    "foreach": None,
    "capturable": (
        "capturable=True is for a CUDA graph around step(), which would freeze the "
        f"learning rate of its recording: {_AWAY}; cuda_graph=True replays a step as a "
        "graph whose learning rate can change"
    ),
    "differentiable": (
        "differentiable=True is not supported, since steps are invisible to autograd: "
        f"{_AWAY}, or use torch's optimizer for these parameters"
    ),
    "fused": (
        "fused=True is torch's kernel for AdamW, and Muon has none: "
        f"{_AWAY}; its matrices are updated together anyway"
    ),
}


def without_ways_of_torch(options: Mapping[str, Any], *, fused: bool) -> dict[str, Any]:
    """Drop torch's keywords about execution, such as foreach; raises if one asks for more.

    `fused`: it is an option of ours.
    """
    ways = {*WAYS_OF_TORCH} - ({"fused"} if fused else set())
    for key in sorted(ways & options.keys()):
        checks.boolean_or_none(key, options[key])
        reason = why_not_this_way(key, options[key])
        if reason is not None:
            raise ValueError(reason)
    return {key: value for key, value in options.items() if key not in ways}


def why_not_this_way(key: str, value: Any) -> str | None:
    """Return the reason that a keyword of torch is not supported; None if it has no effect."""
    return WAYS_OF_TORCH.get(key) if value is True else None


# What torch.optim.Muon reads in a group, where it is None here: its own Newton-Schulz.
_NEWTON_SCHULZ: dict[str, Any] = {"ns_coefficients": (3.4445, -4.7750, 2.0315), "ns_steps": 5}
FOR_TORCH = "for_torch"  # in a saved group: the keys that are there for torch.optim.Muon
# What torch.optim.Muon always does, in our words.
_TORCHS_MUON: dict[str, Any] = {
    "momentum_form": "ema", "equilibrate": False, "eps_form": "clamp", "renormalize": False,
    "variance_beta2": None, "update_scale": 1.0, "cautious": False, "decay_form": "decoupled",
    "scale_decay": False, "split_sizes": None, "flatten": False, "transposed": False,
    "maximize": False,
}  # fmt: skip
_ADJUSTED_BY_TORCH = ("original", "match_rms_adamw")


def with_keys_of_torchs_muon(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A saved group with the keys that torch.optim.Muon reads.

    Its polynomial is Newton-Schulz, whatever it is here. Nothing is added where torch's would go on
    with another momentum or update: it then asks for "adjust_lr_fn".
    """
    as_torchs = saved.get("adjust_lr") in _ADJUSTED_BY_TORCH and all(
        saved.get(key, value) == value for key, value in _TORCHS_MUON.items()
    )
    if saved.get("rule") != "muon" or not as_torchs:
        return dict(saved)
    own = {key: value for key, value in _NEWTON_SCHULZ.items() if saved.get(key) is None}
    return {
        **saved, **own, "adjust_lr_fn": saved["adjust_lr"],
        FOR_TORCH: ", ".join((*own, "adjust_lr_fn")),
    }  # fmt: skip


def without_keys_for_torchs_muon(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of `with_keys_of_torchs_muon`, also after training with torch.optim.Muon."""
    own = saved.get(FOR_TORCH, "").split(", ")
    kept = {key: value for key, value in saved.items() if key not in (*own, FOR_TORCH)}
    return {**kept, **{key: None for key in own if key in _NEWTON_SCHULZ}}


def without_keys_of_torch(saved: Mapping[str, Any], rule: Rule) -> dict[str, Any]:
    """A saved group without torch's keys about execution.

    How torch's optimizers computed their steps is not asked for here. Adam's coupled decay is
    nothing where it is 0; nor has momentum ever been that of a rule without it, into whose groups
    schedulers wrote it.
    """
    left_out = {*WAYS_OF_TORCH, "momentum"} - set(rule.defaults)
    if saved.get("weight_decay") == 0:
        left_out.add("decoupled_weight_decay")
    return {key: value for key, value in saved.items() if key not in left_out}


def refuse_lost_keys(group: Mapping[str, Any], *, made: bool = False) -> None:
    """Raise if a key of a group has no effect, whenever it was set.

    made: the group is that of an optimizer, where spellings of others are not read any more.
    """
    name = group.get("rule")
    rule = RULES.get(name) if isinstance(name, str) else None
    known = set() if rule is None else options_of_rule(rule)
    for key in ALIASES.keys() & group.keys() & known if made else ():
        raise ValueError(
            f"{key!r} is only read when a group is added, and would have no effect now: "
            f"set {ALIASES[key]!r}"
        )
    for key in [key for key in group if key not in known]:
        reason = why_lost(key, group[key], rule)
        if reason:
            raise ValueError(reason)


def why_lost(key: str, value: Any, rule: Rule | None) -> str | None:
    """Return the reason that a rule does not read a key, and the key to write instead.

    None: it reads it, or nobody knows it. Of no rule only the spellings of others are told.
    """
    if (rule is None and _readers(key)) or (rule is not None and key in options_of_rule(rule)):
        return None
    if key in WAYS_OF_TORCH and (key != "fused" or value in (None, False)):
        return why_not_this_way(key, value)
    told = said_here(key, value)
    if told is not None:
        return told
    if key in OF_THE_OPTIMIZER:
        return (
            f"{key!r} concerns the whole optimizer, and in a group it does nothing: "
            f"pass {key}= to the optimizer"
        )
    readers = _readers(key)
    if rule is None or not readers:
        return None
    return (
        f"{key!r} is no option of rule {rule.name!r} but of rule "
        f"{' and '.join(readers)}, so it would have no effect: leave it out, or give "
        f"the group the other rule. Options of {rule.name!r} are "
        f"{', '.join(sorted({*rule.defaults, 'maximize'}))}"
    )


def said_here(key: str, value: Any = ...) -> str | None:
    """samestep's way to write another library's key; None if there is nothing to say."""
    peer = PEERS.get(key)
    if peer is None:
        return None
    plain = value is None or isinstance(value, bool | int | float | str)
    if plain and (value in peer.harmless or (peer.harmful and value not in peer.harmful)):
        return None
    if peer.here.startswith("always"):
        return (
            f"{key!r} is {peer.whose}; in samestep weight decay or moments are set by {peer.here}"
        )
    return f"{key!r} is {peer.whose} spelling, which would do nothing here: write {peer.here}"


def likely_option(key: str, rule: Rule) -> str | None:
    """The option that an unknown key probably misspells; None if none is near."""
    close = difflib.get_close_matches(str(key), rule.defaults, n=1, cutoff=0.85)
    return close[0] if close else None


def options_of_rule(rule: Rule) -> set[str]:
    """Keys that a group of this rule may have."""
    cuts = set(CUTS) if rule.kind == "matrix" else set()
    known = {*rule.defaults, *OF_EVERY_GROUP, *cuts}
    return known | {alias for alias, key in ALIASES.items() if key in known}


def _readers(key: str) -> list[str]:
    """Rules that read a key."""
    return [repr(rule.name) for rule in RULES.values() if key in options_of_rule(rule)]
