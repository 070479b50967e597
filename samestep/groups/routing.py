"""Sorts the parameters of a model into groups: which rule each follows, and why.

Hidden matrices go to Muon. Embeddings, output heads, norms, biases and scalars go to
AdamW, and so do LoRA factors and convolutions, unless a recipe for the model
(`samestep.recipes`) or an override says otherwise. Of experts that no recipe knows names and shapes
tell (`samestep.groups.experts`).
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from samestep.groups.experts import guessed_experts
from samestep.groups.group_keys import likely_option, options_of_rule, why_lost
from samestep.groups.param_groups import (
    Group,
    check_pair,
    name_matches,
    own_spelling,
    parameter_names,
)
from samestep.layout.fused_rows import rows_in, whole_name, without_wrappers
from samestep.layout.splits import split_of
from samestep.rules import RULES
from samestep.rules.muon import MuonRule
from samestep.rules.rule import Rule
from samestep.tooling.warn import some, warn_user

Predicate = Callable[[str, Tensor], bool]
Matcher = str | Predicate  # a name pattern such as "blocks.*.qkv.weight", or a predicate
Overrides = Mapping[Matcher, Mapping[str, Any]]
Split = Sequence[int] | str  # `samestep.layout.splits` tells of each

HEAD_NAMES = {
    "lm_head", "head", "output", "unembed", "unembedding", "embed_out", "classifier", "score",
    "to_logits", "logits", "proj_out", "qa_outputs", "v_head", "value_head", "output_layer",
    "generator", "classification_head", "class_labels_classifier", "bbox_predictor", "class_embed",
    "bbox_embed", "decoder_pred",
}  # fmt: skip
EMBEDDING_NAME = re.compile(
    r"(^|[._])(wte|wpe|\w*embed\w*|\w*_emb|emb)([._]|$)"
    r"|(^|\.)(shared|\w*tokens?|latents|\w*_table)(\.|$)",
    re.IGNORECASE,
)
POSITION_NAME = re.compile(
    r"(^|[._])(wpe|pos|\w*positions?|position_\w+|pos_\w+|\w*_pos|token_type\w*|relative_\w+)([._]|$)",
    re.IGNORECASE,
)
# LoRA and its kin: LoHa, LoKr, OFT and BOFT, VB-LoRA, VeRA, IA3, FourierFT, as peft calls them.
LORA_NAME = re.compile(
    r"(^|\.)(lora|hada|lokr|oft|boft|vblora|vera|ia3|fourierft)_\w+", re.IGNORECASE
)
SCALAR_NAME = re.compile(
    r"(bias|biases|^A_log|^time_(faaaa|decay|first|mix\w*))$|(^|_)bias(es)?_"
)  # of the parameter itself, whatever its shape
FUSED_NAME = re.compile(
    r"(^|[._])(w?qkv|c_attn|query_key_value|qkv_proj|to_qkv|to_kv|w_pack|in_proj(_\w+)?|x_proj"
    r"|gate_up_proj|gate_and_up_proj|kv_a_proj_with_mqa|kv_b_proj|w13|(?-i:Wi))"
    r"([._]|$)",
    re.IGNORECASE,
)


class NamedParameter(NamedTuple):
    """A trainable parameter with its first name and all modules that hold it, if known."""

    name: str
    param: Tensor
    owners: tuple[nn.Module, ...] = ()


class Role(NamedTuple):
    """A role of a parameter in its model, with the reason."""

    name: str
    reason: str


# Names of roles, as `table()` shows them; a "gate" is what a recipe or its surroundings tell.
ROLES = ("matrix", "embedding", "unembedding", "scalar", "gate", "lora", "conv", "tensor")


class Routable(NamedTuple):
    """Parameters to route, with the shapes of all embeddings of the model."""

    parameters: list[NamedParameter]
    vocabularies: frozenset[tuple[int, ...]] = frozenset()
    elsewhere: tuple[NamedParameter, ...] = ()  # of other pipeline stages; patterns may mean them


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and torch.compile."""
    while isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel) or hasattr(
        model, "_orig_mod"
    ):
        model = cast(
            nn.Module, getattr(model, "_orig_mod" if hasattr(model, "_orig_mod") else "module")
        )
    return model


