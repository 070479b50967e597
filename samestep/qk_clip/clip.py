"""QKClip: shrinks the queries and keys of heads whose largest logit exceeds tau after a step.

    step()    largest logits of all micro-batches -> maximum over ranks -> gamma -> factors -> scale

The optimizer scales (`scale_parameters`), so that results are the same in every layout.
"""

from collections.abc import Mapping
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from samestep.comm.collectives import maximum
from samestep.comm.integrity.agreement import require_same_lines
from samestep.comm.meshes import box_in_forward
from samestep.groups.param_groups import members, name_matches
from samestep.groups.routing import unwrapped
from samestep.layout.attention_heads import QKHeads
from samestep.layout.fused_rows import rows_in, whole_name, without_wrappers
from samestep.optimizer.rule_optimizer import RuleOptimizer
from samestep.qk_clip.logits import watched
from samestep.recipes.attention import attention_layers
from samestep.tooling.warn import some

GammaOf = Literal["head", "group"]


class _Scaled(NamedTuple):
    """A parameter of the optimizer, and each row's index into the table of factors."""

    name: str
    places: Tensor
    shape: tuple[int, ...]  # of the factors: (rows,) of a bias, (rows, 1) or (1, rows)

    def factors(self, table: Tensor) -> Tensor:
        """Return the factors on the parameter, from a table of factors."""
        return table[self.places].view(self.shape)


class _Layer(NamedTuple):
    module: nn.Module
    heads: QKHeads
    scaled: tuple[_Scaled, ...]


