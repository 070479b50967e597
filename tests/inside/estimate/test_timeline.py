"""The simulator against the executor, and against cases that can be worked out by hand."""

import gzip
import json
from itertools import pairwise

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import samestep
import samestep.optimizer.step
from samestep.lab.estimate.activations import Batch
from samestep.lab.estimate.cluster import Job, Settings
from samestep.lab.estimate.decoder import gpt_shape
from samestep.lab.estimate.fsdp import Unit, fsdp_collectives
from samestep.lab.estimate.grid import Grid, one_axis
from samestep.lab.estimate.grid_plan import SpreadOver, plan_on_grid
from samestep.lab.estimate.hardware import Hardware, peers_on_host
from samestep.lab.estimate.model import Model
from samestep.lab.estimate.slots import bubble, passes_of
from samestep.lab.estimate.timeline import chrome_trace, simulate
from samestep.lab.estimate.training import Training, training_of
from samestep.lab.stress.models import GPT, Matrices
from samestep.lab.stress.sharded_training import new_training
from samestep.layout.boxes import Cut
from samestep.mesh.degrees import Degrees
from samestep.models import gpt
from samestep.optimizer.step import execute
from samestep.plan.links import Link
from samestep.plan.schedule import describe_operation
from tests.counting_group import counted
from tests.inside.estimate.layouts import AllPresent, grid_plan_of, layouts_on
from tests.ranks import run_forked
from tests.soak import twin

LINK = Link(latency=1e-3, bandwidth=1e6)
MACHINE = Hardware(
    name="by hand", source="this test", device_memory=1, ranks_per_host=8,
    product_rates={8: 1e9}, bytes_rate=1e30, call=0.0, model_rate=1e9,
    inside=LINK, between=LINK, on_cpu=True,
)  # fmt: skip
SHOWN = ("zero1", "zero2", "flat_zero1", "fsdp2_gather", "fsdp2_parallel", "hsdp")


def traced(rank, world):
    """Per layout what the executor did and what was launched meanwhile, in order."""
    found = {}
    for layout in layouts_on(world):
        if layout.name not in SHOWN:
            continue
        training = new_training(AllPresent(3, world), layout, rank, reduction="fast")
        training.step(0)
        training._make_gradients(1)
        events = []

        def run(schedule, handlers, events=events):
            def noted(handler):
                def call(operation):
                    events.append(("begins", describe_operation(operation)))
                    handler(operation)
                    events.append(("ends", describe_operation(operation)))

                return call

            execute(schedule, {kind: noted(handler) for kind, handler in handlers.items()})

        samestep.optimizer.step.execute = run
        recorder = samestep.FlightRecorder()
        recorder.on_launch.append(lambda record, e=events: e.append(("launches", record.name)))
        with recorder:
            training.optimizer.step()
        samestep.optimizer.step.execute = execute
        found[layout.name] = events
    return found


@twin
def test_a_real_run_and_a_simulated_one_have_the_same_operations_in_the_same_order():
    ranks = run_forked(4, traced, 4)
    assert set(ranks[0]) == set(SHOWN)
    for layout in layouts_on(4):
        if layout.name not in SHOWN:
            continue
        plan = grid_plan_of(layout, AllPresent(3, 4), 4, "fast")
        timeline = simulate(plan, MACHINE, show=range(4))
        for rank, events in enumerate(each[layout.name] for each in ranks):
            shown = timeline.shown[rank]
            operations = [span.name for span in shown.operations]
            assert operations == [name for what, name in events if what == "begins"], layout.name
            transfers = [span.name for span in shown.transfers]
            assert transfers == [name for what, name in events if what == "launches"]
            assert len(transfers) > 2
            # Dependencies: each transfer is launched inside the operation that launches it there.
            inside, current = [], None
            for what, name in events:
                current = name if what == "begins" else current
                if what == "launches":
                    inside.append((name, current))
            spans_by_name = {}
            for number, span in enumerate(shown.operations):
                spans_by_name.setdefault(span.name, shown.operations[number])
            for (name, operation), transfer in zip(inside, shown.transfers, strict=True):
                span = spans_by_name[operation]
                assert span.start <= transfer.launched <= span.end, (layout.name, name)
                assert transfer.start >= transfer.launched
                assert transfer.end > transfer.start
            for earlier, later in zip(shown.operations, shown.operations[1:], strict=False):
                assert later.start == earlier.end


