"""The MODEL of `samestep plan`: a preset, a config.json or a function, on the meta device.

A pipeline stage is a view of the model's module with some of its layers.
"""

import difflib
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from samestep.groups.routing import Elsewhere
from samestep.lab.estimate.configs import configured
from samestep.lab.estimate.decoder import SHAPES, Fused, Router, Shape, build, gpt_shape
from samestep.parallel.stages import spread, view_of
from samestep.tooling.request import BadRequestError, in_one_line, named_function

EXPERT_PART = "experts"  # of the name of a 3-D stack


@dataclass(frozen=True)
class Model:
    """A model to plan; `shape` is None if unknown, as of all factories but the example GPT's."""

    name: str
    source: str
    module: nn.Module
    shape: Shape | None

    @property
    def parameters(self) -> int:
        """Return the number of elements of all parameters."""
        return sum(param.numel() for param in self.module.parameters())

    @property
    def active_share(self) -> float:
        """Return the share of experts that a token chooses; 1.0 if unknown or without experts."""
        if self.shape is None or not self.shape.experts or not self.shape.active_experts:
            return 1.0
        return self.shape.active_experts / self.shape.experts

    def stage(self, stage: int, stages: int, per_rank: int = 1) -> nn.Module:
        """Return a pipeline stage as `stage_of` builds it; each stage is built only once."""
        key = stage, stages, per_rank
        if key not in self._stages:
            self._stages[key] = stage_of(self.module, *key)
        return self._stages[key]

    @cached_property
    def _stages(self) -> dict[tuple[int, int, int], nn.Module]:
        return {}


def load_model(text: str, dtype: torch.dtype) -> Model:
    """Load a preset, config.json or PACKAGE:FACTORY; raise BadRequestError if that fails."""
    if text in SHAPES:
        shape = SHAPES[text]
        return Model(text, shape.source, build(shape, dtype), shape)
    if text.endswith(".json"):
        found = configured(Path(text), dtype)
        return Model(found.name, found.source, found.module, found.shape)
    if ":" in text:
        module = _made(text, dtype)
        return Model(text, "built by this function on the meta device", module, _own_shape(module))
    close = difflib.get_close_matches(text, SHAPES, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise BadRequestError(
        f"MODEL {text!r} is no preset ({', '.join(SHAPES)}), config.json or PACKAGE:FACTORY{hint}"
    )


def _made(path: str, dtype: torch.dtype) -> nn.Module:
    make = named_function(path, "MODEL")
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            module = make()
    except (Exception, SystemExit) as error:
        raise BadRequestError(
            f"MODEL {path} cannot be built on the meta device, where tensors have no values: "
            f"{in_one_line(error)}"
        ) from error
    if not isinstance(module, nn.Module):
        raise BadRequestError(f"MODEL {path} gave a {type(module).__name__}, not a torch module")
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not trainable:
        raise BadRequestError(f"MODEL {path} gave a module without trainable parameters")
    for name, param in trainable.items():
        if param.device.type != "meta":
            raise BadRequestError(
                f"MODEL {path}: parameter {name!r} is on {param.device.type!r} and "
                "would take memory: build the model without device= in the factory"
            )
    return module.to(dtype)


def _own_shape(module: nn.Module) -> Shape | None:
    """Return the shape of a factory's module if that is the example GPT, else None."""
    from samestep.models.gpt import GPT  # with DTensors, which take long to import

    return gpt_shape(module.config) if isinstance(module, GPT) else None


def is_expert(name: str, param: Tensor) -> bool:
    """Whether a parameter is a stack of experts, which the expert axis shards."""
    return param.ndim == 3 and EXPERT_PART in name


def known_options(module: nn.Module) -> tuple[dict[str, dict[str, str]], dict[str, list[int]]]:
    """Return `overrides` of routers and `split_sizes` of fused matrices, by parameter name."""
    named = list(module.named_modules())
    routers = {f"{path}.weight": {"rule": "adamw"} for path, m in named if isinstance(m, Router)}
    fused = {f"{path}.weight": m.split_sizes for path, m in named if isinstance(m, Fused)}
    return routers, {name: sizes for name, sizes in fused.items() if len(sizes) > 1}


def layers_of(module: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """Return the name and the `ModuleList` of the layers: the list with the most parameters."""
    lists = {name: m for name, m in module.named_modules() if isinstance(m, nn.ModuleList)}
    if not lists:
        return None
    return max(lists.items(), key=lambda item: sum(p.numel() for p in item[1].parameters()))


def stage_of(module: nn.Module, stage: int, stages: int, per_rank: int = 1) -> nn.Module:
    """Return a pipeline stage: its layers; the first and last also have modules around them.

    With several stages per rank, the module has all stages of rank `stage`: that one and every
    `stages`-th after it.
    """
    if stages * per_rank == 1:
        return module
    found = layers_of(module)
    if found is None or len(found[1]) < stages * per_rank:
        count = 0 if found is None else len(found[1])
        each = f" with {per_rank} stages per rank" if per_rank > 1 else ""
        raise BadRequestError(
            f"pp={stages}{each} needs at least as many layers, and the model has {count}"
        )
    path, layers = found
    spread_out = spread(len(layers), stages * per_rank)
    mine = [spread_out[number] for number in range(stage, stages * per_rank, stages)]
    away = [f"{path}.{layer}" for layer in range(len(layers)) if not any(layer in m for m in mine)]
    before = True
    for name, _ in module.named_parameters(remove_duplicate=False):
        if name.startswith(f"{path}."):
            before = False
        elif (stage > 0) if before else (stage < stages - 1):
            away.append(name.rpartition(".")[0] or name)
    away = [n for n in dict.fromkeys(away) if not any(n.startswith(f"{o}.") for o in away)]
    own = view_of(module, away)
    for name in away:
        if name in module._parameters:
            setattr(own, name, None)
        else:  # tells routing what was there
            own.set_submodule(name, Elsewhere(module.get_submodule(name)))
    return own
