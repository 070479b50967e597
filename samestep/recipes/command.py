"""`samestep recipes`: what is known of each architecture, as a table."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any

from samestep.recipes.architectures import RECIPES, Line
from samestep.tooling.request import BadRequestError, Flag

# Numbers that recipes read, of published models; several where a recipe depends on them.
PUBLISHED: dict[str, dict[str | None, dict[str, Any]]] = {
    "bloom": {"BLOOM": {"num_attention_heads": 112}},
    "deepseek_v2": {
        "DeepSeek-V2": {
            "num_attention_heads": 128, "qk_nope_head_dim": 128, "v_head_dim": 128,
            "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        }
    },
    "falcon": {
        "Falcon-40B": {
            "num_attention_heads": 128, "hidden_size": 8192, "num_kv_heads": 8,
            "new_decoder_architecture": True,
        },
        "Falcon-7B": {
            "num_attention_heads": 71, "hidden_size": 4544, "new_decoder_architecture": False,
            "multi_query": True,
        },
    },
    "gpt2": {"GPT-2": {"n_embd": 768}},
    "gpt_neox": {"GPT-NeoX-20B": {"num_attention_heads": 64}},
    "gpt_oss": {"gpt-oss-20b": {"intermediate_size": 2880}},
    "mamba": {"mamba-130m": {"state_size": 16, "time_step_rank": 48}},
    "mamba2": {
        "Mamba-Codestral-7B": {
            "hidden_size": 4096, "expand": 2, "n_groups": 8, "state_size": 128, "num_heads": 128,
        }
    },
    "modernbert": {"ModernBERT-base": {"hidden_size": 768}},
    "phi3": {
        "Phi-3-mini": {
            "hidden_size": 3072, "num_attention_heads": 32, "num_key_value_heads": 32,
        }
    },
    "qwen3_next": {
        "Qwen3-Next-80B-A3B": {
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "num_attention_heads": 16,
        }
    },
}  # fmt: skip
PUBLISHED["deepseek_v3"] = {"DeepSeek-V3": PUBLISHED["deepseek_v2"]["DeepSeek-V2"]}


@dataclass(frozen=True)
class Options:
    """Show which weights of known architectures are fused, stacked or gates.

        samestep recipes
        samestep recipes mixtral gpt_oss

    A row tells the rule of the weights that a pattern matches, and the row blocks that Muon
    orthogonalizes apart.
    """

    names: Annotated[
        tuple[str, ...],
        Flag(
            "values of model.config.model_type; all, if none is given",
            metavar="MODEL_TYPE",
            positional=True,
        ),
    ] = ()


def run(options: Options) -> int:
    for name in options.names:
        if name not in RECIPES:
            raise BadRequestError(f"there is no recipe {name!r}; choose from {', '.join(RECIPES)}")
    names = options.names or list(RECIPES)
    plain = [name for name in names if not _lines(name)]
    lines = table([name for name in names if name not in plain])
    if plain:
        lines += ["", f"Nothing is fused, stacked or a router in {', '.join(plain)}."]
    sys.stdout.write("\n".join([*lines, ""]))
    return 0


def table(names: Sequence[str]) -> list[str]:
    """A line for each line of the recipes."""
    if not names:
        return []
    rows = [
        "| `model_type` | parameters | what | rule | `split_sizes` | stored |",
        "|---|---|---|---|---|---|",
    ]
    for name in names:
        for model, line in _lines(name):
            shown = f"`{name}`" if model is None else f"`{name}` ({model})"
            split = _split(line.options.get("split_sizes"))
            stored = "(in, out)" if line.options.get("transposed") else ""
            rule = {"muon": "Muon", "adamw": "AdamW"}[line.options.get("rule", "muon")]
            cells = (shown, f"`{line.pattern}`", line.reason, rule, split, stored)
            rows.append(f"| {' | '.join(cells)} |".replace("  |", " |"))
    return rows


def _lines(name: str) -> list[tuple[str | None, Line]]:
    return [
        (model, line)
        for model, numbers in PUBLISHED.get(name, {None: {}}).items()
        for line in RECIPES[name](SimpleNamespace(**numbers))
    ]


def _split(split: tuple[int, ...] | str | None) -> str:
    if split is None:
        return ""
    if isinstance(split, tuple) and len(split) > 5:
        return f"`({split[0]}, {split[1]}) * {len(split) // 2}`"
    return f"`{split!r}`"
