"""Tokens on their way to experts, in one process."""

import pytest
import torch
from torch.nn.functional import linear, relu

from samestep.models.gpt import Experts, GPTConfig
from samestep.parallel.experts import TokenDispatch

CONFIG = GPTConfig(width=8, heads=2, kv_heads=1, experts=4, expert_size=6)


def given(tokens=10, dtype=torch.float32):
    torch.manual_seed(0)
    experts = Experts(CONFIG).to(dtype)
    for stack in experts.parameters():
        torch.nn.init.normal_(stack)
    x = torch.randn(tokens, 8, dtype=dtype, requires_grad=True)
    scores = torch.rand(tokens, 4, dtype=dtype, requires_grad=True)
    chosen = scores.topk(2).indices
    return experts, x, chosen, scores.gather(1, chosen), scores


def expected(experts, x, chosen, weights):
    """Token by token."""
    rows = []
    for token, which, how_much in zip(x, chosen.tolist(), weights, strict=True):
        made = [linear(relu(linear(token, experts.up[e])).square(), experts.down[e]) for e in which]
        rows.append(sum(w * row for w, row in zip(how_much, made, strict=True)))
    return torch.stack(rows)


@pytest.mark.parametrize("capacity", [0.0, 2.0])
def test_every_token_gets_the_mix_of_its_experts(capacity):
    experts, x, chosen, weights, scores = given(dtype=torch.float64)
    wanted = (x, scores, experts.up, experts.down)
    reference = expected(experts, x, chosen, weights)
    target = torch.randn_like(reference)
    grads = torch.autograd.grad(reference, wanted, target, retain_graph=True)
    dispatch = TokenDispatch(4, capacity)
    found = dispatch(x, chosen, weights, experts)
    torch.testing.assert_close(found, reference)
    for own, theirs in zip(torch.autograd.grad(found, wanted, target), grads, strict=True):
        torch.testing.assert_close(own, theirs)
    assert dispatch.overflow == 0


def test_what_finds_no_room_adds_nothing_and_is_counted():
    experts, x, _, _, _ = given(6)
    chosen = torch.tensor([[0, 1]] * 6)
    weights = torch.full((6, 2), 0.5)
    dispatch = TokenDispatch(4, capacity=1.0)  # 6 x 2 / 4: room for three at each
    found = dispatch(x, chosen, weights, experts)
    torch.testing.assert_close(found[:3], expected(experts, x[:3], chosen[:3], weights[:3]))
    assert torch.equal(found[3:], torch.zeros(3, 8))
    assert dispatch.overflow == 6
    dispatch(x, chosen, weights, experts)
    assert dispatch.overflow == 12


@pytest.mark.parametrize("capacity", [0.0, 1.0])
def test_no_tokens(capacity):
    experts, x, chosen, weights, _ = given()
    found = TokenDispatch(4, capacity)(x[:0], chosen[:0], weights[:0], experts)
    assert found.shape == (0, 8)
    found.sum().backward()
    assert torch.equal(experts.up.grad, torch.zeros_like(experts.up))


def test_16_bits_are_mixed_in_32():
    experts, x, chosen, weights, _ = given()
    found = TokenDispatch(4)(x.bfloat16(), chosen, weights, experts.bfloat16())
    assert found.dtype == torch.float32
