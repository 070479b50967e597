"""Parameters that travel while the next forward runs: nobody sees them too early.

Where not said otherwise, what is on its way is NaN until it was waited for, so that a read that
comes too early shows in everything after it.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import samestep
from samestep.shards.replicated.awaited import ARRIVAL
from samestep.stress import check
from tests.ranks import run_forked, run_threaded
from tests.soak import SOAK, twin, twin_cases
from tests.test_overlap import LAYERS, Net, build, loss_of, make_case, same, train, values

ALL_LAYERS = (torch.arange(6), LAYERS, 1)
GATHER = {
    "buffers": "flat",
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "poison_early_reads": True,
    "bucket_size": 1,
}


def build_gather(model, **options):
    return build(model, **{**GATHER, **options})


def step_of(model, opt, case=ALL_LAYERS):
    """A step that leaves parameters on their way."""
    loss_of(model, case).backward()
    opt.step()


def in_flight(model):
    """The parameters that nobody has waited for."""
    return {name for name, param in model.named_parameters() if hasattr(param, ARRIVAL)}


def plain_values(*cases):
    """What the same steps give without any overlap."""
    model = Net()
    opt = build(model, sharding="zero2")
    for case in cases:
        train(model, opt, [case], "no_sync")
    return values(model)


# --- forward -----------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3] if SOAK else [3])
def test_modules_in_any_order_or_left_out(world):
    """Orders and layers differ between steps and ranks; some ranks have no backward at all."""

    def job(rank):
        cases = [make_case(rank, step, 0) for step in range(8 if SOAK else 5)]
        found = []
        for sharding in ("zero1", "zero2"):
            for poison in (True, False):
                model = Net()
                opt = build_gather(model, sharding=sharding, poison_early_reads=poison)
                for case in cases:
                    train(model, opt, [case], "no_sync")
                opt.wait_for_parameters()
                found.append(values(model))
        return plain_values(*cases), found

    for plain, found in run_forked(world, job):
        assert all(same(result, plain) for result in found)


def test_a_module_waits_for_its_own_parameters_only():
    def job(rank):
        model = Net()
        opt = build_gather(model)
        everything = {name for name, _ in model.named_parameters()}
        before = in_flight(model)
        step_of(model, opt)
        after_step = in_flight(model)
        model.second(torch.ones(8))
        after_second = in_flight(model)
        model.tied(torch.ones(8))
        after_tied = in_flight(model)
        model(torch.arange(6), (), None)
        after_model = in_flight(model)
        assert before == set()
        assert after_step == everything
        assert "second.weight" not in after_second
        assert {"embedding.weight", "experts"} <= after_second
        assert "first.weight" not in after_tied  # which is tied to it
        assert "experts" not in after_model  # the model's own
        assert "third.weight" in after_model
        opt.wait_for_parameters()
        return in_flight(model)

    assert run_forked(2, job) == [set(), set()]


def test_gathers_are_launched_in_the_order_of_forward():
    """The last to be reduced is the first to be on its way, and none is placed by the step."""

    def job(rank):
        model = Net()
        opt = build_gather(model)
        step_of(model, opt)
        plan = opt.shared_parameters[0].plan
        lines = [line.split() for line in opt.schedule_lines()]
        buckets = [int(line[1].split(".")[1]) for line in lines if line[0] == "Gather"]
        firsts = [plan.buckets[bucket].params[0] for bucket in buckets]
        return {line[0] for line in lines}, buckets, firsts

    for kinds, buckets, firsts in run_threaded(2, job):
        assert "Place" not in kinds
        assert len(buckets) > 4
        assert buckets == list(range(len(buckets)))[::-1]
        assert firsts == sorted(firsts)
        assert firsts[0] == 0


def test_the_step_returns_before_parameters_have_arrived():
    def job(rank):
        model = Net()
        opt = build_gather(model, poison_early_reads=False)
        with samestep.FlightRecorder() as recorder:
            step_of(model, opt)
            flying = len(recorder.in_flight)
            opt.wait_for_parameters()
            return flying, len(recorder.in_flight), len(opt.shared_parameters[0].plan.buckets)

    for flying, later, buckets in run_forked(2, job):
        assert flying == buckets
        assert later == 0


def test_steps_without_a_forward_in_between():
    def job(rank):
        found = []
        for options in ({"sharding": "zero2"}, GATHER | {"overlap_grad_reduce": False}):
            model = Net()
            opt = build(model, **options)
            for step in range(3):
                for place, param in enumerate(model.parameters()):
                    param.grad = torch.full_like(param, 1.0 + rank + step + place)
                opt.step()
            opt.wait_for_parameters()
            found.append(values(model))
        return found

    for plain, found in run_forked(2, job):
        assert same(found, plain)


def test_recomputed_activations():
    class Recomputed(Net):
        def forward(self, tokens, layers, expert):
            x = self.embedding(tokens)
            for name in layers:
                x = x + checkpoint(getattr(self, name), x, use_reentrant=False).tanh()
            return self.head(x + x @ self.experts[expert])

    def job(rank):
        found = []
        for options in ({"sharding": "zero2"}, GATHER):
            model = Recomputed()
            opt = build(model, **options)
            for step in range(3):
                train(model, opt, [(torch.arange(6) + rank + step, LAYERS, 1)], "no_sync")
            opt.wait_for_parameters()
            found.append(values(model))
        return found

    for plain, found in run_forked(2, job):
        assert same(found, plain)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_model():
    """Compiled before the optimizer is made, or after. torch warns where hooks end its graphs."""

    def job(rank):
        cases = [(torch.arange(6) + rank + step, LAYERS, 1) for step in range(3)]
        found = []
        for early in (True, False):
            model = Net()
            compiled = torch.compile(model, backend="eager") if early else model
            opt = build_gather(compiled)
            compiled = compiled if early else torch.compile(model, backend="eager")
            for case in cases:
                train(compiled, opt, [case], "no_sync")
            opt.wait_for_parameters()
            found.append(values(model))
        return plain_values(*cases), found

    for plain, found in run_forked(2, job):
        assert all(same(result, plain) for result in found)


class Attention(nn.Module):
    """torch's attention reads the parameters of its projection without running it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.normal_(std=0.3, generator=generator)

    def forward(self, x):
        return self.norm(self.attention(x, x, x, need_weights=False)[0])


