"""Training that every axis of a mesh takes part in: a GPT with experts, in a closed loop."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from samestep.mesh import Mesh
from samestep.models.gpt import GPT, GPTConfig
from samestep.models.gpt_plan import gpt_plan
from samestep.parallel.lora import add_lora
from samestep.parallel.plan import Plan
from samestep.stress.layouts import LAYOUTS_ON_REQUEST
from samestep.stress.scenario import RATES, Loop, Scenario, on_device_of


class HybridGPT(Scenario):
    """Every rank has sequences of its own; where ranks share a batch, they have those of all."""

    name = "hybrid_gpt"
    story = "a GPT with experts over tensor, sequence, expert, pipeline and data parallel"
    loop: ClassVar[Loop] = "closed"
    has_plan = True
    layouts = ("one_process", *(n for n, own in LAYOUTS_ON_REQUEST.items() if own.mesh))
    config: ClassVar[GPTConfig] = GPTConfig(
        vocab_size=16, context=8, width=16, layers=2, heads=4, kv_heads=2, experts=4, expert_size=8
    )
    sequences: ClassVar[int] = 2  # of a rank

    def own_model(self) -> nn.Module:
        """As one process has it."""
        model = self._plain_model()
        self.adapt(model)
        return model

    def model_to_cut(self) -> nn.Module:
        """The same before `adapt`."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return self._plain_model()

    def adapt(self, model: nn.Module, mesh: Mesh | None = None) -> None:
        """What happens to it after it was cut over a mesh."""

    def _plain_model(self) -> nn.Module:
        """No vector is all ones."""
        model = GPT(self.config)
        with torch.no_grad():
            for param in model.parameters():
                if param.dim() == 1:
                    param.add_(0.1 * torch.randn_like(param))
        return model

    def plans(self) -> Sequence[Plan]:
        """How it is cut; before that, what has to be refused."""
        return (gpt_plan(self.config),)

    def options(self) -> dict[str, Any]:
        """Every step is clipped, so that norms count."""
        rules = {"*.experts.*": {"rule": "muon"}, "*.router.weight": {"rule": "adamw"}}
        return {**RATES, "max_grad_norm": 0.25, "overrides": rules}

    def tokens(self, step: int, rank: int) -> Tensor:
        """What a rank reads, (sequences, context + 1): a rule with some noise."""
        random = torch.Generator().manual_seed(self.seed + 104729 * step + rank)
        shape = (self.sequences, self.config.context + 1)
        noise = torch.randint(3, shape, generator=random)
        tokens = torch.randint(self.config.vocab_size, shape, generator=random)
        for place in range(1, shape[1]):
            tokens[:, place] = (3 * tokens[:, place - 1] + noise[:, place]) % self.config.vocab_size
        return tokens

    def loss(self, model: nn.Module, step: int, rank: int, micro: int) -> Tensor | None:
        """Of a rank's own sequences."""
        assert isinstance(model, GPT)
        tokens = on_device_of(model, self.tokens(step, rank))
        return model.loss(tokens[:, :-1], tokens[:, 1:])


class HybridLoRA(HybridGPT):
    """Factors of attention are trained, and nothing else."""

    name = "hybrid_lora"
    story = "the same with LoRA: factors that are added when the model is cut already"

    def adapt(self, model: nn.Module, mesh: Mesh | None = None) -> None:
        """Factors in layers that are cut by rows and by columns."""
        if mesh is not None and mesh.dense.size() > 1:
            mesh = None  # FSDP2 has told the weights which ranks there are
        layers = ["*.attention.[qv]", "*.attention.out"]
        add_lora(model, layers, rank=4, seed=self.seed, mesh=mesh)

    def options(self) -> dict[str, Any]:
        """Muon on one factor, AdamW on the other."""
        rules = {"*.lora_A": {"rule": "muon"}, "*.lora_B": {"rule": "adamw"}}
        return {**RATES, "max_grad_norm": 0.25, "overrides": rules}
