"""Warnings that point at the user's line, however deep in the library; names in messages."""

import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

# torch.optim wraps the constructors and steps of optimizers in frames of its own.
_FOLDERS = Path(__file__).parents[1], Path(torch.__file__).parent
_NOT_THE_USERS = tuple(f"{folder}{os.sep}" for folder in _FOLDERS)


def some(names: Sequence[str], limit: int = 3) -> str:
    """Return a text of the first names and the number of the others."""
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")


def warn_user(message: str) -> None:
    """Warn at the nearest line outside this library and torch."""
    level = 2
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
        level += 1
    warnings.warn(message, stacklevel=level)
