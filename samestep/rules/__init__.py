"""Update rules (the math) behind one small protocol; no module here knows of ranks."""

from samestep.rules.adamuon import AdaMuonRule
from samestep.rules.adamw import AdamWRule
from samestep.rules.muon import MuonRule
from samestep.rules.rule import (
    Direction,
    OwnedStateRule,
    Rule,
    StagedRule,
    SummingRule,
    Update,
    owned_state,
    staged_update,
)

RULES: dict[str, Rule] = {rule.name: rule for rule in (MuonRule(), AdamWRule(), AdaMuonRule())}


def register_rule(rule: Rule) -> None:
    """Register a rule of your own, so that groups can ask for it by `"rule": rule.name`."""
    if rule.kind not in ("elementwise", "matrix"):
        raise ValueError(
            f"rule {rule.name!r} has kind {rule.kind!r}; it must be 'elementwise' or 'matrix'"
        )
    if rule.kind == "elementwise" and owned_state(rule, rule.defaults):
        raise ValueError(
            f"rule {rule.name!r} is elementwise and defines owned_state(), which only "
            "matrix rules have: make it a matrix rule, or leave owned_state() out"
        )
    if RULES.get(rule.name, rule) is not rule:
        raise ValueError(f"a rule named {rule.name!r} exists; register yours under another name")
    RULES[rule.name] = rule


__all__ = [
    "RULES",
    "AdaMuonRule",
    "AdamWRule",
    "Direction",
    "MuonRule",
    "OwnedStateRule",
    "Rule",
    "StagedRule",
    "SummingRule",
    "Update",
    "register_rule",
    "staged_update",
]
