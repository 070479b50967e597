"""The math of rules through torch.compile, for `compile=True`: one graph per signature."""

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from samestep.rules.rule import Rule
from samestep.rules.state import State
from samestep.update.plain import Result, Scalars, run_rule


class CompiledRules:
    """Runs rules like `run_rule`, each compiled once per shape, dtype, device and options.

    Scheduled numbers arrive as 0-D tensors, so they are not part of the signature.
    """

    def __init__(self, backend: str) -> None:
        known = torch.compiler.list_backends(exclude_tags=())
        if backend not in known:
            raise ValueError(
                f"compile={backend!r}: torch.compile has no such backend; it has {known}"
            )
        try:
            torch.compile(run_rule, backend=backend)  # nothing is compiled before it is called
        except RuntimeError as error:  # of a Python that is newer than this torch
            raise ValueError(
                f"compile={backend!r}: torch {torch.__version__} says {str(error)!r}: "
                "leave compile out, or use a newer torch"
            ) from error
        self.backend = backend
        self._graphs: dict[tuple[object, ...], Callable[..., Result]] = {}

    def __call__(
        self,
        rule: Rule,
        param: Tensor,
        grad: Tensor,
        state: State,
        scalars: Scalars,
        options: Mapping[str, Any],
        measure: bool = False,
    ) -> Result:
        signature = (
            rule.name,
            tuple(param.shape),
            param.dtype,
            param.device,
            tuple(state),
            repr(sorted(options.items())),
            measure,
        )
        if signature not in self._graphs:
            # torch limits the number of graphs per code object, and a model may have more
            # shapes than that: each signature gets a code object of its own.
            own = FunctionType(
                run_rule.__code__.replace(), run_rule.__globals__, argdefs=run_rule.__defaults__
            )
            self._graphs[signature] = torch.compile(
                own, backend=self.backend, dynamic=False, fullgraph=True
            )
        return self._graphs[signature](rule, param, grad, state, scalars, dict(options), measure)
