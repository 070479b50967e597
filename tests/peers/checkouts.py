"""Modules of other libraries, loaded from checkouts and run in the dtype of the test.

SAMESTEP_PEERS is a folder with a checkout per library, each under the name of its repository:
dion, nanochat, torchtitan, Megatron-LM, Emerging-Optimizers, DeepSpeed, Moonlight, Muon, SOAP.

Most orthogonalize in bfloat16 or insist on float32, where nothing can be told apart. So their
source is read as it is but for the names of dtypes: `torch.bfloat16`, `torch.float16`,
`torch.float32`, `.bfloat16()` and `.float()` all become the dtype of the test. What their modules
import beside the math (loggers, process groups, data sets) is replaced by stubs.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import sys
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

FOLDER = os.environ.get("SAMESTEP_PEERS")
NARROW = re.compile(r"torch\.(bfloat16|float16|float32)\b|\.(bfloat16|float)\(\)")
# Where each top-level package lies; packages whose own __init__ would import too much are bare.
PACKAGES = {
    "muon": "Muon",
    "soap": "SOAP",
    "toy_train": "Moonlight/examples",
    "nanochat": "nanochat",
    "dion": "dion",
    "emerging_optimizers": "Emerging-Optimizers",
    "megatron": "Megatron-LM",
    "torchtitan": "torchtitan",
    "deepspeed": "DeepSpeed",
}
BARE = ("dion", "nanochat", "megatron", "torchtitan", "deepspeed")


def folder(name: str) -> Path:
    """Of a checkout; raises if it is not there."""
    found = Path(FOLDER or "") / name
    if not FOLDER or not found.is_dir():
        raise FileNotFoundError(f"no checkout {found}: set PEERS to a folder that has it")
    return found


def widened(source: str, dtype: torch.dtype) -> str:
    """A source with the test's dtype in the place of theirs."""
    name = str(dtype)
    return NARROW.sub(lambda found: name if found[1] else f".to({name})", source)


class _Loader(importlib.abc.Loader):
    def __init__(self, path: Path | None, dtype: torch.dtype) -> None:
        self.path, self.dtype = path, dtype

    def exec_module(self, module: ModuleType) -> None:
        if self.path is not None:
            source = widened(self.path.read_text(), self.dtype)
            exec(compile(source, str(self.path), "exec"), module.__dict__)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        top = fullname.partition(".")[0]
        if top not in PACKAGES:
            return None
        place = folder(PACKAGES[top]).joinpath(*fullname.split("."))
        if place.is_dir():
            own: Path | None = place / "__init__.py"
            if top in BARE or own is None or not own.exists():
                own = None
            spec = importlib.util.spec_from_loader(
                fullname, _Loader(own, self.dtype), is_package=True
            )
            assert spec is not None
            spec.submodule_search_locations = [str(place)]
            return spec
        own = place.with_suffix(".py")
        if not own.exists():
            return None
        return importlib.util.spec_from_loader(fullname, _Loader(own, self.dtype))


class _Anything(ModuleType):
    """A module whose every name is there, and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **options: None


class _Accelerator:
    """DeepSpeed's of a machine without 16 bits: it multiplies in float32, which is the test's."""

    def is_bf16_supported(self) -> bool:
        return False

    def is_fp16_supported(self) -> bool:
        return False


def _stubs(dtype: torch.dtype) -> dict[str, ModuleType]:
    names = (
        "absl", "absl.logging", "loguru", "datasets", "transformers", "tqdm",
        "megatron.core.process_groups_config", "megatron.core.utils",
        "megatron.core.optimizer.optimizer_config", "emerging_optimizers.soap",
        "deepspeed.comm", "deepspeed.runtime.compiler", "deepspeed.accelerator",
        "nanochat.common", "emerging_optimizers.registry",
    )  # fmt: skip
    found: dict[str, Any] = {name: _Anything(name) for name in names}
    found["absl"].logging = found["absl.logging"]
    found["nanochat.common"].COMPUTE_DTYPE = dtype
    found["deepspeed.runtime.compiler"].compile = lambda *args, **options: lambda function: function
    found["deepspeed.accelerator"].get_accelerator = _Accelerator
    found["emerging_optimizers.soap"].SOAP = object
    # Written for Python 3.12, and a list of names alone.
    registry = found["emerging_optimizers.registry"]
    registry.register_optimizer = lambda name: lambda cls: cls
    registry.get_optimizer_name_list = list
    utils = found["megatron.core.utils"]
    utils.get_pg_size, utils.get_pg_rank = (lambda group: 1), (lambda group: 0)
    utils.is_emerging_optimizers_min_version = lambda version: True
    return found


@contextmanager
def importable(dtype: torch.dtype) -> Iterator[None]:
    """Inside, the peers' modules can be imported, run in a dtype and are not compiled."""
    with torch.compiler.set_stance("force_eager"), _stubbed(dtype):
        yield


@contextmanager
def _stubbed(dtype: torch.dtype) -> Iterator[None]:
    finder, stubs = _Finder(dtype), _stubs(dtype)
    before, default = dict(sys.modules), torch.get_default_dtype()
    sys.meta_path.insert(0, finder)
    sys.modules.update(stubs)
    torch.set_default_dtype(dtype)  # they make tensors of their options
    new = not hasattr(typing, "override")
    if new:  # Python 3.11, and some are for 3.12
        typing.override = lambda method: method  # type: ignore[attr-defined, unused-ignore]
    try:
        yield
    finally:
        if new:
            del typing.override  # type: ignore[attr-defined, unused-ignore]
        torch.set_default_dtype(default)
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - set(before):
            if name.partition(".")[0] in {*PACKAGES, *(stub.partition(".")[0] for stub in stubs)}:
                del sys.modules[name]
        for name in stubs:
            if name in before:
                sys.modules[name] = before[name]


def torchs_muon(dtype: torch.dtype) -> ModuleType:
    """The module of torch.optim.Muon, likewise."""
    path = Path(torch.optim.__file__).with_name("_muon.py")
    module = ModuleType("torch.optim.muon_of_the_test")
    module.__package__ = "torch.optim"
    exec(compile(widened(path.read_text(), dtype), str(path), "exec"), module.__dict__)
    return module
