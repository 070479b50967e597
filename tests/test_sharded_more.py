"""DTensors, further: exactness, what is computed and sent, presence, torch's options, refusals."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.func import functional_call

import samestep
from samestep.comm import exchange
from samestep.rules import muon
from samestep.rules.adamw import AdamWRule
from samestep.rules.muon import MuonRule
from tests import test_sharded
from tests.counting_group import counted
from tests.ranks import run_cases, run_forked
from tests.soak import SOAK, some, twin
from tests.test_sharded import STEPS, Net, fsdp, loss_of

ROW = {"rule": "muon", "variance_beta2": None}
OWN_RULES = {"experts": {"rule": "muon"}, "row.weight": ROW}
OPTIONS = {
    **test_sharded.OPTIONS,
    "overrides": {**test_sharded.OPTIONS["overrides"], **OWN_RULES},
}
BLOCKS = 12  # of Net with OPTIONS: 2 x (3 + 1), 3 experts, 1 row
BARE = {key: value for key, value in OPTIONS.items() if key != "max_grad_norm"}


def snapshot(opt):
    """Parameters and state by name, as one process has them."""
    names = [name for group in opt.param_groups for name in group["param_names"]]
    found = {name: opt.full_parameter(name) for name in names}
    for name, state in opt.whole_state().items():
        found |= {f"{name}.{key}": tensor for key, tensor in state.items()}
    return found


def different(found, expected):
    assert found.keys() == expected.keys()
    return [name for name in found if not torch.equal(found[name], expected[name])]


def assert_near(found, expected, limit=2e-5):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        assert (found[name] - value).abs().max() < limit, name


# --- the same bits from equal gradients, however parameters are sharded --------------------------

TENSORS = {  # shape, the dim that is sharded, options
    "tall": ((13, 7), 0, {}),
    "wide": ((7, 13), 1, {}),
    "split": ((24, 9), 0, {"split_sizes": (7, 9, 8)}),
    "split_columns": ((24, 9), 1, {"split_sizes": (7, 9, 8)}),
    "row": ((1, 9), 0, ROW),
    "experts": ((3, 10, 6), 0, {"rule": "muon"}),
    "expert_rows": ((3, 10, 6), 1, {"rule": "muon"}),
    "expert_columns": ((3, 10, 6), 2, {"rule": "muon"}),
    "kernels": ((10, 3, 3, 2), 0, {"rule": "muon", "flatten": True}),
    "kernel_channels": ((10, 3, 3, 2), 1, {"rule": "muon", "flatten": True}),
    "vector": ((13,), 0, {"rule": "adamw"}),
    "copies": ((6, 11), None, {}),
    "number": ((), None, {"rule": "adamw"}),
}


def from_equal_gradients(ranks, **options):
    """Some steps on DTensors over `ranks` ranks; None: on plain tensors."""
    mesh = None if ranks is None else init_device_mesh("cpu", (ranks,))
    generator = torch.Generator().manual_seed(0)

    def placed(shape, dim):
        tensor = torch.randn(shape, generator=generator)
        placement = Replicate() if dim is None else Shard(dim)
        return tensor if mesh is None else distribute_tensor(tensor, mesh, [placement])

    named = {name: nn.Parameter(placed(shape, dim)) for name, (shape, dim, _) in TENSORS.items()}
    opt = samestep.MuonAdamW(
        named.items(),
        lr=1e-2,
        momentum=0.9,
        overrides={name: own for name, (_, _, own) in TENSORS.items() if own},
        **options,
    )
    for _ in range(4):
        for name, (shape, dim, _) in TENSORS.items():
            named[name].grad = placed(shape, dim)
        opt.step()
    return snapshot(opt)


@twin
def test_the_number_of_ranks_changes_no_bit():
    cases = [
        {"variance_beta2": 0.9, "cautious": True, "bucket_size": 200},
        {"variance_beta2": 0.9, "momentum_form": "sum", "equilibrate": True, "renormalize": True},
        {"scale_decay": True, "nesterov": False, "muon_schedule": "gather"},
    ]
    plain = [from_equal_gradients(None, **options) for options in cases]
    for ranks in (1, 2, 3, 4) if SOAK else (1, 3):
        results = run_cases(
            ranks, cases, lambda _, options, n=ranks: from_equal_gradients(n, **options)
        )
        for expected, (options, of_ranks) in zip(plain, results, strict=True):
            for rank, found in enumerate(of_ranks):
                assert different(found, expected) == [], (ranks, rank, options)


def thin(ranks, variance_beta2):
    """Some steps on a row and a column, whose variance has the shape of the block."""
    named = {}
    for name, shape in (("row", (1, 6)), ("column", (6, 1)), ("stack", (2, 1, 6))):
        tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        if ranks is not None:
            tensor = distribute_tensor(tensor, init_device_mesh("cpu", (ranks,)), [Shard(0)])
        named[name] = nn.Parameter(tensor)
    members = [{"params": list(named.items()), "rule": "muon"}]
    opt = samestep.MuonAdamW(members, lr=1e-2, variance_beta2=variance_beta2)
    for step in range(3):
        for param in named.values():
            param.grad = param.detach() * (step - 1.5)
        opt.step()
    return snapshot(opt)


@twin
def test_matrices_of_one_row_or_column():
    for variance_beta2, results in run_cases(2, [None, 0.9], lambda _, beta2: thin(2, beta2)):
        expected = thin(None, variance_beta2)
        for found in results:
            assert different(found, expected) == [], variance_beta2


def mixed_dtypes(ranks):
    """Blocks of both dtypes, which travel in one chunk."""
    named = {}
    for name, dtype in (("single", torch.float32), ("double", torch.float64)):
        tensor = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
        if ranks is not None:
            tensor = distribute_tensor(tensor, init_device_mesh("cpu", (ranks,)), [Shard(0)])
        named[name] = nn.Parameter(tensor)
    opt = samestep.MuonAdamW(named.items(), lr=1e-2, variance_beta2=0.9)
    for _ in range(3):
        for param in named.values():
            param.grad = param.detach().clone()
        opt.step()
    return snapshot(opt)


@twin
def test_parameters_of_two_dtypes():
    expected = mixed_dtypes(None)
    for found in run_forked(2, lambda _: mixed_dtypes(2)):
        assert {name: value.dtype for name, value in found.items()} == {
            name: value.dtype for name, value in expected.items()
        }
        assert_near(found, expected)
        assert (found["double"] - expected["double"]).abs().max() < 1e-12


# --- what is computed ----------------------------------------------------------------------------


@contextmanager
def counted_matrices():
    """How many matrices are orthogonalized; [0] of what it gives."""
    count, real = [0], muon.orthogonalize

    def counting(blocks, **options):
        count[0] += blocks.shape[0]
        return real(blocks, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(muon, "orthogonalize", counting)
        yield count


@twin
@pytest.mark.parametrize("shape", [(3,), (2, 2), (4,)] if SOAK else [(2, 2)])
def test_orthogonalizations(shape):
    """One rank computes each block; if all gather, each of them does."""
    world = torch.Size(shape).numel()

    def job(rank, schedule):
        names = ("replicate", "shard")[-len(shape) :]
        model = fsdp(Net(), init_device_mesh("cpu", shape, mesh_dim_names=names))
        opt = samestep.MuonAdamW(model, muon_schedule=schedule, **OPTIONS)
        found = []
        for step in range(2):
            loss_of(model, rank, step).backward()
            with counted_matrices() as count:
                opt.step()
            found.append(count[0])
        return found

    for schedule, results in run_cases(world, ["parallel", "gather"], job):
        times = 1 if schedule == "parallel" else world
        for step in range(2):
            assert sum(found[step] for found in results) == times * BLOCKS
        if schedule == "parallel":
            assert max(found[0] for found in results) < BLOCKS  # they share the work


# --- what is sent --------------------------------------------------------------------------------


def sent_in_a_step(shape, *cases):
    """For each case of options, of each rank: bytes of its step, and the owners of all blocks."""

    def job(rank, options):
        with counted():
            names = ("replicate", "shard")[-len(shape) :]
            model = fsdp(Net(), init_device_mesh("cpu", shape, mesh_dim_names=names))
            opt = samestep.MuonAdamW(model, **{**BARE, "variance_beta2": None, **options})
            loss_of(model, rank, 0).backward()
            with counted() as log:
                opt.step()
        (placement,) = opt.sharded_parameters
        blocks = [planned for chunk in placement.exchange.chunks for planned in chunk.blocks]
        blocks = [
            (placement.specs[r.param].name, r.number, owner) for r in blocks for owner in r.owners
        ]
        moved = log.of("all_to_all")
        rest = [call for call in log if call.op != "all_to_all"]
        assert all(call.asynchronous for call in moved)
        of_others = sum(call.elements * call.dtype.itemsize for call in moved)
        assert of_others == moved.sent  # nothing is handed in for oneself
        return blocks, float(moved.sent), len(moved), len(placement.exchange.chunks), rest

    return [results for _, results in run_cases(torch.Size(shape).numel(), cases, job)]


def rows_of(rank, rows, ranks):
    """The rows that FSDP2 gives a rank, as torch.chunk does."""
    each = -(-rows // ranks)
    return range(min(rank * each, rows), min((rank + 1) * each, rows))


def least(blocks, shards, replicas):
    """Elements: every part once to the owner, and once back to each that holds it."""
    params = dict(Net().named_parameters())
    starts = (0, 9, 19, 33)
    total = 0
    for name, number, owner in blocks:
        shape = params[name].shape
        if len(shape) == 3:
            rows, width = range(number, number + 1), shape[1] * shape[2]
        elif name.endswith("up.weight"):
            rows, width = range(starts[number], starts[number + 1]), shape[1]
        else:
            rows, width = range(shape[0]), shape[1]
        held = rows_of(owner % shards, shape[0], shards)
        own = width * len(set(rows) & set(held))
        size = width * len(rows)
        total += (size - own) + (replicas * size - own)
    return total


def assert_least_bytes(shape, results):
    """Not one more than needed: no padding, and nothing twice."""
    blocks = results[0][0]
    assert len(blocks) == BLOCKS
    shards, replicas = shape[-1], shape[0] if len(shape) == 2 else 1
    assert sum(sent for _, sent, *_ in results) == 4 * least(blocks, shards, replicas)
    for _, _, calls, chunks, rest in results:
        assert calls <= 2 * chunks  # none where all blocks of a chunk stay
        assert [call.op for call in rest] == ["all_reduce"]  # presence


@twin
def test_bytes_with_replicas():
    (results,) = sent_in_a_step((2, 2), {})
    assert_least_bytes((2, 2), results)


@twin
def test_bytes_and_blocks_that_travel_in_16_bits():
    whole, half = sent_in_a_step((2,), {}, {"block_dtype": torch.bfloat16})
    assert_least_bytes((2,), whole)
    assert 2 * sum(found[1] for found in half) == sum(found[1] for found in whole)


@twin
def test_bytes_of_the_variance_and_of_gathering_everywhere():
    """The variance goes to all others: one number per row of a tall block, or column of a wide.

    Where all gather, every rank gets all parts of the others, and nothing goes back.
    """
    cases = {}, {"variance_beta2": 0.9}, {"muon_schedule": "gather"}
    without, with_it, gathered = sent_in_a_step((4,), *cases)
    assert_least_bytes((4,), without)
    more = sum(found[1] for found in with_it) - sum(found[1] for found in without)
    numbers = 2 * ((9 + 10 + 14) + 33) + 3 * 5
    assert more == 4 * 3 * numbers
    elements = 2 * (33 * 5 + 33 * 5) + 3 * 25 + 5
    assert sum(found[1] for found in gathered) == 4 * 3 * elements
    assert all(calls == chunks for _, _, calls, chunks, _ in gathered)


def test_experts_sharded_by_expert_stay_where_they_are():
    """Only presence is agreed on."""

    def job(rank):
        with counted():
            mesh = init_device_mesh("cpu", (2,))
            experts = nn.Parameter(distribute_tensor(torch.randn(4, 6, 5), mesh, [Shard(0)]))
            opt = samestep.Muon([experts], lr=1e-2)
            before = experts.to_local().clone()
            for _ in range(2):
                experts.grad = experts.detach().clone()
                with counted() as log:
                    opt.step()
            assert not torch.equal(experts.to_local(), before)
        return [(call.op, call.elements) for call in log]

    assert run_forked(2, job) == 2 * [
        [("all_reduce", 7)]
    ]  # one parameter; of problems, drops and hyperparameters two each


# --- the order of a step -------------------------------------------------------------------------


def chunk_lines(opt):
    """(operation, chunk) of a step's chunks."""
    kinds = ("Collect", "Transform", "GiveBack", "Apply")
    pairs = [line.split() for line in opt.schedule_lines() if line.split()[0] in kinds]
    return [(kind, int(place.split(".")[1])) for kind, place in pairs]


