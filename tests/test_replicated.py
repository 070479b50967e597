"""Replicated parameters over ranks: against one process, in every layout, with any gradients.

Ranks compared with each other agree almost by construction, so every run is also compared
with one process that is fed the mean of all ranks' gradients.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import signal
import warnings

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import samestep
from samestep.comm.integrity.agreement import RanksDisagreeError
from tests.ranks import RanksFailed, run_forked, run_threaded
from tests.reference import ReferenceAdamW, ReferenceTorch, relative_error, to_numpy
from tests.soak import SOAK, some, twin, twin_cases

ADAMW_TOLERANCE, MUON_TOLERANCE = 2e-5, 3e-4
SHARDINGS = ("none", "zero1", "zero2")
MODES = [(s, r) for s in SHARDINGS for r in ("ordered", "fast")]


def fill(model, seed):
    """Draw every parameter from its own generator: ranks that are threads share torch's."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(std=0.3, generator=generator)


class Model(nn.Module):
    """Uneven shapes, fused QKV, experts, tied, frozen, 0-d and empty parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(29, 12)
        self.qkv = nn.Linear(12, 21, bias=False)
        self.out = nn.Linear(12, 12)
        self.up = nn.Linear(12, 31)
        self.down = nn.Linear(31, 12)
        self.experts = nn.Parameter(torch.zeros(5, 7, 6))
        self.norm = nn.LayerNorm(12)
        self.scale = nn.Parameter(torch.tensor(0.0))
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.no_experts = nn.Parameter(torch.zeros(0, 4, 4))
        self.frozen = nn.Linear(12, 12)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(12, 29, bias=False)
        self.head.weight = self.embedding.weight
        fill(self, 0)


OPTIONS = {
    "lr": 1e-2,
    "variance_beta2": 0.9,
    "overrides": {
        "qkv.weight": {"split_sizes": (12, 6, 3)},
        "experts": {"rule": "muon"},
        "no_experts": {"rule": "muon"},
        "nothing": {"rule": "adamw"},
    },
}
RANK_OPTIONS = {"bucket_size": 300, "crossover": 20}


def trainable(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def build(model, **options):
    return samestep.MuonAdamW(model, **{**OPTIONS, **options})


def gradient(param, place, rank, step):
    """Full rank, and different on every rank; some ranks have none, one may have zeros.

    Every place is absent on all ranks in one step of five, and in another a rank has zeros
    and the others have none.
    """
    phase = (place + step) % 5
    if phase == 4:
        return None
    if phase == 3:
        return torch.zeros_like(param) if rank == 0 else None
    if (place * 7 + step * 3 + rank * 5) % 4 == 0:
        return None
    generator = torch.Generator().manual_seed(10007 * place + 101 * step + rank)
    return torch.randn(param.shape, generator=generator).to(param.dtype)


def mean_in_rank_order(param, grads):
    """What one process is fed: None counts as zeros unless nobody has a gradient."""
    if all(grad is None for grad in grads):
        return None
    total = None
    for grad in grads:
        grad = torch.zeros_like(param) if grad is None else grad
        total = grad.clone() if total is None else total + grad
    return total / len(grads)


def ranks_steps(model, opt, rank, steps, first=0, make=gradient):
    params = trainable(model).values()
    for step in range(first, first + steps):
        for place, param in enumerate(params):
            param.grad = make(param, place, rank, step)
        opt.step()
        opt.zero_grad()


def single_steps(model, opt, world, steps, first=0, make=gradient):
    params = trainable(model).values()
    for step in range(first, first + steps):
        for place, param in enumerate(params):
            param.grad = mean_in_rank_order(
                param, [make(param, place, r, step) for r in range(world)]
            )
        opt.step()
        opt.zero_grad()


def values(model):
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def bits_equal(left, right):
    assert left.keys() == right.keys()
    return all(torch.equal(left[name], right[name]) for name in left)


def rules_by_name(model, opt):
    rule = {p: group["rule"] for group in opt.param_groups for p in group["params"]}
    return {name: rule[param] for name, param in trainable(model).items()}


def assert_near(found, expected, rules):
    for name, rule in rules.items():
        limit = ADAMW_TOLERANCE if rule == "adamw" else MUON_TOLERANCE
        difference = (found[name] - expected[name]).abs()
        assert difference.numel() == 0 or difference.max() <= limit, name


def owned_state_equals(opt, reference_opt, skip=("step", "variance")):
    """Compare the state of every piece held here with the same elements of one process's state."""
    ours = [p for group in opt.param_groups for p in group["params"]]
    theirs = [p for group in reference_opt.param_groups for p in group["params"]]
    twin = dict(zip(ours, theirs, strict=True))
    compared = 0
    for shared in opt.shared_parameters:
        for index, param in enumerate(shared.params):
            for key, tensor in opt.state[param].items():
                expected = reference_opt.state[twin[param]][key]
                if key == "step":
                    assert all(count == expected for count in tensor)
                if key in skip:
                    continue
                flat = expected.reshape(-1)
                parts = [
                    flat[piece.start : piece.stop]
                    for piece in shared.plan.owned(shared.group.rank)
                    if piece.param == index
                ]
                expected = torch.cat([*parts, flat[:0]])
                assert torch.equal(tensor.view(-1), expected), key
                compared += tensor.numel()
    return compared


