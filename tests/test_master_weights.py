"""`master_weights=True`: 16-bit parameters that train as if they had 32 bits."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import samestep
from samestep.checkpoint import logical
from samestep.layout.boxes import local_of
from samestep.rules.stored import split_remainder
from tests.ranks import run_forked
from tests.soak import twin

HALVES = [torch.bfloat16, torch.float16]
halves = pytest.mark.parametrize("dtype", HALVES, ids=str)
MASTER = "master_weight"


def muon(params: Any, **options: Any) -> samestep.Muon:
    return samestep.Muon(params, **{"lr": 0.02, "master_weights": False, **options})


def adamw(params: Any, **options: Any) -> samestep.AdamW:
    return samestep.AdamW(params, **{"lr": 0.02, "master_weights": False, **options})


# name -> optimizer, options, shapes
SETTINGS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any], list[Any]]] = {
    "adamw": (adamw, {}, [(6, 4), (5,), (), (300,)]),
    "adamw amsgrad maximize": (adamw, {"amsgrad": True, "maximize": True}, [(6, 4), (5,)]),
    "muon": (muon, {}, [(6, 4), (4, 6), (6, 4), (2, 6, 4)]),
    "muon fused": (muon, {"split_sizes": (3, 2, 1), "variance_beta2": 0.9}, [(6, 4), (2, 6, 4)]),
    "muon cautious": (muon, {"cautious": True, "weight_decay": 0.5}, [(6, 4), (4, 6)]),
    "muon flatten": (muon, {"flatten": True, "variance_beta2": 0.9}, [(5, 3, 2, 2), (5, 12)]),
}
settings = pytest.mark.parametrize(("make", "options", "shapes"), SETTINGS.values(), ids=SETTINGS)
both_rules = pytest.mark.parametrize("make", [muon, adamw])


def draw(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    return actual.dtype == expected.dtype and torch.equal(bits(actual), bits(expected))


def step_with(
    optimizers: Sequence[torch.optim.Optimizer],
    params: Sequence[Sequence[nn.Parameter]],
    dtype: torch.dtype,
    steps: range,
) -> None:
    """The same gradients for all, of values that `dtype` can hold."""
    for step in steps:
        for index, same in enumerate(zip(*params, strict=True)):
            gradient = draw(same[0].shape, 1000 + 50 * step + index, dtype)
            for param in same:
                param.grad = gradient.to(param.dtype)
        for optimizer in optimizers:
            optimizer.step()


def check_against_float32(
    make: Callable[..., torch.optim.Optimizer], options: dict[str, Any], values: list[Tensor]
) -> None:
    dtype = values[0].dtype
    half = [nn.Parameter(value) for value in values]
    full = [nn.Parameter(value.float()) for value in values]
    optimizer = make(half, master_weights=True, **options)
    reference = make(full, **options)
    for step in range(8):
        step_with([optimizer, reference], [half, full], dtype, range(step, step + 1))
        for param, expected in zip(half, full, strict=True):
            state = optimizer.state[param]
            assert same_bits(param, expected.to(dtype))
            assert same_bits(state[MASTER], expected)
            for key, tensor in reference.state[expected].items():
                assert same_bits(state[key], tensor), key


@halves
@settings
def test_the_parameter_is_the_rounded_float32_run(make, options, shapes, dtype):
    values = [draw(shape, seed, dtype) for seed, shape in enumerate(shapes)]
    check_against_float32(make, options, values)


@halves
@pytest.mark.parametrize(
    "make", [lambda p, **k: muon(p, flatten=True, **k), adamw], ids=["muon", "adamw"]
)
def test_so_it_is_for_other_strides(make, dtype):
    """The master is contiguous whatever the parameter is."""
    channels_last = draw((5, 3, 2, 2), 0, dtype).to(memory_format=torch.channels_last)
    transposed = draw((12, 5), 1, dtype).t()
    assert not channels_last.is_contiguous()
    assert not transposed.is_contiguous()
    check_against_float32(make, {}, [channels_last, transposed])


@halves
@settings
def test_without_masters_the_run_drifts_away(make, options, shapes, dtype):
    """What the test above would see if masters were kept but not used."""
    half = [nn.Parameter(draw(shape, seed, dtype)) for seed, shape in enumerate(shapes)]
    full = [nn.Parameter(param.detach().float()) for param in half]
    optimizer, reference = make(half, **options), make(full, **options)
    step_with([optimizer, reference], [half, full], dtype, range(8))
    assert all(MASTER not in optimizer.state[param] for param in half)
    assert any(
        not torch.equal(param, expected.to(dtype))
        for param, expected in zip(half, full, strict=True)
    )


@halves
@both_rules
@pytest.mark.parametrize("master_weights", [True, False])
def test_updates_below_the_precision_add_up_only_in_the_master(make, dtype, master_weights):
    """Steps of 1e-4 from 1, where rounding swallows 2e-3 (bfloat16) and 2.4e-4 (float16)."""
    param = nn.Parameter(torch.ones(4, 4, dtype=dtype))
    signs = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])
    # An orthogonal gradient: Muon's update is then about lr * 0.2 * sqrt(4) * 0.5 each.
    lr = 5e-4 if make is muon else 1e-4
    optimizer = make([param], lr=lr, weight_decay=0.0, master_weights=master_weights)
    param.grad = (signs / 2).to(dtype)
    for _ in range(100):
        optimizer.step()
    moved = 1 - param.detach().float()
    if master_weights:
        torch.testing.assert_close(moved, signs * 0.01, rtol=0.3, atol=0)
    else:
        assert torch.equal(moved, torch.zeros(4, 4))


@both_rules
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_wide_parameters_need_no_master(make, dtype):
    shapes = [(6, 4), (4, 6)]
    params = [nn.Parameter(draw(shape, seed, dtype)) for seed, shape in enumerate(shapes)]
    others = [nn.Parameter(param.detach().clone()) for param in params]
    optimizer, reference = make(params, master_weights=True), make(others)
    step_with([optimizer, reference], [params, others], dtype, range(3))
    for param, other in zip(params, others, strict=True):
        assert list(optimizer.state[param]) == list(reference.state[other])
        assert same_bits(param, other)


def test_each_parameter_by_its_own_dtype_in_a_model():
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6))
    model[0].to(torch.bfloat16)
    optimizer = samestep.MuonAdamW(model, master_weights=True)
    with_master = {n for n, p in model.named_parameters() if MASTER in optimizer.state[p]}
    assert with_master == {"0.weight", "0.bias"}


@halves
@both_rules
def test_the_master_is_a_copy(make, dtype):
    """Also where no conversion would make one, and whatever the strides of the parameter."""
    param = nn.Parameter(draw((4, 6), 0, dtype).t())
    optimizer = make([param], master_weights=True)
    master = optimizer.state[param][MASTER]
    assert master.dtype == torch.float32
    assert master.is_contiguous()
    assert not master.requires_grad
    assert torch.equal(master, param.detach().float())


@halves
@both_rules
def test_an_edited_weight_counts_and_the_others_keep_their_low_bits(make, dtype):
    """Loading, clipping or averaging weights needs no call: where they changed, they win."""
    edited, other = (nn.Parameter(draw((6, 4), seed, dtype)) for seed in range(2))
    params, twins = [edited, other], [nn.Parameter(p.detach().clone()) for p in (edited, other)]
    optimizer, twin = make(params, master_weights=True), make(twins, master_weights=True)
    step_with([optimizer, twin], [params, twins], dtype, range(3))
    assert not torch.equal(optimizer.state[other][MASTER], other.detach().float())
    with torch.no_grad():
        edited[2:].fill_(100)
        edited[:2].copy_(edited[:2].clone())  # loaded with the same values
    step_with([optimizer, twin], [params, twins], dtype, range(3, 4))
    assert ((edited[2:].detach().float() - 100).abs() < 5).all()
    if make is adamw:  # elementwise: what was not edited is as if nothing had been
        assert same_bits(optimizer.state[edited][MASTER][:2], twin.state[twins[0]][MASTER][:2])
    assert same_bits(optimizer.state[other][MASTER], twin.state[twins[1]][MASTER])


@both_rules
def test_loading_the_model_after_the_optimizer_keeps_the_masters(make):
    """The order of a resume script must not matter: rounded weights do not undo the masters."""
    params = [nn.Parameter(draw((6, 4), 0, torch.bfloat16))]
    optimizer = make(params, master_weights=True)
    step_with([optimizer], [params], torch.bfloat16, range(3))
    others = [nn.Parameter(torch.zeros_like(params[0]))]
    resumed = make(others, master_weights=True)
    resumed.load_state_dict(through_file(optimizer.state_dict()))
    with torch.no_grad():
        others[0].copy_(params[0])
    step_with([optimizer, resumed], [params, others], torch.bfloat16, range(3, 6))
    assert same_bits(resumed.state[others[0]][MASTER], optimizer.state[params[0]][MASTER])
    assert same_bits(others[0].detach(), params[0].detach())


@both_rules
def test_masters_appear_when_a_parameter_becomes_16_bits_later(make):
    """`model.to(bfloat16)` after construction, in which tiny updates would be lost."""
    module = nn.Linear(8, 8, bias=False)
    optimizer = make([module.weight], master_weights=True)
    assert MASTER not in optimizer.state[module.weight]
    module.to(torch.bfloat16)
    module.weight.grad = torch.ones_like(module.weight)
    optimizer.step()
    assert optimizer.state[module.weight][MASTER].dtype == torch.float32


def through_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@halves
@settings
@pytest.mark.parametrize("before", [0, 3], ids=["before the first step", "after some steps"])
def test_state_dict_round_trip(make, options, shapes, dtype, before):
    params = [nn.Parameter(draw(shape, seed, dtype)) for seed, shape in enumerate(shapes)]
    optimizer = make(params, master_weights=True, **options)
    step_with([optimizer], [params], dtype, range(before))
    others = [nn.Parameter(param.detach().clone()) for param in params]
    resumed = make(others, master_weights=True, **options)
    resumed.load_state_dict(through_file(optimizer.state_dict()))
    for param, other in zip(params, others, strict=True):
        assert same_bits(resumed.state[other][MASTER], optimizer.state[param][MASTER])
    if before:  # rounding the master through the parameter would have been seen
        assert any(not torch.equal(optimizer.state[p][MASTER], p.float()) for p in params)
    step_with([optimizer, resumed], [params, others], dtype, range(before, before + 3))
    for param, other in zip(params, others, strict=True):
        assert same_bits(other, param)
        for key, tensor in optimizer.state[param].items():
            assert same_bits(resumed.state[other][key], tensor), key


@halves
@both_rules
def test_state_without_masters_gets_them_from_the_parameter(make, dtype):
    """The parameter of the moment of loading: weights first, then the optimizer."""
    [param] = params = [nn.Parameter(draw((6, 4), 0, dtype))]
    optimizer = make(params)
    step_with([optimizer], [params], dtype, range(2))
    other = nn.Parameter(draw((6, 4), 1, dtype))
    resumed = make([other], master_weights=True)
    step_with([resumed], [[other]], dtype, range(1))
    with torch.no_grad():
        other.copy_(param)
    resumed.load_state_dict(through_file(optimizer.state_dict()))
    assert same_bits(resumed.state[other][MASTER], param.detach().float())
    for key, tensor in optimizer.state[param].items():
        assert same_bits(resumed.state[other][key], tensor)


@both_rules
def test_masters_are_not_dropped_in_silence(make):
    param = nn.Parameter(draw((6, 4), 0, torch.bfloat16))
    saved = make([param], master_weights=True).state_dict()
    with pytest.raises(
        ValueError, match="this optimizer has none: build the optimizer with master_weights=True"
    ):
        make([param]).load_state_dict(saved)
    wide = make([nn.Parameter(param.detach().float())], master_weights=True)
    with pytest.raises(ValueError, match=r"'master_weight', .* is float32 here.* samestep.load"):
        wide.load_state_dict(saved)


@both_rules
def test_remainders_are_of_bfloat16(make):
    """With another dtype they would be digits of nothing."""
    kept = {"master_weights": True, "state_dtypes": {MASTER: "remainder"}}
    saved = make([nn.Parameter(draw((6, 4), 0, torch.bfloat16))], **kept).state_dict()
    for dtype in (torch.float16, torch.float32):
        other = make([nn.Parameter(draw((6, 4), 0, dtype))], master_weights=True)
        word = str(dtype).removeprefix("torch.")
        with pytest.raises(ValueError, match=f"is {word} here: load it into a bfloat16 model"):
            other.load_state_dict(saved)


# --- in every layout -------------------------------------------------------------------------

LAYOUTS: dict[str, dict[str, Any]] = {
    "none": {"sharding": "none"},
    "zero1": {"sharding": "zero1"},
    "zero2": {"sharding": "zero2"},
    "flat": {"sharding": "zero1", "buffers": "flat"},
    "offload": {"sharding": "zero2", "offload": "state"},
    "fsdp2": {},
}
REMAINDER = {"state_dtypes": {MASTER: "remainder"}}


def model_of(dtype: torch.dtype, seed: int, layout: str | None = None) -> nn.Module:
    """Matrices and a table of which ranks own parts, and vectors."""
    model = nn.Sequential(nn.Linear(8, 12), nn.Embedding(10, 8)).to(dtype)
    with torch.no_grad():
        for place, param in enumerate(model.parameters()):
            param.copy_(draw(param.shape, 10 * seed + place, dtype))
    if layout == "fsdp2":
        for part in (*model, model):
            fully_shard(part, mesh=init_device_mesh("cpu", (2,)))
    return model


def in_layout(
    layout: str | None, dtype: torch.dtype, seed: int, **options: Any
) -> tuple[nn.Module, samestep.MuonAdamW]:
    """Of one process if the layout is None."""
    model = model_of(dtype, seed, layout)
    own = {} if layout is None else {**LAYOUTS[layout], "reduction": "ordered"}
    own |= {} if layout in (None, "fsdp2") else {"crossover": 16}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model, samestep.MuonAdamW(model, lr=0.02, **{**own, **options})


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    for place, param in enumerate(model.parameters()):
        gradient = draw(param.shape, 1000 * seed + place, param.dtype)
        mesh = getattr(param, "device_mesh", None)
        param.grad = gradient if mesh is None else distribute_tensor(gradient, mesh, [Shard(0)])
    optimizer.step()
    optimizer.zero_grad()


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: getattr(param, "full_tensor", lambda param=param: param)().detach().clone()
        for name, param in model.named_parameters()
    }


def put(model: nn.Module, values: dict[str, Tensor]) -> None:
    """Weights from outside, as `model.load_state_dict` gives them."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            mesh = getattr(param, "device_mesh", None)
            value = values[name]
            param.copy_(value if mesh is None else distribute_tensor(value, mesh, [Shard(0)]))


