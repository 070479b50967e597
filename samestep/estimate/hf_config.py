"""The shape in a `config.json` of Hugging Face transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samestep.estimate.shapes import Shape
from samestep.tooling.request import BadRequestError

# Where families differ from the usual names.
SPELLINGS = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "num_heads"),
    "vocab_size": ("vocab_size",),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim"),
}


def read_config(path: Path) -> Shape:
    """Raises BadRequestError, in one line, for a file that does not tell the shape."""
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise BadRequestError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    except ValueError as error:
        raise BadRequestError(f"{str(path)!r} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise BadRequestError(
            f"{str(path)!r} is no config.json: it holds a {type(config).__name__}"
        )
    config = {**config, **config.get("text_config", {})}  # of models that see more than text
    return _shape(config, path)


def _shape(config: Mapping[str, Any], path: Path) -> Shape:
    old = config.get("model_type") in ("gpt2", "gpt_bigcode", "opt", "gpt_neox")
    width = _number(config, "hidden_size", path)
    heads = _number(config, "num_attention_heads", path)
    hidden = _find(config, "intermediate_size")
    if hidden is None:
        if not old:
            raise _missing(path, "intermediate_size")
        hidden = 4 * width
    experts = config.get("n_routed_experts") or config.get("num_local_experts")
    experts = experts or config.get("num_experts") or 0
    expert_hidden = config.get("moe_intermediate_size") or (hidden if experts else 0)
    latent = config.get("kv_lora_rank") or 0
    head = config.get("head_dim") or width // heads
    if latent:
        head = _number(config, "v_head_dim", path)
    return Shape(
        name=str(config.get("_name_or_path") or config.get("model_type") or path.stem),
        vocabulary=_number(config, "vocab_size", path),
        width=width,
        layers=_number(config, "num_hidden_layers", path),
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head=head,
        hidden=hidden,
        gated=not old,
        tied=bool(config.get("tie_word_embeddings", old)),
        biases=old,
        positions=(config.get("n_positions") or config.get("max_position_embeddings") or 0) * old,
        experts=experts,
        expert_hidden=expert_hidden,
        shared_experts=config.get("n_shared_experts") or 0,
        dense_layers=config.get("first_k_dense_replace") or 0,
        active_experts=config.get("num_experts_per_tok") or 0,
        q_rank=config.get("q_lora_rank") or 0,
        kv_rank=latent,
        rope=config.get("qk_rope_head_dim") or 0,
        source=f"{path.name}: {config.get('model_type', 'a model')}",
    )


def _find(config: Mapping[str, Any], key: str) -> int | None:
    return next((config[name] for name in SPELLINGS[key] if config.get(name)), None)


def _number(config: Mapping[str, Any], key: str, path: Path) -> int:
    found = _find(config, key) if key in SPELLINGS else config.get(key)
    if found is None:
        raise _missing(path, key)
    if type(found) is not int or found < 1:
        raise BadRequestError(f"{str(path)!r}: {key} must be a whole number above 0, got {found!r}")
    return found


def _missing(path: Path, key: str) -> BadRequestError:
    return BadRequestError(
        f"{str(path)!r} lacks {key!r}: give a config.json of a decoder, or PACKAGE:FACTORY"
    )