@twin
def test_a_module_that_reads_the_parameters_of_its_children():
    """The parameters of torch's own modules are waited for too."""

    def job(rank):
        found = []
        for options in ({"sharding": "zero2"}, GATHER):
            model = Attention()
            opt = samestep.MuonAdamW(model, lr=0.1, reduction="ordered", **options)
            for step in range(2):
                generator = torch.Generator().manual_seed(10 * step + rank)
                model(torch.randn(1, 3, 8, generator=generator)).square().sum().backward()
                opt.step()
                opt.zero_grad()
            opt.wait_for_parameters()
            found.append(values(model))
        return found

    for plain, found in run_forked(2, job):
        assert same(found, plain)


# --- between steps -----------------------------------------------------------------------------


def test_what_was_taken_of_the_memory_before_the_step_shows_reads_that_come_too_early():
    """And without the poison nothing is NaN."""

    def job(rank):
        found = []
        for poison in (True, False):
            model = Net()
            opt = build_gather(model, poison_early_reads=poison)
            taken = model.second.weight.data
            step_of(model, opt)
            assert bool(taken.isnan().all()) == poison
            opt.wait_for_parameters()
            found.append(values(model))
            opt.wait_for_parameters()  # again: nothing to do
            assert same(values(model), found[-1])
            assert torch.equal(taken, model.second.weight)
        return plain_values(ALL_LAYERS), found

    for plain, found in run_forked(2, job):
        assert all(same(values, plain) for values in found)


def average(model):
    averaged = torch.optim.swa_utils.AveragedModel(model)  # a copy, then an update
    averaged.update_parameters(model)
    return torch.cat([param.reshape(-1) for param in averaged.module.parameters()])