def copies(model: nn.Module, optimizer: samestep.MuonAdamW) -> dict[str, Tensor]:
    return {name: optimizer.full_parameter(name) for name, _ in model.named_parameters()}


def read_back(path: Path, layout: str | None, **options: Any) -> dict[str, Tensor]:
    """What a checkpoint gives to 32-bit weights."""
    model, optimizer = in_layout(layout, torch.float32, 9, **options)
    samestep.load(path, model, optimizer)
    return whole(model)


def unequal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    return [name for name, value in expected.items() if not same_bits(found[name], value.float())]


def saved_without_copies_job(rank: int, folder: Path, states: dict[str, Any]) -> list[str]:
    wrong = []
    for layout in LAYOUTS:
        for source, (weights, state) in states.items():
            if source == "part" and layout != "flat":
                continue  # who owns what may depend on whether there are copies
            form = {"state_dict_form": "part"} if source == "part" else {}
            if state is None:
                without = in_layout(layout, torch.bfloat16, 1, master_weights=False, **form)
                one_step(*without, 1)
                state = without[1].state_dict()
            model, optimizer = in_layout(layout, torch.bfloat16, 3, master_weights=True, **form)
            put(model, weights)
            optimizer.load_state_dict(state)
            path = folder / f"{layout} {source}"
            samestep.save(path, model, optimizer)
            found = copies(model, optimizer), read_back(path, layout)
            wrong += [f"{layout} {source} {n}" for own in found for n in unequal(own, weights)]
    return wrong


