"""A mutant: a known bug of this field as a small patch of the shipped code."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

from samestep.stress.rank import Patch

RANDOM = "dist_adamw_muon_random"  # the scenario in which most bugs show


class Place(NamedTuple):
    """The case in which a bug shows."""

    scenario: str
    layout: str = "zero2"
    world: int = 2
    steps: int = 16
    reduction: str = "ordered"


@dataclass(frozen=True)
class Mutant:
    """What the bug is, where it shows, and which check has to catch it.

    patch: changes the code under test while it is entered, in every rank.
    expected: the check that the story names; being caught by another one only is an accident.
    """

    name: str
    story: str
    expected: str
    patch: Patch
    scenario: str
    layout: str
    world: int
    steps: int
    reduction: str


MUTANTS: dict[str, Mutant] = {}


def mutant(
    story: str, *, expected: str, at: Place, replaces: tuple[Any, str] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a bug: the decorated function takes the place of what `replaces` names.

    A replacement gets what it replaces as its first argument. Without `replaces` the function is
    called whenever the bug begins, and gives a list of (owner, name, replacement): for bugs in
    several places, or that remember something.
    """

    def register(bug: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def applied() -> Iterator[None]:
            with ExitStack() as stack:
                for each in bug() if replaces is None else [(*replaces, bug)]:
                    stack.enter_context(_replaced(*each))
                yield

        name = bug.__name__
        MUTANTS[name] = Mutant(name, story, expected, applied, *at)
        return bug

    return register


def _replaced(owner: Any, name: str, replacement: Callable[..., Any]) -> Any:
    original = getattr(owner, name)

    def patched(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    return mock.patch.object(owner, name, patched)
