"""Parameters and gradients that lie in flat buffers: the same bits, and still parameters."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import samestep
from samestep.comm.presence import RankProblemError
from tests.ranks import run_cases, run_forked, run_threaded
from tests.soak import SOAK, twin
from tests.test_overlap import (
    LAYERS,
    Net,
    build,
    loss_of,
    make_case,
    same,
    single_process,
    train,
    values,
)
from tests.test_replicated import (
    SMALL,
    Model,
    Small,
    bits_equal,
    gradient,
    mean_in_rank_order,
    ranks_steps,
    single_steps,
    trainable,
)
from tests.test_replicated import build as build_model

SHARDINGS = ("zero1", "zero2")
EVERY_MODE = [(sharding, overlap) for sharding in SHARDINGS for overlap in (False, True)]
MODES = EVERY_MODE if SOAK else [("zero1", False), ("zero2", True)]
ALL_LAYERS = (torch.arange(6), LAYERS, 1)


def build_flat(model, **options):
    return build(model, **{"buffers": "flat", **options})


def flat_modes(run, modes=MODES):
    """What `run(**options)` gives in each mode."""
    return {
        (sharding, overlap): run(buffers="flat", sharding=sharding, overlap_grad_reduce=overlap)
        for sharding, overlap in modes
    }


def assert_modes_give(expected, results):
    for rank, found in enumerate(results):
        for mode, result in found.items():
            assert bits_equal(result, expected), (rank, mode)


def buffers_of(opt):
    """Where the optimizer keeps its parameters, (begin, end): one storage per dtype and plan."""
    storages = {
        bucket.untyped_storage()
        for shared in opt.shared_parameters
        for bucket in shared._parameters._buckets
    }
    return {(each.data_ptr(), each.data_ptr() + each.nbytes()) for each in storages}


def whole_state(opt):
    """By name and key, without that of parameters without elements."""
    return {
        f"{name} {key}": tensor
        for name, own in opt.whole_state().items()
        if not name.startswith("no")
        for key, tensor in own.items()
    }


def lies_in(opt, param):
    begin, end = param.data_ptr(), param.data_ptr() + param.nbytes
    return any(first <= begin and end <= last for first, last in buffers_of(opt))


# --- the same bits -----------------------------------------------------------------------------


@twin
@pytest.mark.parametrize("world", [2, 3] if SOAK else [3])
def test_accumulation_gives_the_bits_of_one_process(world):
    steps, batches = (6, 3) if SOAK else (4, 2)
    all_cases = [
        [[make_case(rank, step, batch) for batch in range(batches)] for rank in range(world)]
        for step in range(steps)
    ]

    def job(rank, mode):
        def run(**options):
            model = Net()
            opt = build(model, **options)
            for cases in all_cases:
                train(model, opt, cases[rank], mode)
            return values(model)

        return flat_modes(run, EVERY_MODE)

    for mode, results in run_cases(world, ["no_sync", "synchronize"], job):
        expected = single_process(all_cases, mode)
        assert_modes_give(expected, results)
        assert not same(expected, values(Net()))


@st.composite
def runs(draw):
    """[step][rank][micro-batch] -> None, or (layers in some order, expert)."""
    world = draw(st.sampled_from([1, 2, 3, 5, 7]))
    steps, batches = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    case = st.none() | st.tuples(
        st.lists(st.sampled_from(LAYERS), unique=True), st.sampled_from([None, 0, 2])
    )
    of_rank = st.lists(case, min_size=batches, max_size=batches)
    of_step = st.lists(of_rank, min_size=world, max_size=world)
    return world, draw(st.lists(of_step, min_size=steps, max_size=steps))


@twin
@given(
    runs(),
    st.sampled_from(["no_sync", "synchronize"]),
    st.sampled_from(SHARDINGS),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 70, 300, 1 << 30]),
)
@settings(max_examples=100 if SOAK else 6)
def test_any_graphs_give_the_bits_of_one_process(run, mode, sharding, overlap, gather, bucket_size):
    """Also with more ranks than there are matrices."""
    world, pattern = run
    tokens = torch.arange(6)
    all_cases = [
        [[None if c is None else (tokens + r, *c) for c in cases] for r, cases in enumerate(ranks)]
        for ranks in pattern
    ]

    def job(rank):
        model = Net()
        opt = build_flat(
            model,
            sharding=sharding,
            overlap_grad_reduce=overlap,
            overlap_param_gather=gather,
            poison_early_reads=gather,
            bucket_size=bucket_size,
        )
        for cases in all_cases:
            train(model, opt, cases[rank], mode)
        opt.wait_for_parameters()
        return values(model)

    expected = single_process(all_cases, mode)
    for result in run_threaded(world, job):
        assert same(result, expected)


def test_gradients_set_by_hand():
    """Also ones that lie elsewhere, transposed; ranks lack different ones, and some have zeros."""
    world, steps = 3, 6 if SOAK else 4

    def make(param, place, rank, step):
        grad = gradient(param, place, rank, step)
        return grad.t().contiguous().t() if grad is not None and grad.dim() == 2 else grad

    single = Model()
    single_steps(single, build_model(single), world, steps)

    def job(rank):
        def run(**options):
            model = Model()
            opt = build_model(model, reduction="ordered", bucket_size=300, **options)
            ranks_steps(model, opt, rank, steps, make=make)
            return values(model)

        return flat_modes(run)

    assert_modes_give(values(single), run_forked(world, job))


@twin
def test_the_layout_does_not_show_in_the_state():
    def job(rank):
        def run(**options):
            model = Model()
            opt = build_model(model, reduction="ordered", bucket_size=300, **options)
            ranks_steps(model, opt, rank, 6 if SOAK else 4)
            return whole_state(opt)

        return run(sharding="none"), flat_modes(run)

    for plain, found in run_forked(3, job):
        assert_modes_give(plain, [found])


def test_a_parameter_without_elements_counts_its_steps():
    def job(rank):
        counts = []
        for options in ({"sharding": "zero2"}, {"buffers": "flat"}):
            named = [
                ("nothing", nn.Parameter(torch.zeros(0, 4))),
                ("bias", nn.Parameter(torch.ones(3))),
            ]
            opt = samestep.AdamW(named, **options)
            for _ in range(2):
                for _, param in named:
                    param.grad = torch.ones_like(param)
                opt.step()
            counts.append([state["step"].item() for state in opt.whole_state().values()])
        return counts

    assert run_threaded(2, job) == [[[2, 2], [2, 2]]] * 2


# --- presence ----------------------------------------------------------------------------------


@twin
def test_absent_everywhere_is_untouched_and_zeros_are_a_gradient():
    """After a real step, a layer that nobody runs, and one that a single rank has zeros for."""

    def job(rank):
        found = {}
        for sharding, overlap in MODES:
            model = Net()
            opt = build_flat(model, sharding=sharding, overlap_grad_reduce=overlap)
            train(model, opt, [ALL_LAYERS], "no_sync")
            before, state = values(model), opt.whole_state()
            layers = ("first",) if rank == 0 else ()
            loss = loss_of(model, (torch.arange(6), layers, None))
            if rank == 1:
                loss = loss + 0 * model.third.weight.sum()
            loss.backward()
            opt.step()
            after, state_after = values(model), opt.whole_state()
            moved = {name for name in before if not torch.equal(before[name], after[name])}
            for name in before.keys() - moved:
                assert bits_equal(state[name], state_after[name])
            found[sharding, overlap] = moved
        return found

    expected = {"embedding.weight", "first.weight", "first.bias", "third.weight", "head.weight"}
    for found in run_forked(3, job):
        assert all(moved == expected for moved in found.values())


def test_a_step_without_any_gradient_changes_nothing():
    def job(rank):
        for sharding, overlap in MODES:
            model = Net()
            opt = build_flat(model, sharding=sharding, overlap_grad_reduce=overlap)
            opt.step()
            assert same(values(model), values(Net()))
        return True

    assert run_threaded(2, job) == [True, True]


@twin
def test_frozen_then_unfrozen():
    def job(rank):
        def run(**options):
            model = Net()
            opt = build(model, **options)
            for step in range(5):
                model.second.requires_grad_(step % 2 == 1)
                train(model, opt, [make_case(rank, step, 0) or make_case(0, 0, 0)], "no_sync")
            return values(model)

        return run(sharding="none"), flat_modes(run)

    for plain, found in run_forked(2, job):
        assert_modes_give(plain, [found])


# --- what a step does beside averaging ----------------------------------------------------------


@twin
def test_the_joint_norm():
    """Gaps and segments of others do not count. Partial sums differ, so norms do in last digits."""

    def job(rank, limit):
        def run(**options):
            model = Net()
            opt = build(model, max_grad_norm=limit, **options)
            norms = []
            for step in range(3):
                case = make_case(rank, step, 0) or make_case(0, 0, 0)
                train(model, opt, [case], "no_sync")
                norms.append(opt.metrics()["grad_norm"].item())
            return norms, values(model)

        return run(sharding="none"), flat_modes(run)

    both = [found for _, results in run_cases(3, [0.05, math.inf], job) for found in results]
    for (norms, plain), found in both:
        assert all(norm > 0.05 for norm in norms)
        for flat_norms, flat in found.values():
            assert flat_norms == pytest.approx(norms, rel=1e-5)
            for name in plain:
                torch.testing.assert_close(flat[name], plain[name], rtol=0, atol=1e-6)


@twin
def test_the_scaler_skips_on_all_ranks_after_an_overflow_on_one():
    """Powers of two leave no trace; nor does what was infinite."""
    bad = 2

    def job(rank):
        def run(scaled, **options):
            model = Net()
            opt = build(model, **options)
            scaler = samestep.GradScaler("cpu", init_scale=2.0**6, enabled=scaled)
            for step in range(5):
                if step == bad and not scaled:
                    continue
                loss = loss_of(model, (torch.arange(6) + rank, LAYERS, 1))
                if step == bad and rank == 1:
                    loss = loss * math.inf
                before = values(model), opt.whole_state()
                scaler.scale(loss).backward()
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()
                if step == bad:
                    assert same(before[0], values(model))
                    state = opt.whole_state()
                    assert all(bits_equal(before[1][name], state[name]) for name in state)
            assert not scaled or scaler.get_scale() == 2.0**5
            return values(model)

        return run(False, sharding="none"), flat_modes(lambda **options: run(True, **options))

    for plain, found in run_forked(2, job):
        assert_modes_give(plain, [found])


def test_a_gradient_that_is_not_finite_is_reported_and_leaves_nothing_behind():
    """The buffers in which it lay are used again."""

    def job(rank):
        texts = []
        for sharding, overlap in MODES:
            model = Net()
            opt = build_flat(
                model, sharding=sharding, overlap_grad_reduce=overlap, check_gradients=True
            )
            loss = loss_of(model, ALL_LAYERS)
            if rank == 1:
                loss = loss + (model.second.weight * math.nan).sum()
            loss.backward()
            with pytest.raises((FloatingPointError, RankProblemError)) as caught:
                opt.step()
            texts.append(str(caught.value))
            assert same(values(model), values(Net()))
            opt.zero_grad()
            train(model, opt, [ALL_LAYERS], "no_sync")
            expected = Net()
            train(expected, build(expected, sharding="none"), [ALL_LAYERS], "no_sync")
            assert same(values(model), values(expected))
        return texts

    for texts in run_forked(2, job):
        assert all("second.weight" in text and "rank 1" in text for text in texts)


def test_an_edited_gradient_is_an_error_on_every_rank_and_training_goes_on():
    def job(rank):
        for sharding in SHARDINGS:
            model = Net()
            opt = build_flat(model, sharding=sharding, overlap_grad_reduce=True)
            loss_of(model, ALL_LAYERS).backward()
            if rank == 1:
                model.second.weight.grad = torch.ones_like(model.second.weight)
            with pytest.raises(RuntimeError) as caught:
                opt.step()
            assert "second.weight" in str(caught.value)
            assert "rank 1" in str(caught.value)
            assert same(values(model), values(Net()))
            opt.zero_grad()
            train(model, opt, [ALL_LAYERS], "no_sync")
            expected = Net()
            train(expected, build(expected, sharding="none"), [ALL_LAYERS], "no_sync")
            assert same(values(model), values(expected))
            del model, opt, caught  # the next one would hold its launches back beside it
            gc.collect()
        return True

    assert run_forked(2, job) == [True, True]


def test_a_second_backward_without_no_sync_is_an_error():
    def job(rank):
        for sharding in SHARDINGS:
            model = Net()
            opt = build_flat(model, sharding=sharding, overlap_grad_reduce=True)
            loss_of(model, ALL_LAYERS).backward()
            with pytest.raises(RuntimeError, match=r"after its bucket was reduced.*no_sync\(\)"):
                loss_of(model, ALL_LAYERS).backward()
            assert opt.shared_parameters
        return True

    assert run_forked(2, job) == [True, True]


def test_gradients_may_be_edited_without_overlap():
    """They are in `.grad` until the step, whole and local."""

    def job(rank):
        def run(**options):
            model = Net()
            opt = build(model, **options)
            for _ in range(2):
                loss_of(model, (torch.arange(6) + rank, LAYERS, 1)).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                model.second.weight.grad = None
                opt.step()
                opt.zero_grad()
            return values(model)

        return run(sharding="none"), [run(buffers="flat", sharding=s) for s in SHARDINGS]

    for plain, flats in run_forked(2, job):
        assert all(bits_equal(found, plain) for found in flats)


@twin
def test_gradients_that_are_thrown_away_leave_no_trace():
    """A micro-batch that is dropped, and zero_grad after every step."""

    def job(rank, set_to_none):
        def run(drop, **options):
            model = Net()
            opt = build(model, **options)
            for step in range(3):
                if drop:
                    with opt.no_sync():
                        loss_of(model, (torch.arange(6), LAYERS, 0)).backward()
                    opt.zero_grad(set_to_none=set_to_none)
                loss_of(model, (torch.arange(6) + rank + step, LAYERS, 1)).backward()
                opt.step()
                opt.zero_grad(set_to_none=set_to_none)
            return values(model)

        return run(False, sharding="none"), flat_modes(lambda **options: run(True, **options))

    for _, results in run_cases(2, [True, False], job):
        for plain, found in results:
            assert_modes_give(plain, [found])


# --- other parameters --------------------------------------------------------------------------


@twin
def test_two_models_with_two_optimizers():
    """Each has buffers of its own; their steps take turns."""

    def job(rank):
        def run(**options):
            models = [Net(), Model()]
            opts = [
                build(models[0], **options),
                build_model(models[1], reduction="ordered", bucket_size=300, **options),
            ]
            for step in range(3 if SOAK else 2):
                loss_of(models[0], (torch.arange(6) + rank, LAYERS, 1)).backward()
                ranks_steps(models[1], opts[1], rank, 1, first=step)
                opts[0].step()
                opts[0].zero_grad()
            assert options["sharding"] == "none" or not buffers_of(opts[0]) & buffers_of(opts[1])
            return {f"{i} {k}": v for i, m in enumerate(models) for k, v in values(m).items()}

        return run(sharding="none"), flat_modes(run)

    for plain, found in run_forked(2, job):
        assert_modes_give(plain, [found])


@twin
def test_several_dtypes_with_master_weights():
    def mixed():
        model = Model()
        model.up.to(torch.bfloat16)
        model.qkv.to(torch.bfloat16)
        model.experts.data = model.experts.data.to(torch.bfloat16)
        model.norm.to(torch.float64)
        return model

    def job(rank):
        def run(**options):
            model = mixed()
            opt = build_model(
                model, reduction="ordered", bucket_size=100, master_weights=True, **options
            )
            ranks_steps(model, opt, rank, 6 if SOAK else 3)
            if options["sharding"] != "none":
                assert len(buffers_of(opt)) == 3
                assert all(lies_in(opt, p) for p in trainable(model).values() if p.numel())
            return values(model) | whole_state(opt)

        return run(sharding="none"), flat_modes(run)

    for plain, found in run_forked(3, job):
        assert "up.weight master_weight" in plain
        assert_modes_give(plain, [found])


@twin
def test_gradients_that_travel_in_another_dtype():
    def job(rank):
        def run(**options):
            model = Net()
            opt = build(model, reduce_dtype=torch.bfloat16, **options)
            for step in range(4 if SOAK else 2):
                for batch in range(2):
                    case = make_case(rank, step, batch) or make_case(0, 0, 0)
                    loss_of(model, case).backward()
                    if batch == 0:
                        opt.synchronize()
                opt.step()
                opt.zero_grad()
            return values(model)

        return run(sharding="none"), flat_modes(run)

    for plain, found in run_forked(3, job):
        assert_modes_give(plain, [found])


@twin
def test_parameters_are_views_of_one_buffer_and_gradients_are_gone_after_a_step():
    def job(rank):
        for sharding, overlap in MODES:
            model = Net()
            start = values(model)
            opt = build_flat(model, sharding=sharding, overlap_grad_reduce=overlap)
            assert same(values(model), start)
            assert len(buffers_of(opt)) == 1
            places = [param.data_ptr() for param in model.parameters()]
            for _ in range(2):
                loss_of(model, ALL_LAYERS).backward()
                opt.step()
                assert all(param.grad is None for param in model.parameters())
                assert [param.data_ptr() for param in model.parameters()] == places
            assert all(lies_in(opt, param) for param in model.parameters())
            assert model.tied.weight is model.first.weight
            ranges = sorted((p.data_ptr(), p.data_ptr() + p.nbytes) for p in model.parameters())
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))
        return True

    assert run_forked(2, job) == [True, True]


def test_gradients_lie_in_the_buffers_of_their_buckets():
    """Without overlap they are there after backward, and a second pass adds to them in place."""

    def job(rank):
        model = Net()
        opt = build_flat(model, sharding="zero1", bucket_size=1 << 30)
        loss_of(model, ALL_LAYERS).backward()
        places = [param.grad.data_ptr() for param in model.parameters()]
        once = [param.grad.clone() for param in model.parameters()]
        loss_of(model, ALL_LAYERS).backward()
        assert [param.grad.data_ptr() for param in model.parameters()] == places
        for param, grad in zip(model.parameters(), once, strict=True):
            torch.testing.assert_close(param.grad, 2 * grad)
        storages = {param.grad.untyped_storage().data_ptr() for param in model.parameters()}
        assert len(storages) == len(opt.shared_parameters[0].plan.buckets)
        return True

    assert run_forked(2, job) == [True, True]


def test_parameters_that_share_memory_stay_together_or_are_refused():
    """Two parameters on one memory are no tied parameter: apart they would be another model."""

    def job(rank):
        model = Net()
        model.third.weight.data = model.second.weight.data
        try:
            opt = build_flat(model)
        except ValueError as error:
            return "second.weight" in str(error) and "third.weight" in str(error)
        train(model, opt, [ALL_LAYERS], "no_sync")
        return torch.equal(model.second.weight, model.third.weight)

    assert run_threaded(2, job) == [True, True]


def test_views_of_one_tensor_that_do_not_overlap():
    """As two halves of a fused weight: each has its own elements."""
    weight = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))

    def job(rank):
        def run(**options):
            fused = weight.clone()
            halves = [nn.Parameter(fused[:4]), nn.Parameter(fused[4:])]
            named = list(zip(("upper.weight", "lower.weight"), halves, strict=True))
            opt = samestep.MuonAdamW(named, lr=0.1, reduction="ordered", **options)
            for step in range(3):
                for place, half in enumerate(halves):
                    half.grad = gradient(half, place, rank, step)
                opt.step()
                opt.zero_grad()
            return {name: half.detach().clone() for name, half in named}

        return run(sharding="none"), flat_modes(run)

    for plain, found in run_threaded(2, job):
        assert_modes_give(plain, [found])


@twin
def test_data_that_was_replaced_is_taken_in():
    """By the step, which then trains what the model shows."""

    def job(rank):
        def run(**options):
            model = Net()
            opt = build(model, **options)
            train(model, opt, [ALL_LAYERS], "no_sync")
            model.second.weight.data = torch.full((8, 8), 0.25)
            model.embedding.weight.data = model.embedding.weight.data * 0.5
            for step in range(2):
                train(model, opt, [(torch.arange(6) + rank + step, LAYERS, 1)], "no_sync")
            assert options["sharding"] == "none" or all(
                lies_in(opt, param) for param in model.parameters()
            )
            return values(model)

        return run(sharding="none"), flat_modes(run)

    for plain, found in run_forked(2, job):
        assert_modes_give(plain, [found])


def test_a_model_that_is_cast_later_keeps_its_dtype_or_is_refused():
    """Not turned back in silence, and not with an error of torch's about something else."""

    def job(rank):
        outcomes = []
        for sharding, overlap in MODES:
            model = Net()
            opt = build_flat(model, sharding=sharding, overlap_grad_reduce=overlap)
            model.to(torch.bfloat16)
            try:
                train(model, opt, [ALL_LAYERS], "no_sync")
            except RuntimeError as error:
                outcomes.append("before its optimizer is built" in str(error))
            else:
                outcomes.append(all(p.dtype == torch.bfloat16 for p in model.parameters()))
        return outcomes

    assert run_forked(2, job) == [[True] * len(MODES)] * 2