@contextmanager
def moves_in_flight():
    """How many chunks are on their way at once; [0] is now, [1] the most."""
    count, real = [0, 0], exchange.move_parts

    class Watched:
        def __init__(self, pending):
            self.pending = pending

        def wait(self):
            count[0] -= 1
            return self.pending.wait()

    def launch(*args):
        count[0] += 1
        count[1] = max(count)
        return Watched(real(*args))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "move_parts", launch)
        yield count


@twin
def test_the_pipeline():
    """While a chunk is computed, the next are collected and the one before is given back."""

    def job(rank, ahead):
        model = fsdp(Net())
        opt = samestep.MuonAdamW(model, **{**OPTIONS, "bucket_size": 80, "chunks_ahead": ahead})
        loss_of(model, rank, 0).backward()
        with moves_in_flight() as count:
            opt.step()
        assert count[0] == 0
        return chunk_lines(opt), count[1]

    for ahead, results in run_cases(2, [1, 2, 100], job):
        for lines, most in results:
            chunks = 1 + max(chunk for _, chunk in lines)
            assert chunks >= 5
            for kind in ("Collect", "Transform", "GiveBack", "Apply"):
                assert [chunk for other, chunk in lines if other == kind] == list(range(chunks))
            place = {line: index for index, line in enumerate(lines)}
            for chunk in range(chunks):
                later, latest = min(chunk + ahead, chunks - 1), min(chunk + ahead + 1, chunks)
                assert place["Collect", later] < place["Transform", chunk]
                assert latest == chunks or place["Collect", latest] > place["Transform", chunk]
                assert place["GiveBack", chunk] == place["Transform", chunk] + 1
                if chunk:
                    assert place["Apply", chunk - 1] > place["GiveBack", chunk]
            assert most == min(ahead, chunks - 1) + 2 - (ahead >= chunks)


