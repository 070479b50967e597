"""A gradient that is not finite: named with its rank on all ranks, and kept from all others."""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

import samestep
from samestep.comm.presence import RankProblemError
from samestep.fsdp import take_part, use_ordered_reduction
from tests.ranks import run_cases, run_forked
from tests.soak import SOAK

OPTIONS = {"lr": 0.05, "crossover": 4}
EXPERTS = {"overrides": {"*.experts": {"rule": "muon"}}}
BAD_VALUES = 2
SENDS = ("reduce", "gather", "scatter", "to_all", "alltoall", "send")


class Block(nn.Module):
    """An MLP of odd sizes, a norm, and a layer that is not always used."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.first = nn.Linear(width, width, bias=False)
        self.second = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, *, leaves_out: bool = False) -> Tensor:
        x = x + self.down(self.up(self.norm(x)).tanh())
        return x + self.second(x if leaves_out else self.first(x))


class Net(nn.Module):
    def __init__(self, width: int = 5, hidden: int = 7) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.width, self.leaves_out = width, False
        self.into = nn.Linear(width, width)
        self.blocks = nn.ModuleList([Block(width, hidden), Block(width, hidden)])
        self.head = nn.Linear(width, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = block(x, leaves_out=self.leaves_out)
        return self.head(x)


def loss_of(model: nn.Module, data: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + data)
    return model(torch.randn(8, model.width, generator=generator)).pow(2).mean()


@contextmanager
def bad_gradient(model: nn.Module, name: str, value: float):
    """Backward passes inside give some values of a parameter's gradient that are not finite.

    The hook is on what forward uses: of FSDP2 that is the gathered parameter, of its own tensor.
    """
    owner = model.get_submodule(name.rpartition(".")[0])
    handles = []

    def spoiled(grad: Tensor) -> Tensor:
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        local = local.clone()
        local.view(-1)[-BAD_VALUES:] = value
        if not isinstance(grad, DTensor):
            return local
        shape = {"shape": grad.shape, "stride": grad.stride()}
        return DTensor.from_local(
            local, grad.device_mesh, grad.placements, run_check=False, **shape
        )

    def before(module: nn.Module, _: object) -> None:
        param = getattr(module, name.rpartition(".")[2])
        handles.append(param.register_hook(spoiled))

    handles.append(owner.register_forward_pre_hook(before))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Wire(TorchDispatchMode):
    """What ranks send to each other: how often, and whether all of it is finite."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bad: list[str] = []
        self._names: dict[object, str] = {}

    def _name_of(self, func) -> str:
        """The name of an operation that sends; none of others, which are nearly all."""
        name = str(func).split(".")[1]
        sends = func.namespace in ("c10d", "_c10d_functional")
        return name if sends and any(word in name for word in SENDS) else ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = self._names.get(func)
        if name is None:
            name = self._names[func] = self._name_of(func)
        if name:
            self.calls[name] += 1
            for value, argument in zip(args, func._schema.arguments, strict=False):
                if not argument.name.startswith("output"):
                    self._look(name, value)
        return func(*args, **(kwargs or {}))

    def _look(self, name: str, value: object) -> None:
        for one in value if isinstance(value, list | tuple) else [value]:
            if isinstance(one, list | tuple):
                self._look(name, one)
            elif isinstance(one, Tensor) and not one.isfinite().all():
                self.bad.append(name)


def everything(model: nn.Module, opt: samestep.MuonAdamW) -> dict[object, Tensor]:
    """All values and state that this rank has."""
    found: dict[object, Tensor] = {}
    for name, param in model.named_parameters():
        found[name] = param.to_local() if isinstance(param, DTensor) else param
        for key, tensor in opt.state.get(param, {}).items():
            found[name, key] = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return {key: tensor.detach().clone() for key, tensor in found.items()}


def same(found: dict[object, Tensor], expected: dict[object, Tensor]) -> bool:
    assert found.keys() == expected.keys()
    return all(torch.equal(found[key], expected[key]) for key in expected)


# --- layouts -------------------------------------------------------------------------------------


def fsdp(mesh=None, **options) -> nn.Module:
    model = Net()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def one_unit() -> nn.Module:
    return fully_shard(Net())


