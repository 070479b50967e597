"""Gradients of DTensors that some of the ranks with copies have whole, and others lack."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import samestep
from tests.ranks import run_cases, run_forked
from tests.soak import some, twin

SHAPES = {"matrix": (8, 6), "norm": (6,)}
COPIES, CUT = Replicate(), Shard(0)


def whole(name, step, place=0):
    seed = 1000 * place + 10 * step + 100 + list(SHAPES).index(name)
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed))


def build(mesh, places, **options):
    params = {
        name: nn.Parameter(distribute_tensor(whole(name, -1), mesh, places)) for name in SHAPES
    }
    return params, samestep.MuonAdamW(list(params.items()), lr=0.1, **options)


def give(params, mesh, places, step, lacking=(), zeros=False):
    """As `places` say; None where (name, coordinate) is in `lacking`, or zeros."""
    here = tuple(mesh.get_coordinate())
    for name, param in params.items():
        missing = (name, here) in lacking
        param.grad = None
        if missing and not zeros:
            continue
        # Summands are different along their axis, and the same on ranks with copies of them.
        place = sum(at for at, kind in zip(here, places, strict=True) if kind.is_partial())
        rest = [COPIES if kind.is_partial() else kind for kind in places]
        value = whole(name, step, place)
        local = distribute_tensor(value, mesh, rest, src_data_rank=None).to_local()
        if missing:
            local = torch.zeros_like(local)
        param.grad = DTensor.from_local(
            local, mesh, places, run_check=False, shape=param.shape, stride=param.stride()
        )


def held(params):
    return {name: param.to_local().clone() for name, param in params.items()}


def stepped(params, opt):
    """Why the step was refused, which changes nothing; None: it was not."""
    before = held(params)
    try:
        opt.step()
    except RuntimeError as error:
        assert all(torch.equal(before[name], params[name].to_local()) for name in SHAPES)
        return str(error)
    return None


def trained(mesh, placed, given, lacking, **how):
    """Three steps, in the second of which ranks lack gradients: an error, or what they hold."""
    params, opt = build(mesh, placed)
    for step in range(3):
        give(params, mesh, given, step, lacking if step == 1 else (), **how)
        refused = stepped(params, opt)
        if refused is not None:
            return refused
    return held(params)


# Where copies are, how gradients come, who lacks one: it is an error that names two ranks.
ERRORS = {
    "all copies": ((4,), [COPIES], [COPIES], [("norm", (2,))], 3, 2),
    "copies of parts": ((2, 2), [COPIES, CUT], [COPIES, CUT], [("matrix", (1, 0))], 0, 2),
    "parts of copies": ((2, 2), [CUT, COPIES], [CUT, COPIES], [("matrix", (1, 0))], 3, 2),
    "copies both ways": ((2, 2), [COPIES, COPIES], [COPIES, COPIES], [("norm", (0, 1))], 3, 1),
    "beside summands": ((2, 2), [COPIES, COPIES], [Partial(), COPIES], [("norm", (1, 1))], 2, 3),
}
# All ranks with copies of a part, or of a summand, lack it: zeros stand for it.
ZEROS = {
    "of parts": ((2, 2), [COPIES, CUT], [COPIES, CUT], [("norm", (0, 1)), ("norm", (1, 1))]),
    "of summands": (
        (2, 2),
        [COPIES, COPIES],
        [Partial(), COPIES],
        [("matrix", (1, 0)), ("matrix", (1, 1))],
    ),
    "a summand": ((2, 2), [COPIES, CUT], [Partial(), CUT], [("matrix", (1, 0))]),
}


def test_a_copy_without_the_gradient_that_another_has():
    def job(rank, case):
        shape, placed, given, lacking, *_ = ERRORS[case]
        return trained(init_device_mesh("cpu", shape), placed, given, lacking)

    for case, found in run_cases(4, ERRORS, job):
        *_, ((name, _),), has, lacks = ERRORS[case]
        for text in found:
            assert isinstance(text, str), case
            assert repr(name) in text
            assert f"rank {has} has" in text
            assert f"rank {lacks}" in text


@twin
def test_all_copies_without_it():
    def job(rank, case):
        shape, placed, given, lacking = ZEROS[case]
        mesh = init_device_mesh("cpu", shape)
        return [trained(mesh, placed, given, lacking, zeros=zeros) for zeros in (True, False)]

    for case, found in run_cases(4, ZEROS, job):
        for explicit, lacking in found:
            assert not isinstance(lacking, str), (case, lacking)
            assert all(torch.equal(explicit[name], lacking[name]) for name in SHAPES), case


def averaged(data, lacking, zeros=False):
    """As `trained`, of copies along the model axis that are averaged over the data axis."""
    mesh = init_device_mesh("cpu", (data, 2), mesh_dim_names=("data", "model"))
    model = mesh["model"]
    params, opt = build(model, [COPIES])
    at, place = mesh.get_coordinate()
    for step in range(3):
        own = [(name, (place,)) for name, (*where,) in lacking if where == [at, place]]
        give(params, model, [COPIES], step + 10 * at, own if step == 1 else (), zeros=zeros)
        refused = stepped(params, opt)
        if refused is not None:
            return refused
    return held(params)


@twin
@pytest.mark.parametrize(("data", "lacks", "has"), some([(2, (1, 0), 3), (3, (2, 1), 4)]))
def test_copies_whose_gradients_the_optimizer_averages(data, lacks, has):
    """One of two ranks with the same data; where both have none, other data are averaged in."""

    def job(rank):
        both = [("norm", (0, 0)), ("norm", (0, 1))]
        return (
            averaged(data, [("norm", lacks)]),
            averaged(data, both),
            averaged(data, both, zeros=True),
        )

    for text, found, explicit in run_forked(2 * data, job):
        assert "'norm'" in text
        assert f"rank {has} has" in text
        assert f"rank {2 * lacks[0] + lacks[1]}," in text
        assert all(torch.equal(found[name], explicit[name]) for name in SHAPES)


@twin
def test_fsdp_with_copies():
    """HSDP: somebody drops a gradient on one rank."""

    def job(rank):
        torch.manual_seed(0)
        model = nn.Linear(6, 8)
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts")))
        opt = samestep.MuonAdamW(model, lr=0.1)
        for step in range(2):
            torch.manual_seed(10 * step + rank)
            model(torch.randn(5, 6)).square().sum().backward()
            if step and rank == 1:
                model.bias.grad = None
            try:
                opt.step()
            except RuntimeError as error:
                return step, str(error)
            opt.zero_grad()
        return None

    for step, text in run_forked(4, job):
        assert step == 1
        assert text.startswith("rank 3 has the gradient of 'bias', and rank 1,")


def test_a_summand_beside_a_whole_gradient():
    """The ranks with summands would wait for one that has none to give."""

    def job(rank):
        mesh = init_device_mesh("cpu", (3,))
        params, opt = build(mesh, [COPIES])
        give(params, mesh, [Partial() if rank == 1 else COPIES], 0)
        with pytest.raises(RuntimeError, match=r"rank 2 has .*'matrix', and rank 1, .*Partial"):
            opt.step()

    run_forked(3, job)


@twin
def test_averaged_by_somebody_else():
    """Plain parameters, and in whatever way the work on them is shared."""

    def job(rank, sharding):
        params = {name: nn.Parameter(whole(name, -1)) for name in SHAPES}
        opt = samestep.MuonAdamW(
            list(params.items()), lr=0.1, grads="reduced", sharding=sharding, crossover=1
        )
        for step in range(3):
            for name, param in params.items():
                param.grad = whole(name, step) if step != 1 else None
            if step == 2 and rank == 1:
                params["norm"].grad = None
            try:
                opt.step()
            except RuntimeError as error:
                return step, str(error)
        return None

    for case, found in run_cases(3, ["none", "zero1"], job):
        for step, text in found:
            assert step == 2, case
            assert text.startswith("rank 2 has the gradient of 'norm', and rank 1,")
            assert 'grads="reduced"' in text


@twin
def test_ranks_that_hold_none_of_it_do_not_step_either():
    """Copies along the model axis of which others are elsewhere, beside plain parameters of all."""

    def job(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        model = mesh["model"]
        params, _ = build(model, [COPIES])
        params["plain"] = nn.Parameter(torch.ones(5))
        opt = samestep.MuonAdamW(list(params.items()), lr=0.1, grads="reduced")
        give({name: params[name] for name in SHAPES}, model, [COPIES], 0)
        params["plain"].grad = torch.ones(5)
        if rank == 1:
            params["norm"].grad = None
        with pytest.raises(RuntimeError) as caught:
            opt.step()
        assert torch.equal(params["plain"], torch.ones(5))
        return str(caught.value)

    first, second, *others = run_forked(4, job)
    assert first == second
    assert first.startswith("rank 0 has the gradient of 'norm', and rank 1,")
    assert all(text.startswith("rank 1 could not take the step") for text in others)


# --- as numbers ----------------------------------------------------------------------------------
