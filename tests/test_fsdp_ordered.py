"""FSDP2 and HSDP with ordered sums end with the bits of plain parameters."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import samestep
from samestep import FlightRecorder
from samestep.fsdp import use_ordered_reduction
from tests.gpu import needs_gpu
from tests.ranks import run_cases, run_forked
from tests.soak import SOAK, some, twin, twin_cases
from tests.test_failures import die, messages_of
from tests.test_sharded import OPTIONS, Net, fsdp, loss_of

AXES = ("replicate", "shard")
SHAPES = [(3,), (2, 2), *([(2,), (4,), (2, 3)] if SOAK else [])]
STEPS = 12 if SOAK else 4  # every expert, and one of them again


def mesh_of(shape, device="cpu"):
    return init_device_mesh(device, shape, mesh_dim_names=AXES[-len(shape) :])


def train(model, opt, data_rank, *, steps=STEPS, micro_batches=1):
    """All values and state, after steps of which only the last micro-batch is summed."""
    for step in range(steps):
        for batch in range(micro_batches):
            last = batch == micro_batches - 1
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(last)
                alone = nullcontext()
            else:
                alone = nullcontext() if last else opt.no_sync()
            with alone:
                loss_of(model, data_rank, micro_batches * step + batch).backward()
        opt.step()
        opt.zero_grad()
    values = {(name,): opt.full_parameter(name) for name, _ in model.named_parameters()}
    state = {
        (name, key): value
        for name, entries in opt.whole_state().items()
        for key, value in entries.items()
    }
    return {key: value.cpu() for key, value in (values | state).items()}


@cache
def plain(world, dtype=torch.float32, micro_batches=1):
    """What every other layout must give; itself the same with and without sharding."""

    def job(rank, sharding):
        model = Net().to(dtype)
        opt = samestep.MuonAdamW(model, sharding=sharding, reduction="ordered", **OPTIONS)
        return train(model, opt, rank, micro_batches=micro_batches)

    (_, whole), (_, shared) = run_cases(world, ["none", "zero2"], job)
    for found in shared:
        assert_same_bits(found, whole[0])
    return whole[0]


def train_sharded(
    rank, shape, *, ordered=True, dtype=torch.float32, schedule="parallel", micro_batches=1
):
    model = fsdp(Net().to(dtype), mesh_of(shape))
    for _ in range(2 * ordered):  # a second time changes nothing
        use_ordered_reduction(model)
    opt = samestep.MuonAdamW(model, muon_schedule=schedule, **OPTIONS)
    return train(model, opt, rank, micro_batches=micro_batches)


def ranks_in(shape):
    return torch.Size(shape).numel()


def differing(found, expected):
    assert found.keys() == expected.keys()
    return [key for key in expected if not torch.equal(found[key], expected[key])]


def assert_same_bits(found, expected):
    assert differing(found, expected) == []


@pytest.mark.parametrize("shape", some(SHAPES))
def test_sharded_training_has_the_bits_of_plain_training(shape):
    """And does not have them without ordered sums, where more than two numbers are added."""
    world = ranks_in(shape)
    expected = plain(world)
    cases = [{"schedule": "parallel"}, {"schedule": "gather"}]
    cases += [{"ordered": False}] if world > 2 else []
    results = run_cases(world, cases, lambda rank, case: train_sharded(rank, shape, **case))
    for _, of_ranks in results[:2]:
        for found in of_ranks:
            assert_same_bits(found, expected)
    if world > 2:
        assert len(differing(results[2][1][0], expected)) > 20


@twin
@pytest.mark.parametrize("shape", [(3,), (2, 2)] if SOAK else [(2, 2)])
def test_micro_batches_of_which_only_the_last_is_summed(shape):
    world = ranks_in(shape)
    expected = plain(world, micro_batches=2)
    for found in run_forked(world, lambda rank: train_sharded(rank, shape, micro_batches=2)):
        assert_same_bits(found, expected)


@twin
@pytest.mark.parametrize("shape", [(3,), *([(2, 3)] if SOAK else [])])
def test_float64_where_torch_divides_before_and_after(shape):
    world = ranks_in(shape)
    expected = plain(world, dtype=torch.float64)
    for found in run_forked(world, lambda rank: train_sharded(rank, shape, dtype=torch.float64)):
        assert_same_bits(found, expected)


@twin
def test_tensor_parallel_with_copies_has_the_bits_of_more_shards():
    options = {**OPTIONS, "overrides": {"experts": {"rule": "muon"}}}

    def job(rank, shape):
        mesh = init_device_mesh("cpu", (*shape, 2), mesh_dim_names=(*AXES[-len(shape) :], "model"))
        model = Net(36)
        for block in model.blocks:
            parallelize_module(
                block, mesh["model"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
        fsdp(model, mesh[AXES[-len(shape) :]])
        use_ordered_reduction(model)
        return train(model, samestep.MuonAdamW(model, **options), rank // 2, steps=5 if SOAK else 2)

    (_, expected), (_, results) = run_cases(8, [(4,), (2, 2)], job)
    for found in results:
        assert_same_bits(found, expected[0])


# --- one gradient, added by hand ----------------------------------------------------------------


def weights():
    return torch.randn(7, 5, generator=torch.Generator().manual_seed(0))


def inputs(rank):
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(1 + rank))


def gradient(rank, dtype, scale=1.0):
    """One rank's, as it leaves backward."""
    weight = weights().to(dtype).requires_grad_()
    loss = nn.functional.linear(inputs(rank).to(dtype), weight).square().sum() * scale
    return torch.autograd.grad(loss, weight)[0]