# --- against one process -----------------------------------------------------------------------


def run_all_modes(rank, steps, rank_options):
    """One result per mode, all from one set of processes."""
    found = {}
    for sharding, reduction in MODES:
        model = Model()
        opt = build(model, sharding=sharding, reduction=reduction, **rank_options)
        ranks_steps(model, opt, rank, steps)
        found[sharding, reduction] = values(model)
    return found


@pytest.mark.parametrize(
    ("world", "steps", "bucket_size"),
    [(2, 10, 100), (3, 10, 300)] if SOAK else [(3, 7, 100)],  # a pattern takes seven
)
def test_every_mode_against_one_process(world, steps, bucket_size):
    single = Model()
    single_opt = build(single)
    single_steps(single, single_opt, world, steps)
    expected, rules = values(single), rules_by_name(single, single_opt)
    options = {"bucket_size": bucket_size, "crossover": 20}
    results = run_forked(world, run_all_modes, steps, options)
    for mode in MODES:
        first = results[0][mode]
        for result in results[1:]:
            assert bits_equal(result[mode], first), f"replicas differ: {mode}"
        assert_near(first, expected, rules)
        if mode[1] == "ordered":
            assert bits_equal(first, expected), mode
    start = values(Model())
    assert bits_equal({"frozen": expected["frozen.weight"]}, {"frozen": start["frozen.weight"]})
    moved = {name for name in rules if not torch.equal(expected[name], start[name])}
    assert moved == {name for name in rules if start[name].numel()}


@twin
def test_the_state_of_owned_pieces_is_that_of_one_process():
    steps, world = 10 if SOAK else 4, 3
    single = Model()
    single_opt = build(single)
    single_steps(single, single_opt, world, steps)

    def job(rank):
        model = Model()
        opt = build(model, reduction="ordered", crossover=20)
        ranks_steps(model, opt, rank, steps)
        return owned_state_equals(opt, single_opt)

    assert all(compared > 0 for compared in run_forked(world, job))


