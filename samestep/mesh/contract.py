"""Checks that sizes of a model are divisible by the degrees of a mesh."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

from samestep.mesh.degrees import Degrees, nearest_multiples


class ContractError(ValueError):
    """Raised for sizes that do not fit the degrees; the text has all of them."""


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model that axes divide; 0: not checked."""

    heads: int = 0  # query heads
    kv_heads: int = 0  # 0: as many as heads
    fused_qkv: bool = False  # one weight of queries, keys and values: ranks may share a head
    indexer_heads: int = 0  # of sparse attention
    mlp_width: int = 0  # channels inside an MLP
    experts: int = 0
    expert_width: int = 0  # channels inside an expert
    layers: int = 0
    stages_per_rank: int = 1  # an interleaved pipeline has several
    sequence: int = 0  # tokens
    batch: int = 0  # sequences per step, of all ranks together

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 1 if field.name == "stages_per_rank" else 0
            if not isinstance(value, int) or value < least:
                raise ContractError(
                    f"{field.name} must be a whole number, at least {least}, got {value!r}"
                )

    @property
    def effective_kv_heads(self) -> int:
        """Key and value heads as they are cut."""
        return self.kv_heads or self.heads


class Term(NamedTuple):
    """One requirement: `size` must be a multiple of `degree`."""

    what: str
    size: int
    degree_name: str  # as it is asked for
    degree: int
    choices: tuple[int, ...] = ()  # degrees that fit the world and all lines of the same degree

    @property
    def holds(self) -> bool:
        return self.size % self.degree == 0

    def __str__(self) -> str:
        line = f"{self.what} {self.size} % {self.degree_name} {self.degree} = "
        if self.holds:
            return f"{line}0"
        sizes = " or ".join(map(str, nearest_multiples(self.degree, self.size)))
        below = [choice for choice in self.choices if choice < self.degree][-1:]
        above = [choice for choice in self.choices if choice > self.degree][:1]
        degrees = " or ".join(map(str, below + above))
        instead = f", or {self.degree_name} {degrees}" if degrees else ""
        return f"{line}{self.size % self.degree}: take {self.what} {sizes}{instead}"


def terms(sizes: ModelSizes, degrees: Degrees) -> list[Term]:
    found = [term for term in _all_terms(sizes, degrees) if term.size and term.degree > 1]
    choices = {
        name: _choices(degrees, name, [term.size for term in found if term.degree_name == name])
        for name in ("tp", "ep", "pp")
    }
    return [term._replace(choices=choices.get(term.degree_name, ())) for term in found]


def check(sizes: ModelSizes, degrees: Degrees) -> None:
    """Raise ContractError with every violated requirement, and sizes that would fit."""
    broken = [str(term) for term in terms(sizes, degrees) if not term.holds]
    if broken:
        several = "" if len(broken) == 1 else f"{len(broken)} sizes do not fit: "
        raise ContractError(several + "; ".join(broken))


def _all_terms(sizes: ModelSizes, degrees: Degrees) -> Iterator[Term]:
    tp = "tp", degrees.tp
    kv_heads = sizes.effective_kv_heads
    yield Term("heads", sizes.heads, *tp)
    if sizes.fused_qkv and kv_heads < degrees.tp:  # Plan.fused: neighbours have copies of a head
        yield Term("tp", degrees.tp, "key and value heads", kv_heads)
    else:
        yield Term("key and value heads", kv_heads, *tp)
    yield Term("indexer heads", sizes.indexer_heads, *tp)
    yield Term("MLP width", sizes.mlp_width, *tp)
    if degrees.sequence_parallel:
        yield Term("sequence", sizes.sequence, *tp)
    yield Term("experts", sizes.experts, "ep", degrees.ep)
    if sizes.experts:
        followed = "tp" if degrees.expert_tensor_parallel == 0 else "expert_tensor_parallel"
        yield Term("expert width", sizes.expert_width, followed, degrees.expert_tp)
    stages = degrees.pp * sizes.stages_per_rank
    name = "pp" if sizes.stages_per_rank == 1 else f"(pp x {sizes.stages_per_rank} stages per rank)"
    yield Term("layers", sizes.layers, name, stages)
    yield Term("batch", sizes.batch, "ranks with tokens of their own", degrees.batch_ranks)


def _choices(degrees: Degrees, name: str, sizes: list[int]) -> tuple[int, ...]:
    """Values of one degree that divide the world and all sizes, the others unchanged."""
    room = degrees.data * getattr(degrees, name)
    fits = range(1, room + 1)
    return tuple(n for n in fits if all(whole % n == 0 for whole in (room, *sizes)))
