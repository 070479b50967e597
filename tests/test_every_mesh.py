"""Copies and parts as two questions: DTensors of which other meshes hold copies, in every layout.

Gradients are given by hand, different ones on every data rank, against one process that has their
mean; where they are the same on all data ranks, every bit must be that of one process.
"""

from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import samestep
from samestep.comm.meshes import held, mesh_group
from samestep.rules.muon import MuonRule
from tests.counting_group import counted
from tests.ranks import run_cases, run_forked
from tests.soak import SOAK, some, twin, twin_cases

STEPS = 4 if SOAK else 2  # the second has momentum and variance


class Lies(NamedTuple):
    """How a parameter lies along the expert and the model axis, and what its gradients are."""

    shape: tuple[int, ...]
    expert: object = None  # None: the expert axis has copies of it
    model: object = None  # None: it is a plain tensor
    partial: bool = False
    rule: str = "muon"
    split: tuple[int, ...] | None = None


PARAMS = {
    "column": Lies((12, 8), model=Shard(0)),
    "row": Lies((8, 12), model=Shard(1)),
    "qkv": Lies((18, 8), model=Shard(0), split=(6, 6, 6)),
    "by_columns": Lies((12, 8), model=Shard(1), split=(4, 8)),
    "uneven": Lies((7, 5), model=Shard(0)),
    "router": Lies((4, 8), model=Replicate(), partial=True),
    "stack": Lies((4, 6, 8), expert=Shard(0), model=Shard(1)),
    "stack_of_heads": Lies((2, 8, 6), expert=Shard(0), model=Shard(2), split=(4, 4)),
    "norm": Lies((8,), model=Replicate(), partial=True, rule="adamw"),
    "bias": Lies((13,), model=Shard(0), rule="adamw"),
    "embedding": Lies((30, 8), model=Shard(1), rule="adamw"),
    "plain": Lies((6, 10)),
    "plain_norm": Lies((10,), rule="adamw"),
}
EVEN = {name: lies for name, lies in PARAMS.items() if name not in ("uneven", "bias", "qkv")}

LAYOUTS = {
    "none": {"sharding": "none"},
    "zero1": {"sharding": "zero1"},
    "zero2": {},
    "cyclic": {"owners": "cyclic", "chunks_ahead": 0},
    "gather": {"muon_schedule": "gather"},
    "flat zero1": {"buffers": "flat", "sharding": "zero1"},
    "flat zero2": {"buffers": "flat"},
}
# Where it is the same code that would fail in all of them.
FEW = LAYOUTS if SOAK else {name: LAYOUTS[name] for name in ("none", "zero2", "flat zero1")}
MOST = LAYOUTS if SOAK else {**FEW, "cyclic": LAYOUTS["cyclic"], "gather": LAYOUTS["gather"]}
SHARED = {name: options for name, options in FEW.items() if SOAK or name != "none"}
# Several buckets, some of one parameter, and several chunks.
SMALL = {"crossover": 12, "bucket_size": 60 if SOAK else 150, "chunk_size": 100, "waves": 2}
NORMUON = {"lr": 0.03, "variance_beta2": 0.9, "weight_decay": 0.1}


def value_of(name, dtype=torch.float32):
    generator = torch.Generator().manual_seed(len(name) * 1000 + sum(map(ord, name)))
    return torch.randn(PARAMS[name].shape, generator=generator).to(dtype)


def gradient_of(name, step, data, dtype=torch.float32):
    generator = torch.Generator().manual_seed(7919 * step + 104729 * data + sum(map(ord, name)))
    return torch.randn(PARAMS[name].shape, generator=generator).to(dtype)


def groups_of(params, names, **options):
    """One group per rule and split."""
    kinds = {}
    for name in names:
        kinds.setdefault((PARAMS[name].rule, PARAMS[name].split), []).append((name, params[name]))
    return [
        {"params": members, "rule": rule, **({"split_sizes": split} if split else {}), **options}
        for (rule, split), members in kinds.items()
    ]