class QKClip:
    """The QK-clip of Kimi K2 (arXiv 2507.20534, MuonClip), for an optimizer of samestep.

    For a head whose largest logit S of the step, over all micro-batches and ranks, is above `tau`,
    gamma = tau / S, and query and key weights are scaled such that its logits are gamma times what
    they were. Others, and all state of the optimizer, stay as they are.

    layers: by pattern of the attention modules' names their heads; None: known from the model's
        `config.model_type` (`samestep.recipes`).
    alpha: keys are scaled by gamma^(1 - alpha), queries by gamma^alpha. Queries that share a key
        head each shrink by their own gamma: the key by the least gamma^(1 - alpha) of its queries,
        a query by what is missing to its own gamma, which may be above 1.
    gamma_of: "group" gives all query heads of a key head the least gamma, as Megatron does.
    strict: a layer that tells no logits in a step is an error, and is left alone otherwise.
    watch: look at `scaled_dot_product_attention` in modules that train; else use `observe`.

    Every rank builds it, after the model is wrapped. It has no state to save.
    """

    def __init__(
        self,
        opt: RuleOptimizer,
        model: nn.Module,
        layers: Mapping[str, QKHeads] | None = None,
        *,
        tau: float = 100.0,
        alpha: float = 0.5,
        gamma_of: GammaOf = "head",
        strict: bool = True,
        watch: bool = True,
    ) -> None:
        if not isinstance(opt, RuleOptimizer):
            raise TypeError(
                "QKClip needs an optimizer of samestep (MuonAdamW, Muon or AdamW), got "
                f"{type(opt).__module__}.{type(opt).__name__}"
            )
        for name, value in (("tau", tau), ("alpha", alpha)):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} must be a number, got {value!r}")
        if not tau > 0 or not 0 <= alpha <= 1:
            raise ValueError(f"tau must be above 0 and alpha in 0..1, got {tau} and {alpha}")
        if gamma_of not in get_args(GammaOf):
            raise ValueError(f"gamma_of must be one of {get_args(GammaOf)}, got {gamma_of!r}")
        self.opt, self.tau, self.alpha = opt, tau, alpha
        self.gamma_of, self.strict = gamma_of, strict
        layers = attention_layers(model) if layers is None else layers
        _require_heads_by_name(layers)
        self._layers = _found(opt, model, layers)
        self._told: dict[str, Tensor] = {}
        self._device = opt.param_groups[0]["params"][0].device
        self._agree()
        self._ends = [
            watched(layer.module, partial(self.observe, name))
            for name, layer in self._layers.items()
            if watch
        ]

    def _agree(self) -> None:
        lines = [f"tau {self.tau}, alpha {self.alpha}, {self.gamma_of}, strict {self.strict}"]
        for name, layer in self._layers.items():
            heads = f"{layer.heads.heads} heads, {layer.heads.kv_heads} key heads"
            lines.append(f"{name}: {heads}, {', '.join(one.name for one in layer.scaled)}")
        for group in self.opt.rank_groups:
            require_same_lines("QK-clip", lines, group, self._device)

    @property
    def layers(self) -> dict[str, QKHeads]:
        """Return the heads of the attention layers, by name of the layer."""
        return {name: layer.heads for name, layer in self._layers.items()}

    def close(self) -> None:
        """Remove all hooks from the model."""
        while self._ends:
            self._ends.pop()()

    # --- logits ------------------------------------------------------------------------------

    @torch.no_grad()
    def observe(self, layer: str | nn.Module, logits: Tensor) -> None:
        """Report a layer's largest logits: (heads,), or (B, heads, T) as of flex attention.

        The largest of several reports in a step counts. Under tensor parallel a rank reports the
        logits of its own heads.
        """
        name = self._name(layer)
        known = self._layers[name]
        heads = known.heads.heads
        if not isinstance(logits, Tensor):
            raise TypeError(
                f"the largest logits of {name!r} must be a tensor, ({heads},) or (B, {heads}, T), "
                f"got {logits!r}"
            )
        own = logits.detach()
        if own.ndim == 3:
            own = own.amax((0, 2))
        if own.ndim != 1:
            raise ValueError(
                f"the largest logits of {name!r} must be ({heads},) or (B, {heads}, T), got "
                f"{tuple(logits.shape)}"
            )
        if len(own) != heads:
            here = _heads_here(known, name, len(own))
            own = own.new_full((heads,), -torch.inf).index_copy(0, here.to(own.device), own)
        before = self._told.get(name)
        self._told[name] = own if before is None else torch.maximum(before.to(own), own)

    def _name(self, layer: str | nn.Module) -> str:
        if isinstance(layer, str) and layer in self._layers:
            return layer
        for name, known in self._layers.items():
            if known.module is layer:
                return name
        what = repr(layer) if isinstance(layer, str) else f"this {type(layer).__name__}"
        raise KeyError(f"{what} is no layer of this QKClip, which has {some(list(self._layers))}")

    def _largest(self) -> dict[str, Tensor]:
        """Return each layer's largest logits over all ranks, (heads,), by one joint all-reduce."""
        told, self._told = self._told, {}
        vectors = []
        for name, layer in self._layers.items():
            vector = torch.full((layer.heads.heads,), -torch.inf, dtype=torch.float64)
            vectors.append(told.get(name, vector).to(self._device, torch.float64))
        # A maximum may lose a NaN on its way: as infinity it arrives.
        values = torch.cat(vectors).nan_to_num(torch.inf, torch.inf, -torch.inf)
        for group in self.opt.rank_groups:
            values = maximum("largest attention logits", values, group).wait()
        sizes = [len(vector) for vector in vectors]
        return dict(zip(self._layers, torch.split(values.cpu(), sizes), strict=True))

    # --- the step ----------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> dict[str, Tensor]:
        """Scale the heads whose logits exceed tau; call it after `opt.step()`, on every rank.

        Return every layer's largest logits, (heads,), before the scaling. Raise on every rank if
        a logit is not finite, or if a layer reported none and `strict` is on: nothing is scaled
        then. The host waits for the logits.
        """
        found = self._largest()
        for name, largest in found.items():
            self._check(name, largest)
        factors: dict[str, Tensor] = {}
        for name, layer in self._layers.items():
            gamma = torch.where(found[name] > self.tau, self.tau / found[name], 1.0)
            if bool((gamma < 1).any()):
                table = self._table(gamma, layer.heads)
                factors |= {one.name: one.factors(table) for one in layer.scaled}
        if factors:
            self.opt.scale_parameters(factors)
        return found

    def _check(self, name: str, largest: Tensor) -> None:
        broken = largest.isposinf().nonzero().flatten().tolist()
        if broken:
            raise ValueError(
                f"the largest attention logit of {name!r} is not finite on some rank, "
                f"in head {', '.join(map(str, broken))}: nothing was scaled. Load an "
                "earlier checkpoint"
            )
        silent = largest.isneginf().nonzero().flatten().tolist()
        if silent and self.strict:
            raise ValueError(
                f"{name!r} reported no attention logits since the last step, of head "
                f"{', '.join(map(str, silent))}: "
                f"{_why_silent(self._layers[name].module)}. Report them with "
                "clip.observe(layer, logits); with strict=False such layers are not "
                "clipped"
            )

    def _table(self, gamma: Tensor, heads: QKHeads) -> Tensor:
        """Return [1, factors of queries (H), keys (G), rotary queries (H)] for gamma (H,)."""
        groups = gamma.view(heads.kv_heads, -1)
        if self.gamma_of == "group":
            groups = groups.amin(1, keepdim=True).expand_as(groups)
        keys = groups.amin(1, keepdim=True) ** (1 - self.alpha)
        parts = (gamma.new_ones(1), groups / keys, keys, groups)
        return torch.cat([part.flatten() for part in parts])


