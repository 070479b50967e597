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
    """A trainable parameter with its first name and all modules that hold it, if known."""

    name: str
    param: Tensor
    owners: tuple[nn.Module, ...] = ()


class Routable(NamedTuple):
    """Parameters to be routed, and the shapes of the model's embeddings, frozen ones too."""

    parameters: list[NamedParameter]
    vocabularies: frozenset[tuple[int, ...]] = frozenset()


def routable(model: nn.Module) -> Routable:
    """Every trainable parameter of a model once; DDP's and torch.compile's prefixes are left out.

    Raises if there is none.
    """
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            break
        model = inner
    names: dict[Tensor, str] = {}
    owners: dict[Tensor, list[nn.Module]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for own_name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            names.setdefault(param, f"{path}.{own_name}".lstrip(".").replace("_orig_mod.", ""))
            owners.setdefault(param, []).append(module)
    found = [
        NamedParameter(name, param, tuple(owners[param]))
        for param, name in names.items()
        if param.requires_grad
    ]
    if not found:
        raise ValueError(
            "the model has no trainable parameters: unfreeze some with requires_grad_(True)"
        )
    vocabularies = {
        tuple(param.shape)
        for param, modules in owners.items()
        if any(isinstance(module, nn.Embedding | nn.EmbeddingBag) for module in modules)
    }
    return Routable(found, frozenset(vocabularies))


def role_of(parameter: NamedParameter, vocabularies: frozenset[tuple[int, ...]]) -> str:
    """matrix | embedding | unembedding | scalar | lora | conv | tensor, by owner, name and shape.

    `vocabularies` holds the shapes of the embeddings: outside the numbered layers, a weight of
    such a shape is a head.
    """
    name, param, owners = parameter
    path = name.split(".")
    module_name = path[-2] if len(path) > 1 else path[-1]
    in_a_layer = any(part.isdigit() for part in path)
    if LORA_NAME.search(name):
        return "lora"
    if param.ndim < 2 or path[-1].endswith("bias") or any(map(_is_norm, owners)):
        return "scalar"
    if any(isinstance(owner, nn.Embedding | nn.EmbeddingBag) for owner in owners):
        return "embedding"
    if any(isinstance(owner, nn.modules.conv._ConvNd) for owner in owners):
        return "conv"
    if not in_a_layer and (tuple(param.shape) in vocabularies or module_name in HEAD_NAMES):
        return "unembedding"
    is_linear = any(isinstance(owner, nn.Linear) for owner in owners)
    if not is_linear and EMBEDDING_NAME.search(name):
        return "embedding"
    return "matrix" if param.ndim == 2 else "tensor"


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def route(
    given: Routable,
    overrides: Overrides | None = None,
    role_options: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Group]:
    """Sort parameters into groups by role and overrides, in order of appearance.

    `role_options` holds group keys per role (its learning rate); an override wins over it.
    """
    asked = _resolve_overrides(given.parameters, overrides or {})
    groups: dict[tuple[Any, ...], Group] = {}
    unmarked, fused = [], []
    for parameter in given.parameters:
        role = role_of(parameter, given.vocabularies)
        options = dict(asked[parameter.name])
        if role == "tensor" and "rule" not in options and parameter.param.shape[0] > 1:
            unmarked.append(_describe(parameter))
        rule = options.pop("rule", "muon" if role == "matrix" else "adamw")
        split = options.pop("split_sizes", None)
        if rule == "muon" and split is None:
            split = _known_split(parameter)
            if split is None and _looks_fused(parameter):
                fused.append(_describe(parameter))
        # Tensors by identity: two learning-rate tensors of one value are two schedules.
        values = (id(v) if isinstance(v, Tensor) else repr(v) for _, v in sorted(options.items()))
        key = (rule, role, *sorted(options), *values)
        if key not in groups:
            from_role = (role_options or {}).get(role, {})
            groups[key] = {"params": [], "rule": rule, "role": role, **from_role, **options}
        groups[key]["params"].append((parameter.name, parameter.param))
        if split is not None:
            groups[key].setdefault("split_sizes", {})[parameter.name] = split
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


def route_explicit(given: Routable, groups: Iterable[Mapping[str, Any]]) -> list[Group]:
    """Fill groups whose "params" are patterns or predicates; each parameter exactly once."""
    taken: dict[str, Matcher] = {}
    filled = []
    for group in groups:
        if not isinstance(group, Mapping) or "params" not in group:
            raise TypeError(
                'groups: must be a list of dicts with the key "params" (a name pattern, a '
                f"predicate or a list of them), got {group!r}"
            )
        matchers = group["params"]
        if isinstance(matchers, str) or callable(matchers):
            matchers = [matchers]
        members = []
        for matcher in matchers:
            for parameter in matching(matcher, given.parameters, "groups"):
                if parameter.name in taken:
                    raise ValueError(
                        f"parameter {parameter.name!r} is covered twice: by "
                        f"{taken[parameter.name]!r} and by {matcher!r}; let only one match it"
                    )
                taken[parameter.name] = matcher
                members.append((parameter.name, parameter.param))
        filled.append({**group, "params": members})
    missing = [parameter.name for parameter in given.parameters if parameter.name not in taken]
    if missing:
        raise ValueError(
            f"{len(missing)} trainable parameters are in no group: {_some(missing)}; add a group "
            "whose pattern matches them, or freeze them with requires_grad_(False)"
        )
    return filled


def name_matches(name: str, pattern: str) -> bool:
    """Whether a name is the pattern or fits it, as in a shell (`*`, `?`, `[abc]`)."""
    return name == pattern or fnmatchcase(name, pattern)


def matching(
    matcher: Matcher, parameters: Sequence[NamedParameter], where: str
) -> list[NamedParameter]:
    """The parameters a matcher selects; matching nothing is an error, since it is a typo."""
    if isinstance(matcher, str):
        found = [p for p in parameters if name_matches(p.name, matcher)]
    elif callable(matcher):
        found = [p for p in parameters if matcher(p.name, p.param)]
    else:
        raise TypeError(f"{where}: {matcher!r} is neither a name pattern nor a predicate")
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
        if not isinstance(options, Mapping):
            raise TypeError(
                f"overrides: {matcher!r} needs a dict of group keys such as "
                f'{{"rule": "adamw"}}, got {options!r}'
            )
        for parameter in matching(matcher, parameters, "overrides"):
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
    fused = parameter.name.rpartition(".")[2] == "in_proj_weight"
    if fused and any(isinstance(owner, nn.MultiheadAttention) for owner in parameter.owners):
        return (parameter.param.shape[0] // 3,) * 3
    return None


def _looks_fused(parameter: NamedParameter) -> bool:
    """Whether name and shape suggest a fused query-key-value weight."""
    param = parameter.param
    is_tall = param.ndim >= 2 and param.shape[-2] > param.shape[-1]
    return is_tall and FUSED_QKV_NAME.search(parameter.name) is not None


def _describe(parameter: NamedParameter) -> str:
    return f"{parameter.name} {tuple(parameter.param.shape)}"


def _some(names: Sequence[str], limit: int = 6) -> str:
    """A few names and how many more there are."""
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")
