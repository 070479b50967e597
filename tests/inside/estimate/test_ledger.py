"""Operations free what they allocate: a step leaves gradients alone, in every layout."""

import pytest

from samestep.lab.estimate.ledger import Ledger
from samestep.lab.estimate.memory import step_memory
from samestep.plan.memory import GRADIENTS, Allocation, Passing, Release
from tests.inside.estimate.layouts import Clipped, grid_plan_of, layouts_on

BUCKET, OTHER = ("packed", 0, 0), ("packed", 0, 1)


def test_a_spare_buffer_is_taken_again():
    """A spare buffer stays alive meanwhile; where there is none, one is made."""
    ledger, peaks = Ledger(), []
    for change in (
        Allocation(BUCKET, 100, GRADIENTS, "pool"),
        Release(BUCKET, "pool"),
        Passing(7),
        Allocation(OTHER, 100, GRADIENTS, "pool"),
        Allocation(BUCKET, 100, GRADIENTS, "pool"),
        Release(OTHER),
        Release(OTHER),  # nothing is there
    ):
        ledger.replay([change])
        peaks.append((ledger.now[GRADIENTS], ledger.most.total))
    assert peaks == [
        (100, 100),
        (100, 100),
        (100, 107),
        (100, 107),
        (200, 200),
        (100, 200),
        (100, 200),
    ]


@pytest.mark.parametrize("layout", layouts_on(4), ids=lambda layout: layout.name)
def test_a_step_frees_what_it_allocates(layout):
    plan = grid_plan_of(layout, Clipped(3, 4), 4, "fast")
    for rank in (0, 2):
        ledger = Ledger()
        seen = set[str]()
        for changes in step_memory(plan, rank):
            every = list(changes)
            ledger.replay(every)
            seen |= {change.key[0] for change in every if isinstance(change, Allocation)}
        assert len(seen) > 1
        left = {key[0] for key, nbytes in ledger.alive() if nbytes}
        # What forward waits for is on its way still.
        deferred = {"gather", "room"} if layout.options.get("overlap_param_gather") else set()
        assert left <= {"gradient", "gradients", "gradient sum", "spare"} | deferred
