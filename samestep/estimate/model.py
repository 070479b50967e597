"""MODEL of the command: a preset, a config.json, or a function; always on the meta device.

Shapes of known models, or that in a `config.json` of Hugging Face transformers, become modules that
take no memory; a pipeline stage is a module with some of its layers.
"""

import difflib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from samestep.groups.routing import Elsewhere
from samestep.parallel.stages import spread, view_of
from samestep.tooling.request import BadRequestError, in_one_line, named_function, read_json

if TYPE_CHECKING:
    from samestep.models.gpt import GPTConfig

# Where families differ from the usual names.
SPELLINGS = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "num_heads"),
    "vocab_size": ("vocab_size",),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim"),
}
EXPERT_PART = "experts"  # of the name of a 3-D stack
WITH_BIASES = ("gpt2", "gpt_bigcode", "opt", "gpt_neox")  # and without gates
FUSED = ("gpt2", "gpt_neox", "deepseek_v2", "deepseek_v3")
WITH_QKV_BIASES = ("qwen2",)  # and no others
WITH_QK_NORMS = ("qwen3", "qwen3_moe")


@dataclass(frozen=True)
class Shape:
    """A decoder: attention and an MLP, or experts, per layer.

    q_rank, kv_rank: of latent attention (0: none), where a head has `head` channels without and
        `rope` channels with positions, and values of `head` channels.
    dense_layers: the first ones, that have an MLP although there are experts.
    fused: queries, keys and values are one matrix, of latent attention keys and values, which
        Muon takes apart as the recipe of the model does.
    """

    name: str
    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    hidden: int
    gated: bool = True
    tied: bool = False
    biases: bool = False
    positions: int = 0  # of a learned table
    experts: int = 0
    expert_hidden: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    active_experts: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    rope: int = 0
    qk_norms: bool = False
    qkv_biases: bool = False
    fused: bool = False
    capacity: float = 0.0  # room of an expert, in even shares; 0: for all that come
    source: str = ""


def _gpt(name: str, width: int, layers: int, heads: int, positions: int, source: str) -> Shape:
    return Shape(
        name, 50257, width, layers, heads, heads, width // heads, 4 * width,
        gated=False, tied=True, biases=True, positions=positions, source=source,
    )  # fmt: skip


