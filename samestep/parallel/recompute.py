"""Activation recomputation: blocks run again in backward instead of keeping activations.

    for block in model.blocks:
        recompute(block)                        # keeps what the block was given
        recompute(block, what="selective")      # and what its matrix products and attention give

It is torch's checkpoint without reentrant autograd, around each block's `forward`: under hooks of
FSDP2, and without new names in checkpoints. What must not happen twice goes through `once`: which
experts a token has chosen, what is counted, what is asked of other ranks.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from threading import local
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

T = TypeVar("T")
What = Literal["full", "selective"]

# What costs most to compute again, by the names that torch's kernels have here.
PRODUCTS = (
    "mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_attention_math",
)  # fmt: skip


class _Kept:
    """Results of `once` in one call of a block, in order."""

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
                "a block calls `once` more often in its recomputation than in its "
                "forward: it must run the same code both times"
            )
        self.taken += 1
        return self.values[self.taken - 1]  # type: ignore[no-any-return]


class _Current(local):
    """Thread-local state, because backward runs in its own threads."""

    kept: _Kept | None = None  # no ContextVar: torch.compile would stop at it


_current = _Current()


@torch.no_grad()
def once(compute: Callable[[], T]) -> T:
    """Run `compute` in forward only; the recomputation reuses its result.

    For choices, counters and messages: nothing in it has a gradient. Elsewhere it just runs.
    """
    kept = _current.kept
    if kept is None:
        return compute()
    found: T = kept.next(compute)
    return found


def what_of(asked: bool | What) -> What | None:
    """The part of a block that `recompute=` selects; None: nothing."""
    if asked in ("full", "selective"):
        return asked
    if not isinstance(asked, bool):
        raise ValueError(f'recompute must be True, False, "full" or "selective", got {asked!r}')
    return "full" if asked else None


def recompute(block: nn.Module, compile: str | None = None, what: What = "full") -> None:
    """Wrap a block so that backward recomputes its activations.

    Before FSDP2 is applied. Losses and gradients are the same bits where kernels give the same
    bits every time.

    Args:
        block: Its forward depends on its arguments, parameters and buffers, which do not change
            before backward, and on torch's random numbers, which are drawn again.
        compile: A backend of torch.compile for what is run again: both times the same graphs.
        what: "full": all of it. "selective": all but what `PRODUCTS` give, which is kept; several
            times the memory, and hardly any time.
    """
    if isinstance(block.forward, partial) and block.forward.func is _run:
        raise ValueError("this block is wrapped for recomputation already: call recompute once")
    if compile is not None and what == "selective":
        raise ValueError(
            'recompute="selective" chooses single operations, which a compiled block '
            'does not have: use "full", or leave compile out'
        )
    forward = block.forward if compile is None else torch.compile(block.forward, backend=compile)
    block.forward = partial(_run, forward, _contexts if what == "full" else _selective_contexts)


def _run(
    forward: Callable[..., Any], contexts: Callable[[], Any], *args: Any, **keywords: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **keywords)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **keywords)


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    kept = _Kept()
    return _Running(kept, None), _Running(kept, 0)


def _selective_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    first, again = _contexts()
    kept: list[Any] = []
    return _Together(first, _Products(kept, False)), _Together(again, _Products(kept, True))


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps results of matrix products in forward, and reuses them in recomputation.

    torch's `create_selective_checkpoint_contexts` counts every operation, and so those of hooks of
    FSDP2 inside of a block, which are others the second time.
    """

    def __init__(self, kept: list[Any], again: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept, self._again, self._taken = kept, again, 0
        found = [getattr(torch.ops.aten, name, None) for name in PRODUCTS]
        self._operations = {operation.default for operation in found if operation is not None}

    def __enter__(self) -> Any:
        self._taken = 0
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self._operations:
            return func(*args, **(kwargs or {}))
        if not self._again:
            given = func(*args, **(kwargs or {}))
            self._kept.append(tree_map_only(Tensor, Tensor.detach, given))
            return given
        if self._taken == len(self._kept):
            raise RuntimeError(
                "a block runs more matrix products in its recomputation than in its "
                "forward: it must run the same code both times"
            )
        given, self._kept[self._taken] = self._kept[self._taken], None  # it is not needed longer
        if given is None:
            raise RuntimeError(
                'backward ran twice through a block with recompute="selective", which '
                'supports one: use "full" with retain_graph=True'
            )
        self._taken += 1
        return given


class _Together(AbstractContextManager[None]):
    """Several contexts as one."""

    def __init__(self, *contexts: AbstractContextManager[Any]) -> None:
        self._contexts = contexts
        self._entered = ExitStack()

    def __enter__(self) -> None:
        for each in self._contexts:
            self._entered.enter_context(each)

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)


class _Running(AbstractContextManager[None]):
    """Context of one run of a block, first or recomputed.

    May be entered again: so is a recomputation whose backward is run more than once.
    """

    def __init__(self, kept: _Kept, taken: int | None) -> None:
        self._kept, self._taken = kept, taken

    def __enter__(self) -> None:
        self._kept.taken = self._taken
        self._before, _current.kept = _current.kept, self._kept

    def __exit__(self, *error: Any) -> None:
        _current.kept = self._before
