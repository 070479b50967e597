"""Describe which rows of a layer's weights hold the queries and keys of each attention head.

    QKHeads.separate(32, 128, kv_heads=8)                        Llama: q_proj, k_proj
    QKHeads.fused("qkv.weight", 32, 128, kv_heads=8)             rows of Q, then of K, then of V
    QKHeads.fused("query_key_value.weight", 16, 64, split_sizes="interleaved:3x16")  GPT-NeoX
    QKHeads.fused("c_attn.weight", 12, 64, transposed=True)      GPT-2, stored as (in, out)
    QKHeads.latent(128, nope=128, rope=64, value=128)            DeepSeek-V3, Kimi K2

Rows are outputs, also of weights that are stored as (in, out), and `split_sizes` are those of
`layout/splits.py`. A head is numbered by its place among the rows.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from samestep.layout.splits import split_of

# q, k: parts that belong to one head (or, of k, to a group of query heads). rotary: queries whose
# keys are shared by all heads. None: what no logit depends on, such as values.
Part = Literal["q", "k", "rotary"] | None


class HeadRows(NamedTuple):
    """Consecutive rows of one head; `head` numbers query heads, or key heads for part "k"."""

    part: Part
    head: int
    size: int


@dataclass(frozen=True)
class QKHeads:
    """The heads of one attention layer; `separate`, `fused` and `latent` make the usual ones.

    heads, kv_heads: how many query heads there are, and how many key heads they share.
    weights: by name of a weight inside the layer, the heads of its rows from the first to the
        last. A bias that belongs to a weight has the same rows.
    transposed: weights are stored as (in, out).
    """

    heads: int
    kv_heads: int
    weights: Mapping[str, Sequence[HeadRows]]
    transposed: bool = False

    def __post_init__(self) -> None:
        """Raise if heads cannot share keys, or rows of a head are missing."""
        if min(self.heads, self.kv_heads) < 1 or self.heads % self.kv_heads:
            raise ValueError(
                f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}"
            )
        found = {(part, head) for rows in self.weights.values() for part, head, _ in rows if part}
        wanted = {
            *(("q", head) for head in range(self.heads)),
            *(("k", head) for head in range(self.kv_heads)),
        }
        rotary = {pair for pair in found if pair[0] == "rotary"}
        for part, head in sorted(wanted ^ (found - rotary)):
            known = (part, head) in wanted
            raise ValueError(
                f"QKHeads: {'no' if known else 'some'} rows of the weights "
                f"{sorted(self.weights)} are given as {part} of head {head}, and there "
                f"are {self.heads} query and {self.kv_heads} key heads: give the rows "
                "of each head once"
            )

    @classmethod
    def separate(
        cls,
        heads: int,
        head_dim: int,
        kv_heads: int | None = None,
        *,
        q: str = "q_proj.weight",
        k: str = "k_proj.weight",
        transposed: bool = False,
    ) -> "QKHeads":
        """Describe heads whose queries and keys are separate weights, with rows head after head."""
        kv_heads = heads if kv_heads is None else kv_heads
        rows = {
            q: tuple(HeadRows("q", head, head_dim) for head in range(heads)),
            k: tuple(HeadRows("k", head, head_dim) for head in range(kv_heads)),
        }
        return cls(heads, kv_heads, rows, transposed)

    @classmethod
    def fused(
        cls,
        weight: str,
        heads: int,
        head_dim: int,
        kv_heads: int | None = None,
        *,
        split_sizes: Sequence[int] | str | None = None,
        transposed: bool = False,
    ) -> "QKHeads":
        """Describe heads whose queries, keys and values share one fused weight.

        With `split_sizes=None` the weight has rows of all queries, then all keys, then all values.
        """
        kv_heads = heads if kv_heads is None else kv_heads
        sizes = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        split = split_of(sizes if split_sizes is None else split_sizes, sum(sizes))
        wanted = tuple(size // split.groups for size in sizes)
        if split.sizes != wanted or any(size % head_dim for size in split.sizes):
            raise ValueError(
                f"split_sizes {split_sizes!r} of {weight!r} are {split.sizes} in each "
                f"of {split.groups} groups, and {heads} query heads and {kv_heads} key "
                f"and value heads of {head_dim} rows must be {wanted}, with whole heads "
                "in each group: correct heads, kv_heads, head_dim or split_sizes"
            )
        rows, counts = list[HeadRows](), {"q": 0, "k": 0, None: 0}
        parts: tuple[Part, ...] = ("q", "k", None)
        for _ in range(split.groups):
            for part, size in zip(parts, split.sizes, strict=True):
                for _ in range(size // head_dim):
                    rows.append(HeadRows(part, counts[part], head_dim))
                    counts[part] += 1
        return cls(heads, kv_heads, {weight: tuple(rows)}, transposed)

    @classmethod
    def latent(
        cls,
        heads: int,
        *,
        nope: int,
        rope: int,
        value: int,
        q: str = "q_b_proj.weight",
        kv: str = "kv_b_proj.weight",
    ) -> "QKHeads":
        """Describe the heads of multi-head latent attention.

        A query has `nope` + `rope` rows, a key and value have `nope` + `value` rows. The key's
        rotary part is shared by all heads, so it is not scaled for any of them.
        """
        q_rows, kv_rows = list[HeadRows](), list[HeadRows]()
        for head in range(heads):
            q_rows += [HeadRows("q", head, nope), HeadRows("rotary", head, rope)]
            kv_rows += [HeadRows("k", head, nope), HeadRows(None, head, value)]
        return cls(heads, heads, {q: tuple(q_rows), kv: tuple(kv_rows)})

    def rows(self, weight: str) -> int:
        """Return the number of rows of a weight."""
        return sum(size for _, _, size in self.weights[weight])

    def told(self, weight: str) -> str:
        """Describe the rows of a weight as text: "4 queries of 6 rows, 2 keys of 6 rows"."""
        words = {"q": "queries", "k": "keys", "rotary": "rotary queries", None: "others"}
        counts = Counter((part, size) for part, _, size in self.weights[weight])
        return ", ".join(f"{n} {words[part]} of {size} rows" for (part, size), n in counts.items())

    def places(self, weight: str) -> list[int]:
        """Return by row the index of its factor in [1, q of each head, k, rotary]."""
        starts: dict[Part, int] = {"q": 1, "k": 1 + self.heads}
        starts["rotary"] = starts["k"] + self.kv_heads
        return [
            0 if part is None else starts[part] + head
            for part, head, size in self.weights[weight]
            for _ in range(size)
        ]

    def query_heads(self, weight: str, start: int, stop: int) -> list[int]:
        """Return the query heads with rows in [start, stop) of a weight."""
        places = self.places(weight)[start:stop]
        return sorted({place - 1 for place in places if 0 < place <= self.heads})