def _llama(name: str, width: int, layers: int, heads: int, kv_heads: int, hidden: int) -> Shape:
    source = "Llama and Llama 2 reports (arXiv 2302.13971, 2307.09288)"
    return Shape(name, 32000, width, layers, heads, kv_heads, width // heads, hidden, source=source)


_DEEPSEEK = Shape(
    "deepseek-v3", 129280, 7168, 61, 128, 128, 128, 18432,
    experts=256, expert_hidden=2048, shared_experts=1, dense_layers=3, active_experts=8,
    q_rank=1536, kv_rank=512, rope=64,
    source="DeepSeek-V3 report (arXiv 2412.19437), without its module for a second token",
)  # fmt: skip
_SHAPES = (
    _gpt("gpt2-xl", 1600, 48, 25, 1024, "GPT-2 report"),
    _llama("llama-7b", 4096, 32, 32, 32, 11008),
    _llama("llama-13b", 5120, 40, 40, 40, 13824),
    _llama("llama-70b", 8192, 80, 64, 8, 28672),
    _gpt("gpt-175b", 12288, 96, 96, 2048, "GPT-3 report (arXiv 2005.14165)"),
    _DEEPSEEK,
    replace(_DEEPSEEK, name="deepseek-v3-dense", experts=0, dense_layers=61,
            source="the dense layers of DeepSeek-V3, 61 of them, and no experts"),
    Shape("nanochat-d20", 65536, 1280, 20, 10, 10, 128, 5120, gated=False,
          source="nanochat, depth 20: width 64 x 20, four times that in the MLP"),
    Shape("parallel-muon-10b", 219520, 4096, 36, 32, 16, 128, 16384, tied=True,
          source="inferred: no shape is told for Parallel Muon's 10B model; of round shapes with "
                 "10B parameters this one has its 847.45 TFLOP"),
)  # fmt: skip
SHAPES = {shape.name: shape for shape in _SHAPES}


class Experts(nn.Module):
    """Stacks of gated MLPs: (experts, hidden, width) twice, (experts, width, hidden)."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Parameter(torch.empty(experts, hidden, width))
        self.up_proj = nn.Parameter(torch.empty(experts, hidden, width))
        self.down_proj = nn.Parameter(torch.empty(experts, width, hidden))


class Fused(nn.Linear):
    """Matrices one below the other, of which `split_sizes` has the rows."""

    def __init__(self, width: int, split_sizes: list[int], bias: bool = False) -> None:
        super().__init__(width, sum(split_sizes), bias=bias)
        self.split_sizes = split_sizes


class Router(nn.Linear):
    """Scores of experts, which every recipe leaves to AdamW."""


class Attention(nn.Module):
    """Projections alone, whole or through a small rank, and norms of heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, biases = shape.width, shape.biases or shape.qkv_biases
        of_head = shape.head + shape.rope
        queries, keys = shape.heads * of_head, shape.kv_heads * shape.head
        if shape.q_rank:
            self.q_a_proj = nn.Linear(width, shape.q_rank, bias=False)
            self.q_a_norm = nn.RMSNorm(shape.q_rank)
            by_head = [of_head] * shape.heads if shape.fused else [queries]
            self.q_b_proj = Fused(shape.q_rank, by_head)
        elif shape.kv_rank or not shape.fused:
            self.q_proj = nn.Linear(width, queries, bias=biases)
        if shape.kv_rank:
            latents = [shape.kv_rank, shape.rope]
            self.kv_a_proj = Fused(width, latents if shape.fused else [sum(latents)])
            self.kv_a_norm = nn.RMSNorm(shape.kv_rank)
            if shape.fused:
                self.kv_b_proj = Fused(shape.kv_rank, [shape.head] * 2 * shape.heads)
            else:
                self.k_b_proj = nn.Linear(shape.kv_rank, shape.heads * shape.head, bias=False)
                self.v_b_proj = nn.Linear(shape.kv_rank, shape.heads * shape.head, bias=False)
        elif shape.fused:
            self.qkv_proj = Fused(width, [queries, keys, keys], biases)
        else:
            self.k_proj = nn.Linear(width, keys, bias=biases)
            self.v_proj = nn.Linear(width, keys, bias=biases)
        if shape.qk_norms:
            self.q_norm, self.k_norm = nn.RMSNorm(shape.head), nn.RMSNorm(shape.head)
        self.o_proj = nn.Linear(shape.heads * shape.head, width, bias=shape.biases)


class MLP(nn.Module):
    """Two matrices, or three with a gate."""

    def __init__(self, width: int, hidden: int, gated: bool, biases: bool) -> None:
        super().__init__()
        if gated:
            self.gate_proj = nn.Linear(width, hidden, bias=biases)
        self.up_proj = nn.Linear(width, hidden, bias=biases)
        self.down_proj = nn.Linear(hidden, width, bias=biases)


class Layer(nn.Module):
    """A transformer layer: norms, attention, and an MLP or experts."""

    def __init__(self, shape: Shape, number: int) -> None:
        super().__init__()
        norm = nn.LayerNorm if shape.biases else nn.RMSNorm
        self.attention_norm = norm(shape.width)
        self.attention = Attention(shape)
        self.mlp_norm = norm(shape.width)
        if shape.experts and number >= shape.dense_layers:
            self.router = Router(shape.width, shape.experts, bias=False)
            self.experts = Experts(shape.experts, shape.width, shape.expert_hidden)
            if shape.shared_experts:
                hidden = shape.shared_experts * shape.expert_hidden
                self.shared_expert = MLP(shape.width, hidden, True, False)
        else:
            self.mlp = MLP(shape.width, shape.hidden, shape.gated, shape.biases)


class Decoder(nn.Module):
    """Parameters in the order of use; it has no forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        if shape.positions:
            self.position_embedding = nn.Embedding(shape.positions, shape.width)
        self.layers = nn.ModuleList(Layer(shape, number) for number in range(shape.layers))
        self.norm = (nn.LayerNorm if shape.biases else nn.RMSNorm)(shape.width)
        self.lm_head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.lm_head.weight = self.embedding.weight


def build(shape: Shape, dtype: torch.dtype) -> nn.Module:
    with torch.device("meta"):
        return Decoder(shape).to(dtype)


def gpt_shape(config: "GPTConfig") -> Shape:
    """Of the example GPT."""
    return Shape(
        name="gpt",
        vocabulary=config.vocab_size,
        width=config.width,
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head=config.head_dim,
        hidden=config.mlp_ratio * config.width,
        gated=False,
        experts=config.experts,
        expert_hidden=config.expert_hidden if config.experts else 0,
        active_experts=config.active_experts if config.experts else 0,
        qk_norms=True,
        capacity=config.capacity,
        source="samestep.models.gpt",
    )


def read_config(path: Path) -> Shape:
    """Raises BadRequestError, in one line, for a file that does not tell the shape."""
    config = read_json(path)
    if not isinstance(config, dict):
        raise BadRequestError(
            f"{str(path)!r} is no config.json: it holds a {type(config).__name__}"
        )
    config = {**config, **config.get("text_config", {})}  # of models that see more than text
    return _shape(config, path)


def _shape(config: Mapping[str, Any], path: Path) -> Shape:
    kind = config.get("model_type")
    old = kind in WITH_BIASES
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
        tied=bool(config.get("tie_word_embeddings", old and kind != "gpt_neox")),
        biases=old,
        positions=_positions(config) if old and kind != "gpt_neox" else 0,
        experts=experts,
        expert_hidden=expert_hidden,
        shared_experts=config.get("n_shared_experts") or 0,
        dense_layers=config.get("first_k_dense_replace") or 0,
        active_experts=config.get("num_experts_per_tok") or 0,
        q_rank=config.get("q_lora_rank") or 0,
        kv_rank=latent,
        rope=config.get("qk_rope_head_dim") or 0,
        qk_norms=kind in WITH_QK_NORMS,
        qkv_biases=kind in WITH_QKV_BIASES,
        fused=kind in FUSED,
        source=f"{path.name}: {config.get('model_type', 'a model')}",
    )


def _positions(config: Mapping[str, Any]) -> int:
    """Rows of the learned table; OPT's begins with two that no token has."""
    rows = config.get("n_positions") or config.get("max_position_embeddings") or 0
    return int(rows) + 2 * (config.get("model_type") == "opt")


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


@dataclass(frozen=True)
class Model:
    """What is planned. `shape` is None for a factory's, unless that made the example GPT."""

    name: str
    source: str
    module: nn.Module
    shape: Shape | None

    @property
    def parameters(self) -> int:
        """How many elements all parameters have."""
        return sum(param.numel() for param in self.module.parameters())

    @property
    def active_share(self) -> float:
        """Of the experts those that a token chooses; all, where nobody knows."""
        if self.shape is None or not self.shape.experts or not self.shape.active_experts:
            return 1.0
        return self.shape.active_experts / self.shape.experts

    def stage(self, stage: int, stages: int, per_rank: int = 1) -> nn.Module:
        """As `stage_of` makes it, once: jobs of one model ask for the same again and again."""
        key = stage, stages, per_rank
        if key not in self._stages:
            self._stages[key] = stage_of(self.module, *key)
        return self._stages[key]

    @cached_property
    def _stages(self) -> dict[tuple[int, int, int], nn.Module]:
        return {}


def load_model(text: str, dtype: torch.dtype) -> Model:
    """Raises BadRequestError, in one line."""
    if text in SHAPES:
        shape = SHAPES[text]
        return Model(text, shape.source, build(shape, dtype), shape)
    if text.endswith(".json"):
        shape = read_config(Path(text))
        return Model(shape.name, shape.source, build(shape, dtype), shape)
    if ":" in text:
        module = _made(text, dtype)
        return Model(text, "built by this function on the meta device", module, _own_shape(module))
    close = difflib.get_close_matches(text, SHAPES, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise BadRequestError(
        f"MODEL {text!r} is no preset ({', '.join(SHAPES)}), config.json or PACKAGE:FACTORY{hint}"
    )


def _made(path: str, dtype: torch.dtype) -> nn.Module:
    make = named_function(path, "MODEL")
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            module = make()
    except (Exception, SystemExit) as error:
        raise BadRequestError(
            f"MODEL {path} cannot be built on the meta device, where tensors have no values: "
            f"{in_one_line(error)}"
        ) from error
    if not isinstance(module, nn.Module):
        raise BadRequestError(f"MODEL {path} gave a {type(module).__name__}, not a torch module")
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not trainable:
        raise BadRequestError(f"MODEL {path} gave a module without trainable parameters")
    for name, param in trainable.items():
        if param.device.type != "meta":
            raise BadRequestError(
                f"MODEL {path}: parameter {name!r} is on {param.device.type!r} and would take "
                "memory: let the factory leave devices to its caller"
            )
    return module.to(dtype)


def _own_shape(module: nn.Module) -> Shape | None:
    """Of a factory's module only that of the example GPT is known."""
    from samestep.models.gpt import GPT  # with DTensors, which take long to import

    return gpt_shape(module.config) if isinstance(module, GPT) else None


def is_expert(name: str, param: Tensor) -> bool:
    """Whether it is a stack of experts, which the expert axis cuts."""
    return param.ndim == 3 and EXPERT_PART in name


def known_options(module: nn.Module) -> tuple[dict[str, dict[str, str]], dict[str, list[int]]]:
    """`overrides` and `split_sizes`, by name, that stand for a recipe of what is built here."""
    named = list(module.named_modules())
    routers = {f"{path}.weight": {"rule": "adamw"} for path, m in named if isinstance(m, Router)}
    fused = {f"{path}.weight": m.split_sizes for path, m in named if isinstance(m, Fused)}
    return routers, {name: sizes for name, sizes in fused.items() if len(sizes) > 1}


def layers_of(module: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """The list of layers: that with the most parameters."""
    lists = {name: m for name, m in module.named_modules() if isinstance(m, nn.ModuleList)}
    if not lists:
        return None
    return max(lists.items(), key=lambda item: sum(p.numel() for p in item[1].parameters()))


def stage_of(module: nn.Module, stage: int, stages: int, per_rank: int = 1) -> nn.Module:
    """A pipeline stage: its layers, with what comes before them in the first, after in the last.

    With several per rank, those of one rank of `stages`: number `stage` and every so many after it.
    """
    if stages * per_rank == 1:
        return module
    found = layers_of(module)
    if found is None or len(found[1]) < stages * per_rank:
        count = 0 if found is None else len(found[1])
        each = f" with {per_rank} stages per rank" if per_rank > 1 else ""
        raise BadRequestError(f"pp={stages}{each} needs as many layers, and the model has {count}")
    path, layers = found
    spread_out = spread(len(layers), stages * per_rank)
    mine = [spread_out[number] for number in range(stage, stages * per_rank, stages)]
    away = [f"{path}.{layer}" for layer in range(len(layers)) if not any(layer in m for m in mine)]
    before = True
    for name, _ in module.named_parameters(remove_duplicate=False):
        if name.startswith(f"{path}."):
            before = False
        elif (stage > 0) if before else (stage < stages - 1):
            away.append(name.rpartition(".")[0] or name)
    away = [n for n in dict.fromkeys(away) if not any(n.startswith(f"{o}.") for o in away)]
    own = view_of(module, away)
    for name in away:
        if name in module._parameters:
            setattr(own, name, None)
        else:  # tells routing what was there
            own.set_submodule(name, Elsewhere(module.get_submodule(name)))
    return own