@twin
def test_loading_a_model_in_place():
    other = Net()
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(0.5)

    def job(rank):
        def run(**options):
            model = Net()
            opt = build(model, **options)
            train(model, opt, [ALL_LAYERS], "no_sync")
            model.load_state_dict(other.state_dict())
            assert same(values(model), values(other))
            train(model, opt, [ALL_LAYERS], "no_sync")
            assert options["sharding"] == "none" or lies_in(opt, model.first.weight)
            return values(model)

        return run(sharding="none"), flat_modes(run)

    for plain, found in run_forked(2, job):
        assert_modes_give(plain, [found])


@twin
def test_a_saved_state_continues_bit_for_bit():
    def job(rank):
        for sharding in SHARDINGS:
            straight = Net()
            opt = build_flat(straight, sharding=sharding, state_dict_form="part")
            train(straight, opt, [ALL_LAYERS], "no_sync")
            file = io.BytesIO()
            torch.save({"model": straight.state_dict(), "optimizer": opt.state_dict()}, file)
            train(straight, opt, [ALL_LAYERS], "no_sync")

            file.seek(0)
            saved = torch.load(file, weights_only=True)
            resumed = Net()
            resumed.load_state_dict(saved["model"])
            again = build_flat(resumed, sharding=sharding)
            again.load_state_dict(saved["optimizer"])
            train(resumed, again, [ALL_LAYERS], "no_sync")
            assert same(values(resumed), values(straight))
        return True

    assert run_forked(2, job) == [True, True]


