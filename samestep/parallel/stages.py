"""Pipeline stages: which modules each has, cut out of the whole model without new names."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from samestep.groups.routing import Elsewhere


class StagePlanError(ValueError):
    """A model that cannot be cut as asked."""


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
        """What is here of a model, in turn. In the first stage `x` are the inputs."""
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
        """Raise unless the plan and the model's own forward make the same of some inputs.

        Before the model is cut, in evaluation mode: where nothing is drawn at random.
        """
        stage_of_modules(model, self, 1)
        own, planned = model(inputs), self.run(model, inputs, inputs)
        if own.shape != planned.shape or not torch.equal(own, planned):
            found = f"{tuple(planned.shape)} instead of {tuple(own.shape)}"
            if own.shape == planned.shape:
                found = f"up to {(own - planned).abs().max().item():.3g} away"
            raise StagePlanError(
                f"the plan does not do what the model's forward does (outputs are {found}): give "
                "enter, block or leave, the way in which forward uses these modules"
            )

    @staticmethod
    def _in_turn(model: nn.Module, names: tuple[str, ...], x: Tensor) -> Tensor:
        for name in names:
            x = model.get_submodule(name)(x)
        return x


def _is_here(model: nn.Module, names: tuple[str, ...]) -> bool:
    return not any(isinstance(model.get_submodule(name), Elsewhere) for name in names)


def spread(blocks: int, stages: int) -> list[range]:
    """The blocks of each stage; numbers differ by one at most, and the ends have the smaller ones.

    The first stage has the embedding too, the last one the head.
    """
    if blocks < stages:
        raise StagePlanError(
            f"{blocks} blocks cannot be spread over {stages} stages: take at most {blocks}"
        )
    least, more = divmod(blocks, stages)
    start = (stages - more) // 2
    sizes = [least + (start <= stage < start + more) for stage in range(stages)]
    bounds = [sum(sizes[:stage]) for stage in range(stages + 1)]
    return [range(*bounds[stage : stage + 2]) for stage in range(stages)]


def stage_of_modules(model: nn.Module, plan: StagePlan, stages: int) -> dict[str, int]:
    """The stage of every module that is in one stage alone; all parameters are in one of them."""
    blocks = _module(model, plan.blocks, "blocks")
    names = [name for name, _ in blocks.named_children()]
    found = dict.fromkeys(plan.first, 0) | dict.fromkeys(plan.last, stages - 1)
    for name in found:
        _module(model, name, "first" if found[name] == 0 else "last")
    for stage, members in enumerate(spread(len(names), stages)):
        found |= {f"{plan.blocks}.{names[number]}": stage for number in members}
    owner: dict[Tensor, tuple[str, int]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        stages_of_it = [s for part, s in found.items() if name.startswith(f"{part}.")]
        if not stages_of_it:
            raise StagePlanError(
                f"parameter {name!r} is in none of blocks, first and last: name its module in the "
                "plan, and if it has none, put it into one"
            )
        stage = stages_of_it[0]
        other, its_stage = owner.setdefault(param, (name, stage))
        if its_stage != stage:
            raise StagePlanError(
                f"{other!r} and {name!r} are one parameter, but stages {its_stage} and {stage} "
                "would have it: untie them, or take fewer stages"
            )
    return found


def _module(model: nn.Module, name: str, part: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        children = ", ".join(child for child, _ in model.named_children())
        raise StagePlanError(
            f"{part}: the model has no module {name!r}; it has {children}"
        ) from None


def cut(model: nn.Module, plan: StagePlan, stages: int, mine: Sequence[int]) -> list[nn.Module]:
    """Take what other stages have out of the model; gives the part of each of `mine`.

    The parts are views: they share modules and parameters with the model, and have the names of
    the whole. A single part is the model itself. Their forward takes (x, inputs).
    """
    of_module = stage_of_modules(model, plan, stages)
    for name, stage in of_module.items():
        if stage not in mine:
            model.set_submodule(name, Elsewhere(model.get_submodule(name)))
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
    """A module whose members of these names can be replaced, and the original's stay."""
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