def in_bfloat16() -> nn.Module:
    """As computed in; sent as fp32 from the second micro-batch of a step on."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fsdp(mp_policy=policy)


def reduced_in(dtype) -> nn.Module:
    return fsdp(mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))


def shared() -> nn.Module:
    """One module in two places."""
    model = Net()
    model.blocks[1].up = model.blocks[0].up
    for part in (model.blocks[0].up, model.blocks[0], model.blocks[1]):
        fully_shard(part)
    return fully_shard(model)


def together() -> nn.Module:
    """Two modules in one unit."""
    model = Net()
    fully_shard([model.blocks[0], model.blocks[1]])
    return fully_shard(model)


def left_out() -> nn.Module:
    """A layer that nobody uses, beside one of the same size."""
    model = fsdp()
    model.leaves_out = True
    return model


def unused_get_zeros() -> nn.Module:
    model = left_out()
    for block in model.blocks:
        block.set_reduce_scatter_unused_params(True)
    return model


def partly_frozen() -> nn.Module:
    model = Net()
    model.blocks[1].first.requires_grad_(False)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def ordered(mesh=None) -> nn.Module:
    model = fsdp(mesh)
    use_ordered_reduction(model)
    return model


def taking_part() -> nn.Module:
    model = left_out()
    take_part(model)
    return model


class OwnReduceScatter:
    """A user's; knows what it was given."""

    def __init__(self) -> None:
        self.given = 0

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        assert input_tensor.isfinite().all()
        self.given += 1
        return dist.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group)


def with_own_collective() -> nn.Module:
    model = fsdp()
    for module in [model, *model.blocks]:
        module.set_custom_reduce_scatter(OwnReduceScatter())
    return model


def in_two_copies(shards: int = 2):
    return init_device_mesh("cpu", (2, shards), mesh_dim_names=("replicate", "shard"))


def replicated() -> nn.Module:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    model = Net()
    for block in model.blocks:
        replicate(block)
    return replicate(model)


