"""Seeds for random numbers without devices, with the same results.

`torch.manual_seed` keeps the seed for CUDA, XPU and MTIA until somebody uses them, each with the
stack of whoever has called, as text. Those take a millisecond, more the deeper the stack is, and
nearly every test and every rank sets a seed. `make soak` has torch as it is.
"""

import torch


def install() -> None:
    """For the rest of this process and its children, if this torch has CPUs alone."""
    if torch.__version__.startswith("2.13.") and not torch.backends.cuda.is_built():
        torch.random._manual_seed_impl = lambda seed: torch.default_generator.manual_seed(int(seed))
