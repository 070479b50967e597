"""Completes and checks parameter groups."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from samestep.groups.distribution import process_group
from samestep.groups.group_keys import (
    ALIASES,
    CUTS,
    OF_EVERY_GROUP,
    WAYS_OF_TORCH,
    likely_option,
    said_here,
)
from samestep.groups.hints import hint
from samestep.layout.blocks import Block, blocks_of
from samestep.layout.fused_rows import rows_in, whole_name
from samestep.rules import RULES, checks
from samestep.rules.checks import MOMENTS
from samestep.rules.rule import Rule
from samestep.rules.state import MASTER
from samestep.rules.stored import REMAINDER
from samestep.tooling.warn import warn_user

Group = dict[str, Any]
# How parameters are cut and state is kept: no business of the math.
LAYOUT_KEYS = {"split_sizes", "flatten", "transposed", "state_dtypes"}
ADJUST_LR_FN = {
    "original": "original",
    "match_rms_adamw": "match_rms_adamw",
    "spectral_unclamped": "unit_rms_norm",
}
# What keys take that go with every rule; `params` are looked at one by one.
OF_GROUPS: Mapping[str, checks.Check] = {
    "maximize": checks.boolean,
    "role": checks.word,
    "param_names": checks.words,
    "process_group": checks.optional(process_group),
    "divisor": checks.optional(checks.positive),
    **dict.fromkeys(WAYS_OF_TORCH.keys() - {"fused"}, checks.boolean_or_none),
}


class ParamGroup(dict[str, Any]):
    """A parameter group: a dict that also accepts the keys of torch schedulers.

    OneCycleLR and CyclicLR of torch look into the optimizer's defaults for what they cycle, and
    write that key into all groups, beside a "max_momentum" of theirs: "momentum", or the first of
    "betas" where the defaults have these. Whichever it is, the rule's own of the two changes.

    nanochat's loop reads "initial_lr", which is the learning rate when it is first read, unless a
    scheduler has set it, and "kind", which is the rule.
    """

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        if "max_momentum" not in self or key not in ("max_momentum", "momentum", "betas"):
            return
        own, betas = self._own_momentum(), self.get("betas")
        if betas is None:
            return
        if own == "betas":
            betas = (self.pop("momentum"), *betas[1:]) if "momentum" in self else betas
            super().__setitem__("betas", _of_one_kind(betas))
        elif own == "momentum":
            super().__setitem__("momentum", self.pop("betas")[0])

    def update(self, *others: Any, **own: Any) -> None:
        """Set several keys, each with its checks."""
        for key, value in dict(*others, **own).items():
            self[key] = value

    def __missing__(self, key: str) -> Any:
        if key == "betas" and self._own_momentum() == "momentum":
            return (self["momentum"],)
        if key == "kind" and "rule" in self:
            return self["rule"]
        if key == "initial_lr" and "lr" in self:
            rate = self["lr"]
            self[key] = rate.clone() if isinstance(rate, Tensor) else rate
            return self[key]
        raise KeyError(key)

    def _own_momentum(self) -> str | None:
        """The key under which a scheduler's momentum goes: `momentum` or `betas`."""
        name = self.get("rule")
        rule = RULES.get(name) if isinstance(name, str) else None
        keys = [key for key in ("momentum", "betas") if rule is not None and key in rule.defaults]
        return keys[0] if len(keys) == 1 else None


def _of_one_kind(betas: Any) -> Any:
    """Make both betas tensors if one is, because schedulers replace only the first."""
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        return betas
    like = next((beta for beta in betas if isinstance(beta, Tensor)), None)
    if like is None:
        return betas
    return tuple(like.new_tensor(b) if isinstance(b, int | float) else b for b in betas)


def name_matches(name: str, pattern: str) -> bool:
    """Whether a name is the pattern or fits it, as in a shell (`*`, `?`, `[abc]`).

    What means a fused parameter means each of its parts.
    """
    names = {name, whole_name(name)}
    return pattern in names or any(fnmatchcase(each, pattern) for each in names)


def rule_of(group: Mapping[str, Any]) -> Rule:
    name = group.get("rule")
    if name is None:
        raise ValueError(
            'a parameter group has no rule: a group given as a dict needs "rule": "muon" (hidden '
            'matrices) or "rule": "adamw" (biases, norms, embeddings); only a whole model, or a '
            "list of (name, parameter), has its rules chosen (Hugging Face's Trainer gives the "
            "model with optimizer_cls_and_kwargs=samestep.hf.factory(lr=...))"
        )
    if not isinstance(name, str) or name not in RULES:
        raise ValueError(f"rule {checks.shown(name)} is not known; choose one of {sorted(RULES)}")
    return RULES[name]


