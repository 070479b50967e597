"""The hybrid stack without FSDP2: what is planned is what ranks send, hold and learn.

Among them a Llama-70B at 1/64 of its width, on two ranks of each axis.
"""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest
import torch

import samestep
from samestep.comm.collectives import total
from samestep.comm.groups import registry
from samestep.lab.estimate.cluster import plan_shares, stack_on_grid
from samestep.lab.estimate.collectives import Launches
from samestep.lab.estimate.memory import rank_memory
from samestep.mesh import build
from samestep.mesh.degrees import Degrees
from samestep.models.gpt import GPT, GPTConfig, gpt_plan, mean_loss
from samestep.parallel.pipeline import GPT_STAGES
from samestep.parallel.stack import Stack
from samestep.parallel.stages import cut
from samestep.plan.schedule import describe_operation
from tests.inside.estimate.calls import settled
from tests.inside.estimate.peaks import peak_bytes
from tests.inside.estimate.test_hybrid import copied
from tests.inside.estimate.test_memory import parameters_of, storages
from tests.inside.estimate.test_parts import buffers_of
from tests.ranks import run_forked
from tests.soak import SOAK, some, twin

# Of Llama-70B: 8192 wide, 64 heads of which 8 have keys and values, 32,000 words. Its MLP has three
# matrices of 3.5 widths, this one two of 5; its 80 layers are 8, or 2.
LLAMA = GPTConfig(
    vocab_size=500,
    context=16,
    width=128,
    layers=8 if SOAK else 2,
    heads=16,
    kv_heads=2,
    mlp_ratio=5,
)
DENSE = GPTConfig(vocab_size=144, context=8, width=64, layers=2, heads=4, kv_heads=2)
EXPERTS = replace(DENSE, experts=4, expert_size=48)
OPTIONS = {
    "lr": 0.03,
    "max_grad_norm": 1e-3,  # every step is clipped: a peak counts with scaled copies
    "bucket_size": 30_000,
    "overrides": {"*.experts.*": {"rule": "muon"}, "*.router.weight": {"rule": "adamw"}},
}
ROWS = 8
STEPS = 3 if SOAK else 2
OVERLAPS = {"buffers": "flat", "overlap_grad_reduce": True, "overlap_param_gather": True}


class Case(NamedTuple):
    config: GPTConfig
    mesh: dict
    shares: dict

    def keywords(self):
        own = {**OPTIONS, **self.shares}
        if not self.config.experts:
            own["overrides"] = {}
        return own


TP, TP_SP = {"tp": 2}, {"tp": 2, "sequence_parallel": True}
ON_FOUR = [
    Case(DENSE, TP_SP, {"sharding": "zero2"}),
    Case(EXPERTS, {"ep": 2}, {"sharding": "zero1", **OVERLAPS}),
]
ON_EIGHT = []
if not SOAK:  # every axis beside copies; all at once need eight ranks
    ON_FOUR[0] = Case(LLAMA, TP_SP, {"sharding": "zero2"})
    ON_FOUR.append(Case(DENSE, {"pp": 2}, {"sharding": "zero2"}))
else:
    ON_FOUR += [
        Case(config, mesh, shares)
        for config, mesh in ((DENSE, TP), (EXPERTS, {"ep": 2}), (EXPERTS, TP_SP))
        for shares in (
            {"sharding": "none"},
            {"sharding": "zero2", "reduction": "ordered"},
            {"sharding": "zero2", "overlap_grad_reduce": True},
            {"sharding": "zero2", **OVERLAPS},
        )
    ]
    ON_EIGHT += [
        Case(LLAMA, {"tp": 2, "pp": 2}, {"sharding": "zero2"}),
        Case(LLAMA, {"tp": 2, "pp": 2}, {"sharding": "zero1", **OVERLAPS}),
        Case(LLAMA, {"tp": 2, "pp": 2}, {"sharding": "zero2", **OVERLAPS}),
        Case(LLAMA, {"tp": 2, "pp": 2}, {"sharding": "none"}),
        Case(LLAMA, {"tp": 2, "pp": 2}, {"sharding": "zero2", "overlap_grad_reduce": True}),
        Case(EXPERTS, {**TP_SP, "ep": 2}, {"sharding": "zero2"}),
        Case(EXPERTS, {"pp": 2, "ep": 2}, {"sharding": "zero2"}),
        Case(
            EXPERTS,
            {**TP_SP, "ep": 2, "expert_tensor_parallel": 1},
            {"sharding": "zero1", "buffers": "flat"},
        ),
    ]


def new_model(config):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT(config)