@twin
def test_without_a_pipeline_one_chunk_is_over_before_the_next_begins():
    def job(rank):
        found = []
        for ahead in (0, 1):
            model = fsdp(Net())
            options = {**OPTIONS, "bucket_size": 80, "chunks_ahead": ahead}
            opt = samestep.MuonAdamW(model, **options)
            loss_of(model, rank, 0).backward()
            with moves_in_flight() as count:
                opt.step()
            found.append((chunk_lines(opt), count[1], [p.to_local() for p in model.parameters()]))
        return found

    kinds = ("Collect", "Transform", "GiveBack", "Apply")
    for (lines, most, alone), (_, _, piped) in run_forked(2, job):
        assert lines == [(kind, chunk) for chunk in range(len(lines) // 4) for kind in kinds]
        assert most == 1
        assert all(map(torch.equal, alone, piped))


@twin
def test_chunks_are_as_large_as_asked_for():
    """One turn of all owners at least: on two ranks two blocks."""

    def job(rank):
        found = []
        for size in (1, 200, 10**6):
            opt = samestep.MuonAdamW(fsdp(Net()), **{**OPTIONS, "bucket_size": size})
            chunks = opt.sharded_parameters[0].exchange.chunks
            found.append([(len(c.blocks), sum(b.box.numel for b in c.blocks)) for c in chunks])
        return found

    for smallest, middle, whole in run_forked(2, job):
        assert all(blocks <= 2 for blocks, _ in smallest)
        assert all(size <= 200 or blocks <= 2 for blocks, size in middle)
        assert len(whole) == 1
        assert whole[0][0] == BLOCKS
        assert len(smallest) > len(middle) > 1


# --- presence and steps that are skipped ---------------------------------------------------------


class Branches(nn.Module):
    """A layer that is used at times, of both rules, and a frozen one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.always = nn.Linear(6, 6)
        self.at_times = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x, both):
        x = self.frozen(self.always(x).tanh())
        return self.at_times(x) if both else x


def run_branches(model, opt, ranks, steps):
    for step in steps:
        losses = []
        for rank in ranks:
            x = torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + rank))
            losses.append(model(x, step % 2 == 0).square().mean())
        (sum(losses) / len(losses)).backward()
        opt.step()
        metrics = opt.metrics()
        opt.zero_grad()
    return metrics


@twin
def test_a_parameter_without_gradient_is_untouched():
    cases = [(apart, schedule) for apart in (True, False) for schedule in ("parallel", "gather")]
    options = {"lr": 1e-2, "variance_beta2": 0.9, "master_weights": True}
    plain = Branches()
    alone = samestep.MuonAdamW(plain, **options)
    run_branches(plain, alone, (0, 1), range(2))
    expected = snapshot(alone)

    def job(rank, case):
        apart, schedule = case
        model = Branches()
        if apart:
            fully_shard(model.at_times)
        fully_shard(model)
        frozen = model.frozen.weight.full_tensor()
        opt = samestep.MuonAdamW(model, muon_schedule=schedule, **options)
        run_branches(model, opt, (rank,), [0])
        before = snapshot(opt)
        metrics = run_branches(model, opt, (rank,), [1])
        assert torch.equal(model.frozen.weight.full_tensor(), frozen)
        return before, snapshot(opt), metrics["present"].sum().item()

    of_all = [found for _, results in run_cases(2, cases, job) for found in results]
    for before, after, present in of_all:
        changed = different(after, before)
        assert sorted(changed) == sorted(name for name in before if name.startswith("always"))
        assert before["at_times.weight.variance"].any()
        assert after["at_times.bias.step"] == 1
        assert after["always.bias.step"] == 2
        assert present == 2
        assert_near(after, expected)


def test_a_gradient_on_one_rank_is_a_gradient():
    """FSDP2 gives all ranks theirs; who removes one on some ranks has zeros there."""

    def job(rank):
        model = fully_shard(Branches())
        opt = samestep.MuonAdamW(model, lr=1e-2)
        before = model.at_times.weight.full_tensor()
        model(torch.ones(2, 6), both=True).square().sum().backward()
        if rank == 0:
            model.at_times.weight.grad = None
        opt.step()
        return opt.metrics()["present"].tolist(), before, model.at_times.weight.full_tensor()

    for present, before, after in run_forked(2, job):
        assert sum(present) == 4
        assert (before != after).all()


@twin
@pytest.mark.parametrize("shape", some([(3,), (2, 2)]))
def test_a_gradient_that_is_not_finite(shape):
    """No rank changes anything, plain parameters included; the step after goes on."""

    def job(rank):
        names = ("replicate", "shard")[-len(shape) :]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model = Branches()
        fully_shard(model, mesh=mesh, ignored_params={model.always.bias, model.frozen.bias})
        opt = samestep.MuonAdamW(model, lr=1e-2, variance_beta2=0.9, max_grad_norm=1.0)
        run_branches(model, opt, (rank,), [0])
        before = snapshot(opt)
        x = torch.full((1, 6), torch.inf if rank == 1 else 1.0)
        model(x, both=True).sum().backward()
        opt.step()
        opt.zero_grad()
        skipped, norm = snapshot(opt), opt.metrics()["grad_norm"]
        run_branches(model, opt, (rank,), [2])
        return before, skipped, norm, snapshot(opt)

    for before, skipped, norm, after in run_forked(torch.Size(shape).numel(), job):
        assert not norm.isfinite()
        assert different(skipped, before) == []
        assert different(after, before) == list(before)


@twin
def test_grad_scaler():
    """A scale of 2^k changes no bit; without finite gradients the step is skipped everywhere."""

    def job(rank):
        found = []
        for scaled in (False, True):
            model = fsdp(Net())
            opt = samestep.MuonAdamW(model, **{**OPTIONS, "max_grad_norm": None})
            scaler = samestep.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
            for step in range(3):
                scaler.scale(loss_of(model, rank, step)).backward()
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()
            found.append(snapshot(opt))
        before = snapshot(opt)
        loss = loss_of(model, rank, 3) * (torch.inf if rank == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        return *found, before, snapshot(opt), scaler.get_scale()

    for plain, scaled, before, after, scale in run_forked(2, job):
        assert_near(scaled, plain, 1e-6)
        assert different(after, before) == []
        assert scale == 2.0**9


# --- options, against one process ----------------------------------------------------------------


def with_schedule(opt):
    return torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0 / (1 + step % 3))


def train(model, opt, ranks, scheduler=None, dtype=None, steps=STEPS):
    """`dtype`: of what forward computes with."""

    def forward(tokens, expert):
        narrow = {name: param.to(dtype) for name, param in model.named_parameters()}
        return functional_call(model, narrow, (tokens, expert)).float()

    called = model if dtype is None else forward
    for step in range(steps):
        losses = [loss_of(called, rank, step) for rank in ranks]
        (sum(losses) / len(losses)).backward()
        opt.step()
        if scheduler is not None:
            scheduler.step()
        metrics = opt.metrics()
        opt.zero_grad()
    return snapshot(opt), metrics


@twin
def test_options():
    """Three ranks, one of which holds none of the row and two of the five-row matrices' rows."""
    cases = [
        {"maximize": True, "update_rms": True, "chunks_ahead": 3},
        {"state_dtypes": {"momentum_buffer": torch.bfloat16, "exp_avg": torch.bfloat16}},
        {"fused": True, "owners": "cyclic", "scale_decay": True, "adjust_lr": "original"},
        {"preset": "nanochat", "amsgrad": True},
    ]
    if SOAK:  # each by itself too
        cases += [{key: value} for options in cases for key, value in options.items()]

    def run(model, ranks, options):
        opt = samestep.MuonAdamW(model, **{**OPTIONS, "matrix_lr": OPTIONS["lr"], **options})
        return train(model, opt, ranks, with_schedule(opt))

    results = run_cases(3, cases, lambda rank, options: run(fsdp(Net()), (rank,), options))
    for options, of_ranks in results:
        expected, metrics = run(Net(), range(3), options)
        limit = 2e-2 if "state_dtypes" in options else 3e-4  # one step of bfloat16
        for found, told in of_ranks:
            assert_near(found, expected, limit)
            for key, value in metrics.items():
                same = torch.allclose(told[key].double(), value.double(), rtol=1e-3)
                assert same, (options, key)


def as_usual(model, **options):
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def meta_first(model):
    """Made without memory, sharded, and filled then."""
    values = {name: param.detach().clone() for name, param in model.named_parameters()}
    as_usual(model.to("meta")).to_empty(device="cpu")
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(distribute_tensor(values[name], param.device_mesh, param.placements))
    return model


WRAPPERS = {
    "resharded": lambda model: as_usual(model, reshard_after_forward=True),
    "not resharded": lambda model: as_usual(model, reshard_after_forward=False),
    "in part": lambda model: as_usual(model, reshard_after_forward=2),
    "offloaded": lambda model: as_usual(model, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "meta": meta_first,
    "columns": lambda model: fully_shard(
        model, shard_placement_fn=lambda p: Shard(1 if p.ndim == 2 and not p.shape[1] % 2 else 0)
    ),
}


@twin
@pytest.mark.parametrize("world", [2, 4] if SOAK else [4])
def test_ways_to_shard(world):
    """Resharded in part: on half of four ranks."""
    ways = [how for how in WRAPPERS if (how == "in part") == (world == 4)]
    plain = Net(36)
    options = {**OPTIONS, "overrides": OWN_RULES}
    expected, _ = train(plain, samestep.MuonAdamW(plain, **options), range(world))

    def job(rank, how):
        model = WRAPPERS[how](Net(36))
        return train(model, samestep.MuonAdamW(model, **options), (rank,))[0]

    for _, results in run_cases(world, ways, job):
        for found in results:
            assert_near(found, expected)


@twin
def test_mixed_precision():
    """Forward and backward in 16 bits; parameters and the sums of gradients in 32."""
    plain = Net()
    opt = samestep.MuonAdamW(plain, **OPTIONS)
    expected, _ = train(plain, opt, range(2), dtype=torch.bfloat16)

    def job(rank):
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
        model = fully_shard(Net(), mp_policy=policy)
        opt = samestep.MuonAdamW(model, **OPTIONS)
        loss_of(model, rank, 0).backward()
        assert model.head.weight.grad.dtype == torch.float32
        opt.zero_grad()
        return train(model, opt, (rank,))[0]

    for found in run_forked(2, job):
        assert_near(found, expected, 3e-3)


@twin
def test_master_weights():
    """16-bit parameters. Ranks have the same data, so that nothing is rounded on the way."""

    def run(model):
        options = {**OPTIONS, "lr": 1e-3, "max_grad_norm": None, "master_weights": True}
        opt = samestep.MuonAdamW(model, **options)
        found, _ = train(model, opt, (0,))
        with torch.no_grad():  # an edit counts, and one that is too small is taken on request
            model.head.weight.mul_(2)
        opt.refresh_master_weights()
        edited = opt.full_parameter("head.weight")
        opt.set_full_parameter("row.weight", torch.full((1, 5), 0.123))
        opt.set_full_state("row.weight", "momentum_buffer", torch.ones(1, 5))
        return {**found, "edited": edited, **train(model, opt, (0,))[0]}

    expected = run(Net().bfloat16())
    for found in run_forked(2, lambda rank: run(fsdp(Net().bfloat16()))):
        assert found["head.weight.master_weight"].dtype == torch.float32
        assert different(found, expected) == []


@twin
def test_accumulation():
    """Two micro-batches: gradients stay whole until the second, or are reduced each time."""
    plain = Net()
    alone = samestep.MuonAdamW(plain, **OPTIONS)
    for step in range(0, 6, 2):
        for rank in range(2):
            for micro in range(2):
                (loss_of(plain, rank, step + micro) / 4).backward()
        alone.step()
        alone.zero_grad()
    expected = snapshot(alone)

    def job(rank):
        found = []
        for each_time in (True, False):
            model = fsdp(Net())
            opt = samestep.MuonAdamW(model, **OPTIONS)
            for step in range(0, 6, 2):
                for micro in range(2):
                    model.set_requires_gradient_sync(each_time or micro == 1)
                    (loss_of(model, rank, step + micro) / 2).backward()
                opt.step()
                opt.zero_grad()
            found.append(snapshot(opt))
        return found

    for results in run_forked(2, job):
        for found in results:
            assert_near(found, expected)


@twin
def test_a_mesh_of_one_rank():
    plain = Net()
    expected, metrics = train(plain, samestep.MuonAdamW(plain, update_rms=True, **OPTIONS), (0,))

    def job(rank):
        model = fsdp(Net())
        return train(model, samestep.MuonAdamW(model, update_rms=True, **OPTIONS), (0,))

    ((found, told),) = run_forked(1, job)
    assert different(found, expected) == []
    assert torch.equal(told["present"], metrics["present"])
    assert torch.allclose(told["update_rms"], metrics["update_rms"])


@twin
def test_groups_that_are_added():
    plain, other = Net(), Branches()

    def run(model, more, ranks):
        opt = samestep.MuonAdamW(model, **OPTIONS)
        train(model, opt, ranks)
        trainable = [(name, p) for name, p in more.named_parameters() if p.requires_grad]
        for rule, ndim in (("muon", 2), ("adamw", 1)):
            members = [(name, param) for name, param in trainable if param.ndim == ndim]
            opt.add_param_group({"params": members, "rule": rule})
        for step in range(0, 6, 2):
            losses = []
            for rank in ranks:
                x = torch.randn(3, 6, generator=torch.Generator().manual_seed(step + rank))
                losses.append(more(x, both=True).square().mean() + loss_of(model, rank, step))
            (sum(losses) / len(losses)).backward()
            opt.step()
            opt.zero_grad()
        return snapshot(opt)

    expected = run(plain, other, range(2))

    def job(rank):
        return run(fsdp(Net()), fully_shard(Branches()), (rank,))

    for found in run_forked(2, job):
        assert_near(found, expected)


@twin
def test_several_meshes_and_plain_parameters():
    """One block with replicas, one without, the rest left alone: all in one step."""
    plain = Net()
    options = {**OPTIONS, "update_rms": True}
    expected, metrics = train(plain, samestep.MuonAdamW(plain, **options), range(4))

    def job(rank):
        model = Net()
        fully_shard(
            model.blocks[0],
            mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")),
        )
        fully_shard(model.blocks[1], mesh=init_device_mesh("cpu", (4,)))
        opt = samestep.MuonAdamW(model, **options)
        return train(model, opt, (rank,))

    for found, told in run_forked(4, job):
        assert_near(found, expected)
        for key, value in metrics.items():
            assert torch.allclose(told[key].double(), value.double(), rtol=1e-4), key


@pytest.mark.skipif(not SOAK, reason="eight ranks, as in test_fsdp_ordered.py: make soak")
def test_replicas_of_shards_of_tensor_parallel():
    """Three axes: replicas, shards, and columns or rows."""
    options = {**OPTIONS, "overrides": OWN_RULES, "update_rms": True}
    steps = STEPS if SOAK else 2
    plain = Net(36)
    expected, metrics = train(plain, samestep.MuonAdamW(plain, **options), range(4), steps=steps)

    def job(rank):
        names = ("replicate", "shard", "model")
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
        model = Net(36)
        for block in model.blocks:
            parallelize_module(
                block, mesh["model"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
        fsdp(model, mesh["replicate", "shard"])
        return train(model, samestep.MuonAdamW(model, **options), (rank // 2,), steps=steps)

    for found, told in run_forked(8, job):
        assert_near(found, expected)
        for key, value in metrics.items():
            assert torch.allclose(told[key].double(), value.double(), rtol=1e-4), key


@twin
def test_replicas_hold_the_same_bits():
    """Also where nobody looks: whole values are put together from one of them."""

    def job(rank, schedule):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = fsdp(Net(), mesh)
        opt = samestep.MuonAdamW(model, muon_schedule=schedule, **OPTIONS)
        train(model, opt, (rank,), steps=STEPS if SOAK else 2)
        found = {}
        for name, param in model.named_parameters():
            for key, tensor in (("value", param.detach()), *opt.state[param].items()):
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                found[f"{name}.{key}"] = local
        return found

    for schedule, results in run_cases(4, ["parallel", "gather"], job):
        for rank in (0, 1):
            assert different(results[rank + 2], results[rank]) == [], schedule


@twin
def test_adamw_has_the_bits_of_torch():
    """On the same shards, from the same gradients."""

    def job(rank):
        found = []
        for make in (samestep.AdamW, torch.optim.AdamW):
            model = fsdp(Net())
            opt = make(model.parameters(), lr=1e-2, weight_decay=0.1)
            for step in range(STEPS):
                loss_of(model, rank, step).backward()
                opt.step()
                opt.zero_grad()
            found.append({name: p.full_tensor() for name, p in model.named_parameters()})
        return found

    for ours, theirs in run_forked(3, job):
        assert different(ours, theirs) == []


@twin
def test_another_model_on_other_ranks():
    """Two models on two ranks each, which have no parameter in common."""

    def run(options, stage, model, ranks, process_group=None):
        own = {**OPTIONS, **options} if stage else {"lr": 1e-2, **options}
        own["stage_group"] = "none"  # each has its norm
        opt = samestep.MuonAdamW(model, process_group=process_group, **own)
        if stage:
            return train(model, opt, ranks)
        metrics = run_branches(model, opt, ranks, range(3))
        return snapshot(opt), metrics

    def job(rank, options):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))["data"]
        stage = rank // 2
        model = Net() if stage else Branches()
        if stage:
            fsdp(model, mesh)
        else:
            fully_shard(model, mesh=mesh, ignored_params={model.always.bias})
        return run(options, stage, model, (rank % 2,), mesh.get_group())

    for options, results in run_cases(4, [{"update_rms": True}, *([{}] if SOAK else [])], job):
        expected = [run(options, 0, Branches(), range(2)), run(options, 1, Net(), range(2))]
        for rank, (found, metrics) in enumerate(results):
            values, told = expected[rank // 2]
            assert_near(found, values)
            for key, value in told.items():
                assert torch.allclose(
                    metrics[key].double(), value.double(), rtol=1e-4, equal_nan=True
                ), (options, key)


class Normed(nn.Module):
    """For sequence parallel: a norm whose gradients are sums over ranks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x):
        return self.down(self.up(self.norm(x)).tanh())


@twin
def test_sequence_parallel():
    """torch leaves the gradients of the norm as partial sums, and its own optimizers add them."""
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))

    def run(model, part):
        opt = samestep.MuonAdamW(model, lr=1e-2)
        for _ in range(3):
            model(part).square().sum().backward()
            opt.step()
            opt.zero_grad()
        return snapshot(opt)

    expected = run(Normed(), x)

    def job(rank):
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        model = parallelize_module(Normed(), init_device_mesh("cpu", (2,)), plan)
        return run(model, x[:, 2 * rank : 2 * rank + 2])

    for found in run_forked(2, job):
        assert_near(found, expected)


@twin
def test_whole_gradients():
    """Read and replaced before the step; the mean over ranks."""
    plain = Net()
    (sum(loss_of(plain, rank, 0) for rank in range(2)) / 2).backward()

    def job(rank):
        model = fsdp(Net())
        opt = samestep.MuonAdamW(model, **OPTIONS)
        assert opt.full_gradient("row.weight") is None
        loss_of(model, rank, 0).backward()
        found = {name: opt.full_gradient(name) for name, _ in model.named_parameters()}
        opt.set_full_gradient("scale", torch.arange(5.0))
        return found, opt.full_gradient("scale")

    for found, replaced in run_forked(2, job):
        for name, param in plain.named_parameters():
            assert torch.allclose(found[name], param.grad, atol=1e-6), name
        assert torch.equal(replaced, torch.arange(5.0))


# --- refusals ------------------------------------------------------------------------------------


def refused(make):
    """The error of each rank's `make`, as (its class, its text)."""

    def job(rank):
        with pytest.raises(Exception) as caught:
            make(rank)
        return type(caught.value).__name__, str(caught.value)

    return job


def test_a_partial_parameter():
    def make(rank):
        mesh = init_device_mesh("cpu", (2,))
        partial = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()], run_check=False)
        samestep.MuonAdamW([("weight", nn.Parameter(partial))])

    for name, text in run_forked(2, refused(make)):
        assert name == "ValueError"
        assert "'weight'" in text
        assert "partial" in text.lower()


def wrong_gradient(kind, param):
    whole = torch.zeros(param.shape)
    if kind == "plain":
        return whole
    columns = torch.tensor_split(whole, param.device_mesh.size(), dim=1)
    return DTensor.from_local(
        columns[0].contiguous(),
        param.device_mesh,
        [Shard(1)],
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def test_a_gradient_that_does_not_fit():
    """On one rank: all raise, and nothing has changed."""
    cases = [(kind, mixed) for kind in ("plain", "columns") for mixed in (False, True)]

    def job(rank, case):
        kind, mixed = case
        model = Branches()
        ignored = {model.always.bias} if mixed else set()
        fully_shard(model, ignored_params=ignored)
        opt = samestep.MuonAdamW(model, lr=1e-2)
        run_branches(model, opt, (rank,), [0])
        before = snapshot(opt)
        model(torch.ones(2, 6), both=True).sum().backward()
        own = model.always.weight
        if rank == 1:
            own.grad = None
            own.grad = wrong_gradient(kind, own)
        with pytest.raises(RuntimeError) as caught:
            opt.step()
        return str(caught.value), different(snapshot(opt), before)

    for case, (first, second) in run_cases(2, cases, job):
        assert "rank 1 could not take the step" in first[0], case
        assert "the gradient of 'always.weight' on rank 1" in second[0], case
        assert first[1] == second[1] == [], case


def data_and_tensor_parallel():
    """On four ranks: what is not tensor parallel has a copy in each of two groups."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    model = Net(36)
    for block in model.blocks:
        parallelize_module(
            block, mesh["model"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
    return fsdp(model, mesh["data"])


@twin
def test_a_problem_where_parameters_are_on_several_meshes():
    """Tensor parallel and FSDP2: a rank's problem reaches those that share no mesh with it."""

    def job(rank, what):
        model = data_and_tensor_parallel()
        opt = samestep.MuonAdamW(model, overrides=OWN_RULES)
        loss_of(model, rank // 2, 0).backward()
        if rank == 0 and what == "gradient":
            model.embedding.weight.grad = wrong_gradient("columns", model.embedding.weight)
        if rank == 0 and what == "option":
            opt.param_groups[0]["lr"] = -1.0
        with pytest.raises(Exception) as caught:
            opt.step()
        return type(caught.value).__name__

    for what, names in run_cases(4, ["gradient", "option"], job):
        own = "RuntimeError" if what == "gradient" else "ValueError"
        assert names == [own, *3 * ["RankProblemError"]]


@twin
def test_a_copy_that_is_not_finite():
    """Only one group of ranks sees it in its copy: all skip the step, or none can go on."""

    def job(rank):
        model = data_and_tensor_parallel()
        opt = samestep.MuonAdamW(model, overrides=OWN_RULES, max_grad_norm=1.0)
        before = snapshot(opt)
        loss_of(model, rank // 2, 0).backward()
        if rank == 0:
            model.embedding.weight.grad.to_local()[0] = torch.inf
        opt.step()
        return different(snapshot(opt), before)

    assert run_forked(4, job) == 4 * [[]]


def test_a_rule_without_stages():
    class Unstaged:
        name, kind = "unstaged", "matrix"
        defaults, schedulable = MuonRule.defaults, MuonRule.schedulable

        def __getattr__(self, key):
            if key in ("prepare", "transform", "finish"):
                raise AttributeError(key)
            return getattr(MuonRule(), key)

    def make(rank):
        samestep.register_rule(Unstaged())
        model = fsdp(Net())
        samestep.MuonAdamW(model, overrides={**OWN_RULES, "*.up.weight": {"rule": "unstaged"}})

    for name, text in run_forked(2, refused(make)):
        assert name == "ValueError"
        assert "has only update()" in text
        assert "up.weight" in text


@twin
def test_an_elementwise_rule_of_ones_own():
    class Mine(AdamWRule):
        name = "mine"

    def run(model, ranks):
        own = {"experts": {"rule": "mine"}, "*.up.weight": {"rule": "mine"}}
        return train(model, samestep.MuonAdamW(model, lr=1e-2, overrides=own), ranks)[0]

    def job(rank):
        samestep.register_rule(Mine())
        return run(Net(), range(2)), run(fsdp(Net()), (rank,))

    for expected, found in run_forked(2, job):
        assert_near(found, expected)


KEYWORDS = [
    {"buffers": "flat"},
    {"overlap_grad_reduce": True},
    {"buffers": "flat", "overlap_param_gather": True},
    {"sharding": "none"},
    {"grads": "reduced"},
]


def test_keywords_of_plain_parameters():
    """They concern the plain parameters beside DTensors, of which there may be none."""
    # Nobody would have reduced the gradients of plain parameters.
    cases = [
        (o, mixed) for o in KEYWORDS for mixed in (False, True) if not (mixed and "grads" in o)
    ]
    own = {"lr": 1e-2, "variance_beta2": 0.9, "max_grad_norm": 1.0}
    plain = Branches()
    alone = samestep.MuonAdamW(plain, **own)
    run_branches(plain, alone, (0, 1), range(4))
    expected = snapshot(alone)

    def job(rank, case):
        options, mixed = case
        model = Branches()
        ignored = {model.at_times.weight, model.always.bias} if mixed else set()
        fully_shard(model, ignored_params=ignored)
        opt = samestep.MuonAdamW(model, **own, **options)
        run_branches(model, opt, (rank,), range(4))
        return snapshot(opt)

    for _, results in run_cases(2, cases, job):
        for found in results:
            assert_near(found, expected)
