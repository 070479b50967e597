"""Reads the measured size from which on sharding a parameter beats an all-reduce.

`samestep bench crossover` measures, and leaves a file that an optimizer reads.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

KIND = "samestep crossover"
FORMAT = 1


class Measurement(NamedTuple):
    """Median milliseconds of both ways for a parameter of `size` elements."""

    size: int
    all_reduce_ms: float
    shard_ms: float

    @property
    def ratio(self) -> float:
        """Time of sharding over that of an all-reduce; below 1 sharding is faster."""
        return self.shard_ms / self.all_reduce_ms


def crossover_of(measurements: Sequence[Measurement]) -> int:
    """The smallest size from which on sharding is at least as fast at every measured size.

    If it is slower at the largest, there is none: one more than the largest.
    """
    crossover = max(each.size for each in measurements) + 1
    for each in sorted(measurements, reverse=True):
        if each.shard_ms > each.all_reduce_ms:
            break
        crossover = each.size
    return crossover


def receipt(
    asked: Mapping[str, Any], ran: Mapping[str, Any], measurements: Sequence[Measurement]
) -> dict[str, Any]:
    """The receipt of a crossover measurement: request, environment and result."""
    return {
        "kind": KIND,
        "format": FORMAT,
        "asked": dict(asked),
        "ran": dict(ran),
        "measurements": [each._asdict() for each in measurements],
        "crossover": crossover_of(measurements),
    }


def read_crossover(path: str | os.PathLike[str]) -> int:
    """The crossover in a receipt of `samestep bench crossover`.

    Raises ValueError, naming the path, if there is no whole receipt.
    """
    try:
        content = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise _refused(path, error.strerror or str(error)) from error
    except ValueError as error:  # not JSON, or not text
        raise _refused(path, f"it is not JSON ({error})") from error
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise _refused(path, f"it does not say {{'kind': {KIND!r}}}")
    if content.get("format") != FORMAT:
        raise _refused(path, f"its format is {content.get('format')!r}, not {FORMAT}")
    try:
        measurements = [Measurement(**entry) for entry in content["measurements"]]
        implied = crossover_of(measurements)
    except (KeyError, TypeError, ValueError) as error:
        raise _refused(path, f"its measurements are damaged ({error!r})") from error
    crossover = content.get("crossover")
    if type(crossover) is not int or crossover < 1 or crossover != implied:
        raise _refused(path, f"its crossover is {crossover!r}, its measurements say {implied!r}")
    return crossover


def _refused(path: str | os.PathLike[str], why: str) -> ValueError:
    return ValueError(
        f"{os.fspath(path)!r} is not a crossover receipt: {why}. Write one with "
        "`samestep bench crossover`, or give the number itself"
    )
