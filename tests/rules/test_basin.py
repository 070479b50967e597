"""Singular values stay where the polynomials converge, whatever is rounded.

The analysis of `samestep.rules.basin` against dense grids, its consequences (segments of the Gram
form, tables that are refused) by value, and blocks that are hard to orthogonalize through plain
torch and through the arithmetic of the kernels, judged as `benchmarks.survival` judges them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import samestep
from benchmarks.hard_blocks import KINDS, blocks_of
from benchmarks.kernel_arithmetic import BFLOAT16, FLOAT16, OLD, OLD_SEGMENTS, emulated
from benchmarks.survival import Options, judge, largest_singular_value, main, upper_bounds
from samestep.rules.basin import (
    TOLERANCE,
    as_table,
    basin_of,
    gram_segments,
    noise_of,
    unsafe_step,
)
from samestep.rules.orthogonalize import (
    POLYNOMIALS,
    cheaper_execution,
    default_compute_dtype,
    orthogonalize,
    step_coefficients,
)
from tests.limits import HANG
from tests.soak import SOAK, some, twin, twin_cases

CPU = torch.device("cpu")
HALVES = [torch.float16, torch.bfloat16]
DTYPES = [*HALVES, torch.float32, torch.float64]
EXECUTIONS = ["standard", "gram"]
FIVE = as_table(step_coefficients("polar-express"))
NARROW = [method for method in POLYNOMIALS if method != "cans"]  # have room for 16 bits
USUAL = list(POLYNOMIALS) if SOAK else ["newton-schulz", "polar-express"]


def exact_values(table, start, count=400_001):
    values = [np.geomspace(1e-7, start, count)]
    for a, b, c in table:
        s = values[-1]
        values.append(np.abs(s * (a + s**2 * (b + s**2 * c))))
    return values


# --- The analysis ----------------------------------------------------------------------------

PINNED = {
    "polar-express": (
        (0.9901, 1.9917, 1.9664, 1.8692, 1.5755, 1.1411),
        (1.0218, 2.0354, 2.0104, 1.9157, 1.6303, 1.2911),
    ),
    "newton-schulz": (
        (1.0, 1.2024, 1.2024, 1.2024, 1.2024, 1.2024),
        (1.2637, 1.2638, 1.2640, 1.2657, 1.2768, 1.3524),
    ),
}


@pytest.mark.parametrize("method", PINNED)
def test_largest_values_and_edges_of_five_steps(method):
    found = basin_of(as_table(step_coefficients(method, 5)), POLYNOMIALS[method].norm_factor)
    largest, edge = PINNED[method]
    assert found.largest == pytest.approx(largest, abs=6e-5)
    assert found.edge == pytest.approx(edge, abs=6e-5)


@pytest.mark.parametrize("steps", [1, 4, 5, 8])
@pytest.mark.parametrize("method", USUAL)
def test_largest_values_and_edges_are_those_of_a_dense_grid(method, steps):
    table = as_table(step_coefficients(method, steps))
    basin = basin_of(table, POLYNOMIALS[method].norm_factor)
    for k, values in enumerate(exact_values(table, basin.largest[0])):
        assert values.max() == pytest.approx(basin.largest[k], abs=2e-6)
    limit = basin.largest[-1] + TOLERANCE
    for k in range(steps + 1):
        inside = exact_values(table[k:], basin.edge[k] * (1 - 1e-9))[-1]
        beyond = exact_values(table[k:], basin.edge[k] * (1 + 1e-6))[-1]
        assert inside.max() <= limit + 1e-6
        assert beyond.max() > limit


def test_noise_is_that_of_the_roundoff():
    """Eight times as much in bfloat16; the parts of two steps, whose |Q| is 33."""
    narrow, wide = (noise_of(FIVE, 0, 1, dtype, few_rows=True, largest=1.0) for dtype in HALVES)
    assert wide.total == pytest.approx(8 * narrow.total, rel=0.02)
    two = noise_of(FIVE, 0, 2, torch.float16, few_rows=True, largest=1.0)
    a, b = FIVE[0][0], FIVE[1][0]
    assert two.factor == pytest.approx(0.83 * 2**-11 * a * b, rel=0.01)
    assert two.total > basin_of(FIVE).margin[2]
    many = noise_of(FIVE, 0, 2, torch.float16, few_rows=False, largest=1.0)
    assert 2 * many.total < basin_of(FIVE).margin[2]


SEGMENTS = {  # (method, steps, dtype, rows)
    ("polar-express", 5, torch.float16, 768): ((0, 2), (2, 5)),
    ("polar-express", 5, torch.float16, 64): ((0, 1), (1, 2), (2, 3), (3, 5)),
    ("polar-express", 5, torch.float32, 2): ((0, 2), (2, 5)),
    ("polar-express", 5, torch.float64, 768): ((0, 2), (2, 5)),
    ("polar-express", 5, torch.bfloat16, 64): ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5)),
    ("polar-express", 2, torch.float32, 8): ((0, 2),),
    ("polar-express", 1, torch.bfloat16, 8): ((0, 1),),
    ("newton-schulz", 5, torch.float16, 768): ((0, 2), (2, 5)),
    ("newton-schulz", 5, torch.float32, 8): ((0, 2), (2, 5)),
    ("newton-schulz", 12, torch.float32, 8): ((0, 3), (3, 6), (6, 9), (9, 12)),
}


@pytest.mark.parametrize("case", SEGMENTS, ids=str)
def test_segments_of_the_gram_form(case):
    method, steps, dtype, rows = case
    assert gram_segments(step_coefficients(method, steps), dtype, rows) == SEGMENTS[case]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("method", USUAL)
def test_segments_cover_every_step_once(method, dtype):
    for steps in range(1, 31) if SOAK else (1, 2, 5, 10, 30):
        for rows in (4, 400):
            segments = gram_segments(step_coefficients(method, steps), dtype, rows)
            assert [k for start, stop in segments for k in range(start, stop)] == [*range(steps)]


def test_few_rows_in_16_bits_run_step_by_step():
    assert cheaper_execution(64, 1024) == "standard"
    assert cheaper_execution(64, 1024, dtype=torch.float32) == "gram"
    assert cheaper_execution(72, 1024) == "gram"
    assert cheaper_execution(1024, 1024) == "standard"


# --- Tables of others ------------------------------------------------------------------------

QUINTIC = (3.4445, -4.7750, 2.0315)
# NVIDIA-NeMo/Emerging-Optimizers, orthogonalized_optimizers/muon_utils.py, which Megatron-LM uses.
MEGATRON_POLAR = [
    (8.2051, -22.9019, 16.4607), (4.0664, -2.8612, 0.5184), (3.9096, -2.8234, 0.5250),
    (3.2856, -2.4153, 0.4853), (2.2779, -1.6198, 0.3985), (1.8726, -1.2307, 0.3585),
    (1.8564, -1.2132, 0.3568), (1.8750, -1.2500, 0.3750),
]  # fmt: skip
CANS = [
    (8.4703, -25.1081, 18.6293), (4.1828, -3.1087, 0.5806), (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074), (2.2737, -1.6447, 0.4162),
]  # fmt: skip
AOL = [
    (4.0098, -7.0585, 2.4635), (3.4585, -5.5479, 2.5959), (2.7573, -3.2939, 1.4254),
    (2.7215, -3.0494, 1.3169),
]  # fmt: skip
# You Jiacheng's, as in modded-nanogpt and in dion's zeropower_via_newtonschulz5.
YOU = [
    (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012),
]  # fmt: skip
# timm/optim/muon.py, "polar_express_safer": eight steps with safety 2e-2.
EIGHT = [
    *step_coefficients("polar-express", 4),
    (2.3005307116270983, -1.6111665557258408, 0.3833374427545273),
    (1.8631210546382593, -1.2042160621002727, 0.3421879560523383),
    (1.8382572152247512, -1.1779263289537742, 0.3396513038637379),
    (1.8749999923301852, -1.2499999836060613, 0.374999991275876),
]
KNOWN = {
    "quintic, also torch's": [QUINTIC] * 5,
    "quintic, 25 steps": [QUINTIC] * 25,
    "Polar Express, also dion's": [*FIVE],
    "Polar Express, 25 steps": step_coefficients("polar-express", 25),
    "Polar Express for 8 steps": EIGHT,
    "Megatron's Polar Express": MEGATRON_POLAR,
    "Megatron's Polar Express, 15 steps": MEGATRON_POLAR + MEGATRON_POLAR[-1:] * 7,
    "You": YOU,
    "AOL": AOL,
    "AOL, 15 steps": AOL + AOL[-1:] * 11,
    "DeepSeek-V4": [QUINTIC] * 8 + [(2.0, -1.5, 0.5)] * 2,
    "cubic": [(1.5, -0.5, 0.0)] * 10,
    "classical": [(15 / 8, -10 / 8, 3 / 8)] * 12,
}


@pytest.mark.parametrize("name", [*KNOWN, "CANS"])
def test_known_tables_are_taken(name):
    """CANS has no room for 16 bits: it runs in 32."""
    table = KNOWN.get(name, CANS)
    for method in POLYNOMIALS:
        for dtype in (None, torch.float32, *([] if name == "CANS" else [torch.float16])):
            samestep.Muon(
                [nn.Parameter(torch.zeros(2, 3))],
                orthogonalize=method, ns_coefficients=table, compute_dtype=dtype,
            )  # fmt: skip
    wanted = torch.float32 if name == "CANS" else torch.float16
    assert default_compute_dtype(torch.float32, "cuda", table) == wanted


REFUSED = {
    "CANS in float16": (CANS, torch.float16, "after step 0 .* 1.0000, rounding adds up to 0.00049"),
    "CANS in bfloat16": (CANS, torch.bfloat16, "after step 0 .*compute_dtype=torch.float32"),
    "Megatron's in bfloat16": (
        MEGATRON_POLAR, torch.bfloat16, "after step 1 .* 1.9917, .* up to 0.035, and above 2.0136"
    ),
    "no such polynomial": ([(4.5, *QUINTIC[1:])] * 5, None, "float32: its exact .* at step 2"),
    "one that only grows": ([(3.0, 0.0, 0.0)] * 5, torch.float64, "to 243 at the end"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_tables_without_room_are_refused_with_the_numbers(case):
    table, dtype, message = REFUSED[case]
    with pytest.raises(ValueError, match=f"ns_coefficients cannot run in .*{message}"):
        samestep.Muon(
            [nn.Parameter(torch.zeros(2, 3))],
            orthogonalize="newton-schulz", ns_coefficients=table, compute_dtype=dtype,
        )  # fmt: skip


def test_what_is_refused_does_escape():
    """In a second, in bfloat16: no table is refused for nothing."""
    assert unsafe_step(as_table(CANS), 1.0, torch.bfloat16) is not None
    blocks = blocks_of("dangerous", (2, 4), 500, 0, CANS, CPU)
    options = {"method": "newton-schulz", "coefficients": CANS, "execution": "standard"}
    narrow = orthogonalize(blocks, compute_dtype=torch.bfloat16, **options)
    wide = orthogonalize(blocks, compute_dtype=torch.float32, **options)
    assert judge(narrow, CANS, 1.0)[1] > 2
    assert judge(wide, CANS, 1.0)[0] == 0


# --- Survival --------------------------------------------------------------------------------


def assert_in_bounds(found, method, steps):
    table = step_coefficients(method, steps)
    failures, value, place = judge(found, table, POLYNOMIALS[method].norm_factor)
    assert failures == 0, (method, steps, value, place)


def test_the_judge_sees_one_block_among_many():
    good = torch.eye(6).expand(1000, 6, 6).clone()
    limit = basin_of(FIVE, 1.01).largest[-1] + TOLERANCE
    assert judge(good, FIVE, 1.01)[0] == 0
    bounds = upper_bounds(good[:3] * torch.tensor([1.0, 2e-5, 3e4])[:, None, None])
    assert torch.allclose(bounds, 6 ** (1 / 128) * torch.tensor([1.0, 2e-5, 3e4]).double())
    for bad in (limit + 1e-4, torch.nan, torch.inf):
        block = good.clone()
        block[617, 2, 2] = bad
        failures, _, place = judge(block, FIVE, 1.01)
        assert (failures, place) == (1, 617)


COUNT = 3000 if SOAK else 1000


@twin_cases("float16-gram")
@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("arithmetic", some([FLOAT16, BFLOAT16]), ids=some(["float16", "bfloat16"]))
def test_kernels_keep_equilibrated_blocks_in_bounds(arithmetic, execution):
    for seed, method in enumerate(NARROW):
        for steps in (5, 7):
            table, factor = step_coefficients(method, steps), POLYNOMIALS[method].norm_factor
            blocks = blocks_of("equilibrated", (6, 12), COUNT, seed, table, CPU)
            found = emulated(blocks, table, execution, norm_factor=factor, arithmetic=arithmetic)
            assert_in_bounds(found, method, steps)


def test_polynomials_rounded_to_bfloat16_are_caught():
    """What the kernels once did, and what made nanochat's model NaN; the same blocks in float16."""
    blocks = blocks_of("dangerous", (6, 12), 10_000, 0, FIVE, CPU)
    largest = basin_of(FIVE, 1.01).largest[-1]

    def judged(arithmetic, segments):
        found = emulated(
            blocks, FIVE, "gram", norm_factor=1.01, arithmetic=arithmetic, segments=segments
        )
        return judge(found, FIVE, 1.01)[:2]

    failures, value = judged(OLD, OLD_SEGMENTS)
    assert failures >= 3
    assert value > 10
    # Two segments are for many rows: of six, roundings may all pull the same way.
    failures, value = judged(FLOAT16, OLD_SEGMENTS)
    assert value > largest + 0.07
    failures, value = judged(FLOAT16, None)
    assert failures == 0
    assert value < largest + 0.03


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("method", some(list(POLYNOMIALS)))
def test_plain_torch_keeps_every_kind_in_bounds(method, execution, dtype):
    if dtype in HALVES and method not in NARROW:
        with pytest.raises(ValueError, match=r"orthogonalize cannot run in b?float16"):
            samestep.Muon(
                [nn.Parameter(torch.zeros(2, 3))], orthogonalize=method, compute_dtype=dtype
            )
        return
    usual = (1, 2, 5, 7, 25) if method in USUAL else (5,)
    for steps in (1, 2, 3, 4, 5, 6, 8, 12, 15, 25) if SOAK else usual:
        table = step_coefficients(method, steps)
        for seed, kind in enumerate(KINDS):
            shape = ((3, 6), (8, 8), (12, 5))[(seed + steps) % 3]
            blocks = blocks_of(kind, shape, 20, 100 * steps + seed, table, CPU)
            blocks[7] = 0
            found = orthogonalize(
                blocks, method=method, steps=steps, execution=execution, compute_dtype=dtype
            )
            assert torch.equal(found[7], torch.zeros(shape))
            assert_in_bounds(found, method, steps)


