"""Matching: the recipe of a model, and what its lines say of each parameter."""

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from samestep.groups.param_groups import Group
from samestep.groups.routing import NamedParameter, routable, unwrapped
from samestep.layout.blocks import blocks_of
from samestep.layout.fused_rows import rows_in, whole_name, without_wrappers
from samestep.recipes.architectures import RECIPES, Line
from samestep.tooling.warn import warn_user

# A recipe by name, "auto", what is known by name of a parameter, or None for none.
Asked = str | Mapping[str, Group] | None


def overrides(model: nn.Module, recipe: Asked = "auto") -> dict[str, Group]:
    """The facts of a model's recipe by parameter, as `overrides=` takes them.

    For an optimizer that is given named parameters, which cannot tell of their model.
    """
    found = known_of(model, routable(model).parameters, recipe)
    return {
        name: {key: value for key, value in own.items() if key not in ("role", "reason")}
        for name, own in found.items()
    }


def known_of(
    model: nn.Module, parameters: Iterable[NamedParameter], recipe: Asked = "auto"
) -> dict[str, Group]:
    """By name of a parameter its group keys, "role" and "reason".

    A line that does not fit a parameter is left out with a warning: somebody has changed the model.
    """
    if isinstance(recipe, Mapping):
        return _as_given(recipe, parameters)
    found: dict[str, Group] = {}
    for path, kind, lines in _scopes(model, recipe):
        for name, param, _ in parameters:
            if not name.startswith(path):
                continue
            inside = whole_name(name.removeprefix(path))
            for line in lines:
                # A leading dot: patterns begin with one for whole parts of a name.
                if fnmatchcase(f".{inside}", line.pattern):
                    own = {**line.options, "reason": f"{kind}: {line.reason}"}
                    if _fits(name, param, own, kind):
                        found[name] = own
    return found


def _as_given(
    recipe: Mapping[str, Group], parameters: Iterable[NamedParameter]
) -> dict[str, Group]:
    unknown = sorted(recipe.keys() - {parameter.name for parameter in parameters})
    if unknown:
        raise ValueError(
            f"recipe: {unknown[0]!r} is no trainable parameter of the model: give full "
            "names in recipe=, and patterns in overrides="
        )
    return {name: dict(own) for name, own in recipe.items()}


def _fits(name: str, param: Tensor, own: Group, recipe: str) -> bool:
    if own.get("rule") == "adamw" or rows_in(name) is not None:
        return True
    try:
        blocks_of(
            tuple(param.shape), own.get("split_sizes"), transposed=own.get("transposed", False)
        )
    except ValueError as error:
        warn_user(
            f"recipe {recipe!r} does not fit {name} {tuple(param.shape)}, which {error}. It is "
            "routed by its name and shape; say what it is in overrides="
        )
        return False
    return True


def _scopes(model: nn.Module, recipe: str | None) -> Iterator[tuple[str, str, list[Line]]]:
    """Modules whose configuration has a recipe: path as in `configured`, recipe, its lines."""
    if recipe is None:
        return
    if recipe != "auto":
        if recipe not in RECIPES:
            raise ValueError(
                f"recipe {recipe!r} is not known; choose one of {sorted(RECIPES)}, or None"
            )
        config = getattr(unwrapped(model), "config", None)
        try:
            yield "", recipe, RECIPES[recipe](config)
        except AttributeError as error:
            raise ValueError(
                f"recipe {recipe!r} reads the model's configuration, and {error}: give the model a "
                "`config` with it, or use overrides="
            ) from error
        return
    for path, kind, config in configured(model):
        if kind in RECIPES:
            yield path, kind, RECIPES[kind](config)


def configured(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Modules that have a configuration: their path, its `model_type`, and itself.

    A path ends with a dot, or is empty. Every layer of a model may have its configuration: the
    outermost counts.
    """
    seen: list[tuple[str, int]] = []
    for name, module in unwrapped(model).named_modules():
        config = getattr(module, "config", None)
        kind = getattr(config, "model_type", None)
        path = f"{without_wrappers(name)}.".removeprefix(".")
        inside = any(path.startswith(outer) and of == id(config) for outer, of in seen)
        if isinstance(kind, str) and not inside:
            seen.append((path, id(config)))
            yield path, kind, config
