"""A rule run on tensors: in plain torch, compiled, or by Triton kernels."""
