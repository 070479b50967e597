"""How the example GPT is cut."""

from samestep.models.gpt import GPTConfig
from samestep.parallel.plan import FusedPart, Plan


def gpt_plan(config: GPTConfig) -> Plan:
    experts = bool(config.experts)
    mlp = () if experts else ("blocks.*.mlp",)
    heads = (config.heads, config.kv_heads, config.kv_heads)
    qkv = tuple(map(FusedPart, config.qkv_sizes, heads))
    whole = ["router"] if experts else []
    if config.shared_experts:
        whole += ["shared_experts.up", "shared_experts.down"]
    return Plan(
        blocks=("blocks.*",),
        embedding=("embedding",),
        head=("head",),
        branches=("blocks.*.attention", *mlp),
        column=(
            *(() if config.fused_qkv else ("blocks.*.attention.[qkv]",)),
            *(f"{each}.up" for each in mlp),
        ),
        fused={"blocks.*.attention.qkv": qkv} if config.fused_qkv else {},
        row=("blocks.*.attention.out", *(f"{each}.down" for each in mlp)),
        on_stream=(
            "norm",
            "blocks.*.attention_norm",
            "blocks.*.mlp_norm",
            *(f"blocks.*.mlp.{name}" for name in whole),
        ),
        on_heads=("blocks.*.attention.[qk]_norm",),
        experts={"blocks.*.mlp.experts.up": 1, "blocks.*.mlp.experts.down": 2} if experts else {},
    )