@twin
def test_a_group_added_on_the_way():
    def grow(model, opt):
        generator = torch.Generator().manual_seed(8)
        for name, shape, rule in (("matrix", (6, 5), "muon"), ("table", (23, 3), "adamw")):
            param = nn.Parameter(torch.randn(shape, generator=generator))
            model.register_parameter(name, param)
            opt.add_param_group({"params": [(name, param)], "rule": rule, "lr": 0.05})

    def job(rank):
        def run(**options):
            model = Small()
            opt = samestep.MuonAdamW(model, **SMALL, reduction="ordered", **options)
            ranks_steps(model, opt, rank, 2)
            grow(model, opt)
            ranks_steps(model, opt, rank, 3 if SOAK else 2, first=2)
            for micro in range(2):  # through autograd, in rounds
                for place, param in enumerate(model.parameters()):
                    grad = torch.full_like(param, 1.0 + rank + micro + place)
                    (param * grad).sum().backward()
                if micro == 0:
                    opt.synchronize()
            opt.step()
            assert options["sharding"] == "none" or lies_in(opt, model.matrix)
            return values(model)

        return run(sharding="none"), flat_modes(run)

    for plain, found in run_forked(3, job):
        assert_modes_give(plain, [found])


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_ranks_that_own_nothing(sharding):
    """One matrix and seven ranks."""
    world = 7

    def make(param, place, rank, step):
        return torch.full_like(param, 1.0 + rank) + torch.arange(param.numel()).view_as(param)

    def weight():
        return nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))

    single = weight()
    single_opt = samestep.MuonAdamW([("weight", single)], lr=0.1)
    single.grad = mean_in_rank_order(single, [make(single, 0, r, 0) for r in range(world)])
    single_opt.step()

    def job(rank):
        param = weight()
        opt = samestep.MuonAdamW(
            [("weight", param)], lr=0.1, reduction="ordered", buffers="flat", sharding=sharding
        )
        param.grad = make(param, 0, rank, 0)
        opt.step()
        return bool(opt.shared_parameters[0].plan.owned(rank)), param.detach().clone()

    results = run_threaded(world, job)
    assert sum(owns for owns, _ in results) == 1
    assert all(torch.equal(found, single) for _, found in results)