@twin
def test_against_rules_written_out_in_float64():
    """No code in common: the mean gradient of three ranks, fed to numpy's AdamW and Muon."""
    world, steps = 3, 8
    shapes = {"w": (10, 6), "qkv": (11, 7), "experts": (3, 4, 5), "table": (13, 3), "bias": (5,)}
    splits = {"qkv": (6, 4, 1)}
    names = list(shapes)

    def params():
        generator = torch.Generator().manual_seed(3)
        return {
            name: nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
            for name, shape in shapes.items()
        }

    def job(rank):
        mine = params()
        muon = {"rule": "muon", **samestep.presets.torch(), "compute_dtype": torch.float64}
        groups = [
            {"params": [mine[name]], **muon, "lr": 0.02, "split_sizes": splits.get(name)}
            for name in names[:3]
        ]
        adamw = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
        groups.append({"params": [mine[n] for n in names[3:]], "rule": "adamw", **adamw})
        opt = samestep.MuonAdamW(groups, crossover=1, bucket_size=40)
        for step in range(steps):
            for place, param in enumerate(mine.values()):
                param.grad = gradient(param, place, rank, step)
            opt.step()
        decay = {group["weight_decay"] for group in opt.param_groups[:3]}
        return [param.detach() for param in mine.values()], decay

    results = run_forked(world, job)
    (weight_decay,) = results[0][1]
    start = params()
    momentum = samestep.presets.torch()["momentum"]
    references = [
        ReferenceTorch([to_numpy(start[n])], 0.02, weight_decay, momentum, splits.get(n))
        for n in names[:3]
    ]
    references += [
        ReferenceAdamW([to_numpy(start[n])], 0.01, (0.9, 0.95), 1e-8, 0.1) for n in names[3:]
    ]
    for step in range(steps):
        for place, (name, reference) in enumerate(zip(names, references, strict=True)):
            grads = [gradient(start[name].detach(), place, rank, step) for rank in range(world)]
            mean = mean_in_rank_order(start[name].detach(), grads)
            if mean is not None:
                reference.step([to_numpy(mean)])
    for found, _ in results:
        for name, tensor, reference in zip(names, found, references, strict=True):
            assert relative_error(tensor, reference.params[0]) < 1e-9, name


# --- presence ----------------------------------------------------------------------------------

PRESENCE = ("none", "zeros", "values")


@st.composite
def presence_patterns(draw):
    """(ranks, [step][place][rank] -> what that rank has)."""
    world, steps = draw(st.integers(2, 5)), draw(st.integers(1, 4))
    entries = st.sampled_from(PRESENCE)
    absent = st.just(["none"] * world)
    one_place = st.one_of(absent, st.lists(entries, min_size=world, max_size=world))
    one_step = st.lists(one_place, min_size=5, max_size=5)
    return world, draw(st.lists(one_step, min_size=steps, max_size=steps))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.fused = nn.Linear(4, 9, bias=False)
        self.hidden = nn.Linear(4, 6)
        self.experts = nn.Parameter(torch.zeros(3, 4, 3))
        fill(self, 1)


SMALL = {
    "lr": 0.1,
    "variance_beta2": 0.9,
    "overrides": {"fused.weight": {"split_sizes": (5, 3, 1)}, "experts": {"rule": "muon"}},
}


@twin
@given(presence_patterns(), st.sampled_from(SHARDINGS), st.sampled_from([1, 10]))
@settings(max_examples=200 if SOAK else 8)
def test_any_presence_does_not_hang_and_leaves_the_absent_alone(case, sharding, crossover):
    """Values, all state and step counts of what is absent everywhere, bit for bit."""
    world, pattern = case

    def make(param, place, rank, step):
        kind = pattern[step][place][rank]
        if kind == "none":
            return None
        grad = torch.Generator().manual_seed(97 * place + 13 * step + rank)
        values = torch.randn(param.shape, generator=grad)
        return values if kind == "values" else torch.zeros_like(values)

    single = Small()
    single_opt = samestep.MuonAdamW(single, **SMALL)
    single_steps(single, single_opt, world, len(pattern), make=make)

    def job(rank):
        model = Small()
        opt = samestep.MuonAdamW(
            model,
            **SMALL,
            sharding=sharding,
            reduction="ordered",
            crossover=crossover,
            bucket_size=30,
        )
        params = list(trainable(model).values())
        for step in range(len(pattern)):
            before = [(p.detach().clone(), copy.deepcopy(opt.state[p])) for p in params]
            ranks_steps(model, opt, rank, 1, step, make)
            for place, (param, (value, state)) in enumerate(zip(params, before, strict=True)):
                if all(kind == "none" for kind in pattern[step][place]):
                    assert torch.equal(param, value)
                    assert bits_equal(opt.state[param], state)
        owned_state_equals(opt, single_opt)
        return values(model)

    expected = values(single)
    for result in run_threaded(world, job):
        assert bits_equal(result, expected)


