"""State in 8 bits, in bfloat16 rounded at random, and master copies as remainders.

Every layout has the bits of one process, also through checkpoints; the codecs themselves are in
tests/rules/test_stored.py.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import samestep
from samestep.comm.integrity.agreement import RanksDisagreeError
from samestep.rules.converted import remainder_of
from samestep.rules.stored import join_remainder, split_remainder
from tests.ranks import run_forked
from tests.soak import SOAK, twin, twin_cases

# A plain matrix, stacked experts, row blocks, blocks in each other's gaps (rows and columns), what
# is too narrow for 8 bits, a table that is sliced, and a norm.
SHAPES = {
    "plain": (96, 64), "experts": (4, 64, 32), "narrow": (30, 7), "qkv": (96, 64),
    "interleaved": (96, 64), "transposed": (64, 96), "table": (130, 64), "norm": (64,),
}  # fmt: skip
EIGHT = {"exp_avg": "8bit/32", "exp_avg_sq": "8bit/32", "momentum_buffer": "8bit/32"}
FORMATS = {
    "8bit": {**EIGHT, "master_weight": "remainder"},
    "bf16": dict.fromkeys(("exp_avg", "exp_avg_sq", "momentum_buffer"), "bf16_stochastic"),
    "32 bits": None,
}
LAYOUTS = {
    "zero2": {"sharding": "zero2", "reduction": "ordered", "crossover": 16},
    "flat": {"sharding": "zero1", "reduction": "ordered", "buffers": "flat"},
}


class Model(nn.Module):
    """Bare parameters in bfloat16; `cut`: DTensors, by "rows", or "columns" where blocks fit."""

    def __init__(self, cut=None, mesh=None):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            value = torch.randn(shape, generator=generator).bfloat16()
            if cut is not None:
                dim = len(shape) - 1 if cut == "columns" and shape[-1] % 64 == 0 else 0
                value = distribute_tensor(value, mesh, [Shard(dim)])
            self.register_parameter(name, nn.Parameter(value))


def built(kind, layout=None, cut=None, mesh=None, **options):
    model = Model(cut, mesh)
    named = dict(model.named_parameters())
    muon = {"rule": "muon", "lr": 0.02, "variance_beta2": 0.9}
    cuts = [
        (["plain", "experts", "narrow"], muon),
        (["qkv"], {**muon, "split_sizes": (32, 32, 32)}),
        (["interleaved"], {**muon, "split_sizes": "interleaved:3x4"}),
        (["transposed"], {**muon, "split_sizes": (32, 64), "transposed": True}),
        (["table", "norm"], {"rule": "adamw", "lr": 0.02}),
    ]
    groups = [
        {"params": [(name, named[name]) for name in names], **of, "state_dtypes": FORMATS[kind]}
        for names, of in cuts
    ]
    shared = {"master_weights": True, "max_grad_norm": 3.0}  # less than all gradients have
    return model, samestep.MuonAdamW(groups, **shared, **(layout or {}), **options)


def step(model, opt, number, rank=None):
    """A rank's own gradients, or the mean of two; `plain` has none in the second step.

    Quarters, whose mean bfloat16 can hold.
    """
    grads = []
    for of_rank in range(2):
        generator = torch.Generator().manual_seed(100 * of_rank + number)
        drawn = {n: torch.randint(-8, 9, s, generator=generator) / 4 for n, s in SHAPES.items()}
        grads.append(drawn)
    for name, param in model.named_parameters():
        grad = grads[rank][name] if rank is not None else (grads[0][name] + grads[1][name]) / 2
        grad = grad.bfloat16()
        if isinstance(param, DTensor):
            grad = distribute_tensor(grad, param.device_mesh, param.placements)
        param.grad = None if name == "plain" and number == 1 else grad
    opt.step()


def everything(model, opt):
    opt.wait_for_parameters()
    values = {
        name: (param.full_tensor() if isinstance(param, DTensor) else param).detach().clone()
        for name, param in model.named_parameters()
    }
    return values | {(n, key): t for n, own in opt.whole_state().items() for key, t in own.items()}


def unequal(one, other):
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def one_process(kind, steps):
    model, opt = built(kind)
    for number in range(steps):
        step(model, opt, number)
    return model, opt


def layouts_job(rank, kinds):
    found = {}
    mesh = init_device_mesh("cpu", (2,))
    places = [(name, layout, None) for name, layout in LAYOUTS.items()]
    places += [(cut, {}, cut) for cut in ("columns", "rows")]
    for kind in kinds:
        for name, layout, cut in places if kind == "8bit" else places[1:3]:
            model, opt = built(kind, layout, cut, mesh if cut is not None else None)
            for number in range(3):
                step(model, opt, number, rank if cut is None else None)
            found[kind, name] = everything(model, opt)
    return found


def test_layouts_have_the_bits_of_one_process(one_thread):
    expected = {kind: everything(*one_process(kind, 3)) for kind in ("8bit", "bf16")}
    kinds = {pair: t.dtype for pair, t in expected["8bit"].items()}
    assert kinds["table", "exp_avg_sq"] == torch.uint8
    assert kinds["plain", "momentum_buffer"] == torch.int8
    assert kinds["plain", "master_remainder"] == torch.int16
    assert kinds["narrow", "momentum_buffer"] == torch.float32
    for found in run_forked(2, layouts_job, ("8bit", "bf16")):
        for (kind, layout), values in found.items():
            assert unequal(values, expected[kind]) == [], (kind, layout)


def copies_job(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))["model"]
    found = {}
    for kind, cut in (("8bit", "rows"), ("8bit", "columns"), ("bf16", "columns")):
        model, opt = built(kind, LAYOUTS["zero2"], cut, mesh)
        for number in range(2):
            step(model, opt, number, rank // 2)
        found[kind, cut] = everything(model, opt)
    return found


def test_copies_of_parts_have_the_bits_of_one_process(one_thread):
    expected = {kind: everything(*one_process(kind, 2)) for kind in ("8bit", "bf16")}
    for found in run_forked(4, copies_job):
        for (kind, cut), values in found.items():
            assert unequal(values, expected[kind]) == [], (kind, cut)


# --- checkpoints -----------------------------------------------------------------------------


KEYS = [
    ("table", "exp_avg"),
    ("table", "exp_avg_sq"),
    ("plain", "momentum_buffer"),
    ("transposed", "momentum_buffer"),
    ("plain", "master_weight"),
]


def wide(opt):
    return {pair: opt.full_state(*pair).float() for pair in KEYS}


def loads_job(rank, path):
    found = {}
    mesh = init_device_mesh("cpu", (2,))
    places = [("flat", LAYOUTS["flat"], None), ("rows", {}, "rows")]
    for kind, wanted in (("8bit", places), ("32 bits", places[:1]), ("bf16", places[1:])):
        for name, layout, cut in wanted:
            model, opt = built(kind, layout, cut, None if cut is None else mesh)
            with torch.no_grad():
                for param in model.parameters():
                    param.add_(1)
            samestep.load(path, model, opt)
            at_load = wide(opt)
            if kind == "8bit":
                step(model, opt, 2, rank if cut is None else None)
                samestep.save(f"{path}_{name}", model, opt)
            found[kind, name] = at_load, everything(model, opt)
    return found


@twin
def test_checkpoints_load_into_every_format_and_go_on_to_the_bit(tmp_path, one_thread):
    model, opt = one_process("8bit", 2)
    samestep.save(tmp_path / "saved", model, opt)
    saved = wide(opt)
    step(model, opt, 2)
    expected = everything(model, opt)
    for found in run_forked(2, loads_job, tmp_path / "saved"):
        for (kind, layout), (at_load, after) in found.items():
            for pair, value in at_load.items():
                rounded = value if kind != "bf16" or "master" in pair[1] else value.bfloat16()
                want = saved[pair].bfloat16() if kind == "bf16" else saved[pair]
                if "master" in pair[1]:
                    want = saved[pair]
                assert torch.equal(rounded, want.to(rounded.dtype)), (kind, layout, pair)
            if kind == "8bit":
                assert unequal(after, expected) == [], layout
    for name in ("flat", "rows"):  # and back into one process
        model, opt = built("8bit")
        samestep.load(tmp_path / f"saved_{name}", model, opt)
        assert unequal(everything(model, opt), expected) == []


@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.parametrize("to", FORMATS)
def test_state_dicts_between_formats(source, to):
    model, opt = one_process(source, 2)
    other, into = built(to)
    other.load_state_dict(model.state_dict())
    into.load_state_dict(opt.state_dict())
    if source == to:
        assert unequal(everything(other, into), everything(model, opt)) == []
        step(model, opt, 2)
        step(other, into, 2)
        assert unequal(everything(other, into), everything(model, opt)) == []
        return
    exact = to == "32 bits"
    for pair, value in wide(into).items():
        want = wide(opt)[pair]
        limit = 0.0 if exact or "master" in pair[1] else 0.008 * float(want.abs().max())
        assert float((value - want).abs().max()) <= limit, pair


def test_fp32_checkpoints_load_into_8_bits(tmp_path):
    model, opt = one_process("32 bits", 2)
    samestep.save(tmp_path / "wide", model, opt)
    other, into = built("8bit")
    samestep.load(tmp_path / "wide", other, into)
    for pair, value in wide(into).items():
        want = wide(opt)[pair]
        assert 0 <= float((value - want).abs().max()) <= 0.008 * float(want.abs().max())
    assert torch.equal(wide(into)["plain", "master_weight"], wide(opt)["plain", "master_weight"])


def consolidated_job(rank):
    model, opt = built("8bit", LAYOUTS["zero2"])
    for number in range(2):
        step(model, opt, number, rank)
    opt.consolidate_state_dict(to=None)
    return model.state_dict(), opt.state_dict()


@twin
def test_consolidated_state_is_that_of_one_process(one_thread):
    expected = everything(*one_process("8bit", 2))
    for of_model, of_opt in run_forked(2, consolidated_job):
        model, opt = built("8bit")
        model.load_state_dict(of_model)
        opt.load_state_dict(of_opt)
        assert unequal(everything(model, opt), expected) == []


def dtensors_job(rank):
    mesh = init_device_mesh("cpu", (2,))
    model, opt = built("8bit", {}, "rows", mesh)
    step(model, opt, 0)
    found = []
    source = model, opt
    for kind in ("32 bits", "8bit"):  # there and back
        other, into = built(kind, {}, "rows", mesh)
        other.load_state_dict(source[0].state_dict())
        into.load_state_dict(source[1].state_dict())
        found.append(all(torch.equal(wide(into)[pair], wide(opt)[pair]) for pair in KEYS))
        source = other, into
    model, opt = built("8bit", LAYOUTS["zero2"])
    step(model, opt, 0, rank)
    before = everything(model, opt)
    for name, param in list(model.named_parameters()):  # sharded after the optimizer was built
        sharded = distribute_tensor(param.detach().clone(), mesh, [Shard(0)])
        model.register_parameter(name, nn.Parameter(sharded))
    opt.adopt(model)
    return found, unequal(everything(model, opt), before)


def test_dtensors_change_formats_and_take_over_state():
    assert run_forked(2, dtensors_job) == [([True, True], [])] * 2


def test_parts_of_a_fused_weight_have_the_bits_of_the_whole():
    value, grad = torch.randn(96, 64), torch.randn(96, 64)
    whole = nn.Parameter(value.clone())
    parts = {f"w[{a}:{b}]": nn.Parameter(value[a:b].clone()) for a, b in ((0, 32), (32, 96))}
    whole.grad = grad
    for name, param in parts.items():
        param.grad = grad[0:32] if name == "w[0:32]" else grad[32:96]
    one = samestep.AdamW([("w", whole)], state_dtypes="8bit")
    other = samestep.AdamW(list(parts.items()), state_dtypes="8bit")
    for _ in range(2):
        one.step()
        other.step()
    for key in ("exp_avg", "exp_avg_scale", "exp_avg_sq"):
        joined = torch.cat([other.state[param][key] for param in parts.values()])
        assert torch.equal(joined, one.state[whole][key])


@pytest.mark.parametrize("where", ["_orig_mod.0.", "0._checkpoint_wrapped_module."])
def test_wrappers_in_names_change_no_bits(where):
    """As (name, parameter) of a compiled model, or of one that recomputes activations."""
    found = []
    for name in ("0.weight", where + "weight"):
        param = nn.Parameter(torch.randn(8, 64, generator=torch.Generator().manual_seed(0)))
        opt = samestep.AdamW([(name, param)], lr=0.1, state_dtypes="8bit")
        for number in range(3):
            generator = torch.Generator().manual_seed(number)
            param.grad = torch.randn(8, 64, generator=generator)
            opt.step()
        found.append([param, *opt.state[param].values()])
    assert all(map(torch.equal, *found))


def no_elements_job(rank, layout):
    """Of a row on two ranks one has nothing; another two hold copies, and all average."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Module()
    generator = torch.Generator().manual_seed(0)
    for name, shape in (("row", (1, 64)), ("matrix", (4, 64))):
        value = distribute_tensor(torch.randn(shape, generator=generator), mesh["tp"], layout)
        model.register_parameter(name, nn.Parameter(value))
    opt = samestep.AdamW(model, lr=0.01, state_dtypes="8bit")
    for _ in range(2):
        for param in model.parameters():
            grad = torch.randn(param.shape, generator=generator)
            param.grad = distribute_tensor(grad, mesh["tp"], layout)
        opt.step()
    return everything(model, opt)


