"""The list of promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.promises.layouts import LAYOUTS, never
from tests.promises.trial import Trial


@dataclass(frozen=True, eq=False)
class Promise:
    """A statement that something raises, warns or works, and how it is tried."""

    subject: str
    sentence: str
    kind: str
    action: Callable[[Trial], None]
    options: tuple[str, ...]
    layouts: tuple[str, ...]
    but: dict[object, str]

    @property
    def name(self) -> str:
        return self.action.__name__

    @property
    def tried(self) -> str:
        return " ".join((self.action.__doc__ or "").split()).rstrip(".")

    def why_not(self, layout: str, option: str) -> str | None:
        """Why it says nothing about a layout with an option."""
        if layout not in self.layouts and layout not in self.but:
            return "this is of other layouts"
        found = never(layout, option)
        for key in ((layout, option), option, layout):
            found = found or self.but.get(key)
        return found


PROMISES: list[Promise] = []


def promise(
    subject: str,
    sentence: str,
    kind: str,
    options: tuple[str, ...] = ("",),
    layouts: tuple[str, ...] = tuple(LAYOUTS),
    but: dict[object, str] | None = None,
):
    """Puts a function on the list; its docstring says how the sentence is tried."""
    assert kind in ("raises", "warns", "works")

    def listed(action: Callable[[Trial], None]) -> Callable[[Trial], None]:
        PROMISES.append(Promise(subject, sentence, kind, action, options, layouts, but or {}))
        return action

    return listed


MISTAKES, DISTRIBUTED = "Mistakes that are told", "Several ranks"
FLAT_PAGE, TROUBLE = "Flat buffers", "When it goes wrong"
