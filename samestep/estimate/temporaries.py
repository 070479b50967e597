"""How much memory a rule needs while it runs: found by running it on tensors without memory."""

import platform
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # documented; the only way
from torch.utils._pytree import tree_leaves

from samestep.rules.orthogonalize import cheaper_execution
from samestep.rules.rule import Rule
from samestep.rules.state import MASTER
from samestep.update.plain import Operand, is_staged, run_rule, update_blocks, update_elementwise


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the bytes of storages made inside, less those that are gone.

    `on_cpu`: products of a transposed stack have room for one copied matrix, where torch's do.
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
        before = {id(leaf.untyped_storage()) for leaf in tree_leaves(args) if _is_tensor(leaf)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if _is_tensor(leaf):
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


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def peak_of(call: Callable[[], object], *, on_cpu: bool) -> int:
    """Bytes of what a call makes, at their most; what it gives counts too."""
    live = LiveBytes(on_cpu)
    with live:
        kept = call()
    del kept
    return live.peak


def stack_peak(
    rule: Rule,
    options: Mapping[str, Any],
    count: int,
    block: tuple[int, int],
    param_dtype: torch.dtype,
    *,
    master: bool,
    on_cpu: bool,
) -> int:
    """Of a matrix rule on so many blocks of one shape that lie in their parameters."""

    def once() -> int:
        operands = [_operand(rule, options, block, param_dtype, master) for _ in range(count)]
        given, scalars = _options(rule, options, on_cpu), _scalars(rule, options)
        return peak_of(
            lambda: update_blocks(rule, operands, scalars, given, run_rule), on_cpu=on_cpu
        )

    copies = on_cpu and _copies_transposed()
    key = ("stack", rule.name, _text(options), count, block, param_dtype, master, on_cpu, copies)
    return _remembered(key, once)


def slice_peak(
    rule: Rule,
    options: Mapping[str, Any],
    elements: int,
    param_dtype: torch.dtype,
    *,
    master: bool,
    on_cpu: bool,
) -> int:
    """Of an elementwise rule on one slice."""

    def once() -> int:
        operand = _operand(rule, options, (elements,), param_dtype, master)
        given, scalars = _options(rule, options, on_cpu), _scalars(rule, options)
        found = peak_of(
            lambda: update_elementwise(rule, operand, scalars, given, run_rule), on_cpu=on_cpu
        )
        # On the host AdamW's numbers are Python's, which saves a product; meta is no host.
        return found - operand.grad.nbytes if on_cpu and rule.name == "adamw" else found

    key = ("slice", rule.name, _text(options), elements, param_dtype, master, on_cpu)
    return _remembered(key, once)


def transform_peak(
    rule: Rule,
    options: Mapping[str, Any],
    count: int,
    block: tuple[int, int],
    dtype: torch.dtype,
    *,
    on_cpu: bool,
) -> int:
    """Of the stage of a matrix rule that needs whole blocks, with the stack it is given."""

    def once() -> int:
        shapes = rule.state_shapes(block, options)
        state = {
            key: _meta((count, *shape), dtype) for key, shape in shapes.items() if shape != block
        }
        given, scalars = _options(rule, options, on_cpu), _scalars(rule, options)
        stack = _meta((count, *block), dtype)
        assert is_staged(rule)
        staged = rule
        found = peak_of(lambda: staged.transform(stack, state, scalars, given), on_cpu=on_cpu)
        return found + stack.untyped_storage().nbytes()

    copies = on_cpu and _copies_transposed()
    key = ("transform", rule.name, _text(options), count, block, dtype, on_cpu, copies)
    return _remembered(key, once)


def kernel_peak(count: int, rows: int, cols: int) -> int:
    """Of the kernels on a GPU: directions in and out, and squares, in 16 bits.

    Seven squares on the Gram matrix, two step by step: counted from `kernels/orthogonalize.py`.
    Receipts of `samestep bench step` have 1,966,083,072 and 6,039,801,344 bytes for gpt-1280 and
    gpt-2048, and this gives 3,072 and 3,840 less.
    """
    short, long = sorted((rows, cols))
    squares = 7 if cheaper_execution(rows, cols) == "gram" else 2
    return 2 * count * (2 * short * long + squares * short * short)


def _operand(
    rule: Rule,
    options: Mapping[str, Any],
    shape: tuple[int, ...],
    param_dtype: torch.dtype,
    master: bool,
) -> Operand:
    math = torch.float64 if param_dtype == torch.float64 else torch.float32
    shapes = {**rule.state_shapes(shape, options), **({MASTER: shape} if master else {})}
    state = {key: _meta(own, math) for key, own in shapes.items()}
    return Operand(_meta(shape, param_dtype), _meta(shape, math), state)


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _scalars(rule: Rule, options: Mapping[str, Any]) -> dict[str, Tensor]:
    return {
        key: torch.zeros((), dtype=torch.float64, device="meta") for key in rule.scalars(options)
    }


def _options(rule: Rule, options: Mapping[str, Any], on_cpu: bool) -> dict[str, Any]:
    """The group's, with the dtype that the device would choose: the meta device has none."""
    given = {key: options[key] for key in rule.defaults}
    if on_cpu and "compute_dtype" in given and given["compute_dtype"] is None:
        given["compute_dtype"] = torch.float32
    return given


def _text(options: Mapping[str, Any]) -> str:
    kept = ("params", "param_names", "split_sizes")
    return repr(sorted((k, repr(v)) for k, v in options.items() if k not in kept))


_known: dict[object, int] = {}


def _remembered(key: object, once: Callable[[], int]) -> int:
    if key not in _known:
        _known[key] = once()
    return _known[key]
