"""Parameter groups: completed, checked, and shown as a table."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from samestep.layout.blocks import Block, blocks_of
from samestep.routing import name_matches
from samestep.rules import RULES
from samestep.rules.muon import lr_factor
from samestep.rules.rule import Rule

Group = dict[str, Any]
ALWAYS_KNOWN = (
    "lr", "weight_decay", "maximize", "preset", "overrides", "groups", "master_weights", "compile"
)  # fmt: skip


def rule_of(group: Mapping[str, Any]) -> Rule:
    """The rule a group names."""
    name = group.get("rule")
    if name is None:
        raise ValueError(
            'a parameter group has no rule: add "rule": "muon" or "rule": "adamw" to it, or '
            "pass a model or named parameters to have them routed"
        )
    if name not in RULES:
        raise ValueError(f"rule {name!r} is not known; choose one of {sorted(RULES)}")
    return RULES[name]


def own_spelling(options: Mapping[str, Any]) -> Group:
    """torch.optim.Muon's `adjust_lr_fn` as our `adjust_lr`; its None means "original"."""
    options = dict(options)
    if "adjust_lr_fn" in options:
        if "adjust_lr" in options:
            raise ValueError("adjust_lr and adjust_lr_fn mean the same: give only one of them")
        value = options.pop("adjust_lr_fn") or "original"
        if value not in ("original", "match_rms_adamw"):
            raise ValueError(
                f"Adjust learning rate function {value} is not supported; "
                "choose 'original' or 'match_rms_adamw'"
            )
        options["adjust_lr"] = value
    return options


def complete(group: Mapping[str, Any], rule_options: Mapping[str, Mapping[str, Any]]) -> Group:
    """The group with every key of its rule: its own, the optimizer's, or the rule's default."""
    rule = rule_of(group)
    completed = {"maximize": False, **rule.defaults}
    completed.update(rule_options.get(rule.name, {}))
    completed.update(own_spelling(group))
    check(completed)
    return completed


def check(group: Mapping[str, Any]) -> None:
    """Raise if a value of the group cannot run."""
    if not isinstance(group["maximize"], bool):
        raise TypeError(f"maximize must be True or False, got {group['maximize']!r}")
    rule_of(group).check(group)


def options_of(group: Mapping[str, Any]) -> Group:
    """The rule's name and options, without the parameters and keys of others."""
    keys = ("rule", *rule_of(group).defaults)
    return {key: group[key] for key in keys if key in group}


def decisive_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """How two sets of options differ in what decides blocks and state; "" if they do not.

    Blocks and state are made at construction, so these options may not change afterwards.
    """
    rule = rule_of(old)
    if new.get("rule") != old["rule"]:
        return f"rule: {old['rule']!r} -> {new.get('rule')!r}"
    same_blocks = all(old.get(key) == new.get(key) for key in ("split_sizes", "flatten"))
    if same_blocks and set(rule.state_shapes((1, 1), old)) == set(rule.state_shapes((1, 1), new)):
        return ""
    changes = []
    for key in rule.defaults:
        schedule = key in rule.schedulable and None not in (old[key], new[key])
        if old[key] != new[key] and not schedule:
            changes.append(f"{key}: {old[key]} -> {new[key]}")
    return ", ".join(changes)


def unknown_option(name: str, known: Iterable[str]) -> TypeError:
    """The error for a misspelled keyword, with the likely spelling."""
    close = difflib.get_close_matches(name, [*known, *ALWAYS_KNOWN], n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return TypeError(f"unexpected keyword {name!r}{hint}")


def parameter_names(group: Mapping[str, Any], index: int) -> list[str]:
    """The names of a group's parameters, or their places for parameters without names."""
    names: list[str] | None = group.get("param_names")
    return names or [f"param_groups[{index}][{place}]" for place in range(len(group["params"]))]


def blocks_of_group(group: Mapping[str, Any], names: Sequence[str]) -> list[list[Block] | None]:
    """Per parameter the blocks of a matrix rule, None for an elementwise one."""
    if rule_of(group).kind == "elementwise":
        return [None] * len(names)
    split_sizes = group.get("split_sizes")
    if isinstance(split_sizes, Mapping):
        for pattern in split_sizes:
            if not any(name_matches(name, pattern) for name in names):
                raise ValueError(
                    f"split_sizes: {pattern!r} matches none of the group's parameters "
                    f"({', '.join(names[:6])}{', ...' if len(names) > 6 else ''})"
                )
    blocks: list[list[Block] | None] = []
    for name, param in zip(names, group["params"], strict=True):
        sizes = split_sizes
        if isinstance(split_sizes, Mapping):
            found = [s for pattern, s in split_sizes.items() if name_matches(name, pattern)]
            if len(found) > 1:
                raise ValueError(f"split_sizes: {name!r} is matched by {len(found)} patterns")
            sizes = found[0] if found else None
        try:
            blocks.append(blocks_of(tuple(param.shape), sizes, group.get("flatten", False)))
        except ValueError as error:
            raise ValueError(
                f"rule {group['rule']!r}: parameter {name!r} of shape {tuple(param.shape)} {error}"
            ) from None
    return blocks


class TableRow(NamedTuple):
    """What `table` shows of one parameter."""

    name: str
    shape: str
    rule: str
    role: str
    blocks: str
    lr: str
    lr_factor: str


def table(groups: Sequence[Mapping[str, Any]], blocks: Mapping[Tensor, list[Block] | None]) -> str:
    """Every parameter with its rule, blocks and learning rate, and the totals, as text."""
    rows = [TableRow("parameter", "shape", "rule", "role", "blocks", "lr", "lr factor")]
    totals: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        for name, param in zip(parameter_names(group, index), group["params"], strict=True):
            total = totals.setdefault(group["rule"], [0, 0, 0])
            own = blocks[param]
            rows.append(_row(name, param, group, own))
            total[0] += 1
            total[1] += param.numel()
            total[2] += len(own or [])
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    everything = sum(elements for _, elements, _ in totals.values())
    for rule, (count, elements, block_count) in sorted(totals.items()):
        share = 100 * elements / max(1, everything)
        note = f" in {block_count:,} blocks" if RULES[rule].kind == "matrix" else ""
        lines.append(f"{rule}: {count} parameters, {elements:,} elements ({share:.1f}%){note}")
    return "\n".join(lines)


def _row(
    name: str, param: Tensor, group: Mapping[str, Any], blocks: list[Block] | None
) -> TableRow:
    """One line of the table; equal blocks are counted, unequal ones listed."""
    shape = " x ".join(str(size) for size in param.shape) or "scalar"
    kinds: dict[tuple[int, int], int] = {}
    for block in blocks or []:
        kinds[block.shape] = kinds.get(block.shape, 0) + 1
    cut = ", ".join(
        f"{rows} x {cols}" if count == 1 else f"{count} of {rows} x {cols}"
        for (rows, cols), count in kinds.items()
    )
    factors = [
        f"{lr_factor(*kind, group['adjust_lr']):.4g}" for kind in kinds if "adjust_lr" in group
    ]
    return TableRow(
        name,
        shape,
        group["rule"],
        str(group.get("role", "")),
        cut or "-",
        f"{float(group['lr']):.4g}",
        ", ".join(dict.fromkeys(factors)) or "1",
    )
