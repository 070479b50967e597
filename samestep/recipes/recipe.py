"""One line of a recipe: which parameters, and what they are."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Line(NamedTuple):
    """What is known of the parameters that a pattern matches.

    pattern: of names inside the model that has the configuration, as in a shell.
    reason: what they are, for `table()`.
    options: group keys: "rule", "split_sizes", "transposed"; and "role".
    """

    pattern: str
    reason: str
    options: Mapping[str, Any]


Recipe = Callable[[Any], list[Line]]  # of a configuration


def fused(pattern: str, reason: str, split: tuple[int, ...] | str, **options: Any) -> Line:
    """Several matrices in one weight."""
    return Line(pattern, reason, {"split_sizes": split, **options})


def stack(
    pattern: str, reason: str, split: tuple[int, ...] | str | None = None, **options: Any
) -> Line:
    """A matrix, or several, of every expert: 3-D."""
    cut = {} if split is None else {"split_sizes": split}
    return Line(pattern, reason, {"rule": "muon", "role": "matrix", **cut, **options})


def gate(pattern: str, reason: str) -> Line:
    """A weight that chooses or weighs, and is no hidden matrix."""
    return Line(pattern, reason, {"rule": "adamw", "role": "gate"})


def head(pattern: str, reason: str) -> Line:
    """An output head by another name."""
    return Line(pattern, reason, {"rule": "adamw", "role": "unembedding"})
