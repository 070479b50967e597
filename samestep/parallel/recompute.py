"""Activation recomputation: blocks run again in backward, and keep only what they were given.

    for block in model.blocks:
        recompute(block)

It is torch's checkpoint without reentrant autograd, around each block's `forward`: under hooks of
FSDP2, and without new names in checkpoints. What must not happen twice goes through `once`: which
experts a token has chosen, what is counted, what is asked of other ranks.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from threading import local
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

T = TypeVar("T")


class _Kept:
    """What `once` has found in one call of one block, in order."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.taken: int | None = None  # None while the block runs for the first time

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def next(self, compute: Callable[[], T]) -> T:
        if self.taken is None:
            self.values.append(compute())
            return self.values[-1]  # type: ignore[no-any-return]
        if self.taken == len(self.values):
            raise RuntimeError(
                "a block calls `once` more often in its recomputation than in its forward: it must "
                "take the same way both times"
            )
        self.taken += 1
        return self.values[self.taken - 1]  # type: ignore[no-any-return]


class _Current(local):
    """What a thread runs: backward has threads of its own."""

    kept: _Kept | None = None  # no ContextVar: torch.compile would stop at it


_current = _Current()


@torch.no_grad()
def once(compute: Callable[[], T]) -> T:
    """What `compute` gives, which a recomputation takes from the forward instead of running it.

    For choices, counters and messages: nothing in it has a gradient. Elsewhere it just runs.
    """
    kept = _current.kept
    if kept is None:
        return compute()
    found: T = kept.next(compute)
    return found


def recompute(block: nn.Module, compile: str | None = None) -> None:
    """Let a block compute again in backward what it would have kept.

    Before FSDP2 is applied. Losses and gradients are the same bits where kernels give the same
    bits every time.

    Args:
        block: Its forward depends on its arguments, parameters and buffers, which do not change
            before backward, and on torch's random numbers, which are drawn again.
        compile: A backend of torch.compile for what is run again: both times the same graphs.
    """
    if isinstance(block.forward, partial) and block.forward.func is _run:
        raise ValueError("this block is recomputed already: ask for it once")
    forward = block.forward if compile is None else torch.compile(block.forward, backend=compile)
    block.forward = partial(_run, forward)


def _run(forward: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **keywords)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=_contexts, **keywords)


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    kept = _Kept()
    return _Running(kept, None), _Running(kept, 0)


class _Running(AbstractContextManager[None]):
    """While a block runs, what it keeps is in reach; `taken`: for the first time, or from where.

    May be entered again: so is a recomputation whose backward is run more than once.
    """

    def __init__(self, kept: _Kept, taken: int | None) -> None:
        self._kept, self._taken = kept, taken

    def __enter__(self) -> None:
        self._kept.taken = self._taken
        self._before, _current.kept = _current.kept, self._kept

    def __exit__(self, *error: Any) -> None:
        _current.kept = self._before
