"""torchtitan: MuonAdamW in its container of optimizers, one for each model part.

    def llama3_debugmodel_muon() -> Trainer.Config:
        config = llama3_debugmodel()
        config.optimizer = samestep.torchtitan.optimizers(lr=3e-4)
        return config

The container is built after torchtitan has sharded the model, so there is nothing to put off.
torchtitan clips and averages gradients, schedules rates and saves by itself.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from samestep.groups.param_groups import Group
from samestep.groups.routing import routable
from samestep.layout.fused_rows import without_wrappers
from samestep.recipes.architectures import Line, fused, gate, stack


def optimizers(**options: Any) -> Any:
    """A configuration of `Optimizers`, for `Trainer.Config(optimizer=...)`.

    `options` are those of `MuonAdamW`. Needs torchtitan.
    """
    from samestep.integrations.torchtitan_container import Optimizers

    return Optimizers.Config(options=options)


def recipe(part: nn.Module) -> dict[str, Group]:
    """The facts of torchtitan's modules about their parameters, for `MuonAdamW(recipe=)`.

    `part`: a model, or one part of a pipeline.
    """
    here = {parameter.name for parameter in routable(part).parameters}
    found: dict[str, Group] = {}
    for path, module in part.named_modules():
        for line in _lines(module):
            name = ".".join(filter(None, (without_wrappers(path), line.pattern)))
            if name in here:
                found[name] = {**line.options, "reason": f"torchtitan: {line.reason}"}
    return found


def _lines(module: nn.Module) -> Iterator[Line]:
    """The facts of a module's parameters, by their names in it."""
    # By name: to import its classes would be to import all of torchtitan.
    kinds = {kind.__name__ for kind in type(module).__mro__}
    own: Any = module
    if "FusedQKVLinear" in kinds:
        size = own.head_dim
        groups = own.wqkv.out_features // (own.r_dim * size)
        split = f"interleaved:{own.heads_per_kv * size}+{size}+{size}x{groups}"
        yield fused("wqkv.weight", "query, key, value of each group", split)
    if hasattr(module, "wkv_a") and hasattr(module, "wkv_b"):  # latent attention
        heads, parts = own.n_heads, (own.qk_nope_head_dim, own.v_head_dim)
        yield fused("wq_b.weight", "queries of each head", f"heads:{heads}")
        yield fused("wkv_b.weight", "keys, values of each head", parts * heads)
        sizes = (own.kv_lora_rank, own.qk_rope_head_dim)
        yield fused("wkv_a.weight", "latent, rotary key", sizes)
    if "GptOssGroupedExperts" in kinds:
        rows = own.mlp2_weight_EDF.shape[-1]
        yield stack("mlp1_weight_EGD", "experts: gate, up, in turn", f"interleaved:2x{rows}")
        yield stack("mlp2_weight_EDF", "experts")
        for name in ("mlp1_bias_EG", "mlp2_bias_ED"):
            yield Line(name, "biases of experts", {"rule": "adamw", "role": "scalar"})
    elif "GroupedExperts" in kinds:
        for name in ("w1_EFD", "w2_EDF", "w3_EFD"):  # (experts, out, in)
            yield stack(name, "experts")
    if "TokenChoiceTopKRouter" in kinds:
        yield gate("gate.weight", "a router")
