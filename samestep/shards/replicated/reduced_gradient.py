"""A placeholder in `.grad` for a gradient that was reduced and freed.

Whoever computes with it is told what to call instead. As long as it lies there, the gradient that
it stands for counts in the step; where it is gone, somebody has dropped that gradient.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from samestep.layout.boxes import clone_in_place, mesh_of

aten = torch.ops.aten


class GradientIsReducedError(RuntimeError):
    """Raised when code reads a gradient that was reduced and freed."""


class ReducedGradient(Tensor):
    """A tensor without memory, which raises when its values are needed.

    `zero_()` puts zeros into `.grad`, as it would with a gradient. What backward adds takes its
    place, if `accumulates` does not raise: it is called with what `.grad` is then.
    """

    _param: "weakref.ref[Tensor]"  # whose `.grad` this is, or was
    _name: str
    _accumulates: Callable[[Tensor], None]

    @staticmethod
    def __new__(
        cls, param: Tensor, dtype: torch.dtype, name: str, accumulates: Callable[[Tensor], None]
    ) -> "ReducedGradient":
        make: Any = Tensor._make_wrapper_subclass
        found: ReducedGradient = make(cls, param.shape, dtype=dtype, device=param.device)
        found._param, found._name, found._accumulates = weakref.ref(param), name, accumulates
        return found

    # Attributes such as shape and dtype are answered without a detour; operations come to dispatch.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Raise, except for operations that drop or accumulate."""
        if func is aten._foreach_zero_.default:
            for tensor in args[0]:
                tensor.zero_()
            return None
        first = next(t for t in _tensors([*args, *(kwargs or {}).values()]) if type(t) is cls)
        param = first._param()
        if param is not None and first is args[0]:
            if func is aten.detach.default:
                return cls(param, first.dtype, first._name, first._accumulates)
            if func is aten.zero_.default:
                param.grad = torch.zeros_like(param, dtype=first.dtype)
                return first
            inside_backward = torch._C._current_graph_task_id() >= 0
            if inside_backward and func in (aten.add_.Tensor, aten.add.Tensor):
                # Autograd adds to `.grad`: what it adds is all that there is here.
                grad = clone_in_place(args[1])
                first._accumulates(grad)
                if func is aten.add.Tensor:
                    return grad
                param.grad = grad
                return first
        raise first._error(func._schema.name.removeprefix("aten::"))

    def _error(self, what: str) -> GradientIsReducedError:
        return GradientIsReducedError(
            f"{what} on the gradient of {self._name!r}, which was reduced (averaged over ranks) "
            "and given back, so that no rank has it any more: to clip or to know the norm, call "
            "opt.clip_grad_norm_(max_norm) before step() in place of torch's clip_grad_norm_, or "
            "pass max_grad_norm= to the optimizer; "
            "opt.full_gradient(name) gives one gradient's mean; to read or edit gradients, build "
            "the optimizer with overlap_grad_reduce=False"
        )

    def _refuse(what: str) -> Any:  # type: ignore[misc]  # noqa: N805 - in the class body alone
        def refused(self: "ReducedGradient", *_: object, **__: object) -> Any:
            raise self._error(what)

        return refused

    # Whoever asks for memory would find none, and C++ code does not look.
    untyped_storage = _refuse("untyped_storage")
    storage = _refuse("storage")
    _typed_storage = _refuse("storage")
    share_memory_ = _refuse("share_memory_")
    data_ptr = _refuse("data_ptr")
    numpy = _refuse("numpy")
    tolist = _refuse("tolist")
    item = _refuse("item")
    __dlpack__ = _refuse("__dlpack__")
    __array__ = _refuse("__array__")
    del _refuse

    def __getattr__(self, name: str) -> Any:
        """Raise for DTensor methods, which need values."""
        param = self.__dict__["_param"]()
        if not name.startswith("_") and mesh_of(param) is not None and hasattr(param, name):
            raise self._error(name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ReducedGradient({self._name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
