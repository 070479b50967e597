"""Runs a schedule: each operation by the function for its type, as a range a profiler shows."""

from collections.abc import Callable, Mapping
from functools import cache
from itertools import groupby
from typing import Any

from torch._C._profiler import _RecordFunctionFast  # 0.5 us when nobody profiles, not 60

from samestep.plan.schedule import Operation, Schedule

Handlers = Mapping[type[Operation], Callable[[Any], None]]


def execute(schedule: Schedule, handlers: Handlers) -> None:
    """Run the operations one after the other; what they start may go on in the background."""
    for kind, alike in groupby(schedule, type):  # one range for neighbours
        handle = handlers[kind]
        with _range(kind):
            for operation in alike:
                handle(operation)


@cache
def _range(kind: type) -> _RecordFunctionFast:
    return _RecordFunctionFast(f"samestep.{kind.__name__.lower()}")
