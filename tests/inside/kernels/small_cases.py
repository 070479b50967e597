"""State in few bits in kernels: the bits of plain torch, on whatever device they run.

`test_interpreted.py` runs this file through Triton's interpreter on CPU, `test_cuda.py` on a GPU.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import samestep.kernels.call
import samestep.kernels.symmetric
from samestep.kernels import small
from samestep.kernels.adamw import AdamWTensors
from samestep.kernels.call import FUSION, Origins, Step
from samestep.kernels.muon import MuonBlocks, muon_
from samestep.rules.adamw import AdamWRule
from samestep.rules.muon import MuonRule, variance_shape
from samestep.rules.noise import LOWER, Noise, Origin, seed_of
from samestep.rules.stored import (
    REMAINDER_KEY,
    decode,
    encode,
    join_remainder,
    round_bf16,
    split_remainder,
)
from tests.inside.kernels.cases import DEVICE, INTERPRETED, QUICK, gradients, number


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def random(*shape, spread=0.0, scale=1.0):
    return (torch.randn(shape) * 10 ** (spread * torch.randn(shape)) * scale).to(DEVICE)


def same(found, wanted):
    """Bits, but for the digits of a NaN."""
    assert found.dtype == wanted.dtype
    if found.is_floating_point():
        assert torch.equal(found.isnan(), wanted.isnan())
        found, wanted = found.nan_to_num(1.0), wanted.nan_to_num(1.0)
        assert torch.equal(torch.signbit(found), torch.signbit(wanted))
    assert torch.equal(found, wanted)


# --- the functions ---------------------------------------------------------------------------


@triton.jit
def _coded(
    values,
    codes,
    scales,
    origins,
    steps,
    Q: tl.constexpr,
    ROWS: tl.constexpr,
    PLACES: tl.constexpr,
    SIGNED: tl.constexpr,
):
    row = tl.arange(0, ROWS)[:, None]
    place = row * Q + tl.arange(0, Q)[None, :]
    keys = small.keys_of(origins, tl.load(steps))
    bits = small.random_bits(origins, row * Q, tl.arange(0, Q)[None, :], keys, PLACES)
    bits = small.signed_bits(bits) if SIGNED else small.unsigned_bits(bits)
    inside = place >= 0
    small.write_state(codes + place, inside, scales + row, row >= 0, tl.load(values + place), bits)


@triton.jit
def _read(codes, scales, values, Q: tl.constexpr, ROWS: tl.constexpr):
    row = tl.arange(0, ROWS)[:, None]
    place = row * Q + tl.arange(0, Q)[None, :]
    inside = place >= 0
    tl.store(values + place, small.read_state(codes + place, inside, scales + row, row >= 0))


@triton.jit
def _narrowed(values, out, origins, steps, PLACES: tl.constexpr, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    keys = small.keys_of(origins, tl.load(steps))
    bits = small.signed_bits(small.random_bits(origins, place, 0, keys, PLACES))
    small.write_state(out + place, place >= 0, None, None, tl.load(values + place), bits)


@triton.jit
def _halves(values, upper, lower, again, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    high, low = small.split(tl.load(values + place))
    tl.store(upper + place, high.to(tl.bfloat16, bitcast=True))
    tl.store(lower + place, low)
    tl.store(again + place, small.joined(high, low))


def hard_values(rows, q):
    """Of all sizes; blocks of zeros, with one value, not finite, at the ends of float32."""
    value = random(rows, q, spread=1.0)
    value[1] = 0.0
    value[2, 1:] = 0.0
    value[3, 5], value[4, 6], value[5, 7] = torch.nan, torch.inf, -torch.inf
    value[6] *= 1e-38
    value[7] = torch.randn(q).clamp(-1, 1).to(DEVICE) * 3.4e38
    value[8, ::3] = -0.0
    value[9] = torch.linspace(-1, 1, q).to(DEVICE)
    value[10, 1:] = 1e-30  # far below the smallest step
    return value


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize(
    ("offset", "run", "stride", "places"),
    [
        (2**32 - 512, 0, 0, "near"),  # up to the last index of 32 bits
        (2**32 - 300, 0, 0, "far"),
        (96, 64, 4096, "runs"),
        (96, 64, 5 * 2**31, "far"),
    ],
)
def test_codes_are_those_of_plain_torch(signed, offset, run, stride, places):
    q, rows, step, seed = 32, 16, 70_001, 0xFEDCBA98
    value = hard_values(rows, q)
    if not signed:
        value = value.abs()
    shape, strides = ((rows * q,), (1,)) if not run else ((rows * q // run, run), (stride, 1))
    noise = Noise(seed if signed else seed | LOWER, step, offset, strides)
    wanted = encode(value.view(shape), q, signed=signed, noise=noise)
    codes, scale = torch.empty_like(wanted[0]), torch.empty_like(wanted[1])
    table = Origins([Origin(offset, strides, {"exp_avg": seed})], [shape])
    assert table.places == places
    steps = torch.tensor(float(step), device=DEVICE)
    options = {"Q": q, "ROWS": rows, "enable_fp_fusion": FUSION}
    _coded[(1,)](
        value, codes, scale, table.on(torch.device(DEVICE)), steps,
        PLACES=places, SIGNED=signed, **options,
    )  # fmt: skip
    same(scale, wanted[1])
    same(codes, wanted[0])
    assert len(codes.unique()) > 90
    found = torch.empty_like(value)
    _read[(1,)](codes, scale, found, **options)
    same(found.view(shape), decode(codes, scale))


def test_bfloat16_at_random_is_that_of_plain_torch():
    value = hard_values(16, 32).view(-1)
    value[:8] = torch.tensor([3.4e38, -3.4e38, 3.3895314e38, 1e-45, -1e-40, 1.0, 2**-133, 0.0])
    seed, offset, step = 3, 2**33 + 5, 9
    wanted = round_bf16(value, Noise(seed, step, offset, (1,)))
    found = torch.empty_like(wanted)
    table = Origins([Origin(offset, (1,), {"exp_avg": seed})], [value.shape])
    steps = torch.tensor(float(step), device=DEVICE)
    _narrowed[(1,)](
        value, found, table.on(torch.device(DEVICE)), steps,
        PLACES=table.places, SIZE=512, enable_fp_fusion=FUSION,
    )  # fmt: skip
    same(found, wanted)
    assert not torch.equal(found, value.bfloat16())


def test_remainders_are_those_of_plain_torch():
    value = hard_values(16, 32).view(-1)
    ties = torch.tensor([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x00008000, 1, 0x7F800001, 0x7FFFFFFF])
    value[:7] = ties.to(torch.int32).view(torch.float32)
    wanted = split_remainder(value)
    upper, lower = torch.empty_like(wanted[0]), torch.empty_like(wanted[1])
    again = torch.empty_like(value)
    _halves[(1,)](value, upper, lower, again, SIZE=512)
    same(upper, wanted[0])
    same(lower, wanted[1])
    same(again, value)


# --- AdamW -----------------------------------------------------------------------------------

ADAMW = AdamWRule()
NUMBERS = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
FORMATS = {
    "8 bits": ("8bit", "8bit"),
    "first in 8 bits": ("8bit", None),
    "second in 8 bits, first at random": ("bf16_stochastic", "8bit"),
    "at random": ("bf16_stochastic", "bf16_stochastic"),
    "one at random": (
        torch.float16,
        "bf16_stochastic",
    ),  # not bfloat16: to that the interpreter cuts
}
MOMENTS = ("exp_avg", "exp_avg_sq")


def kept(value, key, form, noise=None):
    """State as it is stored."""
    if form == "8bit":
        codes, scale = encode(value, 64, signed=key == "exp_avg", noise=noise)
        return {key: codes, f"{key}_scale": scale}
    if form == "bf16_stochastic":
        return {key: value.bfloat16() if noise is None else round_bf16(value, noise)}
    return {key: value.to(form or torch.float32)}


def read(state, key):
    if f"{key}_scale" in state:
        return decode(state[key], state[f"{key}_scale"])
    return state[key].float()


# A whole tensor; a flat slice; a box; one of more than a chunk.
PLACES = [
    ((3, 128), 0, (128, 1)),
    ((320,), 64, (1,)),
    ((5, 64), 640, (192, 1)),
    ((70, 64), 0, (64, 1)),
]


CASES = [(name, None) for name in FORMATS]
CASES += [("8 bits", "master_weight"), ("8 bits", REMAINDER_KEY), ("at random", REMAINDER_KEY)]
if QUICK:  # every form of either moment, and every master, once
    CASES = [case for case in CASES if case not in (("8 bits", None), ("at random", None))]


@pytest.mark.parametrize(("name", "master"), CASES)
def test_adamw_keeps_moments_as_plain_torch_does(name, master):
    """Step after step, from the moments that the same kernel has with state of 32 bits."""
    forms, origins, params, states = FORMATS[name], [], [], []
    for place, (shape, offset, strides) in enumerate(PLACES):
        random_keys = [
            key for key, form in zip(MOMENTS, forms, strict=True) if isinstance(form, str)
        ]
        seeds = {key: seed_of(f"p{place}", key) for key in random_keys}
        origins.append(Origin(offset, strides, seeds))
        value = random(*shape)
        state = {"step": torch.tensor(3.0 + place, device=DEVICE)}
        for key, form in zip(MOMENTS, forms, strict=True):
            moment = random(*shape, spread=1.0)
            state |= kept(moment if key == "exp_avg" else moment.abs(), key, form)
        if master == REMAINDER_KEY:
            value, state[REMAINDER_KEY] = split_remainder(value)
        elif master is not None:
            state[master], value = value, value.half()
        params.append(value)
        states.append(state)
    tensors = AdamWTensors(params, states, origins)
    scalars = {key: number(value) for key, value in NUMBERS.items()}
    writes = torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64, device=DEVICE)
    for turn in range(3 if master is None else 1):
        grads = [random(*shape) for shape, _, _ in PLACES]
        step = Step(scalars, ADAMW.defaults, number(0.5), False, number(float(turn != 1)))
        before = [{key: tensor.clone() for key, tensor in state.items()} for state in states]
        wide = [
            {"step": state["step"].clone(), **{key: read(state, key).clone() for key in MOMENTS}}
            for state in states
        ]
        values = [value.clone() for value in params]
        if master == REMAINDER_KEY:
            pairs = zip(values, states, strict=True)
            values = [join_remainder(value, state[REMAINDER_KEY]) for value, state in pairs]
        elif master is not None:
            values = [state[master].clone() for state in states]
        # In 32 bits, with the same arithmetic.
        AdamWTensors(values, wide).step_(gradients(grads, writes), step)
        old = [value.clone() for value in params]
        tensors.step_(gradients(grads, writes), step)
        for place, state in enumerate(states):
            if turn == 1 or not writes[place]:
                same(params[place], old[place])
                for key, tensor in state.items():
                    same(tensor, before[place][key])
                continue
            assert state["step"] == before[place]["step"] + 1
            wanted = {}
            for key, form in zip(MOMENTS, forms, strict=True):
                has_noise = key in origins[place].seeds
                noise = origins[place].noise(key, state["step"]) if has_noise else None
                wanted |= kept(wide[place][key], key, form, noise)
            if master is None:
                same(params[place], values[place])
            elif master == REMAINDER_KEY:
                narrow, wanted[REMAINDER_KEY] = split_remainder(values[place])
                same(params[place], narrow)
            else:
                wanted[master] = values[place]
                same(params[place], values[place].half())
            assert state.keys() == {"step", *wanted}
            for key, tensor in wanted.items():
                same(state[key], tensor)
                assert not torch.equal(state[key], before[place][key])


# --- Muon ------------------------------------------------------------------------------------

MUON = MuonRule()
MANY = {"equilibrate": True, "renormalize": True, "variance_beta2": 0.9, "eps_form": "add"}
MUON_CASES = [
    ((8, 64), "8bit", {}, None),
    ((40, 32), "8bit", MANY, REMAINDER_KEY),  # tall
    ((16, 32), "8bit", {"compute_dtype": torch.float16, "momentum_form": "sum"}, "master_weight"),
    ((8, 24), "bf16_stochastic", {}, None),
    ((40, 32), "bf16_stochastic", {}, None),  # tall
]
if QUICK:
    del MUON_CASES[3]  # the tall one has its form


@pytest.fixture
def small_tiles(monkeypatch):
    """Several tiles in a small matrix; products, which have tests of their own, by torch."""
    if INTERPRETED:
        monkeypatch.setattr(samestep.kernels.call, "TILE", 32)
        monkeypatch.setattr(samestep.kernels.symmetric, "way_of", lambda size, depth: "torch")
    if QUICK:
        monkeypatch.setattr(samestep.kernels.call, "WIDE", 64)


@pytest.mark.parametrize(("shape", "form", "own", "master"), MUON_CASES)
@pytest.mark.usefixtures("small_tiles")
def test_muon_keeps_momentum_as_plain_torch_does(shape, form, own, master):
    """Step after step, from the momentum that the same kernels have with state of 32 bits."""
    options = {**MUON.defaults, **own}
    scalars = {key: number(value) for key, value in MUON.scalars(options).items()}
    count, key = 3, "momentum_buffer"
    # Rows of one parameter, and a part of another that is wider.
    strides = [(shape[1], 1), (shape[1], 1), (3 * shape[1], 1)]
    starts = [0, shape[0] * shape[1], 7 * 3 * shape[1] + shape[1]]
    seeds = [seed_of(name, key) for name in ("a", "a", "b")]
    places = zip(starts, strides, seeds, strict=True)
    origins = [Origin(start, stride, {key: seed}) for start, stride, seed in places]
    params, states = [random(*shape) for _ in range(count)], []
    for place in range(count):
        state = {"step": torch.tensor(5.0, device=DEVICE), **kept_momentum(random(*shape), form)}
        if "variance_beta2" in own:
            state["variance"] = torch.zeros(variance_shape(*shape), device=DEVICE)
        if master == REMAINDER_KEY:
            params[place], state[REMAINDER_KEY] = split_remainder(params[place])
        elif master is not None:
            state[master], params[place] = params[place], params[place].half()
        states.append(state)
    blocks = MuonBlocks(params, states, origins=origins)
    writes = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64, device=DEVICE)
    blocks.powers.fill_(2.0**30)  # of the step before: directions would be infinite
    powers = []
    for turn in range(3 if own == {} else 1):
        powers.append(blocks.powers.clone())
        grads = [random(*shape) for _ in range(count)]
        step = Step(scalars, options, number(0.5), False, number(float(turn != 1)))
        before = [{k: t.clone() for k, t in state.items()} for state in states]
        old, wide = [param.clone() for param in params], []
        for place, state in enumerate(states):
            same_in_32 = {k: t.clone() for k, t in state.items() if k == "variance"}
            wide.append({key: read(state, key).clone(), **same_in_32})
            if master == REMAINDER_KEY:
                old[place] = join_remainder(params[place], state[REMAINDER_KEY])
            elif master is not None:
                old[place] = state[master].clone()
        values = [value.clone() for value in old]
        muon_([(MuonBlocks(values, wide), gradients(grads, writes))], step, measure=False)
        old = [param.clone() for param in params]
        muon_([(blocks, gradients(grads, writes))], step, measure=False)
        for place, state in enumerate(states):
            if turn == 1 or not writes[place]:
                same(params[place], old[place])
                for k, tensor in state.items():
                    same(tensor, before[place][k])
                continue
            assert state["step"] == before[place]["step"] + 1
            wanted = kept_momentum(wide[place][key], form, origins[place].noise(key, state["step"]))
            wanted |= {k: t for k, t in wide[place].items() if k == "variance"}
            if master == REMAINDER_KEY:
                narrow, wanted[REMAINDER_KEY] = split_remainder(values[place])
                same(params[place], narrow)
            elif master is not None:
                wanted[master] = values[place]
                same(params[place], values[place].half())
            else:
                same(params[place], values[place])
            assert state.keys() == {"step", *wanted}
            for k, tensor in wanted.items():
                same(state[k], tensor)
                assert not torch.equal(state[k], before[place][k])
    if own == {}:  # directions were written twice, and once
        assert not (powers[1] == powers[0]).any()
        assert (blocks.powers == powers[2]).any()


def kept_momentum(value, form, noise=None):
    if form == "8bit":
        codes, scale = encode(value, 32, signed=True, noise=noise)
        return {"momentum_buffer": codes, "momentum_buffer_scale": scale}
    return {"momentum_buffer": value.bfloat16() if noise is None else round_bf16(value, noise)}
