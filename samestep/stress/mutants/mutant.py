"""A mutant: a known bug of this field as a small patch of the shipped code."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

RANDOM = "dist_adamw_muon_random"  # the scenario in which most bugs show

Patch = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Mutant:
    """What the bug is, where it shows, and which check has to catch it.

    patch: changes the code under test while it is entered, in every rank.
    expected: the check that the story names; being caught by another one only is an accident.
    """

    name: str
    story: str
    expected: str
    scenario: str
    patch: Patch
    layout: str = "zero2"
    world: int = 2
    steps: int = 16
    reduction: str = "ordered"


MUTANTS: dict[str, Mutant] = {}


def mutant(
    story: str, *, expected: str, scenario: str, **where: Any
) -> Callable[[Callable[[], list[Any]]], Callable[[], list[Any]]]:
    """Register the mutant that the decorated function describes as (object, name, replacement).

    A replacement gets what it replaces as its first argument.
    """

    def register(patches: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
        @contextmanager
        def applied() -> Iterator[None]:
            with _all_of([_replaced(*each) for each in patches()]):
                yield

        name = patches.__name__
        MUTANTS[name] = Mutant(name, story, expected, scenario, applied, **where)
        return patches

    return register


def _replaced(owner: Any, name: str, replacement: Callable[..., Any]) -> Any:
    original = getattr(owner, name)

    def patched(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    return mock.patch.object(owner, name, patched)


@contextmanager
def _all_of(patches: list[Any]) -> Iterator[None]:
    if not patches:
        yield
        return
    with patches[0], _all_of(patches[1:]):
        yield