def muon_over(ranks, **options):
    with torch.device("meta"):
        model = Matrices({f"m{i}": (8, 8) for i in range(ranks)})
    groups = [{"params": ["*"], "rule": "muon"}]
    optimizer = samestep.MuonAdamW(model, groups=groups, bucket_size=1, **options)
    over = SpreadOver((("data",),), (Cut(0),))
    return plan_on_grid(optimizer, one_axis(ranks), spread=lambda name, param: over)


def test_times_by_hand():
    # Two blocks of 8 x 8 on two ranks: each owner gets half a block, 128 bytes, and gives it back.
    # 30 m^3 FLOPs at 1 GFLOP/s are 15.36 us.
    timeline = simulate(muon_over(2), MACHINE, show=[0])
    link, compute = 1e-3 + 128 / 1e6, 30 * 8**3 / 1e9
    presence = 1e-3 + 2 * 8 * 8 / 2 / 1e6  # two parameters; of problems, drops and digests two
    assert timeline.seconds == pytest.approx(presence + link + compute + link)
    assert timeline.exposed_seconds == pytest.approx(presence + 2 * link)
    assert float(timeline.idle.max()) == pytest.approx(0)
    assert float(timeline.computing.max()) == pytest.approx(compute)
    gathered = simulate(muon_over(2, muon_schedule="gather"), MACHINE)
    # Every rank gets the other half of each block, one after the other; the first is computed
    # while the second is on its way.
    assert gathered.seconds == pytest.approx(presence + 2 * link + compute)


def test_a_pipeline_hides_transfers_and_balance_shortens_the_step():
    with torch.device("meta"):
        shapes = {}
        for layer in range(6):
            shapes |= {f"a{layer}": (64, 64), f"b{layer}": (256, 64)}
        model = Matrices(shapes)
    groups = [{"params": ["*"], "rule": "muon"}]
    over = SpreadOver((("data",),), (Cut(0),))

    def seconds(**options):
        optimizer = samestep.MuonAdamW(model, groups=groups, bucket_size=1, **options)
        plan = plan_on_grid(optimizer, one_axis(4), spread=lambda name, param: over)
        machine = Hardware(**{**vars(MACHINE), "inside": Link(1e-4, 2e7)})
        return simulate(plan, machine)

    distributed = seconds(muon_schedule="gather", chunks_ahead=0)
    parallel = seconds(owners="cyclic", chunks_ahead=0)
    pipelined = seconds(owners="cyclic")
    balanced = seconds(owners="balanced")
    times = [t.seconds for t in (distributed, parallel, pipelined, balanced)]
    assert times == sorted(times, reverse=True)
    assert balanced.exposed_seconds < pipelined.exposed_seconds < parallel.exposed_seconds


def test_overlap_hides_communication_behind_backward():
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(8)))
    found = {}
    for name, overlaps in {"none": {}, "both": {"overlap_grad_reduce": True,
                                               "overlap_param_gather": True}}.items():  # fmt: skip
        optimizer = samestep.MuonAdamW(
            model, sharding="zero1", buffers="flat", bucket_size=4096, **overlaps
        )
        machine = Hardware(**{**vars(MACHINE), "inside": Link(1e-4, 1e7)})
        found[name] = simulate(
            plan_on_grid(optimizer, one_axis(2)), machine, training=Training(512)
        )
    assert found["both"].exposed_seconds < 0.5 * found["none"].exposed_seconds
    assert found["both"].seconds < found["none"].seconds


