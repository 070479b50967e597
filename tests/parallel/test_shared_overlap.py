"""A shared expert computes while rows travel to the other experts, and so does its backward."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from samestep.mesh import build
from samestep.models.gpt import GPT, GPTConfig, gpt_plan, mean_loss
from samestep.parallel.stack import Stack
from tests.ranks import run_forked

CONFIG = GPTConfig(
    vocab_size=32, context=8, width=16, layers=1, heads=4, kv_heads=2,
    experts=4, expert_size=8, shared_experts=1,
)  # fmt: skip


class Events:
    """Tells in which order the first layer sends rows, waits for them, and runs its experts."""

    def __init__(self, model, monkeypatch):
        self.found = []
        layer = model.blocks[0].mlp
        self._tell_of(layer.shared_experts, "shared expert")
        self._tell_of(layer.experts, "experts")
        real = dist.all_to_all_single

        def told(*args, async_op=False, **keywords):
            work = real(*args, async_op=async_op, **keywords)
            self.found.append("rows leave")
            return Work(work, self.found)

        monkeypatch.setattr(dist, "all_to_all_single", told)

    def _tell_of(self, module, name):
        told = set()

        def watch_gradient(*_):
            # FSDP2 has put the weights in place that this forward uses.
            weight = next(module.parameters())
            if weight not in told:
                told.add(weight)
                weight.register_hook(lambda grad: self.found.append(f"gradient of {name}"))

        module.register_forward_pre_hook(watch_gradient)
        module.register_forward_hook(lambda *_: self.found.append(name))


class Work:
    """Tells when somebody waits."""

    def __init__(self, work, found):
        self._work, self._found = work, found

    def wait(self):
        self._work.wait()
        self._found.append("rows are here")


def one_step(config, mesh, rank, patch, recompute):
    """The loss and all gradients of a step, and what happened in it."""
    torch.manual_seed(0)
    model = GPT(config)
    stack = Stack(model, gpt_plan(config), mesh, loss=mean_loss, recompute=recompute)
    events = Events(model, patch)
    torch.manual_seed(1 + rank)
    tokens = torch.randint(32, (2, 9))
    loss = stack.backward(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    grads = {name: getattr(p.grad, "_local_tensor", p.grad) for name, p in model.named_parameters()}
    return {"loss": loss, **grads}, events.found


def on_rank(rank):
    mesh, found = build(ep=2), {}
    for capacity, recompute in ((0.0, False), (1.0, True)):
        config = replace(CONFIG, capacity=capacity)
        both = []
        for overlap in (True, False):
            with pytest.MonkeyPatch.context() as patch:
                config = replace(config, overlap_shared=overlap)
                both.append(one_step(config, mesh, rank, patch, recompute))
        (beside, order), (after, plain_order) = both
        differing = [name for name in after if not torch.equal(after[name], beside[name])]
        found[capacity] = differing, float(after["loss"]), order, plain_order
    return found


EXCHANGE = ["rows leave", "rows are here"]
FORWARD = ["rows leave", "shared expert", "rows are here", "experts", *EXCHANGE]
BACKWARD = [
    *EXCHANGE, "gradient of experts",
    "rows leave", "gradient of shared expert", "rows are here",
]  # fmt: skip
PLAIN_FORWARD = [*EXCHANGE, "experts", *EXCHANGE, "shared expert"]
PLAIN_BACKWARD = ["gradient of shared expert", *EXCHANGE, "gradient of experts", *EXCHANGE]


def test_shared_experts_compute_while_rows_travel():
    for found in run_forked(2, on_rank):
        for capacity, again in ((0.0, 0), (1.0, 1)):
            differing, loss, order, plain_order = found[capacity]
            assert differing == []
            assert loss > 1
            assert order == FORWARD + again * FORWARD + BACKWARD
            # A recomputation ends when backward has what it needs: before the shared expert's end.
            assert plain_order == PLAIN_FORWARD + again * PLAIN_FORWARD[:-1] + PLAIN_BACKWARD