def test_zeros_are_a_gradient_and_none_is_not():
    """After one real step momentum moves a parameter under zeros, and does not under None."""

    def job(rank):
        moved = []
        for second in ("zeros", "none"):
            model = Small()
            opt = samestep.MuonAdamW(model, **SMALL, crossover=1)
            ranks_steps(model, opt, rank, 1, make=lambda p, *_: torch.ones_like(p))
            before = values(model)
            zeros_on = 1 if second == "zeros" else None
            ranks_steps(
                model, opt, rank, 1, make=lambda p, _i, r, _s, on=zeros_on: (
                    torch.zeros_like(p) if r == on else None
                ),
            )  # fmt: skip
            after = values(model)
            moved.append([name for name in before if not torch.equal(before[name], after[name])])
        return moved

    for moved_by_zeros, moved_by_none in run_threaded(3, job):
        assert moved_by_zeros == list(trainable(Small()))
        assert moved_by_none == []


# --- state -------------------------------------------------------------------------------------


def state_sizes(opt, keys):
    tensors = [(k, t) for state in opt.state.values() for k, t in state.items() if k in keys]
    return sum(tensor.numel() for _, tensor in tensors)


def test_state_is_held_once_over_all_ranks():
    keys = ("exp_avg", "exp_avg_sq", "momentum_buffer", "variance")
    single = Model()
    total = state_sizes(build(single), keys)

    def job(rank):
        found = {}
        for sharding in ("auto", *SHARDINGS):
            model = Model()
            opt = build(model, sharding=sharding, crossover=1)
            rules = rules_by_name(model, opt)
            for name, param in trainable(model).items():
                needed = {"muon": keys[2:], "adamw": ("step", *keys[:2])}[rules[name]]
                assert opt.state[param].keys() == set(needed)
            before = state_sizes(opt, keys)
            ranks_steps(model, opt, rank, 2)
            assert state_sizes(opt, keys) == before
            assert len(opt.state) == len(trainable(model))
            found[sharding] = before
        return found

    for world in (3, 5):
        results = run_threaded(world, job)
        for sharding in ("auto", "zero1", "zero2"):
            shares = [result[sharding] for result in results]
            assert sum(shares) == total
            assert max(shares) < 0.7 * total
        assert all(result["none"] == total for result in results)


@twin
def test_who_keeps_gradients():
    """zero2 frees each gradient once it is packed; zero1 and none leave it to the user."""

    def job(rank):
        kept = {}
        for sharding in ("auto", *SHARDINGS):
            model = Small()
            opt = samestep.MuonAdamW(model, **SMALL, sharding=sharding, crossover=9, bucket_size=9)
            params = list(trainable(model).values())
            for param in params:
                param.grad = torch.full_like(param, float(rank))
            opt.step()
            kept[sharding] = [param.grad is not None for param in params]
            for param in params:
                if param.grad is not None:
                    assert torch.equal(param.grad, torch.full_like(param, float(rank)))
        return kept

    for kept in run_threaded(3, job):
        assert not any(kept["auto"] + kept["zero2"])
        assert all(kept["none"] + kept["zero1"])


@twin
def test_masters_are_held_by_owners_and_equal_one_process():
    """Whole numbers as gradients: their mean over two ranks is exact in bf16."""
    world = 2
    before, after = (4, 3) if SOAK else (2, 2)  # steps

    def make(param, place, rank, step):
        if (place + step) % 3 == rank:
            return None
        generator = torch.Generator().manual_seed(31 * place + 7 * step + rank)
        return torch.randint(-60, 61, param.shape, generator=generator).to(torch.bfloat16)

    def edit(model):
        """Weights set by hand are what the next step starts from."""
        with torch.no_grad():
            model.embedding.weight[3:17] = 0.5
            model.up.weight *= 0.5

    single = Model().to(torch.bfloat16)
    single_opt = build(single, master_weights=True)
    single_steps(single, single_opt, world, before, make=make)
    edit(single)
    single_steps(single, single_opt, world, after, first=before, make=make)
    expected = values(single)
    numel = sum(param.numel() for param in trainable(single).values())
    without = Model().to(torch.bfloat16)
    single_steps(without, build(without, master_weights=False), world, before + after, make=make)
    assert not torch.equal(without.qkv.weight, single.qkv.weight)  # masters matter here

    def job(rank):
        sizes = {}
        for sharding, reduction in MODES:
            model = Model().to(torch.bfloat16)
            opt = build(
                model, master_weights=True, sharding=sharding, reduction=reduction, crossover=1
            )
            ranks_steps(model, opt, rank, before, make=make)
            edit(model)
            ranks_steps(model, opt, rank, after, first=before, make=make)
            assert bits_equal(values(model), expected)
            assert owned_state_equals(opt, single_opt) > 0
            sizes[sharding] = state_sizes(opt, ("master_weight",))
        return sizes

    results = run_forked(world, job)
    assert sum(result["zero1"] for result in results) == numel
    assert sum(result["zero2"] for result in results) == numel
    assert [result["none"] for result in results] == [numel, numel]