def test_ranks_that_hold_nothing_of_a_parameter_step_along():
    split, copied = (
        run_forked(4, no_elements_job, layout) for layout in ([Shard(0)], [Replicate()])
    )
    assert copied[0]["row", "exp_avg"].dtype == torch.int8
    for found in split:
        assert unequal(found, copied[0]) == []


# --- values ----------------------------------------------------------------------------------


def values_job(rank, layout):
    model, opt = built("8bit", layout)
    step(model, opt, 0, rank)
    value = torch.randn(96, 64, generator=torch.Generator().manual_seed(rank))
    opt.set_full_parameter("plain", value)  # the first rank's
    opt.scale_parameters({"plain": torch.tensor(0.7)})
    scaled = opt.full_parameter("plain")
    opt.set_full_state("table", "exp_avg", torch.ones(130, 64))
    return model.plain.detach().clone(), scaled, opt.full_state("table", "exp_avg")


@twin_cases("flat")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_are_set_and_scaled_with_their_remainders(layout):
    value = torch.randn(96, 64, generator=torch.Generator().manual_seed(0)) * 0.7
    for param, scaled, moment in run_forked(2, values_job, LAYOUTS[layout]):
        assert torch.equal(scaled, value)
        assert torch.equal(param, split_remainder(value)[0])
        assert torch.equal(moment, torch.ones(130, 64))


