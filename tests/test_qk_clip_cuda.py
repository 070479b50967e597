"""QK-clip on a GPU: logits and weights of the formula, with graphs, small and offloaded state."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import samestep
from samestep import QKClip
from samestep.qk_clip import largest_logits
from samestep.qk_clip.logits import watched
from samestep.rules.stored import split_remainder
from tests.gpu import needs_gpu
from tests.qk_models import Net, heads_of, overrides_of, scale_by_hand, tokens_of

pytestmark = [needs_gpu, pytest.mark.own_process]
TAU, STEPS = 2.0, 6
SMALL = {"momentum_buffer": "bf16_stochastic", "exp_avg": "8bit", "master_weight": "remainder"}


def trained(kind, dtype, **options):
    """Weights after some steps, each of which has clipped some heads as the formula says."""
    model = Net(kind, dtype).cuda()
    opt = samestep.MuonAdamW(model, lr=0.05, overrides=overrides_of(kind), **options)
    clip = QKClip(opt, model, {"layers.*.attention": heads_of(kind)}, tau=TAU)
    names = [name for name, _ in model.named_parameters()]
    clipped = 0
    for step in range(STEPS):
        tokens = tokens_of(0, step)
        seen = [logits_of(layers, kind) for layers in inputs_of(model, tokens)]
        loss = cross_entropy(model(tokens.cuda()).float().flatten(0, 1), tokens.flatten().cuda())
        loss.backward()
        opt.step()
        wanted = Net(kind, torch.float64)
        wanted.load_state_dict({name: opt.full_parameter(name).cpu() for name in names})
        largest = clip.step()
        opt.zero_grad()
        for number, found in enumerate(largest.values()):
            close = 1e-5 if dtype == torch.float32 else 0.05
            torch.testing.assert_close(found, seen[number], rtol=close, atol=close)
            clipped += int((found > TAU).sum())
            scale_by_hand(kind, wanted.layers[number].attention, found.tolist(), TAU)
        for name, param in wanted.named_parameters():
            main = opt.full_parameter(name).cpu()
            torch.testing.assert_close(main.double(), param.detach(), rtol=2e-7, atol=0)
            # beside a remainder, ties are away from zero
            narrow = split_remainder(main)[0] if options.get("state_dtypes") else main.to(dtype)
            assert torch.equal(dict(model.named_parameters())[name].cpu(), narrow)
    assert clipped > STEPS
    return [opt.full_parameter(name).cpu() for name in names]


def inputs_of(model, tokens):
    """Of each layer its attention in float64 on the host, and what it is given."""
    wide = copy.deepcopy(model).cpu().double()
    x = wide.embedding(tokens)
    for layer in wide.layers:
        yield layer.attention, x.detach()
        x = layer(x)


def logits_of(pair, kind):
    """The largest logit of each head, of pairs of which one may look at the other."""
    attention, x = pair
    q, k, _ = attention.queries_keys_values(x)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    logits = q @ k.mT / q.shape[-1] ** 0.5
    return logits.masked_fill(~torch.ones_like(logits).tril().bool(), -torch.inf).amax((0, 2, 3))


@pytest.mark.parametrize("kind", ["mha", "gqa", "fused", "interleaved", "conv1d", "mla"])
def test_weights_and_logits_are_those_of_the_formula(kind):
    plain = trained(kind, torch.float32, cuda_graph=False)
    for options in ({"cuda_graph": True}, {"offload": "state"}):
        for found, wanted in zip(trained(kind, torch.float32, **options), plain, strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("kind", ["gqa", "fused"])
@pytest.mark.parametrize("small", [None, SMALL])
def test_main_parameters_are_scaled(kind, small):
    options = {"master_weights": True, "state_dtypes": small}
    plain = trained(kind, torch.bfloat16, cuda_graph=False, **options)
    for more in ({"cuda_graph": True}, {"offload": "state"}):
        again = trained(kind, torch.bfloat16, **options, **more)
        for found, wanted in zip(again, plain, strict=True):
            assert torch.equal(found, wanted)


def test_flex_attention_tells_its_largest_scores():
    """As the documentation says: what flex attention gives is told, and heads are clipped."""
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    q = torch.randn(2, 4, 256, 32, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(2, 2, 256, 32, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def causal(b, h, row, col):
        return row >= col

    mask = create_block_mask(causal, 2, 4, 256, 256, device="cuda")
    run = torch.compile(flex_attention)
    asked = AuxRequest(max_scores=True)
    _, aux = run(q, k, v, block_mask=mask, enable_gqa=True, return_aux=asked)
    wanted = largest_logits(q, k, is_causal=True)
    model = Net("gqa").cuda()
    opt = samestep.MuonAdamW(model)
    clip = QKClip(opt, model, {"layers.*.attention": heads_of("gqa")}, tau=1.0, watch=False)
    before = opt.full_parameter("layers.1.attention.q.weight")
    for layer in clip.layers:
        clip.observe(layer, aux.max_scores)
    for found in clip.step().values():
        torch.testing.assert_close(found.float(), wanted.cpu(), rtol=1e-4, atol=1e-4)
        assert (found > 1.0).all()
    assert not torch.equal(before, opt.full_parameter("layers.1.attention.q.weight"))


def test_logits_are_found_without_writing_them_down():
    """Of 16-bit attention: memory stays what it was, and the kernel is the one that was told of."""
    q = torch.randn(2, 8, 4096, 128, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(2, 2, 4096, 128, device="cuda", dtype=torch.bfloat16)
    largest_logits(q, k, is_causal=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = largest_logits(q, k, is_causal=True)
    assert torch.cuda.max_memory_allocated() - before < 1 << 20
    wanted = largest_logits(q.float(), k.float(), is_causal=True)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_more_sequences_than_a_launch_has_rows():
    q, k = (torch.randn(70_000, 2, 8, 16, device="cuda", dtype=torch.float16) for _ in range(2))
    found, wanted = (largest_logits(x, y) for x, y in ((q, k), (q.float(), k.float())))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_autocast_takes_the_kernel_too():
    attention, told = Attention(), []
    watched(attention, told.append)
    q, k = (torch.randn(2, 8, 4096, 64, device="cuda") for _ in range(2))
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            before = torch.cuda.memory_allocated()
            attention(q, k)
    # Queries and keys in 16 bits, of attention and of the kernel, and the result.
    assert torch.cuda.max_memory_allocated() - before < 8 * q.numel() * 2
    wanted = largest_logits(q.bfloat16().float(), k.bfloat16().float(), is_causal=True)
    torch.testing.assert_close(told[1], wanted, rtol=1e-5, atol=1e-5)


class Attention(torch.nn.Module):
    def forward(self, q, k):
        return scaled_dot_product_attention(q, k, k, is_causal=True)