@twin
def test_state_without_copies_gives_them_the_weights_in_every_layout(tmp_path):
    """Also where a rank has pieces of them, which do not have the parameter's shape."""
    model, optimizer = in_layout(None, torch.bfloat16, 1, master_weights=False)
    one_step(model, optimizer, 1)
    states = {"ours": (whole(model), optimizer.state_dict())}
    states["part"] = (whole(model), None)
    assert run_forked(2, saved_without_copies_job, tmp_path, states) == [[], []]


def torch_file_job(rank: int, weights: list[Tensor], state: dict[str, Any]) -> list[bool]:
    found = []
    for layout in ("none", "zero2", "flat"):
        params = [
            (str(place), nn.Parameter(torch.zeros_like(w))) for place, w in enumerate(weights)
        ]
        options = {**LAYOUTS[layout], "crossover": 16}
        optimizer = samestep.AdamW(params, lr=0.02, master_weights=True, **options)
        with torch.no_grad():
            for (_, param), value in zip(params, weights, strict=True):
                param.copy_(value)
        optimizer.load_state_dict(state)
        pairs = zip(params, weights, strict=True)
        found += [same_bits(optimizer.full_parameter(n), w.float()) for (n, _), w in pairs]
    return found


def test_state_of_torch_gives_copies_the_weights():
    params = [
        nn.Parameter(draw(shape, seed, torch.bfloat16)) for seed, shape in enumerate([(9, 8), (7,)])
    ]
    theirs = torch.optim.AdamW(params, lr=0.02)
    step_with([theirs], [params], torch.bfloat16, range(1))
    weights = [param.detach() for param in params]
    assert run_forked(2, torch_file_job, weights, theirs.state_dict()) == [[True] * 6] * 2


