"""How the example GPT is cut."""

from samestep.models.gpt import GPTConfig
from samestep.parallel.plan import Plan


def gpt_plan(config: GPTConfig) -> Plan:
    """The plan of a model of this shape."""
    experts = bool(config.experts)
    return Plan(
        blocks=("blocks.*",),
        embedding=("embedding",),
        head=("head",),
        branches=("blocks.*.attention",) if experts else ("blocks.*.attention", "blocks.*.mlp"),
        column=("blocks.*.attention.[qkv]",)
        if experts
        else ("blocks.*.attention.[qkv]", "blocks.*.mlp.up"),
        row=("blocks.*.attention.out",)
        if experts
        else ("blocks.*.attention.out", "blocks.*.mlp.down"),
        on_stream=(
            "norm",
            "blocks.*.attention_norm",
            "blocks.*.mlp_norm",
            *(("blocks.*.mlp.router",) if experts else ()),
        ),
        on_heads=("blocks.*.attention.[qk]_norm",),
        experts={"blocks.*.mlp.experts.up": 1, "blocks.*.mlp.experts.down": 2} if experts else {},
    )
