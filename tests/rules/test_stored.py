"""Codes, random rounding and remainders: exactly what `samestep.rules.stored` promises."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch

from samestep.rules import noise as noise_file
from samestep.rules.noise import Noise, Origin, seed_of
from samestep.rules.stored import (
    block_size,
    code_dtype,
    decode,
    encode,
    join_remainder,
    round_bf16,
    split_remainder,
)

SIGNS = pytest.mark.parametrize("signed", [True, False])


def draw(*shape, signed=True, spread=3.0, seed=0):
    """Values over many powers of ten, as moments are."""
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(shape, generator=generator)
    value *= 10 ** (spread * torch.randn(shape, generator=generator)).clamp(-20, 6)
    return value if signed else value.abs()


def noise_of(tensor, step=3, seed=77):
    return Noise(seed, step, 0, tensor.stride())


def ladder(signed, scale):
    """All values that a block of this scale can have, by code, in float64."""
    if signed:
        codes = np.arange(-127, 128)
        return torch.from_numpy(scale * codes * np.abs(codes) / 127.0**2)
    return torch.from_numpy(scale * (np.arange(256) / 255.0) ** 4)


def words(patterns):
    """float32 of 32-bit patterns."""
    return torch.from_numpy(np.asarray(patterns, dtype=np.uint32).view(np.float32).copy())


def pattern(tensor):
    return tensor.contiguous().view(torch.int32)


# --- random bits ----------------------------------------------------------------------------


def mixed_words(x):
    """lowbias32 as its author wrote it, of Python numbers."""
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


def bits_of_element(seed, step, index):
    """What `Noise` promises for one element."""
    first = mixed_words(mixed_words(step) ^ seed % 2**32)
    second = mixed_words(first ^ 0x9E3779B1)
    word = (index % 2**32 ^ (index >> 32) * 0x9E3779B1 % 2**32) + first & 0xFFFFFFFF
    word = ((word ^ word >> 16) * 0x7FEB352D + second) % 2**32
    word = (word ^ word >> 15) * 0x846CA68B % 2**32
    word ^= word >> 16
    return word % 2**16 if seed >> 32 else word >> 16


@pytest.mark.parametrize("offset", [0, 2**31 - 7, 2**32 - 9, 5 * 2**32 + 3])
@pytest.mark.parametrize("step", [1, 70_000, torch.tensor(123456.0)])
@pytest.mark.parametrize("lower", [0, 1])
def test_bits_are_those_of_seed_step_and_index(offset, step, lower, monkeypatch):
    monkeypatch.setattr(noise_file, "CHUNK", 8)  # chunks within a row, and of several rows
    for shape, strides in (
        ((3, 20), (1000, 1)),
        ((7, 3), (3, 1)),
        ((2, 5), (1, 40)),
        ((1, 4), (9, 1)),
    ):
        seed = 0xDEADBEEF | lower << 32
        found = Noise(seed, step, offset, strides).bits(torch.empty(shape))
        for place in np.ndindex(shape):
            index = offset + int(np.dot(place, strides))
            assert int(found[place]) == bits_of_element(seed, int(step), index)


def test_bits_of_a_device_that_is_not_read_are_the_same(monkeypatch):
    """There the step stays a tensor, and so do the keys."""
    tensor = torch.empty(6, 50)
    wanted = Noise(5, 9, 11, (100, 1)).bits(tensor)
    monkeypatch.setattr(noise_file, "on_host", lambda tensor: False)
    assert torch.equal(Noise(5, torch.tensor(9.0), 11, (100, 1)).bits(tensor), wanted)


def test_bits_of_neighbours_steps_and_seeds_have_nothing_in_common():
    tensor = torch.empty(1 << 16)
    base = Noise(seed_of("a.weight", "exp_avg"), 100, 0, (1,))
    found = base.bits(tensor)
    others = {
        "next step": base._replace(step=101).bits(tensor),
        "next key": base._replace(seed=seed_of("a.weight", "exp_avg_sq")).bits(tensor),
        "next seed": base._replace(seed=base.seed + 1).bits(tensor),
        "next element": base._replace(offset=1).bits(tensor),
        "next row": base._replace(offset=4096).bits(tensor),
    }
    count, room = len(tensor), 5 / math.sqrt(len(tensor))  # five standard deviations
    for bit in range(16):
        assert abs((found >> bit & 1).double().mean() - 0.5) < room / 2
    for name, other in others.items():
        differing = [(found ^ other) >> bit & 1 for bit in range(16)]
        assert all(abs(d.double().mean() - 0.5) < room / 2 for d in differing), name
        left, right = (x.double() for x in (found, other))
        assert abs(torch.corrcoef(torch.stack([left, right]))[0, 1]) < room, name
    assert 0.62 < len(found.unique()) / count < 0.64  # 1 - 1/e of as many values


def test_seeds_are_of_name_and_key():
    seed = int.from_bytes(hashlib.sha256(b"layer.weight").digest()[:4], "little")
    assert seed_of("layer.weight", "exp_avg") == seed
    assert seed_of("layer.weight", "exp_avg_sq") == seed | 1 << 32
    origin = Origin(40, (10, 1), {"exp_avg": 7})
    assert origin.noise("exp_avg", 2) == Noise(7, 2, 40, (10, 1))


# --- 8 bits ---------------------------------------------------------------------------------


def test_sizes_of_blocks():
    assert [block_size(n) for n in (1024, 384, 192, 96, 48, 1, 0)] == [
        256,
        128,
        64,
        32,
        None,
        None,
        256,
    ]
    assert [block_size(1024, most) for most in (256, 64, 32)] == [256, 64, 32]
    assert code_dtype("momentum_buffer") is code_dtype("exp_avg") is torch.int8
    assert code_dtype("exp_avg_sq") is code_dtype("max_exp_avg_sq") is torch.uint8


@SIGNS
@pytest.mark.parametrize("how", ["nearest", "random"])
def test_a_value_gets_one_of_the_two_codes_beside_it(signed, how):
    value = draw(64, 256, signed=signed, spread=1.0)
    codes, scale = encode(
        value, 64, signed=signed, noise=noise_of(value) if how == "random" else None
    )
    assert codes.dtype == (torch.int8 if signed else torch.uint8)
    assert codes.shape == (64, 256)
    assert torch.equal(scale, value.abs().view(64, 4, 64).amax(2))
    found = decode(codes, scale).double()
    for block, own, largest in zip(
        value.view(-1, 64), found.view(-1, 64), scale.view(-1), strict=True
    ):
        steps = ladder(signed, largest.double().item())
        place = torch.searchsorted(steps, block.double()).clamp(1, len(steps) - 1)
        low, high = steps[place - 1], steps[place]
        close = 1e-6 * high.abs().maximum(low.abs())
        assert (own >= low - close).all()
        assert (own <= high + close).all()
        if how == "nearest":
            kept = block > steps[1] if not signed else block == block  # or it is rounded up
            error = (own - block.double()).abs()
            assert (error <= (high - low) / 2 + close)[kept].all()


@SIGNS
def test_what_codes_stand_for_is_kept_whatever_the_bits(signed):
    """Also after scaling: a moment that does not change does not wander."""
    every = torch.arange(-127, 128) if signed else torch.arange(256)
    codes = every.to(torch.int8 if signed else torch.uint8).repeat(2)[: 256 * 1]
    for exponent in range(-20, 20, 3):
        for digits in (1.0, 1.1, 1.9999999):
            scale = torch.tensor([digits * 2.0**exponent])
            value = decode(codes, scale)
            assert value.abs().max() == scale
            for step in (None, 1, 2, 3):
                noise = None if step is None else noise_of(value, step)
                again = encode(value, 256, signed=signed, noise=noise)
                assert torch.equal(again[0], codes)
                assert torch.equal(again[1], scale)


def test_a_root_with_another_last_digit_leads_to_the_same_code():
    """That of a GPU is off by 2^-23 of itself at most, and takes a code for one below or above."""
    ends = np.array([0.5, 2**14 - 0.5]) * 2.0**-14  # of all lines
    beside = 0
    for code in range(1, 127):
        y = np.float32(code**2) * (1 + np.arange(-40, 41) * 2.0**-23)
        root = np.sqrt(y.astype(np.float32).astype(np.float64))
        guesses = [np.floor(root * (1 + sign * 2.0**-23)) for sign in (-1, 0, 1)]
        found = [
            guess[:, None] + ((2 * guess + 1)[:, None] * ends < (y - guess**2)[:, None])
            for guess in guesses
        ]
        unsure = guesses[0] != guesses[2]
        beside += unsure.sum()
        assert (found[0] == found[1]).all()
        assert (found[2] == found[1]).all()
        assert (found[1][unsure] == code).all()
    assert beside > 200


def draws_of(count, value, rounded):
    """Values rounded many times, in several places and steps."""
    places = value.repeat(count // 10, 1)
    return torch.cat([rounded(places, noise_of(places, step)) for step in range(10)]).double()


@SIGNS
def test_rounding_is_right_in_the_mean(signed):
    value = draw(256, signed=signed, spread=0.7)

    def rounded(values, noise):
        return decode(*encode(values, 256, signed=signed, noise=noise))

    found = draws_of(4000, value, rounded)
    counted = value > value.max() / 255.0**4 if not signed else value == value
    spread = found.std(0) / math.sqrt(len(found))
    error = (found.mean(0) - value.double()).abs()
    assert (error <= 5 * spread + 1e-6 * value.abs())[counted].all()
    assert (found.std(0) > 0).double().mean() > 0.9


@SIGNS
def test_zeros_stay_zero_and_no_second_moment_becomes_zero(signed):
    value = draw(4, 64, signed=signed)
    value[1] = 0.0
    value[2, ::2] = 0.0
    value[3, :] = 1e-30  # far below the smallest step
    value[3, 5] = 1.0
    codes, scale = encode(value, 32, signed=signed, noise=noise_of(value))
    assert scale[1].tolist() == [0.0, 0.0]
    zero = value == 0
    assert (codes[zero] == 0).all()
    assert (decode(codes, scale)[zero] == 0).all()
    if not signed:
        assert (decode(codes, scale)[~zero] > 0).all()


@SIGNS
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_so(signed, bad):
    value = draw(3, 64, signed=signed)
    value[1, 40] = bad if signed else abs(bad)
    codes, scale = encode(value, 32, signed=signed, noise=noise_of(value))
    found = decode(codes, scale)
    assert not found[1, 32:].isfinite().any()
    assert found[1, :32].isfinite().all()
    assert found[[0, 2]].isfinite().all()
    assert found[1, 32:].isnan().all() == math.isnan(bad)
    if signed and math.isinf(bad):
        assert found[1, 40] == bad


@SIGNS
@pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-38, 1e38, 3.4e38])
def test_values_at_the_ends_of_float32(signed, size):
    value = torch.linspace(0, 1, 64).mul_(size)
    codes, scale = encode(value, 64, signed=signed, noise=noise_of(value))
    found = decode(codes, scale)
    assert found.isfinite().all()
    assert found[-1] == value[-1]
    assert (found - value).abs().max() <= size / 10 + 1e-44


@SIGNS
def test_a_cut_is_coded_as_the_whole_is(signed, monkeypatch):
    """Boxes, flat ranges, views of a stack: with the same indices they get the same codes."""
    monkeypatch.setattr(noise_file, "CHUNK", 256)
    value = draw(6, 10, 192, signed=signed)
    whole = Noise(9, 4, 0, value.stride())
    codes, scale = encode(value, 64, signed=signed, noise=whole)
    for first, rows, cols in (
        (slice(0, 6), slice(2, 7), slice(0, 192)),
        (slice(1, 5), slice(0, 10), slice(64, 192)),
        (slice(3, 4), slice(9, 10), slice(128, 192)),
        (slice(2, 6), slice(1, 3), slice(64, 128)),
    ):
        offset = first.start * 1920 + rows.start * 192 + cols.start
        box = value[first, rows, cols].contiguous()
        own = encode(box, 64, signed=signed, noise=whole._replace(offset=offset))
        assert torch.equal(own[0], codes[first, rows, cols])
        blocks = slice(cols.start // 64, cols.stop // 64)
        assert torch.equal(own[1], scale[first, rows, blocks])
    flat = encode(value.view(-1)[640:5760], 64, signed=signed, noise=Noise(9, 4, 640, (1,)))
    assert torch.equal(flat[0], codes.view(-1)[640:5760])
    assert torch.equal(flat[1], scale.view(-1)[10:90])
    empty = encode(value[:0], 64, signed=signed, noise=whole)
    assert empty[0].shape == (0, 10, 192)
    assert empty[1].shape == (0, 10, 3)
    assert decode(*empty).shape == (0, 10, 192)
    for shape in ((0,), (4, 0)):  # which do not tell how many share a scale
        nothing = torch.empty(shape)
        codes, scales = encode(nothing, 0, signed=signed, noise=noise_of(nothing))
        assert codes.shape == scales.shape == shape


def test_an_average_that_moves_by_less_than_a_step_arrives():
    """What rounding to the nearest would not do: from 1 to 1/2 by less than a step at a time."""
    target, beta, steps = 0.5, 0.99, 300
    ends = {}
    for random in (True, False):
        value = torch.ones(128, 32)
        value[:, 0] = 4.0  # the scale, which does not change
        for step in range(1, steps + 1):
            value[:, 1:] = beta * value[:, 1:] + (1 - beta) * target
            noise = noise_of(value, step) if random else None
            value = decode(*encode(value, 32, signed=False, noise=noise))
            value[:, 0] = 4.0
        ends[random] = value[:, 1:].double().mean().item()
    assert ends[False] > 0.99
    assert abs(ends[True] - (target + 0.5 * beta**steps)) < 0.01


# --- bfloat16 at random ---------------------------------------------------------------------


def patterns():
    """All upper halves, with lower halves at the ends and in the middle."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    return [upper | lower for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]