def own_spelling(options: Mapping[str, Any]) -> Group:
    """Translate keys of `ALIASES` into samestep's names.

    And torch.optim.AdamW's `fused`, of which None is the default.
    """
    options = dict(options)
    if options.get("fused", False) is None:
        options["fused"] = False
    for alias in ALIASES.keys() & options.keys():
        key, value = ALIASES[alias], options.pop(alias)
        if key in options:
            raise ValueError(f"{key} and {alias} mean the same: give only one of them")
        if alias == "adjust_lr_fn":
            check_adjust_lr_fn(alias, value)
            value = ADJUST_LR_FN[value or "original"]
        else:
            checks.split_sizes(alias, value)
        options[key] = value
    return options


def check_adjust_lr_fn(name: str, value: Any) -> None:
    """Check an `adjust_lr_fn` of torch.optim.Muon or torchtitan."""
    if value is not None and not checks.is_one_of(value, ADJUST_LR_FN):
        text = value if isinstance(value, str) else checks.shown(value)
        raise ValueError(
            f"Adjust learning rate function {text} is not supported: {name} is "
            f"{checks.shown(value)}; choose one of {list(ADJUST_LR_FN)}"
        )


def complete(group: Mapping[str, Any], rule_options: Mapping[str, Mapping[str, Any]]) -> Group:
    """The group with every key of its rule: its own, the optimizer's, or the rule's default."""
    rule = rule_of(group)
    completed = {"maximize": False, **rule.defaults}
    completed.update(rule_options.get(rule.name, {}))
    completed.update(own_spelling(group))
    check(completed)
    _warn_of_typos(group, rule)
    return completed


def _warn_of_typos(group: Mapping[str, Any], rule: Rule) -> None:
    """Warn of an unknown group key that looks like a misspelled one."""
    known = OF_EVERY_GROUP.union(ALIASES, *(r.defaults for r in RULES.values()))
    for key in group:
        meant = None if key in known else likely_option(key, rule)
        if meant is not None:
            warn_user(f"group key {key!r} is not known and has no effect; did you mean {meant!r}?")


def check(group: Mapping[str, Any]) -> None:
    """Raise if a value of the group cannot run."""
    rule = rule_of(group)
    missing = [key for key in ("maximize", *rule.defaults) if key not in group]
    if missing:
        raise ValueError(f"the key {missing[0]!r} is missing; rule {rule.name!r} needs it")
    checks.every(OF_GROUPS, group)
    rule.check(group)


def is_constant(value: object) -> bool:
    """Whether a value is immutable, so that its text describes it fully."""
    if isinstance(value, tuple):
        return all(map(is_constant, value))
    return value is None or isinstance(value, int | float | str)


@contextmanager
def naming_group(index: int) -> Iterator[None]:
    """Context that puts the index of the group before an error message."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"param_groups[{index}]: {error}") from None


def options_of(group: Mapping[str, Any]) -> Group:
    """A group's rule and options, without parameters and keys of other code."""
    keys = dict.fromkeys(("rule", *CUTS, *rule_of(group).defaults))
    return {key: group[key] for key in keys if key in group}


def decisive_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Differences in options that determine blocks and state; "" if none.

    Blocks and state are made at construction, so these options may not change afterwards.
    """
    rule = rule_of(old)
    if new.get("rule") != old["rule"]:
        return f"rule: {old['rule']!r} -> {checks.shown(new.get('rule'))}"
    cuts = [[_normal(o.get(key)) or None for key in CUTS] for o in (old, new)]
    # Of a block that is wide: some state is per row or per column as options say.
    states = [(dict(rule.state_shapes((2, 3), o)), o.get("state_dtypes")) for o in (old, new)]
    if cuts[0] == cuts[1] and states[0] == states[1]:
        return ""
    changes = []
    for key in dict.fromkeys([*rule.defaults, *CUTS]):
        before, after = old.get(key), new.get(key)
        schedule = key in rule.schedulable and None not in (before, after)
        if _normal(before) != _normal(after) and not schedule:
            changes.append(f"{key}: {_brief(before)} -> {_brief(after)}")
    return ", ".join(changes)


def _brief(value: Any) -> str:
    return value if isinstance(value, str) else checks.shown(value)


def _normal(value: Any) -> Any:
    """Lists as tuples, also inside mappings."""
    if isinstance(value, Mapping):
        return {key: _normal(item) for key, item in value.items()}
    return tuple(value) if isinstance(value, list) else value


def unknown_option(name: str, known: Iterable[str]) -> TypeError:
    """The error for a misspelled keyword, with the likely spelling."""
    told = said_here(name)
    if told is not None:
        return TypeError(f"unexpected keyword: {told}")
    return TypeError(f"unexpected keyword {name!r}{hint(name, list(known))}")


def parameter_names(group: Mapping[str, Any], index: int) -> list[str]:
    """Names of a group's parameters, or their positions where they have none."""
    names: list[str] | None = group.get("param_names")
    return names or [f"param_groups[{index}][{place}]" for place in range(len(group["params"]))]


