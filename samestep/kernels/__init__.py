"""Triton kernels for CUDA; each has a twin in plain torch for devices that kernels do not support.

    call         arguments of launches: addresses of many tensors, the step, tiles
    elementwise  norm, AdamW; muon_tiles: both ends of Muon; part_tiles: both ends on parts
    symmetric    symmetric products, one triangle of them computed
    logits       the largest attention logit of each head, for QK-clip
    orthogonalize, muon, parts, adamw, norm    functions that launch the kernels
    choice       whether a device can use kernels, or why not; how products are computed

Nothing here is imported before a step meets a CUDA device: samestep needs torch alone.
"""
