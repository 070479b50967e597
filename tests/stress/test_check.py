"""`samestep.stress.check`: what differs between ranks is found, located and told to all of them."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

import samestep
from samestep.comm.integrity import differences
from samestep.comm.integrity.agreement import RanksDisagreeError
from samestep.stress import Drift, DriftError, check
from tests.ranks import run_forked, run_threaded
from tests.soak import some
from tests.test_replicated import SHARDINGS, SMALL, Small, fill, intercept, ranks_steps, values

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
INF, NAN = float("inf"), float("nan")


class Net(Small):
    """Beside `Small`'s: a frozen layer, buffers of every kind, a strided frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(3, 5)
        self.turned = nn.Parameter(torch.zeros(4, 6).t(), requires_grad=False)
        fill(self, 4)
        self.frozen.requires_grad_(False)
        self.register_buffer("counts", torch.arange(7))
        self.register_buffer("mask", torch.ones(2, 3, dtype=torch.bool))


def trained(rank, dtype=torch.float32, **options):
    """A model and its optimizer after two steps with gradients that differ between ranks."""
    model = Net().to(dtype)
    opt = samestep.MuonAdamW(
        model, **{**SMALL, "crossover": 10, "master_weights": False, **options}
    )
    ranks_steps(model, opt, rank, 2)
    return model, opt


def look(*args, **options):
    return check(*args, raise_on_drift=False, **options)


def agreed_on(results):
    """What all ranks have found, if they have found the same."""
    assert len({repr(found) for found in results}) == 1, results
    return results[0]


def flip(tensor, index, bit):
    bits = tensor.detach().view(INTEGERS[tensor.element_size()])
    bits[index] ^= 1 << bit


def test_without_other_ranks_there_is_nothing_to_do():
    model = Net()
    assert check(model) == []
    assert check(model, samestep.MuonAdamW(model, **SMALL), buffers=True) == []
    assert run_threaded(1, lambda rank: check(*trained(rank))) == [[]]


# --- parameters --------------------------------------------------------------------------------


