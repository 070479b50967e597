"""Run a function on several ranks and collect its values.

``run_forked`` has real processes and gloo; ``run_threaded`` takes a few milliseconds.
"""

from collections.abc import Callable
from typing import Any

from samestep import launch
from samestep.launch import RanksFailed
from tests.limits import HANG, limit
from tests.ranks_threaded import run_threaded

__all__ = ["RanksFailed", "run_forked", "run_threaded"]


def run_forked(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float | Callable[[], float] = HANG,
    collective_timeout: float = limit(120.0),
    grace: float = limit(5.0),
) -> list[Any]:
    """`samestep.launch.run_forked` with limits for hangs alone.

    A test that itself waits for one of them to pass gives a short one, by `tests.limits.limit`.
    """
    return launch.run_forked(
        world_size,
        fn,
        *args,
        timeout=timeout,
        collective_timeout=collective_timeout,
        grace=grace,
    )