@twin
def test_a_group_added_on_the_way():

    def added():
        generator = torch.Generator().manual_seed(8)
        return [
            nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((6, 5), (23, 3))
        ]

    def grow(model, opt):
        matrix, table = added()
        model.matrix, model.table = matrix, table
        opt.add_param_group({"params": [("matrix", matrix)], "rule": "muon", "lr": 0.05})
        opt.add_param_group({"params": [("table", table)], "rule": "adamw", "lr": 0.05})

    world = 3
    single = Small()
    single_opt = samestep.MuonAdamW(single, **SMALL)
    single_steps(single, single_opt, world, 3)
    grow(single, single_opt)
    single_steps(single, single_opt, world, 3, first=3)
    expected = values(single)

    def job(rank):
        for sharding in SHARDINGS:
            model = Small()
            opt = samestep.MuonAdamW(
                model, **SMALL, sharding=sharding, reduction="ordered", crossover=10
            )
            ranks_steps(model, opt, rank, 3)
            grow(model, opt)
            assert all(param in opt.state for param in trainable(model).values())
            ranks_steps(model, opt, rank, 3, first=3)
            assert bits_equal(values(model), expected)
            owned_state_equals(opt, single_opt)
        return True

    assert run_threaded(world, job) == [True] * world


@twin_cases("none")
@pytest.mark.parametrize("sharding", some(SHARDINGS))
def test_a_saved_state_continues_bit_for_bit(sharding):
    options = {"sharding": sharding, "crossover": 20, "bucket_size": 300, "master_weights": True}
    options["state_dict_form"] = "part"
    steps = 3 if SOAK else 2

    def job(rank):
        straight = Model().to(torch.bfloat16)
        opt = build(straight, **options)
        ranks_steps(straight, opt, rank, steps)
        file = io.BytesIO()
        torch.save({"model": straight.state_dict(), "optimizer": opt.state_dict()}, file)
        file.seek(0)
        ranks_steps(straight, opt, rank, steps, first=steps)

        saved = torch.load(file, weights_only=True)
        resumed = Model().to(torch.bfloat16)
        resumed.load_state_dict(saved["model"])
        again = build(resumed, **options)
        again.load_state_dict(saved["optimizer"])
        ranks_steps(resumed, again, rank, steps, first=steps)
        assert bits_equal(values(resumed), values(straight))
        pairs = zip(opt.state.values(), again.state.values(), strict=True)
        assert all(bits_equal(left, right) for left, right in pairs)
        return True

    assert run_threaded(3, job) == [True] * 3


# --- construction ------------------------------------------------------------------------------


