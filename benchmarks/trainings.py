"""Training loops to compare on several ranks: each has its own copy of one GPT.

Those of samestep work on the plain model. The others are what users write today: a
DistributedDataParallel model, and an optimizer that runs in full on every rank or is sharded by
ZeroRedundancyOptimizer.
"""

import time
from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import samestep
from benchmarks.twin import Twin
from examples.gpt import GPT, GPTConfig

HEAD_WIDTH = 64


def build_model(width: int, layers: int, vocabulary: int) -> GPT:
    """A GPT drawn from torch's global generator."""
    heads = max(1, width // HEAD_WIDTH)
    shape = {"width": width, "layers": layers, "heads": heads, "kv_heads": heads}
    return GPT(GPTConfig(vocab_size=vocabulary, **shape))


class Moments(NamedTuple):
    """Seconds of one iteration on this rank."""

    whole: float
    after_forward: float
    cpu: float  # of all threads of the rank


class Training(NamedTuple):
    """A model, plain and as it is called, and what follows its backward pass."""

    plain: GPT
    called: nn.Module
    step: Callable[[], Any]
    zero_grad: Callable[[], Any]

    def iterate(self, tokens: Tensor, targets: Tensor) -> Moments:
        """One whole iteration, timed."""
        cpu, start = time.process_time(), time.perf_counter()
        loss = cross_entropy(self.called(tokens).flatten(0, 1), targets.flatten())
        forward = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        self.step()
        self.zero_grad()
        end = time.perf_counter()
        return Moments(end - start, end - forward, time.process_time() - cpu)


def forward_and_backward(model: GPT) -> Training:
    """The floor: no communication, no optimizer."""
    plain = deepcopy(model)
    return Training(plain, plain, lambda: None, plain.zero_grad)


def samestep_muon(model: GPT, **options: Any) -> Training:
    """samestep's Muon and AdamW, with the twin's numbers."""
    plain = deepcopy(model)
    optimizer = samestep.MuonAdamW(
        plain, lr=1e-3, orthogonalize="newton-schulz", adjust_lr="match_rms_adamw",
        betas=(0.9, 0.999), sharding="zero2", **options,
    )  # fmt: skip
    for group in optimizer.param_groups:  # the twin's two optimizers differ in this
        group["weight_decay"] = 0.1 if group["rule"] == "muon" else 0.01
    return Training(plain, plain, optimizer.step, optimizer.zero_grad)


def samestep_adamw(model: GPT, **options: Any) -> Training:
    """samestep's AdamW, whose defaults are torch's."""
    plain = deepcopy(model)
    optimizer = samestep.AdamW(plain, **{"sharding": "zero2", **options})
    return Training(plain, plain, optimizer.step, optimizer.zero_grad)


def ddp_twin(model: GPT, *, keep_grads: bool) -> Training:
    """Every rank orthogonalizes every matrix."""
    plain, wrapped = _wrapped(model)
    matrices = [param for param in plain.blocks.parameters() if param.ndim == 2]
    known = set(matrices)
    others = [param for param in plain.parameters() if param not in known]
    return _ddp(plain, wrapped, Twin(matrices, others).step, keep_grads)


def ddp_adamw(model: GPT, *, keep_grads: bool, **options: Any) -> Training:
    """Every rank updates everything."""
    plain, wrapped = _wrapped(model)
    optimizer = torch.optim.AdamW(plain.parameters(), **options)
    return _ddp(plain, wrapped, optimizer.step, keep_grads)


def ddp_zero_adamw(
    model: GPT, *, keep_grads: bool, bucket_view: bool, grad_view: bool = True, **options: Any
) -> Training:
    """Each rank updates its parameters and broadcasts them.

    There is no overlapped one: torch refuses ZeroRedundancyOptimizer's overlap on gloo.
    """
    plain, wrapped = _wrapped(model, grad_view)
    optimizer = ZeroRedundancyOptimizer(
        plain.parameters(),
        torch.optim.AdamW,
        parameters_as_bucket_view=bucket_view,
        **options,
    )
    return _ddp(plain, wrapped, optimizer.step, keep_grads)


def _wrapped(model: GPT, grad_view: bool = True) -> tuple[GPT, DistributedDataParallel]:
    plain = deepcopy(model)
    for name, buffer in list(plain.named_buffers()):
        # Constant tables: as plain attributes DDP does not broadcast them every iteration.
        delattr(plain, name)
        setattr(plain, name, buffer)
    return plain, DistributedDataParallel(plain, gradient_as_bucket_view=grad_view)


def _ddp(
    plain: GPT, wrapped: DistributedDataParallel, step: Callable[[], Any], keep_grads: bool
) -> Training:
    return Training(plain, wrapped, step, lambda: wrapped.zero_grad(set_to_none=not keep_grads))