def test_remainders_are_of_the_parameter_that_is_there():
    master = torch.randn(4096)
    param, rest = split_remainder(master)
    assert torch.equal(remainder_of(param, master), rest)
    assert not remainder_of(param + 1, master).any()
    half = torch.tensor([1 + 2.0**-8, -1 - 2.0**-8])  # rounded to even: down, and up
    even = half.bfloat16()
    kept = join_remainder(even, remainder_of(even, half))
    assert (kept - half).abs().max() <= 2.0**-23
    model, opt = one_process("8bit", 2)
    opt.refresh_master_weights()
    assert torch.equal(opt.full_parameter("plain"), model.plain.detach().float())


@pytest.mark.skipif(not SOAK, reason="long: make soak")
def test_compiled_updates_have_the_same_bits():
    model, opt = one_process("8bit", 2)
    other, compiled = built("8bit", compile="eager")
    for number in range(2):
        step(other, compiled, number)
    assert unequal(everything(other, compiled), everything(model, opt)) == []


# --- plans, tables, refusals -----------------------------------------------------------------


def test_the_table_says_how_state_is_kept():
    opt = built("8bit", offload="state")[1]
    rows = {line.split()[0]: line for line in opt.table().splitlines()}
    assert rows["plain"].endswith("8bit/32, master remainder")
    assert rows["narrow"].endswith("float32, master remainder")
    assert "state" in rows["parameter"]
    told = [line for line in opt.table().splitlines() if line.startswith("state: ")]
    assert told[0].startswith('state: in the host\'s memory between steps (offload="state")')
    assert told[1].startswith("state: 2 of 8 parameters stay in 32 bits or more")
    assert told[1].endswith(": narrow, norm")
    assert [line.split('"')[1] for line in told[2:]] == ["8bit/64", "master remainder"]
    explained = " ".join(opt.explain().split())
    assert all(line in explained for line in told)
    usual = built("32 bits")[1]
    assert "state" not in usual.table()
    assert "How state is kept" not in usual.explain()