@twin
def test_a_group_with_ranks_and_a_divisor_of_its_own():
    """Experts on ranks 0, 1 and on ranks 2, 3; their gradients are means over all four."""
    world = 4

    def job(rank):
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]

        def run(**options):
            model = Net()
            with torch.no_grad():
                model.experts.add_(rank // 2)
            opt = samestep.MuonAdamW(
                model,
                lr=1e-2,
                reduction="ordered",
                bucket_size=200,
                groups=[
                    {
                        "params": "experts",
                        "rule": "muon",
                        "process_group": pairs[rank // 2],
                        "divisor": world,
                    },
                    {"params": lambda name, _: name != "experts", "rule": "adamw"},
                ],
                **options,
            )
            for step in range(3 if SOAK else 2):
                train(model, opt, [(torch.arange(6) + rank + step, LAYERS, 1)], "no_sync")
            assert options["sharding"] == "none" or len(buffers_of(opt)) == 2
            return values(model)

        return run(sharding="none"), flat_modes(run)

    results = run_forked(world, job)
    for plain, found in results:
        assert_modes_give(plain, [found])
    experts = [plain["experts"] for plain, _ in results]
    assert torch.equal(experts[0], experts[1])
    assert not torch.equal(experts[1], experts[2])


@twin
def test_another_optimizer_after_a_dropped_one():
    def job(rank):
        model = Net()
        opt = build_flat(model, overlap_grad_reduce=True)
        train(model, opt, [ALL_LAYERS], "no_sync")
        del opt
        gc.collect()
        opt = build_flat(model, sharding="zero1", bucket_size=70)
        train(model, opt, [ALL_LAYERS], "no_sync")

        expected = Net()
        for _ in range(2):
            train(expected, build(expected, sharding="none"), [ALL_LAYERS], "no_sync")
        return same(values(model), values(expected))

    assert run_forked(2, job) == [True, True]


@twin
def test_a_model_can_be_copied_and_saved():
    """A copy has memory of its own and belongs to no optimizer."""

    def job(rank):
        model = Net()
        opt = build_flat(model, overlap_grad_reduce=True)
        train(model, opt, [ALL_LAYERS], "no_sync")
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copies = [copy.deepcopy(model), torch.load(file, weights_only=False)]
        trained = values(model)
        train(model, opt, [ALL_LAYERS], "no_sync")
        for other in copies:
            assert same(values(other), trained)
            assert not any(lies_in(opt, param) for param in other.parameters())
            assert other.tied.weight is other.first.weight
            loss_of(other, ALL_LAYERS).backward()
            assert other.first.weight.grad is not None
        return not same(values(model), trained)

    assert run_forked(2, job) == [True, True]


# --- refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sharding": "none"}, r'sharding="none" cannot be combined with buffers="flat"'),
        (
            {"grads": "reduced"},
            r'grads="reduced" cannot be combined with buffers="flat".*own buffers',
        ),
        ({"owners": "cyclic"}, r'owners="cyclic" cannot be combined with buffers="flat"'),
        ({"max_state_ratio": 1.5}, r'max_state_ratio cannot be combined with buffers="flat"'),
        ({"poison_early_reads": True}, "poison_early_reads concerns overlap_param_gather"),
        (
            {"buffers": "per_parameter", "overlap_param_gather": True},
            r'overlap_param_gather needs buffers="flat"',
        ),
        ({"buffers": "round"}, r"buffers 'round' is not supported; choose one of \['per_parameter"),
        ({"overlap_param_gather": 1}, "overlap_param_gather must be True or False, got 1"),
    ],
)
def test_what_does_not_go_together_is_refused(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        build_flat(Net(), **options)


def test_gathers_that_overlap_need_a_model():
    options = {"buffers": "flat", "overlap_param_gather": True}
    for params in (list(Net().named_parameters()), [{"params": [nn.Parameter(torch.ones(3))]}]):
        with pytest.raises(ValueError, match="give the model instead of parameters or groups"):
            samestep.AdamW(params, **options)


def test_a_ddp_model_is_refused():
    def job(rank):
        model = nn.parallel.DistributedDataParallel(Net())
        with pytest.raises(ValueError, match="DistributedDataParallel has its own buffers"):
            build_flat(model)
        return True

    assert run_forked(2, job) == [True, True]


def sparse_embedding(rank, options):
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 3))
    opt = samestep.MuonAdamW(model, sharding="zero2", **options)
    try:
        model(torch.tensor([1, 2, rank])).sum().backward()
        opt.step()
    except RuntimeError as error:
        return str(error)
    return "nobody noticed"


