"""Write docs/options.md from the code: python -m tests.options_page.

Meanings are docstrings of the classes that take the options, defaults are those of the classes,
and tests/inventory.json has the version that brought an option.
"""

import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import nn

import samestep
from samestep.groups.distribution import Distribution
from samestep.groups.group_keys import ALIASES
from samestep.groups.step_options import StepOptions
from samestep.rules import RULES
from tests.inventory import LISTED, ROOT

PAGE = ROOT / "docs" / "options.md"
FIRST = "0.1.0"  # the version of all options of the first list
ENTRY = re.compile(r" *((?:\w+, )*\w+(?:, \.\.\.)?): (.*)")
SHARED = {"maximize": "step along the gradient instead of against it."}
# Keys of groups that no class has, and keywords of torch's optimizers.
OTHERS = {
    "rule": 'rule of the group: "muon", "adamw", "adamuon", or one of your own.',
    "params": "parameters; with `groups=` patterns of their names.",
    "process_group": "ranks that share the parameters of the group.",
    "divisor": "sums of gradients over these ranks are divided by it. None: their number.",
    **{alias: f"another name of `{own}`." for alias, own in ALIASES.items()},
    "foreach": "taken, and changes nothing.",
    "capturable": "True raises and names the way out.",
    "differentiable": "True raises and names the way out.",
}
HEAD = """\
# Options

For anyone who looks up what a keyword or a group key does, and its default. `MuonAdamW` takes all
tables; `samestep.Muon` those of a step, of ranks and of rule `muon`; `samestep.AdamW` those of a
step, of ranks and of rule `adamw`, and `no_decay`. Keys of rules also go into groups:

```python
import torch

import samestep

model = torch.nn.Sequential(torch.nn.Embedding(100, 8), torch.nn.Linear(8, 8))
own = {"1.weight": {"momentum": 0.9}}
opt = samestep.MuonAdamW(model, lr=3e-4, max_grad_norm=1.0, overrides=own)
print(opt.table())  # what every parameter has
```

What is unknown or does not fit raises. This page is generated from the code (`make pages`). All
options are there since {first}, where no version is given.
"""
ADAMW = """\
`lr`, `maximize` and `state_dtypes` are as Muon's. The keyword `cautious` of `MuonAdamW` is Muon's,
and `eps` is AdamW's: for the other rule set them in a group.
"""
ADAMUON = """\
Muon's keys without `equilibrate`, `variance_axis` and `variance_eps_form`. What differs:
"""


def meanings(owner: type) -> dict[str, str]:
    """Entries `name, name: text` of its docstring, without line breaks."""
    found: dict[str, str] = {}
    names: list[str] = []
    indent = 0
    for line in inspect.getdoc(owner).splitlines():
        deep = len(line) - len(line.lstrip())
        entry = ENTRY.fullmatch(line)
        if line and names and deep > indent:
            found.update(dict.fromkeys(names, f"{found[names[0]]} {line.strip()}"))
        elif entry is not None:
            names, indent = entry[1].removesuffix(", ...").split(", "), deep
            found.update(dict.fromkeys(names, entry[2]))
        else:
            names = []
    return found


def shown(value: Any) -> str:
    """A default as one would write it."""
    return f'`"{value}"`' if isinstance(value, str) else f"`{value!r}`"


def table(
    since: Mapping[str, str],
    texts: Mapping[str, str],
    defaults: Mapping[str, tuple[Any, ...]],
    *columns: str,
) -> str:
    """Rows of options; those with one meaning and default share a row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, values in defaults.items():
        version = since.get(name, FIRST)
        late = "" if version == FIRST else f" Since {version}."
        rows.setdefault((*map(shown, values), texts[name] + late), []).append(f"`{name}`")
    head = ("option", *columns, "meaning")
    lines = [head, *((", ".join(rows[row]), *row) for row in rows)]
    told = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([told[0], "|" + "---|" * len(head), *told[1:], ""])


def page() -> str:
    """All of the page."""
    since = json.loads(LISTED.read_text())["options since"]
    muon, adamw, adamuon = (RULES[name] for name in ("muon", "adamw", "adamuon"))
    texts = {rule.name: {**meanings(type(rule)), **SHARED} for rule in (muon, adamw, adamuon)}
    of_steps, of_ranks = (
        {f.name: (f.default,) for f in fields(c)} for c in (StepOptions, Distribution)
    )
    both = meanings(samestep.MuonAdamW)
    elsewhere = {*of_steps, *of_ranks, *muon.defaults, *adamw.defaults, *SHARED} - {"lr"}
    signature = inspect.signature(samestep.MuonAdamW).parameters
    of_both = {
        name: (signature[name].default if name in signature else None,)
        for name in both
        if name in since and name not in elsewhere
    }
    built = samestep.MuonAdamW(nn.Sequential(nn.Embedding(4, 4))).param_groups[0]
    of_muon = {name: (value,) for name, value in muon.defaults.items()} | {"maximize": (False,)}
    of_adamw = {
        name: (value, built[name])
        for name, value in adamw.defaults.items()
        if (texts["muon"].get(name), muon.defaults.get(name)) != (texts["adamw"][name], value)
    }
    of_adamuon = {
        name: (value,)
        for name, value in adamuon.defaults.items()
        if muon.defaults.get(name, ...) != value
    }
    as_muons = dict.fromkeys(of_adamuon, "as Muon's.")
    parts = [
        HEAD.replace("{first}", FIRST),
        "## Of MuonAdamW\n",
        table(since, both, of_both, "default"),
        "## How a step is taken\n",
        table(since, meanings(StepOptions), of_steps, "default"),
        "## What ranks share, and where state stays\n",
        table(since, meanings(Distribution), of_ranks, "default"),
        "## Rule `muon`\n",
        table(since, texts["muon"], of_muon, "default"),
        "## Rule `adamw`\n",
        ADAMW,
        table(since, texts["adamw"], of_adamw, "`AdamW`", "`MuonAdamW`"),
        "## Rule `adamuon`\n",
        ADAMUON,
        table(since, {**as_muons, **texts["adamuon"]}, of_adamuon, "default"),
        "## Keys of every group, and keywords of torch\n",
        table(since, OTHERS, dict.fromkeys(OTHERS, ())),
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
