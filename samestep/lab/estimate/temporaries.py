"""Temporaries of update rules, found by running the rules on meta tensors."""

import platform
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # documented; the only way
from torch.utils._pytree import tree_leaves

from samestep.groups.param_groups import rule_of
from samestep.rules.rule import Rule, is_staged, math_dtype
from samestep.rules.state import is_elementwise, state_shapes, stored_tensors
from samestep.update.plain import Operand, run_rule, update_blocks, update_elementwise


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Track the live and peak bytes of storages that are made inside this mode.

    `on_cpu`: count the matrix that torch copies in products of a transposed stack on some CPUs.
    """

    def __init__(self, on_cpu: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._now = 0
        self._known: set[int] = set()
        self.peak = 0
        self._copies = on_cpu and _copies_transposed()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        before = {
            id(leaf.untyped_storage()) for leaf in tree_leaves(args) if isinstance(leaf, Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if id(storage) not in before and id(storage) not in self._known:
                    self._enter(storage)
        if self._copies and func is torch.ops.aten.bmm.default and not args[1].is_contiguous():
            self.peak = max(self.peak, self._now + args[1][0].numel() * args[1].element_size())
        return result

    def _enter(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        self._known.add(key)
        self._now += size
        self.peak = max(self.peak, self._now)

        def gone() -> None:
            self._known.discard(key)
            self._now -= size

        weakref.finalize(storage, gone)


def _copies_transposed() -> bool:
    """Whether a product on this CPU copies a transposed matrix first: oneDNN on ARM does."""
    enabled: Any = torch.backends.mkldnn.enabled  # torch's types call it a property
    return bool(enabled) and platform.machine() in ("aarch64", "arm64")


class RulePeaks:
    """The peak bytes that a param group's rule allocates while it runs.

    The rule runs on the meta device, which has no values; results are cached.
    """

    def __init__(self, group: Mapping[str, Any], *, on_cpu: bool) -> None:
        self._rule, self._group, self._on_cpu = rule_of(group), group, on_cpu
        apart = ("params", "param_names", "split_sizes")
        self._text = repr(sorted((k, repr(v)) for k, v in group.items() if k not in apart))
        self._scalars = {key: _meta((), torch.float64) for key in self._rule.scalars(group)}
        self._options = {key: group[key] for key in self._rule.defaults}
        if on_cpu and self._options.get("compute_dtype", ...) is None:
            self._options["compute_dtype"] = torch.float32  # what the device would choose

    def stack(self, count: int, block: tuple[int, int], dtype: torch.dtype, *, master: bool) -> int:
        """Return the peak bytes of a matrix rule on so many unstacked blocks of one shape."""
        made = partial(self._operand, block, dtype, master)
        about = "stack", count, block, dtype, master
        return self._peak(update_blocks, lambda: [made() for _ in range(count)], about)

    def slice(self, elements: int, dtype: torch.dtype, *, master: bool) -> int:
        """Return the peak bytes of an elementwise rule on one slice."""
        made = partial(self._operand, (elements,), dtype, master)
        found = self._peak(update_elementwise, made, ("slice", elements, dtype, master))
        # On the host AdamW's numbers are Python's, which saves a product, and a gradient is copied
        # only if it has huge elements; meta is no host.
        saved = 2 if self._on_cpu and self._rule.name == "adamw" else 0
        return found - saved * elements * math_dtype(_meta((), dtype)).itemsize

    def transform(self, count: int, block: tuple[int, int], dtype: torch.dtype) -> int:
        """Return the peak bytes of a rule's `transform` of whole blocks, their stack included."""
        shapes = {
            key: own
            for key, own in self._rule.state_shapes(block, self._group).items()
            if not is_elementwise(self._rule, key, self._group)
        }

        def made() -> tuple[Tensor, dict[str, Tensor]]:
            state = {key: _meta((count, *own), dtype) for key, own in shapes.items()}
            return _meta((count, *block), dtype), state

        def run(rule: Rule, made: Any, scalars: Any, options: Any, _: object) -> object:
            assert is_staged(rule)
            stack, state = made
            return rule.transform(stack, state, scalars, options)

        found = self._peak(run, made, ("transform", count, block, dtype))
        return found + count * (prod(block) + sum(map(prod, shapes.values()))) * dtype.itemsize

    def _operand(self, shape: tuple[int, ...], dtype: torch.dtype, master: bool) -> Operand:
        like = _meta(shape if len(shape) > 1 else (1, *shape), dtype)
        stored = stored_tensors(self._rule, like, None, self._group, master)
        shapes = state_shapes(self._rule, shape, self._group, stored)
        state = {key: _meta(own, stored[key].dtype) for key, own in shapes.items()}
        return Operand(like.view(shape), _meta(shape, math_dtype(like)), state)

    def _peak(self, run: Callable[..., object], made: Callable[[], Any], about: object) -> int:
        """Return the peak bytes of running a rule on operands, its results included."""
        key = self._text, self._on_cpu, self._on_cpu and _copies_transposed(), about
        if key not in _known:
            operands = made()
            with LiveBytes(self._on_cpu) as live:
                kept = run(self._rule, operands, self._scalars, self._options, run_rule)
            del kept
            _known[key] = live.peak
        return _known[key]


_known: dict[object, int] = {}


def kernel_is_enough(group: Mapping[str, Any]) -> bool:
    """Whether one kernel updates a slice on a GPU, without temporary tensors."""
    return rule_of(group).name == "adamw" and not group["amsgrad"]


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