def test_bfloat16_at_random_is_a_neighbour_and_keeps_what_is_exact():
    for own in patterns():
        value = words(own)
        found = round_bf16(value, noise_of(value)).float()
        assert torch.equal(found.isnan(), value.isnan())
        down = words(own & 0xFFFF0000)
        up = words((own & 0xFFFF0000) + np.uint32(0x10000) * (own & 0xFFFF != 0))
        finite = value.isfinite()
        assert found[finite].isfinite().all()
        beside = (pattern(found) == pattern(down)) | (pattern(found) == pattern(up))
        assert beside[~value.isnan()].all()
        assert torch.equal(found[value.isinf()], value[value.isinf()])


def test_bfloat16_at_random_is_right_in_the_mean():
    above = 1 + torch.arange(129) / 2**14
    value = torch.cat([above, -3e-5 * above])
    found = draws_of(4000, value, round_bf16)
    spread = found.std(0) / math.sqrt(len(found))
    assert ((found.mean(0) - value.double()).abs() <= 5 * spread + 1e-12).all()


def test_a_cut_is_rounded_as_the_whole_is():
    value = draw(7, 33)
    found = round_bf16(value, Noise(1, 2, 0, (33, 1)))
    part = round_bf16(value[2:5, 4:30], Noise(1, 2, 2 * 33 + 4, (33, 1)))
    assert torch.equal(part, found[2:5, 4:30])
    turned = round_bf16(value.mT, Noise(1, 2, 0, (1, 33)))
    assert torch.equal(turned, found.mT)