def sharded_gradient(rank, shape, policy, scale=1.0, divide_by=None):
    model = nn.Linear(5, 7, bias=False)
    model.weight.data.copy_(weights())
    fully_shard(model, mesh=mesh_of(shape), mp_policy=policy)
    use_ordered_reduction(model)
    if divide_by is not None:
        model.set_gradient_divide_factor(divide_by)
    (model(inputs(rank)).square().sum() * scale).backward()
    return model.weight.grad.full_tensor()


def ordered_sum(grads):
    total = grads[0].float()
    for grad in grads[1:]:
        total = total + grad.float()
    return total


@twin_cases("shape1")
@pytest.mark.parametrize("shape", [(3,), (2, 3)])
def test_gradients_of_16_bits_are_added_in_fp32_and_the_divide_factor_is_kept(shape):
    world = ranks_in(shape)
    cases = [
        (dtype, reduce_dtype, None)
        for dtype in (torch.bfloat16, torch.float16)
        for reduce_dtype in (None, torch.float32)
    ]
    cases.append((torch.float32, None, 7.0))

    def scale_of(dtype):
        return 2.0**-20 if dtype == torch.float16 else 1.0  # subnormals: halves are not exact

    def job(rank, case):
        dtype, reduce_dtype, divide_by = case
        policy = MixedPrecisionPolicy(
            param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=reduce_dtype
        )
        return sharded_gradient(rank, shape, policy, scale_of(dtype), divide_by)

    for (dtype, reduce_dtype, divide_by), results in run_cases(world, cases, job):
        grads = [gradient(rank, dtype, scale_of(dtype)) for rank in range(world)]
        expected = ordered_sum(grads) / (divide_by or world)
        for found in results:
            assert torch.equal(found, expected), (dtype, reduce_dtype, divide_by)


@twin
def test_all_reduce_of_the_last_micro_batch_only():
    def job(rank):
        model = nn.Linear(5, 7, bias=False)
        model.weight.data.copy_(weights())
        fully_shard(model, mesh=mesh_of((2, 3)))
        use_ordered_reduction(model)
        for batch in range(2):
            model.set_requires_all_reduce(batch == 1)
            model(inputs(6 * batch + rank)).square().sum().backward()
        return model.weight.grad.full_tensor()

    grads = [gradient(rank, torch.float32) for rank in range(12)]
    expected = (ordered_sum(grads[:6]) + ordered_sum(grads[6:])) / 6
    assert all(torch.equal(found, expected) for found in run_forked(6, job))


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(7))

    def forward(self, x):
        return self.scale * x


@twin
def test_zeros_keep_their_sign():
    def job(rank):
        model = fully_shard(Scale(), mesh=mesh_of((2, 2)))
        use_ordered_reduction(model)
        model(torch.full((7,), -0.0)).sum().backward()
        return model.scale.grad.full_tensor()

    assert all(torch.signbit(found).all() for found in run_forked(4, job))


# --- what it tells ------------------------------------------------------------------------------


