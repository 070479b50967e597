"""MODEL of the command: a preset, a config.json, or a function; always on the meta device."""

import copy
import difflib
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from samestep.estimate.hf_config import read_config
from samestep.estimate.shapes import SHAPES, Shape, build
from samestep.groups.elsewhere import Elsewhere
from samestep.parallel.stages import spread
from samestep.tooling.factories import in_one_line, named_function
from samestep.tooling.request import BadRequestError

EXPERT_PART = "experts"  # of the name of a 3-D stack


@dataclass(frozen=True)
class Model:
    """What is planned. `shape` is None for a factory's."""

    name: str
    source: str
    module: nn.Module
    shape: Shape | None

    @property
    def parameters(self) -> int:
        """Elements."""
        return sum(param.numel() for param in self.module.parameters())


def load_model(text: str, dtype: torch.dtype) -> Model:
    """Raises BadRequestError, in one line."""
    if text in SHAPES:
        shape = SHAPES[text]
        return Model(text, shape.source, build(shape, dtype), shape)
    if text.endswith(".json"):
        shape = read_config(Path(text))
        return Model(shape.name, shape.source, build(shape, dtype), shape)
    if ":" in text:
        return Model(text, "built by this function on the meta device", _made(text, dtype), None)
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
                f"MODEL {path}: parameter {name!r} is on {param.device.type!r} and would take "
                "memory: let the factory leave devices to its caller"
            )
    return module.to(dtype)


def is_expert(name: str, param: Tensor) -> bool:
    """Whether it is a stack of experts, which the expert axis cuts."""
    return param.ndim == 3 and EXPERT_PART in name


def layers_of(module: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """The list of layers: that with the most parameters."""
    lists = {name: m for name, m in module.named_modules() if isinstance(m, nn.ModuleList)}
    if not lists:
        return None
    return max(lists.items(), key=lambda item: sum(p.numel() for p in item[1].parameters()))


def stage_of(module: nn.Module, stage: int, stages: int) -> nn.Module:
    """A pipeline stage: its layers, with what comes before them in the first, after in the last."""
    if stages == 1:
        return module
    found = layers_of(module)
    if found is None or len(found[1]) < stages:
        count = 0 if found is None else len(found[1])
        raise BadRequestError(f"pp={stages} needs as many layers, and the model has {count}")
    path, _ = found
    own = shallow(module)
    layers = own_submodule(own, path)
    assert isinstance(layers, nn.ModuleList)
    here = spread(len(layers), stages)[stage]
    for number, layer in enumerate(list(layers)):
        if number not in here:
            layers[number] = Elsewhere(layer)
    before = True
    for name, _ in list(module.named_parameters(remove_duplicate=False)):
        if name.startswith(f"{path}."):
            before = False
        elif (stage > 0) if before else (stage < stages - 1):
            _take_out(own, name)
    return own


def _take_out(own: nn.Module, name: str) -> None:
    """A parameter of another stage, or rather its module: that tells routing what was there."""
    owner, _, last = name.rpartition(".")
    above, _, child = owner.rpartition(".")
    if not owner:
        setattr(own, last, None)
    elif not isinstance(own.get_submodule(owner), Elsewhere):
        setattr(own_submodule(own, above), child, Elsewhere(own.get_submodule(owner)))


def shallow(module: nn.Module) -> nn.Module:
    """Another module with the same parameters and children, of which it may get others."""
    other = copy.copy(module)
    other._parameters = dict(module._parameters)
    other._modules = dict(module._modules)
    return other


def own_submodule(root: nn.Module, path: str) -> nn.Module:
    """A child of a shallow copy, made a shallow copy too, and all on the way to it."""
    for part in filter(None, path.split(".")):
        child = root._modules[part]
        assert child is not None
        root._modules[part] = root = shallow(child)
    return root
