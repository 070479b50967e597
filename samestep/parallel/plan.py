"""What a user says about a model: which modules are cut, which stay whole."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from samestep.groups.routing import Elsewhere
from samestep.mesh.replicate_list import ShardRule

Patterns = tuple[str, ...]
PARTS = ("embedding", "head", "branches", "column", "row", "on_stream", "on_heads")


class PlanError(ValueError):
    """A plan that does not fit its model."""


@dataclass(frozen=True)
class Plan:
    """How a model is laid out: patterns of module names.

    A pattern is like "blocks.*.attention.[qkv]": every part between dots as in a shell.

    The stream is what layers read from and add to, (B, T, C). With sequence parallel every rank
    of tensor parallel has T / tp positions of it, otherwise all have the whole.

    blocks: Modules whose parameters FSDP2 gathers at once, one after the other.
    embedding: From tokens to the stream, cut by channels.
    head: From the stream to logits, cut by vocabulary; the logits are whole on every rank.
    branches: Modules that take the stream (their first argument) and hold `column` and `row`.
    column: Linear layers whose outputs are cut (queries, keys, values, up, gate).
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
    row: Patterns = ()
    on_stream: Patterns = ()
    on_heads: Patterns = ()
    experts: Mapping[str, int] = field(default_factory=dict)
    rules: tuple[ShardRule, ...] = ()

    def check(self, model: nn.Module) -> None:
        """Raise unless every pattern means something, and no module is named twice."""
        taken: dict[str, str] = {}
        for part in ("blocks", *PARTS, "experts"):
            for pattern in getattr(self, part):
                found = self._matched(model, part, pattern)
                if not found:
                    raise PlanError(f"{part}: {pattern!r} matches nothing in the model")
                for name in found if part not in ("blocks", "branches") else ():
                    other = taken.setdefault(name, part)
                    if other != part:
                        raise PlanError(f"{name!r} is in {other} and in {part}: name it once")

    def named(self, model: nn.Module, part: str) -> Iterator[tuple[str, nn.Module]]:
        """The modules that a part of the plan names, in the model's order; not other stages'."""
        patterns: Patterns = getattr(self, part)
        for name, module in model.named_modules():
            if isinstance(module, Elsewhere):
                continue
            if any(name_matches(name, pattern) for pattern in patterns):
                yield name, module

    def modules(self, model: nn.Module) -> dict[str, nn.Module]:
        """All modules that the plan gives something to do, by name."""
        return {name: module for part in PARTS for name, module in self.named(model, part)}

    def stacks(self, model: nn.Module) -> Iterator[tuple[str, int]]:
        """Names of the stacks of experts, and the dim that tensor parallel cuts."""
        for name, _ in model.named_parameters():
            for pattern, dim in self.experts.items():
                if name_matches(name, pattern):
                    yield name, dim

    def expert_modules(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """The modules that hold stacks of experts."""
        for owner in dict.fromkeys(name.rpartition(".")[0] for name, _ in self.stacks(model)):
            yield owner, model.get_submodule(owner)

    def _matched(self, model: nn.Module, part: str, pattern: str) -> list[str]:
        named = model.named_parameters() if part == "experts" else model.named_modules()
        return [name for name, _ in named if name_matches(name, pattern)]


def name_matches(name: str, pattern: str) -> bool:
    """Whether every part of a dotted name fits that of the pattern."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))
