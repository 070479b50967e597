"""Models of a config.json of Hugging Face transformers, as modules on the meta device.

If transformers is installed, its own class is built, with the class's own defaults. Otherwise only
the types of `KNOWN` are built, with exactly the parameters of transformers' classes; any other type
or option is refused, because its parameters could be miscounted.
"""

import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from samestep.lab.estimate.decoder import Shape, build
from samestep.tooling.request import BadRequestError, in_one_line, read_json

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Known:
    """A type of decoder whose parameters are those of a `Shape`.

    defaults: values of transformers' class for keys that a file may lack.
    counted_as: the only value that a `Shape` covers, of options that change parameters.
    traits: fields of the `Shape` that no key of the file gives.
    spelled: other names of keys, of which the first that is present counts.
    extra_positions: rows of a learned table of positions that no token has; None: no table.
    """

    defaults: Config = field(default_factory=dict)
    counted_as: Config = field(default_factory=dict)
    traits: Config = field(default_factory=dict)
    spelled: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    extra_positions: int | None = None


_UNBIASED = {"attention_bias": False}
_OLD = {"gated": False, "biases": True}
_LATENT = {
    "first_k_dense_replace": 0, "kv_lora_rank": 512, "q_lora_rank": 1536, "n_routed_experts": 64,
    "n_shared_experts": 2, "moe_intermediate_size": 1407, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128,
}  # fmt: skip
KNOWN = {
    "llama": Known(counted_as={**_UNBIASED, "mlp_bias": False}),
    "mistral": Known({"num_key_value_heads": 8}),
    "gemma": Known(
        {"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True}, _UNBIASED
    ),
    "qwen2": Known({"num_key_value_heads": 32}, traits={"qkv_biases": True}),
    "qwen3": Known(
        {"num_key_value_heads": 32, "head_dim": 128}, _UNBIASED, traits={"qk_norms": True}
    ),
    "qwen3_moe": Known(
        {"num_key_value_heads": 4, "num_experts": 128, "moe_intermediate_size": 768},
        {**_UNBIASED, "decoder_sparse_step": 1, "mlp_only_layers": []},
        traits={"qk_norms": True},
    ),
    "mixtral": Known({"num_key_value_heads": 8, "num_local_experts": 8}),
    "gpt2": Known(
        {"tie_word_embeddings": True, "positions": 1024},
        {"add_cross_attention": False},
        {**_OLD, "fused": True},
        {
            "hidden_size": ("n_embd", "hidden_size"),
            "num_hidden_layers": ("n_layer", "num_hidden_layers"),
            "num_attention_heads": ("n_head", "num_attention_heads"),
            "intermediate_size": ("n_inner",),
            "positions": ("n_positions", "max_position_embeddings"),
        },
        extra_positions=0,
    ),
    "gpt_neox": Known({}, {"attention_bias": True}, {**_OLD, "fused": True}),
    "opt": Known(
        {"tie_word_embeddings": True, "positions": 2048},
        {
            "enable_bias": True, "do_layer_norm_before": True, "_remove_final_layer_norm": False,
            "layer_norm_elementwise_affine": True,
        },
        _OLD,
        {"intermediate_size": ("ffn_dim",), "positions": ("max_position_embeddings",)},
        extra_positions=2,
    ),
    "deepseek_v2": Known(_LATENT, {**_UNBIASED, "mlp_bias": False}, {"fused": True}),
    "deepseek_v3": Known(
        {
            **_LATENT, "first_k_dense_replace": 3, "n_routed_experts": 256, "n_shared_experts": 1,
            "moe_intermediate_size": 2048,
        },
        _UNBIASED,
        {"fused": True},
    ),
}  # fmt: skip


class NotCountedError(BadRequestError):
    """An option changes parameters in a way that a `Shape` does not have."""


class Configured(NamedTuple):
    """A model of a config.json; `shape` is None where activations cannot be estimated."""

    name: str
    source: str
    module: nn.Module
    shape: Shape | None


def configured(path: Path, dtype: torch.dtype) -> Configured:
    """Build the model of a config.json; raise BadRequestError if the file describes none."""
    config = read_json(path)
    if not isinstance(config, dict):
        raise BadRequestError(
            f"{str(path)!r} is no config.json: it holds a {type(config).__name__}"
        )
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise _missing(path, "model_type")
    name = str(config.get("_name_or_path") or kind)
    if find_spec("transformers") is None:
        if kind not in KNOWN:
            raise BadRequestError(
                f"not one of the known types: {str(path)!r} is of type {kind!r}, and without "
                f"transformers those are {', '.join(KNOWN)}. Install transformers, whose own model "
                "is counted then, or give PACKAGE:FACTORY"
            )
        counted = known_shape(config, kind, path)
        return Configured(name, counted.source, build(counted, dtype), counted)
    shape: Shape | None = None
    if kind in KNOWN:
        with suppress(NotCountedError):  # parameters are counted without it
            shape = known_shape(config, kind, path)
    module, source = _of_transformers(config, kind, path)
    if shape is not None and _elements(build(shape, dtype)) != _elements(module):
        shape = None  # of another class than that with a head, or of a version that differs
    return Configured(name, f"{path.name}: {kind}, {source}", module.to(dtype), shape)


def _elements(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _of_transformers(config: dict[str, Any], kind: str, path: Path) -> tuple[nn.Module, str]:
    """Build the class that a file names, or else `AutoModelForCausalLM`; return its source too."""
    import transformers

    version = f"transformers {transformers.__version__}"
    if kind not in transformers.CONFIG_MAPPING:
        raise BadRequestError(
            f"not one of the known types: {str(path)!r} is of type {kind!r}, which {version} does "
            "not have: install a version that has it, or give PACKAGE:FACTORY"
        )
    named = [getattr(transformers, each, None) for each in config.get("architectures") or ()]
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            read = transformers.CONFIG_MAPPING[kind].from_dict(config)
            if named and isinstance(named[0], type):
                module = named[0](read)
            else:
                module = transformers.AutoModelForCausalLM.from_config(read)
    except Exception as error:
        raise BadRequestError(
            f"{str(path)!r}: {version} cannot build a {kind!r} of it on the meta device: "
            f"{in_one_line(error)}"
        ) from error
    finally:
        transformers.logging.set_verbosity(level)
    return module, f"{type(module).__name__} of {version}"


def known_shape(config: Config, kind: str, path: Path) -> Shape:
    """Return the shape of a known model type; raise NotCountedError if no `Shape` covers it."""
    known = KNOWN[kind]
    config = {**known.defaults, **config}

    def find(key: str) -> Any:
        return next((config[k] for k in known.spelled.get(key, (key,)) if config.get(k)), None)

    def number(key: str) -> int:
        found = find(key) or known.defaults.get(key)
        if found is None:
            raise _missing(path, known.spelled.get(key, (key,))[0])
        if type(found) is not int or found < 1:
            raise BadRequestError(
                f"{str(path)!r}: {key} must be a whole number above 0, got {found!r}"
            )
        return found

    width, heads = number("hidden_size"), number("num_attention_heads")
    latent = config.get("kv_lora_rank") or 0
    counted_as = dict(known.counted_as)
    if "v_head_dim" in known.defaults:
        counted_as["qk_nope_head_dim"] = config["v_head_dim"]
    if kind == "opt":
        counted_as["word_embed_proj_dim"] = width
    for key, value in counted_as.items():
        if config.get(key) not in (None, value):
            raise NotCountedError(
                f"{str(path)!r}: {key} is {config[key]!r}, and without transformers a {kind!r} is "
                f"counted with {value!r} alone: install transformers, or give PACKAGE:FACTORY"
            )
    hidden = 4 * width if kind == "gpt2" and not find("intermediate_size") else 0
    hidden = hidden or number("intermediate_size")
    experts = config.get("n_routed_experts") or config.get("num_local_experts")
    experts = experts or config.get("num_experts") or 0
    rows = 0
    if known.extra_positions is not None:
        rows = number("positions") + known.extra_positions
    return Shape(
        name=kind,
        vocabulary=number("vocab_size"),
        width=width,
        layers=number("num_hidden_layers"),
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head=config["v_head_dim"] if latent else config.get("head_dim") or width // heads,
        hidden=hidden,
        tied=bool(config.get("tie_word_embeddings", False)),
        positions=rows,
        experts=experts,
        expert_hidden=config.get("moe_intermediate_size") or (hidden if experts else 0),
        shared_experts=config.get("n_shared_experts") or 0,
        dense_layers=config.get("first_k_dense_replace") or 0,
        active_experts=config.get("num_experts_per_tok") or 0,
        q_rank=config.get("q_lora_rank") or 0,
        kv_rank=latent,
        rope=config.get("qk_rope_head_dim") or 0,
        source=f"{path.name}: {kind}",
        **known.traits,
    )


def _missing(path: Path, key: str) -> BadRequestError:
    return BadRequestError(
        f"{str(path)!r} lacks {key!r}: give a config.json of a decoder, or PACKAGE:FACTORY"
    )