def cut_job(rank):
    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(distribute_tensor(torch.zeros(8, 384), mesh, [Shard(1)]))
    with pytest.raises(ValueError, match=re.escape("is cut between ranks at 192")) as error:
        samestep.AdamW([("wide", param)], state_dtypes="8bit")
    samestep.AdamW([("wide", param)], state_dtypes="8bit/64")
    own = {"state_dtypes": "8bit"} if rank == 0 else {}
    with pytest.raises(RanksDisagreeError, match=r"rank 0 has '.*: state_dtypes = 8bit'"):
        samestep.AdamW([("uneven", nn.Parameter(torch.zeros(51, 64)))], sharding="zero2", **own)
    return str(error.value)


def test_refused():
    for text in run_forked(2, cut_job):
        assert all(part in text for part in ("'wide'", '"8bit/64"', "128 neighbours"))
    half = nn.Parameter(torch.zeros(4, 4, dtype=torch.float16))
    narrow = nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))
    remainder = {"state_dtypes": {"master_weight": "remainder"}}
    with pytest.raises(ValueError, match=r"beyond bfloat16, and 'a' has dtype torch.float16"):
        samestep.AdamW([("a", half)], master_weights=True, **remainder)
    with pytest.raises(ValueError, match=r"'a' has no main parameters: .* master_weights=True"):
        samestep.AdamW([("a", narrow)], master_weights=False, **remainder)
    with pytest.raises(ValueError, match=r"'a' has no main parameters: .* master_weights=True"):
        samestep.AdamW([("a", nn.Parameter(torch.zeros(4, 4)))], **remainder)
    with pytest.raises(ValueError, match=r"give \{\"master_weight\": \"remainder\"\}"):
        samestep.AdamW([("a", narrow)], master_weights=True, state_dtypes="remainder")
    with pytest.raises(ValueError, match=r"'remainder' is not supported"):
        samestep.AdamW([("a", narrow)], state_dtypes={"exp_avg": "remainder"})
    by_state = r"or a dtype for each state, \{\"exp_avg\": torch\.bfloat16\}"
    for word in ("4bit", "8bit ", "bfloat16"):
        with pytest.raises(
            ValueError, match=f"state_dtypes '{word}' is not supported;.*{by_state}"
        ):
            samestep.AdamW([("a", narrow)], state_dtypes=word)
    with pytest.raises(ValueError, match=r"is torch.float64"):
        samestep.AdamW([("a", half)], state_dtypes={"master_weight": torch.float64})
    with pytest.raises(ValueError, match=r"float8_e4m3fn is too coarse .*'8bit'"):
        samestep.AdamW([("a", narrow)], state_dtypes={"exp_avg": torch.float8_e4m3fn})


