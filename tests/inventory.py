"""Everything that users can name: public names, options, commands, scenarios, layouts, mutants.

    python -m tests.inventory > inventory.json

`test_inventory.py` holds it against the list that is committed: what goes missing is seen in a
diff, and nothing is lost by moving code.
"""

import inspect
import json
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

import samestep
from samestep import cli, presets
from samestep.lab.stress.layouts import LAYOUTS, LAYOUTS_ON_REQUEST
from samestep.lab.stress.mutants import MUTANTS, STREAM_MUTANTS, XLA_MUTANTS
from samestep.lab.stress.scenarios import SCENARIOS
from samestep.recipes import RECIPES
from samestep.rules import RULES
from samestep.tooling.pages import stored_pages

ROOT = Path(__file__).parent.parent
LISTED = ROOT / "tests" / "inventory.json"
RECEIPTS = ("receipts", "benchmarks/results")
MODULES = ("samestep.checkpoint", "samestep.fsdp", "samestep.mesh", "samestep.parallel",
           "samestep.qk_clip", "samestep.recipes", "samestep.stress")  # fmt: skip


def inventory() -> dict[str, Any]:
    """All of it, by kind; lists are sorted."""
    found: dict[str, Any] = {"samestep": sorted(samestep.__all__)}
    for name in MODULES:
        found[name] = sorted(getattr(import_module(name), "__all__", ()))
    for name in ("AdamW", "Muon", "MuonAdamW"):
        optimizer = getattr(samestep, name)
        found[f"options of {name}"] = sorted(_keywords(optimizer))
        found[f"methods of {name}"] = sorted(n for n in dir(optimizer) if not n.startswith("_"))
    # Scripts and tests that were imported before may have registered rules of their own.
    for rule in (own for own in RULES.values() if type(own).__module__.startswith("samestep.")):
        found[f"options of rule {rule.name}"] = sorted(rule.defaults)
    found["options since"] = options_since(
        name for kind, names in found.items() if kind.startswith("options of") for name in names
    )
    functions = inspect.getmembers(presets, inspect.isfunction)
    found["presets"] = {
        name: sorted(inspect.signature(function).parameters)
        for name, function in functions
        if not name.startswith("_")
    }
    found["recipes"] = sorted(RECIPES)
    found["commands"] = {name: _flags(name) for name in sorted(cli.COMMANDS)}
    found["scenarios"] = sorted(SCENARIOS)
    found["layouts"] = sorted({*LAYOUTS, *LAYOUTS_ON_REQUEST})
    found["mutants"] = sorted(MUTANTS)
    found["mutants of streams"] = sorted(STREAM_MUTANTS)
    found["mutants of XLA"] = sorted(XLA_MUTANTS)
    receipts = [path for name in RECEIPTS for path in (ROOT / name).rglob("*.json")]
    found["receipts"] = sorted(str(path.relative_to(ROOT)) for path in receipts)
    return found


def options_since(names: Iterable[str]) -> dict[str, str]:
    """The version that brought each keyword and group key: this one, if it is not listed yet."""
    listed = json.loads(LISTED.read_text()).get("options since", {})
    options = sorted({*names} - {"params", "options"})
    return {name: listed.get(name, samestep.__version__) for name in options}


def _keywords(optimizer: type) -> set[str]:
    """Parameters of its constructor, also those that come as `**options`."""
    named = set(inspect.signature(optimizer).parameters)
    options = get_args(inspect.signature(optimizer).parameters["options"].annotation)
    return named.union(*(get_type_hints(kind) for kind in options))


def _flags(command: str) -> list[str]:
    """The options of a command, as its help lists them."""
    return sorted(stored_pages()[command].flags)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(inventory(), indent=1) + "\n")
