"""Assigns names to parameters that files number, and renames parameters."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex

from samestep.checkpoint.foreign.safe import read_json
from samestep.checkpoint.logical import name_and_key, state_key
from samestep.checkpoint.sources import Names, Source, model_name
from samestep.checkpoint.storage import CheckpointError
from samestep.layout.fused_rows import without_wrappers

HOW = (
    "give the names of each group's parameters with --names, or the model with --model "
    "(docs/checkpoints.md says how)"
)
# What transformers leaves without weight decay: names, and parameters of norms.
UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)", re.IGNORECASE)
Shapes = Mapping[Any, torch.Size | None]


def names_in(path: Path) -> list[list[str]]:
    """Read lists of names from a JSON file; one flat list becomes a single group."""
    found = read_json(path)
    lists = [found] if isinstance(found, list) and found and isinstance(found[0], str) else found
    if not isinstance(lists, list) or not all(
        isinstance(own, list) and all(isinstance(name, str) for name in own) for own in lists
    ):
        raise CheckpointError(f"{path} is no JSON list of names, nor a list of lists of names")
    return lists


def as_lists(names: Names) -> list[list[str]]:
    if names and isinstance(names[0], str):
        return [[str(name) for name in names]]
    return [list(group) for group in names]


def by_groups(where: object, groups: Sequence[Mapping[str, Any]], names: Names) -> dict[Any, str]:
    """Map numbers of parameters to names, from one list for all or one list per group."""
    lists = as_lists(names)
    sizes = [len(group["params"]) for group in groups]
    numbers = [number for group in groups for number in group["params"]]
    counts = [len(own) for own in lists]
    if len(lists) == 1 and counts == [len(numbers)]:
        return dict(zip(sorted(numbers), lists[0], strict=True))
    if counts != sizes:
        raise CheckpointError(
            f"--names has groups of {counts} names, and {where} has groups of {sizes} "
            "parameters: both must come from the same model"
        )
    return dict(zip(numbers, (name for own in lists for name in own), strict=True))


def check_shapes(where: object, names: Mapping[Any, str], shapes: Shapes, known: Shapes) -> None:
    """Raise if the shape of some state does not fit the parameter of its name."""
    for number, name in names.items():
        found, wanted = shapes.get(number), known.get(name)
        if found is not None and wanted is not None and found != wanted:
            raise CheckpointError(
                f"{where}: parameter {number} with state of shape {tuple(found)} does "
                f"not fit {name!r} of shape {tuple(wanted)}, which has that number in "
                f"the model: the optimizer had another order of parameters; {HOW}"
            )


def groups_of_trainer(model: nn.Module) -> list[list[str]]:
    """Names in the order of Hugging Face's Trainer: with weight decay, then without."""
    norms = {
        f"{module}.{name}" if module else name
        for module, owner in model.named_modules()
        if isinstance(owner, nn.LayerNorm)
        for name, _ in owner.named_parameters(recurse=False)
    }
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    without = [name for name in trained if name in norms or UNDECAYED.search(name)]
    return [[name for name in trained if name not in without], without]


def names_of(model: nn.Module) -> list[str]:
    return [without_wrappers(n) for n, p in model.named_parameters() if p.requires_grad]


# --- other names here ------------------------------------------------------------------------


def rename_rule(text: str) -> tuple[str, str]:
    """Parse `regex=replacement`, split at the last "="."""
    pattern, equals, replacement = text.rpartition("=")
    if not equals:
        raise CheckpointError(f"--rename {text!r} is not of the form regex=replacement")
    return pattern, replacement


def renamed(source: Source, rules: Sequence[tuple[str, str]]) -> Source:
    """Rename tensors; every rule must match one, and no two may get the same name."""
    if not rules:
        return source
    new = {name: name for name, _ in map(name_and_key, source.tensors)}
    for pattern, replacement in rules:
        try:
            fitting = [name for name in new if re.search(pattern, new[name])]
            new |= {name: re.sub(pattern, replacement, new[name]) for name in fitting}
        except (re.error, IndexError) as error:
            raise CheckpointError(f"--rename '{pattern}={replacement}': {error}") from None
        if not fitting:
            some = ", ".join(list(new.values())[:4])
            raise CheckpointError(
                f"--rename '{pattern}={replacement}' matches no name; the names are {some} ..."
            )
    seen: dict[str, str] = {}
    for old, name in new.items():
        if seen.setdefault(name, old) != old:
            raise CheckpointError(
                f"--rename turns both {seen[name]!r} and {old!r} into {name!r}: use a "
                "narrower pattern"
            )
    back = {_with_name(tensor, new[name_and_key(tensor)[0]]): tensor for tensor in source.tensors}
    return replace(
        source,
        read=lambda box: source.read(MetadataIndex(back[box.fqn], box.offset)),
        tensors={there: source.tensors[tensor] for there, tensor in back.items()},
        origins={there: source.origins.get(tensor, tensor) for there, tensor in back.items()},
        groups=[
            {
                "params": [new.get(name, name) for name in group["params"]],
                "options": _cuts_renamed(group["options"], new),
            }
            for group in source.groups
        ],
    )


def _cuts_renamed(options: dict[str, Any], new: Mapping[str, str]) -> dict[str, Any]:
    """Rename the keys of split_sizes, which are names too."""
    cuts = options.get("split_sizes")
    if not isinstance(cuts, dict):
        return options
    entries = {new.get(name, name): sizes for name, sizes in cuts["entries"].items()}
    return {**options, "split_sizes": {"entries": entries}}


def _with_name(tensor: str, name: str) -> str:
    _, key = name_and_key(tensor)
    return model_name(name) if key is None else state_key(name, key)
