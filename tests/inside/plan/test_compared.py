"""`make soak` compares plans as they are made: what it puts itself around has to be there."""

from samestep.plan import placement_plan
from tests.inside.plan import compared


def test_plans_of_the_core_are_compared(monkeypatch):
    seen = []
    monkeypatch.setattr(compared, "compare_buckets", lambda plan, ranks: seen.append((plan, ranks)))
    for name in ("plan_sharding", "plan_flat"):
        monkeypatch.setattr(placement_plan, name, lambda specs, ranks, name=name: name)
    compared.watch_plans()
    for name in ("plan_sharding", "plan_flat"):
        getattr(placement_plan, name)((), 2)
    assert seen == [("plan_sharding", 2), ("plan_flat", 2)]