def test_state_that_no_rule_has_is_refused():
    """What would be kept as ever is not what was asked for; rules share one mapping."""
    param = nn.Parameter(torch.zeros(4, 64))
    with pytest.raises(ValueError, match=r"'momentum_buffer', which is no state of adamw.*exp_avg"):
        samestep.AdamW([param], state_dtypes={"momentum_buffer": "8bit"})
    with pytest.raises(ValueError, match="'exp_avg', which is no state of muon"):
        samestep.Muon([param], state_dtypes={"exp_avg": "8bit", "momentum_buffer": "8bit"})
    samestep.MuonAdamW([("a", param)], state_dtypes=EIGHT)  # AdamW has no parameter here


def parts_job(rank):
    """The part of a rank in one format, loaded into others; what is said where it cannot be."""

    def made(kept):
        model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64)).bfloat16()
        own = {"sharding": "zero2", "master_weights": True, "state_dict_form": "part"}
        return samestep.MuonAdamW(model, state_dtypes=kept, crossover=16, **own)

    formats = {"32": None, "bf16": "bf16_stochastic", "8/32": "8bit/32", "8/64": "8bit/64"}
    formats["remainder"] = {"master_weight": "remainder"}
    told = {}
    for one, kept in formats.items():
        part = made(kept).state_dict()
        for other, wanted in formats.items():
            try:
                made(wanted).load_state_dict(part)
            except ValueError as error:
                told[one, other] = str(error)
    return set(formats), told


