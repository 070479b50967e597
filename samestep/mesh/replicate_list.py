"""The replicate list: parameters that must not be sharded in computation.

Weights that hold several projections one after the other (queries, keys and values; gate and up)
stay whole as well, unless a plan tells their parts (`Plan.fused`): rows are cut in equal parts from
the top, and a forward that splits what it is given would take the last rows of one projection for
another. No error tells, only the loss.

The model and expert axes cut what a rank computes with. The data axis does not count: FSDP2
gathers a parameter before it is used.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import Size, nn
from torch.distributed.tensor import DTensor

from samestep.layout.fused_rows import whole_name

CUT_AXES = ("expert", "model")
Cuts = Callable[[str, nn.Parameter], Iterable[tuple[str, int]]]
FUSED = "fused projections"

# Routing and whatever is sensitive to it, norms, recurrent state, adapters. Names as in common
# models; patterns as in a shell, case ignored, dots are characters like others.
DEFAULT_PATTERNS: Mapping[str, tuple[str, ...]] = {
    "norms and QK-norm": ("*norm*", "*ln_[0-9f]*", "*layernorm*"),
    "router": ("*router*", "*gate.weight", "*gate.bias", "*e_score_correction*"),
    "shared and null experts": ("*shared_expert*", "*null_expert*"),
    "state-space internals": (
        "*mamba*", "*ssm*", "*a_log", "*dt_bias", "*dt_proj*", "*x_proj*", "*conv1d*",
    ),
    "Engram": ("*engram*",),
    "mHC": ("*mhc*", "*hyper_connection*"),
    "n-gram hash projections": ("*ngram_hash*", "*ngram*proj*"),
    "LoRA": ("*lora*",),
    FUSED: (
        "*qkv*", "*c_attn*", "*query_key_value*", "*in_proj_weight", "*in_proj_bias", "*to_kv*",
        "*w_pack*", "*gate_up*", "*gate_and_up*", "*w13*",
    ),
}  # fmt: skip

SEPARATE = (
    "the first rank would have rows of the first projection alone (queries without their keys and "
    "values) and take some of them for the others. Name its parts in Plan.fused, give each "
    "projection a weight of its own, "
)


class ReplicateListError(ValueError):
    """Raised for sharded parameters that must stay whole; the text names all."""


class ShardRule(NamedTuple):
    """Permission to shard matching parameters along a dim over an axis.

    `although` is the reason why something on the replicate list may be cut all the same: some
    code makes it right, and the reason names it.
    """

    pattern: str
    axis: str  # "model" or "expert"
    dim: int
    although: str = ""

    def __str__(self) -> str:
        return f"{self.pattern!r}: Shard({self.dim}) over {self.axis}"


class ReplicateList(NamedTuple):
    """Patterns of parameters that stay whole, and rules for those that may be sharded."""

    rules: tuple[ShardRule, ...] = ()
    patterns: Mapping[str, tuple[str, ...]] = DEFAULT_PATTERNS

    def kind(self, name: str) -> str | None:
        """Why a parameter must stay whole; None if it need not."""
        lowered = name.lower()
        for kind, patterns in self.patterns.items():
            if any(fnmatchcase(lowered, pattern) for pattern in patterns):
                return kind
        return None

    def check(
        self,
        model: nn.Module,
        whole_shapes: Mapping[str, Size] | None = None,
        cuts_of: Cuts | None = None,
    ) -> None:
        """Raise unless every sharded parameter may be sharded.

        Args:
            model: After it was laid out.
            whole_shapes: The shape of each parameter before (`shapes`), to find those that were
                cut without being DTensors.
            cuts_of: Gives the axes and dims by name and parameter, where no placements tell them:
                in one program for several devices tilings do.
        """
        problems = []
        for name, param in model.named_parameters():
            found = cuts(param) if cuts_of is None else cuts_of(name, param)
            problems += [self._problem(name, param.dim(), *cut) for cut in found]
            before = None if whole_shapes is None else whole_shapes.get(name)
            if before is not None and before != param.shape:
                problems.append(
                    f"{name!r} was {tuple(before)} and is {tuple(param.shape)}: it was cut, and "
                    "is no DTensor that says how"
                )
        told = [problem for problem in problems if problem]
        if told:
            raise ReplicateListError("; ".join(told))

    def _problem(self, name: str, dims: int, axis: str, dim: int) -> str:
        """Why a sharding is not allowed; empty if it is."""
        names = {name, whole_name(name)}  # a rule for a fused weight is one for its parts
        matching = [
            rule
            for rule in self.rules
            if rule.axis == axis and any(fnmatchcase(each, rule.pattern) for each in names)
        ]
        allowed = [rule for rule in matching if rule.dim == dim]
        cut = f"{name!r} is Shard({dim}) over {axis}"
        kind = self.kind(name)
        if kind == FUSED and not (axis == "model" and (dim == 0 if dims < 3 else dim > 0)):
            kind = None  # whole experts, or columns, which all projections share
        if kind is not None and not any(rule.although for rule in allowed):
            return (
                f"{cut}, and is on the replicate list ({kind}): "
                f"{SEPARATE if kind == FUSED else ''}keep it whole, or give a "
                "ShardRule that says `although` what makes it right"
            )
        if allowed:
            return ""
        if matching:
            return f"{cut}, and the rule is {matching[0]}"
        return f"{cut}, and no ShardRule allows it"


def shapes(model: nn.Module) -> dict[str, Size]:
    """Shapes of all parameters before a model is laid out."""
    return {name: param.shape for name, param in model.named_parameters()}


def cuts(param: nn.Parameter) -> Iterator[tuple[str, int]]:
    """Mesh axes and dims over which a parameter is sharded during computation."""
    if not isinstance(param, DTensor):
        return
    names: Sequence[str] = param.device_mesh.mesh_dim_names or ()
    for axis, placement in zip(names, param.placements, strict=True):
        # A strided shard is a shard too, and a private class of torch's.
        dim = getattr(placement, "dim", None)
        if axis in CUT_AXES and dim is not None:
            yield axis, dim