def test_a_plan_that_differs_is_refused_on_every_rank():
    shapes = [(6, 4), (5, 3), (40,)]

    def attempt(rank, shapes, order=(0, 1, 2), names=("a", "b", "c"), **options):
        params = [(names[i], nn.Parameter(torch.ones(shapes[i]))) for i in order]
        try:
            samestep.MuonAdamW(params, **options)
        except RanksDisagreeError as error:
            return str(error)
        return None

    def job(rank):
        odd = rank == 2
        # Construction compares before it shares anything, so attempts may follow each other.
        return [
            attempt(rank, [(6, 4), (5, 4), (40,)] if odd else shapes),
            attempt(rank, [(4, 6), (5, 3), (40,)] if odd else shapes),
            attempt(rank, shapes, (1, 0, 2) if odd else (0, 1, 2)),
            attempt(rank, shapes, names=("a", "b", "other") if odd else ("a", "b", "c")),
            attempt(rank, shapes, (0, 1) if odd else (0, 1, 2)),
            attempt(rank, shapes, sharding="zero1" if odd else "zero2"),
            attempt(rank, shapes, reduction="ordered" if odd else "fast"),
            attempt(rank, shapes, grads="reduced" if odd else "local"),
            attempt(rank, shapes, crossover=1 if odd else 2),
            attempt(rank, shapes, bucket_size=7 if odd else 8),
            attempt(rank, shapes, owners="cyclic" if odd else "balanced"),
            attempt(rank, shapes),
        ]

    results = run_forked(3, job)
    assert results[0] == results[1] == results[2]
    *refused, accepted = results[0]
    assert accepted is None
    parts = [
        ("b: (5, 3)", "b: (5, 4)"),
        ("a: (6, 4)", "a: (4, 6)"),
        ("a: (6, 4)", "b: (5, 3)"),
        ("c: (40,)", "other: (40,)"),
        ("c: (40,)",),
        ("sharding = zero2", "sharding = zero1"),
        ("reduction = fast", "reduction = ordered"),
        ("grads = local", "grads = reduced"),
        ("crossover = 2", "crossover = 1"),
        ("bucket_size = 8", "bucket_size = 7"),
        ("owners = balanced", "owners = cyclic"),
    ]
    for message, expected in zip(refused, parts, strict=True):
        assert message is not None, expected
        assert "rank 0" in message
        assert "rank 2" in message
        assert all(part in message for part in expected), message


def test_options_that_shape_the_update_are_part_of_the_plan():
    """Else replicas drift apart without a word wherever every rank updates for itself."""
    cases = [
        {"momentum": (0.5, 0.9)},
        {"nesterov": (True, False)},
        {"betas": ((0.9, 0.95), (0.9, 0.99))},
        {"weight_decay": (0.0, 0.1)},
        {"master_weights": (False, True)},
    ]

    def job(rank):
        found = []
        for case in cases:
            options = {"master_weights": False}
            options |= {key: pair[rank] for key, pair in case.items()}
            model = Small().to(torch.bfloat16)
            try:
                muon = {"experts": {"rule": "muon"}}
                samestep.MuonAdamW(model, lr=0.1, sharding="none", overrides=muon, **options)
            except RanksDisagreeError as error:
                found.append(str(error))
            else:
                found.append(None)
        return found

    for messages in run_threaded(2, job):
        for case, message in zip(cases, messages, strict=True):
            (key,) = case
            assert message is not None, case
            assert key in message


def test_a_group_that_ranks_disagree_about_is_not_added():
    def job(rank):
        model = Small()
        opt = samestep.MuonAdamW(model, **SMALL)
        groups, state = len(opt.param_groups), len(opt.state)
        param = nn.Parameter(torch.ones(5 + rank))
        with pytest.raises(RanksDisagreeError, match="extra"):
            opt.add_param_group({"params": [("extra", param)], "rule": "adamw"})
        ranks_steps(model, opt, rank, 1)
        return len(opt.param_groups) - groups, len(opt.state) - state

    assert run_threaded(2, job) == [(0, 0), (0, 0)]


def test_replicas_that_differ_are_mended_or_refused():
    def job(rank):
        model, first = Model(), values(Model())
        with torch.no_grad():
            if rank == 1:
                model.up.weight[3, 4] += 1e-6
            if rank == 2:
                model.norm.bias[0] = -0.0
        try:
            build(model, strict=True)
        except ValueError as error:
            refused = str(error)
        else:
            refused = None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            opt = build(model, master_weights=True)
        mended = bits_equal(values(model), first) and not torch.signbit(model.norm.bias[0])
        with warnings.catch_warnings(record=True) as none:
            warnings.simplefilter("always")
            build(model, strict=True)
        ranks_steps(model, opt, rank, 2)
        file = [warning.filename for warning in caught]
        return (
            refused,
            [str(w.message) for w in caught],
            bool(mended),
            len(none),
            values(model),
            file,
        )

    results = run_forked(3, job)
    for refused, caught, mended, after, final, file in results:
        assert refused is not None
        assert "parameters differ between ranks" in refused
        assert len(caught) == 1
        for text in (refused, caught[0]):
            assert "up.weight" in text
            assert "norm.bias" in text
            assert "down.weight" not in text
        assert "rank 0" in caught[0]
        assert mended
        assert after == 0
        assert bits_equal(final, results[0][4])
        assert file == [__file__]


