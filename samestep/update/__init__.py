"""Runs rules on tensors, in plain torch, compiled, or with Triton kernels."""