def _why_silent(module: nn.Module) -> str:
    """Return the reason why an attention layer may have reported no logits."""
    how = getattr(getattr(module, "config", None), "_attn_implementation", "sdpa")
    if how != "sdpa":
        return (
            f"its model is built with attn_implementation={how!r}, which makes no call that can be "
            "seen: build the model with attn_implementation='sdpa'"
        )
    return (
        "it has not run in training mode, or clip.step() was called twice, or it was replaced "
        "after QKClip was built, or is compiled, or a copy of the model ran, or it is a parent "
        "whose own forward does not run, or it does not call "
        "torch.nn.functional.scaled_dot_product_attention"
    )


def _heads_here(layer: _Layer, name: str, count: int) -> Tensor:
    """Return the heads that this rank computes, from its rows of the query weights."""
    found: set[int] = set()
    for own, param in layer.module.named_parameters():
        weight = whole_name(without_wrappers(own))
        if weight in layer.heads.weights and isinstance(param, DTensor):
            part, box = rows_in(without_wrappers(own)), box_in_forward(param)
            dim = int(layer.heads.transposed)
            start = box.offsets[dim] + (0 if part is None else part.start)
            found |= set(layer.heads.query_heads(weight, start, start + box.sizes[dim]))
    if len(found) != count:
        here = f", of which this rank's parameters have {len(found)}" if found else ""
        raise ValueError(
            f"{name!r} reported attention logits of {count} "
            f"{'head' if count == 1 else 'heads'}, and the layer has "
            f"{layer.heads.heads}{here}: give a tensor of all heads, with -inf for "
            "those of other ranks; attention that computes head by head must report "
            "all at once, with watch=False and clip.observe(layer, logits)"
        )
    return torch.tensor(sorted(found))


# --- which modules and parameters -----------------------------------------------------------------


def _require_heads_by_name(layers: Mapping[str, QKHeads]) -> None:
    """Raise an error unless `layers` maps patterns of names to QKHeads."""
    example = 'layers={"blocks.*.attn": samestep.QKHeads.separate(32, 128, kv_heads=8)}'
    if not isinstance(layers, Mapping):
        raise TypeError(
            "layers must map names of attention modules to their heads, as in "
            f"{example}, got {layers!r}"
        )
    if not layers:
        raise ValueError(
            f"layers is empty, so that nothing would be clipped: give at least one, as in {example}"
        )
    for pattern, heads in layers.items():
        if not isinstance(heads, QKHeads):
            raise TypeError(
                f"layers[{pattern!r}] is {heads!r}, and must be a QKHeads, as in {example}"
            )