@twin
def test_sixteen_bit_masters_start_from_the_mended_values():
    def ones(param, place, rank, step):
        return torch.ones_like(param)

    single = Small().to(torch.bfloat16)
    single_opt = samestep.MuonAdamW(single, **SMALL, master_weights=True)
    single_steps(single, single_opt, 2, 3, make=ones)

    def job(rank):
        model = Small().to(torch.bfloat16)
        with torch.no_grad():
            model.hidden.weight += rank
            model.embedding.weight += rank
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            opt = samestep.MuonAdamW(model, **SMALL, master_weights=True, crossover=1)
        ranks_steps(model, opt, rank, 3, make=ones)
        assert owned_state_equals(opt, single_opt) > 0
        return values(model)

    assert all(bits_equal(result, values(single)) for result in run_forked(2, job))


def test_copies_are_refused():
    def job(rank):
        opt = samestep.MuonAdamW(Small(), **SMALL)
        for attempt in (copy.deepcopy, copy.copy, pickle.dumps):
            with pytest.raises(TypeError, match="is sharded over ranks cannot be copied"):
                attempt(opt)
        return True

    assert run_threaded(2, job) == [True, True]


@twin
def test_a_process_group_of_some_ranks():
    """Ranks outside the group are not waited for, and the divisor is the group's size."""
    single = Small()
    single_opt = samestep.MuonAdamW(single, **SMALL)

    def from_zero(param, place, rank, step):
        return gradient(param, place, rank + 1, step)  # members 1 and 2

    single_steps(single, single_opt, 2, 3, make=from_zero)
    expected = values(single)

    def job(rank):
        group = dist.new_group([1, 2])
        if rank == 0:
            return None
        model = Small()
        opt = samestep.MuonAdamW(
            model, **SMALL, process_group=group, reduction="ordered", crossover=1
        )
        ranks_steps(model, opt, rank, 3)
        return values(model)

    results = run_forked(3, job)
    assert all(bits_equal(result, expected) for result in results[1:])


# --- DDP ---------------------------------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.left = nn.Linear(8, 8)
        self.right = nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)
        fill(self, 2)

    def forward(self, x, branch):
        x = torch.tanh(self.first(x))
        if branch:
            x = torch.tanh((self.left if branch == "left" else self.right)(x))
        return self.last(x)


BRANCHES = [("left", "left"), ("left", "right"), (None, "right"), (None, None), ("right", None)]


@twin_cases("False")
@pytest.mark.parametrize("unused", [False, True])
def test_gradients_that_ddp_has_reduced(unused):
    def train(rank, wrap):
        model = Branches()
        called = wrap(model)
        opt = samestep.MuonAdamW(called, lr=0.01, crossover=10)
        untouched = True
        for step in range(5):
            branch = BRANCHES[step][rank] if unused else "left"
            generator = torch.Generator().manual_seed(10 * step + rank)
            x = torch.randn(16, 6, generator=generator)
            before = values(model)
            called(x, branch).square().mean().backward()
            opt.step()
            opt.zero_grad()
            used = BRANCHES[step] if unused else ("left", "left")
            for name in ("left", "right"):
                if name not in used:
                    untouched &= torch.equal(
                        before[f"{name}.weight"], values(model)[f"{name}.weight"]
                    )
        return values(model), untouched

    def job(rank):
        def wrap(model):
            if not unused:
                model.right.requires_grad_(False)
            return nn.parallel.DistributedDataParallel(model, find_unused_parameters=unused)

        def plain(model):
            if not unused:
                model.right.requires_grad_(False)
            return model

        return train(rank, wrap), train(rank, plain)

    results = run_forked(2, job)
    for (with_ddp, ddp_untouched), (without, untouched) in results:
        assert ddp_untouched
        assert untouched
        assert bits_equal(with_ddp, results[0][0][0])
        for name, tensor in with_ddp.items():
            limit = MUON_TOLERANCE if tensor.ndim == 2 else ADAMW_TOLERANCE
            assert (tensor - without[name]).abs().max() <= limit, name
    start = Branches()
    assert not torch.equal(results[0][0][0]["left.weight"], start.left.weight)


