"""`samestep bench client llama`: a Llama in bfloat16 with main weights, against torch and dion.

The model is transformers' where that is installed, or its twin below, of the same shapes and names.
Ours keeps fp32 main weights by itself (`master_weights=True`). torch's AdamW and dion's Muon do
not: they get them here as trainings write it by hand, and take part without as well.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

import samestep
from samestep.lab.bench.client.report import run_client
from samestep.lab.bench.client.training import DTYPES, Client, ClientOptions, Dtype, read_client
from samestep.lab.bench.gpu.measure import reason
from samestep.lab.bench.gpu.options import (
    FOLDER,
    Contestant,
    at_least,
    device_of,
    make_importable,
    peer,
    who,
)
from samestep.lab.bench.step_contestants import BETAS, DECAY, dion_muon, fused_adamw
from samestep.models.gpt import mean_loss, rotate
from samestep.tooling.request import BadRequestError

# The twin: B sequences, T tokens, C channels, H query heads, G key/value heads, D channels of one

STD = 0.02  # of all initial weights


@dataclass(frozen=True)
class LlamaShape:
    """The shape of a model; names are those of transformers' config."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


class Attention(nn.Module):
    """Causal, with fewer key and value heads than query heads, (B, T, C) to (B, T, C)."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        width, head = shape.hidden_size, shape.head_dim
        self.head_dim = head
        self.grouped = shape.num_key_value_heads != shape.num_attention_heads
        self.q_proj = nn.Linear(width, shape.num_attention_heads * head, bias=False)
        self.k_proj = nn.Linear(width, shape.num_key_value_heads * head, bias=False)
        self.v_proj = nn.Linear(width, shape.num_key_value_heads * head, bias=False)
        self.o_proj = nn.Linear(shape.num_attention_heads * head, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Mix over time; `cos` and `sin` are (T, D / 2)."""
        q, k, v = (
            part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, H or G, T, D)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    """SwiGLU, (B, T, C) to (B, T, C)."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        width, hidden = shape.hidden_size, shape.intermediate_size
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and added to the stream."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """One layer, (B, T, C) to (B, T, C)."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Llama(nn.Module):
    """Tokens (B, T) to logits (B, T, vocabulary)."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=STD)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        cos, sin = (table.to(x.dtype) for table in self._rotary(tokens.shape[1], x.device))
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits

    def _rotary(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every position's angles, (T, D / 2), in fp32."""
        pairs = self.shape.head_dim // 2
        exponents = -torch.arange(pairs, dtype=torch.float32, device=device) / pairs
        positions = torch.arange(length, dtype=torch.float32, device=device)
        angles = torch.outer(positions, self.shape.rope_theta**exponents)
        return angles.cos(), angles.sin()


