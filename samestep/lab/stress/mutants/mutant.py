"""A mutant: a known bug of this field as a small patch of the shipped code."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from samestep.lab.stress.rank import Patch

RANDOM = "dist_adamw_muon_random"  # the scenario in which most bugs show


@dataclass(frozen=True)
class Mutant:
    """A known bug, the check that has to catch it, and the case in which it shows.

    patch: changes the code under test while it is entered, in every rank.
    expected: the check that the story names; being caught by another one only is an accident.
    """

    name: str
    story: str
    expected: str
    patch: Patch
    scenario: str
    layout: str = "zero2"
    world: int = 2
    steps: int = 16
    reduction: str = "ordered"
    device: str = "cpu"


MUTANTS: dict[str, Mutant] = {}
XLA_MUTANTS: dict[str, Mutant] = {}  # run with --device xla


def mutant(
    expected: str, scenario: str, *, replaces: tuple[Any, str] | None = None, **place: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a bug: the decorated function takes the place of what `replaces` names.

    Its docstring is the story. A replacement gets what it replaces as its first argument. Without
    `replaces` the function is called whenever the bug begins, and gives a list of (owner, name,
    replacement): for bugs in several places, or that remember something.
    """

    def register(bug: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def applied() -> Iterator[None]:
            with ExitStack() as stack:
                for each in bug() if replaces is None else [(*replaces, bug)]:
                    stack.enter_context(_replaced(*each))
                yield

        name, story = bug.__name__, " ".join((inspect.getdoc(bug) or "").split())
        made = Mutant(name, story, expected, applied, scenario, **place)
        (XLA_MUTANTS if made.device == "xla" else MUTANTS)[name] = made
        return bug

    return register


def _replaced(owner: Any, name: str, replacement: Callable[..., Any]) -> Any:
    original = getattr(owner, name)

    def patched(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    return mock.patch.object(owner, name, patched)
