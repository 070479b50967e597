"""Rules with state of owners and with sums over blocks: what ranks keep and send is foreseen."""

import pytest

import samestep
from examples.rules.muonh import MuonH
from examples.rules.soap import SOAP
from samestep.comm.groups import registry
from samestep.lab.estimate.memory import rank_memory
from samestep.lab.stress.layouts import LAYOUTS
from samestep.lab.stress.sharded_training import new_training
from samestep.plan.schedule import describe_operation
from samestep.rules import RULES
from tests.inside.estimate import parts, test_parts
from tests.inside.estimate.layouts import AllPresent, grid_plan_of
from tests.inside.estimate.test_memory import storages
from tests.inside.estimate.test_traffic import expected
from tests.ranks import run_forked
from tests.soak import SOAK

NAMES = {2: ["fsdp2_parallel", "flat_zero1"], 4: ["hsdp", "tp_fsdp2", "fsdp2_gather"]}


class OwnRules(AllPresent):
    """A matrix rule of either kind, and limits by rule."""

    def options(self):
        groups = [
            {"params": ["embedding", "norm", "head"], "rule": "adamw"},
            {"params": ["first", "up", "experts"], "rule": "soap"},
            {"params": ["second", "down"], "rule": "muonh"},
        ]
        return {**super().options(), "groups": groups, "max_grad_norm": {"adamw": 1.0, "soap": 1.0}}


@pytest.fixture(autouse=True)
def rules(monkeypatch):
    for rule in (MuonH(), SOAP()):
        monkeypatch.setitem(RULES, rule.name, rule)


def measured(rank, world):
    found = {}
    for name in NAMES[world]:
        training = new_training(OwnRules(3, world), LAYOUTS[name], rank, reduction="fast")
        optimizer = training.optimizer
        training.step(0)
        with samestep.FlightRecorder(last=4096) as recorder:
            training.step(1)
        records = [
            (r.name, r.kind, r.elements, r.dtype, r.sent)
            for r in recorder.records
            if "FSDP" not in r.name
        ]
        state = storages(t for entries in optimizer.state.values() for t in entries.values())
        found[name] = optimizer.schedule_lines(), records, sum(state.values())
        registry.forget()
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_everything_is_foreseen(world):
    ranks = run_forked(world, measured, world)
    for name in NAMES[world]:
        plan = grid_plan_of(LAYOUTS[name], OwnRules(3, world), world, "fast")
        states = set()
        for rank, of_rank in enumerate(ranks):
            schedule, records, state = of_rank[name]
            memory = rank_memory(plan, rank)
            assert schedule == tuple(map(describe_operation, plan.schedule(rank))), (name, rank)
            assert records == expected(plan, rank), (name, rank)
            assert state == memory.state, (name, rank)
            states.add(memory.state)
        if plan.placements[0].block_plans:
            assert any(line.startswith("Sum ") for line in ranks[0][name][0])
            assert len(states) > 1, name  # owners have blocks of their own


@pytest.mark.parametrize("sizes", [(2, 1, 2), (2, 2, 1), (2, 2, 2)] if SOAK else [(2, 1, 2)])
@pytest.mark.parametrize("rule", ["soap", *["muonh"] * SOAK])
def test_copies_of_parts_are_foreseen(sizes, rule, monkeypatch):
    usual = parts.options_of

    def options_of(lies, options):
        given = usual(lies, options)
        for group in given["groups"]:
            group["rule"] = rule if group["rule"] == "muon" else group["rule"]
        return given

    monkeypatch.setattr(parts, "options_of", options_of)
    test_parts.check(sizes, ["zero2", "none", "clipped"] if SOAK else ["zero2"])
