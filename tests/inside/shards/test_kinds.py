"""The registry of kinds of shards is the one list that every room reads, shown with a toy kind.

Of its parameters the first rank alone has the state; it updates them and gives them to all others.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import samestep
from samestep import cli
from samestep.comm.collectives import from_first, total
from samestep.comm.presence import PresenceAgreement
from samestep.groups.param_groups import rule_of
from samestep.lab.estimate.grid import one_axis
from samestep.lab.estimate.grid_plan import PLACED, plan_on_grid
from samestep.lab.estimate.memory import rank_memory
from samestep.lab.stress.layouts import EVERY_LAYOUT, KIND_OF, LAYOUTS, require_layouts
from samestep.lab.stress.sharded_training import TRAININGS
from samestep.layout.blocks import matrices
from samestep.plan.schedule import Average, Gather, PlacementShape
from samestep.rules.state import block_states, initial_state
from samestep.shards.placement import Placement
from samestep.shards.registry import KINDS, Kind, require_kind
from samestep.shards.values import ShardValues
from samestep.train.options import LAYOUTS as TRAIN_LAYOUTS
from samestep.update.plain import Operand
from tests.ranks import run_forked

PAGE = Path(__file__).parents[3] / "docs" / "dev" / "architecture.md"


class KeptByFirst(ShardValues, Placement):
    """Gradients are added up everywhere, in one bucket for each parameter."""

    keeps_all = False

    def __init__(self, group, members):
        self.params, self._specs = list(members.params), members.specs
        self.values = self  # it is its own
        self.group_indices = tuple(sorted({spec.group for spec in members.specs}))
        self.group = self.held_by = group
        self.device = self.params[0].device
        self._names = [spec.name for spec in members.specs]
        self._presence = PresenceAgreement(self._names, [group], self.device)
        self._grads, self._present = {}, [False] * len(self.params)
        sizes = tuple(param.numel() for param in self.params)
        self.shape = PlacementShape(sizes, agrees=True, reduces=False, places=members.places)

    @classmethod
    def plans(cls, request):
        if request.ranks is None:
            return []
        return [cls(request.ranks, request.members(request.indices))]

    def _initial(self, index, masters=False):
        spec = self._specs[index]
        group, blocks = self._groups[spec.group], spec.blocks and list(spec.blocks)
        return initial_state(rule_of(group), self.params[index], blocks, group, masters)

    def make_state(self, groups, master_weights):
        self._groups, is_first = groups, self.group.rank == 0
        return {
            param: self._initial(index, master_weights) if is_first else {}
            for index, param in enumerate(self.params)
        }

    def lines(self):
        return [f"{name}: the first rank" for name in self._names]

    def averaged_by(self, param):
        return "us, on all ranks"

    def updated_by(self, param):
        return "the first rank"

    def begin_step(self, state, problem):
        self._state = state

    def agree(self, problem):
        here = [param.grad is not None for param in self.params]
        self._present = self._presence.agree(here, problem, self.intent)

    def meet(self, call, problem):
        self._presence.meet(call, problem)

    def run(self, operation, maths):
        number = operation.bucket.bucket
        param, name = self.params[number], self._names[number]
        match operation:
            case Average():
                grad = torch.zeros_like(param) if param.grad is None else param.grad.clone()
                self._grads[number] = total(name, grad, self.group).wait() / self.group.size
            case Gather():
                from_first(name, param.detach(), self.group).wait()

    def operands(self, number, window=None):
        if self.group.rank or not self._present[number]:
            return
        spec, param, grad = self._specs[number], self.params[number], self._grads[number]
        state, group = self._state[param], self._groups[spec.group]
        if spec.blocks is None:
            yield spec.group, Operand(param.detach(), grad, state)
            return
        blocks = list(spec.blocks)
        states = block_states(rule_of(group), state, blocks, group, spec.stored)
        values, grads = matrices(blocks, param.detach()), matrices(blocks, grad)
        for cut in zip(values, grads, states, strict=True):
            yield spec.group, Operand(*cut)

    def drop_gradients(self, number):
        del self._grads[number]

    def present(self):
        return [(spec.group, flag) for spec, flag in zip(self._specs, self._present, strict=True)]

    def state_alike(self, state):
        return iter(())

    def gather_state(self, state, only=None):
        wanted = range(len(self.params)) if only is None else map(self.index, only)
        return lambda: {
            self.params[index]: {
                key: from_first(key, tensor.clone(), self.group).wait()
                for key, tensor in (state[self.params[index]] or self._initial(index)).items()
            }
            for index in wanted
        }

    def put_state(self, state, param, key, whole):
        if self.group.rank == 0:
            super().put_state(state, param, key, whole)


TOY = Kind(
    "first",
    "plain tensors that the first rank alone updates",
    lambda param: getattr(param, "kept_by_first", False),
    f"{__name__}:KeptByFirst",
)


@contextmanager
def toy_kind() -> Iterator[None]:
    KINDS.insert(0, TOY)
    try:
        yield
    finally:
        KINDS.remove(TOY)


# --- it steps, explains and saves -----------------------------------------------------------------


def make_model():
    """A matrix and a vector of the toy kind, beside one of each that ranks have copies of."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    for param in model[0].parameters():
        param.kept_by_first = True
    return model


def new_training(**options):
    torch.manual_seed(0)
    model = make_model()
    options |= {"lr": 0.1, "max_grad_norm": 0.5, "sharding": "none"}  # all but the toy keep all
    return model, samestep.MuonAdamW(model, **options)


