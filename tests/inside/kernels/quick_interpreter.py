"""Triton's interpreter in a fraction of its time, with the same results.

For every call of a device function it looks through its whole language and replaces the builtins
once more, and it checks every sum and product of integers for overflow, which takes another seven
operations. None of our small shapes is near one, and what lies at a wrong place is seen in the
results. For every shape it writes down the types of its numbers, which nobody reads, and it makes
the table of numpy's types anew for every question. It brings operands of one shape to that shape,
and unwraps and checks every shape whenever a tensor has it. `make soak` has the interpreter as it
is.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import triton.language as tl
from triton.language.semantic import TritonSemantic
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
    _types_of_tuples_on_demand()
    _numpy_types_once()
    _shapes_once()
    _same_shapes_as_they_are()


def count_by_tensors() -> None:
    """Let loops end at a number that a launch was told: numpy takes arrays (1,) for none."""
    replace_methods = interpreter._patch_lang_tensor

    def with_index(tensor: type[tl.tensor], *more: Any) -> None:
        replace_methods(tensor, *more)
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = with_index


def _types_of_tuples_on_demand() -> None:
    init, kept = tl.tuple.__init__, "_type"

    def keep_values(self: tl.tuple, args: Sequence[Any], type: Any = None) -> None:
        if type is None:
            self.values = list(args)
        else:
            init(self, args, type)

    def type_of(self: tl.tuple) -> tl.tuple_type:
        if kept not in self.__dict__:
            init(self, self.values)
        return self.__dict__[kept]

    tl.tuple.__init__ = keep_values
    tl.tuple.type = property(type_of, lambda self, given: self.__dict__.update({kept: given}))


def _numpy_types_once() -> None:
    find = interpreter._get_np_dtype
    of_scalar = functools.cache(find)

    def of_type(type: tl.dtype) -> Any:
        element = type.element_ty if isinstance(type, tl.block_type) else type
        return find(element) if isinstance(element, tl.pointer_type) else of_scalar(element)

    interpreter._get_np_dtype = of_type


def _shapes_once() -> None:
    of_type = tl.block_type.__init__
    known: dict[Any, tuple[tl.tuple, int]] = {}  # shapes and sizes
    constants: dict[tuple[int, ...], tuple[tuple[tl.constexpr, ...], tl.constexpr]] = {}

    def make_type(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
        key = tuple(shape)
        if not all(type(size) is int for size in key):
            of_type(self, element_ty, shape)
            return
        if key not in known:
            of_type(self, element_ty, shape)
            known[key] = (self.shape, self.numel)
        self.element_ty = element_ty
        self.shape, self.numel = known[key]

    def make_tensor(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key not in constants:
            sizes = tuple(tl.constexpr(size) for size in key)
            constants[key] = (sizes, tl.constexpr(math.prod(key)))
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = constants[key]

    tl.block_type.__init__ = make_type
    tl.block_type.name = property(
        lambda self: f"<{self.shape}, {self.element_ty}>", lambda self, given: None
    )
    tl.tensor.__init__ = make_tensor


def _same_shapes_as_they_are() -> None:
    bring_together = TritonSemantic.broadcast_impl_value

    def broadcast(self: Any, one: tl.tensor, other: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
        if one.type.is_block() and other.type.is_block() and one.shape is other.shape:
            return one, other
        return bring_together(self, one, other)

    TritonSemantic.broadcast_impl_value = broadcast
