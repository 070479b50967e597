"""QK-clip on transformers' own classes: heads are found, and their logits shrink as they should."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import samestep
from samestep.recipes.attention import ATTENTION, NORMALIZED
from tests.recipe_models import CASES

pytest.importorskip("transformers", reason="transformers is not installed")

TAU = 0.05


@pytest.mark.parametrize("name", CASES)
def test_logits_of_the_first_layer_are_cut_to_tau(name):
    case = CASES[name]
    model = case.make().double().train()
    kind = model.config.model_type
    if kind in NORMALIZED:
        with pytest.raises(ValueError, match="normalizes queries and keys"):
            samestep.QKClip(samestep.MuonAdamW(model), model)
        return
    if kind not in ATTENTION:
        with pytest.raises(ValueError, match="is unknown: pass layers="):
            samestep.QKClip(samestep.MuonAdamW(model), model)
        return
    model.config._attn_implementation = "sdpa"
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # GPT-2 drops embeddings
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(5.0)  # transformers begins with logits near 0
    clip = samestep.QKClip(samestep.MuonAdamW(model), model, tau=TAU)
    inputs = {key: t.double() if t.is_floating_point() else t for key, t in case.inputs().items()}
    model(**inputs)
    first, before = next(iter(clip.step().items()))
    model(**inputs)
    after = clip.step()[first]
    assert (before > TAU).any()
    torch.testing.assert_close(
        after, before.clamp(max=TAU), rtol=1e-6, atol=1e-9
    )  # DeepSeek-V2 rotates in fp32


def test_every_known_architecture_is_tried():
    assert {CASES[name].make().config.model_type for name in CASES} >= ATTENTION.keys() | NORMALIZED
