"""The user's plan for a model: which modules are sharded, and which stay whole."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from samestep.groups.routing import Elsewhere
from samestep.layout.fused_rows import whole_name
from samestep.mesh.replicate_list import ShardRule

Patterns = tuple[str, ...]
PARTS = ("embedding", "head", "branches", "column", "row", "fused", "on_stream", "on_heads")


class PlanError(ValueError):
    """Raised for a plan that does not fit its model."""


class FusedPart(NamedTuple):
    """One projection in a fused matrix: its rows follow those of the parts before.

    heads: How many heads they are, of equal size. A rank has whole heads; ranks of which there
        are more than heads share them. 0: no heads, any rows will do (gate, up).
    """

    rows: int
    heads: int = 0


@dataclass(frozen=True)
class Plan:
    """A plan for laying out a model: patterns of module names.

    A pattern is like "blocks.*.attention.[qkv]": every part between dots as in a shell.

    The stream is what layers read from and add to, (B, T, C). With sequence parallel every rank
    of tensor parallel has T / tp positions of it, otherwise all have the whole.

    blocks: Modules whose parameters FSDP2 gathers at once, one after the other.
    embedding: From tokens to the stream, cut by channels.
    head: From the stream to logits, cut by vocabulary; the logits are whole on every rank.
    branches: Modules that take the stream (their first argument) and hold `column` and `row`.
    column: Linear layers whose outputs are cut (queries, keys, values, up, gate).
    fused: Linear layers that are several of `column` in one, and the parts of their rows: each rank
        gets its heads, or its rows, of every part (`samestep.parallel.fused`).
    row: Linear layers whose inputs are cut (attention's output, down); they give the stream.
    on_stream: Modules with copies everywhere that work on the stream: norms, routers.
    on_heads: Modules with copies everywhere that work on this rank's heads: QK-norms.
    experts: Names of 3-D stacks (E, rows, columns), and the dim that tensor parallel cuts: 1 for
        what `column` does, 2 for `row`. Their module must hold nothing else.
    rules: Allow something on the replicate list to be cut all the same, with the reason.
    """

    blocks: Patterns
    embedding: Patterns = ()
    head: Patterns = ()
    branches: Patterns = ()
    column: Patterns = ()
    fused: Mapping[str, tuple[FusedPart, ...]] = field(default_factory=dict)
    row: Patterns = ()
    on_stream: Patterns = ()
    on_heads: Patterns = ()
    experts: Mapping[str, int] = field(default_factory=dict)
    rules: tuple[ShardRule, ...] = ()

    def check(self, model: nn.Module) -> None:
        """Raise unless every pattern matches, and no module is in two fields."""
        taken: dict[str, str] = {}
        for part in ("blocks", *PARTS, "experts"):
            for pattern in getattr(self, part):
                named = model.named_parameters() if part == "experts" else model.named_modules()
                found = [name for name, _ in named if name_matches(name, pattern)]
                if not found:
                    raise PlanError(f"Plan.{part}: {pattern!r} matches nothing in the model")
                for name in found if part not in ("blocks", "branches") else ():
                    other = taken.setdefault(name, part)
                    if other != part:
                        raise PlanError(
                            f"{name!r} is in both Plan.{other} and Plan.{part}: name it in one"
                        )
        for name, module, parts in self.fused_layers(model):
            _check_fused(name, module, parts)

    def named(self, model: nn.Module, part: str) -> Iterator[tuple[str, nn.Module]]:
        """Modules that a field names, in the model's order, in this stage."""
        patterns: Patterns = getattr(self, part)
        for name, module in model.named_modules():
            if isinstance(module, Elsewhere):
                continue
            if any(name_matches(name, pattern) for pattern in patterns):
                yield name, module

    def fused_layers(
        self, model: nn.Module
    ) -> Iterator[tuple[str, nn.Module, tuple[FusedPart, ...]]]:
        for name, module in self.named(model, "fused"):
            found = [parts for pattern, parts in self.fused.items() if name_matches(name, pattern)]
            if len(found) > 1:
                raise PlanError(
                    f"fused: {name!r} is matched by {len(found)} patterns: name it once"
                )
            yield name, module, tuple(found[0])

    def split_sizes(self, model: nn.Module) -> dict[str, tuple[int, ...]]:
        """`split_sizes` of trained fused matrices by name, for Muon."""
        trained = {
            whole_name(name)
            for name, p in model.named_parameters()
            if p.requires_grad and p.ndim > 1
        }
        return {
            f"{name}.weight": tuple(part.rows for part in parts)
            for name, _, parts in self.fused_layers(model)
            if f"{name}.weight" in trained
        }

    def modules(self, model: nn.Module) -> dict[str, nn.Module]:
        """All modules that the plan mentions, by name."""
        return {name: module for part in PARTS for name, module in self.named(model, part)}

    def stacks(self, model: nn.Module) -> Iterator[tuple[str, int]]:
        """Names of the stacks of experts, and the dim that tensor parallel cuts."""
        for name, _ in model.named_parameters():
            for pattern, dim in self.experts.items():
                if name_matches(name, pattern):
                    yield name, dim

    def expert_modules(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        for owner in dict.fromkeys(name.rpartition(".")[0] for name, _ in self.stacks(model)):
            yield owner, model.get_submodule(owner)


def _check_fused(name: str, module: nn.Module, parts: tuple[FusedPart, ...]) -> None:
    if not isinstance(module, nn.Linear):
        raise PlanError(
            f"fused: {name!r} is a {type(module).__name__}, and only an nn.Linear can "
            "have fused parts"
        )
    rows = [part.rows for part in parts]
    if not rows or min(rows) < 1 or sum(rows) != module.out_features:
        raise PlanError(
            f"fused: the parts of {name!r} have {' + '.join(map(str, rows)) or 'no'} rows, and it "
            f"has {module.out_features}"
        )
    most = max(part.heads for part in parts)
    for part in parts:
        if part.heads < 0 or (part.heads and part.rows % part.heads):
            raise PlanError(
                f"fused: {part.rows} rows of {name!r} cannot be divided into {part.heads} "
                "equal heads"
            )
        if part.heads and most % part.heads:
            raise PlanError(
                f"fused: {name!r} has parts of {most} and of {part.heads} heads, "
                "neither of which divides the other"
            )


def name_matches(name: str, pattern: str) -> bool:
    """Whether every part of a dotted name fits that of the pattern."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))