def gradient(step, rank, index, param):
    """None: of that parameter this rank, or every rank, has none in this step."""
    if (step + index) % 4 == 3 and (rank == 1 or step == 3):
        return None
    generator = torch.Generator().manual_seed(100 * step + 10 * index + rank)
    return torch.randn(param.shape, generator=generator)


def train(model, optimizer, steps, gradient_of):
    for step in steps:
        for index, param in enumerate(model.parameters()):
            param.grad = gradient_of(step, index, param)
        optimizer.step()


def mean(step, index, param):
    of_ranks = [gradient(step, rank, index, param) for rank in range(2)]
    given = [grad for grad in of_ranks if grad is not None]
    return sum(given) / 2 if given else None


def values(model, optimizer):
    return [param.detach().clone() for param in model.parameters()], optimizer.whole_state()


def on_a_rank(rank, folder):
    def own(step, index, param):
        return gradient(step, rank, index, param)

    model, optimizer = new_training()
    kinds = [type(placed).__name__ for placed in optimizer.plan.placed]
    assert kinds == ["KeptByFirst", "ReplicatedShards"]
    train(model, optimizer, range(4), own)
    assert samestep.stress.check(model, optimizer) == []
    said = optimizer.table(), optimizer.explain()
    with pytest.raises(RuntimeError, match="consolidate_state_dict"):
        optimizer.state_dict()  # not the half of it that this rank has
    optimizer.consolidate_state_dict(to=None)
    whole = optimizer.state_dict()
    samestep.save(folder, model, optimizer)
    found = []
    for load in (
        lambda *new: samestep.load(folder, *new),
        lambda _, new: new.load_state_dict(whole),
    ):
        other, again = new_training()
        other.load_state_dict(model.state_dict())
        load(other, again)
        train(other, again, range(4, 6), own)
        found.append(values(other, again))
    return found, said


def test_a_toy_kind_steps_explains_and_saves(tmp_path):
    with toy_kind():
        ranks = run_forked(2, on_a_rank, tmp_path / "saved")
        model, optimizer = new_training(grads="reduced")
        train(model, optimizer, range(6), mean)
    alone = values(model, optimizer)
    assert any(state["momentum_buffer"].any() for state in alone[1].values() if len(state) == 1)
    for found, (table, explained) in ranks:
        for each in found:
            torch.testing.assert_close(each, alone, rtol=0, atol=0)
        assert table.count("the first rank") == 2
        told = " ".join(explained.split())
        assert f"2 parameters of the kind 'first' ({TOY.about}) averaged by us" in told
        assert "2 plain parameters averaged by samestep over" in told


# --- rooms that do not know it say so -------------------------------------------------------------


def require_everywhere():
    """What rooms above keep by the names of kinds has all of them."""
    require_layouts()
    for kind in KINDS:
        require_kind(kind.name, PLACED, "estimate", "PLACED")
        trained = {layout.kind for layout in TRAIN_LAYOUTS.values()}
        require_kind(kind.name, trained, "layout of train", "LAYOUTS")


def test_every_room_knows_every_kind():
    require_everywhere()
    names = {kind.name for kind in KINDS}
    assert len(names) == len(KINDS)
    assert set(KIND_OF.values()) == set(PLACED) == names
    assert KIND_OF.keys() == TRAININGS.keys()
    assert {layout.kind for layout in EVERY_LAYOUT.values()} == names


def test_a_kind_that_a_room_does_not_know_is_seen(monkeypatch):
    unknown = rf"the kind 'first' \({TOY.about}\) have no "
    with toy_kind():
        with pytest.raises(ValueError, match=f"{unknown}layout of the harness.*stress.layouts"):
            require_everywhere()
        monkeypatch.setitem(KIND_OF, "toy", "first")
        monkeypatch.setitem(LAYOUTS, "toy", replace(LAYOUTS["one_process"], parameters="toy"))
        with pytest.raises(ValueError, match=f"{unknown}layout of the harness"):
            require_everywhere()  # one process has no placement
        monkeypatch.setitem(LAYOUTS, "toy", replace(LAYOUTS["zero2"], parameters="toy"))
        with pytest.raises(ValueError, match=f"{unknown}estimate"):
            require_everywhere()
        monkeypatch.setitem(PLACED, "first", PLACED["replicated"])
        with pytest.raises(ValueError, match=f"{unknown}layout of train"):
            require_everywhere()


def test_an_estimate_of_it_is_refused(capsys):
    with toy_kind():
        with torch.device("meta"):
            optimizer = samestep.MuonAdamW(make_model())
        with pytest.raises(
            ValueError, match=r"'first' .* no estimate, which '0.weight' needs.*PLACED"
        ):
            rank_memory(plan_on_grid(optimizer, one_axis(2)), 0)
        assert cli.main(["plan", f"{__name__}:make_model", "--mesh", "dp=2"]) == 2
    told = capsys.readouterr()
    assert "no estimate, which '0.weight' needs: add one to PLACED" in told.err
    assert told.out == ""
    assert rank_memory(plan_on_grid(optimizer, one_axis(2)), 0).parameters > 0  # as copies


def test_the_harness_refuses_to_leave_it_out(capsys, tmp_path):
    with toy_kind():
        assert cli.main(["stress", "--quick", "--out", str(tmp_path)]) == 2
    assert "'first'" in capsys.readouterr().err


def test_the_page_has_every_kind():
    table = "| kind | parameters | engine |\n|---|---|---|\n"
    for kind in KINDS:
        file = kind.engine.partition(":")[0].removeprefix("samestep.").replace(".", "/")
        table += f"| {kind.name} | {kind.about} | `{file}.py` |\n"
    assert f"\n{table}\n" in PAGE.read_text()