@pytest.mark.parametrize("on_cpu", [True, False])
def test_legs_of_two_levels(on_cpu):
    """Of GPUs they go beside each other; a CPU waits for the first before it launches the next."""
    with torch.device("meta"):
        model = Matrices({f"m{i}": (8, 8) for i in range(6)})
    options = {"sharding": "zero2", "bucket_size": 128, "ranks_per_host": 2, "two_levels": True}
    options["crossover"] = 20  # elements from which a parameter is shared at all
    optimizer = samestep.MuonAdamW(model, lr=0.1, **options)
    machine = Hardware(**{**vars(MACHINE), "ranks_per_host": 2, "on_cpu": on_cpu})
    plan = plan_on_grid(optimizer, one_axis(4), hardware=machine)
    (shown,) = simulate(plan, machine, show=[0]).shown.values()
    legs = [span for span in shown.transfers if "hosts" in span.name]
    reductions = [span for span in legs if span.name.startswith("reduction")]
    inside, across = ([s for s in reductions if kind in s.name] for kind in ("in hosts", "across"))
    assert len(inside) == len(across) == len(legs) / 4 == 3
    for number, (first, second) in enumerate(zip(inside, across, strict=True)):
        assert second.start >= first.end
        assert (second.launched >= first.end) == on_cpu
        if number and not on_cpu:
            assert first.start == inside[number - 1].end < across[number - 1].end
    if on_cpu:
        in_order = sorted(legs, key=lambda span: span.start)
        assert all(b.start >= a.end for a, b in pairwise(in_order))


def test_groups_that_span_hosts():
    sizes = {"replicate": 2, "data": 4, "expert": 1, "model": 8}
    grid = Grid(sizes)
    for on_host, found in {4: (4, 1, 1), 8: (8, 1, 1), 16: (8, 2, 1), 64: (8, 4, 2)}.items():
        axes = ("model", "data", "replicate")
        assert tuple(peers_on_host(grid.peers(axis), grid, on_host) for axis in axes) == found
    assert peers_on_host(grid.peers("data", "model"), grid, 16) == 16
    slow = Hardware(**{**vars(MACHINE), "between": Link(1.0, 1e6), "ranks_per_host": 2})
    assert simulate(muon_over(2), slow).seconds < 0.1
    assert simulate(muon_over(4), slow).seconds > 2


def test_a_trace_for_chrome():
    timeline = simulate(muon_over(2), MACHINE, show=[0, 1])
    events = json.loads(gzip.decompress(chrome_trace({"step": timeline})))["traceEvents"]
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert {"Collect 0.0", "Transform 0.0", "Apply 0.0", "return of chunk 0", "presence"} <= names
    assert {event["pid"] for event in events} == {0, 1}


def four_layers(world):
    with torch.device("meta"):
        model = GPT(vocabulary=41, width=18, layers=4)
    inner = {p for layer in model.layers for p in layer.parameters()}
    rest = tuple(p for p in model.parameters() if p not in inner)
    over = {"shard": one_axis(world).peers("data")}
    units = [Unit("outermost", rest, reshards=False, **over)]
    layers = [
        Unit(f"layer {i}", tuple(each.parameters()), **over) for i, each in enumerate(model.layers)
    ]
    optimizer = samestep.AdamW(model)
    spread = SpreadOver((("data",),), (Cut(0),), padded=True)
    plan = plan_on_grid(optimizer, one_axis(world), spread=lambda name, param: spread)
    return plan, (*units, *layers)


def launched_by_fsdp(rank):
    """Kind and bytes of FSDP2's collectives in a step, in order."""
    with counted() as log:
        torch.manual_seed(0)
        model = GPT(vocabulary=41, width=18, layers=4)
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        for _ in range(2):
            before = len(log)
            model(torch.randint(41, (2, 7)), recycled=True, second=True).backward()
            model.zero_grad()
    return [(call.op, int(call.sent)) for call in log[before:]]