@pytest.mark.parametrize("execution", [None, *EXECUTIONS])
@pytest.mark.parametrize("steps", [5, 6, 7, 8])
def test_low_rank_in_bfloat16(steps, execution):
    """Rank 8 of 64: it ended at 10 after 6 steps, and as NaN after 8."""
    torch.manual_seed(0)
    block = torch.randn(64, 8) @ torch.randn(8, 256)
    for dtype in HALVES:
        found = orthogonalize(block, steps=steps, compute_dtype=dtype, execution=execution)
        assert largest_singular_value(found) < 1.1411 + TOLERANCE


@pytest.mark.parametrize(
    ("method", "steps"), [("polar-express", 15), ("polar-express", 25), ("newton-schulz", 12)]
)
def test_the_gradient_of_a_sum_through_many_steps(method, steps):
    """All rows are the same; in float32, the default on a CPU, this gave NaN."""
    layer = nn.Linear(60, 30)
    layer(torch.randn(7, 60, generator=torch.Generator().manual_seed(0))).sum().backward()
    for execution in (None, *EXECUTIONS):
        found = orthogonalize(layer.weight.grad, method=method, steps=steps, execution=execution)
        assert_in_bounds(found[None], method, steps)


def test_kernels_of_many_rows_in_the_gram_form():
    for kind in KINDS:
        blocks = blocks_of(kind, (80, 120), 3, 5, FIVE, CPU)
        assert_in_bounds(emulated(blocks, FIVE, "gram", norm_factor=1.01), "polar-express", 5)


