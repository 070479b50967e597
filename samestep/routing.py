"""From a model to parameter groups: which rule each parameter follows.

Hidden matrices go to Muon. Embeddings, output heads, norms, biases and scalars go to
AdamW, and so do LoRA factors and convolutions, unless an override says otherwise.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import Tensor, nn

Predicate = Callable[[str, Tensor], bool]
Matcher = str | Predicate  # a name pattern such as "blocks.*.qkv.weight", or a predicate
Overrides = Mapping[Matcher, Mapping[str, Any]]
Group = dict[str, Any]

HEAD_NAMES = {
    "lm_head", "head", "output", "unembed", "unembedding", "embed_out", "classifier", "score"
}  # fmt: skip
EMBEDDING_NAME = re.compile(r"(^|[._])(wte|wpe|\w*embed\w*|\w*_emb|emb)([._]|$)", re.IGNORECASE)
LORA_NAME = re.compile(r"(^|\.)lora_\w+", re.IGNORECASE)
FUSED_QKV_NAME = re.compile(r"(^|[._])(w?qkv|c_attn|query_key_value|qkv_proj)([._]|$)", re.I)


class NamedParameter(NamedTuple):
    """A trainable parameter with its name and the module that holds it, if known."""

    name: str
    param: Tensor
    owner: nn.Module | None


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel or torch.compile, whose names users know."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def trainable_parameters(model: nn.Module) -> list[NamedParameter]:
    """Every trainable parameter once, under its first name; frozen ones are left out."""
    model = unwrap(model)
    modules = dict(model.named_modules())
    return [
        NamedParameter(name, param, modules.get(name.rpartition(".")[0]))
        for name, param in model.named_parameters()
        if param.requires_grad
    ]


def role_of(parameter: NamedParameter, vocabularies: set[tuple[int, ...]]) -> str:
    """matrix | embedding | unembedding | scalar | lora | conv | tensor, by owner, name and shape.

    `vocabularies` holds the shapes of the embeddings: a Linear of such a shape is a head.
    """
    name, param, owner = parameter
    shape = tuple(param.shape)
    if LORA_NAME.search(name):
        return "lora"
    if param.ndim < 2:
        return "scalar"
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag):
        return "embedding"
    if isinstance(owner, nn.modules.conv._ConvNd):
        return "conv"
    path = name.split(".")
    module_name = path[-2] if len(path) > 1 else path[-1]
    in_a_layer = any(part.isdigit() for part in path)
    if shape in vocabularies or (module_name in HEAD_NAMES and not in_a_layer):
        return "unembedding"
    if not isinstance(owner, nn.Linear) and EMBEDDING_NAME.search(name):
        return "embedding"
    return "matrix" if param.ndim == 2 else "tensor"


def route(
    parameters: Sequence[NamedParameter],
    overrides: Overrides | None = None,
    role_options: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Group]:
    """Sort parameters into groups by role and overrides, in order of appearance.

    `role_options` holds group keys per role (its learning rate); an override wins over it.
    """
    overrides = overrides or {}
    asked = _resolve_overrides(parameters, overrides)
    vocabularies = {tuple(p.param.shape) for p in parameters if isinstance(p.owner, nn.Embedding)}
    groups: dict[tuple[Any, ...], Group] = {}
    splits_of: dict[tuple[Any, ...], dict[str, Sequence[int]]] = {}
    unmarked, fused = [], []
    for parameter in parameters:
        role = role_of(parameter, vocabularies)
        options = dict(asked[parameter.name])
        if role == "tensor" and "rule" not in options and parameter.param.shape[0] > 1:
            unmarked.append(_describe(parameter))
        rule = options.pop("rule", "muon" if role == "matrix" else "adamw")
        split = options.pop("split_sizes", None)
        if rule == "muon" and split is None:
            split = _known_split(parameter)
            if split is None and _looks_fused(parameter):
                fused.append(_describe(parameter))
        key = (rule, role, repr(sorted(options.items())))
        if key not in groups:
            groups[key] = {
                "params": [], "rule": rule, "role": role,
                **(role_options or {}).get(role, {}), **options,
            }  # fmt: skip
        groups[key]["params"].append((parameter.name, parameter.param))
        if split is not None:
            splits_of.setdefault(key, {})[parameter.name] = split
    for key, splits in splits_of.items():
        groups[key]["split_sizes"] = splits
    if unmarked:
        warnings.warn(
            f"{_some(unmarked)}: more than two dims and no convolution, so left to AdamW. For a "
            'stack of matrices pass overrides={"<pattern>": {"rule": "muon"}}; to keep AdamW '
            'without this warning, {"rule": "adamw"}',
            stacklevel=4,
        )
    if fused:
        warnings.warn(
            f"{_some(fused)}: looks like a fused query-key-value weight and has no split_sizes; "
            "orthogonalizing it whole mixes the three and is known to hurt. Pass "
            'overrides={"<pattern>": {"split_sizes": (q_rows, k_rows, v_rows)}}, or all rows as '
            "one size if it is one matrix",
            stacklevel=4,
        )
    return list(groups.values())


def route_explicit(
    parameters: Sequence[NamedParameter], groups: Iterable[Mapping[str, Any]]
) -> list[Group]:
    """Fill groups whose "params" are patterns or predicates; each parameter exactly once."""
    taken: dict[str, Matcher] = {}
    filled = []
    for group in groups:
        matchers = group["params"]
        if isinstance(matchers, str) or callable(matchers):
            matchers = [matchers]
        members = []
        for matcher in matchers:
            for parameter in _matches(matcher, parameters, "groups"):
                if parameter.name in taken:
                    raise ValueError(
                        f"parameter {parameter.name!r} is covered twice: by "
                        f"{taken[parameter.name]!r} and by {matcher!r}; let only one match it"
                    )
                taken[parameter.name] = matcher
                members.append((parameter.name, parameter.param))
        filled.append({**group, "params": members})
    missing = [parameter.name for parameter in parameters if parameter.name not in taken]
    if missing:
        raise ValueError(
            f"{len(missing)} trainable parameters are in no group: {_some(missing)}; add a group "
            "whose pattern matches them, or freeze them with requires_grad_(False)"
        )
    return filled


def _matches(
    matcher: Matcher, parameters: Sequence[NamedParameter], where: str
) -> list[NamedParameter]:
    """The parameters a matcher selects; matching nothing is an error, since it is a typo."""
    if isinstance(matcher, str):
        found = [p for p in parameters if fnmatchcase(p.name, matcher)]
    elif callable(matcher):
        found = [p for p in parameters if matcher(p.name, p.param)]
    else:
        raise TypeError(f"{where}: a key must be a name pattern or a predicate, got {matcher!r}")
    if not found:
        raise ValueError(
            f"{where}: {matcher!r} matches no trainable parameter; the names are "
            f"{_some([p.name for p in parameters])}"
        )
    return found


def _resolve_overrides(
    parameters: Sequence[NamedParameter], overrides: Overrides
) -> dict[str, dict[str, Any]]:
    """The overridden keys of each parameter; two overrides may not fight over one key."""
    asked: dict[str, dict[str, Any]] = {parameter.name: {} for parameter in parameters}
    source: dict[tuple[str, str], Matcher] = {}
    for matcher, options in overrides.items():
        for parameter in _matches(matcher, parameters, "overrides"):
            for key, value in options.items():
                earlier = source.setdefault((parameter.name, key), matcher)
                if earlier is not matcher and asked[parameter.name][key] != value:
                    raise ValueError(
                        f"parameter {parameter.name!r} is covered twice: {earlier!r} and "
                        f"{matcher!r} give different values for {key!r}; let only one match it"
                    )
                asked[parameter.name][key] = value
    return asked


def _known_split(parameter: NamedParameter) -> tuple[int, ...] | None:
    """Row blocks that are certain, from torch's own module."""
    if isinstance(parameter.owner, nn.MultiheadAttention) and parameter.param.ndim == 2:
        rows = parameter.param.shape[0]
        return (rows // 3,) * 3 if parameter.name.endswith("in_proj_weight") else None
    return None


def _looks_fused(parameter: NamedParameter) -> bool:
    """Whether name and shape suggest a fused query-key-value weight."""
    rows, cols = parameter.param.shape[0], parameter.param.shape[-1]
    return rows > cols and FUSED_QKV_NAME.search(parameter.name) is not None


def _describe(parameter: NamedParameter) -> str:
    return f"{parameter.name} {tuple(parameter.param.shape)}"


def _some(names: Sequence[str], limit: int = 6) -> str:
    """A few names and how many more there are."""
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")