def members(
    groups: Iterable[Mapping[str, Any]], first: int = 0
) -> Iterator[tuple[Mapping[str, Any], str, Tensor]]:
    """Every parameter with its group and name; groups are numbered from `first`."""
    for index, group in enumerate(groups, first):
        for name, param in zip(parameter_names(group, index), group["params"], strict=True):
            yield group, name, param


def listed(params: Any, index: int) -> list[Any]:
    """The parameters of group `index` as a list of tensors or (name, tensor) pairs."""
    if isinstance(params, Tensor):
        return [params]
    if params is None:
        raise ValueError(f'param_groups[{index}] lacks the key "params"')
    if isinstance(params, set):
        raise TypeError(
            "optimizer parameters need to be organized in ordered collections, but the ordering "
            "of tensors in sets will change between runs. Please use a list instead."
        )
    items = list(params)
    if not items:
        raise ValueError(f"param_groups[{index}] has no parameters: leave the group out")
    for item in items:
        check_pair(item) if isinstance(item, tuple) else _check_tensor(item)
    return items


def check_pair(item: tuple[Any, ...]) -> None:
    """Raise unless `item` is (name, parameter)."""
    if len(item) != 2 or not isinstance(item[0], str):
        kinds = ", ".join(type(part).__name__ for part in item)
        raise TypeError(f"a named parameter is a pair (name, tensor), got ({kinds})")
    _check_tensor(item[1], f" {item[0]!r}")


def _check_tensor(item: Any, name: str = "") -> None:
    if not isinstance(item, Tensor):
        raise TypeError(
            f"optimizer can only optimize Tensors, but one of the params is {type(item).__name__}"
        )
    if is_lazy(item):
        raise ValueError(
            f"the parameter{name} of a lazy module has no shape yet: call the model on a batch "
            "before its optimizer is built"
        )


def without_repeated(
    group: Mapping[str, Any], others: Sequence[Mapping[str, Any]]
) -> list[Tensor | tuple[str, Tensor]]:
    """A group's parameters without repetitions; raises if another group has one.

    One that is twice in a group is warned of, as torch does, which updates it twice in a step.
    """
    seen: dict[Tensor | str, str] = {}
    for _, name, param in members(others):
        seen[param] = seen[name] = name
    kept: dict[Tensor, str] = {}
    found = []
    for place, item in enumerate(group["params"]):
        place_name = f"param_groups[{len(others)}][{place}]"
        name, param = item if isinstance(item, tuple) else (place_name, item)
        if param in kept:
            warn_user(
                "optimizer contains a parameter group with duplicate parameters: "
                f"{name!r} is there already, as {kept[param]!r}; samestep updates it "
                "once per step, where torch's optimizers would do it twice. List it "
                "once"
            )
            continue
        for key in (param, name):
            if key in seen:
                raise ValueError(
                    "some parameters appear in more than one parameter group, or under one name: "
                    f"{name!r} is there already, as {seen[key]!r}; list each parameter once, under "
                    "a name of its own"
                )
        seen[name] = kept[param] = name
        found.append(item)
    return found


def refuse_lost_formats(group: Mapping[str, Any], rules: Iterable[str]) -> None:
    """Raise if `state_dtypes` names state that no rule of the optimizer has."""
    chosen = group.get("state_dtypes")
    if not isinstance(chosen, Mapping):
        return
    names = sorted({*rules, group["rule"]})
    known = {MASTER, *(key for name in names for key in _state_keys(RULES[name]))}
    for key in chosen:
        if key not in known:
            raise ValueError(
                f"state_dtypes has {key!r}, which is no state of {' or '.join(names)}; "
                f"choose from {[key for key in MOMENTS if key in known]}"
            )


def _state_keys(rule: Rule) -> set[str]:
    """Keys of the state that a rule can have."""
    options = dict(rule.defaults)
    keys = set(rule.state_shapes((0, 0), options))
    return keys | set(rule.state_shapes((0, 0), {**options, "amsgrad": True}))


