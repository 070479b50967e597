"""Run by `test_basin.py` with Triton's interpreter: emulated kernels against the kernels."""

import torch

import samestep.kernels.symmetric
from benchmarks.hard_blocks import blocks_of
from benchmarks.kernel_arithmetic import BFLOAT16, FLOAT16, emulated
from samestep.kernels.orthogonalize import orthogonalize_blocks
from samestep.kernels.symmetric import Tiling
from samestep.rules.orthogonalize import step_coefficients
from tests.inside.kernels import quick_interpreter
from tests.soak import SOAK

if not SOAK:
    quick_interpreter.install()
side = 32 if SOAK else 64  # several tiles of the largest; sums are in one order whatever it is
samestep.kernels.symmetric.TILINGS["small"] = Tiling(side, side, 32, warps=4, stages=1)
TABLE = step_coefficients("polar-express", 5)
CASES = (
    ((10, 8), "uneven rows", torch.bfloat16, BFLOAT16),
    ((6, 12), "equilibrated", torch.float16, FLOAT16),
    ((72, 80), "dangerous", torch.float16, FLOAT16),  # steps that share a Gram matrix
)
for case in CASES:
    shape, kind, dtype, arithmetic = case
    executions = ("standard", "gram")
    for execution in executions if SOAK else executions[min(1, CASES.index(case)) :][:1]:
        blocks = blocks_of(kind, shape, 2, 3, TABLE, torch.device("cpu"))
        found = orthogonalize_blocks(
            blocks, TABLE, execution, norm_factor=1.01, eps=0.0, eps_form="clamp", dtype=dtype
        )
        wanted = emulated(blocks, TABLE, execution, norm_factor=1.01, arithmetic=arithmetic)
        exact = blocks.double()
        exact = exact / (torch.linalg.matrix_norm(exact, keepdim=True) * 1.01)
        for a, b, c in TABLE:
            A = exact @ exact.mT
            exact = a * exact + (b * A + c * A @ A) @ exact
        error = float((found.double() - exact).norm())
        apart = float((found.double() - wanted.double()).norm())
        # Sums in another order flip a rounding now and then.
        assert apart < 0.4 * error, (dtype, shape, execution, error, apart)
