"""A mutant: a known bug of this field as a small patch of the shipped code."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from samestep.lab.stress.delays import Delays
from samestep.lab.stress.rank import Patch

RANDOM = "dist_adamw_muon_random"  # the scenario in which most bugs show


@dataclass(frozen=True)
class Mutant:
    """A known bug, the check that has to catch it, and the case in which it shows.

    patch: changes the code under test while it is entered, in every rank.
    expected: the check that the story names; being caught by another one only is an accident.
    device: "cuda": it shows on the streams of NCCL alone. "xla": in an XLA program.
    delays: with which it shows; the case without the bug has them too.
    sample_every: steps between samples, at which the host waits for the device.
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
    delays: Delays | None = None
    sample_every: int = 1


MUTANTS: dict[str, Mutant] = {}
XLA_MUTANTS: dict[str, Mutant] = {}  # run with --device xla
STREAM_MUTANTS: dict[str, Mutant] = {}  # run with --backend nccl
_OF_DEVICE = {"cpu": MUTANTS, "xla": XLA_MUTANTS, "cuda": STREAM_MUTANTS}


def mutant(
    expected: str, scenario: str, *, replaces: tuple[Any, str] | None = None, **place: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a bug: the decorated function takes the place of what `replaces` names.

    Its docstring is the story. A replacement gets what it replaces as its first argument. Without
    `replaces` the function is called whenever the bug begins, and gives a list of (owner, name,
    replacement): for bugs in several places, or that remember something.
    """

    def register(bug: Callable[..., Any]) -> Callable[..., Any]:
        places = bug if replaces is None else lambda: [(*replaces, bug)]
        name, story = bug.__name__, " ".join((inspect.getdoc(bug) or "").split())
        made = Mutant(name, story, expected, patched(places), scenario, **place)
        _OF_DEVICE[made.device][name] = made
        return bug

    return register


Place = tuple[Any, str, Callable[..., Any]]  # owner, name, replacement


def patched(places: Callable[[], Iterable[Place]] | Iterable[Place]) -> Patch:
    """A patch that puts replacements in their places; a function gives them anew each time."""

    @contextmanager
    def applied() -> Iterator[None]:
        with ExitStack() as stack:
            for each in places() if callable(places) else places:
                stack.enter_context(_replaced(*each))
            yield

    return applied


def _replaced(owner: Any, name: str, replacement: Callable[..., Any]) -> Any:
    original = getattr(owner, name)

    def in_place(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    return mock.patch.object(owner, name, in_place)
