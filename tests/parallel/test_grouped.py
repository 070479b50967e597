"""One product of all experts, beside a product for each."""

import pytest
import torch
from torch.nn.functional import linear

from samestep.models.gpt import Experts, GPTConfig
from samestep.parallel import grouped
from samestep.parallel.experts import TokenDispatch
from samestep.parallel.grouped import grouped_linear
from tests.gpu import needs_gpu

COUNTS = [5, 0, 7, 1]


def given(dtype=torch.float32, columns=16, rows=8, device="cpu"):
    torch.manual_seed(0)
    options = {"dtype": dtype, "device": device}
    x = torch.randn(sum(COUNTS), columns, **options).requires_grad_()
    stack = torch.randn(len(COUNTS), rows, columns, **options).requires_grad_()
    return x, stack, torch.randn(sum(COUNTS), rows, **options)


def results(x, stack, target, products, counts=COUNTS):
    found = grouped_linear(x, stack, counts, products)
    return found, *torch.autograd.grad(found, (x, stack), target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_ways_give_the_same_bits(dtype):
    """On this CPU; the formula is each expert's own, expert by expert."""
    x, stack, target = given(dtype)
    loop, one = (results(x, stack, target, products) for products in ("loop", "grouped"))
    for found, expected in zip(one, loop, strict=True):
        assert torch.equal(found, expected)
    ends = torch.tensor(COUNTS).cumsum(0).tolist()
    for expert, (count, end) in enumerate(zip(COUNTS, ends, strict=True)):
        part = slice(end - count, end)
        assert torch.equal(one[0][part], linear(x[part], stack[expert]))
        assert one[2][expert].abs().sum() > 0 or not count


def test_gradients_of_a_sum():
    x, stack, _ = given()
    for one, loop in zip(
        *(
            torch.autograd.grad(
                grouped_linear(x, stack, torch.tensor(COUNTS), how).sum(), (x, stack)
            )
            for how in ("grouped", "loop")
        ),
        strict=True,
    ):
        assert torch.equal(one, loop)


def test_rows_of_another_expert_are_seen(monkeypatch):
    """A product that takes starts for ends."""
    x, stack, target = given()
    right = results(x, stack, target, "loop")
    whole = grouped.grouped_mm
    monkeypatch.setattr(
        grouped, "grouped_mm", lambda a, b, offs: whole(a, b, offs=offs.roll(1).cummax(0).values)
    )
    assert not torch.equal(results(x, stack, target, "grouped")[0], right[0])


def test_no_rows():
    x, stack, _ = given()
    for products in ("auto", "loop", "grouped"):
        found = grouped_linear(x[:0], stack, [0] * 4, products)
        assert found.shape == (0, 8)
        assert torch.equal(*torch.autograd.grad(found.sum(), stack), torch.zeros_like(stack))


def test_autocast_counts():
    x, stack, _ = given()
    with torch.autocast("cpu", torch.bfloat16):
        one, loop = (grouped_linear(x, stack, COUNTS, how) for how in ("grouped", "loop"))
    assert one.dtype == loop.dtype == torch.bfloat16
    assert torch.equal(one, loop)


def test_what_torch_cannot_do_is_told_and_auto_does_it():
    x, stack, _ = given(columns=6)
    with pytest.raises(ValueError, match=r"multiples of 16 bytes, and these are 8 x 6 of torch.fl"):
        grouped_linear(x, stack, COUNTS, "grouped")
    assert grouped_linear(x, stack, COUNTS).shape == (13, 8)
    x, stack, _ = given(torch.float64)
    with pytest.raises(ValueError, match=r"does not support torch.float64"):
        grouped_linear(x, stack, COUNTS, "grouped")


def test_experts_take_the_products_they_were_asked_for(monkeypatch):
    made = {}
    for products in ("loop", "grouped"):
        torch.manual_seed(0)
        config = GPTConfig(
            width=8, heads=2, kv_heads=1, experts=4, expert_size=16, expert_products=products
        )
        experts = Experts(config)
        for stack in experts.parameters():
            torch.nn.init.normal_(stack)
        calls = []
        whole = grouped.grouped_mm
        with monkeypatch.context() as patch:
            patch.setattr(
                grouped,
                "grouped_mm",
                lambda *a, **k: calls.append(0) or whole(*a, **k),  # noqa: B023
            )
            x, scores = torch.randn(10, 8), torch.rand(10, 4)
            made[products] = TokenDispatch(4)(x, scores.topk(2).indices, scores[:, :2], experts)
        assert len(calls) == (2 if products == "grouped" else 0)
    assert torch.equal(made["loop"], made["grouped"])
    with pytest.raises(ValueError, match="expert_products must be one of auto, grouped, loop"):
        GPTConfig(expert_products="each")


@needs_gpu
@pytest.mark.own_process
def test_on_a_gpu_one_kernel_equals_one_for_each():
    x, stack, target = given(torch.bfloat16, 64, 32, "cuda")
    assert grouped._pays(x, stack)
    exact = results(*(t.detach().double().requires_grad_() for t in (x, stack, target)), "loop")
    for found, other, expected in zip(
        results(x, stack, target, "auto"), results(x, stack, target, "loop"), exact, strict=True
    ):
        # Both round sums in fp32 to 16 bits, from products that are exact in fp32.
        bound = 2.0**-8 * expected.abs().max()
        assert (found - expected).abs().max() <= bound
        assert (other - expected).abs().max() <= bound
