"""Runs a schedule: each operation by the function for its type, as a range a profiler shows."""

from collections.abc import Callable, Mapping
from typing import Any

from torch.profiler import record_function

from samestep.plan.schedule import Operation, Schedule

Handlers = Mapping[type[Operation], Callable[[Any], None]]


def execute(schedule: Schedule, handlers: Handlers) -> None:
    """Run the operations one after the other; what they start may go on in the background."""
    for operation in schedule:
        with record_function(f"samestep.{type(operation).__name__.lower()}"):
            handlers[type(operation)](operation)