def test_a_part_in_another_format_is_refused_with_the_way_out():
    for formats, told in run_forked(2, parts_job):
        assert not any((each, each) in told for each in formats)
        for eight in ("8/32", "8/64"):
            assert {(eight, other) for other in formats - {eight}} <= told.keys()
        assert "state is kept in another format here" in told["8/32", "32"]
        assert "samestep.load, which converts" in told["8/32", "32"]
        for text in told.values():  # some have other plans, which is told instead
            assert all(way in text for way in ("state_dtypes", "samestep.save", "samestep.load"))


def test_codes_without_their_scales_are_refused():
    opt = built("8bit")[1]
    entry = opt.state_dict()["state"]
    number = next(number for number, own in entry.items() if "exp_avg_scale" in own)
    for scales in (None, entry[number]["exp_avg_scale"][:-1]):
        saved = opt.state_dict()
        own = {key: value for key, value in entry[number].items() if key != "exp_avg_scale"}
        saved["state"][number] = own if scales is None else {**own, "exp_avg_scale": scales}
        for kind in ("8bit", "32 bits"):
            with pytest.raises(ValueError, match=r"'exp_avg' of 'table' .* 'exp_avg_scale', "):
                built(kind)[1].load_state_dict(saved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_model_that_changed_is_not_what_remainders_are_of(dtype):
    model, opt = built("8bit")
    step(model, opt, 0)
    opt.zero_grad()
    model.to(dtype)
    with pytest.raises(RuntimeError, match=r"'plain' is torch.float.. now, and .* another dtype"):
        opt.step()


def test_master_copies_in_32_bits_beside_weights_that_need_none():
    """A bfloat16 model with norms in 32 bits: only what is narrow has a copy."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False).bfloat16(), nn.LayerNorm(64))
    kept = {"master_weight": torch.float32}
    opt = samestep.MuonAdamW(model, lr=1e-3, master_weights=True, state_dtypes=kept)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    opt.step()
    copies = ["master_weight" in opt.state[param] for param in model.parameters()]
    assert copies == [True, False, False]