def edited_values(
    folder: Path, layout: str | None
) -> tuple[list[tuple[dict[str, Tensor], dict[str, Tensor]]], bool]:
    """Pairs of what was found and what it should be; whether looking has left the state as it is.

    First all weights are others, as after `model.load_state_dict`; later every third element is.
    """
    model, optimizer = in_layout(layout, torch.bfloat16, 1, master_weights=True)
    pretrained = whole(model_of(torch.bfloat16, 2))
    put(model, pretrained)
    samestep.save(folder / "pretrained", model, optimizer)
    expected = {name: value.float() for name, value in pretrained.items()}
    found = [(copies(model, optimizer), expected)]
    found.append((read_back(folder / "pretrained", layout), expected))

    one_step(model, optimizer, 1)
    expected, weights = copies(model, optimizer), whole(model)
    assert not any(torch.equal(expected[name], own.float()) for name, own in weights.items())
    for name, value in weights.items():
        value.view(-1)[::3] += 1
        expected[name].view(-1)[::3] = value.view(-1)[::3].float()
    put(model, weights)
    before = [local_of(own[MASTER]).clone() for own in optimizer.state.values()]
    samestep.save(folder / "edited", model, optimizer)
    found.append((copies(model, optimizer), expected))
    found.append((read_back(folder / "edited", layout), expected))
    again, into = in_layout(layout, torch.bfloat16, 4, master_weights=True)
    samestep.load(folder / "edited", again, into)
    found.append((copies(again, into), expected))
    after = [local_of(own[MASTER]) for own in optimizer.state.values()]
    return found, all(map(torch.equal, before, after))


