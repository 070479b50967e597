"""Small models for the harness."""

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from samestep.groups.routing import unwrapped
from samestep.layout.fused_rows import without_wrappers

Places = list[tuple[str, nn.Module, str]]  # name in groups, the module that has it, name there
_places: WeakKeyDictionary[nn.Module, Places] = WeakKeyDictionary()


def named_params(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return parameters by the name they have without wrappers, as in the optimizer's groups.

    Names are asked for several times a step, so a model is walked through only once: the model may
    replace its parameters (FSDP2 does), but not get further ones.
    """
    places = _places.get(model)
    if places is None:
        inner = unwrapped(model)
        places = [_place(inner, name) for name, _ in inner.named_parameters()]
        _places[model] = places
    return {name: getattr(owner, last) for name, owner, last in places}


def _place(model: nn.Module, name: str) -> tuple[str, nn.Module, str]:
    owner, _, last = name.rpartition(".")
    return without_wrappers(name), model.get_submodule(owner), last


class Matrices(nn.Module):
    """A model of bare parameters by name; no forward, since the scenario gives the gradients."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) * 0.3))


def tiny() -> nn.Module:
    """Return the model of the receipt: one AdamW parameter, Muon parameters in groups a and b.

    Sizes divide no world size, so that shards are uneven.
    """
    mu_a = {f"mu_a_{number}": (16, 12) for number in range(3)}
    mu_b = {f"mu_b_{number}": (8, 20) for number in range(2)}
    return Matrices({"adam": (23, 9), **mu_a, **mu_b})


TINY_GROUPS = [
    {"params": ["adam*"], "rule": "adamw"},
    {"params": ["mu_a*"], "rule": "muon"},
    {"params": ["mu_b*"], "rule": "muon"},
]


class Layer(nn.Module):
    """Attention with fused QKV and an MLP; `recycle` rescales neurons that began anew."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.recycle = nn.Parameter(torch.ones(2 * width))

    def forward(self, x: Tensor, recycled: bool = False) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        query, key, value = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(query, key, value))
        hidden = self.up(x).relu()
        update: Tensor = self.down(hidden * self.recycle if recycled else hidden)
        return x + update


class GPT(nn.Module):
    """A GPT with a head for the next token and one for the token after it."""

    def __init__(self, vocabulary: int = 40, width: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.second_head = nn.Linear(width, vocabulary, bias=False)
        # FSDP2 wants to hear of layers that are not used.
        self.leave_out: Callable[[nn.Module, Tensor], Tensor] = lambda layer, x: x

    def forward(
        self,
        tokens: Tensor,
        skipped: frozenset[int] = frozenset(),
        recycled: bool = False,
        second: bool = False,
    ) -> Tensor:
        """Return the loss of (batch, length); `skipped` layers and unused parts get no gradient."""
        x = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            x = self.leave_out(layer, x) if number in skipped else layer(x, recycled)
        loss = _next_token_loss(self.head(x), tokens, 1)
        return loss + _next_token_loss(self.second_head(x), tokens, 2) if second else loss


def gpt() -> nn.Module:
    return GPT()


class MixtureOfExperts(nn.Module):
    """A router and experts as separate modules; an expert without tokens has no gradient."""

    def __init__(self, vocabulary: int = 24, width: int = 12, experts: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(experts))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of tokens (tokens,); a token goes to the expert of its number."""
        x = self.embedding(tokens)
        weights = self.router(x).softmax(-1)
        chosen = tokens % len(self.experts)
        parts = [x]
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero().flatten()
            if len(mine):
                update = expert(x[mine]) * weights[mine, number, None]
                parts.append(torch.zeros_like(x).index_add(0, mine, update))
        return _next_token_loss(self.head(torch.stack(parts).sum(0)), tokens, 1)


def _next_token_loss(logits: Tensor, tokens: Tensor, distance: int) -> Tensor:
    vocabulary = logits.shape[-1]
    guesses = logits[..., :-distance, :].reshape(-1, vocabulary)
    return nn.functional.cross_entropy(guesses, tokens[..., distance:].reshape(-1))
