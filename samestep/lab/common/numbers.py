"""Numbers as people read them: distances, counts, bytes, seconds, times, lists of ranks."""

import math
from collections.abc import Sequence
from datetime import datetime


def short(distance: float) -> str:
    """Format a distance with two digits: 3.1e-7, 2e-5, 0.25, 0, infinite."""
    if distance == 0 or math.isinf(distance):
        return "infinite" if distance else "0"
    if 0.01 <= distance < 1000:
        return f"{distance:.2g}" if distance < 100 else f"{distance:.0f}"
    digits, power = f"{distance:.1e}".split("e")
    return f"{digits.removesuffix('.0')}e{int(power)}"


def count(number: int, noun: str) -> str:
    """Format a number with its noun: 1 run, 1,260 runs."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def size(amount: float) -> str:
    """Format a number of bytes: 0 B, 812 B, 9.2 kB, 1.5 MB."""
    for unit in ("B", "kB", "MB"):
        if amount < 999.5:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:,.3g} GB"


def duration(seconds: float) -> str:
    """Format seconds: 0 s, 12 µs, 3.4 ms, 7.5 s, 12 min 5 s, 1 h 4 min."""
    if seconds >= 3600:
        hours, minutes = divmod(round(seconds / 60), 60)
        return f"{hours} h {minutes} min"
    if seconds >= 59.95:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    if seconds >= 0.9995 or seconds == 0:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 0.9995e-3 else f"{seconds * 1e6:.3g} µs"


def moment(time: str) -> str:
    """Format a UTC time, given in ISO format, as `14 March 2026, 09:26 UTC`."""
    when = datetime.fromisoformat(time)
    return f"{when.day} {when:%B %Y, %H:%M} UTC"


def enumeration(names: Sequence[str], most: int = 3) -> str:
    """Join names as `a, b and c`; beyond `most`, as `a, b, c and 2 more`."""
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def ranks(numbers: Sequence[int]) -> str:
    """Format ranks as `rank 2` or `ranks 0, 1 and 3`."""
    names = [str(number) for number in numbers]
    return f"rank{'s' * (len(names) != 1)} {enumeration(names, most=8)}"