def test_sparse_gradients_and_parameters_are_refused_in_our_words():
    cases = [
        {"buffers": buffers, "overlap_grad_reduce": overlap}
        for buffers in ("flat", "per_parameter")
        for overlap in (False, True)
    ]
    for case, found in run_cases(2, cases, sparse_embedding):
        for error in found:
            assert "'0.weight' has a sparse gradient" in error, case
            assert "sparse=False" in error, case
    sparse = nn.Parameter(torch.eye(4).to_sparse())
    for kind in (samestep.AdamW, samestep.Muon):
        with pytest.raises(ValueError, match=r"parameter 'w' is sparse.*\.to_dense\(\)"):
            kind([("w", sparse)])


def test_what_is_saved_of_a_part_of_the_model():
    """A state dict is an alias of the parameters, and of each only its own elements are written."""

    def saved(found):
        file = io.BytesIO()
        torch.save(found, file)
        return file.tell()

    def job(rank):
        found = []
        for options in MODES:
            model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4))
            for param in model.parameters():
                nn.init.ones_(param)  # threads share a generator
            sharding, overlap = options
            opt = samestep.AdamW(
                model, buffers="flat", sharding=sharding, overlap_grad_reduce=overlap
            )
            model[1](model[0](torch.ones(64))).sum().backward()
            opt.step()
            opt.wait_for_parameters()
            part = model[1].state_dict()
            alias = part["weight"].data_ptr() == model[1].weight.data_ptr()
            sizes = [saved(part), saved(list(part)), saved(model.state_dict())]
            with torch.no_grad():
                model[1].bias.fill_(7)  # what is read here still lies in the buffer
            opt.step()
            found.append((alias, sizes, part["bias"].tolist(), saved(copy.deepcopy(model[1]))))
        return found

    whole, part = 4 * (64 * 64 + 64 + 64 * 4 + 4), 4 * (64 * 4 + 4)
    for found in run_threaded(2, job):
        for alias, (of_part, of_names, of_model), bias, of_copy in found:
            assert alias
            assert bias == [7.0] * 4
            assert of_part - of_names < part + 1500
            assert of_copy < part + 6000
            assert whole < of_model < whole + 4000