def edited_job(rank: int, folder: Path) -> list[str]:
    wrong = []
    for layout in LAYOUTS:
        found, as_before = edited_values(folder / layout, layout)
        wrong += [] if as_before else [f"{layout} has other copies"]
        for number, pair in enumerate(found):
            wrong += [f"{layout} {number} {name}" for name in unequal(*pair)]
    return wrong


def test_edited_weights_are_looked_at_and_saved_instead_of_their_copies(tmp_path):
    """Box by box, as a step has it, wherever copies lie; what was not edited keeps its low bits."""
    found, as_before = edited_values(tmp_path / "one", None)
    assert [unequal(*pair) for pair in found] == [[]] * 5
    assert as_before
    assert run_forked(2, edited_job, tmp_path) == [[], []]


def test_checkpoints_with_copies_of_before_an_edit_give_32_bit_weights_the_edit(
    tmp_path, monkeypatch
):
    """As earlier versions wrote them, and as torch writes what `state_dict()` has."""
    monkeypatch.setattr(logical, "_present_masters", lambda part: part.boxes)
    for kept in ({}, REMAINDER):
        model, optimizer = in_layout(None, torch.bfloat16, 1, master_weights=True, **kept)
        one_step(model, optimizer, 1)
        halfway = torch.full((10, 8), 1 + 2.0**-8)  # rounded to even, or away from zero
        optimizer.set_full_parameter("1.weight", halfway)
        expected, weights = copies(model, optimizer), whole(model)
        if not kept:  # beside a remainder nobody can see it
            weights["0.weight"][::2] = 3
            expected["0.weight"][::2] = 3
        put(model, weights)
        path = tmp_path / str(len(kept))
        samestep.save(path, model, optimizer)
        assert unequal(read_back(path, None), expected) == []