def clamped(model):
    with torch.no_grad():
        for param in model.parameters():
            param.clamp_(-0.1, 0.1)
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()])


class Tied(nn.Module):
    """Computes with a parameter of another model, which it does not call."""

    def __init__(self, model):
        super().__init__()
        self.weight = model.second.weight

    def forward(self, x):
        return x @ self.weight


TOUCHES = {
    "average": average,
    "clamp": clamped,
    "another module": lambda m: Tied(m)(torch.eye(8)),
    "a function": lambda m: nn.functional.linear(torch.eye(8), m.second.weight),
    "foreach": lambda m: torch.stack(torch._foreach_norm(list(m.parameters()))),
    "norm": lambda m: nn.utils.get_total_norm(m.parameters()),
    "operator": lambda m: torch.ops.aten.add.Tensor(m.second.weight, 1),
    "vector": lambda m: nn.utils.parameters_to_vector(m.parameters()),
    "data": lambda m: m.second.weight.data.clone(),
    "detach": lambda m: m.second.weight.detach().numpy().copy(),
    "list": lambda m: m.second.weight.tolist(),
    "number": lambda m: m.second.bias[0].item(),
    "printed": lambda m: str(m.second.weight),
    "deepcopy": lambda m: copy.deepcopy(m.second.weight),
    "deepcopy of the model": lambda m: copy.deepcopy(m).second.weight,
    "pickle": lambda m: pickle.loads(pickle.dumps(m.second.weight)),
    "saved": lambda m: torch.load(saved(m), weights_only=False).second.weight,
    "written": lambda m: nn.init.constant_(m.second.weight, 0.5),
    "copied": lambda m: torch.zeros(8, 8).copy_(m.second.weight),
    "copied into": lambda m: m.second.weight.data.copy_(torch.eye(8)),
    "replaced": lambda m: setattr(m.second.weight, "data", torch.eye(8)) or m.second.weight,
    "functional": lambda m: torch.func.functional_call(
        nn.Linear(8, 8), dict(m.second.named_parameters()), torch.eye(8)
    ),
    "compiled": lambda m: torch.compile(lambda x: x @ m.second.weight, backend="eager")(
        torch.eye(8)
    ),
    "memory": lambda m: ctypes.c_float.from_address(m.second.bias.data_ptr()).value,
    "dlpack": lambda m: torch.from_dlpack(m.second.weight.detach()).clone(),
    "collective": lambda m: dist.broadcast(m.second.weight, 0) or m.second.weight,
    "another optimizer": lambda m: torch.optim.SGD(m.parameters(), 0.1) and m.second.weight,
}


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file


def test_whoever_touches_a_parameter_waits_for_it():
    """Reads, edits and copies, with no word to the optimizer; then training goes on."""

    def job(rank):
        found = []
        for options in ({"sharding": "zero2"}, GATHER):
            model = Net()
            opt = build(model, **options)
            results = {}
            for name, touch in TOUCHES.items():
                torch.manual_seed(0)
                step_of(model, opt)
                model.zero_grad()
                opt.zero_grad()
                flying = in_flight(model)
                assert bool(flying) == ("buffers" in options)
                with torch.no_grad():
                    result = touch(model)
                assert len(in_flight(model)) < max(len(flying), 1), name
                results[name] = result.detach().clone() if torch.is_tensor(result) else result
            assert all(type(p) is nn.Parameter for p in copy.deepcopy(model).parameters())
            results["converted"] = model.double().second.weight.detach()
            found.append((results, values(model)))
            del opt
            gc.collect()  # or the next one would hold its launches back beside it
        return found

    for (plain, trained), (touched, then) in run_forked(2, job):
        assert same(trained, then)
        for name, result in plain.items():
            assert str(result) == str(touched[name]), name
            assert not torch.is_tensor(result) or torch.equal(result, touched[name]), name


