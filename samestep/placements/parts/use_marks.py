"""Which parameters this rank has used, where FSDP2 is given zeros for those it has not.

A mark is about one gradient: with that it comes and goes, whoever drops it.
"""

import weakref
from weakref import WeakValueDictionary

from torch import Tensor


class Mark:
    """What is known of a sharded parameter since its gradient was dropped the last time.

    used: a backward pass of this rank has reached it.
    """

    def __init__(self, param: Tensor) -> None:
        self.param = param  # keeps it alive, so that its id stays its own
        self.used = False
        self._grad: weakref.ref[Tensor] | None = None  # the one that FSDP2 has made
        _marks[id(param)] = self

    def reduced(self) -> None:
        """FSDP2 has reduced its unit: what is there as gradient, if anything, is FSDP2's."""
        grad = self.param.grad
        self._grad = None if grad is None else weakref.ref(grad)

    def renew(self) -> None:
        """Forget about a gradient that is gone."""
        if self._grad is not None and not self._is_ours():
            self.used = False
            self._grad = None

    def only_zeros(self) -> bool:
        """Whether this rank had nothing but zeros to give to the gradient that is there."""
        return not self.used and self._is_ours()

    def _is_ours(self) -> bool:
        grad = self.param.grad
        return grad is not None and self._grad is not None and self._grad() is grad


_marks: WeakValueDictionary[int, Mark] = WeakValueDictionary()  # by id of the parameter


def has_gradient(param: Tensor) -> bool:
    """Whether this rank has a gradient to speak of: zeros that only stood in for one are none."""
    if param.grad is None:
        return False
    mark = _marks.get(id(param))
    return mark is None or not mark.only_zeros()
