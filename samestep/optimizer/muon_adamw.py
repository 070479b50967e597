"""The public optimizers: they turn arguments into parameter groups."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from inspect import signature
from math import prod
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from samestep.groups.crossover import read_crossover
from samestep.groups.distribution import Distribution
from samestep.groups.group_keys import without_ways_of_torch
from samestep.groups.mistakes import averages_with_ddp
from samestep.groups.param_groups import (
    Group,
    check_adjust_lr_fn,
    check_pair,
    own_spelling,
    parameter_names,
    unknown_option,
)
from samestep.groups.routing import ROLES as ALL_ROLES
from samestep.groups.routing import (
    NamedParameter,
    Overrides,
    Routable,
    routable,
    route,
    route_explicit,
    warn_of_fused_members,
)
from samestep.groups.step_options import GradLimit, StepOptions
from samestep.layout.fused_rows import without_wrappers
from samestep.optimizer.rule_optimizer import Params, RuleOptimizer, built_together
from samestep.presets import KERNEL_SCALED, PRESETS, preset_options
from samestep.recipes import RECIPES, known_of
from samestep.rules import RULES, checks
from samestep.rules.adamw import AdamWRule
from samestep.rules.muon import MuonRule, lr_factor
from samestep.tooling.warn import warn_user

SHARED = ("lr", "weight_decay", "maximize")  # one keyword, every rule
ROLES = ("matrix", "embedding", "unembedding", "scalar")
ROLE_OPTIONS = {
    f"{role}_{short}": (role, key)
    for short, key in (("lr", "lr"), ("decay", "weight_decay"))
    for role in ROLES
}


def _preset(name: str, value: Any) -> None:
    if not isinstance(value, str) or value not in PRESETS:
        raise ValueError(
            f"{name} {checks.shown(value)} is not known; choose one of {sorted(PRESETS)}"
        )


def _recipe(name: str, value: Any) -> None:
    is_known = isinstance(value, str) and (value == "auto" or value in RECIPES)
    if not (is_known or value is None or isinstance(value, Mapping)):
        raise ValueError(
            f"{name} {checks.shown(value)} is not known; choose one of {sorted(RECIPES)}, or "
            '"auto", None, or group keys by name of a parameter'
        )


def _overrides(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(
            f"{name} must be a mapping of name patterns or predicates to group keys, such as "
            f'{{"head.*": {{"lr": 1e-3}}}}, got {checks.shown(value)}'
        )


def _groups(name: str, value: Any) -> None:
    items = value if isinstance(value, list | tuple) else ()
    no_list = not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping | Tensor)
    if no_list or not all(isinstance(item, Mapping) for item in items):
        raise TypeError(
            f'{name}: must be a list of dicts with the key "params" (a name pattern, a predicate '
            f"or a list of them), got {checks.shown(value)}"
        )


def _no_decay(name: str, value: Any) -> None:
    roles = [value] if isinstance(value, str) else value
    if not isinstance(roles, list | tuple | set | frozenset):
        raise TypeError(
            f'{name} must be a role or several, such as ("scalar", "embedding"), '
            f"got {checks.shown(value)}"
        )
    for role in roles:
        if not isinstance(role, str) or role not in ALL_ROLES:
            raise ValueError(
                f"{name} has {checks.shown(role)}, which is no role of a parameter: "
                f"choose from {', '.join(ALL_ROLES)}, where norms, biases and other "
                f'vectors are "scalar"; for single parameters overrides={{"<pattern>": '
                f'{{"weight_decay": 0.0}}}}'
            )


# What keywords take, of every optimizer; `StepOptions` and `Distribution` check their own.
TAKEN: Mapping[str, checks.Check] = {
    **MuonRule.taken,
    **AdamWRule.taken,
    "fused": checks.boolean_or_none,
    "maximize": checks.boolean,
    "adjust_lr_fn": check_adjust_lr_fn,
    **{
        keyword: checks.learning_rate if key == "lr" else checks.not_negative
        for keyword, (_, key) in ROLE_OPTIONS.items()
    },
    "preset": checks.optional(_preset),
    "recipe": _recipe,
    "overrides": checks.optional(_overrides),
    "groups": checks.optional(_groups),
    "no_decay": _no_decay,
}


class CommonOptions(TypedDict, total=False):
    """Keywords of every optimizer: see `StepOptions` and, for those about ranks, `Distribution`."""

    master_weights: bool | None
    max_grad_norm: GradLimit
    update_rms: bool
    compile: bool | str
    cuda_graph: bool | None
    sharding: str
    buffers: str
    reduction: str
    reduce_dtype: torch.dtype | None
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    poison_early_reads: bool
    grads: str
    grad_dtype: torch.dtype | None
    process_group: Any
    outer_group: Any
    stage_group: Any
    crossover: int | str | Path
    bucket_size: int | None
    ranks_per_host: int | None
    two_levels: bool | None
    waves: int
    owners: str
    max_state_ratio: float | None
    muon_schedule: str
    chunk_size: int | None
    chunks_ahead: int
    block_dtype: torch.dtype | None
    check_gradients: bool
    state_dict_form: str
    deferred: bool
    strict: bool
    offload: str | None
    foreach: bool | None  # torch's; see `samestep.groups.group_keys.WAYS_OF_TORCH`
    capturable: bool
    differentiable: bool


class MuonOptions(CommonOptions, total=False):
    """Group keys of the rule "muon" beside the shared ones; see `samestep.rules.muon`."""

    batch_elements: int | None
    momentum: float
    momentum_form: str
    nesterov: bool
    equilibrate: bool
    orthogonalize: str
    norm_factor: float | None
    ns_steps: int
    ns_coefficients: Any
    ns_start: str
    execution: str | None
    eps_form: str
    renormalize: bool
    variance_beta2: float | None
    variance_axis: str
    variance_eps: float
    variance_eps_form: str
    adjust_lr: str | None
    adjust_lr_fn: str | None
    update_scale: float
    cautious: bool
    scale_decay: bool
    decay_form: str
    split_sizes: Any
    flatten: bool
    transposed: bool
    compute_dtype: torch.dtype | None
    state_dtypes: Mapping[str, torch.dtype | str] | str | None


class MuonAdamWOptions(MuonOptions, total=False):
    """Keywords of `MuonAdamW`; what is not given comes from the preset or the default."""

    weight_decay: float
    maximize: bool
    betas: tuple[float, float]
    eps: float
    amsgrad: bool
    eps_hat: bool
    fused: bool | None
    matrix_lr: float | Tensor
    embedding_lr: float | Tensor
    unembedding_lr: float | Tensor
    scalar_lr: float | Tensor
    matrix_decay: float
    embedding_decay: float
    unembedding_decay: float
    scalar_decay: float


class MuonAdamW(RuleOptimizer):
    """Muon for hidden matrices, AdamW for everything else, in one optimizer.

        opt = samestep.MuonAdamW(model, lr=3e-4)
        loss.backward(); opt.step(); opt.zero_grad()

    `params` is a model (also wrapped in DDP or compiled), named parameters, or group dicts
    `{"params": [...], "rule": "muon" | "adamw", ...}`. A model is routed: hidden 2-D weights to
    Muon; embeddings, output heads, norms, biases, scalars, LoRA factors and convolutions to
    AdamW. `print(opt.table())` shows the outcome.

    One `lr` serves both rules, since Muon's updates are scaled to the size of AdamW's
    (`adjust_lr="match_rms_adamw"`): an AdamW learning rate can be reused.

    Arguments:
        lr: learning rate of every role without one of its own. None: 1e-3, or the preset's. A
            tensor is copied for each group.
        matrix_lr, embedding_lr, unembedding_lr, scalar_lr: learning rate of a role.
        weight_decay, decay_form, maximize: for both rules (default decay 0.1).
        matrix_decay, embedding_decay, unembedding_decay, scalar_decay: weight decay of a role.
        no_decay: roles without weight decay: `("scalar", "embedding")` are norms, biases and other
            vectors, and embeddings.
        betas, eps, eps_hat, amsgrad, fused: AdamW's (defaults (0.9, 0.95), 1e-8, all False); its
            `cautious` is a group key.
        momentum, nesterov, variance_beta2, cautious, orthogonalize, ns_steps, adjust_lr,
            split_sizes, compute_dtype, ...: Muon's; `samestep.rules.muon` lists all.
        preset: defaults of another implementation: "torch", "keller", "moonlight", "nanochat",
            "dion", ...; `samestep.presets` has them all.
        recipe: fused weights, expert stacks and routers: "auto" finds them by
            `model.config.model_type`; a name of `samestep.recipes.RECIPES`; what
            `samestep.recipes.known_of` gives; None: none. Overrides win.
        overrides: {pattern or predicate(name, param): {key: value}}: rule and group keys of the
            parameters that it matches.
        groups: instead of routing, group dicts whose "params" are patterns or predicates; every
            parameter must be in exactly one.
        state_dtypes: keep moments, or master weights, in fewer bits: "8bit" or "bf16_stochastic"
            for all moments, or {"exp_avg": torch.bfloat16, "master_weight": "remainder", ...}.
        master_weights, max_grad_norm, update_rms, compile, cuda_graph, batch_elements: how a step
            is taken; `samestep.groups.step_options.StepOptions` tells of each.
        sharding, buffers, reduction, overlap_grad_reduce, process_group, offload, ...: what ranks
            share, and where state stays; `samestep.groups.distribution.Distribution` tells of each.
    """

    @built_together
    def __init__(
        self,
        params: Params,
        lr: float | Tensor | None = None,
        *,
        preset: str | None = None,
        recipe: str | Mapping[str, Group] | None = "auto",
        overrides: Overrides | None = None,
        groups: Iterable[Mapping[str, Any]] | None = None,
        no_decay: str | Collection[str] = (),
        **options: Unpack[MuonAdamWOptions],
    ) -> None:
        params = _listed(params)
        own: Group = {
            "preset": preset, "recipe": recipe, "overrides": overrides, "groups": groups,
            "no_decay": no_decay,
        }  # fmt: skip
        checks.every(TAKEN, own if lr is None else {**own, "lr": lr})
        steps, distribution, given = _sorted_out(params, options, MuonAdamWOptions, MuonAdamW)
        model = params if isinstance(params, nn.Module) else None
        params, named = _with_names(params)
        by_role: dict[str, Group] = {}
        for keyword, (role, key) in ROLE_OPTIONS.items():
            if keyword in given:
                by_role.setdefault(role, {})[key] = given.pop(keyword)
        still = _roles(no_decay)
        for role in still if groups is None and named is not None else ():
            own_decay = by_role.setdefault(role, {}).setdefault("weight_decay", 0.0)
            if own_decay != 0:
                raise ValueError(
                    f"no_decay has {role!r}, and {role}_decay is {own_decay}: leave one of them out"
                )
        if lr is not None:
            given["lr"] = lr
        muon_keys = {*MuonRule.defaults, "maximize"} - {"eps"}  # the keyword eps is AdamW's
        adamw_keys = {*AdamWRule.defaults, "maximize"} - {"cautious"}  # and that one is Muon's
        rule_options = {
            "muon": {
                "weight_decay": 0.1,
                **(preset_options(preset, "muon") if preset else {}),
                **{key: value for key, value in given.items() if key in muon_keys},
            },
            "adamw": {
                "weight_decay": 0.1,
                "betas": (0.9, 0.95),
                **(preset_options(preset, "adamw") if preset else {}),
                **{key: value for key, value in given.items() if key in adamw_keys},
            },
        }
        for rule in RULES.values():  # one's own rules take what both of ours share
            if rule.name not in rule_options:
                shared = {key: given[key] for key in SHARED if key in given}
                rule_options[rule.name] = {k: v for k, v in shared.items() if k in rule.defaults}
        has_own_rate = "lr" in by_role.get("matrix", {})
        if named is not None and groups is None and lr is not None and not has_own_rate:
            _refuse_one_rate(preset)
        if recipe not in ("auto", None) and (model is None or groups is not None):
            raise ValueError(
                f"recipe={checks.shown(recipe)} needs a model whose parameters it routes, and "
                "parameters or groups were given: pass overrides=samestep.recipes.overrides(model, "
                "recipe) with named parameters"
            )
        order_of_use = [] if named is None else [param for _, param, _ in named.parameters]
        reasons: dict[str, str] = {}
        if named is not None:
            known = {}
            if model is not None and groups is None:
                known = known_of(model, named.parameters, recipe)
            params, reasons = _routed(
                named, overrides, groups, by_role, rule_options["muon"], known, still
            )
        else:
            asked = {
                "overrides": overrides,
                "groups": groups,
                "per-role learning rates and decays": by_role,
                "no_decay": still,
            }
            for what, value in asked.items():
                if value:
                    raise ValueError(
                        f"{what} need a model or named parameters to work on, and group dicts or "
                        "plain parameters were given: set the keys in the groups instead"
                    )
        # Schedulers that cycle momentum look for this key, and here it is Muon's.
        muon = {**MuonRule.defaults, **rule_options["muon"]}
        defaults = {key: muon[key] for key in ("lr", "momentum", "weight_decay")}
        super().__init__(
            params,
            defaults,
            rule_options,
            steps,
            distribution,
            model=model,
            order_of_use=order_of_use,
        )
        self._reasons = reasons
        if named is None or groups is not None:
            warn_of_fused_members(self.param_groups)
        _tell_of_convolutions(preset, self.param_groups)


class Muon(RuleOptimizer):
    """Muon for every parameter: 2-D weights and 3-D stacks. Options as in `MuonAdamW`.

    The arguments of `torch.optim.Muon` with other defaults (Polar Express, `match_rms_adamw`);
    `samestep.presets.torch()` has torch's. A tensor `lr` is copied for each group.
    """

    @built_together
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        *,
        eps: float = 1e-7,
        maximize: bool = False,
        **options: Unpack[MuonOptions],
    ) -> None:
        params = _listed(params)
        own = {"lr": lr, "weight_decay": weight_decay, "eps": eps, "maximize": maximize}
        checks.every(TAKEN, own)
        steps, distribution, rest = _sorted_out(params, options, MuonOptions, Muon)
        given = {**own, **rest}
        super().__init__(
            params,
            {"rule": "muon", "momentum": MuonRule.defaults["momentum"], **given},
            {"muon": given},
            steps,
            distribution,
        )
        warn_of_fused_members(self.param_groups)


class AdamW(RuleOptimizer):
    """AdamW for every parameter: the numbers of `torch.optim.AdamW`, bit for bit in fp32 on CPU.

    With `fused=True` those of torch's fused form, in about half the time; for parameters on CPU.
    (On x86 torch rounds what is left after the last 64 elements otherwise; ours, sharded or not,
    does not.)
    16-bit parameters keep fp32 moments, unlike torch's. A tensor `lr` is copied for each group.
    `no_decay=("scalar", "embedding")`, of a model or named parameters, leaves norms, biases, other
    vectors and embeddings without weight decay.
    """

    @built_together
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        eps_hat: bool = False,
        cautious: bool = False,
        decay_form: str = "decoupled",
        fused: bool | None = False,
        state_dtypes: Mapping[str, torch.dtype | str] | str | None = None,
        no_decay: str | Collection[str] = (),
        **options: Unpack[CommonOptions],
    ) -> None:
        params = _listed(params)
        given = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "amsgrad": amsgrad, "eps_hat": eps_hat, "cautious": cautious,
            "decay_form": decay_form, "fused": fused, "maximize": maximize,
            "state_dtypes": state_dtypes,
        }  # fmt: skip
        checks.every(TAKEN, {**given, "no_decay": no_decay})
        given = own_spelling(given)
        steps, distribution, _ = _sorted_out(params, options, CommonOptions, AdamW)
        model = params if isinstance(params, nn.Module) else None
        if still := _roles(no_decay):
            _, named = _with_names(params)
            if named is None:
                raise ValueError(
                    "no_decay needs a model or named parameters to know roles, and group dicts or "
                    'plain parameters were given: set "weight_decay": 0.0 in the groups instead'
                )
            params = route_explicit(named, [{"params": "*"}], still)
        super().__init__(
            params,
            {"rule": "adamw", **given},
            {"adamw": given},
            steps,
            distribution,
            model=model,
        )


def _refuse_one_rate(preset: str | None) -> None:
    """Raise for a single `lr` with a preset whose rules need different ones."""
    if preset is None:
        return
    muon, adamw = (preset_options(preset, rule)["lr"] for rule in ("muon", "adamw"))
    if muon != adamw:
        raise ValueError(
            f"preset {preset!r} has two learning rates, {muon:g} for Muon and {adamw:g} "
            "for AdamW, and lr= alone would set both: pass matrix_lr= for Muon and lr= "
            "for AdamW (or embedding_lr=, unembedding_lr=, scalar_lr=), or leave them "
            "out for the preset's"
        )


def _tell_of_convolutions(preset: str | None, groups: Sequence[Group]) -> None:
    """Warn for presets whose original treats convolutions differently."""
    if preset not in KERNEL_SCALED:
        return
    for index, group in enumerate(groups):
        if not group.get("flatten") or group.get("adjust_lr") != "original":
            continue
        for name, param in zip(parameter_names(group, index), group["params"], strict=True):
            if param.ndim != 4 or 0 in param.shape:
                continue
            ours = lr_factor(param.shape[0], prod(param.shape[1:]), "original")
            theirs = lr_factor(param.shape[2], param.shape[3], "original")
            if ours != theirs:
                warn_user(
                    f"preset {preset!r}: the original scales a convolution by its kernel, "
                    f"{theirs:.3g} for {name} {tuple(param.shape)}, and here it is scaled as the "
                    f"matrix (out, all the rest), {ours:.3g}. For the original's add to its "
                    f'overrides "adjust_lr": None and "update_scale": {theirs:.6g}'
                )
                return


def _roles(no_decay: str | Collection[str]) -> tuple[str, ...]:
    return (no_decay,) if isinstance(no_decay, str) else tuple(no_decay)


def _listed(params: Params) -> Params:
    """Parameters as a list."""
    if not isinstance(params, nn.Module | Iterable) or isinstance(params, str | bytes | Mapping):
        raise TypeError(
            "params must be a model, parameters, (name, parameter) pairs or a list of group dicts, "
            f"got {checks.shown(params)} of type {type(params).__name__}"
        )
    if isinstance(params, Iterator):
        params = list(params)
    if isinstance(params, list | tuple) and any(map(_has_iterator, params)):
        return [
            {**item, "params": list(item["params"])} if _has_iterator(item) else item
            for item in params
        ]
    return params


def _has_iterator(item: Any) -> bool:
    """Whether a group dict holds an iterator, which can be read only once."""
    return isinstance(item, Mapping) and isinstance(item.get("params"), Iterator)


def _sorted_out(
    params: Params, given: Mapping[str, Any], known: type, of: type
) -> tuple[StepOptions, Distribution, Group]:
    """Split keywords into options of steps, of ranks and of rules.

    `known`: the keywords that `of`, an optimizer, takes beside those it spells out.
    """
    given = without_ways_of_torch(given, fused="fused" in known.__annotations__)
    for name in given:
        if name not in known.__annotations__:
            spelled_out = signature(of).parameters.keys() - {"params", "options"}
            raise unknown_option(name, {**known.__annotations__, **dict.fromkeys(spelled_out)})
    checks.every(TAKEN, given)
    options = own_spelling(given)
    of_steps = {key: options.pop(key) for key in StepOptions.__annotations__ if key in options}
    of_ranks = {key: options.pop(key) for key in Distribution.__annotations__ if key in options}
    if averages_with_ddp(params):  # which has reduced its gradients already
        of_ranks.setdefault("grads", "reduced")
    if isinstance(of_ranks.get("crossover"), str | Path):
        of_ranks["crossover"] = read_crossover(of_ranks["crossover"])
    return StepOptions(**of_steps), Distribution(**of_ranks), options


def _with_names(params: Params) -> tuple[Params, Routable | None]:
    """Parameters, and their names where a model or pairs were given."""
    if isinstance(params, nn.Module):
        return params, routable(params)
    if isinstance(params, Tensor):
        return params, None  # torch has the error for it
    items: list[Any] = list(params)
    if items and all(isinstance(item, tuple) for item in items):
        for item in items:
            check_pair(item)
        # Integers cannot require gradients: they stay in, to be refused by name.
        trainable = [
            pair for pair in items if pair[1].requires_grad or not pair[1].is_floating_point()
        ]
        return items, Routable([NamedParameter(without_wrappers(name), p) for name, p in trainable])
    return items, None


def _routed(
    named: Routable,
    overrides: Overrides | None,
    groups: Iterable[Mapping[str, Any]] | None,
    by_role: Mapping[str, Group],
    muon_options: Group,
    known: Mapping[str, Group],
    no_decay: Collection[str],
) -> tuple[list[Group], dict[str, str]]:
    """Groups for named parameters, with reasons.

    The keyword `split_sizes` moves from the rule to its members; `known` is what a recipe says.
    """
    if groups is not None:
        if overrides or by_role:
            raise ValueError(
                "groups= cannot be combined with overrides= or with learning rates and "
                "weight decays of roles: set these keys in the groups"
            )
        return route_explicit(named, groups, no_decay), {}
    splits = muon_options.pop("split_sizes", None)
    transposed = bool(muon_options.get("transposed", False))
    return route(named, overrides, by_role, splits, known, transposed=transposed)
