"""What a check has found, and how it is told."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from samestep.comm.integrity.differences import Value

Kind = Literal["parameter", "buffer", "state", "options", "plan"]

SHOWN = 8  # drifts that an error tells of


@dataclass(frozen=True)
class Drift:
    """Something that ranks should have alike and have not. The same on every rank.

    name: of a parameter or buffer; `parameter.key` of state; `param_groups[i][key]`.
    ranks: the global ranks that differ from `first_rank`, the first of those that share it.
    max_abs_diff: over all these ranks; inf where no number tells: NaN against a number, a text.
    count: how many elements differ, on the rank with most of them; of a plan lines.
    index: the first element that differs on ranks[0]; of a DTensor in the part that is held there.
    first, other: its values on `first_rank` and on ranks[0].
    """

    name: str
    kind: Kind
    ranks: tuple[int, ...]
    max_abs_diff: float
    count: int
    index: tuple[int, ...]
    first: Value
    other: Value
    first_rank: int = 0

    def __str__(self) -> str:
        who = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        values = f"{self.first!r} on rank {self.first_rank}, {self.other!r} on rank {self.ranks[0]}"
        if self.kind in ("options", "plan"):
            return f"{self.kind} {self.name}: {who} differ{'s' * (len(self.ranks) == 1)}: {values}"
        elements = f"1 element on {who} differs"
        if self.count > 1:
            elements = f"{self.count} elements on {who} differ"
        return (
            f"{self.kind} {self.name}: {elements} from rank {self.first_rank}'s, by up to "
            f"{self.max_abs_diff:.3g}; the first at {list(self.index)}: {values}"
        )


class DriftError(RuntimeError):
    """Replicas have drifted apart. Raised on every rank; `drifts` has every place."""

    def __init__(self, drifts: Sequence[Drift]) -> None:
        self.drifts = list(drifts)
        lines = [f"  {drift}" for drift in self.drifts[:SHOWN]]
        if len(self.drifts) > SHOWN:
            lines.append(f"  and {len(self.drifts) - SHOWN} more: see the error's .drifts")
        super().__init__(
            "replicas have drifted apart:\n" + "\n".join(lines) + "\n"
            "From here on ranks train different models. To go on: load the last good checkpoint "
            "on every rank, or broadcast the first rank's values and build a new optimizer. To "
            "find the cause: check more often, and look at what the ranks above did alone since "
            "the last check that passed (code under `if rank == ...`, weights or options changed "
            "outside of step(), random numbers, a faulty device). check(..., "
            "raise_on_drift=False) only looks and gives this list."
        )

    def __reduce__(self) -> tuple[type["DriftError"], tuple[list[Drift]]]:
        return DriftError, (self.drifts,)
