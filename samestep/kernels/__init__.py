"""Triton kernels for CUDA. Each has a twin in plain torch, which runs wherever these cannot.

    call         what launches are told: addresses of many tensors, the step, tiles
    elementwise  norm, AdamW; muon_tiles: both ends of Muon; part_tiles: of parts of its blocks
    symmetric    symmetric products, one triangle of them computed
    logits       the largest attention logit of each head, for QK-clip
    orthogonalize, muon, parts, adamw, norm    what calls them
    choice       whether a device can use them, or why not; how products are computed

Nothing here is imported before a step meets a CUDA device: samestep needs torch alone.
"""
