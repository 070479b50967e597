"""`whole_state`: what one process would keep, whatever the layout, bit for bit; `fingerprint`."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import samestep
from tests.ranks import run_forked, run_threaded
from tests.soak import SOAK, some, twin
from tests.test_replicated import (
    SHARDINGS,
    SMALL,
    Model,
    Small,
    build,
    gradient,
    intercept,
    ranks_steps,
    single_steps,
    trainable,
)

MASTER = "master_weight"


def bits(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def assert_same_bits(found, expected):
    """Names, keys, their order, shapes, dtypes and bits."""
    assert list(found) == list(expected)
    for name, state in expected.items():
        assert list(found[name]) == list(state), name
        for key, tensor in state.items():
            other = found[name][key]
            assert (other.shape, other.dtype) == (tensor.shape, tensor.dtype), (name, key)
            assert torch.equal(bits(other), bits(tensor)), (name, key)


def copied_state(model, opt):
    """What a single process keeps, read without `whole_state`."""
    names = {param: name for name, param in model.named_parameters()}
    params = [param for group in opt.param_groups for param in group["params"]]
    return {names[p]: {key: t.clone() for key, t in opt.state[p].items()} for p in params}


def exact_gradient(world):
    """Multiples of the number of ranks, so that their mean is exact in bfloat16 too."""

    def make(param, place, rank, step):
        if gradient(param.float(), place, rank, step) is None:
            return None
        generator = torch.Generator().manual_seed(31 * place + 7 * step + rank)
        numbers = torch.randint(-9, 10, param.shape, generator=generator)
        return (world * numbers).to(param.dtype)

    return make


CASES = {
    "fp32": (torch.float32, {}),
    "fp32 amsgrad": (torch.float32, {"amsgrad": True, "variance_beta2": None}),
    "bf16 master": (torch.bfloat16, {"master_weights": True}),
    "fp64": (torch.float64, {}),
}


def shardings_of(case, world):
    """All of them with the usual state; of other state one, but for `make soak`."""
    if world == 5:
        return ("zero2",)
    return SHARDINGS if SOAK or case == "fp32" else (SHARDINGS[list(CASES).index(case) - 1],)


@pytest.mark.parametrize("world", [2, 3, 5] if SOAK else [3])
def test_every_layout_has_the_state_of_one_process(world):
    """Fused rows, stacks, variance, 0-d, tiny and empty parameters, absent gradients."""
    make, steps = exact_gradient(world), 5 if SOAK else 3
    fresh, expected = {}, {}
    for case, (dtype, options) in CASES.items():
        single = Model().to(dtype)
        opt = build(single, **options)
        fresh[case] = copied_state(single, opt)
        single_steps(single, opt, world, steps, make=make)
        expected[case] = copied_state(single, opt)
        assert_same_bits(opt.whole_state(), expected[case])

    def job(rank):
        for case, (dtype, options) in CASES.items():
            for sharding in shardings_of(case, world):
                model = Model().to(dtype)
                opt = build(
                    model, sharding=sharding, reduction="ordered", crossover=20, bucket_size=150,
                    **options,
                )  # fmt: skip
                assert_same_bits(opt.whole_state(), fresh[case])
                ranks_steps(model, opt, rank, steps, make=make)
                assert_same_bits(opt.whole_state(), expected[case])
        return True

    assert run_forked(world, job) == [True] * world
    for state in expected.values():
        moved = [t for of_name in state.values() for key, t in of_name.items() if t.any()]
        assert len(moved) > 20  # it is not zeros that were compared


LOADING = {
    "none": {"sharding": "none"},
    "zero1": {"sharding": "zero1"},
    "zero2": {"sharding": "zero2"},
    "flat": {"sharding": "zero2", "buffers": "flat"},
}


@pytest.mark.parametrize("world", [2, 3, 5] if SOAK else [3])
@pytest.mark.parametrize("case", some(["fp32", "bf16 master"]))
def test_whole_state_loads_into_every_layout(world, case):
    """What one process saved, and what one of several ranks that have all of it saved."""
    dtype, options = CASES[case]
    single = Model().to(dtype)
    one = build(single, **options)
    single_steps(single, one, world, 3, make=exact_gradient(world))
    expected, saved, weights = one.whole_state(), one.state_dict(), single.state_dict()

    def loaded(state, layout):
        model = Model().to(dtype)
        opt = build(model, reduction="ordered", crossover=20, bucket_size=150, **layout, **options)
        model.load_state_dict(weights)
        opt.load_state_dict(state)
        assert_same_bits(opt.whole_state(), expected)
        return opt

    def job(rank):
        for name, layout in LOADING.items():
            opt = loaded(saved, layout)
            if name != "none":
                continue
            file = io.BytesIO()
            if rank == 0:  # as a trainer does it
                torch.save(opt.state_dict(), file)
            content = [file.getvalue()]
            dist.broadcast_object_list(content)
            again = torch.load(io.BytesIO(content[0]), weights_only=True)
        for layout in LOADING.values():
            loaded(again, layout)
        return again

    for again in run_forked(world, job):
        other = build(Model().to(dtype), **options)
        other.load_state_dict(again)
        assert_same_bits(other.whole_state(), expected)


def test_whole_state_that_does_not_fit_changes_nothing():
    """It is refused with the name, on every rank."""
    single = Small()
    one = samestep.MuonAdamW(single, **SMALL)
    saved = one.state_dict()
    number = next(i for i, state in saved["state"].items() if "momentum_buffer" in state)
    saved["state"][number]["momentum_buffer"] = torch.zeros(3, 3)

    def job(rank):
        for sharding in SHARDINGS:
            model = Small()
            opt = samestep.MuonAdamW(model, **SMALL, crossover=1, sharding=sharding)
            ranks_steps(model, opt, rank, 1)
            before = opt.whole_state()
            with pytest.raises(ValueError, match=r"'momentum_buffer' of '.*' was saved with shape"):
                opt.load_state_dict(saved)
            assert_same_bits(opt.whole_state(), before)
        return True

    assert run_forked(2, job) == [True] * 2


def test_state_of_ranks_with_parameters_of_their_own_is_a_part():
    """Experts have the same names everywhere, and are others on every rank."""

    def job(rank):
        alone = [dist.new_group([member]) for member in range(2)][rank]
        torch.manual_seed(rank)
        groups = [
            {"params": [("shared", nn.Parameter(torch.ones(4, 4)))], "rule": "muon"},
            {
                "params": [("expert", nn.Parameter(torch.randn(4, 4)))],
                "rule": "muon",
                "process_group": alone,
            },
        ]
        opt = samestep.MuonAdamW(groups, sharding="none", state_dict_form="part")
        files = [None] * 2
        dist.all_gather_object(files, opt.state_dict())
        opt.load_state_dict(files[rank])
        with pytest.raises(ValueError, match=f"part of rank {1 - rank}, and this is rank {rank}"):
            opt.load_state_dict(files[1 - rank])
        whole = {key: value for key, value in files[rank].items() if key != "part"}
        with pytest.raises(
            ValueError, match="ranks have different parameters under the same names"
        ):
            opt.load_state_dict(whole)
        return True

    assert run_forked(2, job) == [True] * 2


def test_whole_state_loads_into_dtensors():
    """Parts of DTensors are taken out of what one process has; plain parameters beside them."""
    single = Small()
    one = samestep.MuonAdamW(single, **SMALL)
    single_steps(single, one, 2, 2)
    expected, saved = one.whole_state(), one.state_dict()

    def job(rank):
        model = Small()
        fully_shard(model.hidden, mesh=init_device_mesh("cpu", (2,)))
        opt = samestep.MuonAdamW(model, **SMALL)
        opt.load_state_dict(saved)
        assert_same_bits(opt.whole_state(), expected)
        return True

    assert run_forked(2, job) == [True] * 2


def test_masters_start_as_the_parameters_signs_of_zero_included():
    def make():
        model = Small().to(torch.bfloat16)
        with torch.no_grad():
            model.embedding.weight[2:5] = -0.0
            model.hidden.weight[1, 2] = float("nan")
        return model

    def zeros(param, place, rank, step):
        return torch.zeros_like(param)

    single = make()
    single_opt = samestep.MuonAdamW(single, **SMALL, master_weights=True)
    fresh = copied_state(single, single_opt)
    single_steps(single, single_opt, 3, 1, make=zeros)
    later = copied_state(single, single_opt)

    def job(rank):
        model = make()
        opt = samestep.MuonAdamW(model, **SMALL, master_weights=True, crossover=1)
        assert_same_bits(opt.whole_state(), fresh)
        ranks_steps(model, opt, rank, 1, make=zeros)
        assert_same_bits(opt.whole_state(), later)
        assert torch.equal(bits(model.embedding.weight), bits(single.embedding.weight))
        return True

    assert torch.signbit(fresh["embedding.weight"][MASTER][2:5]).all()
    assert run_threaded(3, job) == [True] * 3


@twin
def test_bits_travel_as_they_are():
    """Every owned element gets a pattern of its place: zeros of both signs, NaNs, any other."""
    patterns = torch.tensor(
        [0, -(1 << 31), 0x7FC00000, 0x7F800001, -(1 << 22), 0x7F800000, 1], dtype=torch.int32
    )

    def pattern(start, stop):
        places = torch.arange(start, stop)
        return (patterns[places % 7] ^ (places // 7).to(torch.int32)).view(torch.float32)

    def job(rank):
        model = Model()
        opt = build(model, variance_beta2=None, crossover=1, bucket_size=70)
        (shared,) = opt.shared_parameters
        for index, param in enumerate(shared.params):
            own = [p for p in shared.plan.owned(rank) if p.param == index]
            for key, tensor in opt.state[param].items():
                if key != "step" and own:
                    tensor.copy_(torch.cat([pattern(p.start, p.stop) for p in own]))
        for name, state in opt.whole_state().items():
            for key, tensor in state.items():
                if key != "step":
                    assert torch.equal(bits(tensor), bits(pattern(0, tensor.numel()))), (name, key)
        return True

    assert run_forked(3, job) == [True] * 3


def test_the_result_is_a_copy():
    def examine(rank=0):
        model = Small()
        opt = samestep.MuonAdamW(model, **SMALL, crossover=20)
        before = copy.deepcopy(opt.whole_state())
        for state in opt.whole_state().values():
            for tensor in state.values():
                assert not tensor.requires_grad
                tensor.fill_(7)
        assert_same_bits(opt.whole_state(), before)
        return True

    assert examine()
    assert run_threaded(2, examine) == [True, True]


def test_one_process_starts_cleared_state_afresh():
    model = Small()
    opt = samestep.MuonAdamW(model, **SMALL)
    expected = copied_state(model, opt)
    opt.state.clear()
    assert_same_bits(opt.whole_state(), expected)


def test_step_counts_that_differ_between_pieces_are_named_on_every_rank():
    def job(rank):
        model = Small()
        opt = samestep.MuonAdamW(model, **SMALL, crossover=1)
        ranks_steps(model, opt, rank, 2, make=lambda p, *_: torch.ones_like(p))
        if rank == 1:
            opt.state[model.embedding.weight]["step"] += 3
        try:
            opt.whole_state()
        except RuntimeError as error:
            return str(error)
        return None

    messages = run_forked(3, job)
    assert len(set(messages)) == 1
    for part in ("'embedding.weight'", "'step'", "2.0 on rank 0", "5.0 on rank 1", "2.0 on rank 2"):
        assert part in messages[0]


def test_one_gather_per_dtype_and_none_where_every_rank_has_all():
    def job(rank):
        found = {}
        calls = []
        intercept(lambda name, numel: calls.append(name))
        for sharding in SHARDINGS:
            model = Small()
            model.hidden.double()
            opt = samestep.MuonAdamW(
                model, **SMALL, sharding=sharding, crossover=10, bucket_size=20
            )
            calls.clear()
            opt.whole_state()
            found[sharding] = len(calls)
        return found

    for found in run_forked(2, job):
        assert found == {"none": 0, "zero1": 2, "zero2": 2}


@twin
def test_groups_gather_on_their_own_ranks():
    """Experts of ranks 0 and 1 are not those of 2 and 3, and have other shapes."""

    def make(rank):
        half = rank // 2
        generator = torch.Generator().manual_seed(half)
        shape = (2, 9 + half, 5)
        return Small(), nn.Parameter(torch.randn(shape, generator=generator))

    def grads(param, place, rank, step):
        return gradient(param, place, rank, step + 1)

    def groups(model, experts, **own):
        common = [(name, param) for name, param in trainable(model).items() if name != "experts"]
        return [
            {"params": [("experts", experts)], "rule": "muon", "variance_beta2": 0.9, **own},
            {"params": common, "rule": "adamw"},
        ]

    def steps(model, experts, opt, make_grad):
        params = {**trainable(model), "experts": experts}
        for step in range(4):
            for place, (name, param) in enumerate(params.items()):
                param.grad = make_grad(name, param, place, step)
            opt.step()
            opt.zero_grad()

    def mean(ranks, param, place, step):
        found = [grads(param, place, rank, step) for rank in ranks]
        if all(grad is None for grad in found):
            return None
        total = torch.zeros_like(param)
        for grad in found:
            total = total + (torch.zeros_like(param) if grad is None else grad)
        return total / 4  # the divisor of both

    expected = []
    for half in range(2):
        model, experts = make(2 * half)
        opt = samestep.MuonAdamW(groups(model, experts), lr=0.1)
        inside = range(2 * half, 2 * half + 2)
        steps(
            model, experts, opt,
            lambda name, param, place, step, inside=inside: mean(
                inside if name == "experts" else range(4), param, place, step
            ),
        )  # fmt: skip
        names = {param: name for name, param in trainable(model).items()} | {experts: "experts"}
        order = [p for group in opt.param_groups for p in group["params"]]
        expected.append({names[p]: opt.state[p] for p in order})

    def job(rank):
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        model, experts = make(rank)
        own = {"process_group": halves[rank // 2], "divisor": 4}
        opt = samestep.MuonAdamW(
            groups(model, experts, **own), lr=0.1, reduction="ordered", crossover=1
        )
        steps(
            model, experts, opt,
            lambda name, param, place, step: grads(param, place, rank, step),
        )  # fmt: skip
        assert_same_bits(opt.whole_state(), expected[rank // 2])
        return True

    assert run_forked(4, job) == [True] * 4


def test_a_group_added_on_the_way_is_part_of_it():
    def grow(model, opt):
        model.late = nn.Parameter(torch.ones(23, 3))
        opt.add_param_group({"params": [("late", model.late)], "rule": "adamw", "lr": 0.05})

    world = 3
    single = Small()
    single_opt = samestep.MuonAdamW(single, **SMALL)
    single_steps(single, single_opt, world, 2)
    grow(single, single_opt)
    single_steps(single, single_opt, world, 2, first=2)
    expected = copied_state(single, single_opt)

    def job(rank):
        model = Small()
        opt = samestep.MuonAdamW(model, **SMALL, reduction="ordered", crossover=10)
        ranks_steps(model, opt, rank, 2)
        plan = opt.fingerprint()
        grow(model, opt)
        ranks_steps(model, opt, rank, 2, first=2)
        assert_same_bits(opt.whole_state(), expected)
        return opt.fingerprint() != plan

    assert run_threaded(world, job) == [True] * world


PACKED = {"crossover": 1, "bucket_size": 9}


def test_the_fingerprint_is_that_of_the_plan():
    assert samestep.MuonAdamW(Small(), **SMALL).fingerprint() == ""

    def job(rank):
        found = []
        for options in ({"crossover": 1}, {"crossover": 1}, {"crossover": 30}, PACKED):
            opt = samestep.MuonAdamW(Small(), **SMALL, **options, state_dict_form="part")
            assert opt.state_dict()["part"]["plan"] == opt.fingerprint()
            found.append(opt.fingerprint())
        return found

    results = run_threaded(3, job)
    assert results[0] == results[1] == results[2]
    assert results[0][0] == results[0][1]
    assert len(set(results[0])) == 3
    assert all(len(digest) == 64 for digest in results[0])