def test_evaluation_between_steps():
    def job(rank):
        found = []
        for options in ({"sharding": "zero2"}, GATHER):
            model = Net()
            opt = build(model, **options)
            losses = []
            for step in range(3):
                train(model, opt, [(torch.arange(6) + rank + step, LAYERS, 1)], "no_sync")
                model.eval()
                with torch.no_grad():
                    losses.append(loss_of(model, ALL_LAYERS))
                model.train()
            found.append(torch.stack(losses))
        return found

    for plain, found in run_forked(2, job):
        assert torch.equal(found, plain)


def test_the_state_dict_of_a_model_waits():
    """Of all of it, or of a part, which leaves the rest alone."""

    def job(rank):
        model = Net()
        opt = build_gather(model)
        step_of(model, opt)
        part = {name: tensor.clone() for name, tensor in model.second.state_dict().items()}
        assert "third.weight" in in_flight(model)
        whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        assert not in_flight(model)
        return part, whole, plain_values(ALL_LAYERS)

    for part, whole, plain in run_forked(2, job):
        assert torch.equal(part["weight"], plain["second.weight"])
        assert torch.equal(whole["tied.weight"], plain["first.weight"])
        assert same(plain, whole)


@twin_cases("False")
@pytest.mark.parametrize("poison", [True, False])
def test_what_is_loaded_is_not_overwritten_by_what_arrives(poison):
    other = Net()
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(0.5)

    def job(rank):
        model = Net()
        opt = build_gather(model, poison_early_reads=poison)
        step_of(model, opt)
        model.load_state_dict(other.state_dict())
        opt.wait_for_parameters()
        loaded = values(model)
        train(model, opt, [ALL_LAYERS], "no_sync")
        opt.wait_for_parameters()

        plain = Net()
        plain_opt = build(plain, sharding="zero2")
        train(plain, plain_opt, [ALL_LAYERS], "no_sync")
        plain.load_state_dict(other.state_dict())
        train(plain, plain_opt, [ALL_LAYERS], "no_sync")
        return loaded, values(model), values(plain)

    for loaded, found, plain in run_forked(2, job):
        assert same(loaded, values(other))
        assert same(found, plain)


def test_the_state_of_the_optimizer_waits():
    def job(rank):
        model = Net()
        opt = build_gather(model, state_dict_form="part")
        step_of(model, opt)
        opt.whole_state()
        assert not in_flight(model)
        train(model, opt, [ALL_LAYERS], "no_sync")
        opt.load_state_dict(opt.state_dict())
        assert not in_flight(model)
        return values(model), plain_values(ALL_LAYERS, ALL_LAYERS)

    for found, plain in run_forked(2, job):
        assert same(found, plain)


def test_the_check_inside_a_training_loop_waits():
    """It compares parameters, not what is on its way."""

    def job(rank):
        model = Net()
        opt = build_gather(model)
        step_of(model, opt)
        check(model, opt)
        return in_flight(model)

    assert run_forked(2, job) == [set(), set()]


