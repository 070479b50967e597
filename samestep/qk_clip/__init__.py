"""QK-clip, the "Clip" of MuonClip: queries and keys are scaled down where attention logits grow.

    clip = samestep.QKClip(opt, model, tau=100.0)
    loss.backward(); opt.step(); clip.step(); opt.zero_grad()

docs/qk_clip.md explains QK-clip; clip.py scales the weights, logits.py finds the logits.
"""

from samestep.layout.attention_heads import HeadRows, QKHeads
from samestep.qk_clip.clip import QKClip
from samestep.qk_clip.logits import largest_logits

__all__ = ["HeadRows", "QKClip", "QKHeads", "largest_logits"]