def _found(
    opt: RuleOptimizer, model: nn.Module, layers: Mapping[str, QKHeads]
) -> dict[str, _Layer]:
    """Return the modules that patterns match, with their parameters in the optimizer."""
    names = {param: name for _, name, param in members(opt.param_groups)}
    modules = {without_wrappers(n): module for n, module in unwrapped(model).named_modules()}
    found: dict[str, _Layer] = {}
    scaled_by: dict[str, str] = {}
    for pattern, heads in layers.items():
        matched = [name for name in modules if name and name_matches(name, pattern)]
        if not matched:
            others = some([name for name in modules if name])
            raise ValueError(f"no module of the model matches {pattern!r}; it has {others}")
        fitting = [name for name in matched if not _lacking(modules[name], heads)]
        for name in matched:
            if fitting and name not in fitting:
                raise ValueError(
                    f"{pattern!r} also matches {name!r} (a * crosses dots), which has "
                    f"no {_lacking(modules[name], heads)[0]!r}: use a pattern that "
                    "matches only attention modules, such as "
                    f"{some(list(map(repr, fitting)))}, or their full names"
                )
            if name in found:
                raise ValueError(
                    f"{name!r} is matched by {pattern!r} and by an earlier pattern: let "
                    "only one match it"
                )
            found[name] = _Layer(modules[name], heads, _scaled(name, modules[name], heads, names))
            for one in found[name].scaled:
                other = scaled_by.setdefault(one.name, name)
                if other != name:
                    raise ValueError(
                        f"{one.name!r} is a weight of {other!r} and of {name!r}, and "
                        "would be scaled twice: QK-clip does not support weights that "
                        "layers share"
                    )
    return found


def _lacking(module: nn.Module, heads: QKHeads) -> list[str]:
    """Return the names of the heads' weights that a module lacks."""
    there = {whole_name(without_wrappers(path)) for path, _ in module.named_parameters()}
    return [name for name in heads.weights if name not in there]


def _scaled(
    layer: str, module: nn.Module, heads: QKHeads, names: Mapping[Tensor, str]
) -> tuple[_Scaled, ...]:
    """Return the query and key weights of a layer, and their biases."""
    found = []
    wanted = {name: name for name in heads.weights}
    wanted |= {f"{name.removesuffix('weight')}bias": name for name in heads.weights}
    rows_seen = dict.fromkeys(heads.weights, 0)
    for path, param in module.named_parameters():
        own = without_wrappers(path)
        weight = wanted.get(whole_name(own))
        if weight is None:
            continue
        if param not in names:
            raise ValueError(
                f"{layer}.{own} is not a parameter of the optimizer, which must scale "
                "it: give the optimizer the same model, unfrozen, and build QKClip "
                "after wrapping it; where it is frozen on purpose, as with LoRA, pass "
                "layers= without this layer"
            )
        is_bias = param.ndim == 1
        transposed = heads.transposed and not is_bias
        rows = param.shape[-1 if transposed else 0]
        part = rows_in(own)
        start, stop = (0, heads.rows(weight)) if part is None else (part.start, part.stop)
        if stop - start != rows or stop > heads.rows(weight):
            has = f"has {rows} rows" if part is None else f"is rows {start} to {stop}"
            raise ValueError(
                f"{layer}.{own} {has}, but its QKHeads say {heads.rows(weight)} "
                f"({heads.told(weight)}, of heads={heads.heads} and kv_heads={heads.kv_heads})"
            )
        rows_seen[weight] += 0 if is_bias else rows
        places = torch.tensor(heads.places(weight)[start:stop])
        shape = (rows,) if is_bias else (1, rows) if transposed else (rows, 1)
        if bool(places.any()):  # not of values alone
            found.append(_Scaled(names[param], places, shape))
    for weight, rows in rows_seen.items():
        if rows != heads.rows(weight):
            raise ValueError(
                f"{layer!r} has no weight {weight!r}, or not all of it; it has "
                f"{some([name for name, _ in module.named_parameters()])}"
            )
    return tuple(found)