def test_copies_of_a_model():
    """After waiting: they run, have memory of their own, and wait for nobody."""

    def job(rank):
        model = Net()
        opt = build_gather(model)
        step_of(model, opt)
        opt.wait_for_parameters()
        trained = values(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copies = [
            copy.deepcopy(model),
            torch.load(file, weights_only=False),
            pickle.loads(pickle.dumps(model)),
        ]
        logits = model(*ALL_LAYERS)
        train(model, opt, [ALL_LAYERS], "no_sync")
        for other in copies:
            assert same(values(other), trained)
            assert torch.equal(other(*ALL_LAYERS), logits)
            other.load_state_dict(other.state_dict())
            assert in_flight(model)  # still: the copy's hooks are not the model's
        opt.wait_for_parameters()

        # A copy can have an optimizer of its own.
        again = build_gather(copies[0])
        step_of(copies[0], again)
        again.wait_for_parameters()
        return not same(values(copies[0]), trained) and not in_flight(copies[0])

    assert run_forked(2, job) == [True, True]


@twin_cases("True")
@pytest.mark.parametrize("poison", [True, False])
def test_an_optimizer_dropped_with_parameters_on_their_way(poison):
    def job(rank):
        model = Net()
        opt = build_gather(model, poison_early_reads=poison)
        step_of(model, opt)
        del opt
        gc.collect()
        with torch.no_grad():
            logits = model(*ALL_LAYERS)
        trained = {name: tensor.clone() for name, tensor in model.state_dict().items()}

        plain = Net()
        train(plain, build(plain, sharding="zero2"), [ALL_LAYERS], "no_sync")
        opt = build_gather(model)  # and another one takes over
        train(model, opt, [ALL_LAYERS], "no_sync")
        opt.wait_for_parameters()
        expected = values(plain), plain(*ALL_LAYERS).detach()
        train(plain, build(plain, sharding="zero2"), [ALL_LAYERS], "no_sync")
        return (trained, logits, values(model)), (*expected, values(plain))

    for (trained, logits, later), (plain, plain_logits, plain_later) in run_forked(2, job):
        assert same(plain, trained)
        assert torch.equal(logits, plain_logits)
        assert same(later, plain_later)


def test_another_optimizer_while_parameters_are_on_their_way():
    """It takes the model as it shall be, not as it is."""

    def job(rank):
        model = Net()
        first = build_gather(model)
        step_of(model, first)
        second = build_gather(model)
        second.wait_for_parameters()
        first.wait_for_parameters()
        model.state_dict()
        return values(model), plain_values(ALL_LAYERS)

    for found, plain in run_forked(2, job):
        assert same(found, plain)


@twin
def test_a_group_added_later():
    """A parameter that no module waits for has arrived when the step is over."""

    def job(rank):
        found = []
        for options in ({"sharding": "zero2"}, GATHER):
            model = Net()
            extra = nn.Parameter(torch.linspace(0, 1, 30).view(5, 6))
            opt = build(model, **options)
            opt.add_param_group({"params": [("extra", extra)], "rule": "muon"})
            for _ in range(2):
                (loss_of(model, ALL_LAYERS) + extra.square().sum()).backward()
                opt.step()
                opt.zero_grad()
                assert not extra.isnan().any()
            opt.wait_for_parameters()
            found.append({**values(model), "extra": extra.detach().clone()})
        return found

    for plain, found in run_forked(2, job):
        assert same(found, plain)


def test_a_step_that_is_skipped_leaves_everything_as_it_was():
    def job(rank):
        model = Net()
        opt = build_gather(model, max_grad_norm=1.0)
        loss = loss_of(model, ALL_LAYERS)
        (loss * (float("inf") if rank == 1 else 1.0)).backward()
        opt.step()
        opt.wait_for_parameters()
        return values(model)

    assert all(same(found, values(Net())) for found in run_forked(2, job))


@twin_cases("AdamW")
@pytest.mark.parametrize("kind", [samestep.AdamW, samestep.Muon])
def test_optimizers_of_one_rule(kind):
    def job(rank):
        found = []
        for options in ({"sharding": "zero2"}, GATHER):
            model = nn.Sequential(
                nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 6, bias=False)
            )
            with torch.no_grad():
                for param in model.parameters():
                    param.copy_(torch.linspace(-1, 1, 48).view_as(param))
            opt = kind(model, lr=0.1, reduction="ordered", **options)
            for step in range(3):
                model(torch.eye(6) * (1 + rank + step)).square().sum().backward()
                opt.step()
                opt.zero_grad()
            opt.wait_for_parameters()
            found.append(values(model))
        return found

    for plain, found in run_forked(2, job):
        assert same(found, plain)


def test_one_process_waits_for_nothing():
    model = Net()
    opt = build_gather(model)
    train(model, opt, [ALL_LAYERS], "no_sync")
    assert not in_flight(model)
    opt.wait_for_parameters()
    plain = Net()
    train(plain, build(plain), [ALL_LAYERS], "no_sync")
    assert same(values(model), values(plain))