def from_transformers(shape: LlamaShape, positions: int, dtype: torch.dtype) -> nn.Module:
    """The model of transformers, with weights drawn in `dtype`; ImportError where it is missing."""
    # Not a package of ours: without its types here, and not there everywhere.
    transformers: Any = import_module("transformers")
    sizes = {name: value for name, value in asdict(shape).items() if name != "rope_theta"}
    config = transformers.LlamaConfig(
        **sizes,
        max_position_embeddings=positions,
        initializer_range=STD,
        tie_word_embeddings=False,
        use_cache=False,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # and not `.to`, which would round its angles too
    try:
        model: nn.Module = transformers.LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model


# The optimizers


class MainWeights:
    """An optimizer on fp32 copies of parameters: gradients are copied in, and values back."""

    def __init__(
        self, build: Callable[[Sequence[tuple[str, Tensor]]], Any], model: nn.Module
    ) -> None:
        self._params: list[Tensor] = list(model.parameters())
        self._main: list[Tensor] = [nn.Parameter(p.detach().float()) for p in self._params]
        self._grads = [torch.zeros_like(main) for main in self._main]
        for main, grad in zip(self._main, self._grads, strict=True):
            main.grad = grad
        names = [name for name, _ in model.named_parameters()]
        self._inner = build(list(zip(names, self._main, strict=True)))
        self.param_groups = self._inner.param_groups

    @torch.no_grad()
    def step(self) -> None:
        given = [p.grad for p in self._params if p.grad is not None]
        assert len(given) == len(self._grads)
        torch._foreach_copy_(self._grads, given)
        self._inner.step()
        torch._foreach_copy_(self._params, self._main)


def is_hidden(name: str, param: Tensor) -> bool:
    """Whether Muon updates it: matrices but embedding and head, as ours routes a model."""
    return param.ndim == 2 and "embed_tokens" not in name and "lm_head" not in name


def torch_adamw(named: Sequence[tuple[str, Tensor]], lr: float) -> Any:
    return fused_adamw([param for _, param in named], lr)


def dion(named: Sequence[tuple[str, Tensor]], lr: float) -> Any:
    """At its best documented settings."""
    hidden = [param for name, param in named if is_hidden(name, param)]
    others = [param for name, param in named if not is_hidden(name, param)]
    on_gpu = named[0][1].device.type == "cuda"
    return dion_muon(hidden, others, lr, use_triton=on_gpu, use_polar_express=False)


def contestants(lr: float = 1e-3) -> tuple[Contestant, ...]:
    def ours(**options: Any) -> Callable[[nn.Module], Any]:
        return lambda model: samestep.MuonAdamW(model, lr=lr, master_weights=True, **options)

    def our_adamw(model: nn.Module) -> Any:
        return samestep.AdamW(model, lr=lr, betas=BETAS, weight_decay=DECAY, master_weights=True)

    def with_main(build: Callable[..., Any]) -> Callable[[nn.Module], Any]:
        return lambda model: MainWeights(lambda named: build(named, lr), model)

    def alone(build: Callable[..., Any]) -> Callable[[nn.Module], Any]:
        return lambda model: build(list(model.named_parameters()), lr)

    muon: dict[str, Any] = {"ours": True, "rival": "dion"}
    return (
        Contestant("ours", "samestep.MuonAdamW, master_weights=True", ours(), **muon),
        Contestant(
            "ours-graph", "the same, cuda_graph=True", ours(cuda_graph=True), **muon, default=False
        ),
        Contestant("dion", "dion's Muon, main weights by hand", with_main(dion)),
        Contestant("dion-16bit", "dion's Muon, no main weights", alone(dion), default=False),
        Contestant(
            "ours-adamw", "samestep.AdamW, master_weights=True", our_adamw, ours=True,
            rival="torch-adamw",
        ),
        Contestant("torch-adamw", "torch's AdamW, main weights by hand", with_main(torch_adamw)),
        Contestant("torch-adamw-16bit", "torch's AdamW, no main weights", alone(torch_adamw)),
    )  # fmt: skip


RISE, END = 0.1, 0.1  # of the steps until the learning rate is there; of it, what is left at last


def set_rate(optimizer: Any, step: int, steps: int) -> None:
    rise = max(1, round(RISE * steps))
    fallen = max(0, step + 1 - rise) / max(1, steps - rise)
    share = min(1.0, (step + 1) / rise) * (1 - (1 - END) * fallen)
    for group in optimizer.param_groups:
        if "initial_lr" not in group:
            group["initial_lr"] = float(group["lr"])  # dion's is a tensor that it writes to
        group["lr"] = group["initial_lr"] * share


# Options

VOCABULARY = 256  # bytes
HEAD_WIDTH = 64


@dataclass
class Options(ClientOptions):
    """Train a Llama with samestep's optimizers, torch's AdamW and dion's Muon, and compare them.

        samestep bench client llama --peer-path ~/dion
        samestep bench client llama --device cpu --layers 2 --steps 20 --batch 2

    Models start from the same weights and see the same batches. bfloat16 parameters have fp32 main
    parameters, but in the variants that are called 16bit.
    """

    variants: Annotated[tuple[str, ...], who(contestants())] = ()
    out: Annotated[Path, FOLDER] = Path("out/bench-llama")
    layers: Annotated[int, "transformer layers; --width sets the width"] = 12
    dtype: Annotated[Dtype | None, "dtype of parameters, forward and backward"] = "bfloat16"
    model: Annotated[
        Literal["transformers", "builtin"],
        "transformers: LlamaForCausalLM of that package; builtin: the same shapes without it",
    ] = "transformers"
    width: Annotated[int, f"channels of the residual stream, a multiple of {HEAD_WIDTH}"] = 768
    lr: Annotated[float, "peak learning rate of every variant"] = 1e-3

    @property
    def shape(self) -> LlamaShape:
        """Heads of 64 channels, a quarter as many for keys and values; SwiGLU of 8/3 the width."""
        heads = self.width // HEAD_WIDTH
        return LlamaShape(
            vocab_size=VOCABULARY,
            hidden_size=self.width,
            intermediate_size=-(-8 * self.width // (3 * HEAD_WIDTH)) * HEAD_WIDTH,
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 4 if heads % 4 == 0 else heads,
        )


# The model


def make_model(options: Options, seed: int) -> nn.Module:
    """A model with the weights of a seed, in the dtype of its passes."""
    torch.manual_seed(seed)
    dtype, device = DTYPES[options.pass_dtype], device_of(options.device)
    if options.model == "builtin":
        return Llama(options.shape).to(device=device, dtype=dtype)
    return from_transformers(options.shape, options.sequence, dtype).to(device)


def transformers_version(options: Options) -> str | None:
    """The version of the model's package; BadRequestError where it is asked for and missing."""
    if options.model == "builtin":
        return None
    try:
        return str(peer("transformers").__version__)
    except ImportError as error:
        raise BadRequestError(
            f"--model transformers is not available ({reason(error)}): pip install "
            "transformers, or --model builtin for the same shapes without it"
        ) from error


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    found = model(inputs)
    return mean_loss(getattr(found, "logits", found), targets)


# The command


def parse(words: Sequence[str], prog: str) -> Options:
    options = read_client(Options, contestants(), words, prog)
    at_least(HEAD_WIDTH, options, "width")
    if options.width % HEAD_WIDTH:
        raise BadRequestError(f"--width must be a multiple of {HEAD_WIDTH}, got {options.width}")
    if not 0 < options.lr < float("inf"):
        raise BadRequestError(f"--lr must be above 0, got {options.lr}")
    return options


def run(options: Options) -> int:
    make_importable(options.peer_path)
    version = transformers_version(options)
    client = Client(
        "llama",
        lambda seed: make_model(options, seed),
        loss_of,
        lambda optimizer, step: set_rate(optimizer, step, options.steps),
        {
            "what": f"a Llama, {options.model}",
            "model": options.model,
            "transformers": version,
            "config": asdict(options.shape),
            "dtype": options.pass_dtype,
            "compiled": options.compiled,
            "lr": options.lr,
            "weight_decay": DECAY,
        },
    )
    return run_client(client, contestants(options.lr), options)
