"""Triton's interpreter in less than half its time, with the same results.

For every call of a device function it looks through its whole language and replaces the builtins
once more, and it checks every sum and product of integers for overflow, which takes another seven
operations. None of our small shapes is near one, and what lies at a wrong place is seen in the
results. `make soak` has the interpreter as it is.
"""

from __future__ import annotations

import types
from dataclasses import replace

from triton.runtime import interpreter


class _Kept:
    """Stands for the scope of a launch: what was replaced stays, as all kernels are interpreted."""

    def restore(self) -> None:
        pass


def install() -> None:
    """For the rest of this process."""
    replace_builtins, kept = interpreter._patch_lang, _Kept()
    done: set[int] = set()  # modules whose functions have what they need

    def replace_once(fn: types.FunctionType) -> _Kept:
        if id(fn.__globals__) not in done:
            done.add(id(fn.__globals__))
            replace_builtins(fn)
        return kept

    interpreter._patch_lang = replace_once
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
