"""A model of the user's own for the harness: found, tried, and refused in one line if need be."""

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

import samestep
from samestep.stress.models import named_params
from samestep.stress.scenario import RATES, MakeModel
from samestep.tooling.factories import in_one_line, named_function
from samestep.tooling.request import BadRequestError

MOST_ELEMENTS = 4_000_000  # the reference computes singular values of every matrix at every step


def own_model(path: str, make: MakeModel | None, seed: int) -> MakeModel:
    """A function that gives the model again and again; `make` is None for `path` to be looked up.

    The factory runs twice, here and now: ranks get copies, so that a slow one holds up nobody.
    """
    make = make or _factory(path)
    first, second = _made(make, path, seed), _made(make, path, seed)
    _check(first, path)
    _compare(named_params(first), named_params(second), path)
    options: dict[str, Any] = dict(RATES)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            samestep.MuonAdamW(copy.deepcopy(first), **options)
    except Exception as error:
        raise BadRequestError(f"--model {path}: {in_one_line(error)}") from error
    return lambda: copy.deepcopy(first)


def _factory(path: str) -> MakeModel:
    """The function that `module:name` or `file.py:name` means."""
    where, colon, name = path.rpartition(":")
    if not colon or not where or not name:
        raise BadRequestError(
            f"--model {path!r} is not tiny, gpt or PATH:FACTORY, such as mymodels:make_model"
        )
    return named_function(path, "--model")


def _made(make: MakeModel, path: str, seed: int) -> nn.Module:
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: Any = make()
    except (Exception, SystemExit) as error:
        raise BadRequestError(f"--model {path}: {in_one_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise BadRequestError(f"--model {path} gave a {type(model).__name__}, not a torch module")
    return model


def _check(model: nn.Module, path: str) -> None:
    """Refuse what the harness cannot run on."""
    params = {n: p for n, p in named_params(model).items() if p.requires_grad}
    if not params:
        raise BadRequestError(f"--model {path} gave a module without trainable parameters")
    for name, param in params.items():
        problem = _problem(param)
        if problem is not None:
            raise BadRequestError(f"--model {path}: parameter {name!r} {problem}")
    count = sum(param.numel() for param in params.values())
    if count > MOST_ELEMENTS:
        raise BadRequestError(
            f"--model {path} has {count:,} trainable elements, and the float64 reference is made "
            f"for {MOST_ELEMENTS:,} at most: give a smaller configuration of it"
        )


def _problem(param: Tensor) -> str | None:
    if is_lazy(param):
        return "is lazy: call the model once before it is returned"
    if param.device.type != "cpu":
        return f"is on {param.device.type!r}: the harness needs it on the CPU, with values"
    if param.dtype != torch.float32:
        return f"is {str(param.dtype).removeprefix('torch.')}: the harness needs float32 parameters"
    if param.layout != torch.strided:
        return f"is {str(param.layout).removeprefix('torch.')}: the harness needs dense parameters"
    if not param.is_contiguous():
        return "is not contiguous: give it as .contiguous()"
    return None


def _compare(first: dict[str, nn.Parameter], second: dict[str, nn.Parameter], path: str) -> None:
    """Every rank and every layout has to begin alike."""
    if first.keys() != second.keys():
        raise BadRequestError(f"--model {path} gave parameters of other names at its second call")
    for name, param in first.items():
        if not torch.equal(param, second[name]):
            raise BadRequestError(
                f"--model {path} gave another {name!r} at its second call under the same "
                "torch.manual_seed: draw from torch's generator alone"
            )
