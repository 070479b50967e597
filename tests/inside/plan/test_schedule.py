"""The schedule of a step: every bucket once, in an order that data and ranks can follow."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from samestep.optimizer.step import execute
from samestep.plan.schedule import (
    Agree,
    Apply,
    Average,
    BucketId,
    Clip,
    Collect,
    Fetch,
    Gather,
    GiveBack,
    Measure,
    Place,
    PlacementShape,
    Reduce,
    Return,
    Transform,
    Update,
    WindowId,
    describe_operation,
    launch_order,
    staging_bytes,
    step_schedule,
)

sizes = st.lists(st.integers(0, 50), min_size=1, max_size=12).map(tuple)
shapes = st.builds(
    PlacementShape,
    sizes,
    agrees=st.booleans(),
    reduces=st.booleans(),
    overlaps=st.booleans(),
    defers=st.just(False),
    chunks=st.integers(0, 5),
    gives_back=st.booleans(),
    has_parts=st.just(False),
    places=st.just(()),
    exchanges=st.just(()),
    planned_chunks=st.just(()),
    windows=st.just(()),
    chunk_windows=st.just(()),
)
schedules = st.tuples(
    st.lists(shapes, min_size=1, max_size=4), st.integers(1, 6), st.booleans(), st.booleans()
)


def build(case):
    placements, waves, clip, measure = case
    return placements, step_schedule(placements, waves=waves, clip=clip, measure=measure)


@given(schedules, st.integers(0, 3))
def test_chunks_go_through_a_pipeline(case, ahead):
    placements, waves, clip, measure = case
    placements = [p._replace(has_parts=bool(n % 2)) for n, p in enumerate(placements)]
    schedule = step_schedule(
        placements, waves=waves, clip=clip, measure=measure, chunks_ahead=ahead
    )
    where = {(type(op), op.bucket): i for i, op in enumerate(schedule) if hasattr(op, "bucket")}
    each = [[BucketId(n, c) for c in range(p.chunks)] for n, p in enumerate(placements)]
    # Blocks whose copies are averaged have pipelines of their own.
    alike = [c for own, p in zip(each, placements, strict=True) if not p.has_parts for c in own]
    apart = [own for own, p in zip(each, placements, strict=True) if p.has_parts]
    for chunks in (alike, *apart):
        check_pipeline(placements, schedule, where, chunks, ahead, clip)
    counted = [op for op in schedule if isinstance(op, Collect | Transform | GiveBack | Apply)]
    back = sum(p.chunks for p in placements if p.gives_back)
    assert len(counted) == 3 * sum(map(len, each)) + back


def check_pipeline(placements, schedule, where, chunks, ahead, clip):
    for place, chunk in enumerate(chunks):
        kinds = [Collect, Transform, Apply]
        if placements[chunk.placement].gives_back:
            kinds.insert(2, GiveBack)
        order = [where[kind, chunk] for kind in kinds]
        assert order == sorted(order)
        if clip:
            assert order[0] > schedule.index(Clip())
        if place + ahead < len(chunks):  # so many are collected ahead
            assert where[Collect, chunks[place + ahead]] < order[1]
        if place + ahead + 1 < len(chunks):  # and no more
            assert where[Collect, chunks[place + ahead + 1]] > order[1]
        if place and ahead:
            assert where[Apply, chunks[place - 1]] > where[Transform, chunk]
        if place and not ahead:  # no pipeline: one is over before the next begins
            assert where[Apply, chunks[place - 1]] < order[0]


@given(schedules, st.integers(0, 3), st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_how_many_blocks_a_rank_answers_for_moves_nothing_else(case, ahead, chunks):
    """Ranks share groups: what some have more of must not come between what all have."""
    placements, waves, clip, measure = case

    def others(numbers):
        """Every operation, but for those about chunks of blocks whose copies are averaged."""
        own = [
            placement._replace(has_parts=bool(n % 2), chunks=number if n % 2 else placement.chunks)
            for n, (placement, number) in enumerate(zip(placements, numbers, strict=False))
        ]
        schedule = step_schedule(own, waves=waves, clip=clip, measure=measure, chunks_ahead=ahead)
        about_chunks = Collect | Transform | GiveBack | Apply
        return [
            op
            for op in schedule
            if not (isinstance(op, about_chunks) and own[op.bucket.placement].has_parts)
        ]

    assert others(chunks) == others([0] * 4)


@given(schedules)
def test_deferred_gathers_go_in_the_order_of_use_and_are_not_placed(case):
    placements, waves, clip, measure = case
    placements = [placement._replace(agrees=True, defers=True) for placement in placements]
    schedule = step_schedule(placements, waves=waves, clip=clip, measure=measure)
    gathered = [op.bucket for op in schedule if isinstance(op, Gather)]
    assert gathered == sorted(gathered, reverse=True)
    assert len(gathered) == sum(len(placement.bucket_sizes) for placement in placements)
    assert not any(isinstance(op, Place) for op in schedule)


@given(schedules)
def test_every_bucket_goes_through_every_operation_once_and_in_order(case):
    placements, schedule = build(case)
    where = {}
    for place, operation in enumerate(schedule):
        if isinstance(operation, Collect | Transform | GiveBack | Apply):
            continue  # about chunks
        keys = getattr(operation, "buckets", [getattr(operation, "bucket", None)])
        for key in keys:
            if isinstance(key, BucketId):
                assert (type(operation), key) not in where
                where[type(operation), key] = place
    for number, placement in enumerate(placements):
        for bucket in range(len(placement.bucket_sizes)):
            key = BucketId(number, bucket)
            found = [
                kind for kind in (Reduce, Average, Update, Gather, Place) if (kind, key) in where
            ]
            expected = [Reduce] * placement.reduces + [Average, Update]
            expected += [Gather, Place] * placement.agrees
            assert found == expected
            order = [where[kind, key] for kind in found]
            assert order == sorted(order)


@given(schedules)
def test_reductions_and_presence_come_first_then_the_norm(case):
    placements, schedule = build(case)
    reduced = [op.bucket for op in schedule if isinstance(op, Reduce)]
    assert reduced == sorted(reduced)
    first = [Reduce(bucket) for bucket in reduced]
    then = [Agree(n) for n, placement in enumerate(placements) if placement.agrees]
    if not any(placement.overlaps for placement in placements):
        first, then = then, first
    assert list(schedule[: len(first) + len(then)]) == first + then
    if case[2]:
        norm = schedule.index(Clip())
        assert all(i < norm for i, op in enumerate(schedule) if isinstance(op, Average))
        assert all(i > norm for i, op in enumerate(schedule) if isinstance(op, Update))
    assert schedule.count(Measure()) == case[3]


@given(schedules)
def test_waves_are_few_neighbours_and_travel_while_the_next_is_computed(case):
    _, schedule = build(case)
    updates = [op for op in schedule if isinstance(op, Update)]
    assert 1 <= len(updates) <= case[1]
    flat = [bucket for update in updates for bucket in update.buckets]
    assert flat == sorted(flat)
    for update, following in pairwise(updates):
        placed = [i for i, op in enumerate(schedule) if isinstance(op, Place)]
        mine = [i for i in placed if schedule[i].bucket in update.buckets]
        assert all(i > schedule.index(following) for i in mine)


def test_waves_are_about_equal():
    shape = PlacementShape((10,) * 8, agrees=True, reduces=True)
    schedule = step_schedule([shape], waves=4, clip=False, measure=False)
    assert [len(op.buckets) for op in schedule if isinstance(op, Update)] == [2, 2, 2, 2]


def test_the_executor_runs_operations_in_order():
    shape = PlacementShape((10, 20), agrees=True, reduces=True)
    schedule = step_schedule([shape], waves=2, clip=True, measure=True)
    seen = []
    kinds = (Reduce, Agree, Average, Clip, Update, Gather, Place, Measure)
    execute(schedule, dict.fromkeys(kinds, seen.append))
    assert tuple(seen) == schedule


@given(st.lists(st.lists(st.integers(-1, 5)), max_size=4))
def test_buckets_are_launched_as_backward_reaches_them(places):
    """Whatever forward uses last comes first; of equals, the bucket of the first plan."""
    order = launch_order(places)
    assert sorted(order) == [(n, b) for n, own in enumerate(places) for b in range(len(own))]
    late = [places[bucket.placement][bucket.bucket] for bucket in order]
    assert late == sorted(late, reverse=True)
    for before, after in pairwise(order):
        if places[before.placement][before.bucket] == places[after.placement][after.bucket]:
            assert before < after


def test_reductions_of_several_plans_are_in_the_one_order():
    shapes = [
        PlacementShape((10, 10), agrees=True, reduces=True, places=(7, 2)),
        PlacementShape((10, 10), agrees=True, reduces=True, places=(9, 2)),
    ]
    schedule = step_schedule(shapes, waves=1, clip=False, measure=False)
    reduced = [op.bucket for op in schedule if isinstance(op, Reduce)]
    assert reduced == [(1, 0), (0, 0), (0, 1), (1, 1)]


@given(schedules, st.integers(0, 2), st.randoms(use_true_random=False))
def test_windows_are_there_when_they_are_needed_and_buffers_have_one_at_a_time(case, ahead, random):
    placements, waves, clip, measure = case
    own = [
        p._replace(
            windows=tuple(tuple(random.choices(range(1, 9), k=3)[: random.randrange(4)])
                          for _ in p.bucket_sizes),
            chunk_windows=tuple(random.randrange(3) for _ in range(p.chunks)),
        )
        for p in placements
    ]  # fmt: skip
    options = {"waves": waves, "clip": clip, "measure": measure, "chunks_ahead": ahead}
    schedule = step_schedule(own, **options)
    sizes, inside, seen = staging_bytes(schedule), {}, set()
    for operation in schedule:
        if isinstance(operation, Fetch):
            assert operation.slot not in inside
            assert operation.nbytes <= sizes[operation.slot]
            inside[operation.slot] = operation.window
        elif isinstance(operation, Return):
            seen.add(inside.pop(operation.slot))
        for window in needed_by(own, operation):
            assert window in inside.values()
    assert not inside
    of_buckets = sum(len(sizes) for p in own for sizes in p.windows)
    assert len(seen) == of_buckets + sum(size > 0 for p in own for size in p.chunk_windows)
    # What stays on the device goes the same way as without windows.
    kept = [op for op in schedule if not isinstance(op, Fetch | Return | Update)]
    plain = step_schedule(placements, **options)
    assert kept == [op for op in plain if not isinstance(op, Update)]


def needed_by(placements, operation):
    match operation:
        case Update(_, window) if window is not None:
            yield window
        case Collect(chunk) | Transform(chunk) | GiveBack(chunk) | Apply(chunk):
            if placements[chunk.placement].chunk_windows[chunk.bucket]:
                yield WindowId(chunk, "chunk")


def test_the_next_window_comes_while_one_is_updated_and_three_buffers_are_enough():
    shape = PlacementShape((1,), agrees=False, reduces=False, windows=((5, 7, 9, 3, 8),))
    schedule = step_schedule([shape], waves=4, clip=False, measure=False)
    assert [describe_operation(operation) for operation in schedule[:8]] == [
        "Fetch 0.0 window 0",
        "Average 0.0",
        "Fetch 0.0 window 1",
        "Update 0.0 window 0",
        "Return 0.0 window 0",
        "Fetch 0.0 window 2",
        "Update 0.0 window 1",
        "Return 0.0 window 1",
    ]
    assert staging_bytes(schedule) == (5, 8, 9)