# --- remainders -----------------------------------------------------------------------------


def test_a_remainder_gives_back_every_number():
    for own in patterns():
        master = words(own)
        param, remainder = split_remainder(master)
        found = join_remainder(param, remainder)
        number = ~master.isnan()
        assert torch.equal(pattern(found)[number], pattern(master)[number])
        assert torch.equal(found.isnan(), master.isnan())
        assert torch.equal(param.isnan(), master.isnan())
        # To the nearest, also up to infinity; at a tie away from zero.
        nearest = master.to(torch.bfloat16)
        tie = torch.from_numpy((own & 0xFFFF) == 0x8000)
        assert torch.equal(param[number & ~tie], nearest[number & ~tie])
        away = words((own & 0xFFFF0000) + np.uint32(0x10000)).to(torch.bfloat16)
        assert torch.equal(param[number & tie], away[number & tie])


def test_a_remainder_of_a_parameter_that_was_set_is_small():
    param, remainder = split_remainder(draw(1000, spread=0.5))
    for value in (0.0, -0.0):
        param.fill_(value)
        found = join_remainder(param, remainder)
        assert found.abs().max() < 1e-38
    param.fill_(3.0)
    assert (join_remainder(param, remainder) - 3.0).abs().max() <= 3 * 2.0**-8
