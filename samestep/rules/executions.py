"""The executions of rules: the code that runs a rule on each kind of device.

Every rule is written in plain torch, which runs on any device. A kind of device that has faster
code, or needs other code, has an entry here with the names of these functions. They are imported
with the first tensor on such a device: rules know no kernels, and Triton takes long to import.
"""

from functools import cache
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch


class DeviceExecution(NamedTuple):
    """The functions of one kind of device, each as "module:name"; None: plain torch.

    missing: `device -> str | None`: the reason why `update` does not run on a device.
    update: updates the operands of a group that it can, and gives the others back
        (`update.triton.update_with_kernels`).
    prepare: compiles what `update` will launch of some groups (`update.triton.compile_kernels`).
    missing_products: `device -> str | None`: the reason why `products` does not.
    products: orthogonalizes blocks, as `orthogonalize.orthogonalize_plain`; it multiplies in
        float16 whatever 16 bits it is given.
    run: runs a rule on one stack of blocks or one operand, as `update.plain.run_rule`.
    """

    missing: str | None = None
    update: str | None = None
    prepare: str | None = None
    missing_products: str | None = None
    products: str | None = None
    run: str | None = None


EXECUTIONS = {
    "cuda": DeviceExecution(
        missing="samestep.kernels.choice:missing",
        update="samestep.update.triton:update_with_kernels",
        prepare="samestep.update.triton:compile_kernels",
        missing_products="samestep.kernels.choice:missing_products",
        products="samestep.kernels.orthogonalize:orthogonalize_blocks",
    ),
    "xla": DeviceExecution(run="samestep.update.spmd:run_spmd_rule"),
}
_PLAIN = DeviceExecution()


def executions_on(device: torch.device) -> tuple[Any, Any]:
    """Return the `update` and the `run` of a device; None: plain or compiled torch runs."""
    own = EXECUTIONS.get(device.type)
    if own is None:
        return None, None
    return _usable(own.update, own.missing, device), _usable(own.run, None, device)


def prepare_on(device: torch.device) -> Any:
    """Return the function that compiles the kernels `update` will launch, or None."""
    own = EXECUTIONS.get(device.type, _PLAIN)
    return _usable(own.prepare, own.missing, device)


def products_on(device: torch.device) -> Any:
    """Return the function that orthogonalizes with kernels on a device; None: plain torch does."""
    own = EXECUTIONS.get(device.type, _PLAIN)
    return _usable(own.products, own.missing_products, device)


def _usable(name: str | None, missing: str | None, device: torch.device) -> Any:
    if name is None or (missing is not None and _resolved(missing)(device) is not None):
        return None
    return _resolved(name)


_resolved = cache(resolve_name)