def test_recorder_knows_the_modules():
    def job(rank):
        model = fsdp(Net(), mesh_of((2, 2)))
        use_ordered_reduction(model)
        with FlightRecorder() as recorder:
            loss_of(model, rank, 0).backward()
        return [(record.name, record.kind, record.ranks) for record in recorder.records]

    everyone = ("all_to_all", (0, 1, 2, 3))
    for records in run_forked(4, job):
        assert records == [
            ("reduction of FSDP module 'blocks.1'", *everyone),
            ("reduction of FSDP module 'blocks.0'", *everyone),
            ("reduction of the outermost FSDP module", *everyone),
        ]


def test_a_rank_that_died_in_backward_is_named():
    def job(rank):
        model = fully_shard(nn.Linear(5, 7), mesh=mesh_of((3,)))
        use_ordered_reduction(model)
        loss = model(inputs(rank)).sum()
        if rank == 2:
            die()
        loss.backward()

    for message in messages_of(job):
        assert message.startswith("reduction of the outermost FSDP module failed: "), message
        assert "rank 2" in message


def test_a_model_without_fsdp():
    with pytest.raises(ValueError, match=r"no FSDP2 module: call fully_shard first"):
        use_ordered_reduction(nn.Linear(2, 2))


def test_copies_that_are_not_sharded():
    def job(rank):
        model = fsdp(Net(), mesh_of((2, 1)))
        with pytest.raises(ValueError, match=r"outermost FSDP module is replicated on 2 ranks"):
            use_ordered_reduction(model)

    run_forked(2, job)


def test_one_rank_has_nothing_to_add():
    def job(rank):
        model = fsdp(Net(), mesh_of((1,)))
        use_ordered_reduction(model)
        loss_of(model, 0, 0).backward()
        return [isinstance(param.grad, DTensor) for param in model.parameters()]

    assert all(run_forked(1, job)[0])


def test_a_sum_that_was_taken_back():
    def job(rank):
        model = fully_shard(nn.Linear(5, 7), mesh=mesh_of((2,)))
        use_ordered_reduction(model)
        model.set_force_sum_reduction_for_comms(False)
        with pytest.raises(RuntimeError, match=r"instead of a sum: do not call"):
            model(inputs(rank)).sum().backward()

    run_forked(2, job)


@twin
def test_a_mesh_out_of_rank_order():
    """Shards are in the order of ranks; the sum is that of a mesh in this order, bit for bit."""

    def job(rank):
        found = []
        for ranks in ([[0, 1], [2, 3]], [[1, 0], [3, 2]], [[2, 3], [0, 1]]):
            mesh = dist.device_mesh.DeviceMesh("cpu", ranks, mesh_dim_names=AXES)
            torch.manual_seed(0)
            model = fully_shard(nn.Linear(5, 7), mesh=mesh)
            use_ordered_reduction(model)
            model(inputs(rank)).sum().backward()
            found.append(model.weight.grad.to_local())
        return found

    for first, *others in run_forked(4, job):
        assert all(torch.equal(first, other) for other in others)


# --- on a GPU -----------------------------------------------------------------------------------


class OnGpu(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, expert):
        return self.model(tokens.cuda(), expert).cpu()

    def set_requires_gradient_sync(self, wanted):
        assert wanted


@needs_gpu
@pytest.mark.parametrize("shape", [(3,), (2, 2)])
def test_on_a_gpu(shape):
    options = {**OPTIONS, "compute_dtype": torch.float32}
    options["overrides"] = {f"*{name}": own for name, own in OPTIONS["overrides"].items()}

    def plain_on_gpu(rank):
        torch.cuda.set_device(0)
        model = OnGpu(Net().cuda())
        opt = samestep.MuonAdamW(model, sharding="none", reduction="ordered", **options)
        return train(model, opt, rank)

    def sharded_on_gpu(rank):
        torch.cuda.set_device(0)
        model = OnGpu(fsdp(Net().cuda(), mesh_of(shape, "cuda")))
        use_ordered_reduction(model)
        opt = samestep.MuonAdamW(model, block_dtype=torch.float32, **options)
        return train(model, opt, rank)

    world = ranks_in(shape)
    expected = run_forked(world, plain_on_gpu)[0]
    for found in run_forked(world, sharded_on_gpu):
        assert_same_bits(found, expected)