def optimizer(params, names, **options):
    of_groups = {key: options.pop(key) for key in ("lr", "weight_decay") if key in options}
    groups = groups_of(params, names, **of_groups)
    beta2 = options.pop("variance_beta2", None)
    for group in groups:
        if group["rule"] == "muon" and beta2 is not None:
            group["variance_beta2"] = beta2
    return samestep.MuonAdamW(groups, **options)


def present(name, step, data, some):
    """Which data rank has a gradient of a parameter, where some are missing."""
    if not some:
        return True
    number = sum(map(ord, name)) + step
    return number % 4 != 0 and (number + data) % 3 != 0


def one_process(names, copies, *, same=False, some=False, dtype=torch.float32, **options):
    """The reference: the mean of all data ranks; of the last step its metrics too."""
    params = {name: nn.Parameter(value_of(name, dtype)) for name in names}
    opt = optimizer(params, names, **options)
    for step in range(STEPS):
        for name, param in params.items():
            ranks = [0] * copies if same else range(copies)
            having = [d for d in ranks if present(name, step, d, some)]
            param.grad = None
            if having:
                found = [gradient_of(name, step, d, dtype) for d in having]
                param.grad = found[0] if same else torch.stack(found).sum(0) / copies
        opt.step()
    return opt


def laid_out(names, sizes, dtype=torch.float32):
    """Parameters on a mesh (data, expert, model), and the number of data ranks."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "expert", "model"))
    params = {}
    for name in names:
        lies, value = PARAMS[name], value_of(name, dtype)
        axes = {"expert": lies.expert, "model": lies.model}
        own = {axis: place for axis, place in axes.items() if place is not None}
        if own:
            inner = mesh[tuple(own)]
            whole = DTensor.from_local(value, inner, [Replicate()] * len(own), run_check=False)
            value = whole.redistribute(inner, list(own.values()))
        params[name] = nn.Parameter(value)
    return mesh, params


def data_rank(mesh, lies):
    """Experts see the tokens of all expert ranks; everyone else those of its own."""
    data, expert, _ = mesh.get_coordinate()
    return data if lies.expert is not None else data * mesh.size(1) + expert


def put_gradients(mesh, params, step, *, same=False, some=False):
    """What a backward pass would leave on this rank."""
    model = mesh.get_local_rank("model")
    for name, param in params.items():
        lies = PARAMS[name]
        ranks = mesh.size(1)
        param.grad = None
        if lies.expert is not None:  # the mean over the expert ranks that share this data rank
            data = mesh.get_local_rank("data")
            mine = [data * ranks + e for e in range(ranks)]
        else:
            mine = [data_rank(mesh, lies)]
        having = [d for d in mine if present(name, step, 0 if same else d, some)]
        if not having:
            continue
        found = [gradient_of(name, step, 0 if same else d, param.dtype) for d in having]
        whole = found[0] if same else torch.stack(found).sum(0) / len(mine)
        if not isinstance(param, DTensor):
            param.grad = whole
            continue
        ranks_of_mesh = mesh_group(param.device_mesh)
        box = held(param.detach(), ranks_of_mesh).boxes[ranks_of_mesh.rank]
        local, placements = whole[box.slices].clone(), list(param.placements)
        if lies.partial:  # every rank of the model axis has a summand
            size = mesh.size(2)
            noise = torch.arange(local.numel(), dtype=local.dtype).view(local.shape) % 3
            share = noise * (model + 1)
            rest = noise * sum(range(2, size + 1))
            local = local - rest if model == 0 else share
            if same and size > 1:  # exact: one has all of it
                local = whole[box.slices].clone() if model == 0 else torch.zeros_like(local)
            placements[-1] = Partial()
        param.grad = DTensor.from_local(
            local, param.device_mesh, placements, run_check=False,
            shape=param.shape, stride=param.stride(),
        )  # fmt: skip


def snapshot(opt):
    names = [name for group in opt.param_groups for name in group["param_names"]]
    found = {name: opt.full_parameter(name) for name in names}
    for name, state in opt.whole_state().items():
        found |= {f"{name}.{key}": tensor.clone() for key, tensor in state.items()}
    return found


def trained(names, sizes, *, same=False, some=False, dtype=torch.float32, **options):
    mesh, params = laid_out(names, sizes, dtype)
    opt = optimizer(params, names, **options)
    for step in range(STEPS):
        put_gradients(mesh, params, step, same=same, some=some)
        opt.step()
    return mesh, params, opt


def names_for(options):
    return list(EVEN if options.get("buffers") == "flat" else PARAMS)


MESHES = [(2, 1, 2), (2, 2, 1), (3, 1, 1), *([(2, 2, 2), (3, 1, 2)] if SOAK else [])]


@twin
@pytest.mark.parametrize("sizes", some(MESHES, every=4), ids=str)
def test_layouts_are_one_process(sizes):
    """Different gradients on every data rank, some of them summands, momentum and variance on."""
    world, copies = sizes[0] * sizes[1] * sizes[2], sizes[0] * sizes[1]

    def job(rank, layout):
        options = {**NORMUON, **SMALL, **LAYOUTS[layout]}
        return snapshot(trained(names_for(options), sizes, **options)[2])

    # All of them: test_copies.py of the harness.
    layouts = (
        FEW if SOAK or sizes == MESHES[0] else ["flat zero1" if sizes == MESHES[1] else "zero2"]
    )
    reference_of = cache(lambda *names: snapshot(one_process(list(names), copies, **NORMUON)))
    for layout, of_ranks in run_cases(world, layouts, job):
        reference = reference_of(*names_for(LAYOUTS[layout]))
        for found in of_ranks:
            assert found.keys() == reference.keys()
            for key in found:
                assert torch.equal(found[key], of_ranks[0][key]), (layout, key)
                error = (found[key].double() - reference[key].double()).abs().max()
                assert error < 2e-5, (layout, key, error)


@pytest.mark.parametrize("sizes", [(2, 1, 2), (2, 2, 1)] if SOAK else [(2, 1, 2)], ids=str)
def test_from_equal_gradients_all_bits_are_those_of_one_process(sizes):
    world, copies = sizes[0] * sizes[1] * sizes[2], sizes[0] * sizes[1]

    def job(rank, layout):
        options = {**NORMUON, **SMALL, **LAYOUTS[layout], "max_grad_norm": 1e6}
        return snapshot(trained(names_for(options), sizes, same=True, **options)[2])

    @cache
    def reference_of(*names):
        return snapshot(one_process(list(names), copies, same=True, **NORMUON))

    for layout, of_ranks in run_cases(world, MOST if sizes == MESHES[0] else FEW, job):
        reference = reference_of(*names_for(LAYOUTS[layout]))
        for key, found in of_ranks[0].items():
            assert torch.equal(found, reference[key]), (layout, key)


@twin
def test_gradients_that_are_missing_on_some_ranks():
    """Of parts and of summands too; what nobody has is left as it was, bit for bit."""
    sizes = (2, 2, 1)

    def job(rank, layout):
        options = {**NORMUON, **SMALL, **LAYOUTS[layout]}
        opt = trained(names_for(options), sizes, some=True, **options)[2]
        return snapshot(opt), opt.metrics()["present"].tolist()

    for layout, of_ranks in run_cases(4, SHARED, job):
        alone = one_process(names_for(LAYOUTS[layout]), 4, some=True, **NORMUON)
        reference = snapshot(alone)
        for found, count in of_ranks:
            assert count == alone.metrics()["present"].tolist()
            for key in found:
                error = (found[key].double() - reference[key].double()).abs().max()
                assert error < 2e-5, (layout, key, error)


@twin
def test_norm_and_sizes_count_every_element_once():
    sizes, options = (2, 1, 2), {**NORMUON, "max_grad_norm": 0.5, "update_rms": True}

    def job(rank, layout):
        own = {**options, **SMALL, **LAYOUTS[layout]}
        opt = trained(names_for(own), sizes, **own)[2]
        return {key: value.double() for key, value in opt.metrics().items()}, snapshot(opt)

    for layout, of_ranks in run_cases(4, SHARED, job):
        alone = one_process(names_for(LAYOUTS[layout]), 2, **options)
        for metrics, found in of_ranks:
            for key in ("grad_norm", "update_rms"):
                expected = alone.metrics()[key].double()
                torch.testing.assert_close(metrics[key], expected, rtol=2e-5, atol=0)
            for key, value in snapshot(alone).items():
                assert (found[key].double() - value.double()).abs().max() < 2e-5, (layout, key)


@twin
def test_a_gradient_that_is_not_finite_skips_the_step_on_every_rank():
    names, sizes = list(PARAMS), (2, 1, 2)

    def job(rank):
        mesh, params = laid_out(names, sizes)
        opt = optimizer(params, names, max_grad_norm=1.0, **SMALL)
        before = snapshot(opt)
        put_gradients(mesh, params, 0)
        if rank == 3:
            params["column"].grad.to_local()[0, 0] = torch.nan
        opt.step()
        after = snapshot(opt)
        return all(torch.equal(before[key], after[key]) for key in before)

    assert all(run_forked(4, job))


@twin
def test_master_weights_of_bfloat16():
    sizes, options = (2, 1, 2), {**NORMUON, "master_weights": True}

    def job(rank, layout):
        own = {**options, **SMALL, **LAYOUTS[layout], "reduce_dtype": torch.float32}
        return snapshot(trained(names_for(own), sizes, same=True, dtype=torch.bfloat16, **own)[2])

    for layout, of_ranks in run_cases(4, SHARED, job):
        names = names_for(LAYOUTS[layout])
        reference = snapshot(one_process(names, 2, same=True, dtype=torch.bfloat16, **options))
        for key, found in of_ranks[0].items():
            assert torch.equal(found, reference[key]), (layout, key)


@twin
def test_every_block_is_orthogonalized_once(monkeypatch):
    """Counted over all ranks; where every rank keeps all, once per data rank."""
    blocks = []
    transform = MuonRule.transform

    def counting(self, given, *args):
        blocks.append(tuple(given.shape))
        return transform(self, given, *args)

    monkeypatch.setattr(MuonRule, "transform", counting)
    cut = {name for name, lies in PARAMS.items() if lies.rule == "muon" and lies.model is not None}

    def job(rank, layout):
        own = {**SMALL, **LAYOUTS[layout]}
        names = [name for name in names_for(own) if name in cut]
        mesh, params = laid_out(names, (2, 1, 2))
        opt = optimizer(params, names, **own)
        put_gradients(mesh, params, 0)
        blocks.clear()
        opt.step()
        return sum(shape[0] for shape in blocks)

    for layout, counts in run_cases(4, LAYOUTS, job):
        names = [name for name in names_for(LAYOUTS[layout]) if name in cut]
        times = {"none": 2, "gather": 2}.get(layout, 1)
        expected = sum(
            len(PARAMS[n].split or (1,)) * (PARAMS[n].shape[0] if len(PARAMS[n].shape) == 3 else 1)
            for n in names
        )
        assert sum(counts) == times * expected, layout
        assert min(counts) > 0, layout


# --- state and checkpoints -----------------------------------------------------------------------

PLACES = {
    "tp zero2": ((2, 1, 2), {}),
    "tp flat": ((2, 1, 2), {"buffers": "flat", "sharding": "zero1"}),
    "ep none": ((2, 2, 1), {"sharding": "none"}),
    "plain": ((4, 1, 1), {}),
    "tp alone": ((1, 1, 4), {}),
}


@twin
def test_checkpoints_between_meshes_are_bit_equal(tmp_path):
    names, options = list(EVEN), {**NORMUON, **SMALL}

    def job(rank):
        found = {}
        for name, (sizes, own) in PLACES.items():
            _, params, opt = trained(names, sizes, same=True, **options, **own)
            samestep.save(tmp_path / name, nn.ParameterDict(params), opt)
            found[name] = snapshot(opt)
        for place, saved in enumerate(PLACES):
            for name, (sizes, own) in PLACES.items():
                if not SOAK and list(PLACES)[(place + 1) % len(PLACES)] != name:
                    continue  # each into the next
                _, params = laid_out(names, sizes)
                opt = optimizer(params, names, **options, **own)
                samestep.load(tmp_path / saved, nn.ParameterDict(params), opt)
                loaded = snapshot(opt)
                for key, value in found[saved].items():
                    assert torch.equal(loaded[key], value), (saved, name, key)
        return True

    assert all(run_forked(4, job))


def test_state_dicts_of_every_layout_go_on_exactly():
    names, sizes = list(EVEN)[:: 1 if SOAK else 2], (2, 1, 2)

    def job(rank, layout):
        options = {**NORMUON, **SMALL, **LAYOUTS[layout], "state_dict_form": "part"}
        mesh, params, opt = trained(names, sizes, **options)
        saved = opt.state_dict()
        placed = {type(t) for state in saved["state"].values() for t in state.values()}
        _, fresh_params = laid_out(names, sizes)
        fresh = optimizer(fresh_params, names, **options)
        with torch.no_grad():
            for name, param in fresh_params.items():
                param.copy_(params[name])
        fresh.load_state_dict(saved)
        for own, of_params in ((opt, params), (fresh, fresh_params)):
            put_gradients(mesh, of_params, STEPS)
            own.step()
        same = snapshot(opt), snapshot(fresh)
        return all(torch.equal(same[0][key], same[1][key]) for key in same[0]), DTensor in placed

    for layout, of_ranks in run_cases(4, FEW, job):
        keeps_all = layout == "none"  # what torch's own checkpoints can take
        assert of_ranks == [(True, keeps_all)] * 4, layout


@twin
def test_the_state_of_one_process_is_taken_along(tmp_path):
    names, sizes = list(EVEN), (2, 1, 2)
    alone = one_process(names, 2, same=True, **NORMUON)
    whole, reference = alone.state_dict(), snapshot(alone)

    def job(rank, layout):
        _, params = laid_out(names, sizes)
        opt = optimizer(params, names, **NORMUON, **SMALL, **LAYOUTS[layout])
        opt.load_state_dict(whole)
        found = snapshot(opt)
        return all(torch.equal(found[key], reference[key]) for key in reference if "." in key)

    for layout, same in run_cases(4, SHARED, job):
        assert all(same), layout


def test_whole_gradients_are_read_and_set():
    names, sizes = list(EVEN), (2, 1, 2)

    def job(rank):
        mesh, params = laid_out(names, sizes)
        opt = optimizer(params, names, **NORMUON, **SMALL)
        put_gradients(mesh, params, 0)
        found = {name: opt.full_gradient(name) for name in names}
        for name in names:
            opt.set_full_gradient(name, gradient_of(name, 0, 0))
        opt.step()
        return found, snapshot(opt)

    params = {name: nn.Parameter(value_of(name)) for name in names}
    alone = optimizer(params, names, **NORMUON)
    for name, param in params.items():
        param.grad = gradient_of(name, 0, 0)
    alone.step()
    for found, after in run_forked(4, job):
        for name, mean in found.items():
            expected = (gradient_of(name, 0, 0) + gradient_of(name, 0, 1)) / 2
            torch.testing.assert_close(mean, expected, rtol=0, atol=2e-6)
        for key, value in snapshot(alone).items():
            assert (after[key].double() - value.double()).abs().max() < 2e-5, key


@twin_cases("2-flat zero1")
@pytest.mark.parametrize(
    ("data", "layout"),
    some(
        [
            (1, "none"),
            (2, "zero2"),
            (2, "flat zero1"),
            *([(1, "zero2"), (2, "none")] if SOAK else []),
        ]
    ),
)
def test_gradients_that_are_whole_on_every_rank_are_cut(layout, data):
    """As `torch.zeros_like` and autograd give them in some versions of torch."""
    names = ["column", "row", "embedding"]

    def job(rank):
        found = []
        for whole in (False, True):
            mesh, params = laid_out(names, (data, 1, 2))
            opt = optimizer(params, names, **LAYOUTS[layout])
            put_gradients(mesh, params, 0)
            for param in params.values():
                if whole:
                    param.grad = param.grad.redistribute(placements=[Replicate()])
            opt.step()
            found.append(snapshot(opt))
        return found

    for usual, cut in run_forked(2 * data, job):
        assert usual.keys() == cut.keys()
        assert all(torch.equal(usual[key], cut[key]) for key in usual)


# --- refused -------------------------------------------------------------------------------------


def test_a_gradient_that_lies_otherwise_is_refused_on_every_rank():
    names = ["column", "row"]

    def job(rank):
        mesh, params = laid_out(names, (2, 1, 2))
        opt = optimizer(params, names)
        put_gradients(mesh, params, 0)
        if rank == 1:
            params["row"].grad = params["row"].grad.redistribute(placements=[Shard(0)])
        elif rank == 0:  # which takes part in it
            params["row"].grad.redistribute(placements=[Shard(0)])
        with pytest.raises(RuntimeError) as caught:
            opt.step()
        return str(caught.value)

    told = run_forked(4, job)
    assert "the gradient of 'row' on rank 1 is (Shard(dim=0),)" in told[1]
    assert "redistribute it first" in told[1]
    for rank in (0, 2, 3):
        assert "rank 1 could not take the step because of parameter 'row'" in told[rank]


@twin
def test_flat_buffers_want_equal_parts():
    def job(rank):
        _, params = laid_out(["column", "qkv"], (2, 1, 2))
        with pytest.raises(ValueError, match=r"'qkv'.*not equal.*per_parameter"):
            optimizer(params, ["column", "qkv"], buffers="flat")
        return True

    assert all(run_forked(4, job))


def test_a_process_group_without_the_other_parts_is_refused():
    def job(rank):
        mesh, params = laid_out(["column"], (2, 1, 2))
        with pytest.raises(ValueError, match="give process_group= all ranks"):
            optimizer(params, ["column"], process_group=mesh["data"].get_group())
        return True

    assert all(run_forked(4, job))


@twin
def test_bytes_are_the_least_possible_and_parts_of_blocks():
    """Counted over all ranks of a step.

    A reduce-scatter and an all-gather of every part, over its copies; and each block's parts once
    to its owner, and back.
    """
    names = ["column", "row", "by_columns", "embedding", "stack"]
    data, model = 2, 2

    def job(rank):
        with counted():
            mesh, params = laid_out(names, (data, 1, model))
            opt = optimizer(params, names, bucket_size=200, crossover=1)
            put_gradients(mesh, params, 0)
            with counted() as log:
                opt.step()
        floats = [call for call in log if call.dtype == torch.float32]
        return sum(call.sent for call in floats)

    found = run_forked(data * model, job)
    whole = sum(torch.Size(PARAMS[name].shape).numel() for name in names)
    between_copies = 2 * (data - 1) * whole
    blocks = [name for name in names if PARAMS[name].rule == "muon"]
    parts = (
        2 * sum(torch.Size(PARAMS[name].shape).numel() for name in blocks) * (model - 1) // model
    )
    assert sum(found) == 4 * (between_copies + parts)
