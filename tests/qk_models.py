"""Attention layers whose queries and keys lie in every way that QK-clip knows."""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from samestep import QKHeads

WIDTH, HEADS, DIM = 16, 4, 6  # heads are cut by FSDP2: 24 rows on 4 ranks
NOPE, ROPE, VALUE, RANK = 4, 2, 3, 8
GROUPED = {"gqa", "mqa", "fused", "interleaved", "conv1d"}  # queries share keys
KV_HEADS = {"mha": 4, "gqa": 2, "mqa": 1, "fused": 2, "interleaved": 2, "by_head": 4, "conv1d": 2}


class Transposed(nn.Module):
    """A linear layer that is stored as (in, out), as Hugging Face's Conv1D."""

    def __init__(self, rows):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, rows))
        self.bias = nn.Parameter(torch.empty(rows))

    def forward(self, x):
        return x @ self.weight + self.bias


class Attention(nn.Module):
    """(B, T, WIDTH) to itself; `queries_and_keys` is what its logits are made of."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.kv_heads = KV_HEADS.get(kind, HEADS)
        rows = (HEADS + 2 * self.kv_heads) * DIM
        if kind == "conv1d":
            self.qkv = Transposed(rows)
        elif kind in ("fused", "interleaved", "by_head"):
            self.qkv = nn.Linear(WIDTH, rows)
        elif kind == "mla":
            self.q_b_proj = nn.Linear(WIDTH, HEADS * (NOPE + ROPE), bias=False)
            self.kv_a_proj = nn.Linear(WIDTH, RANK + ROPE, bias=False)
            self.kv_b_proj = nn.Linear(RANK, HEADS * (NOPE + VALUE), bias=False)
        else:
            self.q, self.k, self.v = (
                nn.Linear(WIDTH, heads * DIM) for heads in (HEADS, self.kv_heads, self.kv_heads)
            )
        self.out = nn.Linear(HEADS * (VALUE if kind == "mla" else DIM), WIDTH)

    def queries_keys_values(self, x):
        """(B, H, T, D), (B, G, T, D), (B, G, T, D')."""
        if self.kind == "mla":
            latent, shared = self.kv_a_proj(x).split((RANK, ROPE), -1)
            keys, values = _heads(self.kv_b_proj(latent), NOPE + VALUE).split((NOPE, VALUE), -1)
            shared = shared[:, None].expand(-1, keys.shape[1], -1, -1)
            queries = _heads(self.q_b_proj(x), NOPE + ROPE)
            return queries, torch.cat([keys, shared], -1), values
        if self.kind in ("interleaved", "by_head"):
            groups = self.qkv(x).unflatten(-1, (self.kv_heads, -1, DIM))
            parts = groups.split((HEADS // self.kv_heads, 1, 1), -2)
            return tuple(part.flatten(2, 3).transpose(1, 2) for part in parts)
        if hasattr(self, "qkv"):
            sizes = (HEADS * DIM, self.kv_heads * DIM, self.kv_heads * DIM)
            parts = self.qkv(x).split(sizes, -1)
        else:
            parts = self.q(x), self.k(x), self.v(x)
        return tuple(_heads(part, DIM) for part in parts)

    def forward(self, x):
        q, k, v = self.queries_keys_values(x)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def _heads(rows, size):
    return rows.unflatten(-1, (-1, size)).transpose(1, 2)


def split_of(kind):
    """How queries, keys and values lie in one weight."""
    kv_heads = KV_HEADS.get(kind, HEADS)
    if kind == "interleaved":
        return f"interleaved:{HEADS // kv_heads * DIM}+{DIM}+{DIM}x{kv_heads}"
    if kind == "by_head":
        return f"interleaved:3x{HEADS}"
    return (HEADS * DIM, kv_heads * DIM, kv_heads * DIM)


def overrides_of(kind):
    """What the optimizer is told of such layers."""
    if kind == "mla":
        return {"*.kv_b_proj.weight": {"split_sizes": (NOPE, VALUE) * HEADS}}
    if kind not in ("fused", "interleaved", "by_head", "conv1d"):
        return {}
    return {"*.qkv.weight": {"split_sizes": split_of(kind), "transposed": kind == "conv1d"}}


def heads_of(kind):
    """What QK-clip is told of such a layer."""
    kv_heads = KV_HEADS.get(kind, HEADS)
    if kind == "mla":
        return QKHeads.latent(HEADS, nope=NOPE, rope=ROPE, value=VALUE)
    if kind in ("fused", "interleaved", "by_head", "conv1d"):
        return QKHeads.fused(
            "qkv.weight",
            HEADS,
            DIM,
            kv_heads,
            split_sizes=split_of(kind),
            transposed=kind == "conv1d",
        )
    return QKHeads.separate(HEADS, DIM, kv_heads, q="q.weight", k="k.weight")


class Layer(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.attention = Attention(kind)

    def forward(self, x):
        return x + self.attention(x)


class Net(nn.Module):
    """Two attention layers between an embedding and a head."""

    def __init__(self, kind="gqa", dtype=torch.float32, std=0.5):
        super().__init__()
        self.embedding = nn.Embedding(13, WIDTH)
        self.layers = nn.ModuleList(Layer(kind) for _ in range(2))
        self.head = nn.Linear(WIDTH, 13)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.normal_(std=std, generator=generator)
        self.to(dtype)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * 1.0  # no view: FSDP2 warns of these


def tokens_of(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(13, (2, 5), generator=generator)


def parts_of(kind, attention):
    """By hand: views of queries, keys and rotary queries, head by head, weight and bias."""
    if kind == "mla":
        q = attention.q_b_proj.weight.unflatten(0, (HEADS, NOPE + ROPE))
        k = attention.kv_b_proj.weight.unflatten(0, (HEADS, NOPE + VALUE))
        return [(q[:, :NOPE], k[:, :NOPE], q[:, NOPE:])]
    kv, found = attention.kv_heads, []
    for name in ("weight", "bias"):
        if kind in ("mha", "gqa", "mqa"):
            q, k = getattr(attention.q, name), getattr(attention.k, name)
            found.append((q.unflatten(0, (HEADS, DIM)), k.unflatten(0, (kv, DIM)), None))
            continue
        whole = getattr(attention.qkv, name)
        whole = whole.mT if whole.ndim == 2 and kind == "conv1d" else whole
        if kind in ("interleaved", "by_head"):
            groups = whole.unflatten(0, (kv, HEADS // kv + 2, DIM))
            queries = [group[head] for group in groups for head in range(HEADS // kv)]
            found.append((queries, groups[:, -2], None))
        else:
            q, k, _ = whole.split((HEADS * DIM, kv * DIM, kv * DIM))
            found.append((q.unflatten(0, (HEADS, DIM)), k.unflatten(0, (kv, DIM)), None))
    return found


@torch.no_grad()
def scale_by_hand(kind, attention, largest, tau, alpha=0.5):
    """The formula of K2, head by head; of queries that share a key, that of docs/qk_clip.md."""
    gammas = [min(1.0, tau / s) if s > 0 else 1.0 for s in largest]
    share = HEADS // attention.kv_heads
    for q, k, rotary in parts_of(kind, attention):
        for head, gamma in enumerate(gammas):
            of_key = min(gammas[head // share * share : (head // share + 1) * share])
            if kind in GROUPED:
                q[head] *= gamma / of_key ** (1 - alpha)
            else:
                q[head] *= gamma**alpha
            if rotary is not None:
                rotary[head] *= gamma
            if head % share == 0:
                k[head // share] *= of_key ** (1 - alpha)