@twin
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_emulation_is_what_the_kernels_compute():
    """Through Triton's interpreter, in a process of its own: float32 sums in another order."""
    program = Path(__file__).with_name("emulation_case.py")
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", str(program)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]


def test_the_battery_runs_and_fails_when_bounds_are_broken(tmp_path, monkeypatch, capsys):
    options = Options(
        out=tmp_path, seconds=0.4, blocks=300, only="polar-express gram kernels float16"
    )
    assert main(options) == 0
    written = json.loads((tmp_path / "survival.json").read_text())
    assert [result["name"] for result in written["results"]] == [
        "polar-express gram kernels float16"
    ]
    assert written["results"][0]["blocks"] > 0
    assert "blocks" in capsys.readouterr().out
    monkeypatch.setattr(
        "benchmarks.survival.emulated", lambda blocks, *_, **__: torch.full_like(blocks, torch.nan)
    )
    assert main(options) == 1
    assert "out of bounds" in capsys.readouterr().out


def test_the_page_of_rules_has_the_intervals():
    text = (Path(samestep.__file__).parents[1] / "docs" / "rules.md").read_text()
    row = r"^\| `\"([\w-]+)\"`.* \| (\d+) \| (.*) to (.*) \| ([\d,]+) \|$"
    rows = re.findall(row, text, re.MULTILINE)
    assert {name for name, *_ in rows} == set(POLYNOMIALS)
    for name, steps, *told in rows:
        slope, values = 1.0, torch.logspace(-3, 0, 10**5, dtype=torch.float64)
        values /= POLYNOMIALS[name].norm_factor
        for a, b, c in as_table(step_coefficients(name, int(steps))):
            slope, values = slope * a, a * values + b * values**3 + c * values**5
        assert [f"{values.min():.2f}", f"{values.max():.2f}", f"{slope:,.0f}"] == told, name