def halfway(model: nn.Module) -> dict[str, Tensor]:
    """Values between two bfloat16, of both signs; half of them are rounded to even downwards."""
    steps = {name: torch.arange(p.numel()).view(p.shape) for name, p in model.named_parameters()}
    return {name: (1 + 2.0**-8 + at * 2.0**-7) * (-1.0) ** at for name, at in steps.items()}


def remainders_job(rank: int, path: Path) -> dict[str, Any]:
    found = {}
    for layout in LAYOUTS:
        model, optimizer = in_layout(layout, torch.bfloat16, 3, master_weights=True, **REMAINDER)
        samestep.load(path, model, optimizer)
        found[layout] = copies(model, optimizer), whole(model)
    return found


@twin
def test_remainders_get_all_bits_of_32_bit_weights(tmp_path):
    """Halfway values too: on every rank weights are rounded as their remainders take it."""
    model, optimizer = in_layout(None, torch.float32, 1)
    expected = halfway(model)
    put(model, expected)
    samestep.save(tmp_path / "wide", model, optimizer)
    rounded = {name: split_remainder(value)[0] for name, value in expected.items()}
    assert not torch.equal(rounded["1.weight"], expected["1.weight"].bfloat16())
    for of_rank in run_forked(2, remainders_job, tmp_path / "wide"):
        for layout, (values, weights) in of_rank.items():
            assert unequal(values, expected) == [], layout
            assert all(same_bits(weights[name], own) for name, own in rounded.items()), layout


def test_remainders_of_weights_beside_copies_lack_the_last_bit_of_what_is_halfway(tmp_path):
    """These weights are rounded to even already, and what they say counts."""
    model, optimizer = in_layout(None, torch.bfloat16, 1, master_weights=True)
    expected = halfway(model)
    for name, value in expected.items():
        optimizer.set_full_parameter(name, value)
    samestep.save(tmp_path / "copies", model, optimizer)
    for source in ("checkpoint", "state dict"):
        into = in_layout(None, torch.bfloat16, 3, master_weights=True, **REMAINDER)
        if source == "checkpoint":
            samestep.load(tmp_path / "copies", *into)
        else:
            put(into[0], whole(model))
            into[1].load_state_dict(optimizer.state_dict())
        for name, value in copies(*into).items():
            away = split_remainder(expected[name])[0] == model.get_parameter(name)
            lost = (value.view(torch.int32) - expected[name].view(torch.int32)).abs()
            assert torch.equal(lost, (~away).int()), (source, name)