def tokens(config, step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(config.vocab_size, (ROWS, config.context + 1), generator=generator)


@cache
def alone(config):
    """The losses of one process."""
    model = new_model(config)
    optimizer, losses = samestep.MuonAdamW(model, **Case(config, {}, {}).keywords()), []
    for step in range(STEPS):
        batch = tokens(config, step)
        loss = mean_loss(model(batch[:, :-1]), batch[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def measured(rank, cases):
    """Per case: losses, schedule, what a step launches, and bytes."""
    torch.set_num_threads(1)
    found = []
    for case in cases:
        mesh = build(**case.mesh)
        plan = gpt_plan(case.config)
        stack = Stack(new_model(case.config), plan, mesh, loss=mean_loss, fsdp=False)
        optimizer = stack.optimizer(**case.keywords())
        rows, losses = ROWS // mesh.degrees.batch_ranks, []
        for step in range(STEPS):
            mine = tokens(case.config, step)[rows * stack.batch_place :][:rows]
            with samestep.FlightRecorder(last=4096) as recorder:
                loss = stack.backward(mine[:, :-1].contiguous(), mine[:, 1:].contiguous())
                passing = stepped(optimizer, case, last=step == STEPS - 1)
            optimizer.zero_grad()
            everyone = registry.of()
            summed = total("loss", loss.detach().double().reshape(1), everyone).wait()
            losses.append(float(summed) / everyone.size)
        records = [
            (r.name, r.kind, r.elements, r.dtype, r.sent, r.ranks)
            for r in recorder.records
            if r.name != "loss of the pipeline"  # which is told to all stages
        ]
        params = sum(storages(parameters_of(optimizer)).values())
        state = [t for own in optimizer.state.values() for t in own.values()]
        bytes_of = params, sum(storages(state).values()), passing
        found.append((losses, optimizer.schedule_lines(), records, bytes_of))
    return found


def stepped(optimizer, case, *, last):
    """A step, and of the last one the peak, with the gradients that it takes away."""
    if not last:
        optimizer.step()
        optimizer.wait_for_parameters()
        return 0
    before = sum(storages(buffers_of(optimizer)).values())
    placements = optimizer.shared_parameters
    for placement in placements:  # what was reduced inside backward
        placement.reductions._land_all()
    with settled(), peak_bytes() as peak:
        # What is freed inside only shows if it is made there.
        if case.shares.get("buffers") != "flat":
            for param in (p for group in optimizer.param_groups for p in group["params"]):
                if param.grad is not None:
                    is_plain = type(param.grad) is torch.Tensor
                    param.grad = param.grad.clone() if is_plain else copied(param.grad)
        for reducer in (p.reductions for p in placements if p.distribution.frees_gradients):
            reducer._sums = [None if kept is None else kept.clone() for kept in reducer._sums]
        optimizer.step()
        optimizer.wait_for_parameters()
    return before + peak.value


def foreseen(case, world, stage):
    degrees = Degrees(world, **case.mesh)
    with torch.device("meta"):
        model = GPT(case.config)
    if degrees.pp > 1:
        cut(model, GPT_STAGES, degrees.pp, [stage])
    optimizer = samestep.MuonAdamW(model, **case.keywords())
    shares = plan_shares(model, gpt_plan(case.config), degrees)
    return degrees, stack_on_grid(optimizer, degrees, shares, stage=stage, fsdp=False)


def expected(plan, degrees, rank):
    grid, at = plan.grid, rank % plan.grid.ranks
    records = []
    for each in Launches(plan).of_step(at):
        transfer = each.of_rank(at, grid)
        dtype = str(transfer.dtype).removeprefix("torch.")
        sent = transfer.sent(grid.place(at, each.peers), each.peers.size)
        ranks = tuple(degrees.peers(rank, *each.peers.axes))
        records.append((each.name, each.traffic.kind, transfer.elements, dtype, sent, ranks))
    return records


def check(world, cases):
    ranks, worst = run_forked(world, measured, cases), 0.0
    for number, case in enumerate(cases):
        losses = alone(case.config)
        for rank, of_rank in enumerate(ranks):
            found, schedule, records, (params, state, passing) = of_rank[number]
            about = case, rank
            degrees, plan = foreseen(case, world, rank * case.mesh.get("pp", 1) // world)
            at = rank % plan.grid.ranks
            assert found == pytest.approx(losses, abs=1e-4), about
            assert schedule == tuple(map(describe_operation, plan.schedule(at))), about
            assert records == expected(plan, degrees, rank), about
            assert len(records) > 5, about
            memory = rank_memory(plan, at)
            assert (params, state) == (memory.parameters, memory.state), about
            whole = params + state + passing
            worst = max(worst, abs(whole / memory.peak - 1))
    return worst


@twin
@pytest.mark.parametrize(
    ("world", "cases"), [(4, some(ON_FOUR)), (8, ON_EIGHT)][: 2 if SOAK else 1]
)
def test_everything_is_foreseen(world, cases, record_property):
    worst = check(world, cases)
    record_property("worst", worst)
    assert worst < 0.001  # as found: some bytes