def routable(model: nn.Module) -> Routable:
    """Every trainable parameter of a model once, under the name it has without wrappers.

    Raises if there is none.
    """
    model = unwrapped(model)
    names: dict[Tensor, str] = {}
    owners: dict[Tensor, list[nn.Module]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for own_name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            names.setdefault(param, without_wrappers(f"{path}.{own_name}"))
            owner = module.stand_in if isinstance(module, Elsewhere) else module
            owners.setdefault(param, []).append(owner)
    found = [
        NamedParameter(name, param, tuple(owners[param]))
        for param, name in names.items()
        if param.requires_grad
    ]
    if not found:
        raise ValueError(
            "the model has no trainable parameters: unfreeze some with requires_grad_(True)"
        )
    for name, param, _ in found:
        check_pair((name, param))
    vocabularies = _vocabularies(
        (name, param)
        for param, name in names.items()
        if any(isinstance(module, nn.Embedding | nn.EmbeddingBag) for module in owners[param])
    )
    elsewhere = []
    for path, module in model.named_modules():
        if isinstance(module, Elsewhere):
            vocabularies |= module.vocabularies
            elsewhere += [NamedParameter(f"{path}.{name}", param) for name, param in module.named]
    return Routable(found, frozenset(vocabularies), tuple(elsewhere))


def _vocabularies(embeddings: Iterable[tuple[str, Tensor]]) -> set[tuple[int, ...]]:
    """Shapes of token embeddings, which an output head may share."""
    return {tuple(p.shape) for name, p in embeddings if not POSITION_NAME.search(name)}


def role_of(parameter: NamedParameter, vocabularies: frozenset[tuple[int, ...]]) -> Role:
    """matrix | embedding | unembedding | scalar | lora | conv | tensor, by owner, name and shape.

    A matrix may be a router, and a tensor a stack of experts: their surroundings tell.

    `vocabularies` holds the shapes of the embeddings: outside the numbered layers, a weight of
    such a shape is a head.
    """
    name, param, owners = parameter
    path = name.split(".")
    is_linear = any(isinstance(owner, nn.Linear) for owner in owners)
    if LORA_NAME.search(name):
        return Role("lora", "a factor of an adapter")
    is_vector = param.ndim < 2 or (param.ndim == 2 and 1 in param.shape)
    if is_vector:
        return Role("scalar", "a vector")
    if SCALAR_NAME.search(path[-1]):
        return Role("scalar", "its name")
    if any(map(_is_norm, owners)) and not is_linear:
        return Role("scalar", "in a norm")
    if any(isinstance(owner, nn.Embedding | nn.EmbeddingBag) for owner in owners):
        return Role("embedding", "in an embedding")
    if any(isinstance(owner, nn.modules.conv._ConvNd) for owner in owners) or param.ndim > 3:
        return Role("conv", "a convolution")
    if _is_head(path):
        return Role("unembedding", "the name of a head")
    if tuple(param.shape) in vocabularies and not _in_a_layer(path):
        return Role("unembedding", "the shape of an embedding")
    if not is_linear and EMBEDDING_NAME.search(name):
        return Role("embedding", "the name of an embedding")
    if param.ndim == 2:
        return Role("matrix", "a hidden matrix")
    return Role("tensor", "three dims")


def _in_a_layer(path: list[str]) -> bool:
    """Whether a path has the number of a layer, not only of a Sequential."""
    return any(part.isdigit() for part in path[1 if len(path) <= 2 else 0 :])


def _is_head(path: list[str]) -> bool:
    """Whether a module outside the numbered layers is named like a head."""
    modules = path[:-1] or path
    outside = modules[: next((i for i, part in enumerate(modules) if part.isdigit()), None)]
    return outside[:1] == ["fc"] or any(part in HEAD_NAMES for part in outside)


def _is_norm(module: nn.Module) -> bool:
    return re.search(r"norm(\dd)?$", type(module).__name__.lower()) is not None


def route(
    given: Routable,
    overrides: Overrides | None = None,
    role_options: Mapping[str, Mapping[str, Any]] | None = None,
    split_sizes: Mapping[str, Split] | Split | None = None,
    recipe: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    transposed: bool = False,
) -> tuple[list[Group], dict[str, str]]:
    """Sort parameters into groups by role and overrides, in order of appearance; and why.

    `role_options` holds group keys per role (its learning rate); `split_sizes` are by pattern or
    for every matrix; `recipe` has what is known of this kind of model, by parameter: "role",
    "reason" and group keys; `transposed` is how matrices are stored of which nothing is known. An
    override wins over all.
    """
    patterns = split_sizes if isinstance(split_sizes, Mapping) else {}
    splits = {
        p.name: sizes
        for key, sizes in patterns.items()
        for p in matching(key, given, "split_sizes")
    }
    asked = _resolve_overrides(given, overrides or {})
    groups: dict[tuple[Any, ...], Group] = {}
    reasons: dict[str, str] = {}
    unmarked, fused = [], []
    roles = {p.name: role_of(p, given.vocabularies) for p in given.parameters}
    guessed = _guessed(given, roles, recipe or {}, asked)
    for parameter in given.parameters:
        found = roles[parameter.name]
        known = dict((recipe or {}).get(parameter.name) or guessed.get(parameter.name, {}))
        role = known.pop("role", found.name)
        reason = known.pop("reason", found.reason)
        if "rule" in asked[parameter.name]:
            reason = "asked for"
        if parameter.name in splits:
            known["split_sizes"] = splits[parameter.name]
        options = {**known, **asked[parameter.name]}
        if role == "tensor" and "rule" not in options and parameter.param.shape[0] > 1:
            unmarked.append(_describe(parameter))
        rule = options.pop("rule", "muon" if role == "matrix" else "adamw")
        split = options.pop("split_sizes", None)
        known_rule = RULES.get(rule)  # completing the group has the error for an unknown one
        if known_rule is not None:
            if known_rule.kind == "elementwise":
                # A pattern for a fused weight may match its bias too: there is nothing to cut.
                split = None
                options.pop("flatten", None)
                options.pop("transposed", None)
            _refuse_lost_overrides(parameter.name, known_rule, options)
        if isinstance(known_rule, MuonRule):
            if role == "conv" and "flatten" not in options:
                raise ValueError(
                    f'parameter {_describe(parameter)} is a convolution: add "flatten": True '
                    "beside its rule to have it treated as the matrix (out, all the rest)"
                )
            if _is_stored_transposed(parameter):
                options.setdefault("transposed", True)
            if split is None and not isinstance(split_sizes, Mapping) and role == "matrix":
                split = split_sizes
            if split is None:
                split = _known_split(parameter)
            if split is None and _looks_fused(parameter):
                fused.append(_describe(parameter))
        # Tensors by identity: two learning-rate tensors of one value are two schedules.
        values = (id(v) if isinstance(v, Tensor) else repr(v) for _, v in sorted(options.items()))
        key = (rule, role, *sorted(options), *values)
        if key not in groups:
            from_role = (role_options or {}).get(role, {})
            # Copied: schedulers write into learning-rate tensors, group by group.
            own = deepcopy({**from_role, **options})
            groups[key] = {"params": [], "rule": rule, "role": role, **own}
        groups[key]["params"].append((parameter.name, parameter.param))
        reasons[parameter.name] = reason
        if split is not None:
            split = _in_numbers(split, parameter, transposed=options.get("transposed", transposed))
            groups[key].setdefault("split_sizes", {})[whole_name(parameter.name)] = split
    _warn_of_guesses(given, guessed)
    _warn(
        unmarked,
        "more than two dims, so left to AdamW. For a stack of matrices pass "
        'overrides={"<pattern>": {"rule": "muon"}}, with "transposed": True beside it for '
        '(experts, in, out), and "split_sizes" for a fused one; to keep AdamW without this '
        'warning, {"rule": "adamw"}',
    )
    _warn(
        fused,
        f"{LOOKS_FUSED}. Pass "
        'overrides={"<pattern>": {"split_sizes": (q_rows, k_rows, v_rows)}}, "halves", '
        f"{OTHER_SPLITS}",
    )
    return list(groups.values()), reasons


LOOKS_FUSED = (
    "looks like a fused weight (query-key-value, gate-up) and has no split_sizes; "
    "orthogonalizing it whole mixes its parts and is known to hurt"
)
OTHER_SPLITS = (
    '"heads:<n>" or "interleaved:3x<heads>" where every head has rows of each; with '
    '"transposed": True beside it if it is stored as (in, out); or all rows as one size if it '
    "is one matrix"
)


def warn_of_fused_members(groups: Iterable[Mapping[str, Any]]) -> None:
    """Warn once of members of Muon's groups that look fused and have no split_sizes.

    For groups that nobody has routed; whoever has said how, or that they are one matrix, hears
    nothing.
    """
    fused = []
    for index, group in enumerate(groups):
        if not isinstance(RULES.get(group["rule"]), MuonRule):
            continue
        splits = group.get("split_sizes")
        for name, param in zip(parameter_names(group, index), group["params"], strict=True):
            said = (
                any(name_matches(name, pattern) for pattern in splits)
                if isinstance(splits, Mapping)
                else splits is not None
            )
            parameter = NamedParameter(name, param)
            if not said and _looks_fused(parameter):
                fused.append(_describe(parameter))
    _warn(
        fused,
        f'{LOOKS_FUSED}. Give its group "split_sizes": (q_rows, k_rows, v_rows), or by name '
        '{"<pattern>": ...}; "halves", ' + OTHER_SPLITS,
    )


def _guessed(
    given: Routable,
    roles: Mapping[str, Role],
    recipe: Mapping[str, Mapping[str, Any]],
    asked: Mapping[str, Mapping[str, Any]],
) -> dict[str, Group]:
    """Guessed roles of experts and routers, where no recipe or override decides.

    An override that says the same leaves them their role, and with it the options of that role.
    """
    by_role: dict[str, list[NamedParameter]] = {"matrix": [], "tensor": []}
    for parameter in given.parameters:
        by_role.setdefault(roles[parameter.name].name, []).append(parameter)
    found = guessed_experts(by_role["matrix"], by_role["tensor"])
    guessed = {}
    for name, options in found.items():
        rule = asked[name].get("rule")
        if name not in recipe and rule in (None, options["rule"]):
            guessed[name] = options if rule is None else {"role": options["role"]}
    return guessed


def _warn_of_guesses(given: Routable, guessed: Mapping[str, Group]) -> None:
    """Warn once of all guesses, with overrides that confirm them.

    Of stacks, whose orientation and cuts shapes decide. A router alone is known by its name, as
    embeddings and heads are, and its name in table() is enough.
    """
    guessed = {name: options for name, options in guessed.items() if "rule" in options}
    if all(options["role"] == "gate" for options in guessed.values()):
        return
    by_pattern: dict[str, list[NamedParameter]] = {}
    for parameter in given.parameters:
        if parameter.name in guessed:
            pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", parameter.name)  # numbers of layers
            by_pattern.setdefault(pattern, []).append(parameter)
    kinds: list[str] = []
    spelled: dict[str, Group] = {}
    for pattern, alike in by_pattern.items():
        meant = [p.name for p in given.parameters if name_matches(p.name, pattern)]
        is_one = all(guessed.get(name) == guessed[alike[0].name] for name in meant)
        for name, param, _ in alike[:1] if is_one else alike:
            told = dict(guessed[name])
            reason = told["reason"].removeprefix("guessed: ")
            kinds.append(f"{pattern if is_one else name} {tuple(param.shape)} as {reason}")
            spelled[pattern if is_one else name] = {
                key: value for key, value in told.items() if key not in ("role", "reason")
            }
    warn_user(
        "no recipe knows the experts of this model, so their rules are guessed from "
        f"names and shapes: {some(kinds, 6)}. Stacks go to Muon, matrix by matrix, and "
        "routers to AdamW; opt.table() marks them as guessed. If that is right, "
        f"confirm it, which ends this warning: overrides={spelled}"
    )


def route_explicit(
    given: Routable, groups: Iterable[Mapping[str, Any]], no_decay: Collection[str] = ()
) -> list[Group]:
    """Fill groups whose "params" are patterns or predicates; each parameter exactly once.

    Members with a role of `no_decay` come into a group of their own, behind the one they are from.
    """
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
            for parameter in matching(matcher, given, "groups"):
                if parameter.name in taken:
                    raise ValueError(
                        f"parameter {parameter.name!r} is matched by two entries, "
                        f"{taken[parameter.name]!r} and {matcher!r}: let only one match "
                        "it"
                    )
                taken[parameter.name] = matcher
                members.append((parameter.name, parameter.param))
        if members or not given.elsewhere:
            filled += _apart({**group, "params": members}, given, no_decay)
    missing = [parameter.name for parameter in given.parameters if parameter.name not in taken]
    if missing:
        raise ValueError(
            f"{len(missing)} trainable parameters are in no group: {some(missing, 6)}; add a group "
            "whose pattern matches them, or freeze them with requires_grad_(False)"
        )
    return filled


def _apart(group: Group, given: Routable, no_decay: Collection[str]) -> list[Group]:
    """Split a group by whether its members decay."""
    still = {p.name for p in given.parameters if role_of(p, given.vocabularies).name in no_decay}
    without = [member for member in group["params"] if member[0] in still]
    if not without:
        return [group]
    # Tensors are copied: schedulers write into learning rates, group by group.
    own = {k: deepcopy(v) if isinstance(v, Tensor) else v for k, v in group.items()}
    rest = [member for member in group["params"] if member[0] not in still]
    behind = {**own, "params": without, "weight_decay": 0.0}
    return [{**group, "params": rest}, behind] if rest else [behind]


def matching(matcher: Matcher, given: Routable, where: str) -> list[NamedParameter]:
    """Parameters that a matcher selects; raises if it selects none."""
    if not (isinstance(matcher, str) or callable(matcher)):
        raise TypeError(f"{where}: {matcher!r} is neither a name pattern nor a predicate")

    def selects(p: NamedParameter) -> bool:
        if isinstance(matcher, str):
            return name_matches(p.name, matcher)
        return matcher(p.name, p.param)

    found = [p for p in given.parameters if selects(p)]
    if not found and not any(map(selects, given.elsewhere)):
        raise ValueError(
            f"{where}: {matcher!r} matches no trainable parameter; the names are "
            f"{some([p.name for p in (*given.parameters, *given.elsewhere)], 6)}"
        )
    return found


def _resolve_overrides(given: Routable, overrides: Overrides) -> dict[str, dict[str, Any]]:
    """Overridden keys of each parameter; raises if two overrides contradict."""
    asked: dict[str, dict[str, Any]] = {parameter.name: {} for parameter in given.parameters}
    source: dict[tuple[str, str], Matcher] = {}
    for matcher, options in overrides.items():
        if not isinstance(options, Mapping):
            raise TypeError(
                f"overrides: {matcher!r} needs a dict of group keys such as "
                f'{{"rule": "adamw"}}, got {options!r}'
            )
        own = own_spelling(options) if "qkv_split_sizes" in options else options
        for parameter in matching(matcher, given, "overrides"):
            for key, value in own.items():
                earlier = source.setdefault((parameter.name, key), matcher)
                if earlier is not matcher and asked[parameter.name][key] != value:
                    raise ValueError(
                        f"parameter {parameter.name!r} is matched by two entries, "
                        f"{earlier!r} and {matcher!r}, with different values of "
                        f"{key!r}: let only one match it"
                    )
                asked[parameter.name][key] = value
    return asked


def _refuse_lost_overrides(name: str, rule: Rule, options: Mapping[str, Any]) -> None:
    """Raise for an override that the parameter's rule does not read."""
    for key, value in options.items():
        reason = why_lost(key, value, rule)
        if reason is None and key not in options_of_rule(rule):
            meant = likely_option(key, rule)
            hint = "" if meant is None else f"; did you mean {meant!r}?"
            reason = f"{key!r} is no option of rule {rule.name!r}{hint}"
        if reason:
            raise ValueError(f"overrides: {name!r} follows rule {rule.name!r}, and {reason}")


def _is_stored_transposed(parameter: NamedParameter) -> bool:
    """Whether the weight is stored as (in, out), as in Hugging Face's Conv1D."""
    shape = tuple(parameter.param.shape)
    return len(shape) == 2 and any(
        type(owner).__name__ == "Conv1D"
        and (getattr(owner, "nx", None), getattr(owner, "nf", None)) == shape
        for owner in parameter.owners
    )


def _in_numbers(split: Split, parameter: NamedParameter, *, transposed: bool) -> Split:
    """split_sizes in words as row counts, so that checkpoints do not depend on the spelling."""
    if not isinstance(split, str) or parameter.param.ndim < 2 or rows_in(parameter.name):
        return split
    try:
        sizes, groups = split_of(split, parameter.param.shape[-1 if transposed else -2])
    except ValueError:  # whoever cuts blocks has the error for it
        return split
    return sizes if groups == 1 else split


def _known_split(parameter: NamedParameter) -> tuple[int, ...] | None:
    """split_sizes that follow from torch's own modules."""
    own_name = parameter.name.rpartition(".")[2]
    for kind, prefix, parts in (
        (nn.MultiheadAttention, "in_proj_weight", 3),
        (nn.LSTM | nn.LSTMCell, ("weight_ih", "weight_hh"), 4),
        (nn.GRU | nn.GRUCell, ("weight_ih", "weight_hh"), 3),
    ):
        is_kind = any(isinstance(owner, kind) for owner in parameter.owners)
        if is_kind and own_name.startswith(prefix):
            return (parameter.param.shape[0] // parts,) * parts
    return None


def _looks_fused(parameter: NamedParameter) -> bool:
    """Whether the name of a matrix says that it consists of several."""
    name, param, _ = parameter
    if param.ndim == 2 and param.shape[0] == param.shape[1]:
        return False  # parts that are as wide as it would be flat
    return param.ndim >= 2 and rows_in(name) is None and FUSED_NAME.search(name) is not None


def _warn(parameters: Sequence[str], text: str) -> None:
    """Warn once for several parameters, at the line that built the optimizer."""
    if parameters:
        warn_user(f"{some(parameters, 6)}: {text}")


def _describe(parameter: NamedParameter) -> str:
    return f"{parameter.name} {tuple(parameter.param.shape)}"


class Elsewhere(nn.Module):
    """Placeholder for a module of another pipeline stage.

    It remembers which parameters there were: which rule a parameter follows is decided by the whole
    model, and a pattern may mean what is not here. It has none of its own but those that are tied
    to a parameter of this stage, under the names that they have in the whole model.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._kind = type(module)
        # Not as parameters: nobody here trains, moves or saves them.
        self.named = [
            (name, param.detach().to("meta"))
            for name, param in module.named_parameters()
            if param.requires_grad
        ]
        self.linear_layers = [n for n, m in module.named_modules() if isinstance(m, nn.Linear)]
        self.vocabularies = frozenset(
            _vocabularies(
                (name, m.weight)
                for name, m in module.named_modules()
                if isinstance(m, nn.Embedding | nn.EmbeddingBag)
            )
        )

    @property
    def stand_in(self) -> nn.Module:
        """An empty instance of the module's class, for code that asks for the class of an owner."""
        return object.__new__(self._kind)

    def share(self, name: str, param: nn.Parameter, kind: type[nn.Module]) -> None:
        """Register a parameter of this stage that was tied to one of this module.

        kind: the class of the module that held it.
        """
        path, _, key = name.rpartition(".")
        owner = self
        for part in path.split(".") if path else ():
            if part not in owner._modules:
                owner.add_module(part, Elsewhere(nn.Module()))
            inner = owner.get_submodule(part)
            assert isinstance(inner, Elsewhere)
            owner = inner
        owner._kind = kind
        owner.register_parameter(key, param)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Raise: this module belongs to another stage."""
        raise RuntimeError(
            "this module is in another pipeline stage: call the pipeline instead of "
            "the model, and use only modules of the same stage in the functions of its "
            "plan"
        )
