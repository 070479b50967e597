"""Finds experts and routers by names and shapes in models without a recipe.

A stack of experts is several matrices, and Muon takes it matrix by matrix. A router scores experts:
it is no hidden matrix, and AdamW's. Whether a stack is stored as (experts, out, in) or as (experts,
in, out) follows from the width that its router reads, or from what the class of the experts says of
itself (transformers' `is_transposed`, `is_concatenated`); that gate and up lie in one stack, from
twice as many outputs as the way back has inputs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from samestep.groups.param_groups import Group

if TYPE_CHECKING:
    from samestep.groups.routing import NamedParameter

    Routers = Mapping[str, Sequence[NamedParameter]]  # by the path of the layer

EXPERTS = re.compile(r"(^|_)(experts?|moe)(_|$)", re.IGNORECASE)  # a part of a name
ROUTER = re.compile(r"(^|_)routers?(_|$)", re.IGNORECASE)
GATES = ("gate", "gating", "gate_network", "wg")  # routers if experts are beside them
GIVES_BACK = re.compile(r"(^|_)(down|out|output|c_proj|fc2|linear2|w2|wo|o_proj)(_|$)")
OF_AN_MLP = ("up", "down")  # what is beside a gate that bends an MLP


class _Stack(NamedTuple):
    """A stack of expert matrices (experts, rows, columns) with its name."""

    parameter: NamedParameter
    called: str

    @property
    def sizes(self) -> tuple[int, int]:
        rows, columns = self.parameter.param.shape[1:]
        return rows, columns

    @property
    def gives_back(self) -> bool:
        """Whether its matrices project back into the residual stream."""
        return GIVES_BACK.search(self.called) is not None


def guessed_experts(
    matrices: Sequence[NamedParameter], stacks: Sequence[NamedParameter]
) -> dict[str, Group]:
    """Guessed group keys of experts and routers, by parameter name.

    `matrices` have two dims, `stacks` three; neither is what its module or name tells to be
    something else (a norm, an embedding, a convolution, an adapter).
    """
    stacks = [p for p in stacks if min(p.param.shape) > 1]
    found: dict[str, Group] = {}
    routers = _routers(matrices, stacks)
    for router in (member for members in routers.values() for member in members):
        found[router.name] = _guess("adamw", "gate", "a router")
    modules: dict[str, list[NamedParameter]] = defaultdict(list)
    for parameter in stacks:
        if _layer_of(parameter, routers) is not None:
            modules[_module(parameter.name)].append(parameter)
    for members in modules.values():
        found |= _of_stacks(members, routers.get(_layer_of(members[0], routers) or "", []))
    for parameter in matrices:
        if parameter.name not in found:
            found |= _flattened(parameter, routers)
    return found


def _guess(rule: str, role: str, reason: str, **options: Any) -> Group:
    return {"rule": rule, "role": role, "reason": f"guessed: {reason}", **options}


def _routers(matrices: Sequence[NamedParameter], stacks: Sequence[NamedParameter]) -> Routers:
    """Routers by the path of the layer they belong to."""
    inside: dict[str, set[str]] = defaultdict(set)  # first parts of names, by path of a layer
    for name, _, _ in (*matrices, *stacks):
        path = name.split(".")
        for place, part in enumerate(path):
            inside[".".join(path[:place])].add(part)
    found: dict[str, list[NamedParameter]] = defaultdict(list)
    for parameter in matrices:
        path = parameter.name.split(".")
        for place, part in enumerate(path):
            layer = ".".join(path[:place])
            if ROUTER.search(part) or (part in GATES and _routes(inside[layer])):
                found[layer].append(parameter)
                break
    return found


def _routes(inside: Iterable[str]) -> bool:
    """Whether a gate in a layer routes to experts, and is not part of an MLP."""
    return "experts" in inside and not any(part.startswith(OF_AN_MLP) for part in inside)


def _in(name: str, layer: str) -> bool:
    return not layer or name.startswith(f"{layer}.")


def _module(name: str) -> str:
    """The path of the module of experts: `mlp` for `mlp.w1` and `mlp.w1.weight`."""
    return name.removesuffix(".weight").rpartition(".")[0]


def _layer_of(parameter: NamedParameter, routers: Routers) -> str | None:
    """The innermost layer with a router; "" if only the name says experts; None if no experts."""
    name, param, _ = parameter
    beside = [layer for layer in routers if _in(name, layer)]
    if beside:
        layer = max(beside, key=len)
        fits = any(set(router.param.shape) & set(param.shape[1:]) for router in routers[layer])
        if fits or _is_called_experts(parameter):
            return layer
    return "" if _is_called_experts(parameter) else None


def _is_called_experts(parameter: NamedParameter) -> bool:
    """Whether the path or the class name says experts."""
    kinds = [type(owner).__name__ for owner in parameter.owners]
    return any(map(EXPERTS.search, parameter.name.split("."))) or any(
        "Expert" in k or "MoE" in k for k in kinds
    )


def _of_stacks(
    members: Sequence[NamedParameter], routers: Sequence[NamedParameter]
) -> dict[str, Group]:
    """Group keys of the stacks in one module of experts."""
    stacks = [_Stack(p, p.name.removesuffix(".weight").rpartition(".")[2]) for p in members]
    owners = {owner for p in members for owner in p.owners}
    transposed = _declared(owners, "is_transposed")
    if transposed is None:
        transposed = _seen_transposed(stacks, _widths(routers, len(members[0].param)))
    in_turn = _declared(owners, "is_concatenated") is False
    inner = {stack.sizes[0 if transposed else 1] for stack in stacks if stack.gives_back}
    found = {}
    for stack in stacks:
        outputs = stack.sizes[1 if transposed else 0]
        fused = not stack.gives_back and any(outputs == 2 * size for size in inner)
        options: Group = {"transposed": True} if transposed else {}
        what = "experts"
        if fused:
            what = f"experts: gate, up{', in turn' if in_turn else ''}"
            options["split_sizes"] = f"interleaved:2x{outputs // 2}" if in_turn else "halves"
        stored = ", stored as (in, out)" if transposed else ""
        found[stack.parameter.name] = _guess("muon", "matrix", f"{what}{stored}", **options)
    return found


def _declared(owners: Iterable[nn.Module], name: str) -> bool | None:
    """The storage layout that the class of the experts declares."""
    said = {getattr(owner, name, None) for owner in owners}
    return next((value for value in said if isinstance(value, bool)), None)


def _widths(routers: Sequence[NamedParameter], experts: int) -> set[int]:
    """Input widths of routers that score this number of experts."""
    found = set()
    for _, param, _ in routers:
        rows, columns = param.shape
        found.add(rows if columns == experts != rows else columns)
    return found


def _seen_transposed(stacks: Sequence[_Stack], widths: set[int]) -> bool:
    """Whether matrices are stored as (in, out), judged by sizes that differ."""
    for stack in stacks:
        rows, columns = stack.sizes
        if (rows in widths) != (columns in widths):
            return (columns in widths) == stack.gives_back
    for stack in stacks:
        for back in stacks:
            if back.gives_back and not stack.gives_back:
                (rows, columns), (out, into) = stack.sizes, back.sizes
                usual = columns == out and rows in (into, 2 * into)
                turned = rows == into and columns in (out, 2 * out)
                if usual != turned:
                    return turned
    return False


def _flattened(parameter: NamedParameter, routers: Routers) -> dict[str, Group]:
    """Whether a 2-D tensor holds one row or one matrix per expert."""
    parts = parameter.name.split(".")
    own = {part for part in parts if EXPERTS.search(part)}
    if (
        not own
        or any("shared" in part.lower() for part in own)
        or any(isinstance(owner, nn.Linear) for owner in parameter.owners)
        or any(part.isdigit() for part in parts[parts.index(max(own, key=parts.index)) :])
    ):
        return {}
    rows = parameter.param.shape[0]
    for router in routers.get(_layer_of(parameter, routers) or "", []):
        experts = router.param.shape[0]
        if rows == experts:
            return {parameter.name: _guess("adamw", "scalar", "a vector of each expert")}
        if rows % experts == 0:
            sizes = (rows // experts,) * experts
            what = "experts, one below the other"
            return {parameter.name: _guess("muon", "matrix", what, split_sizes=sizes)}
    return {}
