"""Matrices inside fused weights, however these are stored and sharded, move as separate ones do."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import samestep
from samestep.layout.blocks import blocks_of
from tests.ranks import run_cases, run_forked
from tests.soak import SOAK, twin
from tests.splits import FUSED, RATES, values
from tests.test_sharded_more import different, snapshot

STEPS = 3


def optimizer(named, **options):
    """Muon on everything, cut as `FUSED` says."""
    overrides = {name: {"rule": "muon", **FUSED[name].options} for name in named}
    return samestep.MuonAdamW(named.items(), lr=0.05, overrides=overrides, **options)


def parameters(place=lambda tensor: tensor):
    return {name: nn.Parameter(place(tensor)) for name, tensor in values(0).items()}


def trained(options, gradients):
    """One process: what `gradients(step)` gives, for some steps."""
    named = parameters()
    opt = optimizer(named, **options)
    for step in range(1, STEPS + 1):
        for name, grad in gradients(step).items():
            named[name].grad = grad
        opt.step()
    return opt


# --- one process, against separate matrices ------------------------------------------------------


@pytest.mark.parametrize("rates", RATES)
def test_fused_weights_move_as_separate_ones_do(rates):
    opt = trained(RATES[rates], values)
    apart = {
        f"{name} {number}": nn.Parameter(matrix)
        for name, tensor in values(0).items()
        for number, matrix in enumerate(FUSED[name].apart(tensor))
    }
    overrides = {"*": {"rule": "muon"}}
    separate = samestep.MuonAdamW(apart.items(), lr=0.05, overrides=overrides, **RATES[rates])
    for step in range(1, STEPS + 1):
        for name, grad in values(step).items():
            for number, matrix in enumerate(FUSED[name].apart(grad)):
                apart[f"{name} {number}"].grad = matrix
        separate.step()
    state = separate.whole_state()
    for name, of in FUSED.items():
        matrices = of.apart(opt.full_parameter(name))
        momenta = of.apart(opt.whole_state()[name]["momentum_buffer"])
        assert len(matrices) == len(of.rows) * (of.shape[0] if len(of.shape) == 3 else 1)
        for number, (matrix, momentum) in enumerate(zip(matrices, momenta, strict=True)):
            own = f"{name} {number}"
            assert torch.equal(matrix, apart[own]), own
            assert torch.equal(momentum, state[own]["momentum_buffer"]), own
        if "variance_beta2" in RATES[rates]:
            variances = [state[f"{name} {n}"]["variance"] for n in range(len(matrices))]
            assert torch.equal(opt.whole_state()[name]["variance"], torch.cat(variances)), name


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.bfloat16, {"master_weights": True, **RATES["keller"]}),
        (torch.bfloat16, {"state_dtypes": {"momentum_buffer": torch.half}, "master_weights": True}),
        (torch.float32, {"maximize": True, "max_grad_norm": 1.0, **RATES["nanochat"]}),
        (torch.float64, {"batch_elements": 50}),
        (torch.float32, {"compile": "eager", **RATES["nanochat"]}),  # takes half a minute
    ][: 5 if SOAK else 4],
    ids=["masters", "state", "clipped", "batches", "compiled"][: 5 if SOAK else 4],
)
def test_whatever_else_is_asked_for(dtype, options):
    named = {name: nn.Parameter(tensor.to(dtype)) for name, tensor in values(0).items()}
    opt = optimizer(named, **options)
    apart = {
        f"{name} {number}": nn.Parameter(matrix)
        for name, param in named.items()
        for number, matrix in enumerate(FUSED[name].apart(param.detach()))
    }
    rules = {"*": {"rule": "muon"}}
    separate = samestep.MuonAdamW(apart.items(), lr=0.05, overrides=rules, **options)
    for step in range(1, STEPS + 1):
        for name, grad in values(step).items():
            named[name].grad = grad.to(dtype)
            for number, matrix in enumerate(FUSED[name].apart(grad.to(dtype))):
                apart[f"{name} {number}"].grad = matrix
        opt.step()
        separate.step()
    for name, of in FUSED.items():
        for number, matrix in enumerate(of.apart(named[name].detach())):
            assert torch.equal(matrix, apart[f"{name} {number}"]), (name, number)


def test_fused_weights_do_not_move_as_a_whole():
    """What the test above compares is not the same anyway."""
    named, whole = parameters(), parameters()
    opt = optimizer(named)
    for name, param in whole.items():
        named[name].grad, param.grad = values(1)[name], values(1)[name]
    plain = samestep.MuonAdamW(whole.items(), lr=0.05, overrides={"*": {"rule": "muon"}})
    opt.step()
    plain.step()
    alike = [name for name in named if torch.allclose(named[name], whole[name], atol=1e-4)]
    # A stored orientation changes nothing but rates, and those only where they know tall from wide.
    assert alike == ["stored tall", "stored wide", "experts down"]


# --- several ranks ------------------------------------------------------------------------------

REPLICATED = {
    "zero2": {"sharding": "zero2"},
    "zero1, small buckets": {"sharding": "zero1", "bucket_size": 64},
    "flat": {"buffers": "flat"},
    "flat, overlap": {"buffers": "flat", "overlap_grad_reduce": True},
    "none": {"sharding": "none"},
}


def mean_of(ranks):
    def gradients(step):
        of_ranks = [values(step, rank) for rank in range(ranks)]
        return {name: sum(of[name] for of in of_ranks) / ranks for name in FUSED}

    return gradients


@twin
def test_copies_on_several_ranks_have_the_bits_of_one_process():
    cases = [(rates, layout) for rates in RATES for layout in REPLICATED]
    cases = cases if SOAK else cases[::2]
    for ranks in (2, 3) if SOAK else (2,):
        expected = {rates: snapshot(trained(RATES[rates], mean_of(ranks))) for rates in RATES}

        def job(rank, case):
            named = parameters()
            options = {**RATES[case[0]], **REPLICATED[case[1]], "crossover": 1}
            opt = optimizer(named, reduction="ordered", **options)
            for step in range(1, STEPS + 1):
                own = values(step, rank)
                sum((param * own[name]).sum() for name, param in named.items()).backward()
                opt.step()
                opt.zero_grad()
            return snapshot(opt)

        for case, of_ranks in run_cases(ranks, cases, job):
            for rank, found in enumerate(of_ranks):
                assert different(found, expected[case[0]]) == [], (case, rank)


def sharded(ranks, dims, options):
    """Some steps on DTensors that are cut in a dim, from gradients that are there whole."""
    mesh = init_device_mesh("cpu", (ranks,))

    def place(tensor):
        return distribute_tensor(tensor, mesh, [Shard(dims % tensor.ndim)])

    named = parameters(place)
    opt = optimizer(named, **options)
    for step in range(1, STEPS + 1):
        for name, grad in values(step).items():
            named[name].grad = place(grad)
        opt.step()
    return opt


def test_parts_on_several_ranks_have_the_bits_of_one_process():
    """Cut anywhere: between heads or inside of them, by rows, columns or experts."""
    ways = ({}, {"muon_schedule": "gather"}, {"bucket_size": 50})
    cases = [(rates, dim, way) for rates in RATES for dim in (0, 1, -1) for way in ways]
    expected = {rates: snapshot(trained(RATES[rates], values)) for rates in RATES}
    for ranks in (2, 3, 4) if SOAK else (2, 3):
        results = run_cases(
            ranks,
            cases if SOAK else cases[4 * (ranks - 2) :: 12],
            lambda _, case, n=ranks: snapshot(sharded(n, case[1], {**RATES[case[0]], **case[2]})),
        )
        for case, of_ranks in results:
            for rank, found in enumerate(of_ranks):
                assert different(found, expected[case[0]]) == [], (ranks, case, rank)


@twin
def test_parts_that_two_axes_cut_have_the_bits_of_one_process():
    """Tensor parallel by one dim under FSDP2 by another, or by the same."""
    ways = {"rows and columns": (Shard(0), Shard(1)), "rows twice": (Shard(0), Shard(0))}

    def job(_rank, way):
        mesh = init_device_mesh("cpu", (2, 2))

        def place(tensor):
            return distribute_tensor(tensor, mesh, list(ways[way]))

        named = parameters(place)
        opt = optimizer(named, **RATES["nanochat"])
        for step in range(1, STEPS + 1):
            for name, grad in values(step).items():
                named[name].grad = place(grad)
            opt.step()
        return snapshot(opt)

    expected = snapshot(trained(RATES["nanochat"], values))
    for way, of_ranks in run_cases(4, ways, job):
        for found in of_ranks:
            assert different(found, expected) == [], way


@twin
def test_copies_of_parts_have_the_bits_of_one_process():
    """Two meshes of two ranks, whose gradients are averaged here."""
    even = [name for name in FUSED if FUSED[name].shape[0] % 2 == 0]

    def job(_rank, case):
        rates, layout = case
        # Flat buffers need even shares of every block, and "halves" are blocks of one rank each.
        names = [n for n in even if layout != "flat" or n not in ("halves", "heads")]
        world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        place = world.get_local_rank("data")

        def placed(tensor):
            return distribute_tensor(tensor, world["model"], [Shard(0)])

        named = {name: nn.Parameter(placed(values(0)[name])) for name in names}
        opt = optimizer(named, reduction="ordered", **RATES[rates], **REPLICATED[layout])
        for step in range(1, STEPS + 1):
            for name in names:
                named[name].grad = placed(values(step, place)[name])
            opt.step()
            opt.zero_grad()
        return snapshot(opt)

    expected = {rates: snapshot(trained(RATES[rates], mean_of(2))) for rates in RATES}
    cases = [("default", "zero2"), ("nanochat", "zero2"), ("keller", "none"), ("keller", "flat")]
    for case, of_ranks in run_cases(4, cases, job):
        for rank, found in enumerate(of_ranks):
            own = {name: expected[case[0]][name] for name in found}
            assert different(found, own) == [], (case, rank)


# --- checkpoints between layouts ------------------------------------------------------------------


class Weights(nn.Module):
    def __init__(self, place=lambda tensor: tensor):
        super().__init__()
        for name, tensor in values(0).items():
            self.register_parameter(name.replace(" ", "_"), nn.Parameter(place(tensor)))


def placed_model(layout, ranks):
    if layout == "parts":
        mesh = init_device_mesh("cpu", (ranks,))
        return Weights(lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)])), {}
    return Weights(), {"one": {}, **REPLICATED}[layout]


def stepped(model, opt, steps):
    for step in steps:
        for name, grad in values(step).items():
            param = getattr(model, name.replace(" ", "_"))
            if isinstance(param, torch.distributed.tensor.DTensor):
                grad = distribute_tensor(grad, param.device_mesh, param.placements)
            param.grad = grad
        opt.step()
        opt.zero_grad()


def made(layout, ranks):
    model, options = placed_model(layout, ranks)
    overrides = {
        name.replace(" ", "_"): {"rule": "muon", **of.options} for name, of in FUSED.items()
    }
    options = {**RATES["nanochat"], **options}
    if layout != "one":
        options["crossover"] = 1
    return model, samestep.MuonAdamW(model, lr=0.05, overrides=overrides, **options)


def test_checkpoints_go_between_layouts(tmp_path):
    """Saved after two steps in one layout, loaded in another, and a step further there."""
    model, opt = made("one", 1)
    stepped(model, opt, [1, 2, 3])
    expected = snapshot(opt)
    layouts = ["zero2", "flat", "parts"]

    def save(_rank, layout):
        model, opt = made(layout, 2)
        stepped(model, opt, [1, 2])
        samestep.save(tmp_path / layout, model, opt)

    def load(_rank, case):
        saved, layout = case
        model, opt = made(layout, 2)
        samestep.load(tmp_path / saved, model, opt)
        stepped(model, opt, [3])
        return snapshot(opt)

    model, opt = made("one", 1)
    stepped(model, opt, [1, 2])
    samestep.save(tmp_path / "one", model, opt)
    run_cases(2, layouts, save)
    for saved in layouts:
        model, opt = made("one", 1)
        samestep.load(tmp_path / saved, model, opt)
        stepped(model, opt, [3])
        assert different(snapshot(opt), expected) == [], saved
    cases = [("one", "parts"), ("one", "flat"), ("flat", "parts"), ("parts", "zero2")]
    for case, of_ranks in run_cases(2, cases, load):
        for found in of_ranks:
            assert different(found, expected) == [], case


def test_a_checkpoint_does_not_depend_on_how_a_split_is_spelled(tmp_path):
    model = nn.ModuleDict({"mlp": nn.Linear(3, 8, bias=False)})
    opt = samestep.MuonAdamW(model, overrides={"*": {"split_sizes": (4, 4)}})
    samestep.save(tmp_path / "a", model, opt)
    spelled = samestep.MuonAdamW(model, overrides={"*": {"split_sizes": "halves"}})
    samestep.load(tmp_path / "a", model, spelled)
    other = samestep.MuonAdamW(model, overrides={"*": {"split_sizes": "interleaved:2x4"}})
    with pytest.raises(samestep.CheckpointError, match="split_sizes"):
        samestep.load(tmp_path / "a", model, other)


def test_options_for_all_matrices():
    """As keywords of the optimizer, said in words."""
    named = [("a", nn.Parameter(torch.randn(3, 8))), ("b", nn.Parameter(torch.randn(5, 4)))]
    opt = samestep.MuonAdamW(named, split_sizes="halves", transposed=True)
    assert "2 of 4 x 3" in opt.table()
    assert "2 of 2 x 5" in opt.table()
    assert "2 of 4 x 3" in samestep.Muon(named, split_sizes="halves", transposed=True).table()


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("split", "text"),
    [
        ("thirds", "has an unknown form: give a list of row counts"),
        ("heads:5", "no multiple of 5"),
        ("heads:0", "unknown form"),
        ("halves:2", "unknown form"),
        ("interleaved:3x5", "no multiple of 15"),
        ("interleaved:0x2", "above 0"),
        ("interleaved:2+1x3", "which are 9 rows, but each of its matrices has 12"),
        ("interleaved:3", "unknown form"),
    ],
)
def test_a_split_that_does_not_fit_is_refused(split, text):
    with pytest.raises(ValueError, match="split_sizes") as caught:
        blocks_of((12, 4), split)
    assert text in str(caught.value)
    assert split in str(caught.value)


def test_flattened_convolutions_are_stored_as_they_are():
    with pytest.raises(ValueError, match="flatten=True and transposed=True"):
        blocks_of((4, 3, 2, 2), None, flatten=True, transposed=True)


def test_interleaved_rows_are_no_parts_of_a_divided_weight():
    """Under tensor parallel every rank has whole heads: rows are cut, not matrices."""
    named = [(f"qkv[{n}:{n + 4}]", nn.Parameter(torch.randn(4, 4))) for n in (0, 4)]
    with pytest.raises(ValueError, match=r"rows 0 to 4 of 8.*give row counts instead"):
        samestep.MuonAdamW(named, overrides={"qkv": {"split_sizes": "interleaved:2x2"}})
    opt = samestep.MuonAdamW(named, overrides={"qkv": {"split_sizes": "heads:4"}})
    assert "2 of 2 x 4" in opt.table()


def test_ranks_of_other_splits_are_told():
    def job(rank):
        named = {"qkv tall": parameters()["qkv tall"]}
        split = "interleaved:3x3" if rank else "interleaved:9x3"
        with pytest.raises(RuntimeError, match="split_sizes"):
            samestep.MuonAdamW(named.items(), split_sizes=split)

    run_forked(2, job)