@twin
def test_units_of_fsdp_travel_in_the_order_of_real_ones():
    plan, units = four_layers(2)
    timeline = simulate(plan, MACHINE, show=[0], training=Training(8, units))
    sizes = {each.name: each for each in fsdp_collectives(units)}
    spans = [span.name for span in timeline.shown[0].transfers if span.name in sizes]
    simulated = [(sizes[name].traffic.kind, int(sizes[name].sent_by_all()[0])) for name in spans]
    for rank, calls in enumerate(run_forked(2, launched_by_fsdp)):
        assert calls == simulated, rank


def test_units_of_fsdp_hide_behind_the_model():
    plan, units = four_layers(2)
    bare = simulate(plan, MACHINE).seconds
    flops = 6 * 1000 * sum(param.numel() for unit in units for param in unit.params)
    fast = Hardware(**{**vars(MACHINE), "inside": Link(0.0, 1e30)})
    alone = simulate(plan, fast, training=Training(1000, units)).seconds
    assert alone == pytest.approx(flops / MACHINE.model_rate + simulate(plan, fast).seconds)
    # With hardly any tokens nothing hides: every transfer is waited for.
    slow = simulate(plan, MACHINE, training=Training(1, units))
    sent = sum(1e-3 + float(each.sent_by_all()[0]) / 1e6 for each in fsdp_collectives(units))
    assert slow.seconds == pytest.approx(sent + bare, rel=0.05)
    assert sum(slow.by_operation.values()) == pytest.approx(slow.seconds)
    hidden = simulate(plan, MACHINE, training=Training(10_000, units))
    assert hidden.exposed_seconds < 0.5 * slow.exposed_seconds


def four_stages(stage, micro_batches, per_rank=1):
    """A pipeline of equal stages on a machine where sending takes no time."""
    config = gpt.GPTConfig(vocab_size=2, width=64, layers=8, heads=2, kv_heads=2)
    with torch.device("meta"):
        model = Model("gpt", "", gpt.GPT(config), gpt_shape(config))
    settings = Settings(stages_per_rank=per_rank)
    fast = Hardware(**{**vars(MACHINE), "inside": Link(0.0, 1e30), "between": Link(0.0, 1e30)})
    batch = Batch(512, micro_batches, stages_per_rank=per_rank)
    job = Job(model, Degrees(4, pp=4), settings, fast, batch)
    return simulate(job.grid_plan(stage), fast, show=[0], training=training_of(job, stage))


@pytest.mark.parametrize(("micro_batches", "per_rank"), [(4, 1), (8, 1), (8, 2)])
def test_stages_wait_for_each_other(micro_batches, per_rank):
    for stage in range(4):
        timeline = four_stages(stage, micro_batches, per_rank)
        parts = timeline.by_operation
        passes = parts["forward"] + parts["backward"]
        share = float(bubble(4, micro_batches, per_rank))
        if stage == 0:  # it begins first and ends last
            assert parts["bubble"] / (passes + parts["bubble"]) == pytest.approx(share, rel=0.03)
        assert sum(parts.values()) == pytest.approx(timeline.seconds)
        operations = [s.name for s in timeline.shown[0].operations if s.name[0] in "fb"]
        runs = [(name[0].upper(), name.split()[1]) for name in operations if name != "bubble"]
        wanted = passes_of(stage, 4, micro_batches, per_rank)
        assert runs == [(run.kind, f"{run.stage}.{run.micro_batch}") for run in wanted]


def test_layers_wait_for_what_they_send():
    """Twice the latency, twice the time that layers take; and as many transfers as were counted."""
    config = gpt.GPTConfig(vocab_size=64, width=64, layers=2, heads=2, kv_heads=2)
    with torch.device("meta"):
        model = Model("gpt", "", gpt.GPT(config), gpt_shape(config))
    machine = Hardware(**{**vars(MACHINE), "inside": Link(1.0, 1e30)})
    job = Job(model, Degrees(2, tp=2), Settings(sharding="none"), machine, Batch(64, 3))
    timeline = simulate(job.grid_plan(0), machine, show=[0], training=training_of(job))
    # Embedding, two sums per block and the logits; backward: two sums per block and the head's.
    assert timeline.by_operation["layers"] == pytest.approx(3 * (1 + 4 + 1 + 4 + 1))