def tensor_parallel(axis, *, sequence: bool = False) -> nn.Module:
    """sequence: every rank has a summand of the gradients of a norm."""
    model = Net(width=6, hidden=8)
    for block in model.blocks:
        parallelize_module(block, axis, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if sequence:
            block.norm = PartOfEach(block.norm, axis)
    return model


def tensor_parallel_sharded(*, sequence: bool) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    model = tensor_parallel(mesh["model"], sequence=sequence)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


class PartOfEach(nn.Module):
    """A norm of whose gradient every rank of an axis has a summand: it sees some of the batch."""

    def __init__(self, norm: nn.LayerNorm, axis) -> None:
        super().__init__()
        self.axis = axis
        for name, param in norm.named_parameters():
            placed = distribute_tensor(param.detach(), axis, [Replicate()])
            setattr(self, name, nn.Parameter(placed))

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (
            param.to_local(grad_placements=[Partial()]) for param in (self.weight, self.bias)
        )
        whole = DTensor.from_local(x, self.axis, [Replicate()], run_check=False)
        part = whole.redistribute(placements=[Shard(0)]).to_local()
        part = nn.functional.layer_norm(part, weight.shape, weight, bias)
        return DTensor.from_local(part, self.axis, [Shard(0)], run_check=False).full_tensor()


class Experts(nn.Module):
    """Matrices of which a rank has some, and a summand of what they say together."""

    def __init__(self, width: int, axis) -> None:
        super().__init__()
        whole = torch.randn(4, width, width) * 0.3
        self.experts, self.axis = nn.Parameter(distribute_tensor(whole, axis, [Shard(0)])), axis

    def forward(self, x: Tensor) -> Tensor:
        seen = DTensor.from_local(x, self.axis, [Replicate()], run_check=False)
        seen = seen.to_local(grad_placements=[Partial()])
        said = torch.einsum("eij,bj->bi", self.experts.to_local(), seen)
        said = DTensor.from_local(said, self.axis, [Partial()], run_check=False).full_tensor()
        return said.clone()  # FSDP2 warns of a module that gives a view


def experts(*, sharded: bool) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    model = Net()
    for block in model.blocks:
        block.first = Experts(model.width, mesh["expert"])
        if sharded:
            fully_shard(block.first, mesh=mesh["data"])
            fully_shard(block, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"]) if sharded else model


def copies_of_parts(*, sequence: bool = False) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    return tensor_parallel(mesh["model"], sequence=sequence)


def parts_alone(*, sequence: bool = False) -> nn.Module:
    """One model on all ranks, which see the same data."""
    axis = init_device_mesh("cpu", (2,), mesh_dim_names=("model",))["model"]
    return tensor_parallel(axis, sequence=sequence)


class Case:
    """A layout, the parameter and rank of a bad gradient, and how gradients accumulate.

    micro: each with a collective of its own ("each"), or the last one alone ("last"), or each added
    up over shards, and the last one over copies ("scattered").
    groups: ranks that see the same data; those of rank // groups.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        name: str = "blocks.1.up.weight",
        value: float = math.nan,
        *,
        rank: int = 1,
        micro: str = "",
        groups: int = 1,
        soak: bool = False,
        **options,
    ) -> None:
        self.build, self.name, self.value, self.rank = build, name, value, rank
        self.micro, self.groups, self.options = micro, groups, options
        self.is_run = SOAK or not soak

    def __str__(self) -> str:
        return f"{getattr(self.build, '__name__', self.build)}, {self.name}, {self.micro}"

    def backward(self, model: nn.Module, opt, rank: int, step: int, bad: bool = False) -> None:
        batches = 2 if self.micro else 1
        for batch in range(batches):
            spoils = bad and rank == self.rank and batch == 0
            wait = self.micro == "last" and batch == 0
            alone = nullcontext()
            if self.micro == "scattered":
                model.set_requires_all_reduce(batch > 0)
            if self.micro == "last":
                if hasattr(model, "set_requires_gradient_sync"):
                    model.set_requires_gradient_sync(not wait)
                elif wait:
                    alone = opt.no_sync()
            with alone, bad_gradient(model, self.name, self.value) if spoils else nullcontext():
                loss_of(model, rank // self.groups, 10 * step + batch).backward()


FP16 = {"value": 1e6, "reduce_dtype": torch.float16}
TWO = [
    Case(fsdp, "head.weight", -math.inf, rank=0, micro="each"),
    Case(fsdp, micro="last"),
    Case(lambda: reduced_in(torch.float16), value=1e6),
    Case(Net, **FP16),
    Case(shared, "blocks.0.up.weight"),
    Case(left_out, "blocks.1.second.weight", micro="each"),
    Case(taking_part, "blocks.1.second.weight"),
    Case(with_own_collective),
    Case(replicated),
    Case(lambda: parts_alone(sequence=True), "blocks.0.norm.weight", groups=2),
    Case(lambda: fsdp(reshard_after_forward=False), "blocks.0.norm.bias", soak=True),
    Case(fsdp, soak=True),
    Case(lambda: reduced_in(torch.bfloat16), value=math.inf, soak=True),
    Case(one_unit, "blocks.0.down.weight", rank=0, soak=True),
    Case(in_bfloat16, micro="last", soak=True),
    Case(Net, "blocks.0.norm.bias", **FP16, buffers="flat", soak=True),
    Case(together, "blocks.1.second.weight", soak=True),
    Case(left_out, "blocks.1.second.weight", soak=True),
    Case(unused_get_zeros, "blocks.0.second.weight", soak=True),
    Case(partly_frozen, "blocks.1.second.weight", soak=True),
    Case(ordered, soak=True),
    Case(lambda: fsdp(in_two_copies(1)), soak=True),
    Case(parts_alone, "blocks.0.up.weight", groups=2, soak=True),
]
THREE = [
    Case(fsdp, rank=2),
    Case(one_unit, "blocks.1.second.weight", math.inf, rank=0, soak=True),
]
SEQUENCE = {"build": lambda: tensor_parallel_sharded(sequence=True), "groups": 2}
SHARDED_EXPERTS = {"build": lambda: experts(sharded=True), "groups": 2, **EXPERTS}
EXPERTS_ALONE = {"build": lambda: experts(sharded=False), "groups": 2, **EXPERTS}
FOUR = [
    Case(lambda: fsdp(in_two_copies()), micro="scattered"),
    Case(**SEQUENCE, name="blocks.1.norm.bias", value=math.inf, rank=2, micro="last"),
    Case(**SHARDED_EXPERTS, name="blocks.1.first.experts", rank=2),
    Case(copies_of_parts, rank=2, groups=2, overlap_grad_reduce=True),
    Case(**EXPERTS_ALONE, name="blocks.1.first.experts", rank=3, soak=True),
    Case(lambda: copies_of_parts(sequence=True), "blocks.0.norm.bias", groups=2, soak=True),
    Case(fsdp, "into.weight", rank=3, soak=True),
    Case(lambda: fsdp(in_two_copies()), "head.weight", rank=2, micro="each", soak=True),
    Case(lambda: fsdp(in_two_copies()), "blocks.0.second.weight", rank=2, soak=True),
    Case(lambda: ordered(in_two_copies()), rank=3, soak=True),
    Case(lambda: tensor_parallel_sharded(sequence=False), groups=2, soak=True),
    Case(**SEQUENCE, name="blocks.0.norm.weight", soak=True),
    Case(copies_of_parts, rank=2, groups=2, soak=True),
    Case(
        copies_of_parts,
        "blocks.0.up.bias",
        math.inf,
        groups=2,
        micro="last",
        sharding="zero2",
        soak=True,
    ),
]


def outcome(rank: int, case: Case):
    """The texts of its errors; everything else is compared here, with a training without any."""

    def new(**options):
        model = case.build()
        return model, samestep.MuonAdamW(model, **OPTIONS, **case.options, **options)

    plain, reference = new()
    with Wire() as usual:
        for step in range(2):
            case.backward(plain, reference, rank, step)
            reference.step()
            reference.zero_grad()
            if step == 0:
                after_one = everything(plain, reference)
    expected = everything(plain, reference)

    model, opt = new(check_gradients=True)
    texts = []
    with Wire() as wire:
        case.backward(model, opt, rank, 0)
        opt.step()
        opt.zero_grad()
        assert same(everything(model, opt), after_one)
        good = wire.calls.copy()
        for again in range(2):  # what is void stays so until it is dropped
            if again == 0:
                case.backward(model, opt, rank, 7, bad=True)
            with pytest.raises((FloatingPointError, RankProblemError)) as caught:
                opt.step()
            assert isinstance(caught.value, FloatingPointError) == (rank == case.rank)
            texts.append(str(caught.value))
            assert same(everything(model, opt), after_one)
        opt.zero_grad()
        failed = wire.calls.copy()
        case.backward(model, opt, rank, 1)
        opt.step()
        assert wire.calls - failed == usual.calls - good
    assert same(everything(model, opt), expected)
    assert wire.bad == []
    return texts


@pytest.mark.parametrize(("world", "cases"), [(2, TWO), (3, THREE), (4, FOUR)], ids=[2, 3, 4])
def test_a_gradient_that_is_not_finite_is_named_on_all_ranks_and_sent_to_none(world, cases):
    cases = [case for case in cases if case.is_run]
    for case, of_ranks in run_cases(world, cases, outcome):
        for texts in of_ranks:
            for text in texts:
                kind = "NaN" if math.isnan(case.value) else "inf"
                assert f"the gradient of {case.name!r} on rank {case.rank} has {BAD_VALUES}" in text
                assert f"({kind})" in text
                assert ("in torch.float16" in text) == math.isfinite(case.value)


# --- until it is dropped -------------------------------------------------------------------------


def refused(opt: samestep.MuonAdamW) -> str:
    with pytest.raises((FloatingPointError, RankProblemError)) as caught:
        opt.step()
    return str(caught.value)


def drop_before_the_step(case: Case, rank: int) -> None:
    """Nobody hears of what nobody uses."""
    for to_none in (True, False):
        model, opt = case.build(), None
        opt = samestep.MuonAdamW(model, **OPTIONS, check_gradients=True)
        case.backward(model, opt, rank, 0)
        case.backward(model, opt, rank, 1, bad=True)
        opt.zero_grad(set_to_none=to_none)
        case.backward(model, opt, rank, 2)
        opt.step()


def accumulate_after_the_error(case: Case, rank: int) -> None:
    """A sum that lacks a rank's part is not used, whatever is added; zeroed, it is used again."""
    model = case.build()
    opt = samestep.MuonAdamW(model, **OPTIONS, check_gradients=True)
    case.backward(model, opt, rank, 0, bad=True)
    refused(opt)
    case.backward(model, opt, rank, 1)
    refused(opt)
    model.zero_grad(set_to_none=False)
    case.backward(model, opt, rank, 2)
    opt.step()


def another_collective_later(case: Case, rank: int) -> None:
    """One that is put in place later would not be looked at."""
    model = case.build()
    opt = samestep.MuonAdamW(model, **OPTIONS, check_gradients=True)
    if rank == 0:
        model.blocks[1].set_custom_reduce_scatter(OwnReduceScatter())
    case.backward(model, opt, rank, 0)
    with pytest.raises(RuntimeError, match=r"with 'blocks.1.norm.weight' was replaced on rank 0"):
        opt.step()


def ordered_sums_later(case: Case, rank: int) -> None:
    """Checked all the same, and in rank order."""
    found = []
    for first in (True, False):
        model = fsdp()
        if first:
            use_ordered_reduction(model)
        opt = samestep.MuonAdamW(model, **OPTIONS, check_gradients=True)
        if not first:
            use_ordered_reduction(model)
        case.backward(model, opt, rank, 0, bad=True)
        assert case.name in refused(opt)
        opt.zero_grad()
        with Wire() as wire:
            case.backward(model, opt, rank, 1)
        assert any("alltoall" in call for call in wire.calls)
        opt.step()
        found.append(everything(model, opt))
    assert same(*found)


def two_optimizers(case: Case, rank: int) -> None:
    """Of one unit: neither has all of its gradients. One that is gone does not look any more."""
    model = case.build()
    named = list(model.named_parameters())
    mine = [pair for pair in named if pair[1].ndim > 1]
    others = [pair for pair in named if pair[1].ndim == 1]
    opt = samestep.Muon(mine, lr=0.05, check_gradients=True)
    other = samestep.AdamW(others, lr=0.05, check_gradients=True)
    case.backward(model, opt, rank, 0, bad=True)
    for each in (opt, other):
        assert f"{case.name!r} on rank 1 has" in refused(each)
        each.zero_grad()
    case.backward(model, opt, rank, 0)
    opt.step()
    other.step()
    del opt, other, each
    gc.collect()
    with Wire() as wire:
        case.backward(model, None, rank, 0, bad=True)
    assert bool(wire.bad) == (rank == case.rank)


def built_after_backward(case: Case, rank: int) -> None:
    """The sum of FSDP2 is looked at too: this one has spread."""
    model = case.build()
    case.backward(model, None, rank, 0, bad=True)
    opt = samestep.MuonAdamW(model, **OPTIONS, check_gradients=True)
    assert "after FSDP2 averaged it" in refused(opt)


def test_what_becomes_of_gradients_that_fsdp2_has_not_added_up():
    jobs = [
        drop_before_the_step,
        accumulate_after_the_error,
        another_collective_later,
        ordered_sums_later,
        two_optimizers,
        built_after_backward,
    ]
    run_cases(2, jobs, lambda rank, job: job(Case(fsdp), rank))


# --- without other ranks, and where others have averaged -----------------------------------------


def test_one_process_names_the_parameter():
    case = Case(Net, "blocks.1.up.weight")
    model = case.build()
    opt = samestep.MuonAdamW(model, lr=0.05, check_gradients=True)
    before = everything(model, opt)
    with bad_gradient(model, case.name, math.nan):
        loss_of(model, 0, 0).backward()
    with pytest.raises(FloatingPointError, match=r"'blocks.1.up.weight' has 2 values that are not"):
        opt.step()
    assert same(before, everything(model, opt))
    opt.zero_grad()
    loss_of(model, 0, 0).backward()
    opt.step()


def test_averages_of_somebody_else_are_refused():
    def job(rank):
        with pytest.raises(ValueError, match="check_gradients looks at each rank's own"):
            samestep.MuonAdamW(nn.parallel.DistributedDataParallel(Net()), check_gradients=True)
        with pytest.raises(ValueError, match="check_gradients looks at each rank's own"):
            samestep.MuonAdamW(Net(), grads="reduced", check_gradients=True)

    run_forked(2, job)
