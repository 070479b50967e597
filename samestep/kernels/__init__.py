"""Triton kernels for CUDA. Each has a twin in plain torch, which runs wherever these cannot.

    tables       addresses of many tensors, for one launch
    elementwise  norm, AdamW, and both ends of Muon
    symmetric    symmetric products, one triangle of them computed
    orthogonalize, muon, adamw, norm    what calls them
    choice       whether a device and a group can use them, or why not

Nothing here is imported before a step meets a CUDA device: samestep needs torch alone.
"""