@twin
def test_reduced_gradients_are_not_divided_again():
    """Equal gradients on every rank: the mean is that gradient, and "reduced" takes it as it is."""

    def same(param, place, rank, step):
        return gradient(param, place, 0, step)

    def job(rank):
        found = []
        for options in ({"grads": "reduced"}, {"grads": "local", "reduction": "ordered"}):
            model = Small()
            opt = samestep.MuonAdamW(model, **SMALL, **options, crossover=10)
            ranks_steps(model, opt, rank, 4, make=same)
            found.append(values(model))
        return found

    single = Small()
    single_opt = samestep.MuonAdamW(single, **SMALL)
    single_steps(single, single_opt, 1, 4, make=same)
    for reduced, local in run_threaded(4, job):
        assert bits_equal(reduced, values(single))
        assert bits_equal(local, values(single))  # four times over four is exact


# --- collectives -------------------------------------------------------------------------------

COLLECTIVES = (
    "all_reduce",
    "all_to_all_single",
    "reduce_scatter",
    "all_gather",
    "all_gather_single",
    "all_gather_into_tensor",
    "broadcast",
)


def intercept(act):
    """Call `act(name, numel)` before each collective of this process."""
    for name in COLLECTIVES:
        original = getattr(dist, name, None)
        if original is None:
            continue

        def wrapper(*args, _original=original, _name=name, **kwargs):
            tensors = [a for a in args if isinstance(a, torch.Tensor)]
            act(_name, sum(t.numel() for t in tensors[-1:]))
            return _original(*args, **kwargs)

        setattr(dist, name, wrapper)


@twin
def test_all_ranks_issue_the_same_collectives_whatever_they_have():
    """Rank 1 never has a gradient; with five ranks and few blocks some own nothing in a bucket."""

    def job(rank):
        names = []
        intercept(lambda name, numel: names.append(name))
        for sharding, reduction in MODES:
            model = Small()
            opt = samestep.MuonAdamW(
                model, **SMALL, sharding=sharding, reduction=reduction, crossover=8, bucket_size=20
            )
            ranks_steps(
                model, opt, rank, 3 if SOAK else 2,
                make=lambda p, i, r, s: None if r == 1 else gradient(p, i, r, s),
            )  # fmt: skip
        return names

    results = run_forked(5, job)
    assert all(names == results[0] for names in results)
    assert len(results[0]) > 50


@twin_cases("0-ordered", "1-fast")
@pytest.mark.parametrize(
    ("place", "reduction"),
    [(0, "ordered"), (1, "fast"), (-1, "ordered")]
    + [(0, "fast"), (1, "ordered"), (-1, "fast")] * SOAK,
)
def test_a_rank_that_dies_inside_step_is_an_error_that_names_the_operation(place, reduction):
    """Killed at the first, the second or the last collective of its second step."""

    def job(rank):
        count, kill_at = 0, None

        def act(name, numel):
            nonlocal count
            count += 1
            if rank == 2 and count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

        model = Small()
        opt = samestep.MuonAdamW(model, **SMALL, reduction=reduction, crossover=8)
        intercept(act)
        ranks_steps(model, opt, rank, 1)
        per_step = count
        kill_at = per_step + (place % per_step) + 1
        ranks_steps(model, opt, rank, 1, first=1)

    with pytest.raises(RanksFailed) as caught:
        run_forked(3, job)
    reports = caught.value.reports
    assert reports.keys() == {0, 1, 2}
    assert "SIGKILL" in reports[2]
    operation = {0: "presence", 1: "reduction of bucket", -1: "gather of bucket"}[place]
    for rank in (0, 1):
        assert "CollectiveError: " in reports[rank]
        assert f"{operation}" in reports[rank].split("CollectiveError: ")[1]