def refuse_unsupported(
    index: int, group: Group, *, compiled: bool, ranks: int, masters: bool = False
) -> None:
    """Raise for parameters of unsupported dtype, layout or device."""
    if group.get("fused") and compiled:
        raise ValueError("fused=True and compile cannot be combined: leave one of them out")
    for name, param in zip(parameter_names(group, index), group["params"], strict=True):
        if not param.is_floating_point():
            # torch.optim.Muon says it so, of complex ones.
            kind = RuntimeError if param.is_complex() else ValueError
            raise kind(
                f"parameter {name!r} has dtype {param.dtype}: rule {group['rule']!r} does not "
                f"support {'complex' if param.is_complex() else 'integer or boolean'} "
                "parameters; leave it out or freeze it"
            )
        if param.layout != torch.strided:
            raise ValueError(
                f"parameter {name!r} is sparse ({str(param.layout).removeprefix('torch.')}): no "
                "rule supports that; make it dense (.to_dense()), leave it out or freeze it"
            )
        if group.get("fused") and param.device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"fused=True is for parameters on CPU and CUDA, and {name!r} is on "
                f"{param.device.type}: leave it out"
            )
        _refuse_format(name, param, group, masters=masters)
        if param.device.type == "xla" and compiled:
            raise ValueError(
                f"compile has no use for {name!r}, which is on an XLA device, where "
                "steps are compiled anyway: leave compile out"
            )
        if param.device.type == "xla" and ranks > 1:
            raise ValueError(
                f"parameter {name!r} is on an XLA device, and there is a process group "
                f"of {ranks} ranks: XLA devices share one program without a process "
                "group (torch_xla.runtime.use_spmd())"
            )
    if group.get("fused") and "cuda" in {param.device.type for param in group["params"]}:
        group["fused"] = False  # what it is for is done there anyway, where there are kernels


def _refuse_format(name: str, param: Tensor, group: Group, *, masters: bool) -> None:
    """Raise for formats of state that do not fit a parameter."""
    chosen = group.get("state_dtypes")
    words = [chosen] if isinstance(chosen, str) else list((chosen or {}).values())
    if param.device.type == "xla" and any(isinstance(word, str) for word in words):
        raise ValueError(
            f"state_dtypes {chosen} is not supported for {name!r}, which is on an XLA "
            "device: give dtypes such as torch.bfloat16, or leave it out"
        )
    kept = None if isinstance(chosen, str) else (chosen or {}).get(MASTER)
    if kept is not None and not masters:
        what = f'"{kept}"' if isinstance(kept, str) else kept
        raise ValueError(
            f'state_dtypes["{MASTER}"] is {what}, and {name!r} has no main parameters: '
            "build the optimizer with master_weights=True"
        )
    if kept == REMAINDER and param.dtype.itemsize <= 2 and param.dtype != torch.bfloat16:
        raise ValueError(
            f'state_dtypes["master_weight"] is "{REMAINDER}", which stores the bits of '
            f"main parameters beyond bfloat16, and {name!r} has dtype {param.dtype}: "
            "give torch.float32"
        )


def blocks_of_group(group: Mapping[str, Any], names: Sequence[str]) -> list[list[Block] | None]:
    """Blocks of each parameter of a matrix rule; None for an elementwise rule."""
    if rule_of(group).kind == "elementwise":
        return [None] * len(names)
    split_sizes = group.get("split_sizes")
    if isinstance(split_sizes, Mapping):
        for pattern in split_sizes:
            if not any(name_matches(name, pattern) for name in names):
                raise ValueError(
                    f"split_sizes: {pattern!r} matches none of the names of the group's "
                    "parameters "
                    f"({', '.join(names[:6])}{', ...' if len(names) > 6 else ''})"
                )
    blocks: list[list[Block] | None] = []
    fused = [part for part in map(rows_in, names) if part is not None]
    for name, param in zip(names, group["params"], strict=True):
        sizes = split_sizes
        if isinstance(split_sizes, Mapping):
            found = [s for pattern, s in split_sizes.items() if name_matches(name, pattern)]
            if len(found) > 1:
                raise ValueError(f"split_sizes: {name!r} is matched by {len(found)} patterns")
            sizes = found[0] if found else None
        part = rows_in(name)
        try:
            if part is not None and isinstance(sizes, Sequence):
                rows = max(other.stop for other in fused if other.whole == part.whole)
                sizes = part.own_splits(sizes, rows)
            flatten, transposed = (group.get(key, False) for key in ("flatten", "transposed"))
            blocks.append(blocks_of(tuple(param.shape), sizes, flatten, transposed))
        except ValueError as error:
            raise ValueError(
                f"rule {group['rule']!r}: parameter {name!r} of shape {tuple(param.shape)} {error}"
            ) from None
    return blocks
