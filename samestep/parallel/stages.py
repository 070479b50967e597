"""Cuts a model into pipeline stages without renaming its parameters."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samestep.groups.routing import Elsewhere
from samestep.groups.tied import set_places


class StagePlanError(ValueError):
    """Raised for a model that cannot be cut as the plan says."""


@dataclass(frozen=True)
class StagePlan:
    """How a model is cut into stages, and how a stage runs its part.

    blocks: Name of the module whose members are spread over the stages, in order.
    first: Names of the modules of the first stage: from inputs to what blocks take.
    last: Names of the modules of the last stage: from what blocks give to outputs.
    enter: (model, inputs) to x; if not given, the modules of `first` in turn.
    block: (model, block, x, inputs) to x; if not given, block(x). `inputs` are those of the
        micro-batch, on every stage.
    leave: (model, x) to outputs; if not given, the modules of `last` in turn.

    Only one tensor goes from stage to stage. `check` compares the plan with the model's forward.
    """

    blocks: str = "blocks"
    first: tuple[str, ...] = ("embedding",)
    last: tuple[str, ...] = ("norm", "head")
    enter: Callable[[Any, Tensor], Tensor] | None = None
    block: Callable[[Any, nn.Module, Tensor, Tensor], Tensor] | None = None
    leave: Callable[[Any, Tensor], Tensor] | None = None

    def run(self, model: nn.Module, x: Tensor, inputs: Tensor) -> Tensor:
        """Run the modules of this stage in turn; the first stage is given the inputs."""
        if _is_here(model, self.first):
            x = self._in_turn(model, self.first, x) if self.enter is None else self.enter(model, x)
        for block in model.get_submodule(self.blocks).children():
            if not isinstance(block, Elsewhere):
                x = block(x) if self.block is None else self.block(model, block, x, inputs)
        if _is_here(model, self.last):
            x = self._in_turn(model, self.last, x) if self.leave is None else self.leave(model, x)
        return x

    @torch.no_grad()
    def check(self, model: nn.Module, inputs: Tensor) -> None:
        """Raise unless the stages compute what the model's forward does.

        Before the model is cut, in evaluation mode: where nothing is drawn at random.
        """
        stage_of_modules(model, self, 1)
        own, planned = model(inputs), self.run(model, inputs, inputs)
        if own.shape != planned.shape or not torch.equal(own, planned):
            found = f"{tuple(planned.shape)} instead of {tuple(own.shape)}"
            if own.shape == planned.shape:
                found = f"up to {(own - planned).abs().max().item():.3g} away"
            raise StagePlanError(
                "the stages together compute something else than the model's forward "
                f"(outputs are {found}): pass enter=, block= or leave= functions that "
                "use the modules as forward does"
            )

    @staticmethod
    def _in_turn(model: nn.Module, names: tuple[str, ...], x: Tensor) -> Tensor:
        for name in names:
            x = model.get_submodule(name)(x)
        return x


def _is_here(model: nn.Module, names: tuple[str, ...]) -> bool:
    return not any(isinstance(model.get_submodule(name), Elsewhere) for name in names)


def spread(blocks: int, stages: int) -> list[range]:
    """Blocks of each stage: even up to one, fewer at the ends.

    The first stage has the embedding too, the last one the head.
    """
    if blocks < stages:
        raise StagePlanError(
            f"{blocks} blocks cannot be divided over {stages} pipeline stages: use at "
            f"most {blocks} stages"
        )
    least, more = divmod(blocks, stages)
    start = (stages - more) // 2
    sizes = [least + (start <= stage < start + more) for stage in range(stages)]
    bounds = [sum(sizes[:stage]) for stage in range(stages + 1)]
    return [range(*bounds[stage : stage + 2]) for stage in range(stages)]


def stage_of_modules(model: nn.Module, plan: StagePlan, stages: int) -> dict[str, int]:
    """The stage of every module that is in one stage alone; all parameters are in some of them."""
    blocks = _module(model, plan.blocks, "blocks")
    names = [name for name, _ in blocks.named_children()]
    found = dict.fromkeys(plan.first, 0) | dict.fromkeys(plan.last, stages - 1)
    for name in found:
        _module(model, name, "first" if found[name] == 0 else "last")
    for stage, members in enumerate(spread(len(names), stages)):
        found |= {f"{plan.blocks}.{names[number]}": stage for number in members}
    for name, _ in model.named_parameters(remove_duplicate=False):
        if not any(name.startswith(f"{part}.") for part in found):
            raise StagePlanError(
                f"parameter {name!r} is in none of the plan's blocks, first and last: "
                "name its module there; a parameter of the model itself must be moved "
                "into a module"
            )
    return found


class Tie(NamedTuple):
    """One parameter under several names, in modules of different stages."""

    param: nn.Parameter
    names: tuple[str, ...]
    kinds: tuple[type[nn.Module], ...]  # of the modules that hold it
    stages: tuple[int, ...]


def ties_of(model: nn.Module, of_module: Mapping[str, int]) -> list[Tie]:
    """Parameters shared by modules of different stages."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    found = []
    for param, own in names.items():
        stages = [next(s for part, s in of_module.items() if _in(name, part)) for name in own]
        if len(set(stages)) > 1:
            kinds = [type(model.get_submodule(name.rpartition(".")[0])) for name in own]
            found.append(Tie(param, tuple(own), tuple(kinds), tuple(stages)))
    return found