@pytest.mark.parametrize("world", some([2, 3]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_one_flipped_bit_is_found_and_located(world, dtype):
    def job(rank):
        model, opt = trained(rank, dtype)
        assert look(model, opt) == []
        value = model.hidden.weight[3, 2].item()
        if rank == world - 1:
            flip(model.hidden.weight, (3, 2), 0)
        flipped = model.hidden.weight[3, 2].item()
        before = values(model)
        drifts = look(model, opt)
        assert all(torch.equal(before[name], value) for name, value in values(model).items())
        return drifts, value, flipped

    results = run_forked(world, job)
    (drift,) = agreed_on([drifts for drifts, _, _ in results])
    _, value, flipped = results[-1]
    assert value != flipped
    assert drift == Drift(
        name="hidden.weight",
        kind="parameter",
        ranks=(world - 1,),
        max_abs_diff=abs(value - flipped),
        count=1,
        index=(3, 2),
        first=value,
        other=flipped,
        first_rank=0,
    )


@pytest.mark.parametrize("at_once", [differences.AT_ONCE, 3])
def test_several_ranks_and_places(at_once):
    """The first rank is what the others are held against, also when it is the odd one."""

    def job(rank):
        differences.AT_ONCE = at_once  # in this process, which ends with the job
        model, opt = trained(rank)
        with torch.no_grad():
            model.embedding.weight.fill_(1.0)
            model.hidden.bias.fill_(float(rank == 0))
            if rank == 1:
                model.embedding.weight[5, 1:3] = torch.tensor([1.5, 1.25])
            if rank == 2:
                model.embedding.weight[4, 3] = -2.0
                model.embedding.weight[5, :] = 1.25
        return look(model, opt)

    assert agreed_on(run_forked(4, job)) == [
        Drift("embedding.weight", "parameter", (1, 2), 3.0, 5, (5, 1), 1.0, 1.5),
        Drift("hidden.bias", "parameter", (1, 2, 3), 1.0, 6, (0,), 1.0, 0.0),
    ]


@pytest.mark.parametrize(
    ("first", "other", "distance"),
    [(0.0, -0.0, 0.0), (NAN, 1.0, INF), (1.0, NAN, INF), (INF, -INF, INF), (INF, 2.0, INF)],
)
def test_values_that_equality_does_not_tell_apart(first, other, distance):
    def job(rank):
        model, opt = trained(rank)
        with torch.no_grad():
            model.hidden.weight[2, 1] = other if rank else first
        return look(model, opt)

    (drift,) = agreed_on(run_threaded(2, job))
    assert (drift.name, drift.kind) == ("hidden.weight", "parameter")
    assert (drift.ranks, drift.max_abs_diff, drift.count, drift.index) == (
        (1,),
        distance,
        1,
        (2, 1),
    )
    assert [repr(drift.first), repr(drift.other)] == [repr(first), repr(other)]


def test_nans_count_by_their_bits():
    def job(rank):
        model, opt = trained(rank)
        with torch.no_grad():
            model.hidden.weight.fill_(NAN)
        same = look(model, opt)
        if rank == 1:
            flip(model.hidden.weight, (0, 3), 0)
        return same, look(model, opt)

    for same, different in run_threaded(2, job):
        assert same == []
        (drift,) = different
        assert (drift.ranks, drift.max_abs_diff, drift.count, drift.index) == ((1,), 0.0, 1, (0, 3))


def test_frozen_strided_and_foreign_parameters():
    """Not in the optimizer, not contiguous, in the optimizer but not in the model."""

    def job(rank):
        model = Net()
        foreign = nn.Parameter(torch.ones(3))
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        opt = samestep.MuonAdamW([*named, ("foreign", foreign)], **SMALL)
        assert look(model, opt) == []
        with torch.no_grad():
            if rank == 1:
                model.frozen.weight[1, 1] = 7.0
                model.turned[5, 2] = 8.0
                foreign[2] = 9.0
        return look(model, opt), look(model)

    results = run_threaded(2, job)
    with_optimizer = agreed_on([found for found, _ in results])
    assert [(d.name, d.kind, d.index, d.other) for d in with_optimizer] == [
        ("turned", "parameter", (5, 2), 8.0),
        ("frozen.weight", "parameter", (1, 1), 7.0),
        ("foreign", "parameter", (2,), 9.0),
    ]
    assert agreed_on([found for _, found in results]) == with_optimizer[:2]


# --- buffers -----------------------------------------------------------------------------------


def test_buffers_are_compared_if_asked_for():
    def job(rank):
        model, opt = trained(rank)
        assert look(model, opt, buffers=True) == []
        if rank == 1:
            model.counts[3] += 1 << 60
            model.mask[1, 2] = False
        return look(model, opt), look(model, opt, buffers=True)

    results = run_threaded(2, job)
    assert agreed_on([found for found, _ in results]) == []
    assert agreed_on([found for _, found in results]) == [
        Drift("counts", "buffer", (1,), 2.0**60, 1, (3,), 3, 3 + (1 << 60)),
        Drift("mask", "buffer", (1,), 1.0, 1, (1, 2), True, False),
    ]


# --- options -----------------------------------------------------------------------------------


def group_of(opt, rule):
    return next(i for i, group in enumerate(opt.param_groups) if group["rule"] == rule)


CHANGES = {
    "a number": ("muon", "lr", 0.1, 0.2, ("", 0.1, 0.1, 0.2)),
    "a tensor": ("muon", "lr", torch.tensor(0.25), torch.tensor(0.5), ("", 0.25, 0.25, 0.5)),
    "a pair": ("adamw", "betas", (0.9, 0.95), (0.9, 0.9), ("", INF, "(0.9, 0.95)", "(0.9, 0.9)")),
    "a pair of tensors": (
        "adamw",
        "betas",
        (torch.tensor(0.75), torch.tensor(0.5)),
        (torch.tensor(0.75), torch.tensor(0.25)),
        ("[1]", 0.25, 0.5, 0.25),
    ),
    "a switch": ("muon", "nesterov", True, False, ("", INF, "True", "False")),
    "a direction": ("adamw", "maximize", False, True, ("", INF, "False", "True")),
}


@pytest.mark.parametrize(("rule", "key", "one", "two", "expected"), CHANGES.values(), ids=CHANGES)
def test_hyperparameters_that_differ_are_named(rule, key, one, two, expected):
    suffix, distance, first, other = expected

    def job(rank):
        model, opt = trained(rank)
        index = group_of(opt, rule)
        opt.param_groups[index][key] = one
        same = look(model, opt)
        opt.param_groups[index][key] = two if rank == 1 else one
        return same, look(model, opt), f"param_groups[{index}][{key!r}]{suffix}"

    results = run_threaded(3, job)
    assert agreed_on([same for same, _, _ in results]) == []
    name = results[0][2]
    found = agreed_on([found for _, found, _ in results])
    assert found == [Drift(name, "options", (1,), distance, 1, (), first, other)]


def test_the_rank_that_is_furthest_off_counts():
    def job(rank):
        model, opt = trained(rank)
        opt.param_groups[0]["lr"] = (0.001, 0.002, 9.0)[rank]
        return look(model, opt)

    (drift,) = agreed_on(run_threaded(3, job))
    assert (drift.ranks, drift.first, drift.other) == ((1, 2), 0.001, 0.002)
    assert drift.max_abs_diff == pytest.approx(8.999)


def test_keys_of_others_may_differ():
    def job(rank):
        model, opt = trained(rank)
        opt.param_groups[0]["started_on_rank"] = rank
        opt.param_groups[1]["note"] = torch.tensor(rank)
        return look(model, opt)

    assert run_threaded(2, job) == [[], []]


def test_a_scheduler_that_runs_on_one_rank_only():
    def job(rank):
        model, opt = trained(rank)
        schedule = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
        ranks_steps(model, opt, rank, 1, first=2)
        if rank == 0:
            schedule.step()
        with pytest.raises(DriftError) as caught:
            check(model, opt)
        return str(caught.value), [drift.name for drift in caught.value.drifts]

    message, names = agreed_on(run_threaded(2, job))
    assert all(name.endswith("['lr']") for name in names)
    assert "0.05 on rank 0, 0.1 on rank 1" in message


# --- state and plan ----------------------------------------------------------------------------


def test_state_that_every_rank_keeps():
    def job(rank):
        found = {}
        for sharding in SHARDINGS:
            model, opt = trained(rank, sharding=sharding)
            assert look(model, opt) == []
            if rank == 1:
                # A small parameter, and a sharded one, of which each rank has its own part.
                opt.state[model.hidden.bias]["exp_avg_sq"][4] += 0.5
                opt.state[model.fused.weight]["momentum_buffer"][2:3] += 1
                opt.state[model.fused.weight]["variance"][1:2] += 1
                opt.state[model.embedding.weight]["step"] += 4
            found[sharding] = [(d.name, d.kind, d.ranks, d.index) for d in look(model, opt)]
        return found

    found = agreed_on(run_forked(2, job))
    step = ("embedding.weight.step", "state", (1,), ())
    small = ("hidden.bias.exp_avg_sq", "state", (1,), (4,))
    assert found["zero1"] == found["zero2"] == [step, small]
    assert found["none"] == [
        step,
        ("fused.weight.momentum_buffer", "state", (1,), (0, 2)),
        ("fused.weight.variance", "state", (1,), (1,)),
        small,
    ]


def test_masters_of_small_parameters():
    def job(rank):
        model, opt = trained(rank, torch.bfloat16, master_weights=True)
        assert look(model, opt) == []
        if rank == 0:
            opt.state[model.hidden.bias]["master_weight"][3] = 5.0
        return look(model, opt)

    (drift,) = agreed_on(run_threaded(2, job))
    assert (drift.name, drift.kind) == ("hidden.bias.master_weight", "state")
    assert (drift.index, drift.first) == ((3,), 5.0)


def test_a_plan_that_is_not_the_same():
    """It is compared at construction; what changes it later is a fault in the memory of a rank."""

    def job(rank):
        model, opt = trained(rank)
        if rank == 1:
            (shared,) = opt.shared_parameters
            spec = shared.plan.params[0]._replace(name="renamed")
            shared.plan = shared.plan._replace(params=(spec, *shared.plan.params[1:]))
        return [drift for drift in look(model, opt) if drift.kind == "plan"]

    (drift,) = agreed_on(run_threaded(2, job))
    assert drift.index == (1,)
    assert (drift.max_abs_diff, drift.count > 1) == (INF, True)
    assert "renamed: (" in drift.other
    assert "renamed" not in drift.first


@pytest.mark.parametrize("wrap", [False, True])
def test_an_optimizer_of_torch(wrap):
    """All state is compared, under the model's names, with and without DDP around it."""

    def job(rank):
        model = Net()
        called = nn.parallel.DistributedDataParallel(model) if wrap else model
        opt = torch.optim.AdamW(model.parameters(), lr=0.1)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        opt.step()
        assert look(called, opt) == []
        opt.param_groups[0]["lr"] = 0.1 + rank
        if rank == 1:
            opt.state[model.hidden.weight]["exp_avg"][1, 3] = 0.5
        return look(called, opt)

    found = agreed_on(run_forked(2, job))
    assert [(d.name, d.kind, d.index) for d in found] == [
        ("hidden.weight.exp_avg", "state", (1, 3)),
        ("param_groups[0]['lr']", "options", ()),
    ]


# --- groups of ranks ---------------------------------------------------------------------------


def with_experts(rank):
    """Experts on ranks 0, 1 and on 2, 3: each pair has its own, of its own shape."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = rank // 2
    model = Small()
    del model.experts
    generator = torch.Generator().manual_seed(half)
    model.experts = nn.Parameter(torch.randn(2, 4 + half, 3, generator=generator))
    muon = {"rule": "muon", "process_group": pairs[half], "divisor": 4}
    named = dict(model.named_parameters())
    groups = [
        {"params": [("experts", named.pop("experts"))], **muon},
        {"params": list(named.items()), "rule": "adamw"},
    ]
    opt = samestep.MuonAdamW(groups, lr=0.1, crossover=1000)
    ranks_steps(model, opt, rank, 2)
    return model, opt


def test_what_some_ranks_share_is_compared_by_them_and_told_to_all():
    def job(rank):
        model, opt = with_experts(rank)
        found = [look(model, opt)]
        if rank == 3:
            with torch.no_grad():
                model.experts[1, 4, 2] = 9.0
        found.append(look(model, opt))
        if rank == 1:
            opt.state[model.experts]["momentum_buffer"][5] = 3.0
            opt.param_groups[0]["lr"] = 0.5
            model.hidden.bias.data[1] = 4.0
        found.append(look(model, opt))
        return found

    results = run_forked(4, job)
    nothing, one, all_of_them = agreed_on(results)
    assert nothing == []
    assert [(d.name, d.ranks, d.first_rank, d.index) for d in one] == [
        ("experts", (3,), 2, (1, 4, 2))
    ]
    assert [(d.name, d.kind, d.ranks, d.first_rank, d.index) for d in all_of_them] == [
        ("hidden.bias", "parameter", (1,), 0, (1,)),
        ("experts.momentum_buffer", "state", (1,), 0, (0, 1, 2)),
        ("param_groups[0]['lr']", "options", (1,), 0, ()),
        ("experts", "parameter", (3,), 2, (1, 4, 2)),
    ]


def test_a_drift_in_every_pair():
    """Then all ranks agree that theirs differs, which must not look like agreement."""

    def job(rank):
        model, opt = with_experts(rank)
        with torch.no_grad():
            model.experts[0, 0, 0] = float(rank)
        return [(d.name, d.ranks, d.first_rank) for d in look(model, opt)]

    assert agreed_on(run_forked(4, job)) == [("experts", (1,), 0), ("experts", (3,), 2)]


def test_an_optimizer_of_some_ranks():
    """The others take no part; parameters it does not have are compared by its ranks too."""

    def job(rank):
        group = dist.new_group([1, 2])
        model = Net()
        if rank == 0:
            return None
        opt = samestep.MuonAdamW(model, **SMALL, process_group=group)
        assert look(model, opt) == []
        with torch.no_grad():
            if rank == 2:
                model.frozen.bias[0] = 3.0
        found = look(model, opt)
        assert found == look(model, process_group=group)
        return found

    _, *found = run_forked(3, job)
    (drift,) = agreed_on(found)
    assert (drift.name, drift.ranks, drift.first_rank) == ("frozen.bias", (2,), 1)


# --- what it costs, and what it leaves alone -----------------------------------------------------


def test_one_small_all_reduce_while_all_agree():
    def job(rank):
        calls = []
        intercept(lambda name, numel: calls.append((name, numel)))
        found = {}
        for sharding in SHARDINGS:
            model, opt = trained(rank, sharding=sharding)
            calls.clear()
            assert check(model, opt, buffers=True) == []
            found[sharding] = list(calls)
        return found

    for found in run_forked(2, job):
        for calls in found.values():
            assert calls == [("all_reduce", 6)]


def test_one_more_for_each_group_of_ranks():
    def job(rank):
        calls = []
        model, opt = with_experts(rank)
        intercept(lambda name, numel: calls.append(name))
        assert check(model, opt) == []
        return calls

    assert run_forked(4, job) == [["all_reduce"] * 2] * 4


def test_training_goes_on_as_if_nothing_had_been_checked():
    def job(rank):
        plain, opt = trained(rank)
        ranks_steps(plain, opt, rank, 3, first=2)
        checked, other = trained(rank)
        for step in range(2, 5):
            check(checked, other, buffers=True)
            ranks_steps(checked, other, rank, 1, first=step)
        expected, state = values(plain), opt.whole_state()
        assert all(torch.equal(value, expected[name]) for name, value in values(checked).items())
        for name, entries in other.whole_state().items():
            assert all(torch.equal(t, state[name][key]) for key, t in entries.items())
        return True

    assert run_forked(2, job) == [True, True]


# --- ranks that have not the same things -------------------------------------------------------


def disagreement(*args):
    try:
        look(*args)
    except RanksDisagreeError as error:
        return str(error)
    return None


def test_lists_that_differ_are_an_error_on_every_rank():
    def job(rank):
        found = []
        for change in ("name", "shape", "dtype", "more"):
            model = Net()
            if rank == 1 and change == "name":
                model.other = model.frozen
                del model.frozen
            if rank == 1 and change == "shape":
                model.frozen.weight = nn.Parameter(torch.ones(5, 4))
            if rank == 1 and change == "dtype":
                model.frozen.double()
            if rank == 1 and change == "more":
                model.zone = nn.Parameter(torch.ones(2))
            found.append(disagreement(model))
        return found

    name, shape, dtype, more = agreed_on(run_forked(3, job))
    assert "rank 0 has 'parameter frozen.weight" in name
    assert "rank 1 has 'parameter other.weight" in name
    assert "(5, 3)" in shape
    assert "(5, 4)" in shape
    assert "float32" in dtype
    assert "float64" in dtype
    assert "zone" in more


def test_lists_that_differ_in_a_group_of_some_ranks():
    def job(rank):
        model, opt = with_experts(rank)
        if rank == 3:
            del opt.param_groups[0]["nesterov"]
        return disagreement(model, opt)

    message = agreed_on(run_forked(4, job))
    assert "rank 2 has" in message
    assert "rank 3 has" in message
    assert "nesterov" in message


# --- the error ---------------------------------------------------------------------------------


def test_the_error_says_what_where_and_what_to_do():
    def job(rank):
        model, opt = trained(rank)
        with torch.no_grad():
            if rank > 0:
                model.hidden.weight[3, 2] = 0.5
            else:
                model.hidden.weight[3, 2] = 0.25
        if rank == 2:
            opt.param_groups[0]["lr"] = 0.7
        with pytest.raises(DriftError) as caught:
            check(model, opt)
        assert caught.value.drifts == look(model, opt)
        again = pickle.loads(pickle.dumps(caught.value))
        assert again.drifts == caught.value.drifts
        return str(caught.value)

    message = agreed_on(run_threaded(3, job))
    first, second, third, advice = message.split("\n")
    assert first == "replicas have drifted apart:"
    assert second == (
        "  parameter hidden.weight: 1 element on ranks 1, 2 differs from rank 0's, by up to 0.25; "
        "the first at [3, 2]: 0.25 on rank 0, 0.5 on rank 1"
    )
    assert third == "  options param_groups[0]['lr']: rank 2 differs: 0.1 on rank 0, 0.7 on rank 2"
    for part in ("checkpoint", "broadcast", "raise_on_drift=False"):
        assert part in advice


def test_a_long_list_is_cut_in_the_message_only():
    def job(rank):
        model = nn.ParameterList(torch.full((2,), float(rank)) for _ in range(20))
        with pytest.raises(DriftError, match="and 12 more") as caught:
            check(model)
        return len(caught.value.drifts), len(str(caught.value).split("\n"))

    assert run_threaded(2, job) == [(20, 11)] * 2