def _in(name: str, part: str) -> bool:
    return name.startswith(f"{part}.")


def tie(
    stage: nn.Module,
    *names: str,
    places: Iterable[int],
    kind: type[nn.Module] = nn.Embedding,
) -> None:
    """Declare that a parameter of this stage is also a parameter of other stages.

        tie(stage, "embedding.weight", "head.weight", places=(0, 3))

    Every stage that has one of the names calls it, before the optimizer is made, with the same
    arguments. The parameter goes by the first name, in `opt.table()` and checkpoints, and a model's
    state dict has all of them, as in a model that is not cut.

    Args:
        stage: What this rank has of the model. Where another stage has a module, there is none.
        names: Of one parameter in the whole model.
        places: The ranks of the pipeline, by their place in it, whose stages have the parameter.
        kind: The class of the module that the first name is in, which decides its role.
    """
    params = dict(stage.named_parameters(remove_duplicate=False))
    here = [name for name in names if name in params]
    if len(here) != 1:
        raise StagePlanError(
            f"tie: this stage has {' and '.join(map(repr, here)) or 'none'} of "
            f"{', '.join(names)}: call it on the stages that have one of them, with the "
            "name that each has there"
        )
    param = params[here[0]]
    for number, name in enumerate(names):
        path, _, key = name.partition(".")
        if not key:
            raise StagePlanError(
                f"tie: {name!r} is no parameter's name of the form module.parameter"
            )
        if name == here[0]:
            continue
        try:
            module = stage.get_submodule(path)
        except AttributeError:
            module = Elsewhere(nn.Module())
            others = list(stage._modules.items())
            stage.add_module(path, module)
            if number == 0:  # the first module that has a parameter gives it its name
                for other, _ in others:
                    stage._modules[other] = stage._modules.pop(other)
        if not isinstance(module, Elsewhere):
            raise StagePlanError(f"tie: {path!r} is in this stage, and has no parameter {key!r}")
        module.share(key, param, kind if number == 0 else nn.Module)
    set_places(param, places)


def _module(model: nn.Module, name: str, part: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        children = ", ".join(child for child, _ in model.named_children())
        raise StagePlanError(
            f"{part}: the model has no module {name!r}; it has {children}"
        ) from None


def cut(
    model: nn.Module, plan: StagePlan, stages: int, mine: Sequence[int], ranks: int = 0
) -> list[nn.Module]:
    """Remove modules of other stages from the model; returns the stages in `mine`.

    The parts are views: they share modules and parameters with the model, and have the names of
    the whole. A single part is the model itself. Their forward takes (x, inputs).

    ranks: of the pipeline, which have the stages in turn; 0: as many as stages.
    """
    of_module = stage_of_modules(model, plan, stages)
    ties = ties_of(model, of_module)
    for name, stage in of_module.items():
        if stage not in mine:
            model.set_submodule(name, Elsewhere(model.get_submodule(name)))
    for found in ties:
        places = {stage % (ranks or stages) for stage in found.stages}
        if len(places) == 1 or not set(mine) & set(found.stages):
            continue
        for name, kind in zip(found.names, found.kinds, strict=True):
            path = next(part for part in of_module if _in(name, part))
            module = model.get_submodule(path)
            if isinstance(module, Elsewhere):
                module.share(name.removeprefix(f"{path}."), found.param, kind)
        set_places(found.param, places)
    parts = [model]
    if len(mine) > 1:
        parts = [view_of(model, of_module) for _ in mine]
        for stage, part in zip(mine, parts, strict=True):
            for name, its_stage in of_module.items():
                if its_stage != stage and its_stage in mine:
                    part.set_submodule(name, Elsewhere(part.get_submodule(name)))
    for part in parts:
        # Not a module around it: FSDP2 and torch's stages look at the outermost one.
        part.forward = partial(plan.run, part)
    return parts


def view_of(module: nn.Module, names: Iterable[str]) -> nn.Module:
    """A shallow copy of a module, whose members can be replaced."""
    paths = [name.split(".") for name in names]
    # The modules on the way to those that are replaced; "" is the model.
    return _view(module, {".".join(path[:n]) for path in paths for n in range(len(path))})


def _view(module: nn.Module, to_copy: set[str], name: str = "") -> nn.Module:
    view = copy.copy(module)
    view._modules, view._parameters = dict(module._modules), dict(module._parameters)
    for key, child in module._modules.items():
        path = f"{name}.{key}" if name else key
        if child is not None and path in to_copy:
            view._modules[key] = _view(child, to_copy, path)
    return view
